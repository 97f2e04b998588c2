"""`fusecache umount`."""

from __future__ import annotations

from pathlib import Path

import click

from fusecache.cli.arguments import Duration, PathName
from fusecache.cli.options import Common, everywhere, print_json


@click.command(short_help="Unmount; dead and hung mounts too.")
@click.argument("mountpoint", type=PathName("dir"))
@click.option(
    "--timeout-s",
    type=Duration(0, 3600),
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="Wait this long for programs that have files open; then detach, so that they keep them.",
)
@everywhere
def umount(mountpoint: Path, timeout_s: float, common: Common) -> None:
    """Unmount MOUNTPOINT. Not mounted is fine; another file system's mount is refused.

    \b
    Examples:
      fusecache umount /mnt/imagenet
      fusecache umount --timeout-s 0 /mnt/imagenet     detach at once
    """
    from fusecache.daemon.mountpoint import unmount

    outcome = unmount(mountpoint, timeout_s)
    if common.as_json:
        print_json({"mountpoint": mountpoint, "outcome": outcome})
    elif outcome == "detached":
        click.echo(f"{mountpoint}: detached; programs that have files open keep them")
    else:
        click.echo(f"{mountpoint}: {outcome}")
