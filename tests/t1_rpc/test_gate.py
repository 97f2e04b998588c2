"""The gate between a kernel and workers that the test plays: SEQPACKET sockets instead of /dev/fuse and processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusecache.kernel import wire
from fusecache.kernel.gate import dispatch
from fusecache.kernel.gate import worker as gate_worker
from fusecache.kernel.gate.backing import Registry
from fusecache.kernel.gate.in_flight import MOST_DELIVERIES
from fusecache.kernel.gate.learned import LearnedFiles
from fusecache.kernel.gate.main import Gate, GateFailed, SupervisorGone
from fusecache.kernel.gate.open_table import TABLE_BYTES
from fusecache.kernel.gate_link import GateLink
from fusecache.kernel.init_message import INIT_OUT, InitPlan
from fusecache.kernel.offers import Offered, OfferSender
from fusecache.kernel.reply_slots import GateSlots, WorkerSlots, create_slots
from tests.support.log_noise import Declare

WAIT_S = 10.0
INIT_UNIQUE = 2
SLOTS = 4


class FakeRegistry(Registry):
    """The kernel's table of backing files."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refusal: int | None = None
        self._last = 0

    def register(self, descriptor: int) -> int:
        if self.refusal is not None:
            raise OSError(self.refusal, os.strerror(self.refusal))
        self._last += 1
        self.registered[self._last] = os.fstat(descriptor).st_ino
        return self._last

    def unregister(self, backing_id: int) -> None:
        del self.registered[backing_id]


