"""The process of a mount that runs a gate: mounts, starts and restarts every part, takes all down again. Main program.

    agent (connects, opens the store, says the mode) -> mount(2) -> gate -> workers -> serving -> umount or signal

One thread, one poll loop: signals come through a wakeup descriptor, children's ends through SIGCHLD, messages from
agent and gate through their control sockets. It answers no request of the kernel, opens no connection, and imports the
standard library only: it is the process that must not die. When it does, the kernel kills every part (PDEATHSIG) and
ends the connection with its last descriptor: callers get errors, and a dead mount stays until the next one there.
(Except where the gate hangs in a notification at that moment: it holds the device until the connection is aborted, as
`fusecache umount` does with a mount that does not answer.)

Here are the loop, the phase of the mount, the way up and the way down. Each kind of part has a module that keeps it
running, and what happens when a process of it dies or hangs is there (`phases` decides):

    workers          the gate gives its requests to another one; EIO while none of them can be kept alive
    gates            a spare one goes on with the same workers; one that can't be kept alive ends the mount
    agents           reads go on, metadata waits
    embedded_server  what is cached can be read

Before the mount is ready a dead agent or gate, or a crash-looping worker, ends the start with an error.

A later process on the same mount point takes the mount over: this one gives it what it holds and ends, and nobody's
read fails (`takeover`). SIGHUP starts such a process, with the configuration as it is by then (`takeover.reloading`);
this one then stays as its parent (`takeover.first_process`).

On the way down: unmount (a busy mount is detached after BUSY_S, and said so), let what is in flight finish for at most
grace_s, then end workers, agent, embedded server. A second signal ends all at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from fusecache.errors import UNEXPECTED, FusecacheError
from fusecache.kernel.channel import Message
from fusecache.kernel.log import Log
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.signals import Signals, has_terminal
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.agents import Agents, chosen_mode
from fusecache.kernel.supervisor.embedded_server import EmbeddedServer
from fusecache.kernel.supervisor.ending import end_parts, end_session
from fusecache.kernel.supervisor.gates import Gates
from fusecache.kernel.supervisor.keeping import Keeper
from fusecache.kernel.supervisor.last_words import Outcome, say
from fusecache.kernel.supervisor.parts import ending, reaped
from fusecache.kernel.supervisor.phases import Phase, at_request
from fusecache.kernel.supervisor.polling import due
from fusecache.kernel.supervisor.roles import Agent, Gate
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.status_table import describe
from fusecache.kernel.supervisor.takeover.first_process import become, hold_signals
from fusecache.kernel.supervisor.takeover.new_side import Given, TakingOver
from fusecache.kernel.supervisor.takeover.old_side import HandingOver
from fusecache.kernel.supervisor.takeover.reloading import Reloading
from fusecache.kernel.supervisor.timers import Timers
from fusecache.kernel.supervisor.unmounting import Unmounting
from fusecache.kernel.supervisor.workers import Workers

PARTS_END_S: Final = 8.0
"""SIGTERM to SIGKILL for workers and agent, which closes its store."""

EMBEDDED_END_S: Final = 5.0
LOOK_S: Final = 1.0
"""How often gate and agent are looked at."""

SUCCESSOR_END_S: Final = 2.0
"""SIGTERM to SIGKILL for a process that was about to take over a mount that ends."""

RELOAD_AGAIN_S: Final = 0.5
"""Until SIGHUP is looked at again that came while the mount was on its way from or to another process."""


class Supervisor:
    """One mount and its parts."""

    def __init__(self, spec: MountSpec) -> None:
        self._spec = spec
        self._log = Log("fusecache.kernel.supervisor", spec.log_level)
        self._phase: Phase = "preparing"
        self._outcome: Outcome | None = None
        self._session: MountSession | None = None
        self._unmounting: Unmounting | None = None
        self._hurry = False
        self._ends_later: str | None = None
        """Who asked for the end in the middle of a take-over, which is first to be decided."""

        self._is_succeeded = False
        """The successor that this process started has the mount."""

        self._hang_up_ends = has_terminal() or not (spec.successor_argv or spec.parent_reloads)
        """Seen now, for a terminal that was closed is none."""

        self._started_at_s = time.monotonic()
        self._timers = Timers()
        self._keeper = Keeper(self._timers, self._log)
        tools = self._keeper, self._timers, self._log
        environment = {**os.environ, **spec.environment}
        given = Given.from_spec(spec)
        table_fd = given.descriptors.open_table if given else None
        agent, gate = self._agent, self._gate = Agent(), Gate()
        self._agents = Agents(spec, agent, gate, *tools, environment=environment)
        self._workers = Workers(spec, gate, *tools, epoch_fd=self._agents.epoch_fd, environment=environment)
        self._gates = Gates(spec, gate, agent, self._workers, *tools, table_fd=table_fd, environment=environment)
        self._embedded = EmbeddedServer(spec, *tools, environment=environment)
        self._taking = (
            TakingOver(given, self._gates, self._workers, self._serve, self._timers, self._log) if given else None
        )
        self._handing = HandingOver(
            spec,
            self._gates,
            (agent, self._embedded),
            {"leave": self._leave, "start parts": self._start_parts_again},
            *tools,
        )
        self._reloading = Reloading(spec, self._log, lambda: None)  # `_leave` comes first, or at once
        for inherited in (spec.plan_fd, spec.ready_fd, spec.command_fd):
            if inherited is not None:
                os.set_inheritable(inherited, False)
        self._signals = Signals((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

    def run(self) -> int:
        """Serve until the end; the exit code. Nothing of it is left then: no process, no mount of ours. Does not return
        where a successor has the mount that this process started."""
        try:
            self._agents.start()
            self._look()
            while self._outcome is None:
                self._turn()
        except FusecacheError as failure:
            self._end(failure.exit_code, str(failure))
        except Exception as failure:
            self._end(UNEXPECTED, f"a bug in fusecache: {type(failure).__name__}: {failure}")
            raise
        finally:
            outcome = self._outcome or Outcome(UNEXPECTED)
            self._end_parts()
            say(outcome, self._agents.ready_fd)
        if self._is_succeeded:
            become(self._spec, self._reloading)
        return outcome.exit_code

    # The loop.

    def _turn(self) -> None:
        """Wait for what comes next, and do it."""
        sources = self._handing.sources() | self._reloading.sources()
        if self._taking is not None:
            sources |= self._taking.sources()
        channels = (
            (self._agent.channel, self._hear_agent),
            (self._gate.channel, self._hear_gate),
            (self._gates.spare.channel, self._gates.hear_spare),
        )
        for step in due(self._signals, sources, channels, self._timers.timeout_ms()):
            step()
            if self._outcome is not None:
                break
        self._take_signals()
        if self._outcome is None:
            self._timers.run()

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGHUP and not self._hang_up_ends:
                self._reload()
            elif number != signal.SIGCHLD:
                self._asked_to_end(number.name, 128 + number)
        for pid, status in reaped():
            self._child_ended(pid, status)

    def _child_ended(self, pid: int, status: int) -> None:
        how = ending(os.waitstatus_to_exitcode(status))
        if pid == self._agent.pid:
            self._hear_agent()  # its last words
        elif pid == self._gate.pid:
            self._hear_gate()  # which may be that it was emptied: then it is the gate no more
        if self._unmounting is not None and pid == self._unmounting.pid:
            self._unmounting.ended(os.waitstatus_to_exitcode(status))
        elif pid == self._reloading.successor.pid:
            self._reloading.ended(status)
        elif pid == self._agents.first_look.pid:
            self._agents.first_look.finished(os.waitstatus_to_exitcode(status))
        elif self._handing.part_ended(pid):
            pass
        elif pid == self._agent.pid:
            self._agents.ended(how, self._phase)
        elif pid == self._gate.pid:
            self._gate_ended(how)
        elif pid == self._gates.spare.pid:
            self._gates.spare_ended(how, again=self._phase == "serving")
        elif pid == self._embedded.pid:
            self._embedded.ended_with(how, self._phase)
        elif worker := self._workers.of(pid):
            # Unmounted: the gate closed its sockets, and its own end comes next.
            again = self._phase != "stopping" and (self._session is None or self._session.is_connected())
            self._workers.ended(worker, how, again=again)
        else:
            self._gates.forget(pid)

    def _look(self) -> None:
        """Every LOOK_S."""
        self._agents.look()
        if self._gates.look():
            self._gate_ended("a signal, while a notification hangs")
        self._timers.after("look", LOOK_S, self._look)

    def _gate_ended(self, how: str) -> None:
        follows = self._gates.ended(how, self._phase, is_handing_over=self._handing.course.is_active)
        if follows in ("end", "unmounted"):
            self._end()
        elif follows == "handing over":
            self._handing.happens("gate ended")

    # What the parts say.

    def _hear_agent(self) -> None:
        for message in self._agents.hear(self._phase):
            kind = message["kind"]
            if kind == "prepared":
                self._agent_is_prepared(message)
            elif kind == "status":
                self._agent.send({"kind": "status", **self._describe()})
            elif kind == "look" and self._session is not None:
                self._agents.first_look.begin(self._session.mountpoint)
            elif kind != "look":
                self._log.warning("a message of the agent is not understood", kind=kind)

    def _hear_gate(self) -> None:
        for news in self._gates.hear():
            if news == "initialised":
                self._serve()
            elif news == "emptied":
                self._handing.happens("gate emptied")
            elif self._taking is not None:
                self._taking.happens("all ready")

    # The way up.

    def _agent_is_prepared(self, message: Message) -> None:
        self._handing.cluster_id = cluster_id = str(message.get("cluster_id", ""))
        if self._phase == "serving":
            self._agents.tell_serving(self._describe())
        elif self._phase == "preparing" and self._taking is not None:
            self._session = self._taking.session(self._spec, cluster_id)
            self._phase = "starting"
            self._taking.begin(self._session)
        elif self._phase == "preparing":
            mode = chosen_mode(message, self._spec.open_mode)
            self._session = MountSession.mounted(self._spec, mode, str(message.get("why", "")))
            self._phase = "starting"
            self._log.info(
                "mounted", mountpoint=self._spec.mountpoint, device=self._session.device_number, open_mode=mode
            )
            self._gates.start(self._session)
            self._workers.start(self._session)

    def _serve(self) -> None:
        """The kernel has its answer to INIT: from here on requests are answered."""
        assert self._session is not None
        self._session.initialised = True
        if self._phase != "starting":
            return
        self._phase = "serving"
        # Others read already where it was taken over: from now on only the agent's start can fail, and is tried again.
        self._agents.was_ready = self._taking is not None
        self._keeper.patient = True
        self._workers.serve()
        self._gates.serve()
        self._session.set_read_ahead(self._spec.read_ahead_bytes, self._log)
        self._handing.listen(self._session)
        self._agents.tell_serving(self._describe())

    def _describe(self) -> dict[str, Any]:
        parts = (self._gate, self._gates.spare, self._agent, *self._workers.parts)
        return describe(self._spec, self._session, parts, time.monotonic() - self._started_at_s)

    # The way down.

    def _asked_to_end(self, by: str, exit_code: int) -> None:
        """`exit_code`: when nothing is served yet."""
        self._reloading.end()
        was_asked = self._ends_later is not None
        match at_request(self._phase, is_handing_over=self._handing.course.is_active, was_asked=was_asked):
            case "once handed over":
                self._log.info("ending, once it is clear who has the mount", signal=by)
                self._ends_later = by
            case "at once":
                self._end()
            case "hurry":
                self._log.warning("second signal: ending without waiting", signal=by)
                self._hurry = True
                self._end()
            case "not served":
                self._end(exit_code, f"ended by {by} before the mount was ready")
            case "unmount":
                assert self._session is not None
                self._phase = "stopping"
                self._log.info("ending", signal=by)
                self._unmounting = Unmounting(self._session, self._timers, self._log, self._drain)

    def _drain(self) -> None:
        """No new requests; what is in flight is answered. The gate's end is the end."""
        if not self._gate.running:
            self._end()
        if self._outcome is None:
            self._gates.stop()
            self._timers.after("grace", self._spec.grace_s, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._log.warning("requests in flight did not finish in time", grace_s=self._spec.grace_s)
        self._end()

    def _end(self, exit_code: int = 0, error: str = "") -> None:
        """End the loop; what ended it first is told."""
        if self._outcome is None:
            self._outcome = Outcome(exit_code, error)

    def _end_parts(self) -> None:
        """Everything that runs, in the order in which nobody misses what ends before it."""
        self._timers.clear()
        successor = self._reloading.successor
        goes_on = self._handing.course.is_given
        if successor.running and not self._is_succeeded:
            goes_on = goes_on and self._handing.taker_pid != successor.pid
            self._reloading.end()
            end_parts([successor], SUCCESSOR_END_S, self._signals, self._log, hurry=self._hurry)
        if self._session is not None and goes_on:
            self._session.is_ours = False  # whoever is taking over finds the token, and goes on alone
        is_last = self._session is None or self._session.is_ours
        self._handing.end(is_last=is_last)
        if self._session is not None:
            # First: callers shall get their errors at once.
            end_session(self._session, self._gates.processes, self._signals, self._log)
        self._agents.first_look.kill(signal.SIGKILL)
        parts = [*self._workers.parts, self._agent, self._gates.spare, self._agents.first_look]
        end_parts(parts, PARTS_END_S, self._signals, self._log, hurry=self._hurry)
        self._agents.close(is_last=is_last)
        end_parts([self._embedded], EMBEDDED_END_S, self._signals, self._log, hurry=self._hurry)

    # To another process.

    def _reload(self) -> None:
        """SIGHUP, of somebody who wants the configuration to be read again."""
        if self._spec.parent_reloads:
            os.kill(os.getppid(), signal.SIGHUP)
        elif self._phase == "serving" and (self._reloading.is_under_way or not self._handing.course.is_active):
            self._reloading.start()
        elif self._phase != "stopping":
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
        self._end()

    def _start_parts_again(self) -> None:
        """Nobody took the mount over. A part that has not ended yet is started at its end."""
        if self._ends_later is not None:
            self._asked_to_end(self._ends_later, UNEXPECTED)
            return
        self._embedded.launch()
        self._agents.launch()


def main(arguments: Sequence[str]) -> int:
    """Run the mount whose specification is in the memfd `--spec-fd`; the exit code."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.supervisor.main")
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
