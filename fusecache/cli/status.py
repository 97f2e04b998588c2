"""`fusecache status`: one mount, or all of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, everywhere, print_json, setting_flags
from fusecache.cli.tables import print_table
from fusecache.errors import FusecacheError, MountError

STYLES = {"ready": "green", "starting": "yellow", "unknown": "yellow", "dead": "red", "hung": "red"}
ASK_S = 5.0
"""Seconds a mount may take to answer; it counts as not answering then."""

MOST_NAMED = 6
"""Capabilities of one process that are shown by name; root has some forty."""


@click.command(short_help="Show the state of one mount, or of all.")
@click.argument("mountpoint", required=False, type=PathName("dir"))
@setting_flags(("runtime_dir",))
@everywhere
def status(mountpoint: Path | None, common: Common, flags: dict[str, object]) -> None:
    """Show the state of the mount at MOUNTPOINT, or of all mounts of fusecache on this machine.

    Exit 3 when MOUNTPOINT is no mount of fusecache, or dead; without MOUNTPOINT always 0.

    \b
    Examples:
      fusecache status
      fusecache status /mnt/imagenet --json
    """
    from fusecache.daemon.mountpoint import find_mount, is_ours, our_mounts, remedy

    runtime_dir = common.configuration(flags).settings.runtime_dir
    if mountpoint is None:
        states = [state_of(mount, runtime_dir) for mount in our_mounts()]
        if common.as_json:
            print_json(states)
        else:
            _print_all(states)
        return
    mounted = find_mount(mountpoint)
    if mounted is None:
        raise MountError(f"{str(mountpoint)!r} is not mounted; `fusecache status` lists all mounts")
    if not is_ours(mounted):
        raise MountError(f"{str(mountpoint)!r} has {mounted.source!r} ({mounted.fs_type}) mounted on it, not fusecache")
    state = state_of(mounted, runtime_dir)
    if common.as_json:
        print_json(state)
    else:
        _print_one(state)
    if state["state"] in ("dead", "hung"):
        raise MountError(f"{str(mountpoint)!r} is {state['state']}; {remedy(state['state'], mountpoint)}")


def state_of(mount: Any, runtime_dir: Path) -> dict[str, Any]:
    """What the daemon says of itself, and `state`: ready, starting, dead, hung, or unknown (it can't be asked)."""
    from fusecache.daemon import control_client
    from fusecache.daemon.mountpoint import probe

    path = Path(os.fsdecode(mount.mountpoint))
    base: dict[str, Any] = {"mountpoint": str(path), "source": mount.source}
    try:
        answer = control_client.ask(mount, runtime_dir, "status", ASK_S)
    except FusecacheError as failure:
        health = probe(path, ASK_S)
        return {**base, "state": "unknown" if health == "ok" else health, "reason": str(failure)}
    return {**base, **answer, "state": "ready" if answer.get("ready") else "starting"}


def _print_all(states: list[dict[str, Any]]) -> None:
    if not states:
        click.echo("nothing is mounted by fusecache")
        return
    rows = []
    for state in states:
        summary = summary_of(state.get("metrics", {}))
        shown = (str(state[key]) for key in ("mountpoint", "source", "state"))
        rows.append((*shown, summary["requests"], summary["read"], summary["hits"]))
    print_table(("mount point", "source", "state", "requests", "read", "metadata hits"), rows, styles=STYLES)


def _print_one(state: dict[str, Any]) -> None:
    summary = summary_of(state.get("metrics", {}))
    for key, value in state.items():
        if key not in ("metrics", "ready", "parts", "features", "gate"):
            click.echo(f"{key.replace('_', ' '):<18} {for_people(value)}")
    unused = [f"{row['name']} ({row['why']})" for row in state.get("features", ()) if unusable(row)]
    if unused:
        click.echo(f"{'not used':<18} {'; '.join(unused)}")
    for key, text in summary.items():
        click.echo(f"{key:<18} {text}")
    if "redelivered" in (gate := state.get("gate") or {}):
        told = (("redelivered", "worker died"), ("given_twice", "worker blocked"))
        again = ", ".join(f"{gate[key]} ({why})" for key, why in told)
        ended = (("poisoned", "given up"), ("interrupted", "interrupted"), ("timed_out", "timed out"))
        without = ", ".join(f"{gate[key]} {how}" for key, how in ended)
        click.echo(f"{'given again':<18} {again}; {without}")
    if state.get("parts"):
        click.echo()
        rows = [
            (
                *(part["name"], for_people(part["pid"]), str(part["restarts"]), f"{part['uptime_s']:.0f} s"),
                *rights_shown(part.get("rights")),
            )
            for part in state["parts"]
        ]
        print_table(("part", "process", "restarts", "uptime", "user", "capabilities"), rows)


def for_people(value: object) -> str:
    """A value of the answer, which is JSON, in a line of text."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def rights_shown(rights: dict[str, Any] | None) -> tuple[str, str]:
    """A process's user, and its capabilities by name where they are few."""
    if rights is None:
        return "-", "-"
    names = rights["capabilities"]
    shown = ", ".join(names) or "none" if len(names) <= MOST_NAMED else f"{len(names)} of them"
    return f"{rights['uid']}:{rights['gid']}", shown


def unusable(feature: dict[str, Any]) -> bool:
    """Whether a feature of the kernel is missing or masked."""
    return bool(feature["masked"] or not feature["present"])


def summary_of(metrics: dict[str, float]) -> dict[str, str]:
    """The numbers people ask for first, of a snapshot of the metrics; of a mount that can't be asked there is none."""
    from fusecache.config.units import approximate_size

    if not metrics:
        return dict.fromkeys(("requests", "errors", "read", "hits", "open files"), "-")

    def total(name: str, *labels: str) -> float:
        wanted = [f"{name}{{" if not labels else f"{name}{{{label}}}" for label in labels or ("",)]
        return sum(value for cell, value in metrics.items() if cell.startswith(tuple(wanted)))

    read = total("fusecache_read_bytes_total")
    local = total("fusecache_read_bytes_total", "source=local_block", "source=read_buffer")
    lookups = total("fusecache_metadata_lookups_total")
    hits = lookups - total("fusecache_metadata_lookups_total", "result=miss")
    return {
        "requests": f"{total('fusecache_requests_total'):.0f}",
        "errors": f"{total('fusecache_request_errors_total'):.0f}",
        "read": f"{approximate_size(read)}" + (f" ({100 * local / read:.0f} % local)" if read else ""),
        "hits": f"{100 * hits / lookups:.0f} %" if lookups else "-",
        "open files": f"{metrics.get('fusecache_open_files', 0):.0f}",
    }
