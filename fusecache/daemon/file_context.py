"""What an open file needs to know from the metadata when its bytes are elsewhere.

Joins the metadata tree and the Alluxio client for `prefetch.reader`, which knows neither: UFS path, whether an id is
dead, and the check that a path still has its id after bytes came from the under storage (the window that remains is
stated in SEMANTICS.md).
"""

from __future__ import annotations

from collections.abc import Callable

from fusecache.alluxio.client import AlluxioClient
from fusecache.cache.tree import MetadataTree
from fusecache.clock import Clock
from fusecache.config.settings import Settings
from fusecache.errors import NotFound, StaleId
from fusecache.rpc.budget import Budget

NEVER_SYNC = -1
"""syncIntervalMs: ask what Alluxio has noticed, do not make it look at the under storage."""


class MetadataFileContext:
    """`prefetch.reader.FileContext` over the tree."""

    def __init__(self, tree: MetadataTree, client: AlluxioClient, settings: Settings, clock: Clock) -> None:
        self._tree = tree
        self._client = client
        self._settings = settings
        self._clock = clock

    def ufs_path(self, inode: int) -> bytes | None:
        """Path of the file in the under storage; None when unknown."""
        return self._tree.ufs_path(inode)

    def superseded(self, inode: int) -> bool:
        """True when the id no longer names a live file."""
        return self._tree.superseded(inode)

    def confirm(self, inode: int) -> Callable[[], None]:
        """A blocking check, for a thread, that the path has this id now; raises StaleId."""
        path = self._tree.path(inode)

        def check() -> None:
            budget = Budget(self._clock, self._settings.metadata_budget_s)
            try:
                status = self._client.get_status(path, sync_interval_ms=NEVER_SYNC, budget=budget)
            except NotFound:
                raise StaleId(f"file id {inode - 1} was removed while it was read") from None
            if status.file_id + 1 != inode:
                raise StaleId(f"file id {inode - 1} was replaced by {status.file_id} while it was read")

        return check
