"""What can be said about the tree without asking anybody: memory over the overlay over the store.

Kernel requests are answered from here, on the event loop, when the folder concerned is fresh: `hot_child` and
`hot` look into the entries decoded last (about 0.6 us) and then into LMDB (under 10 us). A hot entry
counts only while its folder is fresh and none of the folder's records changed since (`Folder.generation`), so
nothing has to be hunted down and removed when a listing lands.

A process that only reads the store (`cache.shared_known`) has the same rules: it looks at a folder again when the epoch
moved since it looked last (`Folder.epoch`). Here the epoch stands still, because whoever writes also knows.

It never waits and never talks to Alluxio: `cache.loader` does, and calls `landed`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from cachetools import TLRUCache

from fusecache.cache.board import BoardWriter, StoreIdentity
from fusecache.cache.freshness import (
    NEGATIVE_KERNEL_TIMEOUT_S,
    STALE_KERNEL_TIMEOUT_S,
    FolderRule,
    FreshnessPolicy,
    jitter_of,
)
from fusecache.cache.hot_entries import Folder, Hot, HotEntries
from fusecache.cache.overlay import Overlay
from fusecache.cache.record import UNKNOWN_UFS_PATH, Entry, join_ufs_path
from fusecache.cache.refresher import Agenda
from fusecache.cache.tables import FolderState, TableReader
from fusecache.cache.transaction import Transaction
from fusecache.clock import Clock
from fusecache.errors import StaleId
from fusecache.metrics import Metrics

ROOT: Final = 1
"""Inode of the mounted folder."""

MAX_DEPTH: Final = 256
"""Folders between an entry and the root; deeper (or a loop of folders that a server made up) is StaleId."""

MAX_FOLDERS: Final = 50_000
"""Folders whose state is kept in memory (about 300 bytes each); others are read from the store again."""


class Listing(NamedTuple):
    """What others may know of a folder's listing."""

    asked_at: float
    """When it was asked for, in seconds of the clock."""
    entries: int
    immutable: bool


