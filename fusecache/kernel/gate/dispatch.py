"""To the workers and back: who gets a request, what becomes of an answer, what becomes of a dead worker's requests.

A worker is greeted with the INIT that the kernel sent; when it has answered that, it gets requests; one that has
served a gate before this one gets them at once. Its answers are checked before the kernel sees a byte of them; a
worker that sends what none may send is cut off. The supervisor is told of that, and of one that closes its socket.
Workers' sockets never block the gate: what they do not take waits here.

What is not answered KILLED_S after it came is looked at: if its caller is being killed (`callers`) it is
answered EINTR, so that a killed process is gone although nobody answers it. The kernel's INTERRUPT is of no use for
that: it comes for any signal, and no program expects EINTR of a file (a stat(2) that fails looks like a missing file, a
mapping becomes SIGBUS); and it does not come for direct reads, which wait unkillably where FUSE_ASYNC_DIO is
negotiated. What no worker answers within `Limits` is answered EIO: workers keep to their budgets, but one that hangs in
a disk, or is no longer ours, may keep to nothing.

Decides by `in_flight`; takes no request from the kernel itself.
"""

from __future__ import annotations

import errno
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fusecache.kernel import wire
from fusecache.kernel.gate.answers import Answers
from fusecache.kernel.gate.callers import is_being_killed
from fusecache.kernel.gate.direct_reads import DirectReads
from fusecache.kernel.gate.in_flight import InFlight, Load, Request
from fusecache.kernel.gate.opens import Opens
from fusecache.kernel.gate.worker import Worker
from fusecache.kernel.init_message import InitError, InitPlan, patched_answer
from fusecache.kernel.log import Log
from fusecache.kernel.reply_slots import BadToken

OVERDUE_S: Final = 0.25
"""A request left unread by a blocked worker for so long is given to another one too."""
NUDGE_S: Final = 1.0
"""A worker that owes something and says nothing for so long is sent something to take out of its socket."""
KILLED_S: Final = 2.0
"""What a caller waits for is mostly there by then; a killed one is not to stay longer (5 s are promised)."""
CALLERS_EVERY_S: Final = 1.0
FROZEN_S: Final = 5.0
"""No look for so long: this process was stopped, and so, most likely, were the workers. They get their time again."""


class Limits(NamedTuple):
    """How long requests may be with the workers."""

    read_s: float = math.inf
    other_s: float = math.inf


class WorkersFailed(Exception):
    """No worker can be served any more; the text says why."""


class BadAnswer(Exception):
    """A worker's answer is not one to this request."""

    def __init__(self, request: Request, why: str) -> None:
        super().__init__(why)
        self.request = request


