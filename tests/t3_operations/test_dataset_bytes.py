"""What a mount measures of its data sets, over an embedded cluster and without the kernel."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.config.settings import MountedDataset, MountPlan, Settings
from fusecache.daemon.block_files import RECHECK_S
from fusecache.daemon.dataset_bytes import WORKERS_AGE_S, DatasetBytes
from fusecache.embedded.server import EmbeddedServer
from fusecache.locality.totals import Totals
from tests.support.below_kernel import BelowKernel, MovableClock, below_kernel, cluster_of
from tests.support.embedded import WireClient, embedded_server, read_request
from tests.support.log_noise import Declare

BLOCK = 4096
FILES = {
    "train/one": 3 * BLOCK + 7,
    "train/deep/er/two": BLOCK,
    "train/deep/three": 1,
    "train/empty": 0,
    "other/four": 2 * BLOCK,
    "five": 100,
}
TRAIN, DEEP = 4 * BLOCK + 8, BLOCK + 1


class Rig:
    """A mount of `path` below the kernel, its data sets, and a clock to move."""

    def __init__(self, mount: BelowKernel, server: EmbeddedServer, plan: MountPlan, clock: MovableClock) -> None:
        self.mount = mount
        self.server = server
        self.block_folder = server.tier_folders[0] / "alluxioworker"
        self.clock = clock
        self.measured = DatasetBytes(plan, mount.client, mount.store, mount.tree, metrics=mount.metrics, clock=clock)

    async def told(self) -> dict[str, Any]:
        return await self.measured.describe(ready=True)

    async def local(self) -> dict[str, int]:
        """Data set -> bytes here."""
        told = await self.told()
        return {dataset["name"]: dataset["tiers"]["local_block_worker"] for dataset in told["datasets"]}

    async def walk(self, *folders: bytes) -> None:
        for folder in folders:
            await self.mount.names(folder)


@asynccontextmanager
async def rig(
    tmp_path: Path, *datasets: str, path: str = "/", report_interval_s: float | None = None, **options: Any
) -> AsyncIterator[Rig]:
    """Data sets are named as their paths are."""
    source = tmp_path / "source"
    for name, length in FILES.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(length))
    clock = MovableClock()
    see_files = options.pop("see_files", True)
    with embedded_server(source, tmp_path / "server", block_size=BLOCK) as server:
        cluster = cluster_of(server, local=see_files)
        plan = MountPlan(
            cluster=cluster,
            folder=None,
            path=path.encode(),
            mountpoint=tmp_path / "mnt",
            settings=Settings.model_validate({"state_dir": str(tmp_path / "state"), **options}),
            datasets=tuple(
                MountedDataset(name=name, path=name.encode(), immutable=None, refresh_s=None) for name in datasets
            ),
            report_interval_s=report_interval_s,
        )
        async with below_kernel(cluster, tmp_path / "state", path=path.encode(), clock=clock, **options) as mount:
            yield Rig(mount, server, plan, clock)


async def test_bytes_are_those_of_blocks_that_lie_here(tmp_path: Path) -> None:
    async with rig(tmp_path, "/train", "/train/deep", "/other", "/") as node:
        await node.walk(b"/", b"/train", b"/train/deep", b"/train/deep/er", b"/other")
        assert await node.local() == {"/train": 0, "/train/deep": 0, "/other": 0, "/": 0}
        for name in ("/train/one", "/train/deep/er/two", "/other/four", "/five"):
            await node.mount.read_all(name.encode())
        held = {"/train": 4 * BLOCK + 7, "/train/deep": BLOCK, "/other": 2 * BLOCK, "/": 6 * BLOCK + 107}
        assert await node.local() == held
        assert sum(file.stat().st_size for file in node.block_folder.glob("[0-9]*")) == held["/"]
        node.clock.advance(WORKERS_AGE_S + 1)
        told = await node.told()
        assert told["source"] == "block_files"
        assert {d["name"]: (d["total_bytes"], d["listed_whole"], d["ready"]) for d in told["datasets"]} == {
            "/train": (TRAIN, True, True),
            "/train/deep": (DEEP, True, True),
            "/other": (2 * BLOCK, True, True),
            "/": (TRAIN + 2 * BLOCK + 100, True, True),
        }
        (worker,) = told["block_workers"]
        assert worker["capacity_bytes"] >= worker["used_bytes"] == held["/"]

        # The last block of `one` is evicted; a file is no block; a torn block is none either.
        inode = await node.mount.inode(b"/train/one")
        (node.block_folder / str((inode - 1) & ~0xFFFFFF | 3)).unlink()
        (node.block_folder / "README").write_bytes(b"x")
        (node.block_folder / str((inode - 1) & ~0xFFFFFF | 900)).write_bytes(b"x")
        held["/train"] -= 7
        held["/"] -= 7
        assert await node.local() == held


async def test_bytes_of_a_file_that_is_gone_or_listed_later_are_put_right(tmp_path: Path) -> None:
    async with rig(tmp_path, "/train") as node:
        one = await node.mount.read_all(b"/train/one")
        # Read by its name, though no listing of its folder has landed in this measurement's eyes: known by it later.
        await node.walk(b"/train")
        assert await node.local() == {"/train": len(one)}
        (tmp_path / "source" / "train" / "one").unlink()
        await node.mount.tree.refresh(await node.mount.inode(b"/train"), force_sync=True)
        node.clock.advance(RECHECK_S)
        assert await node.local() == {"/train": 0}


async def test_data_set_above_the_mount_or_missing_is_not_ready(tmp_path: Path) -> None:
    async with rig(
        tmp_path, "/train", "/train/deep", "/train/deep/nothing", "/train/deep/three", path="/train/deep"
    ) as node:
        await node.walk(b"/", b"/er")
        await node.mount.read_all(b"/three")
        told = {d["name"]: d for d in (await node.told())["datasets"]}
        assert {name: d["ready"] for name, d in told.items()} == {
            "/train": False,
            "/train/deep": True,
            "/train/deep/nothing": False,
            "/train/deep/three": False,
        }
        assert not told["/train"]["listed_whole"]
        assert told["/train"]["tiers"] == told["/train/deep"]["tiers"] == {"local_block_worker": 1}
        assert told["/train/deep/nothing"]["total_bytes"] == told["/train/deep/three"]["total_bytes"] == 0


async def test_without_visible_block_files_the_listings_tell(tmp_path: Path) -> None:
    async with rig(tmp_path, "/train", see_files=False, zero_rpc_reads=False) as node:
        await node.mount.read_all(b"/train/one")
        await node.walk(b"/train", b"/train/deep", b"/train/deep/er")
        await node.mount.tree.refresh(await node.mount.inode(b"/train"), force_sync=False)
        told = await node.told()
        assert told["source"] == "listings"
        assert told["datasets"][0]["tiers"] == {"local_block_worker": FILES["train/one"]}


async def test_folder_of_the_block_worker_is_learned_from_it(tmp_path: Path) -> None:
    async with rig(tmp_path, "/train", see_files=False) as node:
        # Read by somebody else: this client has never met a block of this node.
        with WireClient(node.server.master_target) as master, WireClient(node.server.worker_targets[0]) as worker:
            for block in range(4):
                worker.read(read_request(master.stat(b"/train/one"), block))
        assert node.mount.client.block_folders == ()
        await node.walk(b"/train", b"/train/deep", b"/train/deep/er")
        await node.mount.tree.refresh(await node.mount.inode(b"/train"), force_sync=False)
        told = await node.told()
        assert told["source"] == "block_files"
        assert told["datasets"][0]["tiers"] == {"local_block_worker": FILES["train/one"]}


async def test_with_a_controller_what_nobody_listed_is_listed(tmp_path: Path) -> None:
    async with rig(tmp_path, "/train", report_interval_s=0.2, refresh_calls_per_s=100) as node:
        first = (await node.told())["datasets"][0]
        assert (first["ready"], first["listed_whole"]) == (False, False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.measured.run)
            with trio.fail_after(20):
                while not (told := (await node.told())["datasets"][0])["listed_whole"]:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert (told["total_bytes"], told["ready"]) == (TRAIN, True)


async def test_error_of_our_own_costs_figures_and_not_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_logs: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    expected_logs("measuring data sets failed")
    async with rig(tmp_path, "/train", report_interval_s=0.05) as node, trio.open_nursery() as nursery:
        with monkeypatch.context() as patch:
            patch.setattr(Totals, "survey", lambda *_, **__: 1 / 0)
            nursery.start_soon(node.measured.run)
            with trio.fail_after(20):
                while not caplog.text.count("measuring data sets failed") >= 2:
                    await trio.sleep(0.01)
            assert (await node.told())["measured_age_s"] is None
        with trio.fail_after(20):
            while (await node.told())["measured_age_s"] is None:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
