"""Block files of this node: opened without a call, found by asking, touched, and never mistaken for something else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import grpc
import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Block
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio
from tests.t1_rpc.conftest import MakeClient, add_worker, block, total

BLOCK_ID = 1 << 24
HERE = {"node_hosts": ("127.0.0.1",)}


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A tier folder with the block worker's folder in it."""
    folder = tmp_path / "mem" / "alluxioworker"
    folder.mkdir(parents=True)
    return folder.parent


def put(tier: Path, content: bytes, block_id: int = BLOCK_ID) -> Path:
    path = tier / "alluxioworker" / str(block_id)
    path.write_bytes(content)
    return path


def content_of(descriptor: int | None) -> bytes | None:
    if descriptor is None:
        return None
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


@pytest.fixture
def offline(make_client: MakeClient, tier: Path) -> AlluxioClient:
    """A client whose masters don't exist: whatever works with it made no call."""
    return make_client("127.0.0.1:1", tier_folders=(str(tier),))


def wanted(length: int) -> Block:
    return block(BLOCK_ID, length, (1,))


def test_open_local_complete_block_takes_no_call(offline: AlluxioClient, tier: Path, metrics: Metrics) -> None:
    put(tier, b"block")
    assert content_of(offline.open_local(wanted(5))) == b"block"
    assert total(metrics, "fusecache_rpcs_total") == 0


def test_open_local_folder_may_be_the_tier_or_the_block_folder(make_client: MakeClient, tier: Path) -> None:
    put(tier, b"block")
    for folder in (tier, tier / "alluxioworker", f"{tier}/"):
        client = make_client("127.0.0.1:1", tier_folders=(str(folder),))
        assert content_of(client.open_local(wanted(5))) == b"block"


@pytest.mark.parametrize("length", [0, 4, 6])
def test_open_local_other_length_is_not_the_block(offline: AlluxioClient, tier: Path, length: int) -> None:
    put(tier, b"block")
    assert offline.open_local(wanted(length)) is None


def test_open_local_temporary_block_is_not_seen(offline: AlluxioClient, tier: Path) -> None:
    temporary = tier / "alluxioworker" / ".tmp_blocks" / "7"
    temporary.mkdir(parents=True)
    (temporary / f"7-{BLOCK_ID}").write_bytes(b"block")
    assert offline.open_local(wanted(5)) is None
    (temporary / f"7-{BLOCK_ID}").rename(tier / "alluxioworker" / str(BLOCK_ID))
    assert content_of(offline.open_local(wanted(5))) == b"block"


def plant_symlink(path: Path) -> None:
    (path.parent / "secret").write_bytes(b"block")
    path.symlink_to(path.parent / "secret")


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [plant_symlink, plant_fifo, plant_folder])
def test_open_local_anything_but_a_regular_file_is_refused_without_hanging(
    offline: AlluxioClient, tier: Path, plant: Any
) -> None:
    path = tier / "alluxioworker" / str(BLOCK_ID)
    plant(path)
    assert offline.open_local(wanted(path.lstat().st_size)) is None
    assert offline.open_local(wanted(5)) is None


def test_open_local_descriptor_outlives_eviction(offline: AlluxioClient, tier: Path) -> None:
    path = put(tier, b"block")
    descriptor = offline.open_local(wanted(5))
    path.unlink()
    assert content_of(descriptor) == b"block"
    assert offline.open_local(wanted(5)) is None


def test_open_local_several_folders_all_serve(make_client: MakeClient, tmp_path: Path) -> None:
    tiers = []
    for name in ("mem", "ssd1", "ssd2"):
        folder = tmp_path / name
        (folder / "alluxioworker").mkdir(parents=True, exist_ok=True)
        tiers.append(folder)
    client = make_client("127.0.0.1:1", tier_folders=tuple(map(str, tiers)))
    for round_trip in range(2):
        for number, folder in enumerate(tiers, start=1):
            put(folder, b"%d" % number, number << 24)
            assert content_of(client.open_local(block(number << 24, 1))) == b"%d" % number, round_trip


def test_open_local_switched_off_opens_nothing(make_client: MakeClient, tier: Path) -> None:
    put(tier, b"block")
    client = make_client("127.0.0.1:1", tier_folders=(str(tier),), settings={"zero_rpc_reads": False})
    assert client.open_local(wanted(5)) is None


def test_open_local_id_beside_it_is_another_block(offline: AlluxioClient, tier: Path) -> None:
    put(tier, b"block", BLOCK_ID + 1)
    assert offline.open_local(wanted(5)) is None


# learning folders


