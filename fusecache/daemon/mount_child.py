"""The process of one mount: is given its plan, runs it, reports on the ready pipe.

Started by `daemon.mount_process`, with the plan on standard input, and where a mount is reloaded
(`kernel.supervisor.takeover.reloading`), with the command that mounted, whose plan is made anew then: such a process
takes the mount over, or fails. `fusecache mount` in the foreground calls `run_mount` in its own process. In `classic`
mode the process serves the mount itself, otherwise it becomes the supervisor (`daemon.gated`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Sequence

from fusecache import logs
from fusecache.config.mount_command import MountCommand
from fusecache.config.settings import MountPlan
from fusecache.daemon import gated, mountpoint, takeover
from fusecache.daemon.gated import Start
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.errors import UNEXPECTED, FusecacheError, MountError, UsageError, lacking, told
from fusecache.kernel.ready_pipe import ReadyPipe

OTHER_DESCRIPTORS = 1024
"""Descriptors kept for connections, databases and control sockets beside the open block files."""

_PR_SET_PDEATHSIG = 1


def run_mount(plan: MountPlan, ready: ReadyPipe, start: Start) -> None:
    """Check the mount point, then serve until unmounted; `ready` is told once reads work. A mount of ours that is there
    is taken over.

    Raises FusecacheError; nothing new stays mounted then. Returns in `classic` mode only.
    """
    settings = plan.settings
    identity = identity_of(settings)
    mountpoint.check_device()
    prepare_folders(plan)
    is_taken = takeover.look(plan)
    if start.is_reload and not is_taken:
        raise MountError(f"{str(plan.mountpoint)!r} is not mounted any more")
    logs.configure(settings.log_level, settings.log_format)
    if settings.open_mode != "classic":
        features, decision = gated.choose(plan)
        if decision.open_mode != "classic":
            gated.become_supervisor(plan, features, decision, identity, start, ready=ready, takes_over=is_taken)
        if identity is not None:
            raise UsageError(f"run_as_user {identity.uid}: impossible here, where one process does all: {decision.why}")
    if is_taken:
        raise mountpoint.occupied(plan.mountpoint)
    raise_open_files(settings.max_open_blocks)
    from fusecache.daemon import classic  # pyfuse3 and grpc: not before the cheap checks have passed

    def announce() -> None:
        if start.announcement:
            print(start.announcement, flush=True)
        ready.ready()

    classic.run(plan, ready=announce)


def _given() -> tuple[MountPlan, MountCommand | None]:
    """What `mount_process` wrote."""
    plan, command = pickle.load(sys.stdin.buffer)
    assert isinstance(plan, MountPlan)
    assert command is None or isinstance(command, MountCommand)
    return plan, command


def _planned_again(command_fd: int) -> tuple[MountPlan, MountCommand]:
    """What the command that mounted means now. UsageError."""
    command = gated.from_memfd(command_fd, MountCommand)
    os.close(command_fd)
    plan = command.plan_again(os.environ)
    os.chdir("/")
    return plan, command


def raise_open_files(blocks: int) -> None:
    """Lift the soft limit on descriptors towards the hard one, for so many open block files; `doctor` says when that is
    too low as well."""
    needed = blocks + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str]) -> int:
    """Run the plan on standard input, or of the command in `--command-fd`; the exit code."""
    parser = argparse.ArgumentParser(prog="fusecache.daemon.mount_child")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--command-fd", type=int)
    parser.add_argument("--die-with-parent", action="store_true")
    parser.add_argument("shown", nargs="*", help="source and mount point, for whoever lists processes")
    flags = parser.parse_args(arguments)
    pipe = ReadyPipe(flags.ready_fd)
    if flags.die_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    is_reload = flags.command_fd is not None
    try:
        plan, command = _planned_again(flags.command_fd) if is_reload else _given()
        start = Start(command=command, parent_reloads=flags.die_with_parent, is_reload=is_reload)
        run_mount(plan, pipe, start)
    except FusecacheError as failure:
        pipe.error(failure.exit_code, told(failure))
        if not is_reload:  # else whoever has the mount logs it
            print(f"fusecache: {told(failure)}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        pipe.error(130, "interrupted")
        return 130
    except Exception as failure:  # noqa: BLE001 - the outermost frame: printed whole, told by the exit code
        if isinstance(failure, OSError) and (text := lacking(failure)) is not None:
            pipe.error(FusecacheError.exit_code, text)
            return FusecacheError.exit_code
        traceback.print_exc()
        pipe.error(UNEXPECTED, f"a bug in fusecache: {type(failure).__name__}: {failure}")
        return UNEXPECTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
