"""All workers of one mount, as the supervisor keeps them: started, handed to the gate, replaced.

A worker that died is started anew at once, for it costs callers nothing but a pause: the gate has its requests. A gate
that died leaves them running: the next one gets the same sockets and slots. When
every one of them dies at its start, again and again, or can't be started (no processes, no descriptors), the gate is
told to answer EIO until one is ready; each is tried again and again (`restart_policy`, `keeping`). One that hangs
prints its stacks and is killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any, Final

from fusecache.kernel.channel import Message
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.keeping import AGAIN_S, Keeper, PartFailed
from fusecache.kernel.supervisor.roles import Gate, Worker
from fusecache.kernel.supervisor.session import MountSession
from fusecache.kernel.supervisor.timers import Timers

START_S: Final = 60.0
"""From mount(2) to the first worker's answer to INIT, and from a worker's start to its being ready."""

BROKEN_END_S: Final = 5.0
"""For a worker whose socket is closed, by itself or by the gate for what it sent, to end by itself."""


class Workers:
    """See the module. PartFailed, before the mount serves, for what it can't go on with."""

    def __init__(
        self,
        spec: MountSpec,
        gate: Gate,
        keeper: Keeper,
        timers: Timers,
        log: Log,
        *,
        epoch_fd: int,
        environment: Mapping[str, str],
    ) -> None:
        self.parts = tuple(Worker(index) for index in range(spec.workers))
        self._spec = spec
        self._gate = gate
        self._keeper = keeper
        self._timers = timers
        self._log = log
        self._epoch_fd = epoch_fd
        self._environment = environment
        self._session: MountSession | None = None
        self._serving = False
        self._failing = False

    def start(self, session: MountSession) -> None:
        """Start all, for the first time."""
        self._session = session
        for worker in self.parts:
            self._launch(worker)
        self._timers.after("workers start", START_S, self._start_is_late)

    def serve(self) -> None:
        """One of them has answered the kernel's INIT."""
        self._serving = True
        self._timers.cancel("workers start")

    def gate_started(self) -> None:
        """Another gate: tell it what the last one knew, and give it the workers, which go on."""
        if self._failing:
            self._gate.send({"kind": "workers_failing", "failing": True})
        for worker in self.parts:
            worker.hand_to(self._gate)

    @property
    def all_ready(self) -> bool:
        """Whether each of them takes requests."""
        return all(worker.ready for worker in self.parts)

    def of(self, pid: Any) -> Worker | None:
        """The worker with that process."""
        return next((worker for worker in self.parts if worker.running and worker.pid == pid), None)

    def ended(self, worker: Worker, how: str, *, again: bool) -> None:
        """Its process ended; `again`: start another one."""
        pid = worker.pid
        delay_s = worker.died().delay_s
        if not again:
            return
        self._log.warning(
            "a worker ended", part=worker.name, pid=pid, how=how, restarts=worker.restarts, again_in_s=delay_s
        )
        if not self._serving and worker.policy.looping:
            raise PartFailed(f"{worker.name} ended with {how} again and again before the mount was ready")
        self._timers.after(worker.name, delay_s, lambda: self._launch(worker))
        self._look_whether_failing()

    def is_ready(self, message: Message) -> None:
        """The gate has its answer to INIT."""
        worker = self.of(message.get("pid"))
        if worker is None or worker.ready:
            return
        worker.is_ready()
        self._timers.cancel(worker.name)
        if self._failing:
            self._failing = False
            self._log.info("a worker is ready again", part=worker.name)
            self._gate.send({"kind": "workers_failing", "failing": False})

    def is_not_taken(self, message: Message) -> None:
        """The gate has no descriptors left for it now: try again, unless there is another gate or worker by then."""
        worker = self.of(message.get("pid"))
        if worker is None:
            return
        pids = worker.pid, self._gate.pid

        def hand_again() -> None:
            if (worker.pid, self._gate.pid) == pids:
                worker.hand_to(self._gate)

        self._timers.after(f"{worker.name} again", AGAIN_S, hand_again)

    def is_broken(self, message: Message) -> None:
        """The gate has closed its socket, for what it sent (`text`), or because it had closed its own end."""
        if worker := self.of(message.get("pid")):
            if message.get("text"):
                self._log.error("the gate has cut a worker off", part=worker.name, why=message["text"])
            self._keeper.kill_later(worker, BROKEN_END_S)

    def look(self, status: Message) -> None:
        """From the gate's table: one that leaves its requests in the socket is stuck."""
        rows = status.get("workers")
        for row in rows if isinstance(rows, list) else ():
            worker = self.of(row.get("pid"))
            if worker is not None and worker.ready and row.get("unread_s", 0.0) > self._spec.silent_s:
                self._log.error("a worker is stuck and is replaced", part=worker.name, pid=worker.pid)
                self._keeper.abort(worker)

    def _launch(self, worker: Worker) -> None:
        session = self._session
        assert session is not None
        if self._keeper.start(
            worker,
            lambda: worker.launch(
                self._spec, self._epoch_fd, session.open_mode, session.device_number, self._environment
            ),
            lambda: self._launch(worker),
        ):
            worker.hand_to(self._gate)
            self._timers.after(worker.name, START_S, lambda: self._is_late(worker))
        else:
            # No process, or no descriptor, to be had: as good as dead at its start. Callers must not wait for that.
            worker.policy.died(time.monotonic(), None)
            self._look_whether_failing()

    def _look_whether_failing(self) -> None:
        if not self._failing and all(part.policy.looping and not part.ready for part in self.parts):
            self._failing = True
            self._log.error("every worker dies at its start: requests are answered EIO", workers=len(self.parts))
            self._gate.send({"kind": "workers_failing", "failing": True})

    def _is_late(self, worker: Worker) -> None:
        if worker.running and not worker.ready:
            self._log.warning("a worker is not ready in time and is killed", part=worker.name, pid=worker.pid)
            worker.kill(signal.SIGKILL)

    def _start_is_late(self) -> None:
        raise PartFailed(f"no worker answered the kernel's INIT within {START_S:.0f} s")
