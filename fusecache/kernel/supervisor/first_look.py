"""The first request to a new mount, made by who mounts: workers and agent may not be able to enter the folders above.

A child asks for attributes and df and reads a first file. From then on the kernel knows that FLUSH is not wanted (and
OPEN, in no-open mode); otherwise the first close(2) may be the one that meets the end of the mount, and fail. The agent
asks for it (`look`) and is told how it went (`looked`); a mount that does not answer hangs the child, not the loop.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Final

from fusecache.kernel.supervisor.parts import Part, fork_call
from fusecache.kernel.supervisor.restart_policy import RestartPolicy
from fusecache.kernel.supervisor.timers import Timers

LOOK_S: Final = 30.0
"""A mount that has not answered after this long is taken for broken."""

FIRST_FILE: Final = os.path.join(".fusecache", "version")
MOST_BYTES: Final = 4096


class FirstLook(Part):
    """One look at a time."""

    def __init__(self, timers: Timers, tell: Callable[[int], None]) -> None:
        """`tell` gets the errno of each look, 0 when all went well."""
        super().__init__("first look", RestartPolicy())
        self._timers = timers
        self._tell = tell
        self._late = False

    def begin(self, mountpoint: str) -> None:
        """Look, unless somebody is looking: who asked meanwhile is told the same."""
        if self.running:
            return
        self._late = False
        try:
            self.pid = fork_call(lambda: _look(mountpoint))
        except OSError as failure:  # no process to be had
            self._tell(failure.errno or errno.EAGAIN)
            return
        self._timers.after("first look", LOOK_S, self._is_late)

    def finished(self, code: int) -> None:
        """Its child ended; tell."""
        self.ended()
        self._timers.cancel("first look")
        self._tell(errno.ETIMEDOUT if self._late else code if code >= 0 else errno.EIO)

    def _is_late(self) -> None:
        self._late = True
        self.kill(signal.SIGKILL)


def _look(mountpoint: str) -> None:
    os.stat(mountpoint)
    os.statvfs(mountpoint)
    descriptor = os.open(os.path.join(mountpoint, FIRST_FILE), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)
