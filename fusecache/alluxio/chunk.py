"""The bytes of a ReadBlock answer, without copying them. Pure.

An answer is two messages around one `bytes` field. Protobuf's parser copies the field into the message and again out
of it; here a view of what came from the network is returned when the answer has exactly the form that block workers
send. Anything else goes through the parser: what is accepted, and what it means, is protobuf's to say.
"""

from __future__ import annotations

from fusecache.pb.alluxio.block_worker_pb2 import ReadResponse

_FIELD_1 = 0x0A
"""Key of a length-delimited field number 1: `chunk` of the answer, and `data` of the chunk."""

_MAX_LENGTH_BYTES = 4
"""Of a length, seven bits a byte: 256 MiB, beyond any message that is received."""


def data_of(answer: bytes) -> memoryview | bytes:
    """`chunk.data` of a serialised ReadResponse; DecodeError for bytes that are none."""
    outer = _content_at(answer, 0)
    inner = _content_at(answer, outer) if outer else 0
    return memoryview(answer)[inner:] if inner else ReadResponse.FromString(answer).chunk.data


def _content_at(answer: bytes, position: int) -> int:
    """Where the content of a field 1 at `position` begins if it is the last thing of the answer, else 0."""
    size = len(answer)
    if position >= size or answer[position] != _FIELD_1:
        return 0
    length = 0
    for index in range(position + 1, min(position + 1 + _MAX_LENGTH_BYTES, size)):
        byte = answer[index]
        length |= (byte & 0x7F) << 7 * (index - position - 1)
        if byte < 0x80:
            return index + 1 if index + 1 + length == size else 0
    return 0
