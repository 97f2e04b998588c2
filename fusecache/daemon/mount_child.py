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
import time
import traceback
from collections.abc import Sequence

import structlog

from fusecache import logs
from fusecache.config.settings import MountPlan
from fusecache.daemon import gated, mountpoint, takeover
from fusecache.daemon.control_client import mount_lock
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.daemon.ready_pipe import ReadyPipe
from fusecache.daemon.takeover import TakenOver
from fusecache.errors import FusecacheError, UsageError, told

log = structlog.get_logger(__name__)

UNEXPECTED = 70
"""EX_SOFTWARE: exit code of a bug."""

OTHER_DESCRIPTORS = 1024
"""Descriptors kept for connections, databases and control sockets beside the open block files."""

OLD_SIDE_TRIES = 3
OLD_SIDE_END_S = 2.0
"""A killed supervisor's mount is dead within this time."""

_PR_SET_PDEATHSIG = 1


def run_mount(plan: MountPlan, ready: ReadyPipe, announcement: str = "") -> None:
    """Check the mount point, then serve until unmounted; `announcement` is printed, and `ready` told, once reads work.
    A mount of ours that is there is taken over.

    Raises FusecacheError; nothing new stays mounted then. Returns in `classic` mode only.
    """
    settings = plan.settings
    identity = identity_of(settings)
    mountpoint.check_device()
    prepare_folders(settings)
    is_taken = _look(plan)
    logs.configure(settings.log_level, settings.log_format)
    if settings.open_mode != "classic":
        features, decision = gated.choose(plan)
        if decision.open_mode != "classic":
            taken = _take_over(plan) if is_taken else None
            if taken is not None:
                decision = taken.decision()
            gated.become_supervisor(
                plan, features, decision, identity, ready=ready, announcement=announcement, taken=taken
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


def _look(plan: MountPlan) -> bool:
    """Whether a mount of ours is there and answers; otherwise the place is free then."""
    with mountpoint.claim(mount_lock(plan.settings.runtime_dir, plan.mountpoint)):
        return mountpoint.prepare(plan.mountpoint)


def _take_over(plan: MountPlan) -> TakenOver | None:
    """The mount that is there; None when its process ended meanwhile, so that there is none any more."""
    for _ in range(OLD_SIDE_TRIES):
        try:
            return takeover.ask(plan)
        except takeover.OldSideGone as gone:
            log.warning("the mount can't be taken over, and is replaced when it is dead", why=str(gone))
            time.sleep(OLD_SIDE_END_S)
            if not _look(plan):
                return None
    raise mountpoint.occupied(plan.mountpoint)


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
