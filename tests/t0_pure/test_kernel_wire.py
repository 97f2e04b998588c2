"""Messages of kernel and workers: any bytes are a message or a BadMessage, and the kernel would take what passes."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel import wire


def request(opcode: int, unique: int = 5, inode: int = 7, body: bytes = b"") -> bytes:
    return wire.IN_HEADER.pack(40 + len(body), opcode, unique, inode, 0, 0, 0, 0, 0) + body


def read_body(size: int, offset: int = 0, handle: int = 0) -> bytes:
    return struct.pack("<QQIIQII", handle, offset, size, 0, 0, 0, 0)


def test_a_read_gets_the_inode_as_its_handle() -> None:
    message = bytearray(request(wire.READ, inode=0x1234, body=read_body(1 << 20, offset=4096)))
    assert wire.decode_request(message, len(message)) == (wire.READ, 5, 0x1234)
    wire.use_inode_as_handle(message, wire.READ, 0x1234)
    assert message[40:] == read_body(1 << 20, offset=4096, handle=0x1234)
    assert wire.read_size(message) == 1 << 20


@pytest.mark.parametrize("opcode", [wire.READDIR, wire.READDIRPLUS])
def test_a_listing_is_bounded_so_that_its_answer_fits_the_socket(opcode: int) -> None:
    message = bytearray(request(opcode, body=read_body(1 << 20)))
    wire.use_inode_as_handle(message, opcode, 7)
    assert wire.read_size(message) == wire.MOST_LIST_BYTES
    assert wire.OUT_HEADER.size + wire.read_size(message) <= wire.MOST_ANSWER_BYTES


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_a_request_or_refused(content: bytes, received: int) -> None:
    buffer = bytearray(content.ljust(200, b"\0"))
    try:
        opcode, _, inode = wire.decode_request(buffer, received)
    except wire.BadMessage:
        return
    assert received >= 40
    if opcode in (wire.READ, wire.READDIR, wire.READDIRPLUS):
        before = bytes(buffer[received:])
        wire.use_inode_as_handle(buffer, opcode, inode)
        assert bytes(buffer[received:]) == before


@pytest.mark.parametrize(
    "message",
    [b"", request(wire.LOOKUP)[:39], request(wire.LOOKUP) + b"x", request(wire.READ, body=b"\0" * 39)],
    ids=["empty", "short", "long", "read without its body"],
)
def test_a_request_that_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(wire.BadMessage):
        wire.decode_request(message, len(message))


@given(st.binary(max_size=100), st.integers(0, 100))
def test_any_bytes_are_an_answer_that_the_kernel_takes_or_refused(content: bytes, received: int) -> None:
    buffer = content.ljust(100, b"\0")
    try:
        error, unique = wire.decode_answer(buffer, received)
    except wire.BadMessage:
        return
    # The checks of fuse_dev_do_write in fs/fuse/dev.c.
    length, raw_error, raw_unique = struct.unpack_from("<IiQ", buffer)
    assert length == received
    assert -512 < raw_error <= 0
    assert raw_unique == unique != 0
    assert error == -raw_error
    assert not error or length == 16


@pytest.mark.parametrize(
    ("error", "accepted"),
    [(0, True), (-1, True), (-511, True), (-512, False), (1, False), (-(2**31), False), (2**31 - 1, False)],
)
def test_an_errno_that_the_kernel_refuses_never_reaches_it(error: int, accepted: bool) -> None:
    answer = wire.OUT_HEADER.pack(16, error, 9)
    if accepted:
        assert wire.decode_answer(answer, 16) == (-error, 9)
    else:
        with pytest.raises(wire.BadMessage, match="error"):
            wire.decode_answer(answer, 16)


@pytest.mark.parametrize(
    "answer",
    [
        wire.OUT_HEADER.pack(17, 0, 9),
        wire.OUT_HEADER.pack(17, -5, 9) + b"x",
        wire.OUT_HEADER.pack(16, 0, 0),
        wire.OUT_HEADER.pack(16, wire.NOTIFY_RESEND, 0),
        wire.OUT_HEADER.pack(wire.MOST_ANSWER_BYTES + 1, 0, 9) + bytes(wire.MOST_ANSWER_BYTES - 15),
    ],
    ids=["wrong length", "error with data", "no unique", "notification", "too long"],
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(wire.BadMessage):
        wire.decode_answer(answer, len(answer))


def test_an_open_answer_loses_passthrough_handle_and_backing_id_of_a_worker() -> None:
    flags = wire.FOPEN_PASSTHROUGH | wire.FOPEN_KEEP_CACHE | 1
    answer = wire.OPEN_ANSWER.pack(32, 0, 3, 99, flags, 77)
    assert wire.OPEN_ANSWER.unpack(wire.ordinary_open_answer(answer)) == (32, 0, 3, 0, wire.FOPEN_KEEP_CACHE | 1, 0)
    with pytest.raises(wire.BadMessage, match="OPEN"):
        wire.ordinary_open_answer(answer[:-1])


def test_answers_and_notifications_say_their_own_length() -> None:
    for message, body in (
        (wire.error_answer(3, errno.EIO), b""),
        (wire.data_header(3, 5), b"12345"),
        (wire.passthrough_answer(3, 8), b""),
        (wire.inval_inode(7, 0, 0), b""),
        (wire.inval_inode(7, -1, 0), b""),
        (wire.inval_entry(1, b"name"), b""),
        (wire.store_header(7, 4096, 3), b"abc"),
        (wire.resend(), b""),
    ):
        assert struct.unpack_from("<I", message)[0] == len(message + body)
    assert wire.inval_entry(1, b"name")[16:] == struct.pack("<QII", 1, 4, 0) + b"name\0"
    assert wire.OUT_HEADER.unpack(wire.error_answer(3, errno.EIO)) == (16, -errno.EIO, 3)
