"""Messages between the supervisor and a part, over a real socket pair."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.channel import MAX_MESSAGE_BYTES, MAX_WAITING, Channel, parsed, socket_pair
from tests.support.limits import no_more_descriptors


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket_pair()
    channel = Channel(ours)
    with theirs:
        theirs.setblocking(False)
        yield channel, theirs
        channel.close()


def everything(theirs: socket.socket) -> list[int]:
    numbers = []
    while True:
        try:
            numbers.append(json.loads(theirs.recv(MAX_MESSAGE_BYTES))["number"])
        except BlockingIOError:
            return numbers


def test_messages_come_whole_and_in_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    for number in range(3):
        theirs.send(json.dumps({"kind": "status", "number": number}).encode())
    assert [message["number"] for message in channel.receive()] == [0, 1, 2]
    assert channel.receive() == []
    assert not channel.closed


def test_descriptors_arrive_open_and_the_sender_keeps_its_own(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    reader, writer = os.pipe()
    channel.send({"kind": "agent"}, (writer,))
    os.close(writer)
    data, (received,), _, _ = socket.recv_fds(theirs, 1024, 4)
    assert json.loads(data) == {"kind": "agent"}
    os.write(received, b"through")
    os.close(received)
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_what_does_not_fit_waits_with_its_descriptors(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    number = 0
    while not channel.has_waiting:
        channel.send({"kind": "status", "number": number, "padding": "x" * 4096})
        number += 1
        assert number < 10_000, "the socket takes everything"
    reader, writer = os.pipe()
    channel.send({"kind": "worker", "number": number, "padding": ""}, (writer,))
    os.close(writer)
    received: list[int] = []
    numbers = []
    while channel.has_waiting or len(numbers) <= number:
        channel.flush()
        data, descriptors, _, _ = socket.recv_fds(theirs, MAX_MESSAGE_BYTES, 4)
        numbers.append(json.loads(data)["number"])
        received += descriptors
    assert numbers == list(range(number + 1))
    (arrived,) = received
    os.close(arrived)
    assert os.read(reader, 1) == b"", "no copy of the writing end is left anywhere"
    os.close(reader)


def test_a_part_that_does_not_listen_loses_the_oldest(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    number = 0
    while not channel.has_waiting:
        channel.send({"kind": "status", "number": number})
        number += 1
    taken = number - 1
    last = taken + MAX_WAITING
    for later in range(number, last + 1):
        channel.send({"kind": "status", "number": later})
    got = []
    while channel.has_waiting:
        got += everything(theirs)
        channel.flush()
    got += everything(theirs)
    assert got == [*range(taken), *range(taken + 1, last + 1)], "message `taken` was the oldest that waited"


def test_f17_without_descriptors_a_message_that_would_wait_with_one_is_lost(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, theirs = ends
    number = 0
    while not channel.has_waiting:
        channel.send({"kind": "status", "number": number})
        number += 1
    with no_more_descriptors(os.getpid()):
        channel.send({"kind": "worker", "number": -1}, (theirs.fileno(),))
    channel.send({"kind": "status", "number": number})
    got = everything(theirs)
    while channel.has_waiting:
        channel.flush()
        got += everything(theirs)
    assert got == list(range(number + 1))


def test_the_end_of_a_part_is_seen_after_its_last_words(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.send(b'{"kind": "failed", "text": "no"}')
    theirs.close()
    assert channel.receive() == [{"kind": "failed", "text": "no"}]
    assert channel.closed
    channel.send({"kind": "status"})  # nobody hears it; no error
    assert not channel.has_waiting


def test_bad_messages_are_counted_and_dropped(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    for data in (b"nonsense", b"[1]", b'{"kind": 1}', b"[" * 10_000, b'{"kind": "status"}'):
        theirs.send(data)
    assert channel.receive() == [{"kind": "status"}]
    assert channel.bad_messages == 4


def test_a_message_that_is_too_long_is_refused(ends: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(ValueError, match="65536 are the most"):
        ends[0].send({"kind": "x", "padding": "x" * MAX_MESSAGE_BYTES})


def test_the_buffers_are_as_large_as_asked_for_where_that_is_allowed() -> None:
    if os.geteuid() != 0:
        pytest.skip("SO_SNDBUFFORCE needs CAP_NET_ADMIN")
    first, second = socket_pair(1 << 20)
    with first, second:
        for end in (first, second):
            # The kernel doubles the value for its own book-keeping (man 7 socket).
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 << 20


@given(st.binary(max_size=100) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_a_message_or_none(data: bytes) -> None:
    message = parsed(data)
    assert message is None or isinstance(message["kind"], str)
