"""`classic` mode: everything of one mount in one process, under fusermount3, without privileges. The composition root.

    plan -> embedded server (folder SOURCE) -> Alluxio client -> metadata store and tree -> readers -> handlers
         -> mount -> control socket, status over HTTP, upkeep -> ready

`run` returns when the mount is gone, by umount(8) or by a signal, with nothing left behind: no thread that matters, no
child, no descriptor, no mount. Order on the way down: no new requests, what is in flight is answered (at most
GRACE_S), detach, then what served it.

Decides nothing itself: every rule lives in the module it wires.
"""

from __future__ import annotations

import faulthandler
import json
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import structlog
import trio

import fusecache
from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import ClusterIdentity, FileStatus
from fusecache.cache.freshness import DatasetRule, FreshnessPolicy
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, MountedDataset, MountPlan, Settings
from fusecache.daemon import mountpoint as mountpoints
from fusecache.daemon.control_client import mount_lock
from fusecache.daemon.dataset_bytes import DatasetBytes
from fusecache.daemon.embedded_child import EmbeddedChild
from fusecache.daemon.file_context import MetadataFileContext
from fusecache.daemon.mount_control import MountControl
from fusecache.daemon.upkeep import Upkeep
from fusecache.errors import FusecacheError, MountError, NotFound, UsageError
from fusecache.fs.attributes import Attributes
from fusecache.fs.hidden_folder import HiddenFolder
from fusecache.fs.invalidation import Invalidator
from fusecache.fs.operations import Operations
from fusecache.fs.session import Session, may_allow_other, mount_options, set_read_ahead
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers
from fusecache.rpc.budget import Budget
from fusecache.status_http import StatusServer

log = structlog.get_logger(__name__)

GRACE_S = 10.0
"""How long requests in flight may take to finish after SIGTERM; Kubernetes kills after 30 s by default."""

BUSY_S = 0.5
"""A mount that is still busy after this is detached: its name is free for the next mount at once, and what is in flight
goes on being answered."""

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


def run(plan: MountPlan, *, ready: Callable[[], None]) -> None:
    """Serve one mount until it is unmounted or signalled; `ready` is called once reads work.

    Raises FusecacheError (bad plan, cluster unreachable, mount refused) with nothing left mounted.
    """
    faulthandler.register(signal.SIGUSR1)
    with ExitStack() as stack:
        cluster = plan.cluster or _embedded_cluster(plan, stack)
        clock = SystemClock()
        metrics = Metrics()
        metrics.gauge("fusecache_build_info", version=fusecache.__version__).set(1)
        client = AlluxioClient(cluster, plan.settings, metrics=metrics, clock=clock, rng=random.Random())
        stack.callback(client.close)
        identity = client.connect(Budget(clock, min(CONNECT_BUDGET_S, plan.settings.metadata_budget_s)))
        store = MetadataStore(
            plan.settings.state_dir / "metadata",
            identity.cluster_id,
            root_path=plan.path,
            map_bytes=plan.settings.metadata_map_bytes,
        )
        stack.callback(store.close)
        mount = ClassicMount(plan, client, identity, store, metrics=metrics, clock=clock)
        trio.run(mount.serve, ready)


def _embedded_cluster(plan: MountPlan, stack: ExitStack) -> ClusterConfig:
    assert plan.folder is not None
    child = EmbeddedChild(plan.folder, plan.settings.state_dir / "embedded")
    stack.callback(child.stop)
    address = child.start()
    return ClusterConfig(name="embedded", masters=(address.master,), tier_folders=address.tier_folders)


