"""`fusecache log-level`."""

from __future__ import annotations

from pathlib import Path

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import LEVELS, Common, everywhere, print_json, setting_flags
from fusecache.errors import MountError

ASK_S = 5.0


@click.command("log-level", short_help="Change the log level of a running mount.")
@click.argument("mountpoint", type=PathName("dir"))
@click.argument("level", type=click.Choice(LEVELS), metavar="LEVEL")
@setting_flags(("runtime_dir",))
@everywhere
def log_level(mountpoint: Path, level: str, common: Common, flags: dict[str, object]) -> None:
    """Set the least severe LEVEL (debug, info, warning, error) that the daemon of MOUNTPOINT logs, until it ends. For
    root and the user who mounted.

    \b
    Example:
      fusecache log-level /mnt/imagenet debug
    """
    from fusecache.daemon import control_client
    from fusecache.daemon.mountpoint import find_mount, is_ours

    mounted = find_mount(mountpoint)
    if mounted is None or not is_ours(mounted):
        raise MountError(f"{str(mountpoint)!r} is no mount of fusecache; `fusecache status` lists them")
    runtime_dir = common.configuration(flags).settings.runtime_dir
    answer = control_client.ask(mounted, runtime_dir, "log_level", ASK_S, level=level)
    if common.as_json:
        print_json(answer)
    else:
        click.echo(f"{mountpoint}: log level {answer['level']}")
