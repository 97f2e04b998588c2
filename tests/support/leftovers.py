"""What a test may not leave behind: non-daemon threads, child processes, open descriptors, mounts.

Descriptors are compared by what they point at, because numbers are reused. gRPC's and trio's process-wide
pollers (eventpoll, eventfd) stay open by design and are not counted; everything that carries data is.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

GRACE_S = 5.0
"""How long closing sockets and ending children may take before they count as left."""

POLL_S = 0.05
PROCESS_WIDE = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")


class Snapshot(NamedTuple):
    """What existed before the test."""

    temporary: Path
    threads: frozenset[int]
    children: frozenset[int]
    descriptors: Counter[str]
    mounts: frozenset[str]


def take(temporary: Path) -> Snapshot:
    """Look now; mounts count below `temporary` only."""
    return Snapshot(
        temporary,
        frozenset(thread.ident or 0 for thread in threading.enumerate()),
        frozenset(children()),
        descriptors(),
        frozenset(mounts_below(temporary)),
    )


def children() -> dict[int, str]:
    """Pid and command line of every child, zombies too."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except FileNotFoundError:
            continue  # the thread ended while we looked
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except FileNotFoundError:
                continue
            found[int(pid)] = command.strip() or "(ended, never waited for)"
    return found


def descriptors() -> Counter[str]:
    """How many open descriptors point at each kind of target."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if target in PROCESS_WIDE:
            continue
        kind, separator, _ = target.partition(":[")
        found[kind if separator else target] += 1
    return found


def mounts_below(folder: Path) -> list[str]:
    """Mount points below a folder, from mountinfo (never by touching a mount)."""
    prefix = f"{folder}/"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [point for point in (line.split()[4] for line in lines) if point.startswith(prefix)]


def differences(before: Snapshot) -> list[str]:
    """What is there now and was not, in words."""
    left = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.daemon and (thread.ident or 0) not in before.threads
    ]
    left += [f"child {pid}: {command}" for pid, command in children().items() if pid not in before.children]
    left += [f"{count} descriptor(s) on {target}" for target, count in (descriptors() - before.descriptors).items()]
    left += [f"mount {point}" for point in mounts_below(before.temporary) if point not in before.mounts]
    return left


def wait_until_gone(before: Snapshot) -> list[str]:
    """What is left after garbage collection and the grace period."""
    gc.collect()  # a forgotten file or socket raises ResourceWarning here, inside the test that forgot it
    deadline = time.monotonic() + GRACE_S
    while (left := differences(before)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
