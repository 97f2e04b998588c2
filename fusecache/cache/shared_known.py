"""What can be said about the tree by a process that only reads the store; another one (the agent) writes it.

The rules are `cache.known`'s, with other eyes:

* Changes are seen by the epoch (`cache.board`): when it moved, a folder is compared with the store before it is used
  again. A folder whose listing is still the same keeps its hot entries; another listing is another folder state.
* What the writer has in memory only (loose and incomplete entries) is marked on the board. Whatever is marked is not
  answered from here, and a folder with marks, or with incomplete files, is not listed from here.
* Entries that the writer told (`learn`) are kept for paths and for `superseded` only, with the time at which they were
  asked for: a listing asked for later that lacks one says that it is dead. They outlive the writer.

When the store can't be read nothing is known here, and everything is asked. Event loop only; no network, no messages.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import lmdb
import structlog

from fusecache.cache.board import BoardReader, folder_mark, inode_mark, name_mark
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.hot_entries import Folder
from fusecache.cache.known import MAX_DEPTH, ROOT, Known, Listing
from fusecache.cache.overlay import MAX_ENTRIES
from fusecache.cache.read_only_store import ReadOnlyStore
from fusecache.cache.record import Entry
from fusecache.cache.tables import FolderState
from fusecache.cache.transaction import Transaction
from fusecache.clock import Clock
from fusecache.errors import StaleId, StateError
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0
"""A store that can't be read is tried again after so long, or when the epoch moves."""


_T = TypeVar("_T")


class Learned(NamedTuple):
    """An entry as the writer told it."""

    entry: Entry
    asked_at: float


