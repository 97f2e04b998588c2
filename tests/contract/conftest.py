"""The cluster under test, a client of it, and a folder of its own for each test.

One cluster serves all tests (a real one takes half a minute to start), so every test works in its own folder.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Block, FileStatus, block_id_of
from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from tests.support import alluxio_jars
from tests.support.embedded import WireClient, wait_until
from tests.support.real_alluxio import RealAlluxio

BLOCK_SIZE = 1 << 20
BLOCK_WORKERS = 2
LOCAL_HOST = "127.0.0.1"
"""Where the block worker listens that counts as this node's."""


class Deployment(NamedTuple):
    """Running servers."""

    master: str
    ufs: Path
    tier_folders: tuple[Path, ...]
    """The first is that of this node's block worker."""


class Cluster(NamedTuple):
    """Running servers and what a test needs to use them."""

    client: AlluxioClient
    """This node's block worker is the one at LOCAL_HOST; its tier folder is configured."""
    ufs: Path
    """Folder in the under storage that is this test's alone."""
    root: bytes
    """The same folder as Alluxio path."""
    block_workers: int
    tier_folders: tuple[Path, ...]
    connect: Callable[..., AlluxioClient]
    """Another client: connect(tier_folders=...)."""
    wire: Callable[[str], WireClient]
    """A bare channel to "master", "local" or "other" block worker, without any logic of the client."""
    metrics: Metrics
    """Of `client`."""

    def path(self, name: str) -> bytes:
        """Alluxio path of a name in this test's folder."""
        return self.root + b"/" + os.fsencode(name)

    def budget(self, total_s: float = 60.0) -> Budget:
        """A budget that begins now."""
        return Budget(SystemClock(), total_s)

    def stat(self, name: str, sync_interval_ms: int = -1) -> FileStatus:
        """Status of a name in this test's folder."""
        return self.client.get_status(self.path(name), sync_interval_ms=sync_interval_ms, budget=self.budget())

    def entries(self, name: str = "", sync_interval_ms: int = -1) -> dict[bytes, FileStatus]:
        """Children of a folder below this test's folder, by name."""
        path = self.path(name) if name else self.root
        pieces = self.client.list_status(path, sync_interval_ms=sync_interval_ms, budget=self.budget())
        return {status.name: status for piece in pieces for status in piece}

    def read(self, block: Block, offset: int = 0, length: int | None = None, total_s: float = 60.0) -> bytes:
        """Bytes of a block through the client; back when the block worker has ended the call, and has stored the block
        if it will. (A reader does not wait for that.)"""
        length = block.length - offset if length is None else length
        budget = self.budget(total_s)
        before = self._ended_reads()
        stream = self.client.open_stream(block, offset, length, budget)
        try:
            data = stream.read(length, budget)
        finally:
            stream.close()
        if length:
            wait_until(lambda: self._ended_reads() > before)
        return data

    def _ended_reads(self) -> float:
        cells = self.metrics.snapshot().items()
        return sum(value for name, value in cells if name.startswith("fusecache_rpcs_total{method=ReadBlock"))

    def block_file(self, block: Block, worker: int = 0) -> Path:
        """Where a block worker keeps a block."""
        return self.tier_folders[worker] / "alluxioworker" / str(block.block_id)

    def held(self, block: Block) -> list[bool]:
        """Which block workers keep a block."""
        return [self.block_file(block, worker).exists() for worker in range(self.block_workers)]


def blocks_of(status: FileStatus, *, from_ufs: bool = True) -> list[Block]:
    """Every block of a file as a reader describes it."""
    return [
        Block(
            block_id_of(status.file_id, index),
            min(status.block_size, status.length - index * status.block_size),
            status.locations[index] if status.locations else (),
            status.ufs_path if from_ufs else None,
            index * status.block_size,
            status.mount_id,
            status.in_ufs_tier,
        )
        for index in range(status.block_count)
    ]


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("cluster")
    wanted = os.environ.get("FUSECACHE_TEST_CLUSTER", "embedded")
    if wanted == "real":
        if reason := alluxio_jars.skip_reason():
            pytest.fail(f"real Alluxio servers were asked for, but {reason}")
        with RealAlluxio(folder, block_workers=BLOCK_WORKERS, block_size_bytes=BLOCK_SIZE) as real:
            yield Deployment(real.master, real.ufs, real.tier_folders)
    elif wanted == "embedded":
        yield from embedded(folder)
    else:
        pytest.fail(f"FUSECACHE_TEST_CLUSTER={wanted!r} is not one of embedded, real")


def embedded(folder: Path) -> Iterator[Deployment]:
    """The embedded server as a process of its own, as a mount starts it."""
    ufs = folder / "ufs"
    ufs.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "fusecache", "embedded", str(ufs), "--child"),
            *("--state-dir", str(folder / "state"), "--block-workers", str(BLOCK_WORKERS)),
            *("--block-size-bytes", str(BLOCK_SIZE)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        yield Deployment(ready["master"], ufs, tuple(Path(tier) for tier in ready["tier_folders"]))
    finally:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(timeout=30) == 0


@pytest.fixture
def cluster(deployment: Deployment, tmp_path: Path) -> Iterator[Cluster]:
    number = next(_numbers)
    ufs = deployment.ufs / f"test{number}"
    ufs.mkdir()
    clients: list[AlluxioClient] = []
    wires: list[WireClient] = []

    def connect(*, tier_folders: tuple[Path, ...] = (), metrics: Metrics | None = None) -> AlluxioClient:
        client = AlluxioClient(
            ClusterConfig(
                name="contract",
                masters=(deployment.master,),
                node_hosts=(LOCAL_HOST,),
                tier_folders=tuple(str(folder) for folder in tier_folders),
            ),
            Settings(state_dir=tmp_path, runtime_dir=tmp_path),
            metrics=metrics or Metrics(),
            clock=SystemClock(),
            rng=random.Random(7),
        )
        clients.append(client)
        return client

    metrics = Metrics()
    client = connect(tier_folders=deployment.tier_folders[:1], metrics=metrics)

    def wire(server: str) -> WireClient:
        target = deployment.master
        if server != "master":
            workers = client.block_workers(Budget(SystemClock(), 60.0))
            (target,) = (
                worker.address.target
                for worker in workers
                if (worker.address.host == LOCAL_HOST) == (server == "local")
            )
        connected = WireClient(target)
        wires.append(connected)
        return connected

    root = f"/test{number}".encode()
    yield Cluster(client, ufs, root, BLOCK_WORKERS, deployment.tier_folders, connect, wire, metrics)
    for other in wires:
        other.close()
    for other_client in clients:
        other_client.close()


_numbers = itertools.count(1)
