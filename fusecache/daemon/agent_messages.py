"""What a worker and the agent say to each other about metadata: frames, and the form of each message.

A unix stream carries frames both ways: length (u32, little endian), then one JSON object. Bytes (names, records) are
base64. A question has an `id` and an `ask`; its answer has the same `id`. What needs no answer has a `tell`.

    worker -> agent   lookup, getattr, children, heal_stale; tell: hello, used, list_again, metrics
    agent -> worker   metrics, log_level

An error travels as the name of its class in `fusecache.errors` and its text. Everything is checked where it comes in:
sizes, types, ranges, names; what does not fit is a ProtocolError, and ends that connection only.

No socket is opened here and nothing is known of trees.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from typing import Any, Final, Protocol

from fusecache.cache.record import MAX_NAME_BYTES, Entry, RecordError, decode, encode
from fusecache.errors import FusecacheError, ProtocolError, named

MAX_FROM_WORKER: Final = 1 << 20
"""Bytes of one message of a worker; the largest are its metrics (about 40 KiB) and a piece of its folders in use."""

MAX_FROM_AGENT: Final = 64 << 20
"""Bytes of one message of the agent: one record may hold the locations of a file of millions of blocks."""

PAGE_BYTES: Final = 1 << 20
"""A page of a folder ends when its records have so many bytes, however many entries were asked for."""

MAX_PAGE_ENTRIES: Final = 4096
MAX_USED: Final = 4096
"""Folders in one message."""

_LENGTH: Final = struct.Struct("<I")
_U64: Final = 1 << 64
_MAX_SECONDS: Final = 1e15


class Receiver(Protocol):
    """What is used of `trio.SocketStream`."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Some bytes; none at the end."""
        ...


class Frames:
    """Takes a stream apart into messages."""

    def __init__(self, stream: Receiver, most_bytes: int) -> None:
        self._stream = stream
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    async def next(self) -> dict[str, Any] | None:
        """The next message; None when the other side closed between two. Raises ProtocolError."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > self._most_bytes:
                    raise ProtocolError(f"a message of {length} bytes; at most {self._most_bytes} are taken")
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    text = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return _parsed(text)
            piece = await self._stream.receive_some(1 << 16)
            if not piece:
                if self._buffer:
                    raise ProtocolError("the connection ended within a message")
                return None
            self._buffer += piece


def frame(message: dict[str, Any]) -> bytes:
    """The bytes of one message."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("a message that is no JSON") from exc
    if not isinstance(message, dict):
        raise ProtocolError("a message that is no object")
    return message


# ---- fields ----


def number(message: dict[str, Any], field: str) -> int:
    """A whole number of 64 bits, not negative. Raises ProtocolError."""
    value = message.get(field)
    if type(value) is not int or not 0 <= value < _U64:
        raise ProtocolError(f"{field} is {str(value)[:40]!r}, not a number of 64 bits")
    return value


def seconds(message: dict[str, Any], field: str) -> float:
    """A finite number of a sane size. Raises ProtocolError."""
    value = message.get(field)
    if (type(value) is not float and type(value) is not int) or not -_MAX_SECONDS < value < _MAX_SECONDS:
        raise ProtocolError(f"{field} is {str(value)[:40]!r}, not a number of seconds")
    return float(value)


def text(message: dict[str, Any], field: str) -> str:
    """A short text. Raises ProtocolError."""
    value = message.get(field)
    if not isinstance(value, str) or len(value) > 4096:
        raise ProtocolError(f"{field} is no text, or too long a one")
    return value


def name(message: dict[str, Any], field: str) -> bytes:
    """A name that can stand in a path. Raises ProtocolError."""
    value = _bytes(message, field)
    if not 0 < len(value) <= MAX_NAME_BYTES or b"/" in value or b"\0" in value or value in (b".", b".."):
        raise ProtocolError(f"{field} is {value[:40]!r}, which is no name")
    return value


def numbers(message: dict[str, Any], field: str, most: int) -> list[int]:
    """Up to `most` numbers of 64 bits. Raises ProtocolError."""
    values = message.get(field)
    if not isinstance(values, list) or len(values) > most:
        raise ProtocolError(f"{field} is no list, or has more than {most} members")
    if not all(type(value) is int and 0 <= value < _U64 for value in values):
        raise ProtocolError(f"{field} has a member that is no number of 64 bits")
    return values


def packed_bytes(value: bytes) -> str:
    """Bytes as they travel."""
    return base64.b64encode(value).decode("ascii")


def _bytes(message: dict[str, Any], field: str) -> bytes:
    value = message.get(field)
    if not isinstance(value, str):
        raise ProtocolError(f"{field} is missing")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise ProtocolError(f"{field} is not base64") from exc


# ---- entries ----


def packed_entry(entry: Entry, **further: float) -> dict[str, Any]:
    """An entry as it travels. Raises RecordError when it can't be recorded."""
    return {"inode": entry.inode, "parent": entry.parent, "record": packed_bytes(encode(entry)), **further}


def told_entry(message: object, further: str) -> tuple[Entry, float]:
    """The entry that `packed_entry` made, and the number that was given with it. Raises ProtocolError."""
    if not isinstance(message, dict):
        raise ProtocolError("an entry that is no object")
    try:
        entry = decode(number(message, "inode"), number(message, "parent"), _bytes(message, "record"))
    except RecordError as exc:
        raise ProtocolError(str(exc)) from exc
    return entry, max(0.0, seconds(message, further))


def told_entries(message: dict[str, Any], field: str, further: str) -> list[tuple[Entry, float]]:
    """A list of entries. Raises ProtocolError."""
    members = message.get(field)
    if not isinstance(members, list):
        raise ProtocolError(f"{field} is no list")
    return [told_entry(member, further) for member in members]


# ---- errors ----


def packed_error(error: FusecacheError) -> dict[str, Any]:
    """An error as it travels."""
    return {"error": type(error).__name__, "text": str(error)[:2048]}


def told_error(message: dict[str, Any]) -> FusecacheError:
    """The error that `packed_error` made, as its own class. Raises ProtocolError."""
    return named(text(message, "error"), text(message, "text"))
