"""A process with all its descendants: a mount is one process, or a supervisor with its parts."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Child processes, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the task, or the process, has just ended
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def signal_all(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and everything below it, the process first."""
    for member in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)
