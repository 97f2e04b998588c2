"""The process between the kernel and the workers: `python -S -m fusecache.kernel.gate.main`, started by the supervisor.

It stands by until the supervisor's first message, `begin`, brings settings, device and table of open inodes. When it
is not the first gate of the mount, workers come that have answered INIT already: what they still send to requests of
the gate before is dropped, and the kernel has put those requests back (or ended them).

A request's way: the kernel's message is read from the device; FORGET and INTERRUPT are dropped; OPEN, RELEASE, FLUSH,
IOCTL and their like are answered here where they can be (`no-open`: -ENOSYS, after which the kernel sends no more of
them; `passthrough`: see `opens`), and so are READs of files that the gate knows (`direct_reads`);
everything else goes to a worker with credits (`in_flight`) or waits for one. A worker's answer is checked
(`kernel.wire`), a READ's bytes are taken from its shared slot (`kernel.reply_slots`), and the kernel gets it. When a
worker dies, what it held goes to another one: callers see a pause, on any kernel.

A gate that takes over (`standby`) has workers and agent before it reads: with `go` it gets what the gate before it had
read and not answered (`takeover.carried`), and begins. `hand_over` is the other end of that.

One thread does all of this and never blocks but in epoll; notifications are written by threads of their own
(`notifications`). It spins before it sleeps (`spin`). Standard library only.

`status` (also for the agent, by `kernel.gate_link`): `answered` and `dispatched` (requests by opcode: answered here,
given to a worker), `redelivered`, `poisoned`, `given_twice` (left unread by a blocked worker), `worker_deaths`,
`workers_broken` (cut off for what they sent), `answers_unasked` (of a slower worker, or to nothing), `interrupted`
(answered EINTR: their caller was killed), `timed_out` (answered EIO: no worker answered), `bytes_by_slots`,
`notifications` (pushes, pushes_refused, stored_bytes), `spin_seconds`; `in_flight`, `waiting`, `failing`, `workers`
(`unread_s`: for how long its socket has lain unread); `refusals` (of offered files, by reason), `learned` (files that
are known); `direct_reads` (reads, bytes, mapped_bytes of them, not_in_memory); in passthrough mode `opens`
(passthrough_new, passthrough_learned, passthrough_known, ordinary), `open_inodes`, `closed_backings` (registered still,
nobody has them open).

Decides nothing about file contents, names or freshness, and restarts nobody.
"""

from __future__ import annotations

import argparse
import array
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

from fusecache.kernel import wire
from fusecache.kernel.gate import carried, open_table
from fusecache.kernel.gate.answers import Answers, Unmounted
from fusecache.kernel.gate.backing import Backing, Registry
from fusecache.kernel.gate.direct_reads import DirectReads
from fusecache.kernel.gate.dispatch import Dispatch, Limits, WorkersFailed
from fusecache.kernel.gate.in_flight import Request
from fusecache.kernel.gate.learned import LearnedFiles
from fusecache.kernel.gate.notifications import Notifications
from fusecache.kernel.gate.open_table import OpenTable
from fusecache.kernel.gate.opens import EXPIRE_EVERY_S, Opens
from fusecache.kernel.gate.spin import Spin
from fusecache.kernel.gate.store_room import StoreRoom
from fusecache.kernel.init_message import InitPlan
from fusecache.kernel.log import Log
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.reply_slots import BadSlots

REQUEST_BUFFER_BYTES: Final = (1 << 20) + 4096
"""The kernel refuses to read into less than fuse_in_header + fuse_write_in + max_write (libfuse's is 1 MiB at most)."""
MOST_EVENTS: Final = 32
"""epoll's default (1,023) makes Python allocate 12 KiB each time."""
LOOK_AGAIN_S: Final = 0.020
"""While something waits for credits or an answer: credits come back without a message when a worker empties its
socket."""
NOTIFICATION_WAIT_S: Final = 10.0
"""A notification waits so long at most for what is in flight, before the kernel is made to wait for it."""
STOP_S: Final = 10.0
HAND_OVER_S: Final = 0.25
"""For answers that are on their way; what is not answered then goes to the next gate, and is asked for again."""
MOST_CONTROL_BYTES: Final = 1 << 16

_NO_TABLE_BYTES: Final = open_table.HEAD_BYTES + 32
"""A table for as long as another gate has the real one: one row, never used."""

_DROPPED: Final = frozenset((wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT, wire.NOTIFY_REPLY))
_NO_SUCH_CALL: Final = frozenset((wire.FLUSH, wire.FSYNC, wire.FSYNCDIR, wire.OPENDIR))
_DONE: Final = frozenset((wire.RELEASE, wire.RELEASEDIR, wire.DESTROY))
_NOTHING_READ: Final = frozenset((errno.EAGAIN, errno.EINTR, errno.ENOENT, errno.EIO))
"""ENOENT: its caller was killed before it was taken. EIO: too long for any buffer, its caller has its error."""
_WITH_HANDLE: Final = frozenset((wire.READ, wire.READDIR, wire.READDIRPLUS))


