"""Messages between kernel, gate and workers: layouts, and what is checked where bytes enter.

Names and layouts are those of include/uapi/linux/fuse.h (protocol 7.45): `fuse_in_header` (40 bytes) starts each
request, `fuse_out_header` (16 bytes) each answer and notification. All numbers are in the machine's byte order, which
is little endian on every machine this runs on (`sys.byteorder` is checked by the gate).

Pure: encodes, decodes, decides what a message may be; opens, reads and writes nothing.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

LOOKUP: Final = 1
FORGET: Final = 2
GETATTR: Final = 3
OPEN: Final = 14
READ: Final = 15
STATFS: Final = 17
RELEASE: Final = 18
FSYNC: Final = 20
FLUSH: Final = 25
INIT: Final = 26
OPENDIR: Final = 27
READDIR: Final = 28
RELEASEDIR: Final = 29
FSYNCDIR: Final = 30
INTERRUPT: Final = 36
DESTROY: Final = 38
IOCTL: Final = 39
NOTIFY_REPLY: Final = 41
BATCH_FORGET: Final = 42
READDIRPLUS: Final = 44

OPCODE_NAMES: Final = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 5: "READLINK", 6: "SYMLINK", 8: "MKNOD", 9: "MKDIR",
    10: "UNLINK", 11: "RMDIR", 12: "RENAME", 13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS",
    18: "RELEASE", 20: "FSYNC", 21: "SETXATTR", 22: "GETXATTR", 23: "LISTXATTR", 24: "REMOVEXATTR", 25: "FLUSH",
    26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 30: "FSYNCDIR", 31: "GETLK", 32: "SETLK",
    33: "SETLKW", 34: "ACCESS", 35: "CREATE", 36: "INTERRUPT", 37: "BMAP", 38: "DESTROY", 39: "IOCTL", 40: "POLL",
    41: "NOTIFY_REPLY", 42: "BATCH_FORGET", 43: "FALLOCATE", 44: "READDIRPLUS", 45: "RENAME2", 46: "LSEEK",
    47: "COPY_FILE_RANGE", 48: "SETUPMAPPING", 49: "REMOVEMAPPING", 50: "SYNCFS", 51: "TMPFILE", 52: "STATX",
}  # fmt: skip

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
"""fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding."""
IN_HEADER_START: Final = struct.Struct("<IIQQ")
"""Its part that the gate looks at."""
OUT_HEADER: Final = struct.Struct("<IiQ")
"""fuse_out_header: len, error (0 or -errno; notifications: the code), unique (notifications: 0)."""
CALLER_AT: Final = 32
"""pid in fuse_in_header: the calling thread's id in the PID namespace of whoever mounted; 0: it is in another one."""
FILE_HANDLE_AT: Final = 40
"""fh in fuse_read_in, fuse_release_in, fuse_flush_in, fuse_fsync_in."""
READ_SIZE_AT: Final = 56
"""size in fuse_read_in (READ, READDIR, READDIRPLUS), after fh and offset."""
READ_IN_BYTES: Final = 40 + 40

MOST_LIST_BYTES: Final = 64 << 10
"""READDIR and READDIRPLUS are clamped to it, so that every answer but a READ's fits a socket buffer."""
MOST_ANSWER_BYTES: Final = OUT_HEADER.size + (64 << 10)
"""Longest answer of a worker: a listing, or an extended attribute (XATTR_SIZE_MAX, 64 KiB)."""
MOST_ERRNO: Final = 511
"""fs/fuse/dev.c refuses answers with error <= -512 and leaves their callers waiting."""
RESEND_BIT: Final = 1 << 63
"""FUSE_UNIQUE_RESEND: set in the unique of a request delivered again after NOTIFY_RESEND."""

FOPEN_KEEP_CACHE: Final = 1 << 1
FOPEN_PASSTHROUGH: Final = 1 << 7
OPEN_OUT: Final = struct.Struct("<QIi")
"""fuse_open_out: fh, open_flags, backing_id."""
OPEN_ANSWER: Final = struct.Struct("<IiQQIi")
"""fuse_out_header and fuse_open_out."""

DEV_IOC_CLONE: Final = 0x8004E500
DEV_IOC_BACKING_OPEN: Final = 0x4010E501
DEV_IOC_BACKING_CLOSE: Final = 0x4004E502
BACKING_MAP: Final = struct.Struct("<iIQ")
"""fuse_backing_map: fd, flags, padding."""

NOTIFY_INVAL_INODE: Final = 2
NOTIFY_INVAL_ENTRY: Final = 3
NOTIFY_STORE: Final = 4
NOTIFY_RESEND: Final = 7

_INVAL_INODE = struct.Struct("<IiQQqq")
"""Header and fuse_notify_inval_inode_out: ino, off, len."""
_INVAL_ENTRY = struct.Struct("<IiQQII")
"""Header and fuse_notify_inval_entry_out: parent, namelen, flags; then name and NUL."""
_STORE = struct.Struct("<IiQQQII")
"""Header and fuse_notify_store_out: nodeid, offset, size, padding; then the bytes."""


class BadMessage(Exception):
    """Bytes that are no message of this protocol."""


