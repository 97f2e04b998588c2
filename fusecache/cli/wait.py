"""`fusecache wait`: for init containers and scripts."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusecache.cli.arguments import Duration, PathName
from fusecache.cli.options import Common, everywhere, print_json, setting_flags
from fusecache.errors import FusecacheError, InterruptedWait

if TYPE_CHECKING:
    from rich.status import Status

POLL_S = 0.2
TELL_S = 60.0
"""Off a terminal: seconds between lines that say why it still waits."""

PROBE_S = 5.0
"""Seconds one look may take: a mount that hangs is asked again."""

LEAST_PROBE_S = 0.5
"""What a look gets also when the time is over: `--timeout-s 0` asks once."""


@click.command(short_help="Wait until reads work on a mount.")
@click.argument("mountpoint", type=PathName("dir"))
@click.option(
    "--timeout-s",
    type=Duration(0, 7 * 86400),
    default="5m",
    show_default=True,
    metavar="DURATION",
    help="Time before giving up.",
)
@setting_flags(("runtime_dir",))
@everywhere
def wait(mountpoint: Path, timeout_s: float, common: Common, flags: dict[str, object]) -> None:
    """Wait until MOUNTPOINT is mounted by fusecache and answers. Exit 5 when it did not in time.

    \b
    Example, as the command of an init container:
      fusecache wait /mnt/imagenet --timeout-s 600
    """
    runtime_dir = common.configuration(flags).settings.runtime_dir
    started = told_at = time.monotonic()
    with ExitStack() as stack:
        spinner = stack.enter_context(_spinner()) if sys.stderr.isatty() else None
        while (why_not := _why_not(mountpoint, runtime_dir, started + timeout_s - time.monotonic())) is not None:
            now = time.monotonic()
            if now - started >= timeout_s:
                raise InterruptedWait(f"{str(mountpoint)!r} is not ready after {timeout_s:g} s: {why_not}")
            if spinner is not None:
                spinner.update(f"{mountpoint}: {why_not} ({now - started:.0f} s)")
            elif now - told_at >= TELL_S:
                told_at = now
                click.echo(f"{mountpoint}: {why_not} ({now - started:.0f} s)", err=True)
            time.sleep(POLL_S)
    waited_s = time.monotonic() - started
    if common.as_json:
        print_json({"mountpoint": mountpoint, "ready": True, "waited_s": round(waited_s, 3)})
    else:
        click.echo(f"{mountpoint}: ready")


def _spinner() -> Status:
    from rich.console import Console

    return Console(stderr=True).status("waiting")


def _why_not(mountpoint: Path, runtime_dir: Path, left_s: float) -> str | None:
    """None when reads work. The mount is looked at from outside, so that a hung one can't hang this command; each of
    the two looks takes at most what is `left_s`, but is given a moment."""
    from fusecache.daemon import control_client
    from fusecache.daemon.mountpoint import find_mount, is_ours, probe

    look_s = min(PROBE_S, max(LEAST_PROBE_S, left_s))
    mounted = find_mount(mountpoint)
    if mounted is None:
        return "nothing is mounted there"
    if not is_ours(mounted):
        return f"{mounted.source!r} ({mounted.fs_type}) is mounted there, not fusecache"
    try:
        socket = control_client.find_socket(mounted, runtime_dir)
        if not control_client.call(socket, "status", look_s).get("ready"):
            return "it is starting"
    except FusecacheError:
        # In a pod the control folder is often not there: then the mount itself is all there is to ask.
        pass
    health = probe(mountpoint, look_s)
    if health != "ok":
        return f"it is {health}"
    # A dead mount that somebody has taken away meanwhile leaves an empty folder, which answers.
    after = find_mount(mountpoint)
    return None if after is not None and after.device == mounted.device else "it is being replaced"