class Dispatch:
    """All workers of one connection."""

    def __init__(
        self,
        answers: Answers,
        opens: Opens | None,
        direct_reads: DirectReads,
        epoll: select.epoll,
        init: tuple[bytes, InitPlan],
        on_init_answer: Callable[[bytes], None],
        tell: Callable[[dict[str, Any]], None],
        log: Log,
        limits: Limits,
    ) -> None:
        """`init`: the message for workers, and how their answer is patched for `on_init_answer`. `tell`: supervisor."""
        self._answers = answers
        self._opens = opens
        self._direct_reads = direct_reads
        self._epoll = epoll
        self._init, self._plan = init
        self._on_init_answer = on_init_answer
        self._tell = tell
        self._log = log
        self._limits = limits
        self.by_socket: dict[int, Worker] = {}
        self._by_index: dict[int, Worker] = {}
        self.in_flight = InFlight(self._has_unread)
        self.failing = False
        """Workers die as fast as they start: EIO at once instead of waiting."""
        self.counts = {
            "worker_deaths": 0, "workers_broken": 0, "answers_unasked": 0, "given_twice": 0, "interrupted": 0,
            "timed_out": 0,
        }  # fmt: skip
        self._callers_at_s = 0.0
        """When to look at what waits long, and at its callers."""
        self._looked_at_s = 0.0
        self._thawed_at_s = 0.0
        self.slot_bytes = 0
        self._waiters: list[threading.Event] = []
        """Of other threads that wait for an answer."""
        self._buffer = bytearray(wire.MOST_ANSWER_BYTES + 1)
        self._buffers = [self._buffer]
        self._view = memoryview(self._buffer)

    def add(self, index: int, pid: int, requests: int, slots: int, offers: int, initialised: bool) -> None:
        """A worker, with its three descriptors; the one before it under the same index is dead.

        `initialised`: it has served a gate before this one. Raises BadSlots when the descriptors are not what the
        supervisor makes, OSError when this process may have no more memory or descriptors; they are closed then.
        """
        before = self._by_index.get(index)
        worker = Worker(index, pid, requests, slots, offers, taken_over=initialised)
        try:
            self._epoll.register(requests, select.EPOLLIN)
        except OSError:
            worker.close()
            raise
        if before is not None:
            self._bury(before, time.monotonic())
        self.by_socket[requests] = worker
        self._by_index[index] = worker
        if initialised:
            self._begin(worker)
            return
        try:
            os.write(requests, self._init)
        except OSError as exc:
            # It died already; the end of its socket is noticed next.
            self._log.info("worker takes no INIT", index=index, pid=pid, why=exc.strerror)

    def dispatch(self, request: Request, now_s: float) -> None:
        """Give a request to a worker, or let it wait for one."""
        if self.failing:
            self._answers.write_error(request.unique, errno.EIO)
            return
        queue = self.in_flight.queue_of(request)
        if not queue:
            load = self.in_flight.choose(request, now_s)
            if load is not None and self._give(request, load, now_s):
                return
        queue.append(request)

    def _give(self, request: Request, load: Load, now_s: float) -> bool:
        """Send a request to a worker; False: it still waits."""
        worker = self._by_index[load.index]
        try:
            os.write(worker.requests, request.message)
        except BlockingIOError:
            load.full = True
            return False
        except OSError as exc:
            # It died a moment ago. What it held is given away when its answers are all read (see `_take_answers`).
            self._log.info("worker takes no requests", index=worker.index, pid=worker.pid, why=exc.strerror)
            load.ready = False
            return False
        self.in_flight.given(request, load, now_s)
        return True

    def _give_waiting(self, now_s: float) -> None:
        for queue in self.in_flight.queues:
            while queue:
                request = queue[0]
                load = self.in_flight.choose(request, now_s)
                if load is None:
                    break
                if self._give(request, load, now_s):
                    queue.popleft()

    def _has_unread(self, load: Load) -> bool:
        return self._by_index[load.index].has_unread()

    def take_answer(self, worker: Worker, now_s: float) -> None:
        """One message of a worker; the end of its socket: it is dead."""
        try:
            received = os.readv(worker.requests, self._buffers)
        except (BlockingIOError, ConnectionResetError):
            # Reset: it died with requests unread; the answers that it gave before, and the end, come after this.
            return
        except OSError as exc:
            raise WorkersFailed(f"worker {worker.index}'s socket can't be read: {exc.strerror}") from exc
        if not received:
            # Mostly its end, which the supervisor sees too. But one that only closed its socket is of no use either.
            self._tell({"kind": "worker_broken", "index": worker.index, "pid": worker.pid})
            self._bury(worker, now_s)
            return
        load = worker.load
        try:
            error, unique = wire.decode_answer(self._buffer, received)
            if not load.ready and unique == self._plan.unique:
                self._greet(worker, bytes(self._view[:received]))
                return
            request = self.in_flight.answer_of(load, unique, now_s)
            if request is None:
                self._drop_answer(worker, received)
            elif error:
                if error == wire.NO_SUCH_CALL and request.opcode == wire.OPEN:
                    # The kernel would never send OPEN again, on the whole connection: what is open by passthrough too.
                    raise BadAnswer(request, "an OPEN answered with ENOSYS")
                self._answers.write_error(unique, error)
            elif request.opcode == wire.READ:
                self._answer_read(worker, request, received)
            elif request.opcode == wire.OPEN and self._opens is not None:
                self._finish_open(self._opens, worker, request, received, now_s)
            else:
                self._answers.write(self._view[:received])
        except BadAnswer as exc:
            # Its request is nobody's fault, but may be what makes workers do this: the third time it is EIO.
            self.in_flight.take_back(load, exc.request)
            self._break(worker, str(exc), now_s)
        except (wire.BadMessage, InitError) as exc:
            self._break(worker, str(exc), now_s)
        for waiter in self._waiters:
            waiter.set()
        if self.in_flight.waiting:
            self._give_waiting(now_s)

    def _finish_open(self, opens: Opens, worker: Worker, request: Request, received: int, now_s: float) -> None:
        try:
            answer = opens.answer_with(self._view[:received], request, worker.offers)
        except wire.BadMessage as exc:
            raise BadAnswer(request, str(exc)) from exc
        if not self._answers.write(answer):
            opens.release(request.unique, request.inode, now_s)

    def _answer_read(self, worker: Worker, request: Request, received: int) -> None:
        token = self._view[wire.OUT_HEADER.size : received]
        try:
            slot, content = worker.slots.bytes_of(token, wire.read_size(request.message))
        except BadToken as exc:
            raise BadAnswer(request, str(exc)) from exc
        self._answers.write_data(request.unique, content)
        self.slot_bytes += len(content)
        worker.slots.free(slot)
        if worker.offers.is_waiting():
            self._direct_reads.learn(request.inode, worker.offers, request.taken_at_s)

    def _drop_answer(self, worker: Worker, received: int) -> None:
        """Another worker was faster, or it answers what it was not asked. Its slot, if it names one, is free again."""
        self.counts["answers_unasked"] += 1
        slot = worker.slots.slot_of(self._view[wire.OUT_HEADER.size : received])
        if slot is not None:
            worker.slots.free(slot)

    def _greet(self, worker: Worker, answer: bytes) -> None:
        """A worker answered INIT: the kernel gets the first such answer, and the worker its requests."""
        patched = patched_answer(answer, self._plan)
        self._on_init_answer(patched)
        self._tell({"kind": "worker_ready", "index": worker.index, "pid": worker.pid})
        self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        worker.load.ready = True
        self.failing = False
        self.in_flight.loads[worker.index] = worker.load
        self._give_waiting(time.monotonic())

    def _break(self, worker: Worker, why: str, now_s: float) -> None:
        """A worker sent what none may send: it is cut off, and the supervisor replaces it."""
        self._log.error("worker cut off", index=worker.index, pid=worker.pid, why=why)
        self.counts["workers_broken"] += 1
        self._tell({"kind": "worker_broken", "index": worker.index, "pid": worker.pid, "text": why})
        self._bury(worker, now_s)

    def _bury(self, worker: Worker, now_s: float) -> None:
        """A worker is gone: others get what it held."""
        self._epoll.unregister(worker.requests)
        del self.by_socket[worker.requests]
        if self._by_index.get(worker.index) is worker:
            del self._by_index[worker.index]
        again, poisoned = self.in_flight.died(worker.load)
        worker.end()
        self.counts["worker_deaths"] += 1
        self._log.info(
            "worker gone", index=worker.index, pid=worker.pid, redelivered=len(again), given_up=len(poisoned)
        )
        for request in poisoned:
            self._log.error(
                "request answered EIO: every worker that held it died",
                request=wire.OPCODE_NAMES.get(request.opcode, str(request.opcode)),
                inode=request.inode,
                deliveries=request.deliveries,
            )
            self._answers.write_error(request.unique, errno.EIO)
        self.in_flight.wait_first(again)
        if self.failing:
            self.fail_waiting()
        else:
            self._give_waiting(now_s)

    def _end_overdue(self, now_s: float) -> None:
        """Answer what waits for too long, or for nobody: EIO, EINTR."""
        killed: dict[int, bool] = {}
        for request in self.in_flight.taken_before(now_s - KILLED_S):
            caller = wire.caller_of(request.message)
            if caller not in killed:
                killed[caller] = is_being_killed(caller)
            limit_s = self._limits.read_s if request.opcode == wire.READ else self._limits.other_s
            if killed[caller]:
                self.counts["interrupted"] += 1
                self._give_up(request, errno.EINTR)
            elif now_s - max(request.taken_at_s, self._thawed_at_s) > limit_s:
                self.counts["timed_out"] += 1
                name = wire.OPCODE_NAMES.get(request.opcode, str(request.opcode))
                self._log.error("request answered EIO: no worker has answered it", request=name, inode=request.inode)
                self._give_up(request, errno.EIO)
        for waiter in self._waiters:
            waiter.set()

    def _give_up(self, request: Request, error: int) -> None:
        self.in_flight.give_up(request)
        self._answers.write_error(request.unique, error)

    def wait_answered(self, opcodes: frozenset[int], inode: int, most_s: float) -> None:
        """Wait until what is in flight now for an inode is answered, at most so long. Not in the loop's thread."""
        awaited = self.in_flight.unanswered(opcodes, inode)
        if not awaited:
            return
        end_s = time.monotonic() + most_s
        something_answered = threading.Event()
        self._waiters.append(something_answered)
        try:
            while not all(request.answered for request in awaited):
                if not something_answered.wait(end_s - time.monotonic()):
                    return
                something_answered.clear()
        finally:
            self._waiters.remove(something_answered)

    def fail_waiting(self) -> None:
        """Answer everything that waits for a worker with EIO."""
        for queue in self.in_flight.queues:
            while queue:
                request = queue.popleft()
                request.answered = True
                self._answers.write_error(request.unique, errno.EIO)

    def is_drained(self) -> bool:
        """Nobody owes anything, nothing waits."""
        return not self.in_flight.owed and not self.in_flight.waiting

    def look_around(self, now_s: float) -> None:
        """What no message starts: credits that came back, requests left unread, callers that were killed."""
        in_flight = self.in_flight
        if now_s - self._looked_at_s > FROZEN_S:
            self._thawed_at_s = now_s
        self._looked_at_s = now_s
        if now_s >= self._callers_at_s and in_flight.is_busy:
            self._callers_at_s = now_s + CALLERS_EVERY_S
            self._end_overdue(now_s)
        if in_flight.owed:
            for load in in_flight.quiet(now_s, NUDGE_S):
                self._by_index[load.index].nudge()
            for load in in_flight.loads.values():
                load.full = False
            late = in_flight.overdue(now_s, OVERDUE_S)
            if late and len(in_flight.loads) > 1:
                for request in late:
                    load_or_none = in_flight.choose(request, now_s)
                    if load_or_none is not None and self._give(request, load_or_none, now_s):
                        self.counts["given_twice"] += 1
        if in_flight.waiting:
            self._give_waiting(now_s)

    def close(self) -> None:
        """End every worker."""
        for worker in self.by_socket.values():
            worker.end()

    def status(self) -> dict[str, Any]:
        """Its part of the gate's status. Any thread."""
        in_flight = self.in_flight
        now_s = time.monotonic()
        return {
            "redelivered": in_flight.redelivered,
            "poisoned": in_flight.poisoned,
            **self.counts,
            "bytes_by_slots": self.slot_bytes,
            "in_flight": in_flight.owed,
            "waiting": in_flight.waiting,
            "failing": self.failing,
            "workers": [
                {
                    "index": worker.index,
                    "pid": worker.pid,
                    "ready": worker.load.ready,
                    "in_flight": len(worker.load.owed),
                    "slots": worker.slots.count,
                    "unread_s": round(self.in_flight.unread_s(worker.load, now_s), 3),
                }
                for worker in list(self._by_index.values())
            ],
        }
