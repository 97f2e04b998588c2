"""A scripted cluster and a client for it, closed after each test."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Block, FileStatus, block_id_of
from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from tests.support.scripted_alluxio import ScriptedAlluxio

MakeClient = Callable[..., AlluxioClient]
"""make_client(*masters, settings={...}, **cluster fields)."""

IMPATIENT: dict[str, Any] = {"stall_s": 10.0, "connect_s": 5.0, "rpc_try_s": 5.0}
"""Limits of tests, long enough for a busy machine; a test that runs into one on purpose sets it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for an embedded server."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def budget(clock: SystemClock) -> Budget:
    """Enough for anything that works."""
    return Budget(clock, 30.0)


@pytest.fixture
def short(clock: SystemClock) -> Callable[[], Budget]:
    """A fresh budget for something that is to fail."""
    return lambda: Budget(clock, 1.5)


@pytest.fixture
def servers() -> Iterator[list[ScriptedAlluxio]]:
    """Servers put here are stopped after the test."""
    found: list[ScriptedAlluxio] = []
    yield found
    for server in found:
        server.stop()


@pytest.fixture
def master(servers: list[ScriptedAlluxio]) -> ScriptedAlluxio:
    """A running master without block workers."""
    server = ScriptedAlluxio().start()
    servers.append(server)
    return server


@pytest.fixture
def worker(master: ScriptedAlluxio, servers: list[ScriptedAlluxio]) -> ScriptedAlluxio:
    """Block worker 1."""
    return add_worker(master, servers, 1)


@pytest.fixture
def second(master: ScriptedAlluxio, servers: list[ScriptedAlluxio]) -> ScriptedAlluxio:
    """Block worker 2."""
    return add_worker(master, servers, 2)


def add_worker(
    master: ScriptedAlluxio, servers: list[ScriptedAlluxio], worker_id: int, **fields: Any
) -> ScriptedAlluxio:
    server = ScriptedAlluxio().start()
    servers.append(server)
    master.add_worker(server, worker_id, **fields)
    return server


@pytest.fixture
def make_client(metrics: Metrics, clock: SystemClock, tmp_path: Path) -> Iterator[MakeClient]:
    """Clients that are closed after the test."""
    clients: list[AlluxioClient] = []

    def make(*masters: ScriptedAlluxio | str, settings: dict[str, Any] | None = None, **cluster: Any) -> AlluxioClient:
        targets = tuple(master if isinstance(master, str) else master.target for master in masters)
        client = AlluxioClient(
            ClusterConfig(name="t", masters=targets, **{"node_hosts": ("nowhere",), "user": "alice", **cluster}),
            Settings(state_dir=tmp_path, runtime_dir=tmp_path, **{**IMPATIENT, **(settings or {})}),
            metrics=metrics,
            clock=clock,
            rng=random.Random(7),
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(master: ScriptedAlluxio, make_client: MakeClient) -> AlluxioClient:
    """A client of `master`."""
    return make_client(master)


def block(
    block_id: int = 1 << 24, length: int = 1000, locations: tuple[int, ...] = (), ufs_path: bytes | None = b"/ufs/f"
) -> Block:
    """A block as a reader would describe it."""
    return Block(block_id, length, locations, ufs_path, 0, 1, False)


def blocks_of(status: FileStatus) -> list[Block]:
    """Every block of a file."""
    return [
        Block(
            block_id_of(status.file_id, index),
            min(status.block_size, status.length - index * status.block_size),
            status.locations[index] if status.locations else (),
            status.ufs_path,
            index * status.block_size,
            status.mount_id,
            status.in_ufs_tier,
        )
        for index in range(status.block_count)
    ]


def total(metrics: Metrics, prefix: str) -> float:
    """Sum of the cells whose name and labels begin with `prefix`."""
    return sum(value for name, value in metrics.snapshot().items() if name.startswith(prefix))
