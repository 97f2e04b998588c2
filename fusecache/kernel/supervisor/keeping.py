"""Starting and ending single parts, for those who decide when: `gates`, `agents`, `workers`, `embedded_server`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from fusecache.errors import UNEXPECTED, FusecacheError
from fusecache.kernel.log import Log
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.timers import Timers

AGAIN_S: Final = 1.0
STACKS_S: Final = 1.0
"""From SIGABRT, at which a part prints its stacks (faulthandler), to SIGKILL."""


class PartFailed(FusecacheError):
    """A part of a mount does not do its work, and the mount can't go on without it."""

    exit_code = UNEXPECTED


class Keeper:
    """See the module."""

    def __init__(self, timers: Timers, log: Log) -> None:
        self._timers = timers
        self._log = log
        self.patient = False
        """Once the mount serves: a machine short of processes or memory for a moment must not cost it."""

    def start(self, part: Part, launch: Callable[[], None], again: Callable[[], None]) -> bool:
        """Whether the part was started; if not, `again` is called later. PartFailed unless `patient`."""
        try:
            launch()
        except OSError as failure:
            if not self.patient:
                raise PartFailed(f"{part.name} can't be started: {failure.strerror}") from None
            self._log.error(f"{part.name} can't be started yet", why=failure.strerror, again_in_s=AGAIN_S)
            self._timers.after(part.name, AGAIN_S, again)
            return False
        return True

    def abort(self, part: Part) -> None:
        """Let it print its stacks, then kill it. One that is stopped prints them when it goes on."""
        part.kill(signal.SIGABRT)
        part.kill(signal.SIGCONT)
        self.kill_later(part, STACKS_S)

    def kill_later(self, part: Part, delay_s: float) -> None:
        """SIGKILL, unless another process has its role by then."""
        pid = part.pid

        def kill() -> None:
            if part.pid == pid:
                part.kill(signal.SIGKILL)

        self._timers.after(f"{part.name} kill", delay_s, kill)
