"""What two supervisors say to each other: protocols, facts, descriptors, the token, and what a gate leaves behind."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.gate import carried
from fusecache.kernel.init_message import plan_for
from fusecache.kernel.supervisor.takeover.facts import BadFacts, Descriptors, Facts
from fusecache.kernel.supervisor.takeover.line import MOST_DESCRIPTORS, Line, LineLost
from fusecache.kernel.supervisor.takeover.messages import common_protocol, refusal
from fusecache.kernel.supervisor.takeover.token import new_token, take_token

INIT = struct.pack("<IIQQIIIHH", 104, 26, 2, 0, 0, 0, 0, 0, 0) + struct.pack("<IIII", 7, 45, 1 << 20, 1 << 22)
INIT = INIT.ljust(104, b"\0")


def facts(**changes: Any) -> dict[str, Any]:
    """A message that is right, but for `changes`."""
    plan = plan_for(
        INIT, passthrough=False, max_read_bytes=1 << 20, read_ahead_bytes=1 << 20, max_background=64,
        congestion_threshold=48,
    )  # fmt: skip
    right = Facts(
        version="1", device="0:57", open_mode="no-open", allow_other=True, max_read_bytes=1 << 20, init=INIT.hex(),
        init_plan={**vars(plan), "later": 1}, cluster_id="c",
    )  # fmt: skip
    return {**right.to_message(), "something": "later", **changes}


@pytest.fixture
def lines() -> Iterator[tuple[Line, Line]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = map(Line, pair)
    with contextlib.closing(one), contextlib.closing(other):
        yield one, other


@pytest.mark.parametrize(
    ("theirs", "ours", "common"),
    [
        ([1, 1], (1, 1), 1),
        ([1, 7], (1, 3), 3),
        ([2, 3], (1, 2), 2),
        ([2, 3], (1, 1), None),
        ([1, 1], (2, 3), None),
        (None, (1, 1), None),
        ([1], (1, 1), None),
        ([True, 5], (1, 1), None),
        ("1-2", (1, 1), None),
    ],
)
def test_the_highest_common_protocol_counts(theirs: Any, ours: tuple[int, int], common: int | None) -> None:
    assert common_protocol({"protocols": theirs}, ours) == common


def test_another_source_and_another_protocol_are_refused_with_a_reason() -> None:
    hello = {"kind": "hello", "protocols": [1, 1], "source": "alluxio://m:19998/a", "unknown": 1}
    assert refusal(hello, "alluxio://m:19998/a") is None
    assert "'alluxio://m:19998/b'" in str(refusal(hello, "alluxio://m:19998/b"))
    assert "[98, 99]" in str(refusal({**hello, "protocols": [98, 99]}, "alluxio://m:19998/a"))


def test_facts_travel_and_what_is_not_known_is_ignored() -> None:
    found = Facts.from_message(facts())
    assert (found.device, found.open_mode, found.cluster_id) == ("0:57", "no-open", "c")
    assert found.shown_init() == INIT
    assert found.plan().max_background == 64


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("device", "../x"),
        ("device", 57),
        ("open_mode", "classic"),
        ("allow_other", 1),
        ("max_read_bytes", 5000),
        ("max_read_bytes", 1 << 30),
        ("init", "no hex"),
        ("init", "00" * 80),
        ("init_plan", {}),
        ("init_plan", [1]),
        ("cluster_id", None),
    ],
)
def test_wrong_facts_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(BadFacts, match=name):
        Facts.from_message(facts(**{name: wrong}))


def test_other_descriptors_than_the_devices_are_refused_and_closed() -> None:
    descriptors = [os.open(os.devnull, os.O_RDWR) for _ in range(4)]
    with pytest.raises(BadFacts, match="/dev/fuse"):
        Descriptors.checked(descriptors)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


def test_the_token_can_be_taken_once_by_whoever_has_a_copy() -> None:
    token = new_token()
    copy = os.dup(token)
    try:
        assert [take_token(copy), take_token(token), take_token(copy)] == [True, False, False]
    finally:
        os.close(token)
        os.close(copy)


def test_messages_come_with_their_descriptors_and_then_the_end(lines: tuple[Line, Line]) -> None:
    one, other = lines
    assert other.receive() is None
    with open(os.devnull) as sent:
        one.send({"kind": "drained"}, (sent.fileno(),))
    message, (descriptor,) = other.receive_within(5)
    assert message == {"kind": "drained"}
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    one.close()
    with pytest.raises(LineLost) as lost:
        other.receive()
    assert lost.value.is_gone


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"kind": 1}', b"{}", b"[" * 60_000, b'"' + b"x" * 70_000 + b'"'])
def test_what_is_no_message_ends_the_line(data: bytes) -> None:
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with raw, contextlib.closing(Line(end)) as line:
        raw.send(data)
        with pytest.raises(LineLost) as lost:
            line.receive()
        assert not lost.value.is_gone


def test_too_many_descriptors_end_the_line_and_none_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    raw, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with raw, contextlib.closing(Line(end)) as line, open(os.devnull) as sent:
        socket.send_fds(raw, [b'{"kind": "given"}'], [sent.fileno()] * (MOST_DESCRIPTORS + 3))
        with pytest.raises(LineLost):
            line.receive()
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_what_a_gate_leaves_comes_back_as_it_was(bodies: list[bytes]) -> None:
    messages = [struct.pack("<I", 40 + len(body)) + bytes(36) + body for body in bodies]
    descriptor = os.memfd_create("carried")
    try:
        carried.write(descriptor, messages)
        assert carried.read(descriptor) == messages
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("content", [b"x", struct.pack("<I", 39) + bytes(40), struct.pack("<I", 41) + bytes(36)])
def test_what_is_no_row_of_messages_is_refused(content: bytes) -> None:
    descriptor = os.memfd_create("carried")
    try:
        os.write(descriptor, content)
        with pytest.raises(carried.BadCarried):
            carried.read(descriptor)
    finally:
        os.close(descriptor)
