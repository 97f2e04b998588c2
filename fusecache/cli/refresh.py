"""`fusecache refresh`."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import click

from fusecache.cli.arguments import Duration, PathName
from fusecache.cli.options import Common, everywhere, print_json, setting_flags
from fusecache.errors import UsageError


@click.command(short_help="List folders of a mount again now, and push what changed.")
@click.argument("paths", nargs=-1, required=True, type=PathName(), metavar="PATH...")
@click.option(
    "--timeout-s",
    type=Duration(1, 3600),
    default="2m",
    show_default=True,
    metavar="DURATION",
    help="Time before giving up.",
)
@setting_flags(("runtime_dir",))
@everywhere
def refresh(paths: tuple[Path, ...], timeout_s: float, common: Common, flags: dict[str, object]) -> None:
    """List each PATH (a folder of a mount; for a file its folder) again, comparing with the under storage.

    What changed is pushed into the kernel before this returns. For root and the user who mounted.

    \b
    Example, after another program has written into the folder:
      fusecache refresh /mnt/imagenet/train
    """
    from fusecache.daemon import control_client
    from fusecache.daemon.mountpoint import MountInfo, containing_mount, is_ours

    runtime_dir = common.configuration(flags).settings.runtime_dir
    by_mount: dict[MountInfo, list[str]] = defaultdict(list)
    for path in paths:
        found = containing_mount(path)
        if found is None or not is_ours(found[0]):
            raise UsageError(f"{str(path)!r} does not lie in a mount of fusecache; `fusecache status` lists them")
        by_mount[found[0]].append(os.fsdecode(found[1]))
    changed = folders = 0
    for mount, inside in by_mount.items():
        answer = control_client.ask(mount, runtime_dir, "refresh", timeout_s, paths=inside)
        changed += int(answer["changed"])
        folders += int(answer["folders"])
    if common.as_json:
        print_json({"folders": folders, "changed": changed})
    else:
        click.echo(f"{folders} folder(s) listed again, {changed} change(s)")
