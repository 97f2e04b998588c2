"""The process of a mount that runs a gate: mounts, starts and restarts every part, takes all down again. Main program.

    agent (connects, opens the store, says the mode) -> mount(2) -> gate -> workers -> serving -> umount or signal

One thread, one poll loop: signals come through a wakeup descriptor, children's ends through SIGCHLD, messages from
agent and gate through their control sockets. It answers no request of the kernel, opens no connection, and imports the
standard library only: it is the process that must not die. When it does, the kernel kills every part (PDEATHSIG) and
ends the connection with its last descriptor: callers get errors, and a dead mount stays until the next one there.

What happens when a part dies (`restart_policy` says how often and when):
  worker  the gate gives its requests to another one; a new process takes its place. While all of them crash-loop, the
          gate answers EIO, and one is tried every 10 s.
  gate    what it had read is put back by the kernel (RESEND) or answered ECONNABORTED (without it); a new gate and new
          workers go on. A crash-looping gate ends the mount, with exit code 70.
  agent   reads go on, metadata waits; started again with growing delays, for as long as it takes.
Before the mount is ready a dead agent or gate, or a crash-looping worker, ends the start with an error.

On the way down: unmount (a busy mount is detached after BUSY_S, and said so), let what is in flight finish for at most
GRACE_S, then end workers, agent, embedded server. A second signal ends all at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from fusecache.errors import FusecacheError
from fusecache.kernel import device
from fusecache.kernel.channel import Channel, Message
from fusecache.kernel.log import Log
from fusecache.kernel.parts import Part, ending
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.roles import Agent, Gate, Worker
from fusecache.kernel.session import MountSession
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.tuning import set_read_ahead

UNEXPECTED: Final = 70
"""EX_SOFTWARE: a part of ours failed, or a bug."""

EPOCH_BYTES: Final = 4096
"""The first 8 hold the metadata epoch, which the agent counts up and workers read."""

AGENT_START_S: Final = 300.0
"""The agent has its own, shorter limits for the cluster and the root; this one is for an agent that hangs."""

WORKER_START_S: Final = 60.0
"""From mount(2) to the first worker's answer to INIT, and from a worker's start to its being ready."""

BUSY_S: Final = 0.5
"""A mount that is still busy after this is detached: its name is free for the next mount at once."""

BUSY_POLL_S: Final = 0.1
UNMOUNT_S: Final = 10.0
"""One umount2(2): it walks the path, and what lies above may hang."""

GRACE_S: Final = 10.0
"""How long requests in flight may take to finish; Kubernetes kills after 30 s by default."""

PARTS_END_S: Final = 8.0
"""SIGTERM to SIGKILL for workers and agent, which closes its store."""

EMBEDDED_END_S: Final = 5.0
KILLED_S: Final = 5.0
"""A killed process that is still there after this hangs in the kernel, and is left behind."""

GATE_TICKS: Final = 6
"""How often the gate is asked for its counters within the time after which its silence counts."""

STACKS_S: Final = 1.0
"""From SIGABRT, at which a part prints its stacks, to SIGKILL."""

_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

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
        self._workers = [Worker(index) for index in range(spec.workers)]
        self._unmounter = 0
        self._unmount_until_s = 0.0
        self._hurry = False
        self._workers_failing = False
        self._gate_answered_at_s = 0.0
        self._started_at_s = time.monotonic()
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._environment = {**os.environ, **spec.environment}
        self._epoch_fd = os.memfd_create("fusecache-epoch", os.MFD_CLOEXEC)
        os.ftruncate(self._epoch_fd, EPOCH_BYTES)
        self._table_fd = os.memfd_create("fusecache-open-table", os.MFD_CLOEXEC)
        for inherited in (spec.plan_fd, spec.ready_fd):
            if inherited is not None:
                os.set_inheritable(inherited, False)
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        signal.set_wakeup_fd(wakeup_end.detach(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            # SIGHUP stays ignored under nohup.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Serve until the end; the exit code. Nothing of it is left then: no process, no mount of ours."""
        try:
            self._launch_agent()
            self._after("agent start", AGENT_START_S, self._agent_start_is_late)
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
            self._tell_parent(outcome)
        return outcome.exit_code

    # The loop.

    def _turn(self) -> None:
        """Wait for what comes next, and do it."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        channels: dict[int, tuple[Channel, Callable[[], None]]] = {}
        for channel, handler in ((self._agent.channel, self._read_agent), (self._gate.channel, self._read_gate)):
            if channel is not None and not channel.closed:
                channels[channel.fileno()] = (channel, handler)
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_waiting else 0))
        for descriptor, events in poll.poll(self._timeout_ms()):
            if descriptor in channels:
                channel, handler = channels[descriptor]
                if events & select.POLLOUT:
                    channel.flush()
                if events & ~select.POLLOUT:
                    handler()
        self._take_signals()
        self._run_timers()

    def _timeout_ms(self) -> int | None:
        if not self._timers:
            return None
        next_s = min(when for when, _ in self._timers.values())
        return max(0, int((next_s - time.monotonic()) * 1000) + 1)

    def _after(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` later; a timer of the same name is replaced."""
        self._timers[name] = (time.monotonic() + delay_s, action)

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        for name in [name for name, (when, _) in self._timers.items() if when <= now_s]:
            _, action = self._timers.pop(name)
            if self._outcome is None:
                action()

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wakeup.recv(4096):
                if number != signal.SIGCHLD:
                    self._asked_to_end(signal.Signals(number).name)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self._child_ended(pid, status)

    def _child_ended(self, pid: int, status: int) -> None:
        if pid == self._unmounter:
            self._unmounter = 0
            self._unmount_answered(os.waitstatus_to_exitcode(status))
        elif pid == self._agent.pid:
            self._read_agent()  # its last words
            self._agent_ended(ending(status))
        elif pid == self._gate.pid:
            self._read_gate()
            self._gate_ended(ending(status))
        elif pid == self._spec.embedded_pid:
            self._embedded_ended(ending(status))
        else:
            for worker in self._workers:
                if pid == worker.pid:
                    self._worker_ended(worker, ending(status))

    # Agent.

    def _launch_agent(self) -> None:
        self._agent_failure = None
        self._agent.launch(self._spec, self._epoch_fd, self._environment, self._ready_fd)
        if self._agent.gate_link is not None:
            self._gate.send({"kind": "agent"}, (self._agent.gate_link.fileno(),))

    def _read_agent(self) -> None:
        channel = self._agent.channel
        for message in channel.receive() if channel is not None else []:
            kind = message["kind"]
            if kind == "prepared":
                self._agent_prepared(message)
            elif kind == "failed":
                self._agent_failed(message)
            elif kind == "ready":
                self._close_ready_fd()
                self._log.info("ready", mountpoint=self._spec.mountpoint)
            elif kind == "status":
                self._send_agent({"kind": "status", **self._describe()})
            elif kind == "stop":
                if self._state == "serving":
                    self._asked_to_end("the agent's request")
            else:
                self._log.warning("a message of the agent is not understood", kind=kind)

    def _send_agent(self, message: Message) -> None:
        if self._agent.channel is not None:
            self._agent.channel.send(message)

    def _agent_prepared(self, message: Message) -> None:
        self._agent.is_ready()
        self._timers.pop("agent start", None)
        if self._state == "preparing":
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
        if self._state in ("preparing", "starting") or (self._state == "serving" and self._ready_fd is not None):
            self._fail(*self._agent_failure)

    def _agent_ended(self, how: str) -> None:
        verdict = self._agent.policy.died(time.monotonic(), self._agent.ready_at_s)
        self._agent.ended()
        if self._state in ("preparing", "starting"):
            self._fail(UNEXPECTED, f"the agent ended with {how} before the mount was ready")
        elif self._state == "serving":
            if self._agent_failure:
                reason = self._agent_failure.error
                self._log.warning("the agent failed, reads go on", reason=reason, again_in_s=verdict.delay_s)
            else:
                self._log.warning("the agent ended, reads go on", how=how, again_in_s=verdict.delay_s)
            self._after("agent", verdict.delay_s, self._launch_agent)

    def _agent_start_is_late(self) -> None:
        self._fail(UNEXPECTED, f"the agent was not prepared within {AGENT_START_S:.0f} s")

    def _tell_agent_serving(self) -> None:
        self._send_agent({"kind": "serving", **self._describe()})

    # Mount, gate, workers.

    def _mount(self, open_mode: str) -> None:
        self._session = MountSession(self._spec, open_mode)
        self._state = "starting"
        self._log.info(
            "mounted", mountpoint=self._spec.mountpoint, device=self._session.device_number, open_mode=open_mode
        )
        self._launch_gate()
        for worker in self._workers:
            self._launch_worker(worker)
        self._after("workers start", WORKER_START_S, self._workers_start_is_late)

    def _launch_gate(self) -> None:
        assert self._session is not None
        settings = {**self._session.gate_settings(), "open_mode": self._session.open_mode}
        self._gate.launch(self._spec, self._session.gate_device, self._table_fd, settings, self._environment)
        self._gate_answered_at_s = time.monotonic()
        self._after("gate tick", self._spec.gate_silent_s / GATE_TICKS, self._ask_gate)
        if self._agent.gate_link is not None:
            self._gate.send({"kind": "agent"}, (self._agent.gate_link.fileno(),))
        for worker in self._workers:
            worker.hand_to(self._gate)

    def _launch_worker(self, worker: Worker) -> None:
        assert self._session is not None
        worker.launch(
            self._spec,
            self._epoch_fd,
            self._session.open_mode,
            self._session.device_number,
            self._environment,
        )
        worker.hand_to(self._gate)
        self._after(worker.name, WORKER_START_S, lambda: self._worker_is_late(worker))

    def _workers_start_is_late(self) -> None:
        self._fail(UNEXPECTED, f"no worker answered the kernel's INIT within {WORKER_START_S:.0f} s")

    def _worker_is_late(self, worker: Worker) -> None:
        if worker.running and not worker.ready:
            self._log.warning("a worker is not ready in time and is killed", part=worker.name, pid=worker.pid)
            worker.kill(signal.SIGKILL)

    def _worker_ended(self, worker: Worker, how: str) -> None:
        pid, replaced = worker.pid, worker.replaced
        delay_s = 0.0
        if not replaced:
            delay_s = worker.policy.died(time.monotonic(), worker.ready_at_s).delay_s
        worker.ended()
        if self._state == "stopping":
            return
        if not replaced:
            self._log.warning(
                "a worker ended", part=worker.name, pid=pid, how=how, restarts=worker.restarts, again_in_s=delay_s
            )
        if self._state == "starting" and worker.policy.looping:
            self._fail(UNEXPECTED, f"{worker.name} ended with {how} again and again before the mount was ready")
            return
        self._after(worker.name, delay_s, lambda: self._launch_worker(worker))
        if not self._workers_failing and all(worker.policy.looping and not worker.ready for worker in self._workers):
            self._workers_failing = True
            self._log.error("every worker dies at its start: requests are answered EIO", workers=len(self._workers))
            self._gate.send({"kind": "workers_failing", "failing": True})

    def _read_gate(self) -> None:
        channel = self._gate.channel
        for message in channel.receive() if channel is not None else []:
            self._gate.is_ready()
            kind = message["kind"]
            if kind == "initialised":
                self._serve()
            elif kind == "worker_ready":
                self._worker_is_ready(message.get("index"), message.get("pid"))
            elif kind == "status":
                self._gate_answered_at_s = time.monotonic()
            elif kind == "failed":
                self._gate.failure = str(message.get("text", ""))
            else:
                self._log.warning("a message of the gate is not understood", kind=kind)

    def _worker_is_ready(self, index: Any, pid: Any) -> None:
        for worker in self._workers:
            if worker.index == index and worker.pid == pid and not worker.ready:
                worker.is_ready()
                self._timers.pop(worker.name, None)
                if self._workers_failing:
                    self._workers_failing = False
                    self._log.info("a worker is ready again", part=worker.name)
                    self._gate.send({"kind": "workers_failing", "failing": False})

    def _serve(self) -> None:
        """The kernel has its answer to INIT: from here on requests are answered."""
        assert self._session is not None
        self._session.initialised = True
        if self._state != "starting":
            return
        self._state = "serving"
        self._timers.pop("workers start", None)
        self._read_ahead_error = set_read_ahead(self._session.device_number, self._spec.read_ahead_bytes)
        if self._read_ahead_error:
            self._log.warning("the read-ahead stays at the kernel's default", reason=self._read_ahead_error)
        self._tell_agent_serving()

    def _gate_ended(self, how: str) -> None:
        assert self._session is not None
        looping = self._gate.policy.died(time.monotonic(), self._gate.ready_at_s).looping
        self._gate.ended()
        reason = f": {self._gate.failure}" if self._gate.failure else ""
        if self._state == "stopping":
            self._outcome = Outcome(0, "")
        elif not self._session.is_connected():
            self._log.info("unmounted", mountpoint=self._spec.mountpoint)
            self._outcome = Outcome(0, "")
        elif self._state != "serving":
            self._fail(UNEXPECTED, f"the gate ended with {how} before the mount was ready{reason}")
        elif looping:
            self._fail(UNEXPECTED, f"the gate ended with {how} again and again{reason}")
        else:
            resend = self._spec.features.usable("resend")
            self._log.error(
                "the gate ended; requests in flight are " + ("put back" if resend else "answered ECONNABORTED"),
                how=how,
                reason=self._gate.failure,
            )
            self._session.renew_gate_device(resend=resend)
            for worker in self._workers:
                # Each has requests of the dead gate, and its sockets end there.
                worker.replaced = worker.running
                worker.kill(signal.SIGKILL)
                worker.close()
            self._launch_gate()

    def _ask_gate(self) -> None:
        silent_s = time.monotonic() - self._gate_answered_at_s
        if silent_s > self._spec.gate_silent_s:
            self._log.error("the gate is stuck and is replaced", silent_s=round(silent_s), pid=self._gate.pid)
            self._gate.kill(signal.SIGABRT)
            self._after("gate kill", STACKS_S, lambda: self._gate.kill(signal.SIGKILL))
            return
        self._gate.send({"kind": "status"})
        self._after("gate tick", self._spec.gate_silent_s / GATE_TICKS, self._ask_gate)

    def _embedded_ended(self, how: str) -> None:
        if self._state in ("preparing", "starting"):
            self._fail(UNEXPECTED, f"the embedded server ended with {how} before the mount was ready")
        elif self._state == "serving":
            self._log.error("the embedded server ended: only what is cached can be read", how=how)

    # The way down.

    def _asked_to_end(self, by: str) -> None:
        if self._state == "stopping":
            self._log.warning("second signal: ending without waiting", signal=by)
            self._hurry = True
            self._outcome = Outcome(0, "")
        elif self._state in ("preparing", "starting"):
            self._fail(128 + int(getattr(signal, by, signal.SIGTERM)), f"ended by {by} before the mount was ready")
        else:
            self._state = "stopping"
            self._log.info("ending", signal=by)
            self._unmount_until_s = time.monotonic() + BUSY_S
            self._unmount(lazy=False)

    def _unmount(self, *, lazy: bool) -> None:
        """In a child, because a file system above the mount point may hang."""
        assert self._session is not None
        if not self._session.is_mounted():
            self._drain()
            return
        self._unmounter = os.fork()
        if self._unmounter == 0:
            number = errno.EIO
            try:
                device.unmount(self._session.mountpoint, lazy=lazy)
                number = 0
            except OSError as failure:
                number = failure.errno or errno.EIO
            finally:
                os._exit(number)
        if lazy:
            self._log.warning(
                "the mount is busy: detached, open files end with this process", mountpoint=self._spec.mountpoint
            )
        self._after("unmount", UNMOUNT_S, self._unmount_is_late)

    def _unmount_answered(self, number: int) -> None:
        self._timers.pop("unmount", None)
        if self._outcome is not None:
            return
        if number == errno.EBUSY:
            busy_for_long = time.monotonic() >= self._unmount_until_s
            self._after("unmount again", BUSY_POLL_S, lambda: self._unmount(lazy=busy_for_long))
            return
        if number not in (0, errno.EINVAL):  # EINVAL: somebody else was quicker
            reason = os.strerror(number) if number > 0 else ending(-number)
            self._log.error("the mount can't be unmounted", mountpoint=self._spec.mountpoint, reason=reason)
        self._drain()

    def _unmount_is_late(self) -> None:
        self._log.error("umount2(2) does not return", mountpoint=self._spec.mountpoint, within_s=UNMOUNT_S)
        self._drain()

    def _drain(self) -> None:
        """No new requests; what is in flight is answered. The gate's end is the end."""
        if not self._gate.running:
            self._outcome = Outcome(0, "")
            return
        self._gate.send({"kind": "stop"})
        self._after("grace", GRACE_S, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._log.warning("requests in flight did not finish in time", grace_s=GRACE_S)
        self._outcome = Outcome(0, "")

    def _fail(self, exit_code: int, text: str) -> None:
        """End with an error; the first one is told."""
        if self._outcome is None:
            self._outcome = Outcome(exit_code, text)

    def _end_parts(self) -> None:
        """Everything that runs, in the order in which nobody misses what ends before it."""
        self._timers.clear()
        if self._session is not None:
            self._gate.kill(signal.SIGKILL)  # first: it holds the device, and callers shall get their errors at once
            try:
                self._session.close()
            except OSError as failure:
                self._log.error("the mount stays, dead", mountpoint=self._spec.mountpoint, reason=str(failure))
        self._wait_for([self._gate, *self._workers, self._agent], PARTS_END_S)
        embedded = Part("embedded server", self._agent.policy)
        embedded.pid = self._spec.embedded_pid
        self._wait_for([embedded], EMBEDDED_END_S)

    def _wait_for(self, parts: Sequence[Part], patience_s: float) -> None:
        """SIGTERM, and after `patience_s` or at a second signal SIGKILL; until all have ended."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, KILLED_S)):
            if number == signal.SIGTERM and self._hurry:
                continue
            for part in parts:
                part.kill(number)
            deadline_s = time.monotonic() + wait_s
            while self._any_runs(parts):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or (self._hurry and number == signal.SIGTERM):
                    break
                select.select([self._wakeup], [], [], left_s)
                with contextlib.suppress(BlockingIOError):
                    self._hurry = any(number != signal.SIGCHLD for number in self._wakeup.recv(4096)) or self._hurry
        for part in parts:
            if part.running:
                self._log.error("does not end, not even by SIGKILL", part=part.name, pid=part.pid)

    def _any_runs(self, parts: Sequence[Part]) -> bool:
        for part in parts:
            if part.pid is not None:
                try:
                    ended = os.waitpid(part.pid, os.WNOHANG)[0] != 0
                except ChildProcessError:
                    ended = True
                if ended:
                    part.ended()
        return any(part.running for part in parts)

    # What others are told.

    def _describe(self) -> dict[str, Any]:
        """The mount and its parts, for the agent's `status`."""
        session = self._session
        uptime_s = round(time.monotonic() - self._started_at_s, 1)
        own = {"pid": os.getpid(), "ready": True, "restarts": 0, "uptime_s": uptime_s, "crash_looping": False}
        return {
            "mountpoint": self._spec.mountpoint,
            "device": session.device_number if session else "",
            "open_mode": session.open_mode if session else "",
            "why": self._mode_reason,
            "masked_features": list(self._spec.masked_features),
            "features": self._spec.features.describe(),
            "read_ahead_bytes": None if self._read_ahead_error else self._spec.read_ahead_bytes,
            "read_ahead_error": self._read_ahead_error,
            "max_background": session.plan.max_background if session else 0,
            "congestion_threshold": session.plan.congestion_threshold if session else 0,
            "max_pages": session.plan.max_pages if session else 0,
            "max_read_bytes": self._spec.max_read_bytes,
            "uptime_s": uptime_s,
            "parts": [
                {"name": "supervisor", **own},
                *(part.describe() for part in (self._gate, self._agent, *self._workers)),
            ],
        }

    def _tell_parent(self, outcome: Outcome) -> None:
        """The error line of `daemon.ready_pipe`, unless the agent has said `ready`; and for people."""
        if not outcome.error:
            return
        text = " ".join(outcome.error.split())
        if self._ready_fd is not None:
            line = f"error {outcome.exit_code} {text}".encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"
            with contextlib.suppress(OSError):  # the parent was killed: nobody waits any more
                os.write(self._ready_fd, line)
        print(f"fusecache: {text}", file=sys.stderr, flush=True)

    def _close_ready_fd(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None


def main(arguments: Sequence[str]) -> int:
    """Run the mount whose specification is in the memfd `--spec-fd`; the exit code."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.supervisor")
    parser.add_argument("--spec-fd", type=int, required=True)
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
