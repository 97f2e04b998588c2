"""One file or folder as it is remembered, and its form on disk.

A listing gives `FileStatus` values; `entry_from_status` turns each into an `Entry`, `encode` into the bytes
that lie in the store under (shelf, inode), and `decode` back. The record holds neither its inode nor its
parent (both are known from the key) and never a full path: a renamed folder would have to rewrite everything
below it.

Pure: no database, no clock, no network. It does not judge what the server sent beyond what the form on disk
can hold; `alluxio.decode` does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from fusecache.alluxio.model import FileStatus
from fusecache.errors import StateError

RECORD_VERSION: Final = 1
"""First byte of every record; another one is a `RecordError`."""

MAX_NAME_BYTES: Final = 255
"""NAME_MAX of Linux: a longer name can't be served through a mount (and would outgrow a key of the store)."""

UNKNOWN_UFS_PATH: Final = b"\0"
"""`Entry.ufs_path` of an entry whose UFS path Alluxio did not tell: it must not be derived from the folder's."""

# version, flags, mode, length, block size, mtime, mount id, then the lengths of name, owner, group, UFS path.
# Fixed fields, not varints: 19 bytes more a record, but decoding stays one struct call.
_HEAD = struct.Struct("<BBHQQqqBBBH")

_FOLDER, _COMPLETED, _PERSISTED, _UFS_TIER, _MOUNT_POINT, _LOCATIONS, _ODD_BLOCK_COUNT = (1 << bit for bit in range(7))


_NAME_AT = _HEAD.size
_NAME_LENGTH_AT = struct.calcsize("<BBHQQqq")
_LENGTH = struct.Struct("<Q")
_LENGTH_AT = struct.calcsize("<BBH")
_FLAG_MASK = _LOCATIONS - 1
_FLAGS = [tuple(bool(flags & (1 << bit)) for bit in range(5)) for flags in range(_LOCATIONS)]
_BLOCK_COUNT = struct.Struct("<I")
_WORKERS = [struct.Struct(f"<{count}q") for count in range(256)]


class RecordError(StateError):
    """Bytes that are no record of this version, or an entry that can't be written as one."""


class Entry(NamedTuple):
    """One file or folder, as kernel requests need it."""

    inode: int
    """File id + 1; 1 is the mounted folder whatever its id."""
    parent: int
    """Inode of its folder; the mounted folder is its own parent."""
    name: bytes
    """b"" for the mounted folder."""
    folder: bool
    completed: bool
    persisted: bool
    in_ufs_tier: bool
    mount_point: bool
    length: int
    """Bytes."""
    block_size: int
    """Bytes."""
    block_count: int
    locations: tuple[tuple[int, ...], ...]
    """Per block the ids of the block workers that held it when its folder was listed; () = none."""
    mtime_ms: int
    mode: int
    owner: bytes
    group: bytes
    mount_id: int
    ufs_path: bytes
    """b"" when it is the folder's UFS path + b"/" + name; else the full path, or `UNKNOWN_UFS_PATH`."""


_new_entry = cast(Callable[[type[Entry], tuple[object, ...]], Entry], tuple.__new__)


def join_ufs_path(folder_ufs_path: bytes, name: bytes) -> bytes:
    """UFS path of `name` inside a folder, as Alluxio concatenates them."""
    return folder_ufs_path.rstrip(b"/") + b"/" + name


def entry_from_status(status: FileStatus, parent: int, folder_ufs_path: bytes | None) -> Entry:
    """What to remember of `status`, found in folder `parent` whose UFS path is `folder_ufs_path`."""
    ufs_path = status.ufs_path or UNKNOWN_UFS_PATH
    if folder_ufs_path is not None and ufs_path == join_ufs_path(folder_ufs_path, status.name):
        ufs_path = b""
    return Entry(
        status.file_id + 1,
        parent,
        status.name,
        status.folder,
        status.completed,
        status.persisted,
        status.in_ufs_tier,
        status.mount_point,
        status.length,
        status.block_size,
        status.block_count,
        status.locations,
        status.mtime_ms,
        status.mode,
        status.owner,
        status.group,
        status.mount_id,
        ufs_path,
    )