class FakeWorker:
    """A worker process's ends of its sockets."""

    def __init__(self, system: System, index: int, slots: int = SLOTS, *, send_buffer_bytes: int | None = None) -> None:
        gate_requests, self.requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if send_buffer_bytes is not None:
            gate_requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        gate_offers, offers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = create_slots(slots, 1 << 16)
        self.slots = WorkerSlots(memory)
        self.offers = OfferSender(offers.detach())
        self.requests.settimeout(WAIT_S)
        self.index = index
        self._gate_ends = [gate_requests.detach(), memory, gate_offers.detach()]
        system.workers.append(self)
        self.hand_to(system)

    def hand_to(self, system: System, *, initialised: bool = False) -> None:
        """As the supervisor does, which keeps the gate's ends."""
        order = {"kind": "worker", "index": self.index, "pid": 1000 + self.index, "initialised": initialised}
        socket.send_fds(system.control, [json.dumps(order).encode()], self._gate_ends)

    def gate_s_slots(self) -> GateSlots:
        """As the gate has them."""
        return GateSlots(self._gate_ends[1])

    def greet(self) -> None:
        message = self.requests.recv(4096)
        assert struct.unpack_from("<IIQ", message)[1:] == (wire.INIT, INIT_UNIQUE)
        body = INIT_OUT.pack(7, 38, 1 << 17, 0, 12, 9, 1 << 20, 1, 0, 0, 0, 0, 0).ljust(64, b"\0")
        self.answer(INIT_UNIQUE, body)

    def take(self) -> tuple[int, int, bytes]:
        """(opcode, unique, message) of a request that wants an answer."""
        opcode = wire.BATCH_FORGET
        while opcode == wire.BATCH_FORGET:
            message = self.requests.recv(1 << 17)
            assert message, "the gate closed the worker's socket"
            opcode, unique = struct.unpack_from("<IIQ", message)[1:]
        return opcode, unique, message

    def answer(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        self.requests.send(wire.OUT_HEADER.pack(16 + len(body), -error, unique) + body)

    def answer_read(self, unique: int, content: bytes) -> None:
        slot = self.slots.take(len(content))
        assert slot is not None
        slot.view[:] = content
        self.answer(unique, self.slots.token(slot, len(content)))

    def has_request(self) -> bool:
        return bool(select.select([self.requests], [], [], 0)[0])

    def die(self) -> None:
        self.requests.close()

    def close(self) -> None:
        self.requests.close()
        self.offers.close()
        for descriptor in self._gate_ends:
            os.close(descriptor)
        self._gate_ends.clear()


class System:
    """Kernel, supervisor and gate."""

    def __init__(self, open_mode: str, table: int, **settings: Any) -> None:
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(WAIT_S)
        self.control, gate_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(WAIT_S)
        self.registry = FakeRegistry()
        self.device = device
        self.failure: BaseException | None = None
        self.gate_closed = False
        self.workers: list[FakeWorker] = []
        init = wire.IN_HEADER.pack(56, wire.INIT, INIT_UNIQUE, 0, 0, 0, 0, 0, 0) + struct.pack("<IIII", 7, 38, 0, 0)
        plan = InitPlan(
            kernel_flags=0, kernel_minor=38, unique=INIT_UNIQUE, max_readahead_bytes=0, max_background=64,
            congestion_threshold=48, max_pages=0, passthrough=False,
        )  # fmt: skip
        given = {"open_mode": open_mode, "init": init.hex(), "init_plan": dataclasses.asdict(plan)}
        given["open_table_fd"] = table
        self.gate = Gate(device.detach(), gate_control.detach(), {**given, **settings}, self.registry)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.gate.run()
        except (GateFailed, SupervisorGone) as exc:
            self.failure = exc

    def worker(self, index: int = 0, slots: int = SLOTS) -> FakeWorker:
        worker = FakeWorker(self, index, slots)
        worker.greet()
        while self.told()["kind"] != "worker_ready":
            pass
        return worker

    def first_worker(self, send_buffer_bytes: int | None = None) -> FakeWorker:
        """`send_buffer_bytes`: of the gate's end."""
        worker = FakeWorker(self, 0, send_buffer_bytes=send_buffer_bytes)
        worker.greet()
        assert struct.unpack_from("<IiQ", self.kernel.recv(4096))[1:] == (0, INIT_UNIQUE)
        assert self.told() == {"kind": "initialised"}
        assert self.told() == {"kind": "worker_ready", "index": 0, "pid": 1000}
        return worker

    def told(self) -> dict[str, Any]:
        """What is new to a supervisor, which sees by itself when a worker has ended."""
        while True:
            message: dict[str, Any] = json.loads(self.control.recv(1 << 16))
            if message["kind"] != "worker_broken" or "text" in message:
                return message

    def order(self, **message: Any) -> None:
        self.control.send(json.dumps(message).encode())

    def status(self) -> dict[str, Any]:
        self.order(kind="status")
        answer = self.told()
        assert answer["kind"] == "status"
        return answer

    def link(self) -> GateLink:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.serve_agent(its)
        return GateLink(mine.detach(), timeout_s=WAIT_S)

    def serve_agent(self, its: socket.socket, *, again: bool = False) -> None:
        socket.send_fds(self.control, [json.dumps({"kind": "agent", "again": again}).encode()], [its.fileno()])

    def ask(self, opcode: int, unique: int, inode: int = 1, body: bytes = b"") -> None:
        self.kernel.send(wire.IN_HEADER.pack(40 + len(body), opcode, unique, inode, 0, 0, 0, 0, 0) + body)

    def read(self, unique: int, size: int, inode: int = 1) -> None:
        self.ask(wire.READ, unique, inode, struct.pack("<QQIIQII", 0, 0, size, 0, 0, 0, 0))

    def answered(self) -> tuple[int, int, bytes]:
        """(errno, unique, body)."""
        message = self.kernel.recv(1 << 21)
        length, error, unique = wire.OUT_HEADER.unpack_from(message)
        assert length == len(message)
        return -error, unique, message[16:]

    def kill(self) -> None:
        """The gate does nothing any more, and says nothing to its workers."""
        self.control.shutdown(socket.SHUT_RDWR)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def close_gate(self) -> None:
        """Once, as its program does when the mount has ended."""
        if not self.gate_closed:
            self.gate_closed = True
            self.gate.close()

    def end(self) -> None:
        """As if the supervisor died."""
        self.control.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.close_gate()
        self.kernel.close()
        for worker in self.workers:
            worker.close()


Start = Callable[..., System]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as ends:

        def begin(open_mode: str = "no-open", table: int | None = None, **settings: Any) -> System:
            if table is None:
                table = os.memfd_create("table")
                ends.callback(os.close, table)
            system = System(open_mode, table, **settings)
            ends.callback(system.end)
            return system

        yield begin


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_a_read_s_bytes_come_from_the_shared_slot(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    system.read(10, 5000, inode=77)
    opcode, unique, message = worker.take()
    assert (opcode, unique) == (wire.READ, 10)
    assert struct.unpack_from("<Q", message, 40) == (77,)
    worker.answer_read(10, b"x" * 4999)
    assert system.answered() == (0, 10, b"x" * 4999)
    wait_until(lambda: worker.slots.busy == 0)
    assert system.status()["bytes_by_slots"] == 4999


def test_without_open_the_gate_answers_what_needs_no_worker(start: Start) -> None:
    system = start()
    system.first_worker()
    for unique, opcode in enumerate((wire.OPEN, wire.OPENDIR, wire.FLUSH, wire.FSYNC, wire.FSYNCDIR), 10):
        system.ask(opcode, unique)
        assert system.answered() == (errno.ENOSYS, unique, b"")
    for unique, opcode in enumerate((wire.RELEASE, wire.RELEASEDIR, wire.DESTROY), 20):
        system.ask(opcode, unique)
        assert system.answered() == (0, unique, b"")
    for unique, opcode in enumerate((wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT), 30):
        system.ask(opcode, unique)
    system.ask(wire.OPEN, 40)
    assert system.answered() == (errno.ENOSYS, 40, b"")
    system.ask(wire.IOCTL, 41)
    assert system.answered() == (errno.ENOTTY, 41, b"")
    assert system.status()["answered"]["INTERRUPT"] == 1


def test_errors_and_other_answers_pass_unchanged(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    system.ask(wire.LOOKUP, 10, body=b"name\0")
    assert worker.take()[2][40:] == b"name\0"
    worker.answer(10, error=errno.ENOENT)
    assert system.answered() == (errno.ENOENT, 10, b"")
    system.ask(wire.STATFS, 11)
    worker.take()
    worker.answer(11, b"s" * 80)
    assert system.answered() == (0, 11, b"s" * 80)
    system.read(12, 100)
    worker.take()
    worker.answer(12, error=errno.EIO)
    assert system.answered() == (errno.EIO, 12, b"")


def test_what_a_dead_worker_held_is_answered_by_another(start: Start) -> None:
    system = start()
    first = system.first_worker()
    system.read(10, 100)
    first.take()
    first.die()
    second = system.worker(1)
    assert second.take()[:2] == (wire.READ, 10)
    second.answer_read(10, b"abc")
    assert system.answered() == (0, 10, b"abc")
    status = system.status()
    assert (status["worker_deaths"], status["redelivered"]) == (1, 1)


def test_answers_given_before_a_death_count(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    for unique in (10, 11, 12):
        system.read(unique, 100)
    assert [worker.take()[1] for _ in range(2)] == [10, 11]
    wait_until(worker.has_request)
    worker.answer_read(10, b"ten")
    worker.die()  # request 12 is unread: the gate's socket is reset before the answer can be taken
    assert system.answered() == (0, 10, b"ten")
    second = system.worker(1)
    assert [second.take()[1] for _ in range(2)] == [11, 12]


def test_a_request_waits_while_no_worker_lives(start: Start) -> None:
    system = start()
    system.first_worker().die()
    wait_until(lambda: system.status()["worker_deaths"] == 1)
    system.ask(wire.GETATTR, 10)
    wait_until(lambda: system.status()["waiting"] == 1)
    worker = system.worker(0)
    assert worker.take()[:2] == (wire.GETATTR, 10)


def test_a_request_that_kills_its_workers_is_answered_eio(start: Start, expected_logs: Declare) -> None:
    expected_logs(r"request answered EIO: every worker that held it died", count=1)
    system = start()
    worker = system.first_worker()
    system.ask(wire.GETATTR, 10)
    for delivery in range(MOST_DELIVERIES):
        assert worker.take()[:2] == (wire.GETATTR, 10)
        worker.die()
        if delivery < MOST_DELIVERIES - 1:
            worker = system.worker(0)
    assert system.answered() == (errno.EIO, 10, b"")
    assert system.status()["poisoned"] == 1


def test_while_workers_fail_everything_is_eio_until_one_is_ready(start: Start, expected_logs: Declare) -> None:
    expected_logs(r"workers die as fast as they start", count=1)
    system = start()
    system.first_worker().die()
    wait_until(lambda: system.status()["worker_deaths"] == 1)
    system.ask(wire.GETATTR, 10)
    wait_until(lambda: system.status()["waiting"] == 1)
    system.order(kind="workers_failing", failing=True)
    assert system.answered() == (errno.EIO, 10, b"")
    system.ask(wire.GETATTR, 11)
    assert system.answered() == (errno.EIO, 11, b"")
    worker = system.worker(0)
    system.ask(wire.GETATTR, 12)
    assert worker.take()[1] == 12


def test_what_a_worker_held_that_died_while_workers_fail_is_eio(start: Start, expected_logs: Declare) -> None:
    expected_logs(r"workers die as fast as they start", count=1)
    system = start()
    worker = system.first_worker()
    system.ask(wire.GETATTR, 10)
    worker.take()
    system.order(kind="workers_failing", failing=True)
    worker.die()
    assert system.answered() == (errno.EIO, 10, b"")


def test_a_worker_s_place_is_another_one_s_though_its_socket_is_still_open(start: Start) -> None:
    """It is dead, and something that it has started lives on with the socket."""
    system = start()
    worker = system.first_worker()
    system.ask(wire.GETATTR, 10)
    worker.take()
    after = FakeWorker(system, 0)
    after.greet()
    assert after.take()[:2] == (wire.GETATTR, 10)
    assert worker.requests.recv(100) == b"", "cut off"


def test_a_worker_has_no_more_reads_than_slots(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    for unique in range(10, 10 + SLOTS + 1):
        system.read(unique, 10)
    for unique in range(10, 10 + SLOTS):
        assert worker.take()[1] == unique
    system.ask(wire.GETATTR, 99)
    assert worker.take()[1] == 99
    assert not worker.has_request()
    worker.answer_read(11, b"x")
    assert system.answered() == (0, 11, b"x")
    assert worker.take()[1] == 10 + SLOTS


def test_a_blocked_worker_s_requests_go_to_another_too(start: Start) -> None:
    system = start()
    blocked = system.first_worker()
    system.read(10, 10)
    wait_until(blocked.has_request)  # given, and not taken out
    other = system.worker(1)
    assert other.take()[:2] == (wire.READ, 10)
    other.answer_read(10, b"fast")
    assert system.answered() == (0, 10, b"fast")
    rows = {row["index"]: row for row in system.status()["workers"]}
    assert rows[0]["unread_s"] > 0.2
    assert rows[1]["unread_s"] == 0.0
    assert blocked.take()[1] == 10
    blocked.answer_read(10, b"slow")
    wait_until(lambda: blocked.slots.busy == 0)
    assert system.status()["answers_unasked"] == 1
    system.ask(wire.OPENDIR, 11)
    assert system.answered() == (errno.ENOSYS, 11, b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"short",
        wire.OUT_HEADER.pack(17, 0, 10),
        wire.OUT_HEADER.pack(16, -600, 10),
        wire.OUT_HEADER.pack(16, wire.NOTIFY_RESEND, 0),
        wire.OUT_HEADER.pack(21, 0, 10) + b"bytes",
        wire.OUT_HEADER.pack(32, 0, 10) + b"0123456789abcdef",
        wire.OUT_HEADER.pack(100_016, 0, 10) + bytes(100_000),
    ],
    ids=["short", "length", "errno", "notification", "bytes instead of a token", "no token", "too long"],
)
def test_a_worker_that_answers_what_none_may_is_cut_off_and_the_request_lives(
    start: Start, expected_logs: Declare, answer: bytes
) -> None:
    expected_logs(r"worker cut off", count=1)
    system = start()
    worker = system.first_worker()
    system.read(10, 100)
    worker.take()
    worker.requests.send(answer)
    told = system.told()
    assert (told["kind"], told["index"], told["pid"]) == ("worker_broken", 0, 1000)
    assert worker.requests.recv(100) == b""
    second = system.worker(1)
    assert second.take()[:2] == (wire.READ, 10)
    second.answer_read(10, b"good")
    assert system.answered() == (0, 10, b"good")


def test_the_supervisor_is_told_of_a_worker_that_closes_its_socket_and_lives_on(start: Start) -> None:
    """It would wait for ever for the end of a process that serves nobody."""
    system = start()
    worker = system.first_worker()
    worker.requests.shutdown(socket.SHUT_RDWR)
    assert json.loads(system.control.recv(1 << 16)) == {"kind": "worker_broken", "index": 0, "pid": 1000}


def test_no_worker_can_end_the_kernel_s_sending_of_open(start: Start, expected_logs: Declare) -> None:
    """ENOSYS would, for every file of the mount and for good, whatever is open by passthrough."""
    expected_logs(r"worker cut off.*ENOSYS", count=1)
    system = start("passthrough")
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    worker.answer(10, error=errno.ENOSYS)
    assert system.told()["kind"] == "worker_broken"
    second = system.worker(1)
    assert second.take()[:2] == (wire.OPEN, 10)
    open_answer(second, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)


def test_an_open_answered_with_something_else_is_another_worker_s(start: Start, expected_logs: Declare) -> None:
    expected_logs(r"worker cut off.*an OPEN answered with 21 bytes", count=1)
    system = start("passthrough")
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    worker.answer(10, b"bytes")
    assert system.told()["kind"] == "worker_broken"
    second = system.worker(1)
    assert second.take()[:2] == (wire.OPEN, 10)
    open_answer(second, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)


def test_a_worker_for_which_nothing_is_left_is_asked_for_again_and_leaves_no_descriptor(
    start: Start, expected_logs: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its three descriptors have come, and then there is no memory, or no descriptor for the mapping."""
    expected_logs(r"can't be followed now.*No memory left", count=1)
    system = start()
    system.first_worker()

    def none_left(*_: object) -> None:
        raise OSError(errno.ENOMEM, "No memory left")

    with monkeypatch.context() as patch:
        patch.setattr(gate_worker, "GateSlots", none_left)
        worker = FakeWorker(system, 1)
        before = len(os.listdir("/proc/self/fd"))
        assert system.told() == {"kind": "not_now", "order": "worker", "pid": 1001}
    epoll = system.gate._dispatch._epoll
    system.gate._dispatch._epoll = Refusing()  # type: ignore[assignment]
    worker.hand_to(system)
    assert system.told() == {"kind": "not_now", "order": "worker", "pid": 1001}
    system.gate._dispatch._epoll = epoll
    assert len(os.listdir("/proc/self/fd")) <= before, "less what was on its way then"
    worker.hand_to(system)
    worker.greet()
    assert system.told()["kind"] == "worker_ready"


class Refusing:
    """An epoll without room."""

    def register(self, descriptor: int, events: int) -> None:
        raise OSError(errno.ENOSPC, "No memory left")


def test_more_bytes_than_the_read_asked_for_never_reach_the_kernel(start: Start, expected_logs: Declare) -> None:
    expected_logs(r"worker cut off.*5 bytes for a READ of 4", count=1)
    system = start()
    worker = system.first_worker()
    system.read(10, 4)
    worker.take()
    worker.answer_read(10, b"12345")
    assert system.told()["kind"] == "worker_broken"


def test_an_answer_to_no_request_is_dropped(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    worker.answer(999)
    worker.answer(998, error=errno.EIO)
    system.ask(wire.OPENDIR, 10)
    assert system.answered() == (errno.ENOSYS, 10, b"")
    wait_until(lambda: system.status()["answers_unasked"] == 2)


def test_a_full_worker_socket_makes_requests_wait_and_lose_nothing(start: Start) -> None:
    """They are given as soon as the worker takes some out, also while it answers nothing."""
    system = start()
    worker = system.first_worker(
        send_buffer_bytes=1
    )  # the smallest there is (4.5 KiB): a few requests with a long name
    count = 30
    for unique in range(10, 10 + count):
        system.ask(wire.LOOKUP, unique, body=b"n" * 900 + b"\0")
    wait_until(lambda: system.status()["waiting"] > 0)
    assert system.status()["in_flight"] < count
    seen = []
    for _ in range(count):
        opcode, unique, _ = worker.take()
        assert opcode == wire.LOOKUP
        seen.append(unique)
    assert seen == list(range(10, 10 + count))
    for unique in seen:
        worker.answer(unique, error=errno.ENOENT)
    assert sorted(system.answered()[1] for _ in range(count)) == seen


def test_the_end_of_the_supervisor_is_a_failure(start: Start) -> None:
    system = start()
    system.control.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: system.failure is not None)
    assert str(system.failure) == "the supervisor is gone"


def test_stop_waits_for_what_workers_owe(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    system.read(10, 100)
    worker.take()
    system.order(kind="stop")
    assert system.status()["in_flight"] == 1  # answered after the order was taken
    system.ask(wire.GETATTR, 11)
    worker.answer_read(10, b"last")
    assert system.answered() == (0, 10, b"last")
    wait_until(lambda: not system.thread.is_alive())
    assert not worker.has_request() or worker.requests.recv(100) == b""


def test_a_worker_that_took_a_request_and_hangs_is_noticed(start: Start) -> None:
    """F03: nothing lies unread in its socket, until the gate sends it something that any worker takes."""
    system = start()
    hanging = system.first_worker()
    system.read(10, 10)
    assert hanging.take()[1] == 10
    assert system.status()["workers"][0]["unread_s"] == 0.0
    other = system.worker(1)
    assert other.take()[:2] == (wire.READ, 10), "given to another one too"
    other.answer_read(10, b"fast")
    assert system.answered() == (0, 10, b"fast")
    rows = {row["index"]: row for row in system.status()["workers"]}
    assert rows[0]["unread_s"] > 0
    hanging.answer_read(10, b"slow")
    wait_until(lambda: hanging.slots.busy == 0)


# Another gate, with the workers of one that died


def test_a_worker_outlives_its_gate(start: Start) -> None:
    """S36: no INIT again; what it still answers to the dead gate's requests is dropped, and its slots are freed."""
    before = start()
    worker = before.first_worker()
    before.read(10, 100)
    assert worker.take()[:2] == (wire.READ, 10)
    before.read(12, 100)
    wait_until(worker.has_request)  # given, and not taken out
    before.kill()
    after = start(initialised=True)
    worker.hand_to(after, initialised=True)
    after.read(10 | wire.RESEND_BIT, 100)
    worker.answer_read(10, b"for nobody")
    assert worker.take()[:2] == (wire.READ, 12)
    worker.answer_read(12, b"for nobody")
    assert worker.take()[:2] == (wire.READ, 10 | wire.RESEND_BIT)
    worker.answer_read(10 | wire.RESEND_BIT, b"content")
    assert after.answered() == (0, 10 | wire.RESEND_BIT, b"content")
    wait_until(lambda: worker.slots.busy == 0)
    status = after.status()
    assert (status["answers_unasked"], status["workers_broken"], status["in_flight"]) == (2, 0, 0)


def test_a_worker_that_had_not_answered_init_is_greeted_again(start: Start) -> None:
    """Its answer to the dead gate counts; libfuse refuses the second INIT, which changes nothing."""
    before = start()
    before.first_worker()
    worker = FakeWorker(before, 1)
    wait_until(worker.has_request)
    before.kill()
    worker.greet()
    after = start(initialised=True)
    worker.hand_to(after)
    assert after.told() == {"kind": "worker_ready", "index": 1, "pid": 1001}
    assert worker.take()[:2] == (wire.INIT, INIT_UNIQUE)
    worker.answer(INIT_UNIQUE, error=errno.EIO)
    after.read(10, 100)
    assert worker.take()[:2] == (wire.READ, 10)


def test_slots_that_a_dead_gate_had_in_its_hands_are_free_again(start: Start) -> None:
    before = start()
    worker = before.first_worker()
    before.kill()
    slots = worker.gate_s_slots()
    taken, kept = worker.slots.take(10), worker.slots.take(10)
    assert taken is not None
    assert kept is not None
    slots.bytes_of(worker.slots.token(taken, 10), 10)
    slots.close()
    after = start(initialised=True)
    worker.hand_to(after, initialised=True)
    wait_until(lambda: worker.slots.busy == 1)
    again = worker.slots.take(10)
    assert again is not None
    assert again.number == taken.number


def test_files_offered_to_a_dead_gate_count_for_nothing(start: Start, block: Path) -> None:
    """The dead gate may have been told to forget them."""
    before = start()
    worker = before.first_worker()
    with block.open("rb") as file:
        assert worker.offers.offer(50, file.fileno())
    before.kill()
    after = start(initialised=True)
    worker.hand_to(after, initialised=True)
    after.read(10, 100, inode=50)
    assert worker.take()[1] == 10
    worker.answer_read(10, b"content")
    assert after.answered() == (0, 10, b"content")
    assert after.status()["learned"] == 0
    offer_and_read(after, worker, block, 11)
    assert after.status()["learned"] == 1


def test_the_end_of_the_mount_ends_the_workers(start: Start) -> None:
    """The supervisor holds their sockets too."""
    system = start()
    worker = system.first_worker()
    system.order(kind="stop")
    wait_until(lambda: not system.thread.is_alive())
    system.close_gate()
    assert worker.requests.recv(100) == b""


# Callers that are killed


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of threads that are being killed. The gate looks at once."""
    threads: set[int] = set()
    monkeypatch.setattr(dispatch, "is_being_killed", threads.__contains__)
    monkeypatch.setattr(dispatch, "KILLED_S", 0.05)
    monkeypatch.setattr(dispatch, "CALLERS_EVERY_S", 0.05)
    return threads


def read_by(system: System, unique: int, caller: int) -> None:
    body = struct.pack("<QQIIQII", 0, 0, 100, 0, 0, 0, 0)
    system.kernel.send(wire.IN_HEADER.pack(40 + len(body), wire.READ, unique, 1, 0, 0, caller, 0, 0) + body)


def test_a_killed_caller_does_not_wait(start: Start, killed: set[int]) -> None:
    """S40, user report 40: EINTR; what the worker answers later is dropped, and its slot is free again."""
    system = start()
    worker = system.first_worker()
    read_by(system, 10, 77)
    read_by(system, 12, 78)
    assert [worker.take()[1] for _ in range(2)] == [10, 12]
    killed.add(77)
    assert system.answered() == (errno.EINTR, 10, b"")
    worker.answer_read(10, b"late")
    worker.answer_read(12, b"content")
    assert system.answered() == (0, 12, b"content"), "another caller's"
    wait_until(lambda: worker.slots.busy == 0)
    status = system.status()
    assert (status["interrupted"], status["in_flight"]) == (1, 0)


def test_what_no_worker_answers_is_answered_by_the_gate(start: Start, killed: set[int], expected_logs: Declare) -> None:
    """S19: each kind of request has its limit, and what comes after it is dropped. (`killed`: looks at once.)"""
    expected_logs("request answered EIO: no worker has answered it", count=1)
    system = start(answer_limits={"read_s": 0.3, "other_s": 3600.0})
    worker = system.first_worker()
    system.ask(wire.LOOKUP, 8, body=b"name\0")
    read_by(system, 10, 77)
    assert [worker.take()[1] for _ in range(2)] == [8, 10]
    assert system.answered() == (errno.EIO, 10, b"")
    worker.answer_read(10, b"late")
    read_by(system, 12, 77)
    assert worker.take()[1] == 12
    worker.answer_read(12, b"content")
    assert system.answered() == (0, 12, b"content")
    status = system.status()
    assert (status["timed_out"], status["interrupted"], status["in_flight"]) == (1, 0, 1)


def test_what_waits_for_a_worker_is_answered_by_the_gate_too(
    start: Start, killed: set[int], expected_logs: Declare
) -> None:
    expected_logs("request answered EIO: no worker has answered it", count=1)
    system = start(answer_limits={"read_s": 0.3, "other_s": 0.3})
    system.first_worker().die()
    wait_until(lambda: system.status()["worker_deaths"] == 1)
    read_by(system, 10, 77)
    assert system.answered() == (errno.EIO, 10, b"")
    assert system.status()["waiting"] == 0


def test_who_was_frozen_gives_workers_their_time_again(
    start: Start, killed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was stopped, and longer than any limit: what is in flight is not at its end."""
    monkeypatch.setattr(dispatch, "FROZEN_S", -1.0)  # each look is the first one after a stop
    system = start(answer_limits={"read_s": 0.2, "other_s": 0.2})
    worker = system.first_worker()
    read_by(system, 10, 77)
    worker.take()
    time.sleep(0.6)
    worker.answer_read(10, b"content")
    assert system.answered() == (0, 10, b"content")


def test_a_killed_caller_does_not_wait_for_a_worker_either(start: Start, killed: set[int]) -> None:
    system = start()
    system.first_worker().die()
    wait_until(lambda: system.status()["worker_deaths"] == 1)
    killed.add(77)
    read_by(system, 10, 77)
    assert system.answered() == (errno.EINTR, 10, b"")
    assert system.status()["waiting"] == 0


# Passthrough


def open_answer(worker: FakeWorker, unique: int) -> None:
    worker.answer(unique, wire.OPEN_OUT.pack(5, wire.FOPEN_KEEP_CACHE, 0))


@pytest.fixture
def block(tmp_path: Path) -> Path:
    file = tmp_path / "block"
    file.write_bytes(b"content")
    return file


def opened(system: System) -> tuple[int, int, int]:
    """(unique, open flags, backing id) of the OPEN that is answered next."""
    error, unique, body = system.answered()
    assert error == 0
    _, flags, backing_id = wire.OPEN_OUT.unpack(body)
    return unique, flags, backing_id


def offer_and_open(system: System, worker: FakeWorker, file: Path, unique: int, flags: int = os.O_RDONLY) -> None:
    system.ask(wire.OPEN, unique, inode=50)
    assert worker.take()[:2] == (wire.OPEN, unique)
    descriptor = os.open(file, flags)
    assert worker.offers.offer(50, descriptor)
    os.close(descriptor)
    open_answer(worker, unique)


def test_an_offered_file_is_opened_by_passthrough_and_learned(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    link = system.link()
    offer_and_open(system, worker, block, 10)
    assert opened(system) == (10, wire.FOPEN_PASSTHROUGH, 1)
    assert system.registry.registered == {1: block.stat().st_ino}
    # Open already: the gate answers alone.
    system.ask(wire.OPEN, 11, inode=50)
    assert opened(system) == (11, wire.FOPEN_PASSTHROUGH, 1)
    for unique in (12, 13):
        system.ask(wire.RELEASE, unique, inode=50)
        assert system.answered() == (0, unique, b"")
    # Invalidated: what was registered is given back; the next open asks a worker.
    thread = threading.Thread(target=link.invalidate_inode, args=(50,))
    thread.start()
    assert struct.unpack_from("<IiQQ", system.kernel.recv(4096)) == (40, wire.NOTIFY_INVAL_INODE, 0, 50)
    thread.join(WAIT_S)
    wait_until(lambda: not system.registry.registered)
    system.ask(wire.OPEN, 14, inode=50)
    assert worker.take()[:2] == (wire.OPEN, 14)
    assert link.take_opened() == [(50, 0)]
    assert link.take_opened() == []
    link.close()


def test_a_learned_file_is_opened_without_a_worker_while_it_is_the_same(start: Start, block: Path) -> None:
    table = os.memfd_create("table")
    system = start("passthrough", table)
    worker = system.first_worker()
    offer_and_open(system, worker, block, 10)
    assert opened(system)[2] == 1
    system.ask(wire.RELEASE, 11, inode=50)
    system.answered()
    system.gate._opens.table.closed[50] = -1e9  # type: ignore[union-attr]
    wait_until(lambda: not system.registry.registered)
    system.ask(wire.OPEN, 12, inode=50)
    assert opened(system) == (12, wire.FOPEN_PASSTHROUGH, 2)
    assert system.status()["opens"]["passthrough_learned"] == 1
    system.ask(wire.RELEASE, 13, inode=50)
    system.answered()
    system.gate._opens.table.closed[50] = -1e9  # type: ignore[union-attr]
    wait_until(lambda: not system.registry.registered)
    os.utime(block, ns=(1, 1))
    system.ask(wire.OPEN, 14, inode=50)
    assert worker.take()[:2] == (wire.OPEN, 14)
    os.close(table)


def test_an_offer_that_an_invalidation_overtook_counts_for_nothing(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    link = system.link()
    system.ask(wire.OPEN, 10, inode=50)
    assert worker.take()[:2] == (wire.OPEN, 10)
    link.invalidate_inode(50)
    system.kernel.recv(4096)
    with block.open("rb") as file:
        assert worker.offers.offer(50, file.fileno())
    open_answer(worker, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)
    assert system.status()["learned"] == 0
    system.ask(wire.RELEASE, 11, inode=50)
    system.answered()
    offer_and_open(system, worker, block, 12)
    assert opened(system) == (12, wire.FOPEN_PASSTHROUGH, 1)
    link.close()


def test_an_invalidated_file_is_given_back_with_its_last_release(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    link = system.link()
    offer_and_open(system, worker, block, 10)
    opened(system)
    link.invalidate_inode(50)
    system.kernel.recv(4096)
    assert system.registry.registered
    system.ask(wire.RELEASE, 11, inode=50)
    assert system.answered() == (0, 11, b"")
    assert not system.registry.registered
    system.ask(wire.OPEN, 12, inode=50)
    assert worker.take()[:2] == (wire.OPEN, 12)
    link.close()


def test_an_inode_stays_as_it_was_opened_first(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    open_answer(worker, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)
    offer_and_open(system, worker, block, 11)
    assert opened(system) == (11, wire.FOPEN_KEEP_CACHE, 0)
    assert not system.registry.registered
    for unique in (12, 13):
        system.ask(wire.RELEASE, unique, inode=50)
        system.answered()
    offer_and_open(system, worker, block, 14)
    assert opened(system) == (14, wire.FOPEN_PASSTHROUGH, 1)


def test_a_gate_that_starts_again_answers_as_the_one_before(start: Start, block: Path) -> None:
    table = os.memfd_create("table")
    system = start("passthrough", table)
    worker = system.first_worker()
    offer_and_open(system, worker, block, 10)
    assert opened(system) == (10, wire.FOPEN_PASSTHROUGH, 1)
    again = start("passthrough", table, initialised=True)
    again.ask(wire.OPEN, 12, inode=50)
    assert opened(again) == (12, wire.FOPEN_PASSTHROUGH, 1)
    again.ask(wire.OPEN, 12 | wire.RESEND_BIT, inode=50)
    assert opened(again) == (12 | wire.RESEND_BIT, wire.FOPEN_PASSTHROUGH, 1)
    assert again.gate._opens.table.rows[50].opens == 2  # type: ignore[union-attr]
    assert os.fstat(table).st_size == TABLE_BYTES
    os.close(table)


def hard_link(block: Path) -> int:
    os.link(block, block.with_name("other name"))
    return os.open(block, os.O_RDONLY)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda block: os.open(block, os.O_RDWR), "not_read_only"),
        (lambda block: os.open(block, os.O_PATH), "not_read_only"),
        (lambda block: os.open(block, os.O_RDONLY | os.O_APPEND), "not_read_only"),
        (lambda block: os.open(block.parent, os.O_RDONLY), "not_regular"),
        (hard_link, "not_one_name"),
        (lambda block: os.memfd_create("no name"), "elsewhere"),
        (lambda block: os.open("/proc/self/stat", os.O_RDONLY), "elsewhere"),
    ],
    ids=["writable", "path only", "append", "folder", "second name", "memfd", "elsewhere"],
)
def test_what_may_not_be_registered_is_opened_ordinarily(
    start: Start, block: Path, make: Callable[[Path], int], reason: str
) -> None:
    system = start("passthrough", backing_devices=[block.stat().st_dev])
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    descriptor = make(block)
    assert worker.offers.offer(50, descriptor)
    os.close(descriptor)
    open_answer(worker, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)
    assert system.status()["refusals"] == {reason: 1}
    assert not system.registry.registered


def test_a_kernel_that_refuses_to_register_gets_an_ordinary_open(start: Start, block: Path) -> None:
    system = start("passthrough")
    system.registry.refusal = errno.ELOOP
    worker = system.first_worker()
    offer_and_open(system, worker, block, 10)
    assert opened(system) == (10, wire.FOPEN_KEEP_CACHE, 0)
    assert system.status()["refusals"] == {"register_eloop": 1}


def test_a_refused_open_is_not_counted(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    worker.answer(10, error=errno.ESTALE)
    assert system.answered() == (errno.ESTALE, 10, b"")
    assert system.status()["open_inodes"] == 0


def test_an_open_whose_caller_is_gone_is_not_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes no answer, and sends no RELEASE."""
    system = start("passthrough")
    worker = system.first_worker()
    system.ask(wire.OPEN, 10, inode=50)
    worker.take()
    monkeypatch.setattr(system.gate._answers, "write", lambda answer: False)
    open_answer(worker, 10)
    wait_until(lambda: system.status()["opens"]["ordinary"] == 1)
    wait_until(lambda: system.status()["in_flight"] == 0)
    assert system.status()["open_inodes"] == 0


def test_descriptors_of_offers_that_no_open_follows_are_closed_with_the_worker(start: Start, block: Path) -> None:
    system = start("passthrough")
    worker = system.first_worker()
    before = len(os.listdir("/proc/self/fd"))
    for inode in range(60, 70):
        descriptor = os.open(block, os.O_RDONLY)
        assert worker.offers.offer(inode, descriptor)
        os.close(descriptor)
    offer_and_open(system, worker, block, 10)
    opened(system)
    assert len(os.listdir("/proc/self/fd")) == before + 10
    worker.die()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) < before)


# Reads of the gate's own


def offer_and_read(system: System, worker: FakeWorker, file: Path, unique: int, size: int = 100) -> None:
    system.read(unique, size, inode=50)
    assert worker.take()[:2] == (wire.READ, unique)
    with file.open("rb") as opened_file:
        assert worker.offers.offer(50, opened_file.fileno())
    worker.answer_read(unique, b"from worker")
    assert system.answered() == (0, unique, b"from worker")
    system.status()  # the loop's next turn: it learns the file after it has answered


def read_body(offset: int, size: int) -> bytes:
    return struct.pack("<QQIIQII", 0, offset, size, 0, 0, 0, 0)


def test_a_file_that_a_worker_offered_is_read_without_one(start: Start, block: Path) -> None:
    system = start(backing_devices=[block.stat().st_dev])
    worker = system.first_worker()
    link = system.link()
    offer_and_read(system, worker, block, 10)
    for unique, (offset, size, content) in enumerate(
        [(0, 100, b"content"), (0, 3, b"con"), (3, 100, b"tent"), (7, 100, b""), (1 << 40, 100, b"")], 20
    ):
        system.ask(wire.READ, unique, 50, read_body(offset, size))
        assert system.answered() == (0, unique, content)
    system.read(30, 100, inode=51)
    assert worker.take()[1] == 30
    status = system.status()
    assert status["direct_reads"] == {"reads": 5, "bytes": 14, "mapped_bytes": 0, "not_in_memory": 0}
    assert (status["answered"]["READ"], status["dispatched"]["READ"]) == (5, 2)
    assert link.take_opened() == [(50, 0)]
    link.close()


def offer_block_and_read(system: System, worker: FakeWorker, file: Path, index: int, block_bytes: int) -> None:
    system.ask(wire.READ, 10, 50, read_body(index * block_bytes, 1))
    assert worker.take()[:2] == (wire.READ, 10)
    with file.open("rb") as opened_file:
        assert worker.offers.offer(50, opened_file.fileno(), index, block_bytes)
    worker.answer_read(10, b"c")
    assert system.answered() == (0, 10, b"c")
    system.status()


def test_a_block_that_a_worker_offered_is_read_without_one(start: Start, block: Path) -> None:
    system = start()
    worker = system.first_worker()
    link = system.link()
    offer_block_and_read(system, worker, block, 1, 7)
    for unique, (offset, size, content) in enumerate([(7, 7, b"content"), (9, 3, b"nte"), (13, 1, b"t")], 20):
        system.ask(wire.READ, unique, 50, read_body(offset, size))
        assert system.answered() == (0, unique, content)
    # Another block, two blocks, one that nobody offered.
    for unique, (offset, size) in enumerate([(0, 7), (6, 2), (13, 2), (14, 7)], 30):
        system.ask(wire.READ, unique, 50, read_body(offset, size))
        assert worker.take()[:2] == (wire.READ, unique)
    assert system.status()["direct_reads"]["reads"] == 3
    assert link.take_opened() == [(50, 1)]
    system.kernel.setblocking(True)
    thread = threading.Thread(target=link.invalidate_inode, args=(50,))
    thread.start()
    for unique in range(30, 34):
        worker.answer_read(unique, b"x")
        system.answered()
    system.kernel.recv(4096)
    thread.join(WAIT_S)
    wait_until(lambda: system.status()["learned"] == 0)
    system.ask(wire.READ, 40, 50, read_body(7, 7))
    assert worker.take()[:2] == (wire.READ, 40)
    link.close()


def test_an_inode_whose_blocks_are_all_gone_takes_no_memory(tmp_path: Path) -> None:
    """Data sets are larger than what block workers hold: most inodes come to that."""
    learned = LearnedFiles(None, time.monotonic)
    file = tmp_path / "block"
    for index in range(2):
        with file.open("wb") as writing, file.open("rb") as reading:
            writing.write(b"content")
            writing.flush()
            assert learned.learn(50, Offered(reading.fileno(), index, 7), time.monotonic())
    file.unlink()
    for index in range(2):
        assert learned._blocks
        assert learned.open_at(50, index * 7) is None
    assert not learned._blocks


def test_a_last_block_ends_the_file_and_one_of_another_size_is_a_worker_s(start: Start, block: Path) -> None:
    system = start()
    worker = system.first_worker()
    offer_block_and_read(system, worker, block, 2, 100)
    system.ask(wire.READ, 20, 50, read_body(200, 100))
    assert system.answered() == (0, 20, b"content")
    # More bytes than a block has: the next one's would be read from this file.
    offer_block_and_read(system, worker, block, 5, 4)
    system.ask(wire.READ, 21, 50, read_body(20, 4))
    assert worker.take()[:2] == (wire.READ, 21)


def evict(block: Path) -> None:
    block.unlink()


def touch(block: Path) -> None:
    os.utime(block, ns=(1, 1))


def replace(block: Path) -> None:
    other = block.with_name("other")
    other.write_bytes(b"anew")
    other.rename(block)


def link_again(block: Path) -> None:
    os.link(block, block.with_name("second name"))


def point_elsewhere(block: Path) -> None:
    block.rename(block.with_name("moved"))
    block.symlink_to(block.with_name("moved"))


@pytest.mark.parametrize("change", [evict, touch, replace, link_again, point_elsewhere])
def test_a_file_that_is_not_the_same_any_more_is_a_worker_s_again(
    start: Start, block: Path, change: Callable[[Path], None]
) -> None:
    system = start()
    worker = system.first_worker()
    offer_and_read(system, worker, block, 10)
    change(block)
    system.read(11, 100, inode=50)
    assert worker.take()[:2] == (wire.READ, 11)
    assert system.status()["learned"] == 0


def drop_pages(file: Path) -> None:
    with file.open("rb") as opened_file:
        os.fsync(opened_file.fileno())
        os.posix_fadvise(opened_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_file_that_is_not_in_memory_is_a_worker_s(start: Start, block: Path) -> None:
    # Another file tells whether pages can be dropped here: to ask about this one would have them read ahead.
    other = block.with_name("other")
    other.write_bytes(os.urandom(1 << 16))
    drop_pages(other)
    with other.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1 << 16)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        else:
            pytest.skip("this file system keeps a file's pages")
    block.write_bytes(os.urandom(1 << 16))
    system = start()
    worker = system.first_worker()
    offer_and_read(system, worker, block, 10)
    drop_pages(block)
    system.read(11, 1 << 16, inode=50)
    assert worker.take()[:2] == (wire.READ, 11)
    status = system.status()
    assert (status["direct_reads"]["not_in_memory"], status["learned"]) == (1, 1)


def test_an_invalidated_file_is_a_worker_s_again(start: Start, block: Path) -> None:
    system = start()
    worker = system.first_worker()
    link = system.link()
    offer_and_read(system, worker, block, 10)
    link.invalidate_inode(50, attr_only=True)
    system.kernel.recv(4096)
    system.read(11, 100, inode=50)
    assert system.answered() == (0, 11, b"content")
    link.invalidate_inode(50)
    system.kernel.recv(4096)
    # The worker has looked the version up before the invalidation, and offers it after.
    system.read(12, 100, inode=50)
    assert worker.take()[:2] == (wire.READ, 12)
    thread = threading.Thread(target=link.invalidate_inode, args=(50,))
    thread.start()
    wait_until(lambda: bool(system.gate._dispatch._waiters))
    with block.open("rb") as file:
        assert worker.offers.offer(50, file.fileno())
    worker.answer_read(12, b"old")
    assert system.answered() == (0, 12, b"old")
    system.kernel.recv(4096)
    thread.join(WAIT_S)
    system.read(13, 100, inode=50)
    assert worker.take()[:2] == (wire.READ, 13)
    assert system.status()["refusals"] == {"superseded": 1}
    link.close()


# The agent's link


def test_notifications_reach_the_kernel_as_its_protocol_wants_them(start: Start) -> None:
    system = start()
    system.first_worker()
    link = system.link()
    link.invalidate_entry(1, b"name")
    assert system.kernel.recv(4096) == wire.inval_entry(1, b"name")
    link.invalidate_inode(7, attr_only=True)
    assert system.kernel.recv(4096) == wire.inval_inode(7, -1, 0)
    link.invalidate_inode(7, 4096, 8192)
    assert system.kernel.recv(4096) == wire.inval_inode(7, 4096, 8192)
    content = os.urandom(140_000)  # two messages, both fit the socket
    thread = threading.Thread(target=link.store, args=(7, 4096, content))
    thread.start()
    stored = b""
    while len(stored) < len(content):
        message = system.kernel.recv(1 << 20)
        _, code, _, inode, offset, size, _ = struct.unpack_from("<IiQQQII", message)
        assert (code, inode, offset, size) == (wire.NOTIFY_STORE, 7, 4096 + len(stored), len(message) - 40)
        stored += message[40:]
    thread.join(WAIT_S)
    assert stored == content
    status = link.status()
    assert status["notifications"] == {"pushes": 5, "stored_bytes": 140_000}
    link.close()


def test_what_a_dead_gate_was_asked_is_asked_again(start: Start) -> None:
    """S37: an invalidation that it had in its hands is not lost."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, ThreadPoolExecutor(1) as pool:
        link = GateLink(mine.detach(), timeout_s=WAIT_S)
        pushing = pool.submit(link.invalidate_inode, 7)
        assert its.recv(4096), "what the gate had in its hands when it died"
        after = start(initialised=True)
        after.serve_agent(its, again=True)
        assert after.kernel.recv(4096) == wire.inval_inode(7, 0, 0)
        pushing.result(WAIT_S)
    link.close()


def refusal_of_store(link: GateLink) -> int | None:
    with pytest.raises(OSError) as caught:
        link.store(7, 0, b"page")
    return caught.value.errno


def test_pages_are_refused_without_the_feature_and_without_memory(start: Start) -> None:
    masked = start(features=["resend"])
    masked.first_worker()
    link = masked.link()
    assert refusal_of_store(link) == errno.EOPNOTSUPP
    link.invalidate_inode(7)
    assert masked.kernel.recv(4096) == wire.inval_inode(7, 0, 0)
    link.close()
    full = start(features=["store"])
    full.first_worker()
    full.gate._notifications._room.has_room = lambda: False  # type: ignore[union-attr,method-assign]
    link = full.link()
    assert refusal_of_store(link) == errno.ENOSPC
    assert full.status()["notifications"] == {"pushes_refused": 1}
    link.close()


def test_a_notification_waits_for_what_is_in_flight_outside_the_kernel(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    link = system.link()
    system.read(10, 10, inode=7)
    system.ask(wire.LOOKUP, 11, inode=1, body=b"name\0")
    assert [worker.take()[1] for _ in range(2)] == [10, 11]
    # Another inode, another folder, and attributes alone wait for nothing.
    link.invalidate_inode(8)
    assert system.kernel.recv(4096) == wire.inval_inode(8, 0, 0)
    link.invalidate_entry(2, b"name")
    assert system.kernel.recv(4096) == wire.inval_entry(2, b"name")
    link.invalidate_inode(7, attr_only=True)
    assert system.kernel.recv(4096) == wire.inval_inode(7, -1, 0)
    thread = threading.Thread(target=link.invalidate_inode, args=(7,))
    thread.start()
    wait_until(lambda: bool(system.gate._dispatch._waiters))
    assert not select.select([system.kernel], [], [], 0)[0]
    system.read(12, 10, inode=7)  # taken later: not waited for
    assert worker.take()[1] == 12
    worker.answer_read(10, b"x")
    assert system.answered() == (0, 10, b"x")
    assert system.kernel.recv(4096) == wire.inval_inode(7, 0, 0)
    thread.join(WAIT_S)
    thread = threading.Thread(target=link.invalidate_entry, args=(1, b"name"))
    thread.start()
    wait_until(lambda: bool(system.gate._dispatch._waiters))
    worker.answer(11, error=errno.ENOENT)
    assert system.answered() == (errno.ENOENT, 11, b"")
    assert system.kernel.recv(4096) == wire.inval_entry(1, b"name")
    thread.join(WAIT_S)
    link.close()


def test_a_notification_that_blocks_holds_up_no_request(start: Start) -> None:
    system = start()
    worker = system.first_worker()
    link = system.link()
    entered, go_on = threading.Event(), threading.Event()

    def block_notification(request: object) -> int:
        entered.set()
        assert go_on.wait(WAIT_S)
        return errno.ENOENT

    system.gate._notifications.notify = block_notification  # type: ignore[assignment]
    refused: list[OSError] = []

    def push() -> None:
        try:
            link.invalidate_inode(7)
        except OSError as exc:
            refused.append(exc)

    thread = threading.Thread(target=push)
    thread.start()
    assert entered.wait(WAIT_S)
    system.read(10, 10)
    worker.take()
    worker.answer_read(10, b"meanwhile")
    assert system.answered() == (0, 10, b"meanwhile")
    assert link.status()["in_flight"] == 0
    go_on.set()
    thread.join(WAIT_S)
    assert [exc.errno for exc in refused] == [errno.ENOENT]
    link.close()


def test_a_link_that_ends_is_an_error_for_its_callers_and_another_one_takes_over(
    start: Start, expected_logs: Declare
) -> None:
    expected_logs("the agent gets no answer", optional=True)  # where the question was taken before the link ended
    system = start()
    system.first_worker()
    first = system.link()
    assert first.status()["waiting"] == 0
    second = system.link()
    assert second.status()["waiting"] == 0
    with pytest.raises(OSError) as caught:
        first.status()
    assert caught.value.errno in (errno.ECONNRESET, errno.EPIPE)
    first.close()
    second.close()


def test_a_call_without_an_answer_ends_in_time() -> None:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = GateLink(mine.detach(), timeout_s=0.05)
    with pytest.raises(OSError) as caught:
        link.invalidate_entry(1, b"name")
    assert caught.value.errno == errno.ETIMEDOUT
    its.close()
    link.close()
