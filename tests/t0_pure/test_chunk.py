"""Bytes of a ReadBlock answer without the parser: the same as with it, for any input."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fusecache.alluxio.chunk import data_of
from fusecache.pb.alluxio.block_worker_pb2 import Chunk, ReadResponse


def parsed(answer: bytes) -> bytes | None:
    """What protobuf says; None = it refuses."""
    try:
        return ReadResponse.FromString(answer).chunk.data
    except DecodeError:
        return None


def read(answer: bytes) -> bytes | None:
    try:
        return bytes(data_of(answer))
    except DecodeError:
        return None


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 110 << 10, 2 << 20])
def test_data_of_a_block_workers_answer_is_a_view_of_it(size: int) -> None:
    answer = ReadResponse(chunk=Chunk(data=b"x" * size)).SerializeToString()
    data = data_of(answer)
    assert isinstance(data, memoryview)
    assert data.obj is answer
    assert data == b"x" * size


@pytest.mark.parametrize("answer", [ReadResponse(), ReadResponse(chunk=Chunk()), ReadResponse(chunk=Chunk(data=b""))])
def test_data_of_an_answer_without_any_is_empty(answer: ReadResponse) -> None:
    assert bytes(data_of(answer.SerializeToString())) == b""


MESSAGE_LIKE = st.lists(
    st.one_of(st.sampled_from([b"\x0a", b"\x0a\x0a", b"\x12", b"\x00", b"\x80", b"\x03"]), st.binary(max_size=4)),
    max_size=8,
).map(b"".join)


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    """Two fields around bytes, with lengths written in more bytes than needed, or wrong ones, or something behind."""
    data = draw(st.binary(max_size=200))
    for _ in range(2):
        length = max(0, len(data) + draw(st.sampled_from([0, 0, 0, 1, -1])))
        digits = [length & 0x7F, length >> 7 & 0x7F] + [0] * draw(st.integers(0, 5))
        data = b"\x0a" + bytes(d | 0x80 for d in digits[:-1]) + bytes(digits[-1:]) + data
        data += draw(st.sampled_from([b"", b"", b"\x10\x01", b"\x0a\x00", b"\xff"]))
    return data


@given(st.one_of(st.binary(max_size=300), MESSAGE_LIKE, nested()))
def test_data_of_any_bytes_is_what_protobuf_says(answer: bytes) -> None:
    assert read(answer) == parsed(answer)
