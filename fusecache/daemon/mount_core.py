"""What a mount needs beside answering the kernel: its cluster, its metadata, its upkeep, and what it tells of itself.

    Alluxio client -> metadata store and tree -> data set sizes, touching, capacity -> control socket, status over HTTP

In `classic` mode this is a part of the one process (`daemon.classic`), otherwise it is the agent (`daemon.agent`): the
same code, other wiring. What differs comes in: how the kernel is told to forget (`notify`), which blocks were served
(`take_served`), and what status and metrics say of other processes (`MountCore.describe`, `MountCore.measure`).

Mounts nothing and answers no request.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import structlog
import trio

import fusecache
from fusecache import logs
from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import ClusterIdentity, FileStatus
from fusecache.cache.board import BoardWriter
from fusecache.cache.freshness import DatasetRule, FreshnessPolicy
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.clock import SystemClock
from fusecache.config.settings import LogLevel, MountedDataset, MountPlan, Settings
from fusecache.daemon import mountpoint as mountpoints
from fusecache.daemon.dataset_bytes import DatasetBytes
from fusecache.daemon.mount_control import MountControl
from fusecache.daemon.own_folders import metadata_folder
from fusecache.daemon.upkeep import Upkeep
from fusecache.errors import FusecacheError, MountError, NotFound, UsageError
from fusecache.fs.invalidation import Invalidator, Push
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from fusecache.status_http import StatusServer
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

CONNECT_BUDGET_S = 30.0
"""A mount that can't reach its cluster says so after this time (commands have 30 s)."""

LISTING_BUDGET_S = 600.0
"""One listing may take longer than a request may wait for it: Alluxio needs minutes for the first listing of a folder
of a million files. Whoever waits gets EIO after metadata_budget_s, and finds the listing done later."""

TICK_S = 5.0
STUCK_S = 30.0
"""/healthz turns bad when the event loop, which ticks every TICK_S, has not run for this long."""

HEAL_S = 5.0
"""A READ that is answered ESTALE waits this long for its folder's new listing."""

FIRST_READ_S = 30.0
"""A mount that does not answer a stat this long after mount(2) is taken for broken."""


class Cluster:
    """A connected cluster with its metadata store; both end with the stack they were made on."""

    def __init__(self, plan: MountPlan, stack: ExitStack, *, metrics: Metrics, clock: SystemClock) -> None:
        """Connect and open. Raises FusecacheError: unreachable, refused, the state folder."""
        assert plan.cluster is not None
        self.client = AlluxioClient(plan.cluster, plan.settings, metrics=metrics, clock=clock, rng=random.Random())
        stack.callback(self.client.close)
        budget_s = min(CONNECT_BUDGET_S, plan.settings.metadata_budget_s)
        self.identity: ClusterIdentity = self.client.connect(Budget(clock, budget_s))
        self.store = MetadataStore(
            metadata_folder(plan.settings),
            self.identity.cluster_id,
            root_path=plan.path,
            map_bytes=plan.settings.metadata_map_bytes,
        )
        stack.callback(self.store.close)


