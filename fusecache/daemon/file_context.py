"""What an open file needs to know from the metadata when its bytes are elsewhere.

Joins the metadata tree and the Alluxio client for `prefetch.reader`, which knows neither: UFS path, whether an id is
dead, and the check that a path still has its id after bytes came from the under storage (the window that remains is
stated in SEMANTICS.md).

The check is one GetStatus. For a file that is fetched whole, in one stream, it may be left out while the folder's
listing is at most CONFIRM_AGE_S old; when many files of one folder need it, the folder is listed again instead, which
confirms all of them: in a first epoch a call per file would cost a third of the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fusecache.alluxio.client import AlluxioClient
from fusecache.cache.known import Listing
from fusecache.cache.record import Entry
from fusecache.clock import Clock
from fusecache.config.settings import Settings
from fusecache.errors import NotFound, StaleId, Unavailable
from fusecache.prefetch.fetcher import Confirm
from fusecache.rpc.budget import Budget

NEVER_SYNC = -1
"""syncIntervalMs: ask what Alluxio has noticed, do not make it look at the under storage."""

COMPARE_NOW = 0
"""syncIntervalMs: make Alluxio compare the file with the under storage first."""

CONFIRM_AGE_S = 5.0
"""A listing this young confirms a file that is fetched whole."""

RELIST_AFTER = 16
"""Checks of one folder's files after which the folder is listed again instead."""

RELIST_ENTRIES = 20_000
"""A larger folder is not listed for that: its listing takes longer than the checks it saves."""


class Known(Protocol):
    """What is used of the metadata: the tree, or a worker's view of it."""

    def path(self, inode: int) -> bytes:
        """Alluxio path; StaleId."""
        ...

    def ufs_path(self, inode: int) -> bytes | None:
        """Path in the under storage; None when unknown. StaleId."""
        ...

    def superseded(self, inode: int) -> bool:
        """True for a dead id."""
        ...

    def listing_of(self, inode: int) -> Listing | None:
        """A folder's listing; None when it has none."""
        ...


class MetadataFileContext:
    """`prefetch.reader.FileContext` over the metadata."""

    def __init__(
        self,
        tree: Known,
        client: AlluxioClient,
        settings: Settings,
        clock: Clock,
        *,
        list_again: Callable[[int], None],
        confirm_stored: Callable[[Entry, int], bool],
    ) -> None:
        """`list_again` lists the folder of an inode in the background. `confirm_stored` (file, descriptor): whether a
        stored block's version is known without asking about its file (`comparisons`)."""
        self._tree = tree
        self._client = client
        self._settings = settings
        self._clock = clock
        self._list_again = list_again
        self._confirm_stored = confirm_stored
        self._checks: dict[int, int] = {}
        """Folder -> checks since its last listing."""

    def ufs_path(self, inode: int) -> bytes | None:
        """Path of the file in the under storage; None when unknown."""
        return self._tree.ufs_path(inode)

    def superseded(self, inode: int) -> bool:
        """True when the id no longer names a live file."""
        return self._tree.superseded(inode)

    def confirm_stored(self, entry: Entry, fd: int) -> bool:
        """Whether a block file that was stored while the file was open holds the version of its id."""
        return self._confirm_stored(entry, fd)

    def confirm(self, entry: Entry, *, whole: bool) -> Confirm:
        """A blocking check, for a thread, that the path has this id now; raises StaleId.

        `whole`: the file is fetched in one stream, so that its bytes can't be of two versions.
        """
        inode = entry.inode
        path = self._tree.path(inode)
        confirmed_until = self._confirmed_until(entry) if whole else 0.0

        def check(limit_s: float | None = None, *, compare: bool = False) -> None:
            if self._clock.now() < confirmed_until and not compare:
                return
            if limit_s == 0:
                raise Unavailable("not known without asking")
            total_s = self._settings.metadata_budget_s
            budget = Budget(self._clock, total_s if limit_s is None else min(limit_s, total_s))
            try:
                sync_interval_ms = COMPARE_NOW if compare else NEVER_SYNC
                status = self._client.get_status(path, sync_interval_ms=sync_interval_ms, budget=budget)
            except NotFound:
                raise StaleId(f"file id {inode - 1} was removed while it was read") from None
            if status.file_id + 1 != inode:
                raise StaleId(f"file id {inode - 1} was replaced by {status.file_id} while it was read")

        return check

    def _confirmed_until(self, entry: Entry) -> float:
        """Until when the folder's listing confirms; asks for a new one when it is old and often needed."""
        listing = self._tree.listing_of(entry.parent)
        if listing is None:
            return 0.0
        until = listing.asked_at + CONFIRM_AGE_S
        if self._clock.now() < until:
            self._checks.pop(entry.parent, None)
        else:
            checks = self._checks[entry.parent] = self._checks.get(entry.parent, 0) + 1
            if checks >= RELIST_AFTER and listing.entries <= RELIST_ENTRIES:
                del self._checks[entry.parent]
                self._list_again(entry.inode)
        return until
