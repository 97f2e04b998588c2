"""Take descriptors, or threads, away from processes that run, and give them back: F17.

Descriptors by prlimit(2): numbers that are open stay open. Threads by a pids control group, which counts for root too
(RLIMIT_NPROC does not).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

LOOKS = 10
LOOK_S = 0.02


@contextlib.contextmanager
def no_more_descriptors(*pids: int) -> Iterator[None]:
    """None of these processes gets another descriptor within the block."""
    before = {}
    for pid in pids:
        used = _lasting(pid)
        lowest_free = next(number for number in itertools.count() if number not in used)
        _, hard = before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):  # a test may have ended it
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _lasting(pid: int) -> set[int]:
    """Descriptors that stay: one that is open for a moment would be free for another use afterwards."""
    used = _used(pid)
    for _ in range(LOOKS - 1):
        time.sleep(LOOK_S)
        used &= _used(pid)
    return used


def _used(pid: int) -> set[int]:
    listed = os.listdir(f"/proc/{pid}/fd")
    # Without the one that this listing itself had, where it is our own process.
    return {int(number) for number in listed if os.path.lexists(f"/proc/{pid}/fd/{number}")}


def without_threads_reason() -> str | None:
    """Why threads can't be taken away here; None when they can."""
    folder = _controller()
    if folder is None:
        return "no pids control group is mounted (or not delegated)"
    if not os.access(folder, os.W_OK):
        return f"{folder} can't be written to"
    return None


@contextlib.contextmanager
def no_more_threads(*pids: int) -> Iterator[None]:
    """None of these processes, or of those that they start, gets another thread or process within the block."""
    folder = _controller()
    assert folder is not None
    ours = folder / f"fusecache-test-{os.getpid()}"
    home = folder / _group_of(pids[0])
    ours.mkdir()
    try:
        for pid in pids:
            (ours / "cgroup.procs").write_text(str(pid))
        (ours / "pids.max").write_text("1")  # less than there are: what runs goes on
        yield
    finally:
        (ours / "pids.max").write_text("max")
        for pid in (ours / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(pid)
        ours.rmdir()


def _controller() -> Path | None:
    """The folder of the control groups that count processes: of version 1, or version 2."""
    first, second = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")
    if (first / "cgroup.procs").exists():
        return first
    enabled = second / "cgroup.subtree_control"
    return second if enabled.exists() and "pids" in enabled.read_text().split() else None


def _group_of(pid: int) -> str:
    """Path of a process's group, without the leading slash."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            found = path.lstrip("/")
            if controllers == "pids":
                return found
    return found
