"""What a node measures of its block worker: the same over real servers and the embedded one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, MountedDataset, MountPlan, Settings
from fusecache.daemon.dataset_bytes import DatasetBytes
from tests.contract.conftest import BLOCK_SIZE, LOCAL_HOST, Cluster, Deployment
from tests.support.below_kernel import BelowKernel, below_kernel
from tests.support.embedded import read_request

SIZE = 2 * BLOCK_SIZE + 777


@asynccontextmanager
async def measured(
    cluster: Cluster, deployment: Deployment, tmp_path: Path, *, tier_folders: tuple[Path, ...]
) -> AsyncIterator[tuple[BelowKernel, DatasetBytes]]:
    """A mount of this test's folder, of which `data` is a data set."""
    reached = ClusterConfig(
        name="contract",
        masters=(deployment.master,),
        node_hosts=(LOCAL_HOST,),
        tier_folders=tuple(str(folder) for folder in tier_folders),
    )
    plan = MountPlan(
        cluster=reached,
        folder=None,
        path=cluster.root,
        mountpoint=tmp_path / "mnt",
        settings=Settings(state_dir=tmp_path, runtime_dir=tmp_path),
        datasets=(MountedDataset(name="data", path=cluster.path("data"), immutable=None, refresh_s=None),),
    )
    async with below_kernel(reached, tmp_path / "state", path=cluster.root) as mount:
        yield (
            mount,
            DatasetBytes(plan, mount.client, mount.store, mount.tree, metrics=mount.metrics, clock=SystemClock()),
        )


def fill(cluster: Cluster) -> None:
    (cluster.ufs / "data").mkdir()
    for name in ("one", "two"):
        (cluster.ufs / "data" / name).write_bytes(random.Random(name).randbytes(SIZE))


async def tell(bytes_of: DatasetBytes, local_bytes: int) -> dict[str, Any]:
    """The answer once it names so many bytes: block workers drop blocks some time after they are told to."""
    with trio.fail_after(30):
        while True:
            told = await bytes_of.describe(ready=True)
            if told["datasets"][0]["tiers"]["local_block_worker"] == local_bytes:
                return told
            await trio.sleep(0.1)


async def test_bytes_of_a_data_set_are_what_this_nodes_block_worker_holds(
    cluster: Cluster, deployment: Deployment, tmp_path: Path
) -> None:
    fill(cluster)
    tier_folders = deployment.tier_folders[:1]
    async with measured(cluster, deployment, tmp_path, tier_folders=tier_folders) as (mount, bytes_of):
        # Another node's block worker holds a file: not ours to serve.
        info = cluster.wire("master").stat(cluster.path("data/two"))
        for block in range(3):
            cluster.wire("other").read(read_request(info, block))
        await mount.names(b"/data")
        told = await tell(bytes_of, 0)
        assert told["source"] == "block_files"
        assert told["datasets"] == [
            {
                "name": "data",
                "ready": True,
                "whole": True,
                "total_bytes": 2 * SIZE,
                "listed_whole": True,
                "tiers": {"local_block_worker": 0},
            }
        ]
        (worker,) = told["block_workers"]
        assert worker["capacity_bytes"] >= worker["used_bytes"]
        await mount.read_all(b"/data/one")
        await tell(bytes_of, SIZE)
        cluster.client.free(cluster.path("data/one"), cluster.budget())
        await tell(bytes_of, 0)


async def test_where_the_block_worker_keeps_blocks_is_learned_from_it(
    cluster: Cluster, deployment: Deployment, tmp_path: Path
) -> None:
    fill(cluster)
    info = cluster.wire("master").stat(cluster.path("data/one"))
    for block in range(3):
        cluster.wire("local").read(read_request(info, block))
    async with measured(cluster, deployment, tmp_path, tier_folders=()) as (mount, bytes_of):
        assert mount.client.block_folders == ()
        with trio.fail_after(30):
            while (told := await bytes_of.describe(ready=True))["source"] != "block_files":
                await mount.tree.refresh(await mount.inode(b"/data"), force_sync=False)
        assert told["datasets"][0]["tiers"] == {"local_block_worker": SIZE}