class GateFailed(Exception):
    """The gate can't go on; the text says why. The supervisor is told and starts another one."""


class SupervisorGone(Exception):
    """Nobody would restart us or the workers: end, so that the connection ends."""


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
        self._initialised = bool(settings.get("initialised", False))
        self._standby = bool(settings.get("standby", False))
        """Another gate reads the device, and has the table of opens."""
        allowed = settings.get("backing_devices")
        devices = None if allowed is None else frozenset(map(_device_number, allowed))
        own_device = _device_number(settings["device"]) if "device" in settings else None
        self._learned = LearnedFiles(devices, time.monotonic, own_device)
        self._opens: Opens | None = None
        """None: the kernel is told never to send OPEN."""
        self._table_fd = int(settings["open_table_fd"])
        if settings["open_mode"] == "passthrough":
            table = OpenTable(bytearray(_NO_TABLE_BYTES) if self._standby else _table_buffer(self._table_fd))
            self._opens = Opens(table, Backing(registry or Registry(device), self._learned))
        self._notification_wait_s = float(settings.get("notification_wait_s", NOTIFICATION_WAIT_S))
        self._spin = Spin(int(settings.get("spin_us", 0)))

        self._stop_at_s: float | None = None
        self._hand_over_fd: int | None = None
        self._answered = [0] * 256
        self._dispatched = [0] * 256
        self._buffer = bytearray(REQUEST_BUFFER_BYTES)
        self._buffers = [self._buffer]
        self._view = memoryview(self._buffer)
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._answers = Answers(device, self._log)
        self._direct_reads = DirectReads(self._learned, self._answers)
        init = (bytes.fromhex(settings["init"]), InitPlan(**settings["init_plan"]))
        self._dispatch = Dispatch(
            self._answers,
            self._opens,
            self._direct_reads,
            self._epoll,
            init,
            self._take_init_answer,
            self._tell,
            self._log,
            Limits(**settings.get("answer_limits", {})),
        )
        room = StoreRoom(time.monotonic) if "store" in settings.get("features", ("store",)) else None
        self._notifications = Notifications(device, self.status, self._learned, room, self._wait_answered, self._log)
        self._reads_device = False
        if self._initialised and not self._standby:
            self._start_reading()

    # The loop

    def run(self) -> None:
        """Serve until the mount is gone or the supervisor says stop. Raises GateFailed (the supervisor knows why) and
        SupervisorGone."""
        try:
            self._serve()
            if self._hand_over_fd is not None:
                self._hand_over(self._hand_over_fd)
        except Unmounted:
            return
        except (GateFailed, WorkersFailed) as exc:
            self._tell({"kind": "failed", "text": str(exc)})
            raise GateFailed(str(exc)) from exc

    @property
    def has_handed_over(self) -> bool:
        """Whether another gate goes on."""
        return self._hand_over_fd is not None

    def _serve(self) -> None:
        poll = self._epoll.poll
        device = self._device
        control = self._control.fileno()
        spin = self._spin
        clock = time.monotonic
        workers = self._dispatch.by_socket
        take_answer = self._dispatch.take_answer
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
                        take_answer(worker, now_s)
                        last_request_s = now_s
            if now_s >= look_at_s:
                look_at_s = now_s + LOOK_AGAIN_S
                self._dispatch.look_around(now_s)
                if self._opens is not None:
                    if not self._standby:
                        self._opens.look_around(now_s)
                elif self._learned.has_forgotten:
                    self._learned.settle_forgotten()
                if self._stop_at_s is not None and (now_s >= self._stop_at_s or self._dispatch.is_drained()):
                    return

    def _sleep_s(self) -> float:
        if self._dispatch.in_flight.is_busy or self._stop_at_s is not None:
            return LOOK_AGAIN_S
        if self._opens is not None and self._opens.has_closed:
            return EXPIRE_EVERY_S
        return -1.0

    def close(self) -> None:
        """The mount has ended: close every descriptor, and end the workers and the agent's link."""
        self._dispatch.close()
        self._notifications.close()
        self._epoll.close()
        self._control.close()
        os.close(self._device)

    # From the kernel

    def _start_reading(self) -> None:
        self._reads_device = True
        self._epoll.register(self._device, select.EPOLLIN)

    def _stop_reading(self, within_s: float) -> None:
        """End once everything is answered, and after so many seconds at the latest."""
        self._stop_at_s = time.monotonic() + within_s
        if self._reads_device:
            self._epoll.unregister(self._device)
            self._reads_device = False

    def _go(self, carried_fd: int) -> None:
        """The device is this gate's now, with what the one before left unanswered. Once."""
        if not self._standby:
            raise ValueError("this gate reads the device already")
        self._standby = False
        if self._opens is not None:
            self._opens.table = OpenTable(_table_buffer(self._table_fd))
        self._start_reading()
        now_s = time.monotonic()
        for message in carried.read(carried_fd):
            self._view[: len(message)] = message
            self._handle(len(message), now_s)

    def _hand_over(self, descriptor: int) -> None:
        """Leave what is not answered to the next gate. Raises GateFailed."""
        requests = self._dispatch.in_flight.all_unanswered()
        try:
            carried.write(descriptor, [request.message for request in requests])
        except OSError as exc:
            raise GateFailed(f"what is in flight can't be handed over: {exc.strerror}") from exc
        self._tell({"kind": "handed_over", "requests": len(requests)})

    def _wait_answered(self, opcodes: frozenset[int], inode: int) -> None:
        """Called in the notifying thread."""
        self._dispatch.wait_answered(opcodes, inode, self._notification_wait_s)

    def _take_init_answer(self, answer: bytes) -> None:
        """The first worker's answer to INIT goes to the kernel; those of later ones are dropped."""
        if self._initialised:
            return
        try:
            os.write(self._device, answer)
        except OSError as exc:
            raise GateFailed(f"the kernel refuses the answer to INIT: {exc.strerror}") from exc
        self._initialised = True
        self._start_reading()
        self._tell({"kind": "initialised"})

    def _take_request(self, now_s: float) -> None:
        """One request: epoll says when there is another (0.5 us; to read until EAGAIN costs an exception, 1.7 us)."""
        try:
            received = os.readv(self._device, self._buffers)
        except OSError as exc:
            if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                raise Unmounted from exc
            if exc.errno in _NOTHING_READ:
                return
            raise GateFailed(f"the device can't be read: {exc.strerror}") from exc
        self._handle(received, now_s)

    def _handle(self, received: int, now_s: float) -> None:
        """The request that lies in the buffer: answer it here, or give it to a worker."""
        buffer = self._buffer
        try:
            opcode, unique, inode = wire.decode_request(buffer, received)
        except wire.BadMessage as exc:
            raise GateFailed(f"the kernel sent {exc}") from exc
        if opcode == wire.OPEN:
            answer = self._open_here(unique, inode)
            if answer is not None:
                self._answered[opcode] += 1
                if not self._answers.write(answer) and self._opens is not None:
                    self._opens.release(unique, inode, now_s)
                return
        elif opcode == wire.RELEASE:
            self._answered[opcode] += 1
            if self._opens is not None:
                self._opens.release(unique, inode, now_s)
            self._answers.write_error(unique, 0)
            return
        elif opcode == wire.READ and self._learned:
            if self._direct_reads.answer(unique, inode, *wire.read_range(buffer)):
                self._answered[opcode] += 1
                return
            wire.use_inode_as_handle(buffer, opcode, inode)
        elif opcode in _WITH_HANDLE:
            wire.use_inode_as_handle(buffer, opcode, inode)
        elif opcode in _DROPPED:
            self._answered[opcode] += 1
            return
        elif opcode in _NO_SUCH_CALL:
            self._answered[opcode] += 1
            self._answers.write_error(unique, wire.NO_SUCH_CALL)
            return
        elif opcode == wire.IOCTL:
            # Python's open() asks each file whether it is a terminal, and the kernel asks us each time.
            self._answered[opcode] += 1
            self._answers.write_error(unique, errno.ENOTTY)
            return
        elif opcode in _DONE:
            self._answered[opcode] += 1
            self._answers.write_error(unique, 0)
            return
        self._dispatched[opcode & 255] += 1
        self._dispatch.dispatch(Request(opcode, unique, inode, bytes(self._view[:received]), now_s), now_s)

    def _open_here(self, unique: int, inode: int) -> bytes | None:
        if self._opens is None:
            return wire.error_answer(unique, wire.NO_SUCH_CALL)
        return self._opens.answer_alone(unique, inode)

    # The supervisor

    def _take_control(self) -> None:
        while True:
            try:
                message, descriptors, are_missing = _receive_control(self._control)
            except BlockingIOError:
                return
            except OSError as exc:
                raise SupervisorGone("the supervisor is gone") from exc
            if not message:
                raise SupervisorGone("the supervisor is gone")
            try:
                order = json.loads(message)
                kind = order["kind"]
                if are_missing and kind == "go":
                    raise GateFailed("no descriptor is left for what the gate before held")
                if are_missing:
                    self._refuse(order, "no descriptor is left for what came with it")
                elif kind == "worker":
                    requests, slots, offers = descriptors
                    descriptors = []
                    initialised = bool(order.get("initialised", False))
                    worker = int(order["index"]), int(order["pid"])
                    try:
                        self._dispatch.add(*worker, requests, slots, offers, initialised)
                    except OSError as exc:
                        self._refuse(order, str(exc))
                elif kind == "agent":
                    (link,) = descriptors
                    descriptors = []
                    try:
                        self._notifications.serve(link, again=bool(order.get("again", False)))
                    except RuntimeError as exc:
                        self._refuse(order, str(exc))
                elif kind == "status":
                    self._tell({"kind": "status", **self.status()})
                elif kind == "workers_failing":
                    self._dispatch.failing = bool(order["failing"])
                    if self._dispatch.failing:
                        self._log.error("workers die as fast as they start: every request is answered EIO")
                        self._dispatch.fail_waiting()
                elif kind == "go":
                    self._go(*descriptors)
                elif kind == "hand_over":
                    (self._hand_over_fd,) = descriptors
                    descriptors = []
                    self._stop_reading(HAND_OVER_S)
                elif kind == "stop":
                    self._stop_reading(STOP_S)
                else:
                    self._log.error("order of the supervisor not understood", order=kind)
            except carried.BadCarried as exc:
                raise GateFailed(f"what the gate before held can't be used: {exc}") from exc
            except (ValueError, KeyError, TypeError, BadSlots) as exc:
                self._log.error("order of the supervisor refused", why=repr(exc))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _refuse(self, order: dict[str, Any], why: str) -> None:
        """Something that this process has none of any more, now: the supervisor may try again."""
        self._log.warning("order of the supervisor can't be followed now", order=order["kind"], why=why)
        self._tell({"kind": "not_now", "order": order["kind"], "pid": order.get("pid")})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as exc:
            self._log.error("the supervisor was not told", kind=message["kind"], why=exc.strerror)

    def status(self) -> dict[str, Any]:
        """Counters since the start, and gauges. Also called in the notifying threads: reads only."""
        status = {
            "answered": _by_name(self._answered),
            "dispatched": _by_name(self._dispatched),
            **self._dispatch.status(),
            "notifications": dict(self._notifications.counts),
            "spin_seconds": round(self._spin.spent_s, 3),
        }
        status["refusals"] = dict(self._learned.refusals)
        status["learned"] = len(self._learned)
        status["direct_reads"] = dict(self._direct_reads.counts)
        if self._opens is not None:
            table = self._opens.table
            status["opens"] = dict(self._opens.counts)
            status["open_inodes"] = len(table.rows) - len(table.closed)
            status["closed_backings"] = len(table.closed)
        return status


