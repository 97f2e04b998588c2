"""Processor time and memory of a system under test: all processes below the ones that were started, from /proc.

A system is a tree of processes (supervisor, gate, workers, agent; a JVM; bindfs): whoever measures only the process
it started sees a supervisor that sleeps. Processor time comes from each process's own clock in nanoseconds, not from
the ticks of /proc/PID/stat, which are as long as a whole row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CPU_CLOCK_SCHEDULER = 2
"""CPUCLOCK_SCHED of the kernel's include/linux/posix-timers.h: all threads, ended ones too."""


class Memory(NamedTuple):
    """Of one system. Pages that its processes share count once in each process's resident set."""

    resident_bytes: int
    proportional_bytes: int
    """Each shared page divided by the number of its users (Pss): what the system really occupies."""


def tree(pid: int) -> list[int]:
    """The process and everything below it; nothing when it has ended."""
    found = [pid]
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                found += tree(int(child))
    except (FileNotFoundError, ProcessLookupError):
        # Ended meanwhile.
        return []
    return found


def trees(roots: Iterable[int]) -> list[int]:
    """Every process below each of the roots."""
    return [pid for root in roots for pid in tree(root)]


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds; OSError when it has ended."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK_SCHEDULER)


def memory(pids: Iterable[int]) -> Memory:
    """Of all these processes together."""
    resident = proportional = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "Rss":
                resident += int(rest.split()[0]) << 10
            elif name == "Pss":
                proportional += int(rest.split()[0]) << 10
    return Memory(resident, proportional)
