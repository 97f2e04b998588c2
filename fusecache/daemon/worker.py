"""A worker of a mount behind the gate: pyfuse3 over a socket, reads and look-ups. The composition root.

    requests from the gate -> handlers -> the node's view of the metadata (`remote_tree`), block files, block workers
                           -> answers; READ data in shared slots; block files for passthrough as offers

Workers are alike: the gate gives a request to any of them, and to another one when this one dies. What a worker keeps
(decoded entries, open readers) it can lose.

Mounts nothing, lists nothing, pushes nothing: the agent does.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
import trio

from fusecache import logs
from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Capacity
from fusecache.cache.board import BoardReader
from fusecache.clock import SystemClock
from fusecache.config.settings import MountPlan
from fusecache.daemon.comparisons import Comparisons
from fusecache.daemon.file_context import MetadataFileContext
from fusecache.daemon.gated import from_memfd
from fusecache.daemon.mount_child import raise_open_files
from fusecache.daemon.mount_core import freshness_of
from fusecache.daemon.passthrough_offers import PassthroughOffers
from fusecache.daemon.remote_tree import RemoteTree
from fusecache.errors import FusecacheError, Unavailable
from fusecache.fs.attributes import Attributes
from fusecache.fs.gated_operations import HIDDEN_FILE_BYTES, GatedOperations
from fusecache.fs.hidden_folder import HiddenFolder
from fusecache.fs.session import Session
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.reply_slots import WorkerSlots
from fusecache.kernel.unread import has_unread
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers

log = structlog.get_logger(__name__)

CAPACITY_S = 10.0
"""How often the cluster's capacity for statfs is asked of the agent, who asks the master once a minute."""

SERVED_S = 5.0
"""How often blocks that were opened directly are told to the agent, who touches them."""

MOST_SERVED = 1_000
HIDDEN_FILES = (b"stats", b"config", b"version")


class Worker:
    """One worker, wired."""

    def __init__(self, plan: MountPlan, flags: argparse.Namespace, stack: ExitStack) -> None:
        # The setting is the mount's; each worker has its share of it.
        own_buffer_bytes = plan.settings.read_buffer_bytes // plan.settings.workers
        settings = plan.settings.model_copy(update={"read_buffer_bytes": own_buffer_bytes})
        assert plan.cluster is not None
        clock = SystemClock()
        metrics = Metrics()
        client = AlluxioClient(plan.cluster, settings, metrics=metrics, clock=clock, rng=random.Random())
        stack.callback(client.close)
        board = BoardReader(flags.epoch_fd)
        stack.callback(board.close)
        self._tree = RemoteTree(
            flags.agent_socket,
            board=board,
            index=flags.index,
            root_path=plan.path,
            policy=freshness_of(settings, plan.datasets),
            clock=clock,
            metrics=metrics,
            metadata_budget_s=settings.metadata_budget_s,
            hot_entries=settings.metadata_hot_entries,
        )
        stack.callback(self._tree.close)
        self._comparisons = Comparisons(self._tree, clock)
        context = MetadataFileContext(
            self._tree,
            client,
            settings,
            clock,
            list_again=self._tree.list_again,
            confirm_stored=self._comparisons.confirm,
        )
        limiter = trio.CapacityLimiter(settings.data_threads)
        self._readers = Readers(client, context, settings, metrics=metrics, clock=clock, limiter=limiter)
        self._client = client
        self._capacity = Capacity(0, 0)
        self._offers = PassthroughOffers(flags.offers_fd, self._comparisons)
        stack.callback(self._offers.close)
        operations = GatedOperations(
            self._tree,
            self._readers,
            Attributes(settings, opened_unasked=flags.open_mode == "no-open"),
            HiddenFolder(dict.fromkeys(HIDDEN_FILES, _never), shown_bytes=HIDDEN_FILE_BYTES),
            metrics=metrics,
            metadata_budget_s=settings.metadata_budget_s,
            capacity=lambda: self._capacity,
            on_stale_read=self._tree.heal_stale,
            slots=WorkerSlots(flags.slots_fd, lambda: not has_unread(flags.requests_fd)),
            offer=self._offers.offer,
            hidden_content=self._hidden_content,
        )
        self._requests_fd = flags.requests_fd
        # The gate spins, where that is asked for: two processes that look for work take it from the application's.
        self._session = Session(operations, plan.mountpoint, spin_us=0)

    async def serve(self) -> None:
        """Until the gate closes the socket."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._tree.run)
            await self._tree.start()
            await nursery.start(self._readers.fetcher.run)
            nursery.start_soon(self._comparisons.run)
            nursery.start_soon(self._watch_capacity)
            nursery.start_soon(self._tell_served)
            nursery.start_soon(self._close_client_at_the_end)
            self._session.attach(self._requests_fd)
            try:
                await self._session.serve()
            finally:
                self._session.close(unmount=False)
                self._readers.close_all()
                nursery.cancel_scope.cancel()

    async def _hidden_content(self, name: bytes) -> bytes:
        answer = await self._tree.ask("hidden", name=name.decode())
        return str(answer["content"]).encode()

    async def _watch_capacity(self) -> None:
        while True:
            try:
                answer = await self._tree.ask("capacity")
                self._capacity = Capacity(**answer)
            except (FusecacheError, TypeError) as error:
                log.debug("capacity not known", error=str(error))
            await trio.sleep(CAPACITY_S)

    async def _tell_served(self) -> None:
        while True:
            await trio.sleep(SERVED_S)
            blocks = self._readers.take_served(MOST_SERVED)
            if blocks:
                try:
                    await self._tree.ask("served", blocks=blocks)
                except Unavailable as error:
                    log.debug("served blocks were not told", error=str(error))

    async def _close_client_at_the_end(self) -> None:
        """Threads that wait for a server would keep the loop for as long as their budgets."""
        try:
            await trio.sleep_forever()
        finally:
            self._client.close()


def _never() -> bytes:
    raise AssertionError("the content of hidden files comes from the agent")


def main(arguments: Sequence[str]) -> int:
    """The exit code; 0 when the gate closed the socket."""
    parser = argparse.ArgumentParser(prog="fusecache.daemon.worker", description=__doc__, add_help=False)
    for flag in ("--index", "--requests-fd", "--slots-fd", "--offers-fd", "--plan-fd", "--epoch-fd"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--agent-socket", type=Path, required=True)
    parser.add_argument("--open-mode", choices=("no-open", "passthrough"), required=True)
    parser.add_argument("--device-number", required=True)
    flags = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()  # the supervisor ends a stuck worker by ABRT
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = from_memfd(flags.plan_fd, MountPlan)
    set_process_name(f"worker {flags.index}", str(plan.mountpoint))
    logs.configure(plan.settings.log_level, plan.settings.log_format)
    raise_open_files(plan.settings.max_open_blocks)
    with ExitStack() as stack:
        worker = Worker(plan, flags, stack)
        trio.run(worker.serve)
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main(sys.argv[1:]))
