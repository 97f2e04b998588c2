"""`user.fusecache.*`: what a person wants to know of one file, for getfattr(1).

    user.fusecache.file_id      Alluxio's file id: another id is another version
    user.fusecache.blocks       number of blocks
    user.fusecache.local_bytes  bytes that this node can serve from block files, now

Pure; folders have only the first, the mounted folder none.
"""

from __future__ import annotations

from collections.abc import Callable

from fusecache.cache.record import Entry

PREFIX = b"user.fusecache."
FILE_ID, BLOCKS, LOCAL_BYTES = PREFIX + b"file_id", PREFIX + b"blocks", PREFIX + b"local_bytes"


def names_of(entry: Entry) -> tuple[bytes, ...]:
    """Names that `entry` has."""
    if entry.inode == 1:
        return ()  # the mounted folder keeps inode 1 whatever its id
    return (FILE_ID,) if entry.folder else (FILE_ID, BLOCKS, LOCAL_BYTES)


def value_of(entry: Entry, name: bytes, local_bytes: Callable[[], int]) -> bytes | None:
    """The value as decimal text, None when `entry` has no such attribute."""
    if name not in names_of(entry):
        return None
    if name == FILE_ID:
        return b"%d" % (entry.inode - 1)
    return b"%d" % (entry.block_count if name == BLOCKS else local_bytes())
