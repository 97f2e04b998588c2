"""A copy of a whole metadata store, for a process that may not read the first one: another user's agent.

LMDB makes it in one read transaction, so the store may be in use meanwhile. What the kernel has open it knows by inode
numbers, and a mount that went on with an empty store would have to call them stale.
"""

from __future__ import annotations

from pathlib import Path

import lmdb

from fusecache import clock
from fusecache.cache import state_folder
from fusecache.cache.tables import FILE_NAME, MAX_READERS, MAX_TABLES
from fusecache.errors import StateError


def copy_store(folder: Path, target: int, *, map_bytes: int) -> bool:
    """Write the store in `folder` to the descriptor `target`; False: there is none that can be trusted.

    StateError when it can't be copied; `target` may hold a part then.
    """
    if not (folder / FILE_NAME).is_file() or state_folder.torn(folder, clock.boot_id()):
        return False
    try:
        environment = lmdb.open(
            str(folder / FILE_NAME),
            subdir=False,
            map_size=map_bytes,
            max_dbs=MAX_TABLES,
            max_readers=MAX_READERS,
            readonly=True,
        )
        try:
            environment.copyfd(target, compact=True)
        finally:
            environment.close()
    except lmdb.Error as exc:
        raise StateError(f"metadata in {folder} can't be copied: {exc}") from exc
    return True
