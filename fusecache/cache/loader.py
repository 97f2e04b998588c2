"""Asks Alluxio, once for all who want to know, and makes the answers known.

Two questions: GetStatus for one name (`ask`), and ListStatus for a folder (`list_folder`, `list_anew`). A
listing streams through a thread into the store (`cache.listing`) and is committed before anybody who waits for
it goes on; one that breaks changes nothing. Listings of one folder never overlap, so a later one can't be
overwritten by an earlier one; an answer about one name gives way to a listing that was asked for after it.

Policy (whether to ask at all) is the tree's; telling the kernel is the pusher's. Runs on the event loop but for
the functions that say "in a thread".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

import structlog
import trio

from fusecache.alluxio.model import FileStatus
from fusecache.cache import listing
from fusecache.cache.freshness import RETRY_S
from fusecache.cache.hot_entries import Folder
from fusecache.cache.known import ROOT, Known
from fusecache.cache.listing import Committed, Intake, ListingLost
from fusecache.cache.listing_diff import Change, Diff, same_attributes
from fusecache.cache.pusher import Delivery, Pusher
from fusecache.cache.record import MAX_NAME_BYTES, Entry, RecordError, encode, entry_from_status
from fusecache.cache.singleflight import SingleFlight
from fusecache.cache.store import MetadataStore
from fusecache.cache.writer import StoreFull
from fusecache.errors import FusecacheError, NotFound, ProtocolError, StaleId, StateError, Unavailable, UpstreamError
from fusecache.metrics import Metrics
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

ListFolder = Callable[[bytes, int], Iterator[list[FileStatus]]]
"""(path, sync interval in ms) -> pieces of the listing; raises when it is not whole. Blocks."""

GetStatus = Callable[[bytes, int], FileStatus]
"""(path, sync interval in ms) -> one file or folder. Blocks."""

MAX_INCOMPLETE: Final = 8192
"""Incomplete files of one listing that are listed; further ones are found by name only."""


class Loader:
    """See the module."""

    def __init__(
        self,
        known: Known,
        store: MetadataStore,
        pusher: Pusher,
        nursery: trio.Nursery,
        *,
        list_folder: ListFolder,
        get_status: GetStatus,
        limiter: trio.CapacityLimiter,
        metrics: Metrics,
        chunk: int,
    ) -> None:
        self._known = known
        self._store = store
        self._pusher = pusher
        self._list_folder = list_folder
        self._get_status = get_status
        self._limiter = limiter
        # A listing nobody waits for yet leaves half of the threads to those who wait.
        self._background = trio.CapacityLimiter(max(1, int(limiter.total_tokens) // 2))
        self._chunk = chunk
        self._questions: SingleFlight[tuple[int, bytes], Entry] = SingleFlight(nursery)
        self._listings: SingleFlight[int, Delivery] = SingleFlight(nursery)
        self._anew: SingleFlight[tuple[int, int], Delivery] = SingleFlight(nursery)
        self._closing = False
        self.quiet_until = -math.inf
        """After nobody answered: no further attempt before, where there is something to serve."""
        self.answered_at = -math.inf
        """When Alluxio last answered anything."""
        self._misses = metrics.counter("fusecache_metadata_lookups_total", result="miss")
        refreshes = "fusecache_metadata_refreshes_total"
        self._unchanged = metrics.counter(refreshes, result="unchanged")
        self._changed = metrics.counter(refreshes, result="changed")
        self._failed = metrics.counter(refreshes, result="failed")
        self._rejected = metrics.counter("fusecache_upstream_rejected_total", what="listing_entry")

    def close(self) -> None:
        """Let listings in flight end at their next piece."""
        self._closing = True

    # ---- one name ----

    async def ask(self, parent: int, name: bytes) -> Entry:
        """One name by GetStatus. Raises NotFound, StaleId (the folder is dead), Unavailable and the like."""
        self._misses.inc()
        return await self._questions.do((parent, name), lambda: self._ask(parent, name))

    async def ask_root(self) -> Entry:
        """The mounted folder by GetStatus of its path."""
        return await self._questions.do((0, b""), self._ask_root)

    async def _ask(self, parent: int, name: bytes) -> Entry:
        known, overlay = self._known, self._known.overlay
        path = known.path(parent).rstrip(b"/") + b"/" + name
        asked_at = known.now()
        try:
            status = await self._call_status(path)
        except NotFound:
            if not self._listed_since(parent, asked_at):
                before = overlay.child(parent, name)
                if before is not None:
                    known.bury(before.entry)
                    self._pusher.push_changes([Change("removed", parent, name, before.entry.inode)], known.find(parent))
                overlay.put_missing(parent, name)
            raise
        entry = entry_from_status(status, parent, self._ufs_path(parent))._replace(name=name)
        if _acceptable(entry, parent) is None:
            self._rejected.inc()
            raise ProtocolError(f"GetStatus of {path!r} was answered with an impossible entry")
        before_entry = known.listed_child(known.folder(parent), name)
        if self._listed_since(parent, asked_at):
            # A listing that began later says it better.
            if before_entry is None:
                raise NotFound(f"{path!r} is gone")
            return before_entry
        overlay.put(entry, asked_at)
        if known.folder(parent).state is not None:
            known.announce()  # who reads the listing has to ask for this name from now on
        if before_entry is not None:
            if before_entry.inode != entry.inode:
                known.bury(before_entry)
                self._pusher.push_changes([Change("replaced", parent, name, before_entry.inode)], known.find(parent))
            elif not same_attributes(before_entry, entry):
                self._pusher.push_changes([Change("attributes", parent, name, entry.inode)], None)
        return entry

    async def _ask_root(self) -> Entry:
        known = self._known
        asked_at = known.now()
        status = await self._call_status(known.root_path)
        entry = entry_from_status(status, ROOT, None)._replace(inode=ROOT, name=b"")
        before, known.root, known.root_asked_at = known.root, entry, asked_at
        known.announce_root(self._store.identity)
        if before is not None and not same_attributes(before, entry):
            self._pusher.push_changes([Change("attributes", ROOT, b"", ROOT)], None)
        return entry

    async def _call_status(self, path: bytes) -> FileStatus:
        sync_ms = self._known.policy.sync_interval_ms
        try:
            # The thread touches nothing of ours, so a shutdown need not wait for it.
            status = await in_thread(self._get_status, path, sync_ms, limiter=self._limiter, abandon_on_cancel=True)
        except Unavailable:
            self._nobody_answered()
            raise
        except UpstreamError:
            self._somebody_answered()
            raise
        self._somebody_answered()
        return status

    def _listed_since(self, inode: int, asked_at: float) -> bool:
        state = self._known.folder(inode).state
        return state is not None and state.boot == self._known.store.boot and state.asked_at >= asked_at

    # ---- folders ----

    def listing(self, inode: int) -> bool:
        """Whether the folder is being listed now."""
        return inode in self._listings

    async def list_folder(self, inode: int) -> Delivery:
        """List a folder, or wait for the listing that runs."""
        return await self._listings.do(inode, lambda: self._list(inode, self._known.policy.sync_interval_ms))

    def list_in_background(self, folder: Folder) -> None:
        """List a folder unless one runs, the last one was refused, or nobody answers."""
        if self._known.now() >= self.quiet_until and not self._known.refused(folder.inode):
            self._listings.start(folder.inode, lambda: self._list_politely(folder.inode))

    async def list_anew(self, inode: int, sync_ms: int) -> Delivery:
        """A listing that begins after this call: one already running may have missed what the caller knows of.

        Who calls while one waits for its turn gets its answer too.
        """
        return await self._anew.do((inode, sync_ms), lambda: self._list_after(inode, sync_ms))

    async def _list_after(self, inode: int, sync_ms: int) -> Delivery:
        while inode in self._listings:
            try:
                await self._listings.do(inode, _only_wait)
            except FusecacheError as exc:
                log.debug("an earlier listing failed", inode=inode, error=str(exc))
        self._anew.depart((inode, sync_ms))
        return await self._listings.do(inode, lambda: self._list(inode, sync_ms))

    async def _list_politely(self, inode: int) -> Delivery:
        async with self._background:
            return await self._list(inode, self._known.policy.sync_interval_ms)

    async def _list(self, inode: int, sync_ms: int) -> Delivery:
        known = self._known
        folder = known.folder(inode)
        path = known.path(inode)
        asked_at = known.now()
        try:
            if inode == ROOT and folder.state is not None:
                await self.ask_root()  # the mounted folder's own attributes come from no listing
            committed, incomplete = await in_thread(
                self._list_in_thread, inode, path, self._ufs_path(inode), sync_ms, asked_at, limiter=self._limiter
            )
        except Unavailable:
            self._failed.inc()
            self._nobody_answered()
            known.refuse(inode, self.quiet_until)
            raise
        except NotFound as exc:
            self._failed.inc()
            self._somebody_answered()
            if inode == ROOT:
                raise
            known.bury_folder(inode)
            raise StaleId(f"folder {path!r} is gone") from exc
        except (UpstreamError, StateError):
            self._failed.inc()
            self._somebody_answered()
            known.refuse(inode, known.now() + folder.rule.refresh_s)
            raise
        self._somebody_answered()
        return self._land(folder, committed, incomplete)

    def _list_in_thread(
        self, inode: int, path: bytes, ufs_path: bytes | None, sync_ms: int, asked_at: float
    ) -> tuple[Committed, list[Entry]]:
        """In a thread: list into the store; a full store is emptied and the listing begun again, once."""
        try:
            return self._take_in(inode, path, ufs_path, sync_ms, asked_at)
        except ListingLost:
            return self._take_in(inode, path, ufs_path, sync_ms, asked_at)
        except StoreFull as exc:
            log.warning("the metadata store is full: all of it is dropped and asked for again", error=str(exc))
            self._store.writer.run(self._store.reset)
            trio.from_thread.run_sync(self._known.forget_everything)
            return self._take_in(inode, path, ufs_path, sync_ms, asked_at)

    def _take_in(
        self, inode: int, path: bytes, ufs_path: bytes | None, sync_ms: int, asked_at: float
    ) -> tuple[Committed, list[Entry]]:
        """In a thread: one listing, whole or not at all."""
        incomplete: list[Entry] = []
        changing = 0
        intake = Intake(self._store, inode, asked_at, chunk=self._chunk)
        try:
            for statuses in self._list_folder(path, sync_ms):
                # A plain float store: the loop reads it to see that somebody answers.
                self.answered_at = self._known.now()
                if self._closing:
                    raise Unavailable("shut down during a listing")
                complete: list[tuple[int, bytes]] = []
                for status in statuses:
                    if status.path == path and not status.folder:
                        raise NotFound(f"{path!r} is a file now")
                    entry = entry_from_status(status, inode, ufs_path)
                    record = _acceptable(entry, inode)
                    if record is None:
                        self._rejected.inc()
                    elif entry.completed or entry.folder:
                        complete.append((entry.inode, record))
                    else:
                        changing += 1
                        if len(incomplete) < MAX_INCOMPLETE:
                            incomplete.append(entry)
                intake.add(complete)
            return intake.commit(incomplete=changing), incomplete
        except BaseException:
            intake.abandon()
            raise

    def _land(self, folder: Folder, committed: Committed, incomplete: list[Entry]) -> Delivery:
        """A listing is in the store: make memory agree, and send out what changed."""
        known, inode = self._known, folder.inode
        known.landed(folder, committed.state, touched=committed.touched)
        for dead in committed.dead_folders:
            known.bury_folder(dead)
        # Nobody can have kept anything of a listing that was the first.
        diff = Diff() if committed.first or committed.diff is None else committed.diff
        for change in self._merge_overlay(folder, committed, incomplete, diff):
            diff.count(change)
        delivery = Delivery(diff, known.find(inode))
        if committed.old_shelf is not None:
            delivery.shelves = (inode, committed.old_shelf, committed.state.shelf)
        if delivery.shelves is not None or diff.total:
            self._changed.inc()
        else:
            self._unchanged.inc()
        known.announce()
        self._pusher.push(delivery)
        return delivery

    def _merge_overlay(self, folder: Folder, committed: Committed, incomplete: list[Entry], diff: Diff) -> list[Change]:
        """Let the overlay give way to a listing; returns changes that only the overlay knew to be such."""
        known, overlay, inode = self._known, self._known.overlay, folder.inode
        asked_at = committed.state.asked_at
        older = [it.entry for it in overlay.of_folder(inode) if it.asked_at <= asked_at]
        for entry in older:
            overlay.drop(entry.inode)
        missing = overlay.take_missing(inode)
        newer = {it.entry.name for it in overlay.of_folder(inode)}
        for entry in incomplete:
            if entry.name not in newer:
                overlay.put(entry, asked_at)
        further: list[Change] = []
        for entry in older:
            now = known.listed_child(folder, entry.name)
            if entry.folder and (now is None or now.inode != entry.inode):
                known.bury_folder(entry.inode)
            if now is None:
                further.append(Change("removed", inode, entry.name, entry.inode))
            elif now.inode != entry.inode:
                further.append(Change("replaced", inode, entry.name, entry.inode))
            elif not same_attributes(entry, now):
                further.append(Change("attributes", inode, entry.name, entry.inode))
        if not committed.first:
            # Not on the shelf, so in no diff; but the listing before may have told the kernel that they are missing.
            before = newer.union(entry.name for entry in older)
            further.extend(
                Change("added", inode, entry.name, entry.inode) for entry in incomplete if entry.name not in before
            )
        for name in missing:
            found = known.listed_child(folder, name)
            if found is not None:
                further.append(Change("added", inode, name, found.inode))
        told = set(diff.changes)
        return [change for change in further if change not in told]

    def _ufs_path(self, inode: int) -> bytes | None:
        try:
            return self._known.ufs_path(inode)
        except StaleId:
            return None

    def _nobody_answered(self) -> None:
        known = self._known
        known.outage = True
        self.quiet_until = known.now() + RETRY_S * (1.0 + known.rng.random())

    def _somebody_answered(self) -> None:
        self._known.outage = False
        self.quiet_until = -math.inf
        self.answered_at = self._known.now()


def _acceptable(entry: Entry, parent: int) -> bytes | None:
    """The record of an entry that can be served: a name of this world, an inode that is not its folder's own."""
    if entry.inode <= ROOT or entry.inode == parent or not 0 < len(entry.name) <= MAX_NAME_BYTES:
        return None
    try:
        return encode(entry)
    except RecordError:
        return None


async def _only_wait() -> NoReturn:
    raise AssertionError("the listing that was waited for ended without a checkpoint")


def sweep_all(store: MetadataStore) -> list[int]:
    """In a thread: remove what no listing refers to. Returns folders found dead by that. Raises StateError."""
    dead: list[int] = []
    while True:
        swept, dead_folders = listing.sweep(store)
        dead.extend(dead_folders)
        if not swept:
            return dead
