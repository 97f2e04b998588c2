"""The tree as the file system sees it: look-ups, attributes and listings that are as fresh as promised.

A kernel request comes in on the event loop. `hot` and `hot_child` answer it from memory or with one short LMDB
read when the folder is fresh; otherwise the request awaits `lookup`, `getattr` or `children`:

* a folder that was never listed: a look-up asks GetStatus for its one name and has the folder listed in the
  background; `children` waits for the listing;
* a folder that is due: it is listed again first, once for all who wait (single-flight);
* nobody answers (`Unavailable`): what is known is served, counted as stale, up to `stale_if_error_s`, with at
  most one attempt a second;
* a name that a fresh listing does not have is `NotFound` without any call; an inode that no listing has (any
  more) is `StaleId`: the kernel then walks down again from the root.

Listings run in threads of the given limiter, are compared piece by piece with the store (`cache.listing`) and
committed before anyone who waits goes on. What changed is then pushed: `on_change(change)` is called in a
thread of its own, one at a time, in order, never on the event loop; it may block. No request waits for it,
only `refresh` does.

Everything here but the listing and pushing functions runs on the event loop. Inode 1 is the mounted folder,
resolved by path: when another folder takes its place the mount goes on. The tree knows neither errno nor gRPC,
and it reads no file content.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn, TypeVar

import structlog
import trio
from cachetools import LRUCache

from fusecache.alluxio.model import FileStatus
from fusecache.cache import listing
from fusecache.cache.freshness import INCOMPLETE_ASK_S, RETRY_S, STALE_KERNEL_TIMEOUT_S, FolderRule, FreshnessPolicy
from fusecache.cache.listing import Committed, Intake
from fusecache.cache.listing_diff import Change, Diff, same_attributes
from fusecache.cache.overlay import Overlay
from fusecache.cache.record import (
    MAX_NAME_BYTES,
    UNKNOWN_UFS_PATH,
    Entry,
    RecordError,
    encode,
    entry_from_status,
    join_ufs_path,
)
from fusecache.cache.refresher import Agenda, TokenBucket
from fusecache.cache.singleflight import SingleFlight
from fusecache.cache.store import FolderState, MetadataStore
from fusecache.cache.transaction import Transaction
from fusecache.cache.writer import StoreFull
from fusecache.clock import Clock
from fusecache.errors import (
    FusecacheError,
    NotFound,
    ProtocolError,
    StaleId,
    StateError,
    Unavailable,
    UpstreamError,
)
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

ROOT: Final = 1
"""Inode of the mounted folder."""

MAX_DEPTH: Final = 256
"""Folders between a file and the root; deeper (or a loop of folders that a server made up) is StaleId."""

MAX_FOLDERS: Final = 50_000
"""Folders whose state is kept in memory (about 300 bytes each); the others are read from the store again."""

MAX_INCOMPLETE: Final = 8192
"""Incomplete files of one listing that are listed; further ones are found by name only."""

T = TypeVar("T")

ListFolder = Callable[[bytes, int], Iterator[list[FileStatus]]]
GetStatus = Callable[[bytes, int], FileStatus]


class _Folder:
    """What is known about one folder's listing; mutable, so that hot entries see it age."""

    __slots__ = ("dead", "failed_until", "fresh_until", "generation", "inode", "last_used", "rule", "state")

    def __init__(self, inode: int, rule: FolderRule) -> None:
        self.inode = inode
        self.rule = rule
        self.state: FolderState | None = None
        self.fresh_until = -math.inf
        self.generation = 0
        """Moves when a record of the folder changes: hot entries of an older one don't count."""
        self.last_used = -math.inf
        self.failed_until = -math.inf
        """No background listing before (the last one was refused)."""
        self.dead = False


class _Hot(NamedTuple):
    entry: Entry
    folder: _Folder
    generation: int


@dataclass
class _Push:
    """Changes on their way to `on_change`."""

    diff: Diff
    folder: Entry | None = None
    shelves: tuple[int, int, int] | None = None
    """(folder, old shelf, new shelf) to compare first."""
    done: trio.Event = field(default_factory=trio.Event)