@pytest.fixture
def holder(worker: ScriptedAlluxio, tier: Path) -> ScriptedAlluxio:
    """Block worker 1 on this node, with BLOCK_ID in `tier`."""
    worker.local_paths[BLOCK_ID] = os.fsencode(put(tier, b"block"))
    return worker


@pytest.fixture
def here(master: ScriptedAlluxio, holder: ScriptedAlluxio, make_client: MakeClient) -> AlluxioClient:
    return make_client(master, **HERE)


def test_learn_answer_of_the_block_worker_teaches_the_folder(
    holder: ScriptedAlluxio, here: AlluxioClient, tier: Path, budget: Budget
) -> None:
    assert here.open_local(wanted(5)) is None
    assert content_of(here.learn_local(wanted(5), budget)) == b"block"
    put(tier, b"other", 2 << 24)
    assert content_of(here.open_local(block(2 << 24, 5))) == b"other"
    assert len(holder.calls("OpenLocalBlock")) == 1


def test_learn_lock_on_the_block_is_given_back(holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget) -> None:
    content_of(here.learn_local(wanted(5), budget))
    here.close()
    holder.stop()
    assert holder.done["local_block_unlocked"] == 1


def test_learn_block_worker_of_another_node_is_not_asked(
    master: ScriptedAlluxio, holder: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(master, node_hosts=("node7",))
    assert client.learn_local(wanted(5), budget) is None
    assert not holder.calls("OpenLocalBlock")


def test_learn_path_that_is_not_visible_here_is_no_folder(
    holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget
) -> None:
    holder.local_paths[BLOCK_ID] = b"/container/only/alluxioworker/%d" % BLOCK_ID
    assert here.learn_local(wanted(5), budget) is None
    assert here.open_local(wanted(5)) is None


def test_learn_block_of_another_length_is_not_trusted(
    holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget
) -> None:
    assert here.learn_local(wanted(6), budget) is None
    assert here.open_local(wanted(5)) is None


@pytest.mark.parametrize("path", [b"/etc/passwd", b"../%d" % BLOCK_ID, b""])
def test_learn_hostile_path_is_rejected(
    holder: ScriptedAlluxio,
    here: AlluxioClient,
    budget: Budget,
    metrics: Metrics,
    expected_logs: Declare,
    path: bytes,
) -> None:
    expected_logs("upstream data rejected", count=1)
    holder.local_paths[BLOCK_ID] = path
    assert here.learn_local(wanted(5), budget) is None
    assert total(metrics, "fusecache_upstream_rejected_total{what=") == 1


def test_learn_block_worker_without_local_paths_is_no_error(
    holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget
) -> None:

    def unsupported(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        holder.receive_first("OpenLocalBlock", requests, context)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "paged store")
        yield b""

    holder.on("OpenLocalBlock", unsupported)
    assert here.learn_local(wanted(5), budget) is None
    assert here.touch([BLOCK_ID], budget) == 0
    assert len(holder.calls("OpenLocalBlock")) == 2


# touching


def test_touch_tells_the_block_worker_of_this_node_and_counts(
    holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget, metrics: Metrics
) -> None:
    holder.local_paths[2 << 24] = b"/elsewhere/%d" % (2 << 24)
    assert here.touch([BLOCK_ID, 2 << 24, 3 << 24], budget) == 2
    assert [call.request.block_id for call in holder.calls("OpenLocalBlock")] == [BLOCK_ID, 2 << 24, 3 << 24]
    assert total(metrics, "fusecache_touched_blocks_total") == 2
    assert not any(call.request.promote for call in holder.calls("OpenLocalBlock"))


def test_touch_finds_the_one_of_several_block_workers_on_this_node(
    master: ScriptedAlluxio,
    holder: ScriptedAlluxio,
    servers: list[ScriptedAlluxio],
    make_client: MakeClient,
    budget: Budget,
) -> None:
    other = add_worker(master, servers, 2)
    other.local_paths[5 << 24] = b"/elsewhere/%d" % (5 << 24)
    client = make_client(master, **HERE)
    assert client.touch([5 << 24, BLOCK_ID], budget) == 2


def test_read_through_the_ufs_that_was_stored_here_teaches_the_folder(
    master: ScriptedAlluxio, holder: ScriptedAlluxio, here: AlluxioClient, budget: Budget
) -> None:
    """The first read of a cold block stores it at this node's block worker; the next one is a local file."""
    holder.blocks[BLOCK_ID] = b"block"
    cold = block(BLOCK_ID, 5)
    assert here.open_stream(cold, 0, 5, budget).read(5, budget) == b"block"
    # The read does not wait for that.
    for _ in range(500):
        if (descriptor := here.open_local(cold)) is not None:
            break
        sleep(0.01)
    assert content_of(descriptor) == b"block"
