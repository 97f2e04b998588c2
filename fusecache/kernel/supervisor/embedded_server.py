"""The embedded server of a mount whose SOURCE is a folder, as the supervisor keeps it.

The daemon has started it before it became the supervisor. Another one is started at the same address, which agent and
workers know, when it ends while the mount serves: until then, what is cached can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.keeping import Keeper, PartFailed
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.phases import Phase, after_other
from fusecache.kernel.supervisor.restart_policy import RestartPolicy
from fusecache.kernel.supervisor.timers import Timers

FIRST_DELAY_S: Final = 0.5


class EmbeddedServer(Part):
    """See the module. Never runs where SOURCE is no folder."""

    def __init__(
        self, spec: MountSpec, keeper: Keeper, timers: Timers, log: Log, *, environment: Mapping[str, str]
    ) -> None:
        super().__init__("embedded server", RestartPolicy(FIRST_DELAY_S))
        self.pid = spec.embedded_pid
        self._argv = spec.embedded_argv
        self._keeper = keeper
        self._timers = timers
        self._log = log
        self._environment = environment

    def launch(self) -> None:
        """Start one, unless one runs. Its folder may still be another one's that is about to end: it tries again."""
        if not self.running and self._argv:
            self._keeper.start(self, lambda: self.start(self._argv, (), self._environment, lambda: None), self.launch)

    def ended_with(self, how: str, phase: Phase) -> None:
        """Its process ended; in this phase of the mount. PartFailed before the mount serves."""
        delay_s = self.died().delay_s
        follows = after_other(phase)
        if follows == "too early":
            raise PartFailed(f"the embedded server ended with {how} before the mount was ready")
        if follows == "again":
            self._log.error("the embedded server ended: only what is cached can be read", how=how, again_in_s=delay_s)
            self._timers.after(self.name, delay_s, self.launch)
