"""The process of a mount that runs a gate: mounts, starts and restarts every part, takes all down again. Main program.

    agent (connects, opens the store, says the mode) -> mount(2) -> gate -> workers -> serving -> umount or signal

One thread, one poll loop: signals come through a wakeup descriptor, children's ends through SIGCHLD, messages from
agent and gate through their control sockets. It answers no request of the kernel, opens no connection, and imports the
standard library only: it is the process that must not die. When it does, the kernel kills every part (PDEATHSIG) and
ends the connection with its last descriptor: callers get errors, and a dead mount stays until the next one there.
(Except where the gate hangs in a notification at that moment: it holds the device until the connection is aborted, as
`fusecache umount` does with a mount that does not answer.)

What happens when a part dies (`restart_policy` says how often and when):
  worker  the gate gives its requests to another one; a new process takes its place. While all of them crash-loop, the
          gate answers EIO, and one is tried every 10 s.
  gate    what it had read is put back by the kernel (RESEND) or answered ECONNABORTED (without it); the spare gate,
          which stands by with everything loaded, goes on with the same workers. A crash-looping gate ends the mount,
          with exit code 70.
  agent   reads go on, metadata waits; started again with growing delays, for as long as it takes.
Gate and agent are asked for a sign of life, and a worker has to take what it is given: who does not for `silent_s`
prints its stacks (ABRT) and is killed.
Before the mount is ready a dead agent or gate, or a crash-looping worker, ends the start with an error.

A later process on the same mount point takes the mount over: this one gives it what it holds and ends, and nobody's
read fails (`takeover`). SIGHUP starts such a process, with the configuration as it is by then
(`takeover.reloading`); this one then stays as its parent (`takeover.first_process`).

On the way down: unmount (a busy mount is detached after BUSY_S, and said so), let what is in flight finish for at most
grace_s, then end workers, agent, embedded server. A second signal ends all at once.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from fusecache.errors import FusecacheError, MountError
from fusecache.kernel import last_words
from fusecache.kernel.channel import Channel, Message
from fusecache.kernel.control_listener import ControlListener
from fusecache.kernel.ending import end_parts, end_session
from fusecache.kernel.first_look import FirstLook
from fusecache.kernel.keeping import AGAIN_S, Keeper
from fusecache.kernel.log import Log
from fusecache.kernel.part_watch import PartWatch
from fusecache.kernel.parts import Part, ending, leader_is_dead
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.restart_policy import RestartPolicy
from fusecache.kernel.roles import Agent, Gate
from fusecache.kernel.session import MountSession
from fusecache.kernel.signals import Signals, has_terminal
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.status_table import describe
from fusecache.kernel.takeover.first_process import become, hold_signals
from fusecache.kernel.takeover.new_side import TakingOver
from fusecache.kernel.takeover.old_side import HandingOver
from fusecache.kernel.takeover.reloading import Reloading
from fusecache.kernel.takeover.states import NewAction
from fusecache.kernel.timers import Timers
from fusecache.kernel.tuning import set_read_ahead
from fusecache.kernel.unmounting import Unmounting
from fusecache.kernel.workers import Workers

UNEXPECTED: Final = 70
"""EX_SOFTWARE: a part of ours failed, or a bug."""

EPOCH_BYTES: Final = 4096
"""The first 8 hold the metadata epoch, which the agent counts up and workers read."""

AGENT_START_S: Final = 300.0
"""The agent has its own, shorter limits for the cluster and the root; this one is for an agent that hangs."""

PARTS_END_S: Final = 8.0
"""SIGTERM to SIGKILL for workers and agent, which closes its store."""

EMBEDDED_END_S: Final = 5.0
EMBEDDED_FIRST_DELAY_S: Final = 0.5
LOOK_S: Final = 1.0
"""How often gate and agent are looked at."""

GATE_START_S: Final = 30.0
"""To a gate's first word, which takes 0.2 s, and seconds on a machine that is busy."""

SUCCESSOR_END_S: Final = 2.0
"""SIGTERM to SIGKILL for a process that was about to take over a mount that ends."""

RELOAD_AGAIN_S: Final = 0.5
"""Until SIGHUP is looked at again that came while the mount was on its way from or to another process."""

SPARE_S: Final = 1.0
"""From a gate's start to that of its spare: the mount has the processor for itself while it catches up."""