class MountCore:
    """See the module. Event loop only, but for the callables given to it."""

    def __init__(
        self,
        plan: MountPlan,
        cluster: Cluster,
        *,
        metrics: Metrics,
        clock: SystemClock,
        notify: Callable[[Push], None],
        take_served: Callable[[int], Awaitable[list[int]]],
        board: BoardWriter | None = None,
    ) -> None:
        """`board`: where other processes see that the metadata changed; None = there are none."""
        self.plan = plan
        self.identity = cluster.identity
        self.metrics = metrics
        self.client = cluster.client
        self.clock = clock
        settings = plan.settings
        self.source = plan.source
        self.invalidator = Invalidator(metrics, notify)
        self.tree = MetadataTree(
            cluster.store,
            root_path=plan.path,
            list_folder=self._list_folder,
            get_status=self._get_status,
            policy=freshness_of(settings, plan.datasets),
            clock=clock,
            rng=random.Random(),
            metrics=metrics,
            limiter=trio.CapacityLimiter(settings.metadata_threads),
            on_change=self.invalidator.change,
            hot_entries=settings.metadata_hot_entries,
            board=board,
        )
        self.upkeep = Upkeep(
            self.client, take_served, settings, metrics=metrics, clock=clock, limiter=trio.CapacityLimiter(2)
        )
        self.dataset_bytes = DatasetBytes(plan, self.client, cluster.store, self.tree, metrics=metrics, clock=clock)
        self.control = MountControl(self)
        self.device = ""
        """Of our mount (mountinfo's major:minor)."""
        self._ready = metrics.gauge("fusecache_mount_ready")
        self._started_at = self._ticked_at = clock.now()
        self._nursery: trio.Nursery | None = None
        self._listing_again: set[int] = set()

    @property
    def ready(self) -> bool:
        """True while reads work."""
        return bool(self._ready.value)

    @ready.setter
    def ready(self, value: bool) -> None:
        self._ready.set(int(value))

    def uptime_s(self) -> float:
        """Seconds since the start of this process's mount."""
        return self.clock.now() - self._started_at

    async def describe(self) -> dict[str, Any]:
        """What `status` says beyond the cluster: how the kernel is served."""
        return {"open_mode": self.plan.settings.open_mode}

    async def measure(self) -> Metrics:
        """All metrics of the mount."""
        return self.metrics

    async def set_log_level(self, level: LogLevel) -> None:
        """From now on."""
        logs.set_level(level)

    def is_mounted(self) -> bool:
        """False once it was taken away; what then lies at the mount point is the next daemon's."""
        info = mountpoints.find_mount(self.plan.mountpoint)
        return info is not None and info.device == self.device

    async def prepare(self, nursery: trio.Nursery) -> None:
        """Everything that can fail before there is a mount: metadata, the mounted folder, the cluster's capacity.

        Raises UsageError (no such folder, a file) and what Alluxio says.
        """
        self._nursery = nursery
        nursery.start_soon(self._tick)
        nursery.start_soon(self._close_client_at_the_end)
        await nursery.start(self.tree.run)
        path = self.plan.path.decode("utf-8", "replace")
        try:
            await self.tree.start()
        except NotFound:
            raise UsageError(f"{path}: no such folder in the cluster {self.identity.primary}") from None
        if not self.tree.root.folder:
            raise UsageError(f"{path}: is a file in the cluster {self.identity.primary}; mount the folder it is in")
        await self.upkeep.refresh_capacity()

    async def run(self, nursery: trio.Nursery, mounted: mountpoints.MountInfo | None, listener: socket.socket) -> None:
        """Once there is a mount: pushes, upkeep, the control socket (`listener`, which is taken over)."""
        self.device = mounted.device if mounted is not None else ""
        self.invalidator.start()
        nursery.start_soon(self.upkeep.run)
        await nursery.start(self.control.run, listener)
        if self.plan.report_interval_s is not None:
            nursery.start_soon(self.dataset_bytes.run)

    async def announce(self, ready: Callable[[], None]) -> None:
        """Look at the mount once from outside; then it is ready. MountError when it does not answer."""
        await self.look()
        self.ready = True
        log.info(
            "mounted", mountpoint=str(self.plan.mountpoint), source=self.source, cluster_id=self.identity.cluster_id
        )
        ready()

    async def look(self) -> None:
        """Ask the kernel about the mount, and read a first file. MountError when that does not work.

        From then on the kernel knows that FLUSH is not wanted (and OPEN, in no-open mode). Otherwise the first close(2)
        may be the one that meets the end of the mount, and fail.
        """
        mountpoint = self.plan.mountpoint
        state = await in_thread(mountpoints.probe, mountpoint, FIRST_READ_S)
        if state != "ok":
            raise MountError(f"{mountpoint}: mounted, but the first request is {state} after {FIRST_READ_S:.0f} s")
        first = mountpoint / ".fusecache" / "version"
        if await in_thread(mountpoints.read_inside, first, FIRST_READ_S) is None:
            raise MountError(f"{first}: can't be read in the new mount")

    async def find(self, parent: int, name: bytes, *, last: bool) -> int | None:
        """Inode of folder `name` in `parent`; None when `last` and it is a file or missing."""
        try:
            entry = await self.tree.lookup(parent, name)
        except NotFound:
            if last:
                return None
            raise
        if not entry.folder:
            if last:
                return None
            raise UsageError(f"{name.decode('utf-8', 'replace')!r} is a file, not a folder")
        return entry.inode

    async def heal_stale(self, inode: int) -> None:
        """A READ met a dead id: drop the kernel's pages of it and list its folder again, so that the path is healed.

        Once the listing has landed the tree does not know the inode, so a reader that tries on costs no more calls.
        """
        self.invalidator.push(("inode", inode, b""))
        with trio.move_on_after(HEAL_S):
            await self._refresh_folder_of(inode)

    def list_again(self, inode: int) -> None:
        """List the folder of `inode` in the background, once at a time."""
        if self._nursery is not None and inode not in self._listing_again:
            self._listing_again.add(inode)
            self._nursery.start_soon(self._refresh_folder_of, inode)

    def status_server(self, settings: Settings, exposition: Callable[[], str]) -> AbstractContextManager[Any]:
        """/metrics, /healthz and /readyz while it is entered; nothing without `metrics_address`."""
        if settings.metrics_address is None:
            return ExitStack()
        return StatusServer(
            settings.metrics_address,
            exposition=exposition,
            health=self._unhealthy,
            ready=lambda: None if self.ready else "the mount does not serve reads yet",
        )

    async def _refresh_folder_of(self, inode: int) -> None:
        try:
            await self.tree.refresh(inode, force_sync=False)
        except FusecacheError as error:
            log.debug("folder not listed again", inode=inode, error=str(error))  # one a stale READ
        finally:
            self._listing_again.discard(inode)

    async def _close_client_at_the_end(self) -> None:
        """Threads that wait for a server would keep the loop for as long as their budgets: closing ends their calls."""
        try:
            await trio.sleep_forever()
        finally:
            self.client.close()

    def _unhealthy(self) -> str | None:
        """From the HTTP thread: why a restart would help, None when it would not."""
        silent_s = self.clock.now() - self._ticked_at
        return None if silent_s < STUCK_S else f"the event loop has not run for {silent_s:.0f} s"

    async def _tick(self) -> None:
        while True:
            self._ticked_at = self.clock.now()
            await trio.sleep(TICK_S)

    def _list_folder(self, path: bytes, sync_interval_ms: int) -> Iterator[list[FileStatus]]:
        budget = Budget(self.clock, max(LISTING_BUDGET_S, self.plan.settings.metadata_budget_s))
        return self.client.list_status(path, sync_interval_ms=sync_interval_ms, budget=budget)

    def _get_status(self, path: bytes, sync_interval_ms: int) -> FileStatus:
        budget = Budget(self.clock, self.plan.settings.metadata_budget_s)
        return self.client.get_status(path, sync_interval_ms=sync_interval_ms, budget=budget)


def build_info(metrics: Metrics) -> None:
    """The version, as a metric."""
    metrics.gauge("fusecache_build_info", version=fusecache.__version__).set(1)


def freshness_of(settings: Settings, datasets: Sequence[MountedDataset] = ()) -> FreshnessPolicy:
    """The settings about age, with the data sets that have their own."""
    return FreshnessPolicy(
        refresh_s=settings.refresh_s,
        immutable=settings.immutable,
        immutable_kernel_timeout_s=settings.immutable_kernel_timeout_s,
        stale_if_error_s=settings.stale_if_error_s,
        negative_s=settings.negative_s,
        sync_interval_s=settings.sync_interval_s,
        refresh_calls_per_s=settings.refresh_calls_per_s,
        datasets=tuple(DatasetRule(d.path, d.immutable, d.refresh_s) for d in datasets),
    )


def only_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """A nursery wraps what its tasks raise; one error is shown as itself, several as the group."""
    leaves: BaseException = group
    while isinstance(leaves, BaseExceptionGroup) and len(leaves.exceptions) == 1:
        leaves = leaves.exceptions[0]
    return leaves
