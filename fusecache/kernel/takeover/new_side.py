"""The new side of a take-over, from the descriptors that the daemon was given to the moment at which the gate reads.

    agent, gate (not reading), workers -> all ready -> `ready` -> `drained` -> take the token -> the gate reads

The daemon has said hello and was given the descriptors (`daemon.takeover`); they came over exec with the line. When the
old side is gone meanwhile, whatever ended it, this side has everything that is needed and goes on alone, if the mount
is still there. When the old side has taken the mount back, this one ends without touching it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from fusecache.errors import MountError, UsageError
from fusecache.kernel.log import Log
from fusecache.kernel.session import MountSession
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.takeover.facts import BadFacts, Descriptors, Facts
from fusecache.kernel.takeover.line import Line, LineLost, close_all
from fusecache.kernel.takeover.messages import text_of
from fusecache.kernel.takeover.states import READY_S, NewAction, NewCourse, NewEvent
from fusecache.kernel.takeover.token import take_token
from fusecache.kernel.timers import Timers

Step = Callable[[], None]
_ABANDONED: Final = "the process that has the mount took it back"


class TakingOver:
    """See the module. MountError, from any method, when the mount stays the old side's."""

    def __init__(self, spec: MountSpec, steps: Mapping[NewAction, Step], timers: Timers, log: Log) -> None:
        """`steps`: the supervisor's. UsageError when the specification's part of it is none."""
        given: Mapping[str, Any] = spec.takeover
        try:
            self.facts = Facts.from_message(dict(given["facts"]))
            self.descriptors = Descriptors.checked([int(number) for number in given["descriptors"]])
            line = int(given["line"])
        except (BadFacts, KeyError, TypeError, ValueError) as failure:
            raise UsageError(f"the mount specification has no usable take-over: {failure}") from None
        for descriptor in (line, *self.descriptors.all()):
            os.set_inheritable(descriptor, False)
        self.course = NewCourse()
        self.carried_fd: int | None = None
        """What the old gate held."""

        self._why = _ABANDONED
        self._line: Line | None = Line.of_descriptor(line)
        self._steps: Mapping[NewAction, Step] = {"say ready": self._say_ready, "fail": self._fail, **steps}
        self._timers = timers
        self._log = log

    def session(self, spec: MountSpec) -> MountSession:
        """The connection, which is not this side's yet. Made once."""
        return MountSession.adopted(
            spec, self.facts, session=self.descriptors.session, gate_device=self.descriptors.gate_device
        )

    @property
    def is_alone(self) -> bool:
        """The old side is gone."""
        return self.course.state == "alone"

    @property
    def is_over(self) -> bool:
        """This side serves."""
        return self.course.state == "serving"

    def sources(self) -> dict[int, Step]:
        """Descriptors to wait on for reading, and what to do then."""
        return {} if self._line is None else {self._line.fileno(): self._read}

    def check_cluster(self, cluster_id: str) -> None:
        """Ids of another cluster would name other files: the kernel keeps inodes that the old side told it."""
        theirs = self.facts.cluster_id
        if theirs != cluster_id:
            self.fail(
                f"the source is another cluster ({cluster_id!r}) than the one that is mounted ({theirs!r}): its files "
                "have other ids, so the mount can't be taken over; unmount it first"
            )

    def happens(self, event: NewEvent) -> None:
        """Go on by the table, and carry out what follows."""
        for action in self.course.step(event):
            self._steps[action]()

    def say_serving(self) -> None:
        """The old side may end."""
        if self._line is not None:
            try:
                self._line.send({"kind": "serving"})
            except LineLost as lost:
                self._log.info("the old process is gone already", why=str(lost))
        self.close()

    def fail(self, text: str) -> None:
        """Tell the old side, and end. MountError."""
        if self._line is not None:
            with contextlib.suppress(LineLost):
                self._line.send({"kind": "failed", "text": text})
        raise MountError(text)

    def close(self) -> None:
        """Nothing of the take-over is needed any more."""
        self._timers.cancel("take-over")
        if self._line is not None:
            self._line.close()
            self._line = None
            os.close(self.descriptors.token)
        if self.carried_fd is not None:
            os.close(self.carried_fd)
            self.carried_fd = None

    def _read(self) -> None:
        assert self._line is not None
        try:
            while self._line is not None and (received := self._line.receive()) is not None:
                message, descriptors = received
                if message["kind"] == "drained" and len(descriptors) == 1 and self.course.state == "ready":
                    (self.carried_fd,) = descriptors
                    self._drained()
                else:
                    close_all(descriptors)
                    if message["kind"] == "withdrawn":
                        self._why = f"{_ABANDONED}: {text_of(message)}"
                        self.happens("withdrawn")
        except LineLost as lost:
            self._log.warning("the old process is gone in the middle of the take-over", why=str(lost))
            self.happens("orphaned" if take_token(self.descriptors.token) else "withdrawn")

    def _drained(self) -> None:
        self.happens("drained" if take_token(self.descriptors.token) else "withdrawn")

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

    def _fail(self) -> None:
        self.fail(self._why)