def encode(entry: Entry) -> bytes:
    """The record of `entry` (without inode and parent). Raises RecordError when a field is out of range."""
    name, owner, group, ufs_path, locations = entry.name, entry.owner, entry.group, entry.ufs_path, entry.locations
    flags = (
        (_FOLDER if entry.folder else 0)
        | (_COMPLETED if entry.completed else 0)
        | (_PERSISTED if entry.persisted else 0)
        | (_UFS_TIER if entry.in_ufs_tier else 0)
        | (_MOUNT_POINT if entry.mount_point else 0)
        | (_LOCATIONS if locations else 0)
    )
    odd = entry.block_count != _usual_block_count(entry.length, entry.block_size)
    if odd:
        flags |= _ODD_BLOCK_COUNT
    try:
        head = _HEAD.pack(
            RECORD_VERSION,
            flags,
            entry.mode,
            entry.length,
            entry.block_size,
            entry.mtime_ms,
            entry.mount_id,
            len(name),
            len(owner),
            len(group),
            len(ufs_path),
        )
        tail = b""
        if locations:
            counts = [len(workers) for workers in locations]
            workers = [worker for block in locations for worker in block]
            tail = struct.pack(f"<I{len(counts)}B{len(workers)}q", len(counts), *counts, *workers)
        if odd:
            tail += struct.pack("<Q", entry.block_count)
    except struct.error as exc:
        raise RecordError(f"entry {entry.inode} can't be recorded: {exc}") from exc
    return b"".join((head, name, owner, group, ufs_path, tail))


def decode(inode: int, parent: int, record: bytes) -> Entry:
    """The entry that `encode` wrote. Raises RecordError for anything else; never reads past the end."""
    try:
        version, flags, mode, length, block_size, mtime_ms, mount_id, names, owners, groups, ufs = _HEAD.unpack_from(
            record
        )
    except struct.error as exc:
        raise RecordError(f"record of inode {inode} is too short") from exc
    if version != RECORD_VERSION:
        raise RecordError(f"record of inode {inode} has version {version}, not {RECORD_VERSION}")
    owner_at = _NAME_AT + names
    group_at = owner_at + owners
    ufs_at = group_at + groups
    end = ufs_at + ufs
    block_count = -(-length // block_size) if block_size else 0
    locations: tuple[tuple[int, ...], ...] = ()
    if flags & (_LOCATIONS | _ODD_BLOCK_COUNT):
        locations, block_count, end = _decode_tail(inode, record, flags, end, block_count)
    if end != len(record):
        raise RecordError(f"record of inode {inode} has {len(record)} bytes, not {end}")
    # Not Entry(...): this runs for every look-up, and tuple.__new__ with ready-made flags takes half the time.
    return _new_entry(
        Entry,
        (
            inode,
            parent,
            record[_NAME_AT:owner_at],
            *_FLAGS[flags & _FLAG_MASK],
            length,
            block_size,
            block_count,
            locations,
            mtime_ms,
            mode,
            record[owner_at:group_at],
            record[group_at:ufs_at],
            mount_id,
            record[ufs_at : ufs_at + ufs],
        ),
    )


def is_folder(record: bytes) -> bool:
    """Whether a record is a folder's, without decoding it."""
    return len(record) > 1 and record[1] & _FOLDER != 0


def name_of(record: bytes) -> bytes:
    """The name in a record, without decoding the rest."""
    return record[_NAME_AT : _NAME_AT + record[_NAME_LENGTH_AT]]


def length_of(record: bytes) -> int:
    """Bytes of the file in a record, without decoding the rest."""
    length: int = _LENGTH.unpack_from(record, _LENGTH_AT)[0]
    return length


def has_locations(record: bytes) -> bool:
    """Whether a record says of any block who holds it, without decoding it."""
    return record[1] & _LOCATIONS != 0


def _usual_block_count(length: int, block_size: int) -> int:
    return -(-length // block_size) if block_size > 0 else 0


def _decode_tail(
    inode: int, record: bytes, flags: int, at: int, block_count: int
) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    locations: tuple[tuple[int, ...], ...] = ()
    try:
        if flags & _LOCATIONS:
            (blocks,) = _BLOCK_COUNT.unpack_from(record, at)
            at += 4
            if blocks == 1:
                workers = _WORKERS[record[at]]
                locations = (workers.unpack_from(record, at + 1),)
                at += 1 + workers.size
            else:
                locations, at = _decode_locations(record, at, blocks)
        if flags & _ODD_BLOCK_COUNT:
            (block_count,) = struct.unpack_from("<Q", record, at)
            at += 8
    except (struct.error, IndexError) as exc:
        raise RecordError(f"record of inode {inode} ends too early") from exc
    return locations, block_count, at


def _decode_locations(record: bytes, at: int, blocks: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    counts = record[at : at + blocks]
    if len(counts) != blocks:
        raise IndexError
    at += blocks
    per_block = []
    for count in counts:
        workers = _WORKERS[count]
        per_block.append(workers.unpack_from(record, at))
        at += workers.size
    return tuple(per_block), at
