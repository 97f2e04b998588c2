"""The process between the kernel and the workers: `python -S -m fusecache.kernel.gate`, started by the supervisor.

A request's way: the kernel's message is read from the device; FORGET and INTERRUPT are dropped; OPEN, RELEASE, FLUSH
and their like are answered here where they can be (`no-open`: -ENOSYS, after which the kernel sends no more of them;
`passthrough`: see `kernel.open_table`); everything else goes to a worker with credits (`kernel.in_flight`) or waits for
one. A worker's answer is checked (`kernel.wire`), a READ's bytes are taken from its shared slot (`kernel.reply_slots`),
and the kernel gets it. When a worker dies, what it held goes to another one: callers see a pause, on any kernel.

One thread does all of this and never blocks but in epoll; notifications are written by threads of their own
(`kernel.notifications`). It spins before it sleeps (`kernel.spin`). Standard library only.

`status` (also for the agent, by `kernel.gate_link`): `answered` and `dispatched` (requests by opcode: answered here,
given to a worker), `redelivered`, `poisoned`, `given_twice` (left unread by a blocked worker), `worker_deaths`,
`workers_broken` (cut off for what they sent), `answers_unasked`, `bytes_by_slots`, `notifications` (pushes,
pushes_refused, stored_bytes), `spin_seconds`; `in_flight`, `waiting`, `failing`, `workers`; in passthrough mode `opens`
(passthrough_new, passthrough_learned, passthrough_known, ordinary), `refusals` (by reason), `learned`, `open_inodes`,
`closed_backings` (registered still, nobody has them open).

Decides nothing about file contents, names or freshness, and restarts nobody.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import errno
import faulthandler
import json
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from fusecache.kernel import open_table, wire
from fusecache.kernel.backing import Backing, Registry
from fusecache.kernel.gate_worker import Worker
from fusecache.kernel.in_flight import InFlight, Load, Request
from fusecache.kernel.init_message import InitError, InitPlan, patched_answer
from fusecache.kernel.log import Log
from fusecache.kernel.notifications import Notifications
from fusecache.kernel.open_table import OpenTable
from fusecache.kernel.opens import EXPIRE_EVERY_S, Opens
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.reply_slots import BadSlots, BadToken
from fusecache.kernel.spin import Spin

REQUEST_BUFFER_BYTES: Final = (1 << 20) + 4096
"""The kernel refuses to read into less than fuse_in_header + fuse_write_in + max_write (libfuse's is 1 MiB at most)."""
MOST_EVENTS: Final = 32
"""epoll's default (1,023) makes Python allocate 12 KiB each time."""
OVERDUE_S: Final = 0.25
"""A request left unread by a blocked worker for so long is given to another one too."""
LOOK_AGAIN_S: Final = 0.020
"""While something waits for credits or an answer: credits come back without a message when a worker empties its
socket."""
STOP_S: Final = 10.0
MOST_CONTROL_BYTES: Final = 1 << 16

_DROPPED: Final = frozenset((wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT, wire.NOTIFY_REPLY))
_NO_SUCH_CALL: Final = frozenset((wire.FLUSH, wire.FSYNC, wire.FSYNCDIR, wire.OPENDIR))
_DONE: Final = frozenset((wire.RELEASE, wire.RELEASEDIR, wire.DESTROY))
_NOTHING_READ: Final = frozenset((errno.EAGAIN, errno.EINTR, errno.ENOENT, errno.EIO))
"""ENOENT: its caller was killed before it was taken. EIO: too long for any buffer, its caller has its error."""
_WITH_HANDLE: Final = frozenset((wire.READ, wire.READDIR, wire.READDIRPLUS))


class GateFailed(Exception):
    """The gate can't go on; the text says why. The supervisor is told and starts another one."""


class BadAnswer(Exception):
    """A worker's answer is not one to this request."""

    def __init__(self, request: Request, why: str) -> None:
        super().__init__(why)
        self.request = request


class SupervisorGone(Exception):
    """Nobody would restart us or the workers: end, so that the connection ends."""


class Unmounted(Exception):
    """The kernel ended the connection."""


class Gate:
    """One connection to the kernel."""

    def __init__(
        self, device: int, control: int, settings: Mapping[str, Any], registry: Registry | None = None
    ) -> None:
        """`settings` as the supervisor sends them. Raises KeyError, ValueError or OSError for unusable ones."""
        self._log = Log("gate", settings.get("log_level", "info"))
        self._device = device
        os.set_blocking(device, False)
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._init = bytes.fromhex(settings["init"])
        self._plan = InitPlan(**settings["init_plan"])
        self._initialised = bool(settings.get("initialised", False))
        self._opens: Opens | None = None
        """None: the kernel is told never to send OPEN."""
        if settings["open_mode"] == "passthrough":
            allowed = settings.get("backing_devices")
            devices = None if allowed is None else frozenset(map(_device_number, allowed))
            table = OpenTable(_table_buffer(settings["open_table_fd"]))
            self._opens = Opens(table, Backing(registry or Registry(device), devices), time.monotonic)
        self._spin = Spin(int(settings.get("spin_us", 0)))

        self._workers: dict[int, Worker] = {}
        """Requests socket -> worker."""
        self._by_index: dict[int, Worker] = {}
        self._in_flight = InFlight(self._has_unread)
        self._failing = False
        """Workers die as fast as they start: EIO at once instead of waiting."""
        self._stop_at_s: float | None = None
        self._answered = [0] * 256
        self._dispatched = [0] * 256
        self._counts = {"worker_deaths": 0, "workers_broken": 0, "answers_unasked": 0, "given_twice": 0}
        self._slot_bytes = 0
        self._buffer = bytearray(REQUEST_BUFFER_BYTES)
        self._buffers = [self._buffer]
        self._view = memoryview(self._buffer)
        self._answer = bytearray(wire.MOST_ANSWER_BYTES + 1)
        self._answers = [self._answer]
        self._answer_view = memoryview(self._answer)
        self._notifications = Notifications(device, self.status, self._opens, self._log)
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._reads_device = False
        if self._initialised:
            self._start_reading()

    # The loop

    def run(self) -> None:
        """Serve until the mount is gone or the supervisor says stop. Raises GateFailed; the supervisor knows why."""
        try:
            self._serve()
        except Unmounted:
            return
        except GateFailed as exc:
            self._tell({"kind": "failed", "text": str(exc)})
            raise
        except SupervisorGone as exc:
            raise GateFailed("the supervisor is gone") from exc

    def _serve(self) -> None:
        poll = self._epoll.poll
        device = self._device
        control = self._control.fileno()
        spin = self._spin
        clock = time.monotonic
        workers = self._workers
        last_request_s = 0.0
        look_at_s = 0.0
        while True:
            events = poll(0, MOST_EVENTS) if spin.us else ()
            if not events:
                if spin.us:
                    now_s = clock()
                    until_s = spin.until_s(last_request_s, now_s)
                    if until_s:
                        while not events and clock() < until_s:
                            events = poll(0, MOST_EVENTS)
                        spin.spent(clock() - now_s)
                if not events:
                    events = poll(self._sleep_s(), MOST_EVENTS)
            now_s = clock()
            for descriptor, _ in events:
                if descriptor == device:
                    self._take_request(now_s)
                    last_request_s = now_s
                elif descriptor == control:
                    self._take_control()
                else:
                    worker = workers.get(descriptor)
                    if worker is not None:  # None: closed by an event before this one
                        self._take_answer(worker, now_s)
                        last_request_s = now_s
            if now_s >= look_at_s:
                look_at_s = now_s + LOOK_AGAIN_S
                self._look_around(now_s)
                if self._stop_at_s is not None and (now_s >= self._stop_at_s or self._is_drained()):
                    return

    def _sleep_s(self) -> float:
        if self._in_flight.is_busy or self._stop_at_s is not None:
            return LOOK_AGAIN_S
        if self._opens is not None and self._opens.has_closed:
            return EXPIRE_EVERY_S
        return -1.0

    def _look_around(self, now_s: float) -> None:
        """What no message starts: credits that came back, requests left unread, backing ids that are due."""
        in_flight = self._in_flight
        if in_flight.owed:
            for load in in_flight.loads.values():
                load.full = False
            late = in_flight.overdue(now_s, OVERDUE_S)
            if late and len(in_flight.loads) > 1:
                for request in late:
                    load_or_none = in_flight.choose(request, now_s)
                    if load_or_none is not None and self._give(request, load_or_none, now_s):
                        self._counts["given_twice"] += 1
        if in_flight.waiting:
            self._give_waiting(now_s)
        if self._opens is not None:
            self._opens.look_around(now_s)

    def close(self) -> None:
        """Close every descriptor. What is in flight is then the business of whoever reads the device."""
        for worker in self._workers.values():
            worker.close()
        self._notifications.close()
        self._epoll.close()
        self._control.close()
        os.close(self._device)

    # From the kernel

    def _start_reading(self) -> None:
        self._reads_device = True
        self._epoll.register(self._device, select.EPOLLIN)

    def _take_request(self, now_s: float) -> None:
        """One request: epoll says when there is another (0.5 us; to read until EAGAIN costs an exception, 1.7 us)."""
        buffer = self._buffer
        try:
            received = os.readv(self._device, self._buffers)
        except OSError as exc:
            if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                raise Unmounted from exc
            if exc.errno in _NOTHING_READ:
                return
            raise GateFailed(f"the device can't be read: {exc.strerror}") from exc
        try:
            opcode, unique, inode = wire.decode_request(buffer, received)
        except wire.BadMessage as exc:
            raise GateFailed(f"the kernel sent {exc}") from exc
        if opcode == wire.OPEN:
            answer = self._open_here(unique, inode)
            if answer is not None:
                self._answered[opcode] += 1
                if not self._write(answer) and self._opens is not None:
                    self._opens.release(unique, inode, now_s)
                return
        elif opcode == wire.RELEASE:
            self._answered[opcode] += 1
            if self._opens is not None:
                self._opens.release(unique, inode, now_s)
            self._write(wire.error_answer(unique, 0))
            return
        elif opcode in _WITH_HANDLE:
            wire.use_inode_as_handle(buffer, opcode, inode)
        elif opcode in _DROPPED:
            self._answered[opcode] += 1
            return
        elif opcode in _NO_SUCH_CALL:
            self._answered[opcode] += 1
            self._write(wire.error_answer(unique, wire.NO_SUCH_CALL))
            return
        elif opcode in _DONE:
            self._answered[opcode] += 1
            self._write(wire.error_answer(unique, 0))
            return
        self._dispatched[opcode & 255] += 1
        self._dispatch(Request(opcode, unique, inode, bytes(self._view[:received]), now_s), now_s)

    def _open_here(self, unique: int, inode: int) -> bytes | None:
        if self._opens is None:
            return wire.error_answer(unique, wire.NO_SUCH_CALL)
        return self._opens.answer_alone(unique, inode)

    def _write(self, answer: bytes | memoryview) -> bool:
        """Answer the kernel; False when the request is gone."""
        try:
            os.write(self._device, answer)
        except OSError as exc:
            return self._not_written(exc)
        return True

    def _not_written(self, exc: OSError) -> bool:
        if exc.errno == errno.ENODEV:
            raise Unmounted from exc
        if exc.errno != errno.ENOENT:  # ENOENT is normal: the request was aborted, its caller has its answer
            self._log.error("the kernel refused an answer", why=exc.strerror)
        return False

    # To and from workers

    def _dispatch(self, request: Request, now_s: float) -> None:
        if self._failing:
            self._write(wire.error_answer(request.unique, errno.EIO))
            return
        queue = self._in_flight.queue_of(request)
        if not queue:
            load = self._in_flight.choose(request, now_s)
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
        self._in_flight.given(request, load, now_s)
        return True

    def _give_waiting(self, now_s: float) -> None:
        for queue in (self._in_flight.waiting_reads, self._in_flight.waiting_others):
            while queue:
                request = queue[0]
                load = self._in_flight.choose(request, now_s)
                if load is None:
                    break
                if self._give(request, load, now_s):
                    queue.popleft()

    def _has_unread(self, load: Load) -> bool:
        return self._by_index[load.index].has_unread()

    def _take_answer(self, worker: Worker, now_s: float) -> None:
        """One message of a worker; the end of its socket: it is dead."""
        try:
            received = os.readv(worker.requests, self._answers)
        except (BlockingIOError, ConnectionResetError):
            # Reset: it died with requests unread; the answers that it gave before, and the end, come after this.
            return
        except OSError as exc:
            raise GateFailed(f"worker {worker.index}'s socket can't be read: {exc.strerror}") from exc
        if not received:
            self._bury(worker, now_s)
            return
        load = worker.load
        try:
            error, unique = wire.decode_answer(self._answer, received)
            if not load.ready and unique == self._plan.unique:
                self._greet(worker, bytes(self._answer_view[:received]))
                return
            request = self._in_flight.answer_of(load, unique, now_s)
            if request is None:
                self._drop_answer(worker, received)
            elif error:
                self._write(wire.error_answer(unique, error))
            elif request.opcode == wire.READ:
                self._answer_read(worker, request, received)
            elif request.opcode == wire.OPEN and self._opens is not None:
                self._finish_open(self._opens, worker, request, received, now_s)
            else:
                self._write(self._answer_view[:received])
        except BadAnswer as exc:
            # Its request is nobody's fault, but may be what makes workers do this: the third time it is EIO.
            self._in_flight.take_back(load, exc.request)
            self._break(worker, str(exc), now_s)
        except (wire.BadMessage, InitError) as exc:
            self._break(worker, str(exc), now_s)
        if self._in_flight.waiting_reads or self._in_flight.waiting_others:
            self._give_waiting(now_s)

    def _finish_open(self, opens: Opens, worker: Worker, request: Request, received: int, now_s: float) -> None:
        try:
            answer = opens.answer_with(self._answer_view[:received], request, worker.offers)
        except wire.BadMessage as exc:
            raise BadAnswer(request, str(exc)) from exc
        if not self._write(answer):
            opens.release(request.unique, request.inode, now_s)

    def _answer_read(self, worker: Worker, request: Request, received: int) -> None:
        token = self._answer_view[wire.OUT_HEADER.size : received]
        try:
            slot, content = worker.slots.bytes_of(token, wire.read_size(request.message))
        except BadToken as exc:
            raise BadAnswer(request, str(exc)) from exc
        try:
            os.writev(self._device, [wire.data_header(request.unique, len(content)), content])
        except OSError as exc:
            self._not_written(exc)
        self._slot_bytes += len(content)
        worker.slots.free(slot)

    def _drop_answer(self, worker: Worker, received: int) -> None:
        """Another worker was faster, or it answers what it was not asked. Its slot, if it names one, is free again."""
        self._counts["answers_unasked"] += 1
        slot = worker.slots.slot_of(self._answer_view[wire.OUT_HEADER.size : received])
        if slot is not None:
            worker.slots.free(slot)

    def _greet(self, worker: Worker, answer: bytes) -> None:
        """A worker answered INIT: the kernel gets the first such answer, and the worker its requests."""
        patched = patched_answer(answer, self._plan)
        if not self._initialised:
            try:
                os.write(self._device, patched)
            except OSError as exc:
                raise GateFailed(f"the kernel refuses the answer to INIT: {exc.strerror}") from exc
            self._initialised = True
            self._start_reading()
            self._tell({"kind": "initialised"})
        worker.load.ready = True
        self._failing = False
        self._in_flight.loads[worker.index] = worker.load
        self._tell({"kind": "worker_ready", "index": worker.index, "pid": worker.pid})
        self._give_waiting(time.monotonic())

    def _break(self, worker: Worker, why: str, now_s: float) -> None:
        """A worker sent what none may send: it is cut off, and the supervisor replaces it."""
        self._log.error("worker cut off", index=worker.index, pid=worker.pid, why=why)
        self._counts["workers_broken"] += 1
        self._tell({"kind": "worker_broken", "index": worker.index, "pid": worker.pid, "text": why})
        self._bury(worker, now_s)

    def _bury(self, worker: Worker, now_s: float) -> None:
        """A worker is gone: others get what it held."""
        self._epoll.unregister(worker.requests)
        del self._workers[worker.requests]
        if self._by_index.get(worker.index) is worker:
            del self._by_index[worker.index]
        again, poisoned = self._in_flight.died(worker.load)
        worker.close()
        self._counts["worker_deaths"] += 1
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
            self._write(wire.error_answer(request.unique, errno.EIO))
        self._in_flight.wait_first(again)
        if self._failing:
            self._fail_waiting()
        else:
            self._give_waiting(now_s)

    def _fail_waiting(self) -> None:
        for queue in (self._in_flight.waiting_reads, self._in_flight.waiting_others):
            while queue:
                self._write(wire.error_answer(queue.popleft().unique, errno.EIO))

    def _is_drained(self) -> bool:
        return not self._in_flight.owed and not self._in_flight.waiting

    # The supervisor

    def _take_control(self) -> None:
        while True:
            try:
                message, descriptors = _receive_control(self._control)
            except BlockingIOError:
                return
            except OSError as exc:
                raise SupervisorGone from exc
            if not message:
                raise SupervisorGone
            try:
                order = json.loads(message)
                kind = order["kind"]
                if kind == "worker":
                    requests, slots, offers = descriptors
                    descriptors = []
                    self._add_worker(int(order["index"]), int(order["pid"]), requests, slots, offers)
                elif kind == "agent":
                    (link,) = descriptors
                    descriptors = []
                    self._notifications.serve(link)
                elif kind == "status":
                    self._tell({"kind": "status", **self.status()})
                elif kind == "workers_failing":
                    self._failing = bool(order["failing"])
                    if self._failing:
                        self._log.error("workers die as fast as they start: every request is answered EIO")
                        self._fail_waiting()
                elif kind == "stop":
                    self._stop_at_s = time.monotonic() + STOP_S
                    if self._reads_device:
                        self._epoll.unregister(self._device)
                        self._reads_device = False
                else:
                    self._log.error("order of the supervisor not understood", order=kind)
            except (ValueError, KeyError, TypeError, BadSlots) as exc:
                self._log.error("order of the supervisor refused", why=repr(exc))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _add_worker(self, index: int, pid: int, requests: int, slots: int, offers: int) -> None:
        before = self._by_index.get(index)
        worker = Worker(index, pid, requests, slots, offers)
        if before is not None:
            self._bury(before, time.monotonic())
        self._workers[requests] = worker
        self._by_index[index] = worker
        self._epoll.register(requests, select.EPOLLIN)
        try:
            os.write(requests, self._init)
        except OSError as exc:
            # It died already; the end of its socket is noticed next.
            self._log.info("worker takes no INIT", index=index, pid=pid, why=exc.strerror)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as exc:
            self._log.error("the supervisor was not told", kind=message["kind"], why=exc.strerror)

    def status(self) -> dict[str, Any]:
        """Counters since the start, and gauges. Also called in the notifying threads: reads only."""
        in_flight = self._in_flight
        status = {
            "answered": _by_name(self._answered),
            "dispatched": _by_name(self._dispatched),
            "redelivered": in_flight.redelivered,
            "poisoned": in_flight.poisoned,
            **self._counts,
            "bytes_by_slots": self._slot_bytes,
            "notifications": dict(self._notifications.counts),
            "spin_seconds": round(self._spin.spent_s, 3),
            "in_flight": in_flight.owed,
            "waiting": in_flight.waiting,
            "failing": self._failing,
            "workers": [
                {
                    "index": worker.index,
                    "pid": worker.pid,
                    "ready": worker.load.ready,
                    "in_flight": len(worker.load.owed),
                    "slots": worker.slots.count,
                }
                for worker in list(self._by_index.values())
            ],
        }
        if self._opens is not None:
            table, backing = self._opens.table, self._opens.backing
            status["opens"] = dict(self._opens.counts)
            status["refusals"] = dict(backing.refusals)
            status["learned"] = backing.learned
            status["open_inodes"] = len(table.rows) - len(table.closed)
            status["closed_backings"] = len(table.closed)
        return status


def _by_name(counts: list[int]) -> dict[str, int]:
    return {wire.OPCODE_NAMES.get(opcode, str(opcode)): count for opcode, count in enumerate(counts) if count}


def _receive_control(control: socket.socket) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(8 * array.array("i").itemsize)
    message, ancillary, _, _ = control.recvmsg(MOST_CONTROL_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _table_buffer(descriptor: int) -> memoryview:
    if os.fstat(descriptor).st_size < open_table.TABLE_BYTES:
        os.ftruncate(descriptor, open_table.TABLE_BYTES)
    return memoryview(mmap.mmap(descriptor, open_table.TABLE_BYTES))


def _device_number(device: int | str) -> int:
    """st_dev, also as "major:minor"."""
    if isinstance(device, int):
        return device
    major, minor = device.split(":")
    return os.makedev(int(major), int(minor))


def main(arguments: list[str] | None = None, log: Callable[[str], Log] = Log) -> int:
    """Command line of the supervisor; the exit code: 0 unmounted or stopped, 1 failed."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.gate")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--device-fd", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    flags = parser.parse_args(arguments)
    if sys.byteorder != "little":
        log("gate").error("this machine's byte order is not supported", byteorder=sys.byteorder)
        return 1
    faulthandler.enable()  # the supervisor ends a stuck gate by ABRT
    set_process_name("gate", str(flags.settings.get("mountpoint", "")))
    gate = Gate(flags.device_fd, flags.control_fd, flags.settings)
    try:
        with contextlib.closing(gate):
            gate.run()
    except GateFailed as exc:
        log("gate").error("gate ends", why=str(exc))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