class Known:
    """See the module. Event loop only."""

    def __init__(
        self,
        store: TableReader,
        *,
        root_path: bytes,
        policy: FreshnessPolicy,
        clock: Clock,
        rng: random.Random,
        metrics: Metrics,
        hot_entries: int,
        board: BoardWriter | None = None,
        epoch: Sequence[int] = (0,),
    ) -> None:
        """`board`: tells processes that read the store what changed. `epoch`: one element, moved by the writer."""
        self.store = store
        self.root_path: Final = b"/" + root_path.strip(b"/")
        self.policy = policy
        self.now = clock.now
        self.rng = rng
        self.overlay = Overlay(self.now, policy.negative_s, board=board)
        self.agenda = Agenda()
        self.root: Entry | None = None
        self.root_asked_at = -math.inf
        self.outage = False
        """The last call failed because nobody answered, and none succeeded since."""
        self._board = board
        self._epoch = epoch
        self._folders: dict[int, Folder] = {}
        self._refused: TLRUCache[int, float] = TLRUCache(
            MAX_FOLDERS, ttu=lambda _inode, until, _now: until, timer=self.now
        )
        self._hot = HotEntries(hot_entries)
        self.hits = metrics.counter("fusecache_metadata_lookups_total", result="hit")
        self._entries = metrics.gauge("fusecache_metadata_entries")

    # ---- requests answered at once ----

    def hot_child(self, parent: int, name: bytes) -> Entry | None:
        """The entry of a fresh folder, without waiting; None = not known well enough."""
        now = self.now()
        hot = self._hot.names.get((parent, name)) or self._hot.older_name((parent, name))
        if hot is not None:
            folder = hot.folder
            if folder.epoch != self._epoch[0]:
                self._compare(folder)
            if hot.generation == folder.generation and folder.fresh_until > now:
                folder.last_used = now
                self.hits.value += 1
                if hot.entry.folder:
                    self.use_listing(hot.entry.inode, now)
                return hot.entry
        return self._load_child(parent, name, now)

    def hot(self, inode: int) -> Entry | None:
        """The entry of an inode in a fresh folder, without waiting; None = not known well enough."""
        now = self.now()
        hot = self._hot.inodes.get(inode) or self._hot.older_inode(inode)
        if hot is not None:
            folder = hot.folder
            if folder.epoch != self._epoch[0]:
                self._compare(folder)
            if hot.generation == folder.generation and folder.fresh_until > now:
                folder.last_used = now
                self.hits.value += 1
                if hot.entry.folder:
                    self.use_listing(hot.entry.inode, now)
                return hot.entry
        return self._load_inode(inode, now)

    def kernel_timeout_s(self, entry: Entry) -> float:
        """How long the kernel may keep `entry`, in seconds: never past the moment its folder is due."""
        if not (entry.completed or entry.folder):
            return 0.0
        if entry.inode == ROOT:
            rule = self.policy.rule_for(self.root_path)
            return self._timeout_s(rule, self.policy.fresh_until(rule, self.root_asked_at, 0.0))
        folder = self._folders.get(entry.parent)
        if folder is None:
            return 0.0
        known = self.overlay.get(entry.inode)
        if known is not None:
            return self._timeout_s(folder.rule, self.policy.fresh_until(folder.rule, known.asked_at, 0.0))
        return self._timeout_s(folder.rule, folder.fresh_until)

    def negative_timeout_s(self, parent: int) -> float:
        """How long the kernel may keep that a name is missing in folder `parent`, in seconds."""
        folder = self._folders.get(parent)
        if folder is None:
            return 0.0
        if folder.state is None:
            return min(NEGATIVE_KERNEL_TIMEOUT_S, self.policy.negative_s)
        return self._timeout_s(folder.rule, folder.fresh_until)

    def _timeout_s(self, rule: FolderRule, fresh_until: float) -> float:
        now = self.now()
        if fresh_until <= now:
            return STALE_KERNEL_TIMEOUT_S if self.outage else 0.0
        return self.policy.kernel_timeout_s(rule, fresh_until, now)

    def _load_child(self, parent: int, name: bytes, now: float) -> Entry | None:
        folder = self.current_folder(parent)
        if folder is None or folder.fresh_until <= now or folder.state is None:
            return None
        if self._better_known_name(parent, name):
            return None
        with self.store.read() as txn:
            entry = self.store.child(txn, parent, folder.state.shelf, name)
        if entry is not None:
            folder.last_used = now
            self.hits.value += 1
            self._hot.add(Hot(entry, folder, folder.generation))
            if entry.folder:
                self.use_listing(entry.inode, now)
        return entry

    def _load_inode(self, inode: int, now: float) -> Entry | None:
        if inode == ROOT:
            self.use_listing(ROOT, now)
            rule = self.policy.rule_for(self.root_path)
            return self.root if now < self.policy.fresh_until(rule, self.root_asked_at, 0.0) else None
        if self._better_known(inode):
            return None
        with self.store.read() as txn:
            entry = self.store.entry(txn, inode)
        if entry is None:
            return None
        folder = self.current_folder(entry.parent)
        if folder is None or folder.fresh_until <= now:
            return None
        folder.last_used = now
        self.hits.value += 1
        self._hot.add(Hot(entry, folder, folder.generation))
        if entry.folder:
            self.use_listing(inode, now)
        return entry

    def use_listing(self, inode: int, now: float) -> None:
        """A folder's own attributes were asked for, at `now`: its listing counts as used.

        Where the kernel keeps listings, that is all that is heard of one: it looks at the attributes again once they
        have expired, and goes on showing what it has. Without this such a listing would never be made again.
        """
        folder = self._folders.get(inode)
        if folder is not None:
            folder.last_used = now

    def _better_known(self, inode: int) -> bool:
        """Whether the store's entry of an inode may be outdone by one in memory."""
        return self.overlay.get(inode) is not None

    def _better_known_name(self, parent: int, name: bytes) -> bool:
        """Whether the store's entry of a name may be outdone by one in memory."""
        return self.overlay.child(parent, name) is not None

    # ---- single entries, however old ----

    def find(self, inode: int) -> Entry | None:
        """What is remembered of an inode; None = dead or never seen."""
        if inode == ROOT:
            return self.root
        with self.store.read() as txn:
            return self._find(txn, inode)

    def listed_child(self, folder: Folder, name: bytes) -> Entry | None:
        """What is remembered of a name in a listed folder."""
        known = self.overlay.child(folder.inode, name)
        if known is not None:
            return known.entry
        if folder.state is None:
            return None
        with self.store.read() as txn:
            return self.store.child(txn, folder.inode, folder.state.shelf, name)

    def page(self, folder: Folder, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries of a listed folder with inode > `after`, ordered by inode."""
        assert folder.state is not None
        loose = sorted(known.entry for known in self.overlay.of_folder(folder.inode))
        with self.store.read() as txn:
            page = self.store.page(txn, folder.inode, folder.state.shelf, after, limit + len(loose))
        if loose:
            inodes, names = {entry.inode for entry in loose}, {entry.name for entry in loose}
            page = [entry for entry in page if entry.inode not in inodes and entry.name not in names]
            page.extend(entry for entry in loose if entry.inode > after)
            page.sort()
        return page[:limit]

    def path(self, inode: int) -> bytes:
        """Alluxio path of an inode. Raises StaleId when it, or a folder above it, is not known."""
        names: list[bytes] = []
        above = inode
        with self.store.read() as txn:
            while above != ROOT:
                entry = self._find(txn, above)
                if entry is None or len(names) >= MAX_DEPTH:
                    raise StaleId(f"inode {inode} has no path (any more)")
                names.append(entry.name)
                above = entry.parent
        if not names:
            return self.root_path
        return self.root_path.rstrip(b"/") + b"/" + b"/".join(reversed(names))

    def ufs_path(self, inode: int) -> bytes | None:
        """Full path in the UFS, None when Alluxio did not tell it. Raises StaleId."""
        names: list[bytes] = []
        above = inode
        with self.store.read() as txn:
            while True:
                entry = self.root if above == ROOT else self._find(txn, above)
                if entry is None or len(names) >= MAX_DEPTH:
                    raise StaleId(f"inode {inode} has no path (any more)")
                if entry.ufs_path == UNKNOWN_UFS_PATH:
                    return None
                if entry.ufs_path:
                    break
                names.append(entry.name)
                above = entry.parent
        found = entry.ufs_path
        for name in reversed(names):
            found = join_ufs_path(found, name)
        return found

    def lineage(self, entries: Sequence[Entry], *, whole: bool) -> list[tuple[Entry, float]]:
        """Of entries of one folder, and of the folders above: what is in memory only, each with when it was asked for.

        With `whole` all of them, up to the mounted folder; what is in the store then counts as asked for at 0. For a
        process that reads the store.
        """
        line: list[tuple[Entry, float]] = []
        with self.store.read() as txn:
            above: Sequence[Entry] = entries
            while above and len(line) < MAX_DEPTH + len(entries):
                for entry in above:
                    if entry.inode == ROOT:
                        line.append((entry, self.root_asked_at))
                        return line
                    loose = self.overlay.get(entry.inode)
                    if loose is not None or whole:
                        line.append((entry, 0.0 if loose is None else loose.asked_at))
                folder = self.root if above[0].parent == ROOT else self._find(txn, above[0].parent)
                above = () if folder is None else (folder,)
        return line

    def superseded(self, inode: int) -> bool:
        """Whether no listing has this inode (any more): its content must not be read from the UFS."""
        return inode != ROOT and self.find(inode) is None

    def _find(self, txn: Transaction, inode: int) -> Entry | None:
        known = self.overlay.get(inode)
        return known.entry if known is not None else self.store.entry(txn, inode)

    # ---- folders ----

    def folder(self, inode: int) -> Folder:
        """State of a folder. Raises StaleId when it is none, or dead."""
        folder = self.current_folder(inode)
        if folder is None:
            raise StaleId(f"inode {inode} is not a folder that is known (any more)")
        return folder

    def current_folder(self, inode: int) -> Folder | None:
        """State of a folder, None when it is none, or dead."""
        return self._folders.get(inode) or self.load_folder(inode)

    def _compare(self, folder: Folder) -> None:
        """The epoch moved since a folder was looked at; never here, where its writer is."""

    def load_folder(self, inode: int) -> Folder | None:
        """Read a folder's state from the store; None when it is dead or no folder."""
        entry = self.find(inode)
        if entry is None or not entry.folder:
            return None
        try:
            rule = self.policy.rule_for(self.path(inode))
        except StaleId:
            return None
        folder = Folder(inode, rule)
        with self.store.read() as txn:
            folder.state = state = self.store.folder_state(txn, inode)
        if state is not None and self._loadable(state) and (rule.immutable or state.boot == self.store.boot):
            folder.fresh_until = self.policy.fresh_until(rule, state.asked_at, jitter_of(inode, state.asked_at))
            self._plan(folder)
        if len(self._folders) >= MAX_FOLDERS:
            self._trim_folders()
        self._folders[inode] = folder
        return folder

    def _loadable(self, state: FolderState) -> bool:
        """Whether a listing found in the store can count as fresh: its incomplete files were in memory only, and
        without them it is not the whole folder."""
        return not state.incomplete

    def landed(self, folder: Folder, state: FolderState, *, touched: bool) -> None:
        """A new listing of `folder` is in the store; `touched` when any record differs."""
        try:
            folder.rule = self.policy.rule_for(self.path(folder.inode))
        except StaleId:
            self.forget_folders([folder.inode])
        folder.state = state
        self._refused.pop(folder.inode, None)
        folder.fresh_until = self.policy.fresh_until(
            folder.rule, state.asked_at, jitter_of(folder.inode, state.asked_at)
        )
        if touched:
            folder.generation += 1
        if folder.dead:
            folder.fresh_until = -math.inf
        else:
            self._plan(folder)
        self._entries.set(self.store.entry_count())

    def announce(self) -> None:
        """What processes that read the store may see has changed."""
        if self._board is not None:
            self._board.bump()

    def announce_root(self, identity: Callable[[], StoreIdentity]) -> None:
        """The mounted folder was asked for; `identity` says which store is in use."""
        if self._board is not None:
            self._board.publish(identity(), self.root, self.root_asked_at)

    def refuse(self, inode: int, until: float) -> None:
        """The folder's listing failed: none in the background before `until`.

        Not part of `Folder`: a listing that does not fit the store empties it, and every `Folder` with it; the next
        look-up would begin the same listing and empty the store again.
        """
        self._refused[inode] = until

    def refused(self, inode: int) -> bool:
        """Whether the last listing of the folder failed a moment ago."""
        return inode in self._refused

    def listing_of(self, inode: int) -> Listing | None:
        """The listing of folder `inode` in use now; None when there is none of this boot in memory."""
        folder = self._folders.get(inode)
        if folder is None or folder.state is None or folder.state.boot != self.store.boot:
            return None
        return Listing(folder.state.asked_at, folder.state.entries, folder.rule.immutable)

    def stale_until(self, folder: Folder) -> float:
        """Until when a due listing may be served while nobody answers; the age of another boot's is unknown."""
        state = folder.state
        if state is None or state.boot != self.store.boot:
            return -math.inf
        return self.policy.stale_until(folder.rule, state.asked_at)

    def forget_folders(self, inodes: Iterable[int]) -> None:
        """These folders are dead, or no longer kept in memory."""
        for inode in inodes:
            folder = self._folders.pop(inode, None)
            if folder is not None:
                folder.generation += 1
                folder.fresh_until = -math.inf
                folder.dead = True
                self.agenda.drop(inode)

    def bury(self, entry: Entry) -> None:
        """An entry that only the overlay had is dead."""
        self.overlay.drop(entry.inode)
        if entry.folder:
            self.bury_folder(entry.inode)

    def bury_folder(self, inode: int) -> None:
        """A folder is dead, and so is what the overlay has below it (the store's part is swept)."""
        dead = [inode]
        while dead:
            folder = dead.pop()
            self.forget_folders([folder])
            for known in self.overlay.of_folder(folder):
                self.overlay.drop(known.entry.inode)
                if known.entry.folder:
                    dead.append(known.entry.inode)

    def forget_everything(self) -> None:
        """The store was emptied."""
        self.forget_folders(list(self._folders))
        self.announce()

    def use(self, inode: int) -> None:
        """Another process answered from a folder, or the kernel shows what it keeps of it: it is in use.

        That may be heard after the folder was let go: it is listed again then, because nobody would come and wait for
        that where the kernel answers.
        """
        folder = self.current_folder(inode)
        if folder is not None:
            folder.last_used = self.now()
            if folder.state is not None and inode not in self.agenda:
                self._plan(folder)

    def next_to_refresh(self, now: float) -> Folder | None:
        """A folder that is in use and about to be due; folders that nobody used since are let go."""
        while (inode := self.agenda.pop(now)) is not None:
            folder = self._folders.get(inode)
            if folder is not None and folder.state is not None and folder.last_used >= folder.state.asked_at:
                return folder
        return None

    def _plan(self, folder: Folder) -> None:
        if not folder.rule.immutable:
            self.agenda.set(folder.inode, self.policy.refresh_at(folder.rule, folder.fresh_until))

    def _trim_folders(self) -> None:
        by_use = sorted(self._folders.values(), key=lambda folder: folder.last_used)
        self.forget_folders([folder.inode for folder in by_use[: len(by_use) // 2]])
