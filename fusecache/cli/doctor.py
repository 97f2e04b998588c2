"""`fusecache doctor`: read-only checks of machine and cluster, each with what to change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusecache.cli.options import Common, cluster_flags, everywhere, print_json, setting_flags
from fusecache.cli.tables import print_table
from fusecache.errors import FusecacheError

if TYPE_CHECKING:
    from fusecache.config.load import Configuration
    from fusecache.daemon.machine_checks import Check
    from fusecache.daemon.mountpoint import MountInfo

ASK_S = 5.0
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(short_help="Check machine and cluster; say what to change.")
@click.argument("target", required=False, metavar="[SOURCE or MOUNTPOINT]")
@setting_flags(
    (
        *("state_dir", "runtime_dir", "max_open_blocks", "zero_rpc_reads", "open_mode", "kernel_features"),
        *("run_as_user", "run_as_group"),
    )
)
@cluster_flags
@everywhere
@click.pass_context
def doctor(context: click.Context, target: str | None, common: Common, flags: dict[str, Any]) -> None:
    """Check whether this machine can mount, and with SOURCE or MOUNTPOINT whether its cluster can be read well.

    Changes nothing. `fail` = a mount can't work, `warn` = it works, but slower or for fewer users.
    Exit 0 without a failure, 1 with one.

    \b
    Examples:
      fusecache doctor
      fusecache doctor alluxio://m1:19998,m2:19998/imagenet
      fusecache doctor /mnt/imagenet --json
    """
    common.quiet_logs()
    configuration = common.configuration(flags)
    checks = list(_checks(configuration, target))
    failed = any(check.verdict == "fail" for check in checks)
    if common.as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        rows = [(check.name, check.verdict, check.found) for check in checks]
        print_table(("check", "verdict", "found"), rows, styles=STYLES)
        for check in checks:
            if check.advice:
                click.echo(f"{check.name}: {check.advice}")
    context.exit(1 if failed else 0)


def _checks(configuration: Configuration, target: str | None) -> Iterator[Check]:
    from fusecache.daemon.machine_checks import machine_checks
    from fusecache.daemon.mountpoint import find_mount, is_ours

    mounted = find_mount(Path(target)) if target and "://" not in target else None
    if target is not None and not (mounted and is_ours(mounted)):
        # A wrong SOURCE is an error of the command line, told before anything is checked.
        cluster, folder, path = configuration.resolve(target)
        yield from machine_checks(configuration.settings)
        from fusecache.daemon.cluster_checks import cluster_checks

        yield from cluster_checks(cluster, folder, path, configuration.settings)
        return
    yield from machine_checks(configuration.settings)
    if mounted is not None:
        yield from _mount_checks(configuration, mounted)


def _mount_checks(configuration: Configuration, mounted: MountInfo) -> Iterator[Check]:
    """The mount itself, then the cluster it was mounted from, as its daemon sees it."""
    from fusecache.config.settings import ClusterConfig
    from fusecache.daemon import control_client
    from fusecache.daemon.cluster_checks import cluster_checks
    from fusecache.daemon.machine_checks import Check, check_parts
    from fusecache.daemon.mountpoint import probe, remedy

    path = Path(os.fsdecode(mounted.mountpoint))
    health = probe(path, ASK_S)
    yield Check("mount", "ok" if health == "ok" else "fail", f"{path} is {health}", remedy(health, path))
    try:
        runtime_dir = configuration.settings.runtime_dir
        status = control_client.ask(mounted, runtime_dir, "status", ASK_S)
        described = control_client.ask(mounted, runtime_dir, "config", ASK_S)["config"]
    except FusecacheError as failure:
        yield Check("daemon", "fail" if health != "ok" else "warn", str(failure), "see the daemon's log")
        return
    found = f"process {status['pid']}, up {status['uptime_s']:.0f} s"
    if status.get("ready"):
        yield Check("daemon", "ok", found)
    else:
        yield Check("daemon", "warn", f"{found}, starting", "wait: `fusecache wait` does")
    yield from check_parts(status.get("parts", ()))
    cluster = described["cluster"]
    if cluster is None:
        cluster = {"name": "embedded", "masters": [status["primary"]]}
    inside = str(mounted.source).partition("://")[2].partition("/")[2] if "://" in mounted.source else ""
    yield from cluster_checks(ClusterConfig(**cluster), None, b"/" + os.fsencode(inside), configuration.settings)
