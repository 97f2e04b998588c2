"""The tree as the file system sees it: look-ups, attributes and listings that are as fresh as promised.

A kernel request comes in on the event loop. `hot` and `hot_child` answer it from memory or with one short LMDB
read when the folder is fresh (`cache.known`); otherwise the request awaits `lookup`, `getattr` or `children`:

* a folder that was never listed: a look-up asks GetStatus for its one name and has the folder listed in the
  background; `children` waits for the listing;
* a folder that is due: it is listed again first, once for all who wait (a very large one answers single names
  by GetStatus meanwhile);
* nobody answers (`Unavailable`): what is known is served, counted as stale, up to `stale_if_error_s`; while that
  lasts one question a second is asked in the background, and requests that can be served don't wait;
* a name that a fresh listing does not have is `NotFound` without any call; an inode that no listing has (any
  more) is `StaleId`: the kernel then walks down again from the root.

What a new listing changed is pushed to `on_change` (see `cache.pusher` for its rules). Inode 1 is the mounted
folder, resolved by path: when another folder takes its place the mount goes on. A folder is listed by path, so
until its parent is listed again, the inode of a replaced folder shows what lies at that path now.

The tree knows neither errno nor gRPC, and it reads no file content.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NoReturn

import structlog
import trio

from fusecache.cache import listing
from fusecache.cache.board import BoardWriter
from fusecache.cache.freshness import INCOMPLETE_ASK_S, NO_ANSWER_S, PATIENT_ENTRIES, FreshnessPolicy
from fusecache.cache.hot_entries import Folder
from fusecache.cache.known import ROOT, Known
from fusecache.cache.listing_diff import Change, Diff
from fusecache.cache.loader import GetStatus, ListFolder, Loader, sweep_all
from fusecache.cache.pusher import Pusher
from fusecache.cache.record import Entry
from fusecache.cache.refresher import TokenBucket
from fusecache.cache.store import MetadataStore
from fusecache.clock import Clock
from fusecache.errors import FusecacheError, NotFound, StaleId, StateError, Unavailable
from fusecache.metrics import Metrics
from fusecache.threads import in_thread

__all__ = ["ROOT", "MetadataTree"]

log = structlog.get_logger(__name__)


class MetadataTree:
    """See the module. `run` must be running before anything is awaited; event loop only."""

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
        board: BoardWriter | None = None,
    ) -> None:
        """`list_folder` and `get_status` block; they are called in threads of `limiter`. No network here.

        `board`: tells other processes, which read the same store, what changed. A mounted folder that the writer before
        us told of there counts as known, as old as it is.
        """
        self._store = store
        self._policy = policy
        self._now = clock.now
        self._limiter = limiter
        self._list_folder = list_folder
        self._get_status = get_status
        self._metrics = metrics
        self._chunk = chunk
        self._known = known = Known(
            store,
            root_path=root_path,
            policy=policy,
            clock=clock,
            rng=rng,
            metrics=metrics,
            hot_entries=hot_entries,
            board=board,
        )
        self._board = board
        if board is not None:
            before = board.before
            if before is not None and before.store.namespace == store.namespace:
                known.root, known.root_asked_at = before.root, before.root_asked_at
            known.announce_root(store.identity)
        self._sweep_wanted = trio.Event()
        self._pusher = Pusher(store, on_change, self._want_sweep)
        self._bucket = TokenBucket(policy.refresh_calls_per_s, self._now())
        self._loader: Loader | None = None
        lookups = "fusecache_metadata_lookups_total"
        self._negative_hits = metrics.counter(lookups, result="negative_hit")
        self._stale = metrics.counter(lookups, result="stale")

        # Bound once, not wrapped: `hot` and `hot_child` run for every kernel request.
        self.hot = known.hot
        self.hot_child = known.hot_child
        self.kernel_timeout_s = known.kernel_timeout_s
        self.negative_timeout_s = known.negative_timeout_s
        self.path = known.path
        self.ufs_path = known.ufs_path
        self.superseded = known.superseded
        self.listing_of = known.listing_of
        self.now = known.now
        self.use = known.use
        self.lineage = known.lineage

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Own the tasks behind the tree: listings, the background refresher, pushes, sweeping. Runs until
        cancelled. A listing that waits for the network is waited for: close the client first."""
        async with trio.open_nursery() as nursery:
            self._loader = Loader(
                self._known,
                self._store,
                self._pusher,
                nursery,
                list_folder=self._list_folder,
                get_status=self._get_status,
                limiter=self._limiter,
                metrics=self._metrics,
                chunk=self._chunk,
            )
            nursery.start_soon(self._pusher.run)
            nursery.start_soon(self._keep_fresh)
            nursery.start_soon(self._end_outage)
            nursery.start_soon(self._sweep)
            self._want_sweep()
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._loader.close()
        raise AssertionError("unreachable: the nursery ends by cancellation only")

    async def start(self) -> None:
        """Resolve the mounted folder. Raises what Alluxio says: NotFound, PermissionDenied, Unavailable. What a
        writer before us resolved counts for as long as it could be served. That the path is a file is seen in
        `root.folder`."""
        loader = self._running()
        stale_until = self._policy.stale_until(self._policy.rule_for(self._known.root_path), self._known.root_asked_at)
        if self._board is None or self._known.root is None or self._now() >= stale_until:
            await loader.ask_root()

    @property
    def root(self) -> Entry:
        """The mounted folder's entry; after `start` only."""
        assert self._known.root is not None, "start() comes first"
        return self._known.root

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry called `name`. Raises NotFound, StaleId (the folder is dead), Unavailable and the like."""
        folder = self._known.folder(parent)
        folder.last_used = self._now()
        if folder.state is not None:
            if self._too_large_to_wait_for(folder):
                try:
                    return await self._ask_meanwhile(folder, name)
                except Unavailable:
                    log.debug("single names can't be asked for either", inode=parent)
            await self._make_fresh(folder)
            folder = self._known.folder(parent)
        if folder.state is not None:
            entry = self._known.listed_child(folder, name)
            if entry is not None:
                return await self._current(folder, entry)
            if folder.state.incomplete <= len(self._known.overlay.of_folder(parent)):
                self._negative_hits.inc()
                raise NotFound(f"no {name!r} in inode {parent}")
            return await self._running().ask(parent, name)
        return await self._ask_meanwhile(folder, name)

    async def getattr(self, inode: int) -> Entry:
        """The entry of an inode. Raises StaleId when it is dead or unknown, Unavailable and the like."""
        if inode == ROOT:
            return await self._root_entry()
        entry = self._known.find(inode)
        if entry is None:
            raise StaleId(f"inode {inode} is not known (any more)")
        folder = self._known.folder(entry.parent)
        folder.last_used = self._now()
        if entry.folder:
            self._known.use(inode)
        if self._known.overlay.get(inode) is None:
            if self._too_large_to_wait_for(folder):
                try:
                    await self._ask_meanwhile(folder, entry.name)
                except (NotFound, Unavailable) as exc:
                    log.debug("a single name was not answered", inode=inode, error=str(exc))
            if self._known.overlay.get(inode) is None:
                await self._make_fresh(folder)
            entry = self._known.find(inode)
            if entry is None:
                raise StaleId(f"inode {inode} is no longer in its folder")
            folder = self._known.folder(entry.parent)
        try:
            current = await self._current(folder, entry)
        except NotFound as exc:
            raise StaleId(f"inode {inode} is gone") from exc
        if current.inode != inode:
            raise StaleId(f"inode {inode} was replaced")
        return current

    async def children(self, inode: int, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries with inode > `after`, ordered by inode. The first page (after = 0) waits for a
        fresh listing, later ones go on with the one there is. Raises StaleId, Unavailable and the like."""
        folder = self._known.folder(inode)
        folder.last_used = self._now()
        if after == 0 or folder.state is None:
            await self._make_fresh(folder)
            folder = self._known.folder(inode)
        if folder.state is None:
            raise Unavailable(f"the listing of inode {inode} was lost; ask again")
        return self._known.page(folder, after, limit)

    async def refresh(self, inode: int, *, force_sync: bool) -> Diff:
        """List a folder (or the folder of a file) now and wait until the changes were pushed.

        `force_sync`: Alluxio compares the folder with its UFS first. Raises as `children` does.
        """
        entry = self._known.find(inode)
        if entry is None:
            raise StaleId(f"inode {inode} is not known (any more)")
        sync_ms = 0 if force_sync else self._policy.sync_interval_ms
        delivery = await self._running().list_anew(inode if entry.folder else entry.parent, sync_ms)
        await delivery.done.wait()
        return delivery.diff

    async def list_unasked(self, inode: int) -> None:
        """List a folder that no request needs now, within the cap on background listings. Raises as `children` does."""
        while wait_s := self._bucket.take(self._now()):
            await trio.sleep(wait_s)
        await self._running().list_folder(inode)

    # ---- freshness ----

    def _due(self, folder: Folder) -> bool:
        return folder.fresh_until <= self._now()

    def _too_large_to_wait_for(self, folder: Folder) -> bool:
        return (
            folder.state is not None
            and folder.state.entries > PATIENT_ENTRIES
            and self._due(folder)
            and not self._known.outage
        )

    async def _make_fresh(self, folder: Folder) -> None:
        """Return when the folder's listing may be served. Raises what the listing raised when it may not."""
        if not self._due(folder):
            return
        loader, now = self._running(), self._now()
        servable = now < self._known.stale_until(folder)
        if servable and (self._known.outage or self._known.refused(folder.inode)):
            self._stale.inc()
            return
        if not loader.listing(folder.inode):
            self._bucket.take(now, may_owe=True)
        try:
            while True:
                with trio.move_on_after(NO_ANSWER_S if servable else math.inf):
                    await loader.list_folder(folder.inode)
                    return
                if loader.answered_at < self._now() - NO_ANSWER_S:
                    self._known.outage = True
                    self._stale.inc()
                    return
        except Unavailable:
            if self._now() >= self._known.stale_until(folder):
                raise
            self._stale.inc()

    async def _ask_meanwhile(self, folder: Folder, name: bytes) -> Entry:
        """One name of a folder that is not listed yet, or too large to wait for."""
        loader = self._running()
        known = self._known.overlay.child(folder.inode, name)
        if known is not None:
            return await self._current(folder, known.entry)
        if self._known.overlay.missing(folder.inode, name):
            self._negative_hits.inc()
            raise NotFound(f"no {name!r} in inode {folder.inode}")
        loader.list_in_background(folder)
        return await loader.ask(folder.inode, name)

    async def _current(self, folder: Folder, entry: Entry) -> Entry:
        """What has the name of `entry` now. Listed entries are as fresh as their folder; loose and incomplete
        ones are asked for again when their time is over. Raises NotFound."""
        known = self._known.overlay.get(entry.inode)
        if known is None:
            self._known.hits.inc()
            return entry
        now = self._now()
        if entry.completed or entry.folder:
            until = self._policy.fresh_until(folder.rule, known.asked_at, 0.0)
        else:
            until = known.asked_at + INCOMPLETE_ASK_S
        if now < until:
            self._known.hits.inc()
            return known.entry
        stale_until = self._policy.stale_until(folder.rule, known.asked_at)
        if now < min(self._running().quiet_until, stale_until):
            self._stale.inc()
            return known.entry
        try:
            return await self._running().ask(entry.parent, entry.name)
        except Unavailable:
            if self._now() >= stale_until:
                raise
            self._stale.inc()
            return known.entry

    async def _root_entry(self) -> Entry:
        root = self._known.hot(ROOT)
        if root is not None:
            return root
        rule = self._policy.rule_for(self._known.root_path)
        stale_until = self._policy.stale_until(rule, self._known.root_asked_at)
        if self._now() < min(self._running().quiet_until, stale_until):
            self._stale.inc()
            return self.root
        try:
            return await self._running().ask_root()
        except Unavailable:
            if self._now() >= stale_until:
                raise
            self._stale.inc()
            return self.root

    # ---- background tasks ----

    async def _keep_fresh(self) -> NoReturn:
        """List folders in use again a little before they are due."""
        while True:
            folder = self._known.next_to_refresh(self._now())
            if folder is None:
                at = self._known.agenda.next_at()
                # A folder that lands meanwhile is due later than the shortest refresh, so waking up now and
                # then is enough.
                await trio.sleep(TICK_S if at is None else min(TICK_S, max(0.0, at - self._now())))
                continue
            while wait_s := self._bucket.take(self._now()):
                await trio.sleep(wait_s)
            self._running().list_in_background(folder)

    async def _end_outage(self) -> NoReturn:
        """While nobody answers: ask for the mounted folder, not more than once a second, until somebody does."""
        while True:
            await trio.sleep(TICK_S)
            if self._known.outage and self._now() >= self._running().quiet_until:
                try:
                    await self._running().ask_root()
                except FusecacheError as exc:
                    log.debug("still no answer", error=str(exc))

    async def _sweep(self) -> NoReturn:
        """Remove what no listing refers to."""
        while True:
            await self._sweep_wanted.wait()
            self._sweep_wanted = trio.Event()
            try:
                dead = await in_thread(sweep_all, self._store, limiter=trio.CapacityLimiter(1))
            except (StateError, Unavailable) as exc:
                log.warning("the metadata store can't be swept", error=str(exc))
            else:
                for inode in dead:
                    self._known.bury_folder(inode)
                if dead:
                    self._known.announce()

    def _want_sweep(self) -> None:
        self._sweep_wanted.set()

    def _running(self) -> Loader:
        if self._loader is None:
            raise RuntimeError("MetadataTree.run is not running")
        return self._loader


TICK_S = 0.5
"""How late the background refresher may notice a folder's time."""
