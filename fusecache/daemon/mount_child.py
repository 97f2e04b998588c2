"""The process of one mount: takes its plan from standard input, runs it, reports on the ready pipe.

Started by `daemon.mount_process` only; `fusecache mount` in the foreground calls `run_mount` in its own process. In
`classic` mode the process serves the mount itself, otherwise it becomes the supervisor (`daemon.gated`).
"""

from __future__ import annotations

import ctypes
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Sequence

from fusecache import logs
from fusecache.config.settings import MountPlan
from fusecache.daemon import gated, mountpoint, takeover
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.daemon.ready_pipe import ReadyPipe
from fusecache.errors import FusecacheError, UsageError, told

UNEXPECTED = 70
"""EX_SOFTWARE: exit code of a bug."""

OTHER_DESCRIPTORS = 1024
"""Descriptors kept for connections, databases and control sockets beside the open block files."""

_PR_SET_PDEATHSIG = 1


def run_mount(plan: MountPlan, ready: ReadyPipe, announcement: str = "") -> None:
    """Check the mount point, then serve until unmounted; `announcement` is printed, and `ready` told, once reads work.
    A mount of ours that is there is taken over.

    Raises FusecacheError; nothing new stays mounted then. Returns in `classic` mode only.
    """
    settings = plan.settings
    identity = identity_of(settings)
    mountpoint.check_device()
    prepare_folders(plan)
    is_taken = takeover.look(plan)
    logs.configure(settings.log_level, settings.log_format)
    if settings.open_mode != "classic":
        features, decision = gated.choose(plan)
        if decision.open_mode != "classic":
            gated.become_supervisor(
                plan, features, decision, identity, ready=ready, announcement=announcement, takes_over=is_taken
            )
        if identity is not None:
            raise UsageError(f"run_as_user {identity.uid}: impossible here, where one process does all: {decision.why}")
    if is_taken:
        raise mountpoint.occupied(plan.mountpoint)
    raise_open_files(settings.max_open_blocks)
    from fusecache.daemon import classic  # pyfuse3 and grpc: not before the cheap checks have passed

    def announce() -> None:
        if announcement:
            print(announcement, flush=True)
        ready.ready()

    classic.run(plan, ready=announce)


def raise_open_files(blocks: int) -> None:
    """Lift the soft limit on descriptors towards the hard one, for so many open block files; `doctor` says when that is
    too low as well."""
    needed = blocks + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str]) -> int:
    """Run the plan on standard input; the exit code."""
    pipe = ReadyPipe(int(arguments[arguments.index("--ready-fd") + 1]))
    if "--die-with-parent" in arguments[: arguments.index("--")]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    plan = pickle.load(sys.stdin.buffer)
    assert isinstance(plan, MountPlan)
    try:
        run_mount(plan, pipe)
    except FusecacheError as failure:
        pipe.error(failure.exit_code, told(failure))
        print(f"fusecache: {told(failure)}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        pipe.error(130, "interrupted")
        return 130
    except Exception as failure:  # noqa: BLE001 - the outermost frame: printed whole, told by the exit code
        traceback.print_exc()
        pipe.error(UNEXPECTED, f"a bug in fusecache: {type(failure).__name__}: {failure}")
        return UNEXPECTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
