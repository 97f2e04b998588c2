"""The gate of one mount, as the supervisor keeps it: started, looked at, replaced by the one that stands by.

What takes time is an interpreter with its modules: so another gate is loaded at any time, and goes on with the same
workers within milliseconds when the first one ends. What that had read is put back by the kernel (RESEND), or answered
ECONNABORTED where the kernel can't. A gate is asked for a sign of life; one that gives none prints its stacks and is
killed. When gates die again and again at their start, the mount ends, with exit code 70: nobody else can answer.

Two kinds of gates are gates no more, and set aside until their process has gone: one that was emptied, because the
mount is handed over or was saved, and one whose first thread has ended while another one hangs in a notification
(`parts.leader_is_dead`): putting its requests back lets that, and so the process, end.

Whether a gate that ended is replaced is `phases`' business; what a gate does is `gate`'s.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.keeping import AGAIN_S, Keeper, PartFailed
from fusecache.kernel.supervisor.part_watch import PartWatch
from fusecache.kernel.supervisor.parts import Part, leader_is_dead
from fusecache.kernel.supervisor.phases import AfterGate, Phase, after_gate
from fusecache.kernel.supervisor.restart_policy import RestartPolicy
from fusecache.kernel.supervisor.roles import Agent, Gate
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.timers import Timers
from fusecache.kernel.supervisor.workers import Workers

START_S: Final = 30.0
"""To a gate's first word, which takes 0.2 s, and seconds on a machine that is busy."""

SPARE_S: Final = 1.0
"""From a gate's start to that of its spare: the mount has the processor for itself while it catches up."""

MOST_STARTS: Final = 2
"""Of gates with the same requests: what killed two of them at their start may be a request."""

News = Literal["initialised", "workers ready", "emptied"]
"""What concerns more than gate and workers: the kernel has its answer to INIT; every worker takes requests; the gate
has given up what it held, and is none any more."""


