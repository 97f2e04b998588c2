"""Agent and worker as processes of their own: one is killed, the other goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio
from trio.testing import MockClock

from fusecache.cache.board import BoardReader
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.tree import ROOT
from fusecache.clock import SystemClock
from fusecache.daemon.remote_tree import RemoteTree
from fusecache.metrics import Metrics
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t3_operations import remote_rig

FILES = 200
WAIT_S = 30.0

AGENT = """
import random, sys
from pathlib import Path
import trio
from fusecache import logs
from fusecache.cache.board import BoardWriter
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.clock import SystemClock
from fusecache.daemon.metadata_service import MetadataService
from fusecache.metrics import Metrics
from tests.t3_operations.test_metadata_processes import files
logs.configure("error")
folder, board_fd = Path(sys.argv[1]), int(sys.argv[2])
model = files()

async def heal(inode):
    pass

async def main():
    board = BoardWriter(board_fd)
    with MetadataStore(folder / "metadata", "cluster", root_path=b"/", map_bytes=64 << 20) as store:
        tree = MetadataTree(
            store, root_path=b"/", list_folder=model.list_folder, get_status=model.get_status,
            policy=FreshnessPolicy(), clock=SystemClock(), rng=random.Random(), metrics=Metrics(),
            limiter=trio.CapacityLimiter(4), on_change=lambda change: None, board=board,
        )
        service = MetadataService(
            folder / "run" / "agent.sock", tree, store, metrics=Metrics(), metadata_budget_s=30.0,
            on_stale_read=heal, list_again=lambda inode: None,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            await tree.start()
            await nursery.start(service.run)
            print("ready", flush=True)
            await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()

trio.run(main)
"""

WORKER = """
import sys, socket
from fusecache.cache.board import StoreIdentity
from fusecache.cache.read_only_store import ReadOnlyStore
from fusecache.daemon import agent_messages
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(agent_messages.frame({"tell": "hello", "index": 5, "pid": 1, "token": "t"}))
store = ReadOnlyStore()
store.follow(StoreIdentity(*eval(sys.argv[2])))
with store.read() as txn:
    store.entry(txn, 2)
    print("reading", flush=True)
    sys.stdin.read()
"""


def files() -> AlluxioModel:
    """A small data set; every process that makes it has the same ids."""
    model = AlluxioModel()
    model.mkdir(b"/d")
    for number in range(FILES):
        model.write(b"/d/f%03d" % number, number)
    return model


@contextmanager
def agent_process(folder: Path, board_fd: int) -> Iterator[subprocess.Popen[str]]:
    """An agent that is ready."""
    command = [sys.executable, "-c", AGENT, str(folder), str(board_fd)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[board_fd]
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def worker(folder: Path, board_fd: int) -> AsyncIterator[RemoteTree]:
    """This process as a worker."""
    board = BoardReader(board_fd)
    tree = RemoteTree(
        folder / "run" / "agent.sock",
        board=board,
        index=0,
        root_path=b"/",
        policy=FreshnessPolicy(),
        clock=SystemClock(),
        metrics=Metrics(),
        metadata_budget_s=WAIT_S,
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            yield tree
            nursery.cancel_scope.cancel()
    finally:
        tree.close()
        board.close()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WAIT_S):
        while not condition():
            await trio.sleep(0.005)


async def test_agents_are_killed_one_after_the_other_and_no_request_fails(tmp_path: Path) -> None:
    board_fd = os.memfd_create("board")
    expected = {name: (node.file_id + 1, node.length) for name, node in files().node(b"/d").children.items()}
    answered: list[bytes] = []

    async def look_up_all(tree: RemoteTree) -> None:
        """As the kernel does, from the root, whoever answers."""
        for name, (inode, length) in expected.items():
            folder = tree.hot_child(ROOT, b"d") or await tree.lookup(ROOT, b"d")
            entry = tree.hot_child(folder.inode, name) or await tree.lookup(folder.inode, name)
            assert (entry.inode, entry.length) == (inode, length)
            assert (await tree.getattr(inode)).length == length
            assert tree.path(inode) == b"/d/" + name
            assert not tree.superseded(inode)
            answered.append(name)
            await trio.sleep(0)

    try:
        async with worker(tmp_path, board_fd) as tree:
            for life in range(2):
                with agent_process(tmp_path, board_fd) as agent:
                    async with trio.open_nursery() as nursery:
                        before = len(answered)
                        for _ in range(2):
                            nursery.start_soon(look_up_all, tree)
                        await until(lambda before=before: len(answered) > before + 3)  # type: ignore[misc]
                        os.kill(agent.pid, signal.SIGKILL)
                        await trio.to_thread.run_sync(agent.wait)
                        with agent_process(tmp_path, board_fd) as next_agent:
                            await until(lambda life=life: len(answered) == 2 * FILES * (life + 1))  # type: ignore[misc]
                            assert next_agent.poll() is None
                assert agent.returncode == -signal.SIGKILL
            # By now the folder is listed, and nobody is left to ask.
            assert await tree.children(ROOT, 0, 10) != []
    finally:
        os.close(board_fd)
    assert len(answered) == 4 * FILES


async def test_reader_slot_of_a_killed_worker_is_freed_by_the_agent(tmp_path: Path, mock_clock: MockClock) -> None:
    with remote_rig.shared_mount(tmp_path, files(), mock_clock) as mount:
        async with mount.living_agent() as agent:
            command = [sys.executable, "-c", WORKER, str(mount.socket), repr(tuple(agent.store.identity()))]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                line = await trio.to_thread.run_sync(process.stdout.readline)
                assert line == "reading\n"

                def slots() -> str:
                    return str(agent.store._environment.readers())

                assert str(process.pid) in slots()
                os.kill(process.pid, signal.SIGKILL)
                await trio.to_thread.run_sync(process.wait)
                while str(process.pid) in slots():  # the test's own timeout ends a wait in vain
                    mock_clock.jump(0.5)
                    await trio.to_thread.run_sync(lambda: None)
                assert agent.service.workers() == []