State = Literal["preparing", "starting", "serving", "stopping"]


class Outcome(NamedTuple):
    """How the mount ended."""

    exit_code: int
    error: str


class Supervisor:
    """One mount and its parts."""

    def __init__(self, spec: MountSpec) -> None:
        self._spec = spec
        self._log = Log("fusecache.kernel.supervisor", spec.log_level)
        self._state: State = "preparing"
        self._outcome: Outcome | None = None
        self._ready_fd = spec.ready_fd
        self._agent_failure: Outcome | None = None
        self._mode_reason = ""
        self._session: MountSession | None = None
        self._read_ahead_error: str | None = None
        self._agent = Agent()
        self._gate = Gate()
        self._spare = Gate("spare gate")
        self._embedded = Part("embedded server", RestartPolicy(EMBEDDED_FIRST_DELAY_S))
        self._embedded.pid = spec.embedded_pid
        self._dead_gates: list[Part] = []
        """Whose first thread has ended while another one hangs in a notification."""

        self._past_gates: list[Part] = []
        """Emptied, or not needed any more: about to end."""

        self._control: ControlListener | None = None
        """The control socket, once the mount serves."""

        self._unmounting: Unmounting | None = None
        self._was_ready = False
        """Whether an agent said that the mount is ready: until then a failure is the start's failure."""

        self._hurry = False
        self._started_at_s = time.monotonic()
        self._gate_watch = PartWatch(spec.silent_s, GATE_START_S)
        self._agent_watch = PartWatch(spec.silent_s, AGENT_START_S)
        self._timers = Timers()
        self._keeper = Keeper(self._timers, self._log)
        self._first_look = FirstLook(self._timers, lambda error: self._send_agent({"kind": "looked", "errno": error}))
        self._environment = {**os.environ, **spec.environment}
        self._epoch_fd = os.memfd_create("fusecache-epoch", os.MFD_CLOEXEC)
        os.ftruncate(self._epoch_fd, EPOCH_BYTES)
        self._workers = Workers(
            spec,
            self._gate,
            self._keeper,
            self._timers,
            self._log,
            epoch_fd=self._epoch_fd,
            environment=self._environment,
        )
        self._taking = self._takes_over() if spec.takeover else None
        if self._taking is None:
            self._table_fd = os.memfd_create("fusecache-open-table", os.MFD_CLOEXEC)
        else:
            self._table_fd = self._taking.descriptors.open_table
        self._handing = HandingOver(
            spec,
            self._gate,
            (self._agent, self._embedded),
            {
                "leave": self._leave,
                "start parts": self._start_parts_again,
                "refill gate": self._refill_gate,
                "replace gate": lambda: self._replace_gate("SIGKILL"),
            },
            table_fd=self._table_fd,
            keeper=self._keeper,
            timers=self._timers,
            log=self._log,
        )
        self._ends_later: str | None = None
        """Who asked for the end in the middle of a take-over, which is first to be decided."""

        self._reloading = Reloading(spec, self._log, lambda: None)  # `_leave` comes first, or at once
        self._is_succeeded = False
        """The successor that this process started has the mount."""

        self._hang_up_ends = has_terminal() or not (spec.successor_argv or spec.parent_reloads)
        """Seen now, for a terminal that was closed is none."""

        for inherited in (spec.plan_fd, spec.ready_fd, spec.command_fd):
            if inherited is not None:
                os.set_inheritable(inherited, False)
        self._signals = Signals((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

    def run(self) -> int:
        """Serve until the end; the exit code. Nothing of it is left then: no process, no mount of ours. Does not return
        where a successor has the mount that this process started."""
        try:
            self._launch_agent()
            self._timers.after("agent start", AGENT_START_S, self._agent_start_is_late)
            while self._outcome is None:
                self._turn()
        except FusecacheError as failure:
            self._fail(failure.exit_code, str(failure))
        except Exception as failure:
            self._fail(UNEXPECTED, f"a bug in fusecache: {type(failure).__name__}: {failure}")
            raise
        finally:
            outcome = self._outcome or Outcome(UNEXPECTED, "")
            self._end_parts()
            if outcome.error:
                last_words.say(outcome.exit_code, outcome.error, self._ready_fd)
        if self._is_succeeded:
            become(self._spec, self._reloading)
        return outcome.exit_code

    def _takes_over(self) -> TakingOver:
        steps: dict[NewAction, Callable[[], None]] = {"take": self._take, "save": self._save, "serve": self._serve}
        return TakingOver(self._spec, steps, self._timers, self._log)

    # The loop.

    def _turn(self) -> None:
        """Wait for what comes next, and do it."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        sources = self._handing.sources() | self._reloading.sources()
        if self._taking is not None:
            sources |= self._taking.sources()
        for descriptor in sources:
            poll.register(descriptor, select.POLLIN)
        channels: dict[int, tuple[Channel, Callable[[], None]]] = {}
        for channel, handler in (
            (self._agent.channel, self._read_agent),
            (self._gate.channel, self._read_gate),
            (self._spare.channel, self._read_spare),
        ):
            if channel is not None and not channel.closed:
                channels[channel.fileno()] = (channel, handler)
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_waiting else 0))
        for descriptor, events in poll.poll(self._timers.timeout_ms()):
            if self._outcome is not None:
                break
            if descriptor in channels:
                channel, handler = channels[descriptor]
                if events & select.POLLOUT:
                    channel.flush()
                if events & ~select.POLLOUT:
                    handler()
            elif descriptor in sources:
                sources[descriptor]()
        self._take_signals()
        if self._outcome is None:
            self._timers.run()

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGHUP and not self._hang_up_ends:
                self._reload()
            elif number != signal.SIGCHLD:
                self._asked_to_end(number.name, 128 + number)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self._child_ended(pid, status)

    def _child_ended(self, pid: int, status: int) -> None:
        if self._unmounting is not None and pid == self._unmounting.pid:
            self._unmounting.ended(os.waitstatus_to_exitcode(status))
        elif pid == self._reloading.successor.pid:
            self._reloading.ended(status)
        elif pid == self._first_look.pid:
            self._first_look.finished(os.waitstatus_to_exitcode(status))
        elif pid == self._agent.pid:
            self._read_agent()  # its last words
            self._agent_ended(ending(status))
        elif pid == self._gate.pid:
            self._read_gate()
            if pid == self._gate.pid:  # else it was emptied, which ends it
                self._gate_ended(ending(status))
        elif pid == self._spare.pid:
            self._spare_ended(ending(status))
        elif pid == self._embedded.pid:
            self._embedded_ended(ending(status))
        elif worker := self._workers.of(pid):
            # Unmounted: the gate closed its sockets, and its own end comes next.
            again = self._state != "stopping" and (self._session is None or self._session.is_connected())
            self._workers.ended(worker, ending(status), again=again)
        else:
            self._dead_gates = [gate for gate in self._dead_gates if gate.pid != pid]
            self._past_gates = [gate for gate in self._past_gates if gate.pid != pid]

    # Agent.

    def _launch_agent(self) -> None:
        self._agent_failure = None
        if not self._keeper.start(
            self._agent,
            lambda: self._agent.launch(self._spec, self._epoch_fd, self._environment, self._ready_fd),
            self._launch_agent,
        ):
            return
        self._agent_watch.started()
        self._look_at_agent()
        self._hand_agent_to_gate()

    def _look_at_agent(self) -> None:
        """Every LOOK_S while it runs: ask for a sign of life."""
        if not self._agent.running:
            return
        verdict = self._agent_watch.look(time.monotonic())
        if verdict == "ask":
            self._send_agent({"kind": "ping"})
        elif verdict == "stuck":
            self._log.error("the agent is stuck and is replaced", pid=self._agent.pid)
            self._keeper.abort(self._agent)
        self._timers.after("agent look", LOOK_S, self._look_at_agent)

    def _read_agent(self) -> None:
        channel = self._agent.channel
        for message in channel.receive() if channel is not None else []:
            kind = message["kind"]
            if kind == "prepared":
                self._agent_prepared(message)
            elif kind == "failed":
                self._agent_failed(message)
            elif kind == "ready":
                self._agent_is_ready()
            elif kind == "pong":
                self._agent_watch.answered()
            elif kind == "status":
                self._send_agent({"kind": "status", **self._describe()})
            elif kind == "look":
                if self._session is not None:
                    self._first_look.begin(self._session.mountpoint)
            elif kind == "stop":
                if self._state == "serving":
                    self._asked_to_end("the agent's request", UNEXPECTED)
            else:
                self._log.warning("a message of the agent is not understood", kind=kind)

    def _send_agent(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        if self._agent.channel is not None:
            self._agent.channel.send(message, descriptors)

    def _agent_prepared(self, message: Message) -> None:
        self._agent.is_ready()
        self._timers.cancel("agent start")
        self._handing.cluster_id = str(message.get("cluster_id", ""))
        if self._state == "preparing" and self._taking is not None:
            self._taking.check_cluster(self._handing.cluster_id)
            self._mode_reason = f"as before: taken over from version {self._taking.facts.version}"
            self._adopt(self._taking)
        elif self._state == "preparing":
            mode = message.get("open_mode")
            if mode not in ("no-open", "passthrough") or self._spec.open_mode not in ("auto", mode):
                self._fail(UNEXPECTED, f"the agent chose open_mode {mode!r} where {self._spec.open_mode} was asked for")
                return
            self._mode_reason = str(message.get("why", ""))
            self._mount(mode)
        elif self._state == "serving":
            self._tell_agent_serving()

    def _agent_failed(self, message: Message) -> None:
        """It can't do its work, and says why. Ends the mount only when it never was ready."""
        code = message.get("exit_code")
        self._agent_failure = Outcome(code if type(code) is int and 0 < code < 256 else 1, str(message.get("text", "")))
        if self._state != "stopping" and not self._was_ready:
            self._fail(*self._agent_failure)

    def _agent_is_ready(self) -> None:
        self._was_ready = True
        self._log.info("ready", mountpoint=self._spec.mountpoint)
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None

    def _agent_ended(self, how: str) -> None:
        if self._handing.course.is_active:
            self._agent.ended()
            self._handing.part_ended()
            return
        verdict = self._agent.policy.died(time.monotonic(), self._agent.ready_at_s)
        self._agent.ended()
        if self._state in ("preparing", "starting") or (verdict.looping and not self._was_ready):
            self._fail(UNEXPECTED, f"the agent ended with {how} before the mount was ready")
        elif self._state == "serving":
            if self._agent_failure:
                reason = self._agent_failure.error
                self._log.warning("the agent failed, reads go on", reason=reason, again_in_s=verdict.delay_s)
            else:
                self._log.warning("the agent ended, reads go on", how=how, again_in_s=verdict.delay_s)
            self._timers.after("agent", verdict.delay_s, self._launch_agent)

    def _agent_start_is_late(self) -> None:
        self._fail(UNEXPECTED, f"the agent was not prepared within {AGENT_START_S:.0f} s")

    def _tell_agent_serving(self) -> None:
        if self._control is None:
            # Not before there is a mount: of two starts at once, the one that is refused must not take this name.
            self._control = ControlListener(Path(self._spec.control_socket))
        self._send_agent({"kind": "serving", **self._describe()}, (self._control.socket.fileno(),))

    # Mount, gate, workers.

    def _mount(self, open_mode: str) -> None:
        self._session = MountSession.mounted(self._spec, open_mode)
        self._state = "starting"
        self._log.info(
            "mounted", mountpoint=self._spec.mountpoint, device=self._session.device_number, open_mode=open_mode
        )
        self._launch_gate()
        self._workers.start(self._session)

    def _adopt(self, taking: TakingOver) -> None:
        """Start what a mount needs, beside the process that still has it."""
        self._session = taking.session(self._spec)
        self._state = "starting"
        if taking.is_alone:
            self._save()
        else:
            self._launch_gate(standby=True)
        self._workers.start(self._session)

    def _take(self) -> None:
        """The token is this side's: go on where the old gate stopped."""
        assert self._session is not None
        assert self._taking is not None
        assert self._taking.carried_fd is not None
        self._session.is_ours = True
        self._gate.send({"kind": "go"}, (self._taking.carried_fd,))
        self._serve()
        self._taking.say_serving()

    def _save(self) -> None:
        """The process that had the mount is gone, and its gate with it: what that had read goes the way of every dead
        gate's requests."""
        if self._session is None:
            return  # until the agent is prepared
        if not self._session.is_connected():
            self._fail(MountError.exit_code, f"{self._spec.mountpoint!r} was unmounted before it was taken over")
            return
        self._session.is_ours = True
        if self._gate.running:
            self._gate.kill(signal.SIGKILL)
            self._set_gate_aside("gate in waiting")
        self._session.renew_gate_device(resend=self._spec.features.usable("resend"))
        self._launch_gate()
        if self._workers.all_ready:
            assert self._taking is not None
            self._taking.happens("all ready")

    def _set_gate_aside(self, name: str) -> None:
        """Its process is as good as ended, and no longer the gate."""
        aside = Part(name, RestartPolicy())
        aside.pid = self._gate.pid
        self._past_gates.append(aside)
        self._gate.ended()

    def _launch_gate(self, *, standby: bool = False) -> None:
        """`standby`: it waits for `go`."""
        session = self._session
        assert session is not None
        if self._spare.ready:
            self._gate.adopt(self._spare)
        elif not self._keeper.start(
            self._gate,
            lambda: self._gate.launch(self._spec, self._environment),
            lambda: self._launch_gate(standby=standby),
        ):
            return
        settings = {**session.gate_settings(), "open_mode": session.open_mode, "standby": standby}
        self._gate.begin(self._spec, session.gate_device, self._table_fd, settings)
        self._gate_watch.started()
        self._look_at_gate()  # its answer says that it is ready
        if self._agent.running:
            self._hand_agent_to_gate(again=self._gate.restarts > 0)
        self._workers.gate_started()

    def _hand_agent_to_gate(self, *, again: bool = False) -> None:
        if self._agent.gate_link is not None:
            self._gate.send({"kind": "agent", "again": again}, (self._agent.gate_link.fileno(),))

    def _launch_spare(self) -> None:
        """A gate that stands by: what takes time is an interpreter with its modules."""
        if not self._spare.running:
            self._keeper.start(
                self._spare, lambda: self._spare.launch(self._spec, self._environment), self._launch_spare
            )

    def _read_spare(self) -> None:
        channel = self._spare.channel
        for message in channel.receive() if channel is not None else []:
            if message["kind"] == "standing_by":
                self._spare.is_ready()

    def _spare_ended(self, how: str) -> None:
        verdict = self._spare.policy.died(time.monotonic(), self._spare.ready_at_s)
        self._spare.ended()
        if self._state == "serving":
            delay_s = max(SPARE_S, verdict.delay_s)
            self._log.warning("the spare gate ended", how=how, again_in_s=delay_s)
            self._timers.after(self._spare.name, delay_s, self._launch_spare)

    def _read_gate(self) -> None:
        channel = self._gate.channel
        for message in channel.receive() if channel is not None else []:
            kind = message["kind"]
            if kind == "standing_by":
                continue
            if kind != "failed":
                self._gate.is_ready()
            if kind == "initialised":
                self._serve()
            elif kind == "worker_ready":
                self._workers.is_ready(message)
                if self._taking is not None and self._workers.all_ready:
                    self._taking.happens("all ready")
            elif kind == "handed_over":
                self._set_gate_aside("emptied gate")
                self._handing.happens("gate emptied")
            elif kind == "worker_broken":
                self._workers.is_broken(message)
            elif kind == "not_now" and message.get("order") == "agent":
                self._timers.after("agent's link", AGAIN_S, lambda: self._hand_agent_to_gate(again=True))
            elif kind == "not_now":
                self._workers.is_not_taken(message)
            elif kind == "status":
                self._gate_watch.answered()
                self._workers.look(message)
            elif kind == "failed":
                self._gate.failure = str(message.get("text", ""))
            else:
                self._log.warning("a message of the gate is not understood", kind=kind)

    def _serve(self) -> None:
        """The kernel has its answer to INIT: from here on requests are answered."""
        assert self._session is not None
        self._session.initialised = True
        if self._state != "starting":
            return
        self._state = "serving"
        # Others read already where it was taken over: from now on only the agent's start can fail, and is tried again.
        self._was_ready = self._taking is not None
        self._keeper.patient = True
        self._workers.serve()
        self._timers.after(self._spare.name, SPARE_S, self._launch_spare)
        self._read_ahead_error = set_read_ahead(self._session.device_number, self._spec.read_ahead_bytes)
        if self._read_ahead_error:
            self._log.warning("the read-ahead stays at the kernel's default", reason=self._read_ahead_error)
        self._handing.listen(self._session)
        self._tell_agent_serving()

    def _gate_ended(self, how: str) -> None:
        """Its process is gone, or only its first thread (`how` says): one that hangs is in `_dead_gates`."""
        assert self._session is not None
        verdict = self._gate.policy.died(time.monotonic(), self._gate.ready_at_s)
        self._gate.ended()
        reason = f": {self._gate.failure}" if self._gate.failure else ""
        if self._state == "stopping":
            self._outcome = Outcome(0, "")
        elif not self._session.is_connected():
            self._log.info("unmounted", mountpoint=self._spec.mountpoint)
            self._outcome = Outcome(0, "")
        elif self._state != "serving":
            self._fail(UNEXPECTED, f"the gate ended with {how} before the mount was ready{reason}")
        elif self._handing.course.is_active:
            self._handing.happens("gate ended")
        elif verdict.looping:
            self._fail(UNEXPECTED, f"the gate ended with {how} again and again{reason}")
        else:
            self._replace_gate(how)

    def _replace_gate(self, how: str) -> None:
        assert self._session is not None
        # What killed two gates at their start may be a request, which must not be put back a third time.
        resend = self._spec.features.usable("resend") and self._gate.policy.counted_deaths < 2
        if self._dead_gates and not resend:
            self._fail(UNEXPECTED, f"the gate ended with {how}, and the requests that it had can't be given back")
            return
        self._log.error(
            "the gate ended; requests in flight are " + ("put back" if resend else "answered ECONNABORTED"),
            how=how,
            reason=self._gate.failure,
        )
        self._session.renew_gate_device(resend=resend)
        self._launch_gate()
        self._timers.after(self._spare.name, SPARE_S, self._launch_spare)

    def _look_at_gate(self) -> None:
        """Every LOOK_S: ask for a sign of life, and see what waitpid does not tell (`parts.leader_is_dead`)."""
        if self._gate.pid is not None and leader_is_dead(self._gate.pid):
            # Putting its requests back lets the notification that it hangs in, and so the process, end.
            hanging = Part("dead gate", RestartPolicy())
            hanging.pid = self._gate.pid
            self._dead_gates.append(hanging)
            self._gate_ended("a signal, while a notification hangs")
            return
        if not self._gate.running:
            return  # emptied: the next one is looked at from its start on
        verdict = self._gate_watch.look(time.monotonic())
        if verdict == "ask":
            self._gate.send({"kind": "status"})
        elif verdict == "stuck":
            self._log.error("the gate is stuck and is replaced", pid=self._gate.pid)
            self._keeper.abort(self._gate)
        self._timers.after("gate", LOOK_S, self._look_at_gate)

    def _embedded_ended(self, how: str) -> None:
        self._embedded.ended()
        if self._handing.course.is_active:
            self._handing.part_ended()
        elif self._state in ("preparing", "starting"):
            self._fail(UNEXPECTED, f"the embedded server ended with {how} before the mount was ready")
        elif self._state == "serving":
            delay_s = self._embedded.policy.died(time.monotonic(), None).delay_s
            self._log.error("the embedded server ended: only what is cached can be read", how=how, again_in_s=delay_s)
            self._timers.after(self._embedded.name, delay_s, self._launch_embedded)

    def _launch_embedded(self) -> None:
        """At the address that agent and workers know. Its folder may still be another one's that is about to end."""
        if self._embedded.running or not self._spec.embedded_argv:
            return
        self._keeper.start(
            self._embedded,
            lambda: self._embedded.start(self._spec.embedded_argv, (), self._environment, lambda: None),
            self._launch_embedded,
        )

    # The way down.

    def _asked_to_end(self, by: str, exit_code: int) -> None:
        """`exit_code`: when nothing is served yet."""
        self._reloading.end()
        if self._handing.course.is_active and self._ends_later is None:
            self._log.info("ending, once it is clear who has the mount", signal=by)
            self._ends_later = by
        elif self._handing.course.is_active:
            self._fail(0, "")
        elif self._state == "stopping":
            self._log.warning("second signal: ending without waiting", signal=by)
            self._hurry = True
            self._outcome = Outcome(0, "")
        elif self._state != "serving" or self._session is None:
            self._fail(exit_code, f"ended by {by} before the mount was ready")
        else:
            self._state = "stopping"
            self._log.info("ending", signal=by)
            self._unmounting = Unmounting(self._session, self._timers, self._log, self._drain)

    def _drain(self) -> None:
        """No new requests; what is in flight is answered. The gate's end is the end."""
        if self._outcome is not None:
            return
        if not self._gate.running:
            self._outcome = Outcome(0, "")
            return
        self._gate.send({"kind": "stop"})
        self._timers.after("grace", self._spec.grace_s, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._log.warning("requests in flight did not finish in time", grace_s=self._spec.grace_s)
        self._outcome = Outcome(0, "")

    def _fail(self, exit_code: int, text: str) -> None:
        """End with an error; the first one is told."""
        if self._outcome is None:
            self._outcome = Outcome(exit_code, text)

    def _end_parts(self) -> None:
        """Everything that runs, in the order in which nobody misses what ends before it."""
        self._timers.clear()
        goes_on = self._handing.course.is_given
        if self._reloading.successor.running and not self._is_succeeded:
            goes_on = goes_on and self._handing.taker_pid != self._reloading.successor.pid
            self._reloading.end()
            end_parts([self._reloading.successor], SUCCESSOR_END_S, self._signals, self._log, hurry=self._hurry)
        if self._session is not None and goes_on:
            self._session.is_ours = False  # whoever is taking over finds the token, and goes on alone
        is_last = self._session is None or self._session.is_ours
        self._handing.end(is_last=is_last)
        if self._session is not None:
            # First: callers shall get their errors at once.
            gates = [self._gate, *self._dead_gates, *self._past_gates]
            end_session(self._session, gates, self._signals, self._log)
        self._first_look.kill(signal.SIGKILL)
        parts = [*self._workers.parts, self._agent, self._spare, self._first_look]
        end_parts(parts, PARTS_END_S, self._signals, self._log, hurry=self._hurry)
        if self._control is not None:
            self._control.close(is_last=is_last)
        with contextlib.suppress(OSError):
            os.unlink(self._spec.agent_socket)
        end_parts([self._embedded], EMBEDDED_END_S, self._signals, self._log, hurry=self._hurry)

    # Handing over.

    def _reload(self) -> None:
        """SIGHUP, of somebody who wants the configuration to be read again."""
        if self._spec.parent_reloads:
            os.kill(os.getppid(), signal.SIGHUP)
        elif self._state == "serving" and (self._reloading.is_under_way or not self._handing.course.is_active):
            self._reloading.start()
        elif self._state != "stopping":
            self._timers.after("reload", RELOAD_AGAIN_S, self._reload)

    def _leave(self) -> None:
        """Another process has the mount. What is in flight here is answered there."""
        assert self._session is not None
        successor = self._reloading.successor.pid
        if successor is not None and self._handing.taker_pid == successor:
            self._is_succeeded = True
            hold_signals()
        self._session.is_ours = False
        self._hurry = True
        self._log.info("handed over", mountpoint=self._spec.mountpoint)
        self._outcome = Outcome(0, "")

    def _start_parts_again(self) -> None:
        """Nobody took the mount over. A part that has not ended yet is started at its end."""
        if self._ends_later is not None:
            self._asked_to_end(self._ends_later, UNEXPECTED)
            return
        self._launch_embedded()
        if not self._agent.running:
            self._launch_agent()

    def _refill_gate(self) -> None:
        """A gate again, with what the last one gave up."""
        assert self._handing.carried_fd is not None
        self._launch_gate(standby=True)
        self._gate.send({"kind": "go"}, (self._handing.carried_fd,))

    # What others are told.

    def _describe(self) -> dict[str, Any]:
        return describe(
            self._spec,
            self._session,
            (self._gate, self._spare, self._agent, *self._workers.parts),
            mode_reason=self._mode_reason,
            read_ahead_error=self._read_ahead_error,
            uptime_s=time.monotonic() - self._started_at_s,
        )


def main(arguments: Sequence[str]) -> int:
    """Run the mount whose specification is in the memfd `--spec-fd`; the exit code."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.supervisor")
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("shown", nargs="*", help="source and mount point, for whoever lists processes")
    faulthandler.register(signal.SIGUSR1)
    try:
        spec = MountSpec.from_descriptor(parser.parse_args(arguments).spec_fd)
    except FusecacheError as failure:
        print(f"fusecache: {failure}", file=sys.stderr)
        return failure.exit_code
    set_process_name("supervisor", spec.mountpoint)
    return Supervisor(spec).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
