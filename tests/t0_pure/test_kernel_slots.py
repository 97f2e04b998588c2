"""Shared slots: what a worker answers reaches the gate, and nothing it writes can make the gate read elsewhere."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.reply_slots import (
    HEAD_BYTES,
    LOST_S,
    TOKEN_BYTES,
    BadSlots,
    BadToken,
    GateSlots,
    WorkerSlots,
    create_slots,
)
from fusecache.kernel.unread import has_unread

PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def pair(count: int = 3, slot_bytes: int = PAGE) -> Iterator[tuple[WorkerSlots, GateSlots]]:
    descriptor = create_slots(count, slot_bytes)
    worker, gate = WorkerSlots(descriptor), GateSlots(descriptor)
    os.close(descriptor)
    yield worker, gate
    # Mappings are left to the garbage collector: slots handed out may still be looked at.


def test_bytes_written_by_the_worker_are_found_by_the_token() -> None:
    with pair() as (worker, gate):
        slots = [worker.take(size) for size in (5, PAGE, 0)]
        assert all(slot is not None for slot in slots)
        first, second, third = (slot for slot in slots if slot is not None)
        first.view[:] = b"12345"
        second.view[:] = b"x" * PAGE
        assert bytes(gate.bytes_of(worker.token(second, PAGE), PAGE)[1]) == b"x" * PAGE
        assert bytes(gate.bytes_of(worker.token(first, 4), 5)[1]) == b"1234"
        assert bytes(gate.bytes_of(worker.token(third, 0), 5)[1]) == b""
        assert len(worker.token(first, 4)) == TOKEN_BYTES


def test_every_slot_is_taken_once_until_it_is_freed() -> None:
    with pair() as (worker, gate):
        taken = [worker.take(1) for _ in range(3)]
        assert sorted(slot.number for slot in taken if slot) == [0, 1, 2]
        assert worker.take(1) is None
        assert gate.busy == 3
        gate.free(1)
        again = worker.take(1)
        assert again is not None
        assert again.number == 1
        worker.give_back(again)
        assert gate.busy == 2


def test_a_slot_never_gives_more_than_was_asked_for() -> None:
    with pair() as (worker, gate):
        slot = worker.take(10)
        assert slot is not None
        with pytest.raises(ValueError, match="11 bytes"):
            worker.token(slot, 11)
        with pytest.raises(BadToken, match="10 bytes for a READ of 9"):
            gate.bytes_of(worker.token(slot, 10), 9)
        with pytest.raises(ValueError, match="slots have"):
            worker.take(PAGE + 1)


def test_a_token_of_a_free_slot_is_refused() -> None:
    with pair() as (worker, gate):
        slot = worker.take(10)
        assert slot is not None
        token = worker.token(slot, 10)
        gate.free(slot.number)
        with pytest.raises(BadToken, match="is free"):
            gate.bytes_of(token, 10)
        assert gate.slot_of(token) == slot.number


def test_a_slot_with_which_a_gate_died_is_the_worker_s_again_and_its_old_token_is_none() -> None:
    """Taken from the socket and not marked: nobody else would ever free it. Only once nothing is on its way."""
    now_s, is_all_taken = 100.0, False
    descriptor = create_slots(2, PAGE)
    worker, gate = WorkerSlots(descriptor, lambda: is_all_taken, lambda: now_s), GateSlots(descriptor)
    os.close(descriptor)
    lost, filled = worker.take(10), worker.take(10)
    assert lost is not None
    assert filled is not None
    token = worker.token(lost, 10)
    is_all_taken = True
    assert worker.take(10) is None, "a gate may be about to mark it"
    now_s += LOST_S
    is_all_taken = False
    assert worker.take(10) is None, "its token may lie in the socket"
    is_all_taken = True
    again = worker.take(10)
    assert again is not None
    assert again.number == lost.number
    assert worker.take(10) is None, "the one that is being filled stays"
    again.view[:] = b"other data"
    assert gate.slot_of(token) is None
    with pytest.raises(BadToken, match="another answer by now"):
        gate.bytes_of(token, 10)


def test_what_the_gate_holds_is_not_taken_back() -> None:
    now_s = 100.0
    descriptor = create_slots(1, PAGE)
    worker, gate = WorkerSlots(descriptor, lambda: True, lambda: now_s), GateSlots(descriptor)
    os.close(descriptor)
    slot = worker.take(10)
    assert slot is not None
    gate.bytes_of(worker.token(slot, 10), 10)
    now_s += 2 * LOST_S
    assert worker.take(10) is None


def test_what_was_sent_is_unread_until_it_is_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert not has_unread(ours.fileno())
        ours.send(b"message")
        assert has_unread(ours.fileno())
        assert not has_unread(theirs.fileno())
        theirs.recv(7)
        assert not has_unread(ours.fileno())


@given(st.binary(max_size=40), st.integers(0, 1 << 20))
def test_any_bytes_are_a_slot_or_a_bad_token(token: bytes, requested: int) -> None:
    with pair(1) as (worker, gate):
        worker.take(PAGE)
        with contextlib.suppress(BadToken):
            assert len(gate.bytes_of(token, requested)[1]) <= requested
        assert gate.slot_of(token) in (None, 0)


@given(st.integers(0, 2**16 - 1), st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 2 * PAGE))
def test_any_slot_number_and_length_stay_inside_the_slot(number: int, use: int, length: int, requested: int) -> None:
    with pair(2) as (worker, gate):
        slot = worker.take(PAGE)
        assert slot is not None
        magic = worker.token(slot, 1)[:8]
        token = magic + struct.pack("<HHI", number, use, length)
        if number == slot.number and use == 1 and length <= min(PAGE, requested):
            assert gate.bytes_of(token, requested)[0] == slot.number
            assert len(gate.bytes_of(token, requested)[1]) == length
        else:
            with pytest.raises(BadToken):
                gate.bytes_of(token, requested)


def test_a_head_rewritten_by_the_worker_changes_nothing() -> None:
    descriptor = create_slots(2, PAGE)
    gate = GateSlots(descriptor)
    os.pwrite(descriptor, b"\xff" * 64, 0)
    assert gate.count == 2
    with pytest.raises(BadSlots):
        GateSlots(descriptor)
    os.close(descriptor)


def test_a_memfd_that_can_shrink_is_refused() -> None:
    whole = create_slots(1, PAGE)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(unsealed, os.pread(whole, HEAD_BYTES + PAGE, 0))
    with pytest.raises(BadSlots, match="resized"):
        GateSlots(unsealed)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    assert GateSlots(unsealed).count == 1
    with pytest.raises(PermissionError):
        os.ftruncate(whole, 0)
    os.close(whole)
    os.close(unsealed)


def test_slots_that_can_not_be_made_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor without memory tries again every second."""

    def no_memory(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pwrite", no_memory)
    with pytest.raises(OSError, match="memory"):
        create_slots(1, PAGE)
    assert os.listdir("/proc/self/fd") == before


def test_what_is_no_memfd_is_refused() -> None:
    reading, writing = os.pipe()
    with pytest.raises(BadSlots, match="no memfd"):
        GateSlots(reading)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(("count", "slot_bytes"), [(0, PAGE), (1025, PAGE), (1, 0), (1, PAGE + 1), (1, 32 << 20)])
def test_impossible_sizes_are_refused(count: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slots of"):
        create_slots(count, slot_bytes)
