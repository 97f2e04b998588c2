"""The old side of a take-over: a mount is given to another supervisor, while everybody reads on.

    hello -> end agent and embedded server -> given (descriptors) -> ready -> empty the gate -> drained -> serving

What follows from what is decided by `states`; what is said, by `messages`. This module watches the line and the clock,
holds the token, and carries out nearly everything; the rest are the supervisor's `steps`. One take-over at a time: who
comes meanwhile is told, and so is who comes for another source.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

import fusecache
from fusecache.errors import StateError
from fusecache.kernel.channel import Message
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.gates import Gates
from fusecache.kernel.supervisor.keeping import AGAIN_S, Keeper
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.polling import Step
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.takeover.line import Line, LineLost, close_all
from fusecache.kernel.supervisor.takeover.messages import PROTOCOLS, refusal, text_of
from fusecache.kernel.supervisor.takeover.private_socket import PrivateSocket
from fusecache.kernel.supervisor.takeover.states import OldAction, OldCourse, OldEvent
from fusecache.kernel.supervisor.takeover.token import new_token, take_token
from fusecache.kernel.supervisor.timers import Timers

ENDING_S: Final = 5.0
"""For the agent and the embedded server, from SIGTERM to SIGKILL."""


class HandingOver:
    """See the module. `course.is_active` while one is under way."""

    def __init__(
        self,
        spec: MountSpec,
        gates: Gates,
        stopped: tuple[Part, ...],
        steps: Mapping[OldAction, Step],
        keeper: Keeper,
        timers: Timers,
        log: Log,
    ) -> None:
        """`stopped`: the parts that can't run twice. `steps`: what only the supervisor can do."""
        self.course = OldCourse(spec.takeover_s)
        self._carried_fd: int | None = None
        """For what the gate holds when it is emptied."""

        self.cluster_id = ""
        self._spec = spec
        self._gates = gates
        self._stopped = stopped
        self._steps: Mapping[OldAction, Step] = {
            "stop parts": self._stop_parts,
            "give": self._give,
            "empty gate": self._empty_gate,
            "kill gate": lambda: gates.gate.kill(signal.SIGKILL),
            "refill gate": self._refill_gate,
            "replace gate": lambda: gates.replace("SIGKILL"),
            "pass on": self._pass_on,
            "withdraw": self._withdraw,
            **steps,
        }
        self._keeper = keeper
        self._timers = timers
        self._log = log
        self._session: MountSession | None = None
        self._socket: PrivateSocket | None = None
        self._line: Line | None = None
        self._strangers: list[Line] = []
        """Who has come and not said anything yet."""

        self._token: int | None = None
        self._is_deaf = False
        """While there is no descriptor for who comes: a socket with somebody waiting would not let the loop sleep."""

    def listen(self, session: MountSession) -> None:
        """From now on the mount can be taken over. Where it can't, that is said, and the mount serves all the same."""
        self._session = session
        if not self._spec.takeover_socket:
            return
        try:
            self._socket = PrivateSocket(self._spec.takeover_socket)
        except StateError as failure:
            self._log.error("this mount can't be taken over by the next start", why=str(failure))

    def sources(self) -> dict[int, Step]:
        """Descriptors to wait on for reading, and what to do then."""
        found: dict[int, Step] = {}
        if self._socket is not None and not self._is_deaf:
            found[self._socket.fileno()] = self._accept
        for stranger in self._strangers:
            found[stranger.fileno()] = lambda stranger=stranger: self._hear(stranger)  # type: ignore[misc]
        if self._line is not None:
            found[self._line.fileno()] = self._read
        return found

    @property
    def taker_pid(self) -> int | None:
        """Of the process that is taking over; None: there is none, or it can't be seen from here."""
        return (self._line.peer_pid() or None) if self._line is not None else None

    def part_ended(self, pid: int) -> bool:
        """Whether that was one of `stopped` in the middle of a take-over, so that its end means nothing else."""
        if not self.course.is_active:
            return False
        for part in self._stopped:
            if part.pid == pid:
                part.ended()
                self._look_whether_parts_ended()
                return True
        return False

    def end(self, *, is_last: bool) -> None:
        """This supervisor ends: whoever is about to take over has the mount, or never will (`is_last`).

        With the token still there the new side finds it, and goes on alone.
        """
        if self._socket is not None:
            self._socket.close(is_last=is_last)
            self._socket = None
        for line in (self._line, *self._strangers):
            if line is not None:
                line.close()
        self._line = None
        self._strangers = []

    def happens(self, event: OldEvent) -> None:
        """Go on by the table, and carry out what follows."""
        before = self.course.state
        actions = self.course.step(event)
        if self.course.state == before and not actions:
            return
        self._log.info("take-over", what=event, state=self.course.state)
        limit_s = self.course.limit_s
        if limit_s is None:
            self._timers.cancel("take-over")
        else:
            self._timers.after("take-over", limit_s, self._late)
        for action in actions:
            self._steps[action]()
        if self.course.state == "serving":
            self._log.warning("the mount was not taken over: this process goes on serving", what=event)
            self._forget()

    # The line.

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            line = self._socket.accept()
        except OSError as failure:
            self._log.warning("who comes to take over has to wait", why=failure.strerror)
            self._is_deaf = True
            self._timers.after("take-over accept", AGAIN_S, self._listen_again)
            return
        if line is not None:
            self._strangers.append(line)
            if len(self._strangers) > 8:
                self._strangers.pop(0).close()

    def _listen_again(self) -> None:
        self._is_deaf = False

    def _hear(self, stranger: Line) -> None:
        """The first message of whoever has come."""
        try:
            received = stranger.receive()
            if received is None:
                return
            message, descriptors = received
            close_all(descriptors)
            self._strangers.remove(stranger)
            why = self._why_not(message) or self._unprepared()
            if why is not None:
                stranger.send({"kind": "refused", "text": why})
                stranger.close()
                return
            session = self._session
            assert session is not None
            told = {"protocols": PROTOCOLS, "version": fusecache.__version__, "open_mode": session.open_mode}
            stranger.send({"kind": "yielding", **told})
        except LineLost as lost:
            self._log.info("a process that came to take over is gone", why=str(lost))
            if stranger in self._strangers:
                self._strangers.remove(stranger)
            stranger.close()
            if not self.course.is_active:
                self._forget()  # else they are those of a take-over, which may have no line any more
            return
        self._line = stranger
        self._log.info("another process takes the mount over", version=str(message.get("version"))[:40])
        self.happens("hello")

    def _unprepared(self) -> str | None:
        """Have what is needed further on, before anything is given up; None, or why it is not to be had."""
        try:
            self._token = new_token()
            self._carried_fd = os.memfd_create("fusecache-carried", os.MFD_CLOEXEC)
        except OSError as failure:
            self._forget()
            return f"the process that serves it can't hand over now: {failure.strerror}"
        return None

    def _why_not(self, message: Message) -> str | None:
        if message["kind"] != "hello":
            return "a take-over begins with hello"
        if self.course.state != "serving":
            return "another process is taking it over right now"
        return refusal(message, self._spec.fsname)

    def _read(self) -> None:
        assert self._line is not None
        try:
            while self._line is not None and self.course.is_active:
                received = self._line.receive()
                if received is None:
                    break
                message, descriptors = received
                close_all(descriptors)
                kind = message["kind"]
                if kind == "ready":
                    self.happens("ready")
                elif kind == "serving":
                    self.happens("serving")
                elif kind == "failed":
                    raise LineLost(f"it failed: {text_of(message)}")
        except LineLost as lost:
            self._log.warning("the process that was taking over is gone", why=str(lost))
            self._lost()

    def _lost(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self.happens("lost" if self._token is None or take_token(self._token) else "died serving")

    def _late(self) -> None:
        state = self.course.state
        if state == "returning" or self._token is None or take_token(self._token):  # `returning` has it already
            self.happens("late")
        else:
            self.happens("serving" if state == "drained" else "died serving")

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if self._line is not None:
            try:
                self._line.send(message, descriptors)
            except LineLost as lost:
                self._log.warning("the process that was taking over is gone", why=str(lost))
                self._timers.after("take-over lost", 0, self._lost)

    # What follows.

    def _stop_parts(self) -> None:
        for part in self._stopped:
            self._timers.cancel(part.name)  # one that was about to be started again stays away
            part.kill(signal.SIGTERM)
            self._keeper.kill_later(part, ENDING_S)
        self._look_whether_parts_ended()  # where none is running, nobody's end is waited for

    def _look_whether_parts_ended(self) -> None:
        if not any(part.running for part in self._stopped):
            self.happens("parts ended")

    def _give(self) -> None:
        session = self._session
        assert session is not None
        assert self._token is not None
        facts = session.facts(fusecache.__version__, self.cluster_id)
        self._send(facts.to_message(), (*session.descriptors(), self._gates.table_fd, self._token))

    def _empty_gate(self) -> None:
        assert self._carried_fd is not None
        self._gates.gate.send({"kind": "hand_over"}, (self._carried_fd,))

    def _pass_on(self) -> None:
        assert self._carried_fd is not None
        self._send({"kind": "drained"}, (self._carried_fd,))

    def _refill_gate(self) -> None:
        assert self._carried_fd is not None
        carried_fd, self._carried_fd = self._carried_fd, None
        self._gates.refill(carried_fd)

    def _withdraw(self) -> None:
        self._send({"kind": "withdrawn", "text": f"it was not ready, or did not answer, in time ({self.course.state})"})

    def _forget(self) -> None:
        """Back where it began."""
        self._timers.cancel("take-over lost")
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._token is not None:
            os.close(self._token)
            self._token = None
        if self._carried_fd is not None:
            os.close(self._carried_fd)
            self._carried_fd = None
