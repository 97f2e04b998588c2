"""`classic` mode: everything of one mount in one process, under fusermount3, without privileges. The composition root.

    plan -> embedded server (folder SOURCE) -> `MountCore` (cluster, metadata, upkeep) -> readers -> handlers
         -> mount -> control socket, status over HTTP -> ready

`run` returns when the mount is gone, by umount(8) or by a signal, with nothing left behind: no thread that matters, no
child, no descriptor, no mount. Order on the way down: no new requests, what is in flight is answered (at most
GRACE_S), detach, then what served it.

Decides nothing itself: every rule lives in the module it wires.
"""

from __future__ import annotations

import faulthandler
import json
import signal
from collections.abc import Callable
from contextlib import ExitStack

import structlog
import trio

import fusecache
from fusecache.cache.record import Entry
from fusecache.clock import SystemClock
from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon import mountpoint as mountpoints
from fusecache.daemon.control_client import mount_lock
from fusecache.daemon.embedded_child import with_embedded
from fusecache.daemon.file_context import MetadataFileContext
from fusecache.daemon.mount_core import Cluster, MountCore, build_info, only_error
from fusecache.fs.attributes import Attributes
from fusecache.fs.hidden_folder import HiddenFolder
from fusecache.fs.operations import Operations
from fusecache.fs.session import Session, mount_options, notify, set_read_ahead
from fusecache.kernel.control_listener import ControlListener
from fusecache.kernel.signals import has_terminal
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers

log = structlog.get_logger(__name__)

GRACE_S = 10.0
"""How long requests in flight may take to finish after SIGTERM; Kubernetes kills after 30 s by default."""

SPIN_US = 100
"""Microseconds, where nothing is set."""

BUSY_S = 0.5
"""A mount that is still busy after this is detached: its name is free for the next mount at once, and what is in flight
goes on being answered."""


def run(plan: MountPlan, *, ready: Callable[[], None]) -> None:
    """Serve one mount until it is unmounted or signalled; `ready` is called once reads work.

    Raises FusecacheError (bad plan, cluster unreachable, mount refused) with nothing left mounted.
    """
    faulthandler.register(signal.SIGUSR1)
    with ExitStack() as stack:
        plan = with_embedded(plan, stack)
        clock = SystemClock()
        metrics = Metrics()
        build_info(metrics)
        cluster = Cluster(plan, stack, metrics=metrics, clock=clock)
        trio.run(ClassicMount(plan, cluster, metrics=metrics, clock=clock).serve, ready)


def _never_confirmed(entry: Entry, fd: int) -> bool:
    """A reader that ends with its last RELEASE seldom meets a block that was stored while it was open."""
    return False


class ClassicMount(MountCore):
    """One mount, wired."""

    def __init__(self, plan: MountPlan, cluster: Cluster, *, metrics: Metrics, clock: SystemClock) -> None:
        super().__init__(plan, cluster, metrics=metrics, clock=clock, notify=notify, take_served=self._take_served)
        settings = plan.settings
        self._mount_nursery: trio.Nursery | None = None
        context = MetadataFileContext(
            self.tree, self.client, settings, clock, list_again=self.list_again, confirm_stored=_never_confirmed
        )
        self.readers = Readers(
            self.client,
            context,
            settings,
            metrics=metrics,
            clock=clock,
            limiter=trio.CapacityLimiter(settings.data_threads),
        )
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
            capacity=self.upkeep.capacity,
            on_stale_read=self.heal_stale,
        )
        self._session = Session(
            self._operations, plan.mountpoint, spin_us=SPIN_US if settings.spin_us is None else settings.spin_us
        )
        self._control: ControlListener | None = None
        self._stopping = False
        self._read_ahead_bytes: int | None = None
        """What the kernel was told; None when this process may not set it."""

    async def describe(self) -> dict[str, object]:
        """For `status`."""
        return {**await super().describe(), "read_ahead_bytes": self._read_ahead_bytes}

    async def serve(self, ready: Callable[[], None]) -> None:
        """Mount, serve, unmount."""
        settings = self.plan.settings
        try:
            async with trio.open_nursery() as nursery:
                self._mount_nursery = nursery
                # First, so that no signal finds a mount and nobody to take it down.
                await nursery.start(self._watch_signals)
                await self.prepare(nursery)
                await nursery.start(self.readers.fetcher.run)
                self._mount(settings)
                self._control = ControlListener(self.control.path)
                await self.run(nursery, mountpoints.find_mount(self.plan.mountpoint), self._control.socket)
                nursery.start_soon(self._answer_first, ready)
                with self.status_server(settings, self.metrics.exposition):
                    await self._session.serve()
                self.ready = False
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_error(group) from group
        finally:
            self.ready = False
            self.invalidator.close()
            self._session.close(unmount=self.is_mounted())
            self.readers.close_all()
            if self._control is not None:
                self._control.close()
        log.info("unmounted", mountpoint=str(self.plan.mountpoint))

    def _mount(self, settings: Settings) -> None:
        other_users = mountpoints.may_allow_other() if settings.allow_other is None else settings.allow_other
        # Between `mount_child`'s look at the mount point and now another mount may have come.
        with mountpoints.claim(mount_lock(settings.runtime_dir, self.plan.mountpoint)):
            if mountpoints.prepare(self.plan.mountpoint):
                raise mountpoints.occupied(self.plan.mountpoint)
            self._session.open(mount_options(settings, self.source, other_users=other_users))
        if not other_users:
            log.info("the mount is private to its owner: allow_other needs root or user_allow_other in /etc/fuse.conf")

    async def _answer_first(self, ready: Callable[[], None]) -> None:
        await self.announce(lambda: None)
        # After the first answer, not after mount(2): the kernel takes FUSE_INIT's value when its reply comes, and that
        # is 128 KiB (requests stayed at 128 KiB, whatever had been set before).
        if set_read_ahead(self.device, self.plan.settings.read_ahead_bytes):
            self._read_ahead_bytes = self.plan.settings.read_ahead_bytes
        ready()

    async def _take_served(self, most: int) -> list[int]:
        return self.readers.take_served(most)

    async def _watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        hang_up_ends = has_terminal()
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, *hang_up) as signals:
            task_status.started()
            async for number in signals:
                assert self._mount_nursery is not None
                if number == signal.SIGHUP and not hang_up_ends:
                    log.error("not reloaded: a mount in classic mode keeps its settings until it is mounted anew")
                    continue
                if self._stopping:
                    log.warning("second signal: ending without waiting", signal=signal.Signals(number).name)
                    self._mount_nursery.cancel_scope.cancel()
                    return
                self._stopping = True
                log.info("ending", signal=signal.Signals(number).name)
                self._mount_nursery.start_soon(self._end)

    async def _end(self) -> None:
        """Unmount while requests are still answered; a busy mount is detached, and said so."""
        assert self._mount_nursery is not None
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
        self._mount_nursery.cancel_scope.cancel()
