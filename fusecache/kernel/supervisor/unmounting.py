"""Taking a mount's name away while its requests are still answered: politely, then lazily. For the supervisor's loop.

umount2(2) runs in a child, because it walks the path and a file system above the mount point may hang. A mount that is
still busy after BUSY_S is detached: the name is free for the next mount at once, and what is in flight goes on.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Final

from fusecache.kernel import device
from fusecache.kernel.log import Log
from fusecache.kernel.supervisor.parts import fork_call
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.timers import Timers

BUSY_S: Final = 0.5
BUSY_POLL_S: Final = 0.1
UNMOUNT_S: Final = 10.0
"""One umount2(2)."""


class Unmounting:
    """One way down; `done` is called once, with the mount gone or given up."""

    def __init__(self, session: MountSession, timers: Timers, log: Log, done: Callable[[], None]) -> None:
        self._session = session
        self._timers = timers
        self._log = log
        self._done = done
        self._busy_until_s = time.monotonic() + BUSY_S
        self.pid: int | None = None
        """Of the child that is unmounting."""

        self._detached = False
        self._try(lazy=False)

    def ended(self, code: int) -> None:
        """The child ended: its exit code is umount2's errno."""
        self.pid = None
        self._timers.cancel("unmount")
        if code == errno.EBUSY:
            lazy = time.monotonic() >= self._busy_until_s
            self._timers.after("unmount again", BUSY_POLL_S, lambda: self._try(lazy=lazy))
        elif code == 0 and self._detached:
            self._done()
        elif code == 0:
            # The kernel ends the connection now, and with it the gate, unless another namespace has a copy.
            self._timers.after("unmounted", BUSY_S, self._still_connected)
        else:
            if code != errno.EINVAL:  # which means that somebody else was quicker
                reason = os.strerror(code) if code > 0 else f"killed by signal {-code}"
                self._log.error("the mount can't be unmounted", mountpoint=self._session.mountpoint, reason=reason)
            self._done()

    def _try(self, *, lazy: bool) -> None:
        if not self._session.is_mounted():
            self._done()
            return
        mountpoint = self._session.mountpoint
        self._detached = lazy
        try:
            self.pid = fork_call(lambda: device.unmount(mountpoint, lazy=lazy))
        except OSError as failure:
            self._log.error("no process for umount2(2)", mountpoint=mountpoint, reason=failure.strerror)
            self._done()  # `ending` detaches it
            return
        self._timers.after("unmount", UNMOUNT_S, self._late)
        if lazy:
            self._log.warning("the mount is busy: detached, open files end with this process", mountpoint=mountpoint)

    def _still_connected(self) -> None:
        if self._session.is_connected():
            self._log.warning(
                "unmounted here, but another mount namespace still has the mount: it ends with this process",
                mountpoint=self._session.mountpoint,
            )
        self._done()

    def _late(self) -> None:
        self._log.error("umount2(2) does not return", mountpoint=self._session.mountpoint, within_s=UNMOUNT_S)
        self._done()