class MetadataTree:
    """See the module. `run` must be running before anything but `hot`, `path` and the like is awaited."""

    def __init__(
        self,
        store: MetadataStore,
        *,
        root_path: bytes,
        list_folder: ListFolder,
        get_status: GetStatus,
        policy: FreshnessPolicy,
        clock: Clock,
        rng: random.Random,
        metrics: Metrics,
        limiter: trio.CapacityLimiter,
        on_change: Callable[[Change], None],
        hot_entries: int = 50_000,
        chunk: int = listing.CHUNK,
    ) -> None:
        """`list_folder` and `get_status` (path, sync interval in ms) block and are called in threads of
        `limiter`. No I/O here."""
        self._store = store
        self._root_path = b"/" + root_path.strip(b"/")
        self._list_folder = list_folder
        self._get_status = get_status
        self._policy = policy
        self._clock = clock
        self._now = clock.now
        self._rng = rng
        self._limiter = limiter
        self._background = trio.CapacityLimiter(max(1, int(limiter.total_tokens) // 2))
        self._push_limiter = trio.CapacityLimiter(1)
        self._sweep_limiter = trio.CapacityLimiter(1)
        self._on_change = on_change
        self._chunk = chunk

        self._folders: dict[int, _Folder] = {}
        self._overlay = Overlay(self._now, policy.negative_s)
        self._hot: LRUCache[int, _Hot] = LRUCache(hot_entries)
        self._hot_names: LRUCache[tuple[int, bytes], _Hot] = LRUCache(hot_entries)
        self._agenda = Agenda()
        self._bucket = TokenBucket(policy.refresh_calls_per_s, self._now())
        self._agenda_moved = trio.Event()
        self._sweep_wanted = trio.Event()
        self._quiet_until = -math.inf
        """After nobody answered: serve what is known without asking until then."""
        self._root: Entry | None = None
        self._root_asked_at = -math.inf

        self._nursery: trio.Nursery | None = None
        self._listings: SingleFlight[int, _Push] | None = None
        self._forced: SingleFlight[int, _Push] | None = None
        self._questions: SingleFlight[tuple[int, bytes], Entry] | None = None
        self._push_send, self._push_receive = trio.open_memory_channel[_Push](math.inf)

        lookups = "fusecache_metadata_lookups_total"
        self._hits = metrics.counter(lookups, result="hit")
        self._misses = metrics.counter(lookups, result="miss")
        self._negative_hits = metrics.counter(lookups, result="negative_hit")
        self._stale = metrics.counter(lookups, result="stale")
        refreshes = "fusecache_metadata_refreshes_total"
        self._unchanged = metrics.counter(refreshes, result="unchanged")
        self._changed = metrics.counter(refreshes, result="changed")
        self._failed = metrics.counter(refreshes, result="failed")
        self._rejected = metrics.counter("fusecache_upstream_rejected_total", what="listing_entry")
        self._entries = metrics.gauge("fusecache_metadata_entries")

    # ---- life ----

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Own the tasks: listings others wait for, the background refresher, pushing, sweeping. Runs until
        cancelled; a listing in flight is waited for, so stop the client first when that must be quick."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._listings = SingleFlight(nursery)
            self._forced = SingleFlight(nursery)
            self._questions = SingleFlight(nursery)
            nursery.start_soon(self._push_changes)
            nursery.start_soon(self._keep_fresh)
            nursery.start_soon(self._sweep)
            self._sweep_wanted.set()
            self._entries.set(self._store.entry_count())
            task_status.started()
            await trio.sleep_forever()
        raise AssertionError("unreachable: the nursery ends by cancellation only")

    async def start(self) -> None:
        """Resolve the mounted folder. Raises what Alluxio says: NotFound, Unavailable..., and InvalidRequest
        is the caller's to raise when `entry` of the root is a file (see `root`)."""
        await self._ask_root()

    @property
    def root(self) -> Entry:
        """The mounted folder's entry; `folder` is False when a file was named. After `start` only."""
        assert self._root is not None, "start() comes first"
        return self._root

    # ---- requests answered at once ----

    def hot_child(self, parent: int, name: bytes) -> Entry | None:
        """The entry of a fresh folder, without waiting; None = ask `lookup`."""
        now = self._now()
        try:
            hot = self._hot_names[parent, name]
        except KeyError:
            return self._load_child(parent, name, now)
        folder = hot.folder
        if hot.generation != folder.generation or folder.fresh_until <= now:
            return self._load_child(parent, name, now)
        folder.last_used = now
        self._hits.inc()
        return hot.entry

    def hot(self, inode: int) -> Entry | None:
        """The entry of an inode in a fresh folder, without waiting; None = ask `getattr`."""
        now = self._now()
        try:
            hot = self._hot[inode]
        except KeyError:
            return self._load_inode(inode, now)
        folder = hot.folder
        if hot.generation != folder.generation or folder.fresh_until <= now:
            return self._load_inode(inode, now)
        folder.last_used = now
        self._hits.inc()
        return hot.entry

    def kernel_timeout_s(self, entry: Entry) -> float:
        """How long the kernel may keep `entry` (and a negative answer, given the folder's own entry), in seconds:
        never past the moment its folder is due."""
        if not (entry.completed or entry.folder):
            return 0.0
        now = self._now()
        if entry.inode == ROOT:
            rule = self._policy.rule_for(self._root_path)
            until = self._policy.fresh_until(rule, self._root_asked_at, 0.0)
        else:
            folder = self._folders.get(entry.parent)
            if folder is None:
                return 0.0
            rule, until = folder.rule, folder.fresh_until
            known = self._overlay.get(entry.inode)
            if known is not None:
                until = self._policy.fresh_until(rule, known.asked_at, 0.0)
        if until <= now:
            return STALE_KERNEL_TIMEOUT_S if now < self._quiet_until else 0.0
        return self._policy.kernel_timeout_s(rule, until, now)

    def negative_timeout_s(self, parent: int) -> float:
        """How long the kernel may remember that a name is missing in `parent`, in seconds: never past the moment
        the folder is due, and not at all while the folder is not listed."""
        folder = self._folders.get(parent)
        if folder is None or folder.state is None:
            return 0.0
        now = self._now()
        if folder.fresh_until <= now:
            return STALE_KERNEL_TIMEOUT_S if now < self._quiet_until else 0.0
        return min(self._policy.negative_s, self._policy.kernel_timeout_s(folder.rule, folder.fresh_until, now))

    def path(self, inode: int) -> bytes:
        """Alluxio path of an inode. Raises StaleId when it (or a folder above it) is not known."""
        names: list[bytes] = []
        with self._store.read() as txn:
            while inode != ROOT:
                entry = self._known(txn, inode)
                if entry is None or len(names) >= MAX_DEPTH:
                    raise StaleId(f"inode {inode} has no path any more")
                names.append(entry.name)
                inode = entry.parent
        if not names:
            return self._root_path
        return self._root_path.rstrip(b"/") + b"/" + b"/".join(reversed(names))

    def ufs_path(self, inode: int) -> bytes | None:
        """Full path in the UFS, None when Alluxio did not tell it. Raises StaleId."""
        names: list[bytes] = []
        with self._store.read() as txn:
            while True:
                entry = self._root if inode == ROOT else self._known(txn, inode)
                if entry is None or len(names) > MAX_DEPTH:
                    raise StaleId(f"inode {inode} has no path any more")
                if entry.ufs_path == UNKNOWN_UFS_PATH:
                    return None
                if entry.ufs_path:
                    break
                names.append(entry.name)
                inode = entry.parent
        found = entry.ufs_path
        for name in reversed(names):
            found = join_ufs_path(found, name)
        return found

    def superseded(self, inode: int) -> bool:
        """Whether no listing has this inode (any more): its content must not be read from the UFS."""
        if inode == ROOT:
            return False
        with self._store.read() as txn:
            return self._known(txn, inode) is None

    # ---- requests that may wait ----

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry called `name`. Raises NotFound, StaleId (the folder is dead), Unavailable and the like."""
        folder = self._folder(parent)
        folder.last_used = self._now()
        if folder.state is not None:
            await self._make_fresh(folder)
            folder = self._folder(parent)
        if folder.state is not None:
            entry = self._listed_child(folder, name)
            if entry is not None:
                self._hits.inc()
                return await self._current(entry) if _changing(entry) else entry
            if folder.state.incomplete <= sum(1 for known in self._overlay.of_folder(parent) if _changing(known.entry)):
                self._negative_hits.inc()
                raise NotFound(f"no {name!r} in inode {parent}")
        return await self._lookup_unlisted(folder, name)

    async def getattr(self, inode: int) -> Entry:
        """The entry of an inode. Raises StaleId when it is dead or unknown, Unavailable and the like."""
        if inode == ROOT:
            return await self._root_entry()
        entry = self._find(inode)
        if entry is None:
            raise StaleId(f"inode {inode} is not known (any more)")
        known = self._overlay.get(inode)
        if known is not None:
            return await self._current(entry)
        folder = self._folder(entry.parent)
        folder.last_used = self._now()
        await self._make_fresh(folder)
        entry = self._find(inode)
        if entry is None:
            raise StaleId(f"inode {inode} is no longer in its folder")
        self._hits.inc()
        return entry

    async def children(self, inode: int, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries with inode > `after`, ordered by inode. The first page (after = 0) waits for a
        fresh listing, later ones go on with the one there is. Raises StaleId, Unavailable and the like."""
        folder = self._folder(inode)
        folder.last_used = self._now()
        if after == 0 or folder.state is None:
            await self._make_fresh(folder)
            folder = self._folder(inode)
        if folder.state is None:
            raise Unavailable(f"the listing of inode {inode} was lost; ask again")
        loose = sorted(known.entry for known in self._overlay.of_folder(inode))
        loose_inodes = {entry.inode for entry in loose}
        loose_names = {entry.name for entry in loose}
        page: list[Entry] = []
        with self._store.read() as txn:
            for found in self._store.page(txn, inode, folder.state.shelf, after, limit + len(loose)):
                if found.inode not in loose_inodes and found.name not in loose_names:
                    page.append(found)
        if loose:
            page.extend(entry for entry in loose if entry.inode > after)
            page.sort()
        return page[:limit]

    async def refresh(self, inode: int, *, force_sync: bool) -> Diff:
        """List a folder (or the folder of a file) again now and wait until the changes were pushed.

        `force_sync`: Alluxio compares the folder with its UFS first. Raises as `children` does.
        """
        entry = self._find(inode)
        if entry is None:
            raise StaleId(f"inode {inode} is not known (any more)")
        folder = inode if entry.folder else entry.parent
        listings, forced = self._flights()
        sync_ms = 0 if force_sync else self._policy.sync_interval_ms
        push = await forced.do(folder, lambda: self._list_anew(listings, folder, sync_ms))
        await push.done.wait()
        return push.diff

    # ---- finding what is known ----

    def _known(self, txn: Transaction, inode: int) -> Entry | None:
        known = self._overlay.get(inode)
        return known.entry if known is not None else self._store.entry(txn, inode)

    def _find(self, inode: int) -> Entry | None:
        if inode == ROOT:
            return self._root
        with self._store.read() as txn:
            return self._known(txn, inode)

    def _folder(self, inode: int) -> _Folder:
        """State of a folder. Raises StaleId."""
        folder = self._folders.get(inode)
        if folder is None:
            folder = self._load_folder(inode)
            if folder is None:
                raise StaleId(f"inode {inode} is not a folder that is known (any more)")
        return folder

    def _load_folder(self, inode: int) -> _Folder | None:
        entry = self._find(inode)
        if entry is None or not entry.folder:
            return None
        try:
            rule = self._policy.rule_for(self.path(inode))
        except StaleId:
            return None
        folder = _Folder(inode, rule)
        with self._store.read() as txn:
            state = self._store.folder_state(txn, inode)
        if state is not None:
            folder.state = state
            if state.boot == self._store.boot and not state.incomplete:
                folder.fresh_until = self._policy.fresh_until(rule, state.asked_at, self._rng.random())
            elif rule.immutable and not state.incomplete:
                folder.fresh_until = math.inf
        if len(self._folders) >= MAX_FOLDERS:
            self._trim_folders()
        self._folders[inode] = folder
        return folder

    def _trim_folders(self) -> None:
        by_use = sorted(self._folders.values(), key=lambda folder: folder.last_used)
        for folder in by_use[: len(by_use) // 2]:
            self._forget_folder(folder.inode)

    def _forget_folder(self, inode: int) -> None:
        folder = self._folders.pop(inode, None)
        if folder is not None:
            folder.generation += 1
            folder.fresh_until = -math.inf
            folder.dead = True
            self._agenda.drop(inode)

    def _load_child(self, parent: int, name: bytes, now: float) -> Entry | None:
        folder = self._folders.get(parent) or self._load_folder(parent)
        if folder is None or folder.fresh_until <= now or folder.state is None:
            return None
        if self._overlay.child(parent, name) is not None:
            return None
        with self._store.read() as txn:
            entry = self._store.child(txn, parent, folder.state.shelf, name)
        if entry is None:
            return None
        folder.last_used = now
        self._hits.inc()
        self._hot_names[parent, name] = self._hot[entry.inode] = _Hot(entry, folder, folder.generation)
        return entry

    def _load_inode(self, inode: int, now: float) -> Entry | None:
        if inode == ROOT or self._overlay.get(inode) is not None:
            return None
        with self._store.read() as txn:
            entry = self._store.entry(txn, inode)
        if entry is None:
            return None
        folder = self._folders.get(entry.parent) or self._load_folder(entry.parent)
        if folder is None or folder.fresh_until <= now:
            return None
        folder.last_used = now
        self._hits.inc()
        self._hot[inode] = _Hot(entry, folder, folder.generation)
        return entry

    def _listed_child(self, folder: _Folder, name: bytes) -> Entry | None:
        assert folder.state is not None
        known = self._overlay.child(folder.inode, name)
        if known is not None:
            return known.entry
        with self._store.read() as txn:
            return self._store.child(txn, folder.inode, folder.state.shelf, name)

    # ---- single names ----

    async def _lookup_unlisted(self, folder: _Folder, name: bytes) -> Entry:
        known = self._overlay.child(folder.inode, name)
        if known is not None:
            return await self._current(known.entry)
        if self._overlay.missing(folder.inode, name):
            self._negative_hits.inc()
            raise NotFound(f"no {name!r} in inode {folder.inode}")
        self._list_in_background(folder)
        return await self._ask(folder.inode, name)

    async def _current(self, entry: Entry) -> Entry:
        """A loose or incomplete entry, asked for again when its time is over. StaleId when it was replaced."""
        known = self._overlay.get(entry.inode)
        folder = self._folder(entry.parent)
        if known is None:
            raise StaleId(f"inode {entry.inode} is not known any more")
        now = self._now()
        if _changing(known.entry):
            until = known.asked_at + INCOMPLETE_ASK_S
        else:
            until = self._policy.fresh_until(folder.rule, known.asked_at, 0.0)
        if now < until:
            self._hits.inc()
            return known.entry
        stale_until = self._policy.stale_until(folder.rule, known.asked_at)
        if now < min(self._quiet_until, stale_until):
            self._stale.inc()
            return known.entry
        try:
            answer = await self._ask(entry.parent, entry.name)
        except Unavailable:
            if self._now() >= stale_until:
                raise
            self._stale.inc()
            return known.entry
        except NotFound as exc:
            raise StaleId(f"inode {entry.inode} is gone") from exc
        if answer.inode != entry.inode:
            raise StaleId(f"inode {entry.inode} was replaced")
        return answer

    async def _ask(self, parent: int, name: bytes) -> Entry:
        """One name by GetStatus, once for all who ask."""
        self._misses.inc()
        return await _running(self._questions).do((parent, name), lambda: self._ask_status(parent, name))

    async def _ask_status(self, parent: int, name: bytes) -> Entry:
        path = self.path(parent).rstrip(b"/") + b"/" + name
        before = self._overlay.child(parent, name)
        asked_at = self._now()
        try:
            status = await self._call_status(path)
        except NotFound:
            if before is not None:
                self._overlay.drop(before.entry.inode)
                self._push([Change("removed", parent, name, before.entry.inode)])
            self._overlay.put_missing(parent, name)
            raise
        entry = entry_from_status(status, parent, self._folder_ufs_path(parent))._replace(name=name)
        if not _acceptable(entry, parent):
            self._rejected.inc()
            raise ProtocolError(f"GetStatus of {path!r} answered with an impossible entry")
        self._overlay.put(entry, asked_at)
        if before is not None:
            if before.entry.inode != entry.inode:
                self._push([Change("replaced", parent, name, before.entry.inode)])
            elif not same_attributes(before.entry, entry):
                self._push([Change("attributes", parent, name, entry.inode)])
        return entry

    async def _call_status(self, path: bytes) -> FileStatus:
        try:
            return await trio.to_thread.run_sync(
                self._get_status, path, self._policy.sync_interval_ms, limiter=self._limiter, abandon_on_cancel=True
            )
        except Unavailable:
            self._be_quiet()
            raise

    async def _root_entry(self) -> Entry:
        rule = self._policy.rule_for(self._root_path)
        now = self._now()
        if self._root is not None:
            if now < self._policy.fresh_until(rule, self._root_asked_at, 0.0):
                self._hits.inc()
                return self._root
            if now < min(self._quiet_until, self._policy.stale_until(rule, self._root_asked_at)):
                self._stale.inc()
                return self._root
        try:
            return await _running(self._questions).do((0, b""), self._ask_root)
        except Unavailable:
            if self._root is None or self._now() >= self._policy.stale_until(rule, self._root_asked_at):
                raise
            self._stale.inc()
            return self._root

    async def _ask_root(self) -> Entry:
        asked_at = self._now()
        status = await self._call_status(self._root_path)
        entry = entry_from_status(status, ROOT, None)._replace(inode=ROOT, name=b"")
        before, self._root, self._root_asked_at = self._root, entry, asked_at
        if before is not None and not same_attributes(before, entry):
            self._push([Change("attributes", ROOT, b"", ROOT)])
        return entry

    # ---- listing ----

    async def _make_fresh(self, folder: _Folder) -> None:
        """Return when the folder's listing may be served. Raises what the listing raised when it may not."""
        now = self._now()
        if folder.state is not None:
            if now < folder.fresh_until:
                return
            if now < min(self._quiet_until, self._stale_until(folder)):
                self._stale.inc()
                return
        listings, _ = self._flights()
        self._bucket.take(now, may_owe=True)
        try:
            await listings.do(folder.inode, lambda: self._list(folder.inode, self._policy.sync_interval_ms))
        except Unavailable:
            if folder.dead or folder.state is None or self._now() >= self._stale_until(folder):
                raise
            self._stale.inc()

    def _stale_until(self, folder: _Folder) -> float:
        """Until when the listing may be served though it is due; the age of another boot's is unknown."""
        state = folder.state
        if state is None or state.boot != self._store.boot:
            return -math.inf
        return self._policy.stale_until(folder.rule, state.asked_at)

    def _list_in_background(self, folder: _Folder) -> None:
        listings, _ = self._flights()
        if self._now() >= max(folder.failed_until, self._quiet_until):
            listings.start(folder.inode, lambda: self._list_politely(folder.inode))

    async def _list_politely(self, inode: int) -> _Push:
        """A listing nobody waits for yet: leaves half of the threads to those who wait."""
        async with self._background:
            return await self._list(inode, self._policy.sync_interval_ms)

    async def _list_anew(self, listings: SingleFlight[int, _Push], inode: int, sync_ms: int) -> _Push:
        """A listing that begins now: one already running may have missed what its caller knows of."""
        while inode in listings:
            try:
                await listings.do(inode, _never)
            except FusecacheError as exc:
                log.debug("earlier listing failed", inode=inode, error=str(exc))
        return await listings.do(inode, lambda: self._list(inode, sync_ms))

    async def _list(self, inode: int, sync_ms: int) -> _Push:
        folder = self._folder(inode)
        path = self.path(inode)
        asked_at = self._now()
        try:
            if inode == ROOT and folder.state is not None:  # its own attributes come from no listing
                await self._ask_root()
            listed = await trio.to_thread.run_sync(
                self._list_in_thread,
                inode,
                path,
                self._folder_ufs_path(inode),
                sync_ms,
                asked_at,
                limiter=self._limiter,
            )
        except Unavailable:
            self._failed.inc()
            self._be_quiet()
            raise
        except NotFound as exc:
            self._failed.inc()
            if inode == ROOT:
                raise
            self._forget_folder(inode)
            raise StaleId(f"folder {inode} is gone") from exc
        except (UpstreamError, StateError):
            self._failed.inc()
            folder.failed_until = self._now() + folder.rule.refresh_s
            raise
        return self._landed(folder, path, asked_at, *listed)

    def _list_in_thread(
        self, inode: int, path: bytes, ufs_path: bytes | None, sync_ms: int, asked_at: float
    ) -> tuple[Committed, list[Entry]]:
        try:
            return self._take_in(inode, path, ufs_path, sync_ms, asked_at)
        except StoreFull as exc:
            # What is remembered can be asked for again: make room and start over, once.
            log.warning("metadata store is full and was emptied", error=str(exc))
            self._store.writer.run(self._store.reset)
            trio.from_thread.run_sync(self._forget_everything)
            return self._take_in(inode, path, ufs_path, sync_ms, asked_at)

    def _take_in(
        self, inode: int, path: bytes, ufs_path: bytes | None, sync_ms: int, asked_at: float
    ) -> tuple[Committed, list[Entry]]:
        """In a thread: stream the listing into the store. Nothing of it stays when the stream breaks."""
        incomplete: list[Entry] = []
        changing = 0
        intake = Intake(self._store, inode, asked_at, chunk=self._chunk)
        try:
            for statuses in self._list_folder(path, sync_ms):
                complete: list[Entry] = []
                for status in statuses:
                    if status.path == path and not status.folder:
                        raise NotFound(f"{path!r} is a file now")
                    entry = entry_from_status(status, inode, ufs_path)
                    if not _acceptable(entry, inode):
                        self._rejected.inc()
                    elif not _changing(entry):
                        complete.append(entry)
                    else:
                        changing += 1
                        if len(incomplete) < MAX_INCOMPLETE:
                            incomplete.append(entry)
                intake.add(complete)
            return intake.commit(incomplete=changing), incomplete
        except BaseException:
            intake.abandon()
            raise

    def _landed(
        self, folder: _Folder, path: bytes, asked_at: float, committed: Committed, incomplete: list[Entry]
    ) -> _Push:
        """A listing is in the store: make the memory above it agree, and send out what changed."""
        inode = folder.inode
        folder.rule = self._policy.rule_for(path)
        folder.state = committed.state
        folder.fresh_until = self._policy.fresh_until(folder.rule, asked_at, self._rng.random())
        folder.failed_until = -math.inf
        if committed.touched:
            folder.generation += 1
        if not folder.dead:
            self._folders[inode] = folder
            if not folder.rule.immutable:
                self._agenda.set(inode, self._policy.refresh_at(folder.rule, folder.fresh_until))
                self._agenda_moved.set()
        for dead in committed.dead_folders:
            self._forget_folder(dead)
        if committed.dead_folders or committed.old_shelf is not None:
            self._sweep_wanted.set()
        self._entries.set(self._store.entry_count())

        diff = Diff() if committed.first or committed.diff is None else committed.diff
        for change in self._merge_overlay(folder, asked_at, incomplete, diff.changes):
            diff.count(change)
        push = _Push(diff, self._find(inode))
        if committed.old_shelf is not None:
            push.shelves = (inode, committed.old_shelf, committed.state.shelf)
        if push.shelves is not None or diff.total:
            self._changed.inc()
            self._push_send.send_nowait(push)
        else:
            self._unchanged.inc()
            push.done.set()
        return push

    def _merge_overlay(
        self, folder: _Folder, asked_at: float, incomplete: list[Entry], changes: list[Change]
    ) -> list[Change]:
        """Let the overlay give way to a listing; returns changes that only the overlay knew to be such."""
        inode = folder.inode
        further: list[Change] = []
        older = [known.entry for known in self._overlay.of_folder(inode) if known.asked_at <= asked_at]
        for entry in older:
            self._overlay.drop(entry.inode)
        fresh = {entry.name: entry for entry in incomplete}
        assert folder.state is not None
        with self._store.read() as txn:
            for entry in older:
                now = fresh.get(entry.name) or self._store.child(txn, inode, folder.state.shelf, entry.name)
                if now is None:
                    further.append(Change("removed", inode, entry.name, entry.inode))
                elif now.inode != entry.inode:
                    further.append(Change("replaced", inode, entry.name, entry.inode))
                elif not same_attributes(entry, now):
                    further.append(Change("attributes", inode, entry.name, entry.inode))
            for name in self._overlay.take_missing(inode):
                now = fresh.get(name) or self._store.child(txn, inode, folder.state.shelf, name)
                if now is not None:
                    further.append(Change("added", inode, name, now.inode))
        newer = {known.entry.name for known in self._overlay.of_folder(inode)}
        for entry in incomplete:
            if entry.name not in newer:
                self._overlay.put(entry, asked_at)
        told = set(changes)
        return [change for change in further if change not in told]

    def _folder_ufs_path(self, inode: int) -> bytes | None:
        try:
            return self.ufs_path(inode)
        except StaleId:
            return None

    def _be_quiet(self) -> None:
        self._quiet_until = self._now() + RETRY_S * (1.0 + self._rng.random())

    def _forget_everything(self) -> None:
        for inode in list(self._folders):
            self._forget_folder(inode)

    # ---- background tasks ----

    async def _keep_fresh(self) -> NoReturn:
        """List folders in use again a little before they are due."""
        while True:
            now = self._now()
            inode = self._agenda.pop(now)
            if inode is None:
                self._agenda_moved = trio.Event()
                at = self._agenda.next_at()
                with trio.move_on_after(math.inf if at is None else max(0.01, at - now)):
                    await self._agenda_moved.wait()
                continue
            folder = self._folders.get(inode)
            if folder is None or folder.state is None or folder.last_used < folder.state.asked_at:
                continue
            while wait_s := self._bucket.take(self._now()):
                await trio.sleep(wait_s)
            self._list_in_background(folder)

    async def _push_changes(self) -> NoReturn:
        async for push in self._push_receive:
            await trio.to_thread.run_sync(self._deliver, push, limiter=self._push_limiter)
            push.done.set()
            if push.shelves is not None:
                self._store.held_shelves.discard(push.shelves[1])
                self._sweep_wanted.set()
        raise AssertionError("unreachable: the tree keeps the sending end")

    def _deliver(self, push: _Push) -> None:
        """In a thread: call on_change for each change."""
        if push.shelves is not None:
            for change in listing.shelf_changes(self._store, *push.shelves):
                push.diff.count(change)
                self._tell(change)
        else:
            for change in push.diff.changes:
                self._tell(change)
        folder = push.folder
        if folder is not None and push.diff.names_changed:
            self._tell(Change("folder", folder.parent, folder.name, folder.inode))

    def _tell(self, change: Change) -> None:
        try:
            self._on_change(change)
        except Exception:  # a receiver that fails must not stop the changes after it
            log.exception("a change could not be delivered", kind=change.kind, inode=change.inode)

    def _push(self, changes: list[Change]) -> None:
        diff = Diff()
        for change in changes:
            diff.count(change)
        self._push_send.send_nowait(_Push(diff, self._find(changes[0].parent)))

    async def _sweep(self) -> NoReturn:
        """Remove what no listing refers to, a chunk at a time."""
        while True:
            await self._sweep_wanted.wait()
            self._sweep_wanted = trio.Event()
            try:
                while True:
                    swept, dead_folders = await trio.to_thread.run_sync(
                        listing.sweep, self._store, limiter=self._sweep_limiter
                    )
                    for inode in dead_folders:
                        self._forget_folder(inode)
                    if not swept:
                        break
            except StateError as exc:
                log.warning("sweeping the metadata store failed", error=str(exc))

    def _flights(self) -> tuple[SingleFlight[int, _Push], SingleFlight[int, _Push]]:
        return _running(self._listings), _running(self._forced)


def _running(flights: T | None) -> T:
    if flights is None:
        raise RuntimeError("MetadataTree.run is not running")
    return flights


def _changing(entry: Entry) -> bool:
    """An incomplete file: its attributes hold for a moment only."""
    return not entry.completed and not entry.folder


def _acceptable(entry: Entry, parent: int) -> bool:
    """Whether an entry can be served and stored: a name of this world, an inode that is not its folder's own."""
    if entry.inode <= ROOT or entry.inode == parent or not 0 < len(entry.name) <= MAX_NAME_BYTES:
        return False
    try:
        encode(entry)
    except RecordError:
        return False
    return True


async def _never() -> NoReturn:
    raise AssertionError("only waits for a running listing")
