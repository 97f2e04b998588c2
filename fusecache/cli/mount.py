"""`fusecache mount`: one mount, in the foreground or as a daemon. Flags are made from the table of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from fusecache.cli.arguments import PathName
from fusecache.cli.options import Common, cluster_flags, everywhere, json_text, print_json, setting_flags


@click.command(short_help="Mount a path of Alluxio, or a folder, at a mount point.")
@click.argument("source")
@click.argument("mountpoint", type=PathName("dir"))
@click.option("--daemon", is_flag=True, help="Return once reads work, and go on in the background.")
@click.option(
    "--log-file",
    type=PathName(),
    metavar="FILE",
    help="With --daemon: file the daemon logs to [default: a file in the state folder's logs].",
)
@setting_flags()
@cluster_flags
@everywhere
def mount(
    source: str, mountpoint: Path, daemon: bool, log_file: Path | None, common: Common, flags: dict[str, Any]
) -> None:
    """Mount SOURCE at MOUNTPOINT, read-only, until it is unmounted.

    \b
    SOURCE is one of
      alluxio://HOST:19998[,HOST:19998]/PATH   a path of a cluster, by its masters
      CLUSTER:/PATH                            a path of a cluster of the configuration file
      FOLDER                                   a folder, served by an embedded Alluxio-compatible server
    MOUNTPOINT is an empty folder. A dead mount left there by a killed daemon is replaced.

    \b
    Examples:
      fusecache mount ./photos /mnt/photos
      fusecache mount --daemon alluxio://m1:19998,m2:19998/imagenet /mnt/imagenet
      fusecache mount --daemon --immutable --user alice alluxio://m1:19998/coco /mnt/coco
      fusecache mount --config cluster.yaml train:/imagenet /mnt/imagenet

    In the foreground Ctrl-C unmounts. SIGHUP reads the configuration again, unless there is a terminal that the signal
    may come from: the mount goes on with the new one or, where that can't be used, with the old one.

    Exit codes: 2 a wrong argument, 3 the mount point, 4 the state folder, 6 Alluxio.
    """
    from fusecache.config.mount_command import MountCommand, present_folder
    from fusecache.errors import UsageError

    if log_file is not None and not daemon:
        raise UsageError(f"--log-file {str(log_file)!r} is for --daemon; in the foreground redirect standard error")
    command = MountCommand(
        common.config, common.given(flags), source=source, mountpoint=mountpoint, folder=present_folder()
    )
    plan = command.plan(os.environ)
    # By its own name and not through links: so it stands in mountinfo, by which every other command finds it.
    from fusecache.daemon.mountpoint import resolve

    plan = plan.model_copy(update={"mountpoint": Path(os.fsdecode(resolve(plan.mountpoint)))})
    command = command._replace(mountpoint=plan.mountpoint)
    if daemon:
        from fusecache.daemon import background

        pid = background.start(plan, command, log_file or background.default_log_file(plan))
        if common.as_json:
            print_json({"mountpoint": plan.mountpoint, "source": source, "pid": pid})
        else:
            click.echo(f"{source} is mounted at {plan.mountpoint} (process {pid})")
        return

    from fusecache.daemon.gated import Start
    from fusecache.daemon.mount_child import run_mount
    from fusecache.kernel.ready_pipe import ReadyPipe

    if common.as_json:
        announcement = json_text({"mountpoint": plan.mountpoint, "source": source, "pid": os.getpid()})
    else:
        announcement = f"{source} is mounted at {plan.mountpoint}; Ctrl-C unmounts"
    run_mount(plan, ReadyPipe(None), Start(announcement, command))