class ClassicMount:
    """One mount, wired."""

    def __init__(
        self,
        plan: MountPlan,
        client: AlluxioClient,
        identity: ClusterIdentity,
        store: MetadataStore,
        *,
        metrics: Metrics,
        clock: SystemClock,
    ) -> None:
        self.plan = plan
        self.identity = identity
        self.metrics = metrics
        settings = plan.settings
        self._client = client
        self._clock = clock
        self._nursery: trio.Nursery | None = None
        self._listing_again: set[int] = set()
        data_threads = trio.CapacityLimiter(settings.data_threads)
        metadata_threads = trio.CapacityLimiter(settings.metadata_threads)
        self.invalidator = Invalidator(metrics)
        self.tree = MetadataTree(
            store,
            root_path=plan.path,
            list_folder=self._list_folder,
            get_status=self._get_status,
            policy=freshness_of(settings, plan.datasets),
            clock=clock,
            rng=random.Random(),
            metrics=metrics,
            limiter=metadata_threads,
            on_change=self.invalidator.change,
            hot_entries=settings.metadata_hot_entries,
        )
        context = MetadataFileContext(self.tree, client, settings, clock, list_again=self._list_again)
        self.readers = Readers(client, context, settings, metrics=metrics, clock=clock, limiter=data_threads)
        self._upkeep = Upkeep(
            client, self.readers, settings, metrics=metrics, clock=clock, limiter=trio.CapacityLimiter(2)
        )
        self.dataset_bytes = DatasetBytes(plan, client, store, self.tree, metrics=metrics, clock=clock)
        self.control = MountControl(self)
        hidden = HiddenFolder(
            {
                b"stats": lambda: metrics.exposition().encode(),
                b"config": lambda: (json.dumps(self.control.describe_config(), indent=2) + "\n").encode(),
                b"version": lambda: f"fusecache {fusecache.__version__}\n".encode(),
            }
        )
        self._operations = Operations(
            self.tree,
            self.readers,
            Attributes(settings),
            hidden,
            metrics=metrics,
            metadata_budget_s=settings.metadata_budget_s,
            capacity=self._upkeep.capacity,
            on_stale_read=self._heal_stale,
        )
        self._session = Session(self._operations, plan.mountpoint, spin_us=settings.spin_us)
        self._device = ""
        """Of our mount (mountinfo's major:minor)."""
        self._ready = metrics.gauge("fusecache_mount_ready")
        self._stopping = False
        self._started_at = self._ticked_at = clock.now()
        self.source = str(plan.folder) if plan.folder else _alluxio_url(plan)
        self.read_ahead_bytes: int | None = None
        """What the kernel was told; None when this process may not set it."""

    def uptime_s(self) -> float:
        """Seconds since the start of this process's mount."""
        return self._clock.now() - self._started_at

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

    @property
    def ready(self) -> bool:
        """True while reads work."""
        return bool(self._ready.value)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Mount, serve, unmount."""
        settings = self.plan.settings
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                # First, so that no signal finds a mount and nobody to take it down.
                await nursery.start(self._watch_signals)
                nursery.start_soon(self._close_client_at_the_end)
                await nursery.start(self.tree.run)
                await self._resolve_root()
                await nursery.start(self.readers.fetcher.run)
                await self._upkeep.refresh_capacity()
                self._mount(settings)
                nursery.start_soon(self._upkeep.run)
                nursery.start_soon(self._tick)
                await nursery.start(self.control.run)
                if self.plan.report_interval_s is not None:
                    nursery.start_soon(self.dataset_bytes.run)
                nursery.start_soon(self._announce, ready)
                with self._status_server(settings):
                    await self._session.serve()
                self._ready.set(0)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _only_error(group) from group
        finally:
            self._ready.set(0)
            self.invalidator.close()
            self._session.close(unmount=self.is_mounted())
            self.readers.close_all()
        log.info("unmounted", mountpoint=str(self.plan.mountpoint))

    def _mount(self, settings: Settings) -> None:
        other_users = may_allow_other() if settings.allow_other is None else settings.allow_other
        # Between `mount_child`'s look at the mount point and now another mount may have come.
        with mountpoints.claim(mount_lock(settings.runtime_dir, self.plan.mountpoint)):
            mountpoints.prepare(self.plan.mountpoint)
            self._session.open(mount_options(settings, self.source, other_users=other_users))
        self.invalidator.start()
        info = mountpoints.find_mount(self.plan.mountpoint)
        self._device = info.device if info is not None else ""
        if info is not None and set_read_ahead(info.device, settings.read_ahead_bytes):
            self.read_ahead_bytes = settings.read_ahead_bytes
        if not other_users:
            log.info("the mount is private to its owner: allow_other needs root or user_allow_other in /etc/fuse.conf")

    def is_mounted(self) -> bool:
        """False once it was taken away; what then lies at the mount point is the next daemon's."""
        info = mountpoints.find_mount(self.plan.mountpoint)
        return info is not None and info.device == self._device

    async def _resolve_root(self) -> None:
        path = self.plan.path.decode("utf-8", "replace")
        try:
            await self.tree.start()
        except NotFound:
            raise UsageError(f"{path}: no such folder in the cluster {self.identity.primary}") from None
        if not self.tree.root.folder:
            raise UsageError(f"{path}: is a file in the cluster {self.identity.primary}; mount the folder it is in")

    async def _announce(self, ready: Callable[[], None]) -> None:
        state = await trio.to_thread.run_sync(mountpoints.probe, self.plan.mountpoint, FIRST_READ_S)
        if state != "ok":
            raise MountError(
                f"{self.plan.mountpoint}: mounted, but the first request is {state} after {FIRST_READ_S:.0f} s"
            )
        self._set_read_ahead(self.plan.settings.read_ahead_bytes)
        self._ready.set(1)
        log.info(
            "mounted",
            mountpoint=str(self.plan.mountpoint),
            source=self.source,
            cluster_id=self.identity.cluster_id,
        )
        ready()

    def _set_read_ahead(self, read_ahead_bytes: int) -> None:
        """After the first answer, not after mount(2): the kernel takes FUSE_INIT's value when its reply comes, and that
        is 128 KiB (requests stayed at 128 KiB, whatever had been set before)."""
        info = mountpoints.find_mount(self.plan.mountpoint)
        if info is not None and set_read_ahead(info.device, read_ahead_bytes):
            self.read_ahead_bytes = read_ahead_bytes

    async def _close_client_at_the_end(self) -> None:
        """Threads that wait for a server would keep the loop for as long as their budgets: closing ends their calls."""
        try:
            await trio.sleep_forever()
        finally:
            self._client.close()

    async def _watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                assert self._nursery is not None
                if self._stopping:
                    log.warning("second signal: ending without waiting", signal=signal.Signals(number).name)
                    self._nursery.cancel_scope.cancel()
                    return
                self._stopping = True
                log.info("ending", signal=signal.Signals(number).name)
                self._nursery.start_soon(self._end)

    async def _end(self) -> None:
        """Unmount while requests are still answered; a busy mount is detached, and said so."""
        assert self._nursery is not None
        outcome = await trio.to_thread.run_sync(mountpoints.unmount, self.plan.mountpoint, BUSY_S)
        if outcome == "unmounted":
            # The kernel ends the session, and with it the nursery, unless some mount namespace got a copy of the mount
            # before (a container's, made with private propagation).
            await trio.sleep(BUSY_S)
            log.warning(
                "unmounted here, but another mount namespace still has the mount: it ends with this process",
                mountpoint=str(self.plan.mountpoint),
            )
        elif outcome == "detached":
            log.warning(
                "the mount is busy: detached, open files end with this process", mountpoint=str(self.plan.mountpoint)
            )
        with trio.move_on_after(GRACE_S):
            while self.metrics.gauge("fusecache_requests_in_flight").value > 0:
                await trio.sleep(0.05)
        self._nursery.cancel_scope.cancel()

    async def _heal_stale(self, inode: int) -> None:
        """A READ met a dead id: drop the kernel's pages of it and list its folder again, so that the path is healed.

        Once the listing has landed the tree does not know the inode, so a reader that tries on costs no more calls.
        """
        self.invalidator.push(("inode", inode, b""))
        with trio.move_on_after(HEAL_S):
            await self._refresh_folder_of(inode)

    def _list_again(self, inode: int) -> None:
        """List the folder of `inode` in the background, once at a time."""
        if self._nursery is not None and inode not in self._listing_again:
            self._listing_again.add(inode)
            self._nursery.start_soon(self._refresh_folder_of, inode)

    async def _refresh_folder_of(self, inode: int) -> None:
        try:
            await self.tree.refresh(inode, force_sync=False)
        except FusecacheError as error:
            log.debug("folder not listed again", inode=inode, error=str(error))  # one a stale READ
        finally:
            self._listing_again.discard(inode)

    def _status_server(self, settings: Settings) -> AbstractContextManager[Any]:
        if settings.metrics_address is None:
            return ExitStack()
        return StatusServer(
            settings.metrics_address,
            exposition=self.metrics.exposition,
            health=self._unhealthy,
            ready=lambda: None if self.ready else "the mount does not serve reads yet",
        )

    def _unhealthy(self) -> str | None:
        """From the HTTP thread: why a restart would help, None when it would not."""
        silent_s = self._clock.now() - self._ticked_at
        return None if silent_s < STUCK_S else f"the event loop has not run for {silent_s:.0f} s"

    async def _tick(self) -> None:
        while True:
            self._ticked_at = self._clock.now()
            await trio.sleep(TICK_S)

    def _list_folder(self, path: bytes, sync_interval_ms: int) -> Iterator[list[FileStatus]]:
        budget = Budget(self._clock, max(LISTING_BUDGET_S, self.plan.settings.metadata_budget_s))
        return self._client.list_status(path, sync_interval_ms=sync_interval_ms, budget=budget)

    def _get_status(self, path: bytes, sync_interval_ms: int) -> FileStatus:
        budget = Budget(self._clock, self.plan.settings.metadata_budget_s)
        return self._client.get_status(path, sync_interval_ms=sync_interval_ms, budget=budget)


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


def _alluxio_url(plan: MountPlan) -> str:
    assert plan.cluster is not None
    return f"alluxio://{','.join(plan.cluster.masters)}{plan.path.decode('utf-8', 'replace')}"


def _only_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """A nursery wraps what its tasks raise; one error is shown as itself, several as the group."""
    leaves: BaseException = group
    while isinstance(leaves, BaseExceptionGroup) and len(leaves.exceptions) == 1:
        leaves = leaves.exceptions[0]
    return leaves