def decode_request(buffer: bytes | bytearray | memoryview, received: int) -> tuple[int, int, int]:
    """(opcode, unique, inode) of the request in the first `received` bytes. Raises BadMessage.

    Also makes sure that the requests the gate looks into (READ, READDIR) are long enough for it.
    """
    if received < IN_HEADER.size:
        raise BadMessage(f"a request of {received} bytes")
    length, opcode, unique, inode = IN_HEADER_START.unpack_from(buffer)
    if length != received:
        raise BadMessage(f"a request of {received} bytes that claims {length}")
    if opcode in (READ, READDIR, READDIRPLUS) and received < READ_IN_BYTES:
        raise BadMessage(f"{OPCODE_NAMES[opcode]} of {received} bytes")
    return opcode, unique, inode


def read_size(message: bytes | bytearray | memoryview) -> int:
    """How many bytes a READ (or listing) asks for."""
    size: int = _U32.unpack_from(message, READ_SIZE_AT)[0]
    return size


def read_range(message: bytes | bytearray | memoryview) -> tuple[int, int]:
    """(offset, size) of a READ."""
    offset, size = _OFFSET_SIZE.unpack_from(message, FILE_HANDLE_AT + 8)
    return offset, size


def caller_of(message: bytes) -> int:
    """Id of the thread that waits for the answer; 0: of another PID namespace."""
    caller: int = _U32.unpack_from(message, CALLER_AT)[0]
    return caller


def nothing_to_do() -> bytes:
    """A request that costs a worker nothing and gets no answer: it forgets no inodes. One that turns takes it."""
    return IN_HEADER.pack(IN_HEADER.size + _U64.size, BATCH_FORGET, 1, 0, 0, 0, 0, 0, 0) + bytes(_U64.size)


def use_inode_as_handle(message: bytearray | memoryview, opcode: int, inode: int) -> None:
    """Write the inode where a worker looks for the file handle, and bound the size of a listing.

    Without OPEN the kernel sends handle 0; with it, the handle of a worker that may be dead.
    """
    _U64.pack_into(message, FILE_HANDLE_AT, inode)
    if opcode != READ and read_size(message) > MOST_LIST_BYTES:
        _U32.pack_into(message, READ_SIZE_AT, MOST_LIST_BYTES)


_U32 = struct.Struct("<I")
_OFFSET_SIZE = struct.Struct("<QI")
_U64 = struct.Struct("<Q")


def decode_answer(buffer: bytes | bytearray | memoryview, received: int) -> tuple[int, int]:
    """(error, unique) of the first `received` bytes, as an answer that the kernel would take. Raises BadMessage.

    The error is 0 or the errno as a positive number. unique 0 would be a notification: workers have none to send.
    """
    if not OUT_HEADER.size <= received <= MOST_ANSWER_BYTES:
        raise BadMessage(f"an answer of {received} bytes")
    length, error, unique = OUT_HEADER.unpack_from(buffer)
    if length != received:
        raise BadMessage(f"an answer of {received} bytes that claims {length}")
    if not -MOST_ERRNO <= error <= 0:
        raise BadMessage(f"an answer with error {error}")
    if error and received != OUT_HEADER.size:
        raise BadMessage(f"an answer with error {error} and {received - OUT_HEADER.size} bytes")
    if not unique:
        raise BadMessage("a notification")
    return -error, unique


def error_answer(unique: int, number: int) -> bytes:
    """A request is answered with an errno; 0: done, with nothing to say."""
    return OUT_HEADER.pack(OUT_HEADER.size, -number, unique)


def data_header(unique: int, length: int) -> bytes:
    """Goes before `length` bytes of a READ's answer."""
    return OUT_HEADER.pack(OUT_HEADER.size + length, 0, unique)


def passthrough_answer(unique: int, backing_id: int) -> bytes:
    """OPEN: the kernel reads the registered file from now on."""
    return OPEN_ANSWER.pack(OPEN_ANSWER.size, 0, unique, 0, FOPEN_PASSTHROUGH, backing_id)


def ordinary_open_answer(answer: bytes | memoryview) -> bytes:
    """OPEN: a worker's answer without passthrough and without its handle, which no other worker would know.

    The other flags stay (FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE). Raises BadMessage when it is no OPEN answer.
    """
    if len(answer) != OPEN_ANSWER.size:
        raise BadMessage(f"an OPEN answered with {len(answer)} bytes")
    length, error, unique, _, flags, _ = OPEN_ANSWER.unpack(answer)
    return OPEN_ANSWER.pack(length, error, unique, 0, flags & ~FOPEN_PASSTHROUGH, 0)


def inval_inode(inode: int, offset: int, length: int) -> bytes:
    """FUSE_NOTIFY_INVAL_INODE: attributes, and from `offset` >= 0 on pages (`length` <= 0: to the end)."""
    return _INVAL_INODE.pack(_INVAL_INODE.size, NOTIFY_INVAL_INODE, 0, inode, offset, length)


def inval_entry(parent: int, name: bytes) -> bytes:
    """FUSE_NOTIFY_INVAL_ENTRY."""
    length = _INVAL_ENTRY.size + len(name) + 1
    return _INVAL_ENTRY.pack(length, NOTIFY_INVAL_ENTRY, 0, parent, len(name), 0) + name + b"\0"


def store_header(inode: int, offset: int, size: int) -> bytes:
    """FUSE_NOTIFY_STORE, before `size` bytes."""
    return _STORE.pack(_STORE.size + size, NOTIFY_STORE, 0, inode, offset, size, 0)


def resend() -> bytes:
    """FUSE_NOTIFY_RESEND: everything taken and not answered is delivered again (since 7.40)."""
    return OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0)


NO_SUCH_CALL: Final = errno.ENOSYS
"""Tells the kernel never to send this opcode again (OPEN, OPENDIR, FLUSH, FSYNC, FSYNCDIR: it goes on without)."""
