"""What the embedded master remembers of one file or folder, its bytes in the database, and its ids.

Pure: no database, no file system. Ids are made as Alluxio makes them (BlockId): a file has a container of its
own, its id is the container's last sequence number, its blocks are sequence 0, 1, ...; folders take the
sequence numbers of shared containers, the first of which is container 0, so that the root is id 0.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fusecache.errors import StateError

ROOT_ID = 0
LAST_SEQUENCE = (1 << 24) - 1
MAX_CONTAINER = (1 << 39) - 1
"""Containers end where an id would need the sign bit of 64."""

_RECORD = struct.Struct("<BQQQqQIIIQ")
_FOLDER = 1
_LOADED = 2


class Inode(NamedTuple):
    """A file or folder as it was when the source was last looked at."""

    id: int
    parent: int
    name: bytes
    folder: bool
    length: int
    """Bytes; 0 for a folder."""
    mtime_ns: int
    mode: int
    """Permission bits, 0 .. 0o777 (Alluxio knows no others)."""
    uid: int
    gid: int
    block_size: int
    """Bytes per block, fixed when the id was made; 0 for a folder."""
    created_ms: int
    loaded: bool
    """Folder: its children were listed once."""
    children: int
    """Folder: number of children known."""

    @property
    def block_count(self) -> int:
        """Blocks of the file: ceil(length / block size)."""
        return -(-self.length // self.block_size) if self.length else 0

    def block_length(self, index: int) -> int:
        """Bytes of block `index`; the last one may be shorter."""
        return min(self.block_size, self.length - index * self.block_size)


def file_id(container: int) -> int:
    """Id of the file that owns `container`."""
    return (container << 24) | LAST_SEQUENCE


def block_id(of_file: int, index: int) -> int:
    """Id of block `index` of a file."""
    return (of_file & ~LAST_SEQUENCE) | index


def file_of_block(block: int) -> int:
    """Id of the file that a block belongs to."""
    return block | LAST_SEQUENCE


def encode(inode: Inode) -> bytes:
    """Database value of an inode; its id is the key."""
    flags = (_FOLDER if inode.folder else 0) | (_LOADED if inode.loaded else 0)
    fixed = _RECORD.pack(
        flags,
        inode.parent,
        inode.length,
        inode.children,
        inode.mtime_ns,
        inode.created_ms,
        inode.mode,
        inode.uid,
        inode.gid,
        inode.block_size,
    )
    return fixed + inode.name


def decode(inode_id: int, value: bytes) -> Inode:
    """The inode of a database value. StateError when it is too short to be one."""
    if len(value) < _RECORD.size:
        raise StateError(f"database record of id {inode_id} has {len(value)} bytes, at least {_RECORD.size} expected")
    flags, parent, length, children, mtime_ns, created_ms, mode, uid, gid, block_size = _RECORD.unpack_from(value)
    return Inode(
        inode_id,
        parent,
        value[_RECORD.size :],
        bool(flags & _FOLDER),
        length,
        mtime_ns,
        mode,
        uid,
        gid,
        block_size,
        created_ms,
        bool(flags & _LOADED),
        children,
    )
