"""The agent of one mount, as the supervisor keeps it: started, listened to, looked at, started again.

    start -> prepared (or failed, and why) -> serving (with the control socket) -> ready -> ...

The agent is prepared when it has its cluster and its store. It is then told that the mount serves, and given the socket
on which it answers commands; with a first read through the mount, which it asks for (`first_look`), it is ready. Reads
go on without it, so it is started again with growing delays, for as long as it takes. One that gives no sign of life
prints its stacks and is killed.

What its end means is `phases`' business; what it does is `daemon.agent`'s.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fusecache.kernel.channel import Message
from fusecache.kernel.control_listener import ControlListener
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.first_look import FirstLook
from fusecache.kernel.supervisor.keeping import Keeper, PartFailed
from fusecache.kernel.supervisor.part_watch import PartWatch
from fusecache.kernel.supervisor.phases import Phase, after_other
from fusecache.kernel.supervisor.roles import Agent, Gate
from fusecache.kernel.supervisor.timers import Timers

EPOCH_BYTES: Final = 4096
"""Of which the first 8 are used."""

START_S: Final = 300.0
"""The agent has its own, shorter limits for the cluster and the root; this one is for an agent that hangs."""


class Agents:
    """See the module. PartFailed, before the mount is ready, for what it can't go on with."""

    def __init__(
        self,
        spec: MountSpec,
        agent: Agent,
        gate: Gate,
        keeper: Keeper,
        timers: Timers,
        log: Log,
        *,
        environment: Mapping[str, str],
    ) -> None:
        self.agent = agent
        self.epoch_fd = os.memfd_create("fusecache-epoch", os.MFD_CLOEXEC)
        """The metadata epoch, which the agent counts up and workers read."""

        os.ftruncate(self.epoch_fd, EPOCH_BYTES)
        self.first_look = FirstLook(timers, lambda error: agent.send({"kind": "looked", "errno": error}))
        self.failure: PartFailed | None = None
        """Why the present one can't do its work, in its own words."""

        self.was_ready = False
        """Whether one said that the mount is ready: until then a failure is the start's failure."""

        self.ready_fd = spec.ready_fd
        """On which a parent waits; None once it was told."""

        self._spec = spec
        self._gate = gate
        self._keeper = keeper
        self._timers = timers
        self._log = log
        self._environment = environment
        self._watch = PartWatch(spec.silent_s, START_S)
        self._listener: ControlListener | None = None

    def start(self) -> None:
        """Start the first one."""
        self.launch()
        self._timers.after("agent start", START_S, self._start_is_late)

    def launch(self) -> None:
        """Start one, unless one runs."""
        if self.agent.running:
            return
        self.failure = None
        if self._keeper.start(
            self.agent,
            lambda: self.agent.launch(self._spec, self.epoch_fd, self._environment, self.ready_fd),
            self.launch,
        ):
            self._watch.started()
            self.look()
            self.agent.hand_to(self._gate, again=False)

    def hear(self, phase: Phase) -> Iterator[Message]:
        """What it has said, in this phase of the mount: heeded here as far as it concerns the agent alone."""
        for message in self.agent.receive():
            kind = message["kind"]
            if kind == "pong":
                self._watch.answered()
            elif kind == "ready":
                self._is_ready()
            elif kind == "failed":
                self.failure = _failure(message)
                if phase != "stopping" and not self.was_ready:
                    raise self.failure
            else:
                if kind == "prepared":
                    if self.agent.ready:
                        continue  # said once; each answer would take the control socket's descriptor along
                    self.agent.is_ready()
                    self._timers.cancel("agent start")
                yield message

    def look(self) -> None:
        """Ask for a sign of life."""
        if not self.agent.running:
            return
        verdict = self._watch.look(time.monotonic())
        if verdict == "ask":
            self.agent.send({"kind": "ping"})
        elif verdict == "stuck":
            self._log.error("the agent is stuck and is replaced", pid=self.agent.pid)
            self._keeper.abort(self.agent)

    def tell_serving(self, description: dict[str, Any]) -> None:
        """The mount serves, and this is what there is to know of it."""
        if self._listener is None:
            # Not before there is a mount: of two starts at once, the one that is refused must not take this name.
            self._listener = ControlListener(Path(self._spec.control_socket))
        self.agent.send({"kind": "serving", **description}, (self._listener.socket.fileno(),))

    def ended(self, how: str, phase: Phase) -> None:
        """Its process ended; in this phase of the mount."""
        delay_s, is_looping = self.agent.died()
        follows = after_other(phase, is_hopeless=is_looping and not self.was_ready)
        if follows == "too early":
            raise PartFailed(f"the agent ended with {how} before the mount was ready")
        if follows == "again":
            if self.failure:
                self._log.warning("the agent failed, reads go on", reason=str(self.failure), again_in_s=delay_s)
            else:
                self._log.warning("the agent ended, reads go on", how=how, again_in_s=delay_s)
            self._timers.after(self.agent.name, delay_s, self.launch)

    def close(self, *, is_last: bool) -> None:
        """None runs any more. `is_last`: nobody takes the control socket's name over."""
        if self._listener is not None:
            self._listener.close(is_last=is_last)
        with contextlib.suppress(OSError):
            os.unlink(self._spec.agent_socket)

    def _is_ready(self) -> None:
        self.was_ready = True
        self._log.info("ready", mountpoint=self._spec.mountpoint)
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None

    def _start_is_late(self) -> None:
        raise PartFailed(f"the agent was not prepared within {START_S:.0f} s")


def chosen_mode(message: Message, asked_for: str) -> str:
    """The open mode of a new mount, as the agent that is prepared says. PartFailed when that is none to choose."""
    mode = message.get("open_mode")
    if mode in ("no-open", "passthrough") and asked_for in ("auto", mode):
        return str(mode)
    raise PartFailed(f"the agent chose open_mode {mode!r} where {asked_for} was asked for")


def _failure(message: Message) -> PartFailed:
    failure = PartFailed(str(message.get("text", "")))
    code = message.get("exit_code")
    failure.exit_code = code if type(code) is int and 0 < code < 256 else 1
    return failure