class SharedKnown(Known):
    """See the module."""

    def __init__(
        self,
        board: BoardReader,
        store: ReadOnlyStore,
        *,
        root_path: bytes,
        policy: FreshnessPolicy,
        clock: Clock,
        metrics: Metrics,
        hot_entries: int,
    ) -> None:
        """`store` is closed with this."""
        self._shared = store
        super().__init__(
            store,
            root_path=root_path,
            policy=policy,
            clock=clock,
            rng=random.Random(0),  # of no use here: only who asks Alluxio needs chance
            metrics=metrics,
            hot_entries=hot_entries,
            epoch=board.epoch,
        )
        self._negative_hits = metrics.counter("fusecache_metadata_lookups_total", result="negative_hit")
        self._notices = board
        self._marks = board.marks
        self._seen_epoch = -1
        self._retry_at = math.inf
        self._learned: OrderedDict[int, Learned] = OrderedDict()

    def close(self) -> None:
        """Unmap the store. Idempotent."""
        self.forget_everything()
        self._shared.close()

    # ---- what is answered from here ----

    def lacks(self, parent: int, name: bytes) -> bool:
        """Whether a fresh listing, known as a whole, says that there is no such name."""
        try:
            folder = self._whole_folder(parent)
            if folder is None or folder.fresh_until <= self.now():
                return False
            with self.store.read() as txn:
                if self.store.folder_state(txn, parent) != folder.state or folder.state is None:
                    return False
                found = self.store.child(txn, parent, folder.state.shelf, name)
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return False
        if found is not None:
            return False
        folder.last_used = self.now()
        self._negative_hits.value += 1
        return True

    def whole_page(self, inode: int, after: int, limit: int) -> list[Entry] | None:
        """A page of a folder's listing; None when it has to be asked for."""
        try:
            folder = self._whole_folder(inode)
            if folder is None or folder.state is None or (after == 0 and folder.fresh_until <= self.now()):
                return None
            folder.last_used = self.now()
            with self.store.read() as txn:
                # A listing may be in the store before the epoch says so, and its incomplete files are not.
                if self.store.folder_state(txn, inode) != folder.state:
                    return None
                return self.store.page(txn, inode, folder.state.shelf, after, limit)
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return None

    def superseded(self, inode: int) -> bool:
        """Whether the inode is dead as far as can be said from here."""
        if inode == ROOT:
            return False
        found = self.find(inode)  # first: it looks at what is new
        return found is None and not self.marked(inode)

    def listing_of(self, inode: int) -> Listing | None:
        """The listing of folder `inode` in use now; None when there is none of this boot."""
        self.current_folder(inode)
        return super().listing_of(inode)

    def marked(self, inode: int) -> bool:
        """Whether the writer may know an inode better than the store."""
        return self._marks[0] != 0 and self._notices.marked(inode_mark(inode))

    def is_immutable(self, folder: int) -> bool:
        """Whether a folder's rule says that what is listed never changes."""
        found = self.current_folder(folder)
        if found is not None:
            return found.rule.immutable
        try:
            return self.policy.rule_for(self.path(folder)).immutable
        except StaleId:
            return False

    # ---- what the writer told ----

    def learn(self, entry: Entry, asked_at: float) -> None:
        """Keep an entry that may not be in the store."""
        if entry.inode == ROOT:
            if asked_at > self.root_asked_at:
                self.root, self.root_asked_at = entry, asked_at
            return
        self._learned[entry.inode] = Learned(entry, asked_at)
        self._learned.move_to_end(entry.inode)
        if len(self._learned) > MAX_ENTRIES:
            self._learned.popitem(last=False)

    def way_to(self, inode: int) -> list[Entry]:
        """The learned entries that lead to a learned one, topmost first; of another inode none.

        A new writer does not know what the one before had in memory only: it can be led there again.
        """
        way: list[Entry] = []
        while len(way) < MAX_DEPTH and (learned := self._learned.get(inode)) is not None:
            way.append(learned.entry)
            inode = learned.entry.parent
        way.reverse()
        return way

    @property
    def alone(self) -> bool:
        """Whether there is no store to read: paths are known from what is learned only."""
        return self._shared.identity is None

    def used_since(self, moment: float) -> list[int]:
        """Folders used at or after `moment` (seconds of the clock)."""
        return [folder.inode for folder in self._folders.values() if folder.last_used >= moment]

    def count_entries(self) -> None:
        """Set the gauge of entries, which statfs shows."""
        self.follow()
        try:
            self._entries.set(self.store.entry_count())
        except lmdb.Error as exc:
            self._lost(exc)

    def follow(self) -> None:
        """Take over what the board says, if that is new."""
        epoch = self._epoch[0]
        if epoch == self._seen_epoch and self.now() < self._retry_at:
            return
        self._seen_epoch = epoch
        self._retry_at = math.inf
        try:
            notice = self._notices.read()
            if notice is None:
                return
            if notice.root is not None and notice.root_asked_at >= self.root_asked_at:
                self.root, self.root_asked_at = notice.root, notice.root_asked_at
            if self._shared.identity not in (None, notice.store):
                self.forget_everything()
            if self._shared.follow(notice.store):
                log.debug("reading a metadata store", namespace=notice.store.namespace)
        except StateError as exc:
            self._lost(exc)

    # ---- the rules of `Known`, as they are for a reader ----

    def current_folder(self, inode: int) -> Folder | None:
        """State of a folder as of now, None when it is none, or dead, or has to be asked for."""
        folder = self._folders.get(inode)
        if folder is not None and folder.epoch != self._epoch[0]:
            self._compare(folder)
            folder = self._folders.get(inode)
        return folder or self.load_folder(inode)

    def _compare(self, folder: Folder) -> None:
        epoch = self._epoch[0]
        try:
            self.follow()
            if folder.dead:
                return
            with self.store.read() as txn:
                state = self.store.folder_state(txn, folder.inode)
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return
        if state is None or state != folder.state:
            self.forget_folders([folder.inode])
            return
        if self._notices.marked(folder_mark(folder.inode)):
            folder.generation += 1  # some of its hot entries may be known better now
        folder.epoch = epoch

    def load_folder(self, inode: int) -> Folder | None:
        """Read a folder's state from the store; None when it is not to be found there, or never listed."""
        epoch = self._epoch[0]
        try:
            self.follow()
            with self.store.read() as txn:
                if self.store.folder_state(txn, inode) is None:
                    return None  # nothing to be said of it; not kept, because a listing may land at any time
            folder = super().load_folder(inode)
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return None
        if folder is not None:
            folder.epoch = epoch
        return folder

    def _load_child(self, parent: int, name: bytes, now: float) -> Entry | None:
        try:
            return Known._load_child(self, parent, name, now)  # not super(): 0.2 us
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return None

    def _load_inode(self, inode: int, now: float) -> Entry | None:
        try:
            if self._epoch[0] != self._seen_epoch or self._retry_at != math.inf:
                self.follow()
            return Known._load_inode(self, inode, now)  # not super(): 0.2 us
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return None

    def _find(self, txn: Transaction, inode: int) -> Entry | None:
        listed = self.store.entry(txn, inode)
        learned = self._learned.get(inode)
        if learned is None:
            return listed
        if self.marked(inode):
            return learned.entry
        if listed is not None:
            return listed
        state = self.store.folder_state(txn, learned.entry.parent)
        if state is not None and state.boot == self.store.boot and state.asked_at >= learned.asked_at:
            return None
        return learned.entry

    def find(self, inode: int) -> Entry | None:
        """What is known of an inode; None = dead, or never seen here."""
        self.follow()
        return self._readable(super().find, inode)

    def path(self, inode: int) -> bytes:
        """Alluxio path of an inode. Raises StaleId when it, or a folder above it, is not known here."""
        return self._readable(super().path, inode)

    def ufs_path(self, inode: int) -> bytes | None:
        """Full path in the UFS, None when Alluxio did not tell it. Raises StaleId."""
        return self._readable(super().ufs_path, inode)

    def _readable(self, read: Callable[[int], _T], inode: int) -> _T:
        """From the store and what is learned; when the store turns out to be unreadable, from what is learned."""
        try:
            return read(inode)
        except (lmdb.Error, StateError) as exc:
            self._lost(exc)
            return read(inode)

    _better_known = marked

    def _better_known_name(self, parent: int, name: bytes) -> bool:
        return self._marks[0] != 0 and self._notices.marked(name_mark(parent, name))

    def _loadable(self, state: FolderState) -> bool:
        return True  # its complete files are true; `_whole_folder` sees to the others

    def _plan(self, folder: Folder) -> None:
        """The writer lists folders again."""

    def _whole_folder(self, inode: int) -> Folder | None:
        """A listed folder of which everything is in the store."""
        folder = self.current_folder(inode)
        if folder is None or folder.state is None or folder.state.incomplete:
            return None
        return None if self._notices.marked(folder_mark(inode)) else folder

    def _lost(self, exc: Exception) -> None:
        """The store can't be read (any more): nothing is known here for a while."""
        if self._shared.identity is not None or not math.isfinite(self._retry_at):
            log.warning("the metadata store can't be read; the agent is asked instead", error=str(exc))
        self.forget_everything()
        self._shared.close()
        self._retry_at = self.now() + RETRY_S
