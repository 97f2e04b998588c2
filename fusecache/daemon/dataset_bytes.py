"""How much of each data set this node can serve by itself, measured in the mount's process.

    names of block files -> block ids -> metadata -> data sets: the bytes that lie in this node's block worker now
    listings of all folders of a data set                     : its total
    the block workers of this node                            : capacity and free bytes

Where the block worker's folders are visible here, what lies in them is the truth; otherwise it is where the listings
say that blocks are. With a controller to report to, data sets are measured each half report interval, and folders
that nobody has listed yet are listed in the background, within the mount's cap on such calls, because a total needs
them all; without, a measurement is made when somebody asks. A measurement runs in a thread of its own, in slices with
pauses between them, and works at most 1 / SHARE of the time, so that reads do not feel it; what came or went since the
one before shows in it.

The arithmetic is `locality.measure` and `locality.totals`; what the node's mounts hold together is put together in
`serve` (`daemon.node_holdings`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import structlog
import trio

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Block, BlockWorkerInfo, block_id_of
from fusecache.cache import record
from fusecache.cache.store import MetadataStore
from fusecache.cache.tables import FolderState
from fusecache.cache.tree import ROOT, MetadataTree
from fusecache.clock import Clock
from fusecache.config.settings import MountedDataset, MountPlan
from fusecache.daemon.block_files import BlockFiles, Tops
from fusecache.daemon.slices import SLICE, every, pause
from fusecache.errors import FusecacheError, NotFound, StaleId, StateError, Unavailable, UpstreamError
from fusecache.locality.measure import block_length
from fusecache.locality.totals import FolderSum, Survey, Totals
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

SHARE = 10
"""After a measurement the next one waits at least so many times as long as its work took."""

SURVEY_S = 30.0
"""Totals are summed up again when a listing changed anything, and after this time, which finds what is to be listed."""

WORKERS_AGE_S = 30.0
"""Capacity and free bytes may be this old; the master's own are 10 s old."""

RELIST_S = 3600.0
"""A folder of a data set that nobody uses is listed again after this time (or its refresh_s, when that is longer): many
nodes share one master. Folders in use are kept fresh anyway. Where block files are not visible, after refresh_s,
because listings then are all there is to know."""

TROUBLE_S = 30.0
"""Pause after a listing that failed."""

LEARN_PAUSE_S = 60.0
"""A block worker whose folders are not visible here is asked again where they are after this time."""

CALL_BUDGET_S = 30.0

FIND_S = 5.0
"""A data set whose folder is not found in this time is taken to be where it was."""


class Measured(NamedTuple):
    """One data set."""

    name: str
    whole: bool
    """It is there, and the mount serves the whole of it, not a part."""
    total_bytes: int
    listed_whole: bool
    local_bytes: int


class Measurement(NamedTuple):
    """All of them, at one moment."""

    at_s: float
    """When it began."""
    source: str
    """`block_files` or `listings`."""
    datasets: tuple[Measured, ...]
    block_workers: tuple[BlockWorkerInfo, ...]


