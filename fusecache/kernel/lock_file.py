"""A lock file (flock) that several processes wait for, each for a limited time: the one of a mount point is held by
whoever looks at it in order to mount there. Says nothing about what is locked, nor how a failure is told."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02


def open_lock(path: str | Path) -> int:
    """A descriptor of the file, made if it is not there. OSError, also where a symbolic link has its name."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_within(descriptor: int, limit_s: float) -> bool:
    """Lock it, until the descriptor is closed; False: another process has had it for all that time."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        else:
            return True