class Gates:
    """See the module. PartFailed for what the mount can't go on with."""

    def __init__(
        self,
        spec: MountSpec,
        gate: Gate,
        agent: Agent,
        workers: Workers,
        keeper: Keeper,
        timers: Timers,
        log: Log,
        *,
        table_fd: int | None,
        environment: Mapping[str, str],
    ) -> None:
        """`table_fd`: of another process whose mount is taken over."""
        self.gate = gate
        self.spare = Gate("spare gate")
        self.table_fd = os.memfd_create("fusecache-open-table", os.MFD_CLOEXEC) if table_fd is None else table_fd
        """The table of open inodes, which outlives every gate."""

        self._spec = spec
        self._agent = agent
        self._workers = workers
        self._keeper = keeper
        self._timers = timers
        self._log = log
        self._environment = environment
        self._can_resend = spec.features.usable("resend")
        self._session: MountSession | None = None
        self._watch = PartWatch(spec.silent_s, START_S)
        self._emptied: list[Part] = []
        self._hanging: list[Part] = []

    def start(self, session: MountSession, *, standby: bool = False) -> None:
        """Start the first one. `standby`: it reads nothing before `go`."""
        self._session = session
        self._launch(standby=standby)

    def serve(self) -> None:
        """The kernel has its answer to INIT."""
        self._timers.after(self.spare.name, SPARE_S, self._launch_spare)

    @property
    def processes(self) -> list[Part]:
        """Every process that may hold the device."""
        return [self.gate, *self._hanging, *self._emptied]

    # While it runs.

    def hear(self) -> Iterator[News]:
        """What the gate has said: heeded here, but for what others must know."""
        for message in self.gate.receive():
            kind = message["kind"]
            if kind == "standing_by":
                continue
            if kind == "failed":
                self.gate.failure = str(message.get("text", ""))
                continue
            self.gate.is_ready()
            if kind == "initialised":
                yield "initialised"
            elif kind == "worker_ready":
                self._workers.is_ready(message)
                if self._workers.all_ready:
                    yield "workers ready"
            elif kind == "handed_over":
                self._set_aside(self._emptied, "emptied gate")
                yield "emptied"
            elif kind == "worker_broken":
                self._workers.is_broken(message)
            elif kind == "not_now" and message.get("order") == "agent":
                self._timers.after("agent's link", AGAIN_S, lambda: self._agent.hand_to(self.gate, again=True))
            elif kind == "not_now":
                self._workers.is_not_taken(message)
            elif kind == "status":
                self._watch.answered()
                self._workers.look(message)
            else:
                self._log.warning("a message of the gate is not understood", kind=kind)

    def hear_spare(self) -> None:
        """The one that stands by."""
        if any(message["kind"] == "standing_by" for message in self.spare.receive()):
            self.spare.is_ready()

    def look(self) -> bool:
        """Ask for a sign of life. True: the gate has ended, and waitpid(2) is not going to tell."""
        if self.gate.pid is not None and leader_is_dead(self.gate.pid):
            self._hanging.append(_aside("dead gate", self.gate.pid))
            return True
        self._ask()
        return False

    def go(self, carried_fd: int) -> None:
        """Let the gate read, with what another one had read and not answered."""
        self.gate.send({"kind": "go"}, (carried_fd,))

    def stop(self) -> None:
        """Take no request any more, and end when those in flight are answered."""
        self.gate.send({"kind": "stop"})

    # When one has ended.

    def spare_ended(self, how: str, *, again: bool) -> None:
        """The one that stood by; `again`: start another one."""
        delay_s = max(SPARE_S, self.spare.died().delay_s)
        if again:
            self._log.warning("the spare gate ended", how=how, again_in_s=delay_s)
            self._timers.after(self.spare.name, delay_s, self._launch_spare)

    def forget(self, pid: int) -> None:
        """A process that was set aside has gone."""
        self._hanging = [gate for gate in self._hanging if gate.pid != pid]
        self._emptied = [gate for gate in self._emptied if gate.pid != pid]

    def ended(self, how: str, phase: Phase, *, is_handing_over: bool) -> AfterGate:
        """The gate's process has gone, or only its first thread, in this phase of the mount. What follows from it, as
        far as that is not done here: another gate goes on, or PartFailed."""
        assert self._session is not None
        is_looping = self.gate.died().looping
        reason = f": {self.gate.failure}" if self.gate.failure else ""
        is_connected = self._session.is_connected()
        follows = after_gate(phase, is_connected=is_connected, is_handing_over=is_handing_over, is_looping=is_looping)
        if follows == "too early":
            raise PartFailed(f"the gate ended with {how} before the mount was ready{reason}")
        if follows == "give up":
            raise PartFailed(f"the gate ended with {how} again and again{reason}")
        if follows == "unmounted":
            self._log.info("unmounted", mountpoint=self._spec.mountpoint)
        elif follows == "replace":
            self.replace(how)
        return follows

    def replace(self, how: str) -> None:
        """Go on with another gate; the last one ended by itself, and `how` says with what."""
        assert self._session is not None
        resend = self._can_resend and self.gate.policy.counted_deaths < MOST_STARTS
        if self._hanging and not resend:
            raise PartFailed(f"the gate ended with {how}, and the requests that it had can't be given back")
        self._log.error(
            "the gate ended; requests in flight are " + ("put back" if resend else "answered ECONNABORTED"),
            how=how,
            reason=self.gate.failure,
        )
        self._session.renew_gate_device(resend=resend)
        self._launch()
        self._timers.after(self.spare.name, SPARE_S, self._launch_spare)

    def refill(self, carried_fd: int) -> None:
        """Go on with another gate, and with what the last one gave up, whose descriptor is this method's now."""

        def go() -> None:
            self.go(carried_fd)
            os.close(carried_fd)

        self._launch(standby=True, started=go)

    def save(self, session: MountSession) -> None:
        """Serve a mount whose process is gone, and its gate with it: what that had read goes the way of every dead
        gate's requests. One that is waiting for `go` here holds its device."""
        self._session = session
        if self.gate.running:
            self.gate.kill(signal.SIGKILL)
            self._set_aside(self._emptied, "gate in waiting")
        session.renew_gate_device(resend=self._can_resend)
        self._launch()

    def _launch(self, *, standby: bool = False, started: Callable[[], None] = lambda: None) -> None:
        """Start a gate, if it can't be had now then later; `started` comes next."""
        session = self._session
        assert session is not None
        if self.spare.ready:
            self.gate.adopt(self.spare)
        elif not self._keeper.start(
            self.gate,
            lambda: self.gate.launch(self._spec, self._environment),
            lambda: self._launch(standby=standby, started=started),
        ):
            return
        settings = {**session.gate_settings(), "open_mode": session.open_mode, "standby": standby}
        self.gate.begin(self._spec, session.gate_device, self.table_fd, settings)
        self._watch.started()
        self._ask()  # its answer says that it is ready
        if self._agent.running:
            self._agent.hand_to(self.gate, again=self.gate.restarts > 0)
        self._workers.gate_started()
        started()

    def _launch_spare(self) -> None:
        if not self.spare.running:
            self._keeper.start(self.spare, lambda: self.spare.launch(self._spec, self._environment), self._launch_spare)

    def _ask(self) -> None:
        if not self.gate.running:
            return  # emptied, or not started yet
        verdict = self._watch.look(time.monotonic())
        if verdict == "ask":
            self.gate.send({"kind": "status"})
        elif verdict == "stuck":
            self._log.error("the gate is stuck and is replaced", pid=self.gate.pid)
            self._keeper.abort(self.gate)

    def _set_aside(self, where: list[Part], name: str) -> None:
        """Its process is as good as ended, and no longer the gate."""
        if self.gate.pid is not None:
            where.append(_aside(name, self.gate.pid))
            self.gate.ended()


def _aside(name: str, pid: int) -> Part:
    part = Part(name, RestartPolicy())
    part.pid = pid
    return part
