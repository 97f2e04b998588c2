"""The new side of a take-over, from the descriptors that the daemon was given to the moment at which the gate reads.

    agent, gate (not reading), workers -> all ready -> `ready` -> `drained` -> take the token -> the gate reads

The daemon has said hello and was given the descriptors (`daemon.takeover`); they came over exec with the line. When the
old side is gone meanwhile, whatever ended it, this side has everything that is needed and goes on alone, if the mount
is still there. When the old side has taken the mount back, this one ends without touching it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

from fusecache.errors import MountError, UsageError
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.gates import Gates
from fusecache.kernel.supervisor.polling import Step
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.takeover.facts import BadFacts, Descriptors, Facts
from fusecache.kernel.supervisor.takeover.line import Line, LineLost, close_all
from fusecache.kernel.supervisor.takeover.messages import text_of
from fusecache.kernel.supervisor.takeover.states import READY_S, NewAction, NewCourse, NewEvent
from fusecache.kernel.supervisor.takeover.token import take_token
from fusecache.kernel.supervisor.timers import Timers
from fusecache.kernel.supervisor.workers import Workers

_ABANDONED: Final = "the process that has the mount took it back"


@dataclass(frozen=True)
class Given:
    """What the old side gave, as it came over exec."""

    facts: Facts
    descriptors: Descriptors
    line: int

    @classmethod
    def from_spec(cls, spec: MountSpec) -> Self | None:
        """None: nothing, this process mounts. UsageError for what can't be used."""
        if not spec.takeover:
            return None
        given: Mapping[str, Any] = spec.takeover
        try:
            facts = Facts.from_message(dict(given["facts"]))
            descriptors = Descriptors.checked([int(number) for number in given["descriptors"]])
            line = int(given["line"])
        except (BadFacts, KeyError, TypeError, ValueError) as failure:
            raise UsageError(f"the mount specification has no usable take-over: {failure}") from None
        for descriptor in (line, *descriptors.all()):
            os.set_inheritable(descriptor, False)
        return cls(facts, descriptors, line)


class TakingOver:
    """See the module. MountError, from any method, when the mount stays the old side's."""

    def __init__(self, given: Given, gates: Gates, workers: Workers, serve: Step, timers: Timers, log: Log) -> None:
        """`serve`: what the supervisor does once the mount is this side's."""
        self._facts = given.facts
        self._descriptors = given.descriptors
        self._course = NewCourse()
        self._session: MountSession | None = None
        self._carried_fd: int | None = None
        """What the old gate held."""

        self._why = _ABANDONED
        self._line: Line | None = Line.of_descriptor(given.line)
        self._gates = gates
        self._workers = workers
        self._serve = serve
        self._steps: Mapping[NewAction, Step] = {
            "say ready": self._say_ready,
            "take": self._take,
            "save": self._save,
            "serve": serve,
            "fail": self._fail,
        }
        self._timers = timers
        self._log = log

    def session(self, spec: MountSpec, cluster_id: str) -> MountSession:
        """The connection, which is not this side's yet. Made once, when the agent knows its cluster."""
        theirs = self._facts.cluster_id
        if theirs != cluster_id:
            # Ids of another cluster would name other files: the kernel keeps inodes that the old side told it.
            self._give_up(
                f"the source is another cluster ({cluster_id!r}) than the one that is mounted ({theirs!r}): its files "
                "have other ids, so the mount can't be taken over; unmount it first"
            )
        return MountSession.adopted(
            spec, self._facts, session=self._descriptors.session, gate_device=self._descriptors.gate_device
        )

    def begin(self, session: MountSession) -> None:
        """Start what a mount needs, beside the process that still has it."""
        self._session = session
        if self._course.state == "alone":
            self._save()
        else:
            self._gates.start(session, standby=True)
        self._workers.start(session)

    def sources(self) -> dict[int, Step]:
        """Descriptors to wait on for reading, and what to do then."""
        return {} if self._line is None else {self._line.fileno(): self._read}

    def happens(self, event: NewEvent) -> None:
        """Go on by the table, and carry out what follows."""
        for action in self._course.step(event):
            self._steps[action]()

    def _read(self) -> None:
        assert self._line is not None
        try:
            while self._line is not None and (received := self._line.receive()) is not None:
                message, descriptors = received
                if message["kind"] == "drained" and len(descriptors) == 1 and self._course.state == "ready":
                    (self._carried_fd,) = descriptors
                    self._drained()
                else:
                    close_all(descriptors)
                    if message["kind"] == "withdrawn":
                        self._why = f"{_ABANDONED}: {text_of(message)}"
                        self.happens("withdrawn")
        except LineLost as lost:
            self._log.warning("the old process is gone in the middle of the take-over", why=str(lost))
            is_free = take_token(self._descriptors.token)
            self._close()
            self.happens("orphaned" if is_free else "withdrawn")

    def _drained(self) -> None:
        self.happens("drained" if take_token(self._descriptors.token) else "withdrawn")

    def _say_ready(self) -> None:
        assert self._line is not None
        try:
            self._line.send({"kind": "ready"})
        except LineLost as lost:
            self._log.warning("the old process is not told", why=str(lost))  # its end of the line says the rest
        self._timers.after("take-over", READY_S, self._late)

    def _late(self) -> None:
        self._why = f"the process that has the mount did not hand it over within {READY_S:.0f} s"
        self.happens("late")

    def _take(self) -> None:
        """The token is this side's: go on where the old gate stopped."""
        assert self._session is not None
        assert self._carried_fd is not None
        self._session.is_ours = True
        self._gates.go(self._carried_fd)
        self._serve()
        if self._line is not None:
            try:
                self._line.send({"kind": "serving"})
            except LineLost as lost:
                self._log.info("the old process is gone already", why=str(lost))
        self._close()

    def _save(self) -> None:
        """The process that had the mount is gone: serve it alone."""
        if self._session is None:
            return  # until the agent is prepared
        if not self._session.is_connected():
            raise MountError(f"{self._session.mountpoint!r} was unmounted before it was taken over")
        self._session.is_ours = True
        self._gates.save(self._session)
        if self._workers.all_ready:
            self.happens("all ready")

    def _fail(self) -> None:
        self._give_up(self._why)

    def _give_up(self, text: str) -> NoReturn:
        """Tell the old side, and end. MountError."""
        if self._line is not None:
            with contextlib.suppress(LineLost):
                self._line.send({"kind": "failed", "text": text})
        raise MountError(text)

    def _close(self) -> None:
        """Nothing of the take-over is needed any more."""
        self._timers.cancel("take-over")
        if self._line is not None:
            self._line.close()
            self._line = None
            os.close(self._descriptors.token)
        if self._carried_fd is not None:
            os.close(self._carried_fd)
            self._carried_fd = None