class DatasetBytes:
    """Of one mount. `run` and `describe` on the event loop."""

    def __init__(
        self,
        plan: MountPlan,
        client: AlluxioClient,
        store: MetadataStore,
        tree: MetadataTree,
        *,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._client = client
        self._store = store
        self._tree = tree
        self._clock = clock
        self._limiter = trio.CapacityLimiter(1)
        self._datasets = plan.datasets
        self._tops: list[int | None] = [None] * len(plan.datasets)
        """Inode of each data set's folder; None while there is none."""
        self._learn_at_s = -LEARN_PAUSE_S
        self._block_files = BlockFiles(store, len(plan.datasets), clock)
        self._totals = Totals()
        self._surveys: list[Survey] = []
        self._surveyed_by: object = None
        self._surveyed_at_s = -SURVEY_S
        self._block_workers: tuple[BlockWorkerInfo, ...] = ()
        self._block_workers_at_s = -WORKERS_AGE_S
        self._last: Measurement | None = None
        self._work_s = 0.0
        """CPU time of the last measurement."""
        self._measuring = trio.Lock()
        self._measured = trio.Event()
        """A measurement was made."""
        self._listed = trio.Event()
        """Folders were listed: the next measurement sees more."""
        self._not_before: dict[int, float] = {}
        """Folder that could not be listed -> when to try again."""
        refreshes = "fusecache_metadata_refreshes_total"
        self._changed = metrics.counter(refreshes, result="changed")
        self._unchanged = metrics.counter(refreshes, result="unchanged")
        self._gauges = [
            (
                metrics.gauge("fusecache_locality_dataset_bytes", dataset=dataset.name, what="total"),
                metrics.gauge("fusecache_locality_dataset_bytes", dataset=dataset.name, what="local"),
            )
            for dataset in self._datasets
        ]

    async def run(self) -> NoReturn:
        """Measure and list until cancelled; for a mount whose node reports."""
        assert self._plan.report_interval_s is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._list_all)
            while True:
                self._listed = trio.Event()
                await self._measure()
                await trio.sleep(SHARE * self._work_s)
                with trio.move_on_after(self._plan.report_interval_s / 2):
                    await self._listed.wait()
        raise AssertionError("unreachable: the loop ends by cancellation only")

    async def describe(self, *, ready: bool) -> dict[str, Any]:
        """The answer to the control message `locality`: the last measurement, or one made now when none is made
        regularly."""
        if self._plan.report_interval_s is None:
            await self._measure()
        last = self._last
        return {
            "ready": ready,
            "mountpoint": str(self._plan.mountpoint),
            "measured_age_s": None if last is None else round(self._clock.now() - last.at_s, 3),
            "source": None if last is None else last.source,
            "datasets": [
                {
                    "name": dataset.name,
                    "ready": ready and dataset.whole,
                    "whole": dataset.whole,
                    "total_bytes": dataset.total_bytes,
                    "listed_whole": dataset.listed_whole,
                    "tiers": {"local_block_worker": dataset.local_bytes},
                }
                for dataset in (last.datasets if last is not None else self._unmeasured())
            ],
            "block_workers": [
                {
                    "id": worker.worker_id,
                    "capacity_bytes": worker.capacity_bytes,
                    "used_bytes": worker.used_bytes,
                }
                for worker in (last.block_workers if last is not None else ())
            ],
        }

    def _unmeasured(self) -> Iterator[Measured]:
        for dataset in self._datasets:
            yield Measured(dataset.name, False, 0, False, 0)

    # ---- measuring ----

    async def _measure(self) -> None:
        """One measurement. What can't be measured now keeps its last figure."""
        async with self._measuring:
            try:
                await self._find_tops()
                last = await in_thread(self._measure_in_thread, tuple(self._tops), limiter=self._limiter)
            except (UpstreamError, StateError) as error:
                log.info("data sets not measured", error=str(error))
            except Exception:
                # A bug of ours costs figures, which grow old and then count as nothing, never the mount.
                log.exception("measuring data sets failed")
            else:
                self._last = last
                for measured, (total, local) in zip(last.datasets, self._gauges, strict=True):
                    total.set(measured.total_bytes)
                    local.set(measured.local_bytes)
            self._measured.set()
            self._measured = trio.Event()

    async def _find_tops(self) -> None:
        with trio.move_on_after(FIND_S):
            for number, dataset in enumerate(self._datasets):
                try:
                    self._tops[number] = await self._top_of(dataset)
                except UpstreamError as error:
                    log.info("data set not found now", dataset=dataset.name, error=str(error))

    async def _top_of(self, dataset: MountedDataset) -> int | None:
        """Inode of the data set's folder, or of the mount when that is within it; None when there is none. Raises
        UpstreamError when nobody answers."""
        inode = ROOT
        if not self._served_whole(dataset):
            return inode
        for name in dataset.path.removeprefix(self._plan.path).split(b"/"):
            if name:
                try:
                    entry = self._tree.hot_child(inode, name) or await self._tree.lookup(inode, name)
                except (NotFound, StaleId):
                    return None
                if not entry.folder:
                    return None
                inode = entry.inode
        return inode

    def _served_whole(self, dataset: MountedDataset) -> bool:
        folder = self._plan.path.rstrip(b"/") + b"/"
        return (dataset.path.rstrip(b"/") + b"/").startswith(folder)

    def _measure_in_thread(self, tops: Tops) -> Measurement:
        at_s, began_s = self._clock.now(), time.thread_time()
        self._ask_block_workers()
        self._survey_all(tops)
        folders = self._visible_folders() or self._learn_folders()
        if folders:
            local = self._block_files.weigh(folders, tops, (self._store.entry_count(), self._changed.value))
        else:
            local = tuple(survey.here_bytes for survey in self._surveys)
        self._work_s = time.thread_time() - began_s
        return Measurement(
            at_s,
            "block_files" if folders else "listings",
            tuple(
                Measured(
                    dataset.name,
                    top is not None and self._served_whole(dataset),
                    survey.total_bytes,
                    survey.whole and self._served_whole(dataset),
                    # A block of a version that was replaced a moment ago may still be remembered.
                    min(held_bytes, survey.total_bytes),
                )
                for dataset, top, survey, held_bytes in zip(self._datasets, tops, self._surveys, local, strict=True)
            ),
            self._block_workers,
        )

    def _ask_block_workers(self) -> None:
        now = self._clock.now()
        if now - self._block_workers_at_s < WORKERS_AGE_S:
            return
        self._block_workers_at_s = now
        try:
            found = self._client.own_block_workers(Budget(self._clock, CALL_BUDGET_S), max_age_s=WORKERS_AGE_S)
        except UpstreamError as error:
            log.debug("block workers not known", error=str(error))
            return
        if {worker.worker_id for worker in found} != {worker.worker_id for worker in self._block_workers}:
            self._totals.forget()
            self._surveyed_by = None
        self._block_workers = found

    # ---- totals, from the listings ----

    def _survey_all(self, tops: Tops) -> None:
        listings = (self._store.entry_count(), self._changed.value, self._unchanged.value, tops)
        now = self._clock.now()
        if listings != self._surveyed_by or now - self._surveyed_at_s >= SURVEY_S:
            self._surveys = [self._survey(dataset, top) for dataset, top in zip(self._datasets, tops, strict=True)]
            self._surveyed_by, self._surveyed_at_s = listings, now

    def _survey(self, dataset: MountedDataset, top: int | None) -> Survey:
        if top is None:
            return Survey(0, 0, False, (), None)
        immutable = self._plan.settings.immutable if dataset.immutable is None else dataset.immutable
        refresh_s = self._plan.settings.refresh_s if dataset.refresh_s is None else dataset.refresh_s
        sees_files = self._last is None or self._last.source == "block_files"
        again_s = max(refresh_s, RELIST_S) if sees_files else refresh_s
        boot, now = self._store.boot, self._clock.now()

        def is_old(key: Hashable) -> bool:
            assert isinstance(key, FolderState)
            return not immutable and (key.boot != boot or now - key.asked_at > again_s)

        return self._totals.survey(
            top, key_of=self._folder_state, is_old=is_old, read=self._sum_up, pause=every(SLICE, pause)
        )

    def _folder_state(self, inode: int) -> FolderState | None:
        with self._store.read() as txn:
            return self._store.folder_state(txn, inode)

    def _sum_up(self, folder: int) -> FolderSum:
        """Read one listing, in pieces, so that no transaction stays open for long."""
        own = {worker.worker_id for worker in self._block_workers}
        total_bytes = here_bytes = after = 0
        folders: list[int] = []
        example: tuple[int, int] | None = None
        state = self._folder_state(folder)
        while state is not None:
            with self._store.read() as txn:
                piece = list(islice(self._store.records(txn, state.shelf, after), SLICE))
            if not piece:
                break
            for inode, packed in piece:
                if record.is_folder(packed):
                    folders.append(inode)
                    continue
                total_bytes += record.length_of(packed)
                if record.has_locations(packed):
                    entry = record.decode(inode, folder, packed)
                    for index, holders in enumerate(entry.locations):
                        if not own.isdisjoint(holders):
                            block_id = block_id_of(inode - 1, index)
                            length = block_length(block_id, entry.length, entry.block_size)
                            here_bytes += length
                            example = example or (block_id, length)
            after = piece[-1][0]
            pause()
        return FolderSum(total_bytes, here_bytes, tuple(folders), example)

    # ---- what lies here, from the block files ----

    def _visible_folders(self) -> list[bytes]:
        return [
            folder
            for folder in self._client.block_folders
            if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)
        ]

    def _learn_folders(self) -> list[bytes]:
        """Ask this node's block worker where it keeps a block that the listings place here."""
        example = next((survey.example for survey in self._surveys if survey.example is not None), None)
        now = self._clock.now()
        if example is None or now - self._learn_at_s < LEARN_PAUSE_S:
            return []
        self._learn_at_s = now
        block = Block(*example, locations=(), ufs_path=None, ufs_offset=0, mount_id=0, in_ufs_tier=False)
        descriptor = self._client.learn_local(block, Budget(self._clock, CALL_BUDGET_S))
        if descriptor is None:
            return []
        os.close(descriptor)
        return self._visible_folders()

    # ---- listing what nobody listed ----

    async def _list_all(self) -> NoReturn:
        """List what the last measurement found unlisted or old, then look at the next measurement."""
        while True:
            await self._measured.wait()
            now = self._clock.now()
            self._not_before = {folder: at_s for folder, at_s in self._not_before.items() if at_s > now}
            for folder in [folder for survey in self._surveys for folder in survey.to_list]:
                if folder not in self._not_before:
                    await self._list(folder)

    async def _list(self, folder: int) -> None:
        try:
            await self._tree.list_unasked(folder)
        except StaleId:
            return  # gone meanwhile
        except Unavailable as error:
            log.info("folder of a data set not listed", inode=folder, error=str(error))
            await trio.sleep(TROUBLE_S)
        except FusecacheError as error:
            log.info("folder of a data set can't be listed", inode=folder, error=str(error))
            self._not_before[folder] = self._clock.now() + RELIST_S
        except Exception:
            log.exception("listing a folder of a data set failed", inode=folder)
            self._not_before[folder] = self._clock.now() + RELIST_S
        else:
            self._listed.set()