def _by_name(counts: list[int]) -> dict[str, int]:
    return {wire.OPCODE_NAMES.get(opcode, str(opcode)): count for opcode, count in enumerate(counts) if count}


def _receive_control(control: socket.socket) -> tuple[bytes, list[int], bool]:
    """A message, its descriptors, and whether some are missing because this process may have no more."""
    space = socket.CMSG_SPACE(8 * array.array("i").itemsize)
    message, ancillary, flags, _ = control.recvmsg(MOST_CONTROL_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors), bool(flags & socket.MSG_CTRUNC)


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


def _stand_by(control: socket.socket) -> tuple[dict[str, Any], int]:
    """Wait for the supervisor to say begin: (settings with the table's descriptor, device). Raises SupervisorGone."""
    try:
        control.send(b'{"kind": "standing_by"}')
        message, descriptors, _ = _receive_control(control)
    except OSError as exc:
        raise SupervisorGone("the supervisor is gone") from exc
    if not message:
        raise SupervisorGone("the supervisor is gone")
    order = json.loads(message)
    device, table = descriptors
    return {**order["settings"], "open_table_fd": table}, device


def main(arguments: list[str] | None = None, log: Callable[[str], Log] = Log) -> int:
    """Command line of the supervisor; the exit code: 0 unmounted or stopped, 1 failed."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.gate.main")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--mountpoint", required=True)
    flags = parser.parse_args(arguments)
    if sys.byteorder != "little":
        log("gate").error("this machine's byte order is not supported", byteorder=sys.byteorder)
        return 1
    faulthandler.enable()  # the supervisor ends a stuck gate by ABRT
    set_process_name("spare gate", flags.mountpoint)
    try:
        with socket.socket(fileno=os.dup(flags.control_fd)) as control:
            settings, device = _stand_by(control)
        set_process_name("gate", flags.mountpoint)
        gate = Gate(device, flags.control_fd, settings)
        gate.run()
        if not gate.has_handed_over:
            gate.close()  # not after a failure: the next gate goes on with workers and link
    except GateFailed as exc:
        log("gate").error("gate ends", why=str(exc))
        return 1
    except SupervisorGone:
        # Whoever killed it knows; this end is what ends the connection, and with it all callers' waiting.
        log("gate").info("gate ends", why="the supervisor is gone")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
