"""Load and Cache: who loads what, in which batches, and what is reported."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.loading import (
    MAX_BATCH_BLOCKS,
    MAX_LOAD_BLOCK_BYTES,
    MAX_OUTSTANDING_BYTES,
    MAX_REQUEST_BYTES,
    Plan,
    plan,
)
from fusecache.alluxio.model import Block, BlockWorkerAddress, BlockWorkerInfo
from fusecache.errors import Unavailable
from fusecache.metrics import Metrics
from fusecache.pb.alluxio import block_worker_pb2
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio
from tests.t1_rpc.conftest import MakeClient, add_worker, total

MIB = 1 << 20


def cold(number: int, length: int = MIB, *, ufs_path: bytes | None = b"/ufs/f", in_ufs_tier: bool = False) -> Block:
    return Block(number << 24, length, (), ufs_path, 0, 1, in_ufs_tier)


def info(worker_id: int, *, capacity: int = 1 << 40) -> BlockWorkerInfo:
    return BlockWorkerInfo(worker_id, BlockWorkerAddress(f"n{worker_id}", "", 1, 1, "", ""), capacity, 0, "")


def planned(blocks: list[Block], workers: list[BlockWorkerInfo], **options: Any) -> Plan:
    defaults: dict[str, Any] = {"node_ids": (), "suspects": (), "reserved_bytes": 0, "rng": random.Random(1)}
    return plan(blocks, workers, **{**defaults, **options})


def test_plan_batches_stay_below_every_limit() -> None:
    rng = random.Random(2)
    blocks = [
        cold(n + 1, rng.choice([1, 100_000, 60 * MIB, 64 * MIB]), ufs_path=b"/" + b"p" * rng.randrange(5000))
        for n in range(3000)
    ]
    found = planned(blocks, [info(1), info(2)])
    batches = [batch for lists in found.batches.values() for batch in lists]
    for batch in batches:
        assert sum(b.length for b in batch) <= MAX_OUTSTANDING_BYTES
        assert sum(len(b.ufs_path or b"") for b in batch) <= MAX_REQUEST_BYTES
        assert 1 <= len(batch) <= MAX_BATCH_BLOCKS
    assert sorted(b.block_id for batch in batches for b in batch) == [b.block_id for b in blocks]


def test_plan_small_blocks_fill_whole_batches() -> None:
    found = planned([cold(n + 1, 1000) for n in range(2500)], [info(1)])
    assert [len(batch) for batch in found.batches[info(1)]] == [1000, 1000, 500]


def test_plan_larger_than_load_takes_goes_to_cache() -> None:
    found = planned([cold(1, MAX_LOAD_BLOCK_BYTES), cold(2, MAX_LOAD_BLOCK_BYTES + 1)], [info(1)])
    assert [b.block_id >> 24 for _, b in found.by_cache] == [2]
    assert [b.block_id >> 24 for batch in found.batches[info(1)] for b in batch] == [1]


def test_plan_block_of_the_ufs_tier_goes_to_cache() -> None:
    found = planned([cold(1, ufs_path=None, in_ufs_tier=True)], [info(1)])
    assert len(found.by_cache) == 1


def test_plan_block_that_is_not_in_the_under_storage_is_a_failure() -> None:
    (failure,) = planned([cold(1, ufs_path=None)], [info(1)]).failures
    assert (failure.block_id, failure.retryable) == (1 << 24, False)


def test_plan_without_block_workers_everything_fails_for_now() -> None:
    failures = planned([cold(1), cold(2)], []).failures
    assert [failure.retryable for failure in failures] == [True, True]


def test_plan_counts_what_it_has_given_and_moves_on_when_this_node_is_full() -> None:
    found = planned([cold(n + 1, 10 * MIB) for n in range(10)], [info(1, capacity=50 * MIB), info(2)], node_ids={1})
    by_worker = {w.worker_id: sum(map(len, lists)) for w, lists in found.batches.items()}
    assert by_worker == {1: 5, 2: 5}


def test_plan_suspects_get_nothing_while_others_live() -> None:
    assert set(planned([cold(1)], [info(1), info(2)], suspects={1}).batches) == {info(2)}
    assert set(planned([cold(1)], [info(1)], suspects={1}).batches) == {info(1)}


def test_load_sends_one_call_per_batch_with_where_the_bytes_are(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    blocks = [
        Block((1 << 24) + 1, 100, (), b"/ufs/\xff", 64 * MIB, 7, False),
        Block(2 << 24, 200, (), b"/ufs/b", 0, 7, False),
    ]
    assert client.load(blocks, budget) == []
    (call,) = worker.calls("Load")
    first, second = call.request.blocks
    assert (first.block_id, first.length, first.ufs_path, first.offset_in_file, first.mountId) == (
        (1 << 24) + 1,
        100,
        b"/ufs/\xff",
        64 * MIB,
        7,
    )
    assert second.ufs_path == b"/ufs/b"
    assert call.request.options.HasField("tag")
    assert call.request.options.HasField("position_short")


def test_load_reports_the_blocks_that_were_not_loaded(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    def partly(request: Any, context: grpc.ServicerContext) -> Any:
        bad = block_worker_pb2.BlockStatus(block=request.blocks[1], code=5, message=b"gone", retryable=False)
        return block_worker_pb2.LoadResponse(status=block_worker_pb2.PARTIAL_FAILURE, block_status=[bad])

    worker.on("Load", partly)
    (failure,) = client.load([cold(1), cold(2), cold(3)], budget)
    assert (failure.block_id, failure.code, failure.message) == (2 << 24, 5, "gone")


def test_load_never_more_than_one_batch_under_way_per_block_worker(
    master: ScriptedAlluxio, servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    workers = [add_worker(master, servers, number) for number in (1, 2)]
    lock = threading.Lock()
    running: dict[int, int] = {}
    outstanding: list[int] = []

    def load_at(number: int) -> Callable[[Any, grpc.ServicerContext], Any]:
        def load(request: Any, context: grpc.ServicerContext) -> Any:
            size = sum(block.length for block in request.blocks)
            with lock:
                running[number] = running.get(number, 0) + size
                outstanding.append(running[number])
            threading.Event().wait(0.05)
            with lock:
                running[number] -= size
            return block_worker_pb2.LoadResponse(status=block_worker_pb2.SUCCESS)

        return load

    for number, server in enumerate(workers):
        server.on("Load", load_at(number))
    client = make_client(master)
    blocks = [cold(number + 1, 60 * MIB) for number in range(40)]
    threads = [threading.Thread(target=client.load, args=(half, budget)) for half in (blocks[:20], blocks[20:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(outstanding) <= MAX_OUTSTANDING_BYTES
    loaded = [b.block_id for server in workers for call in server.calls("Load") for b in call.request.blocks]
    assert sorted(loaded) == [b.block_id for b in blocks]
    assert all(server.calls("Load") for server in workers)


def test_load_large_blocks_are_left_to_cache(worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    assert client.load([cold(1, 100 * MIB)], budget) == []
    (call,) = worker.calls("Cache")
    assert (call.request.block_id, call.request.length) == (1 << 24, 100 * MIB)
    assert f"{call.request.source_host.decode()}:{call.request.source_port}" == worker.target
    assert not worker.calls("Load")


def test_load_busy_block_worker_is_asked_again(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget, metrics: Metrics
) -> None:
    def busy_once(request: Any, context: grpc.ServicerContext) -> Any:
        if not worker.done["busy"]:
            worker.done["busy"] += 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        return block_worker_pb2.LoadResponse(status=block_worker_pb2.SUCCESS)

    worker.on("Load", busy_once)
    assert client.load([cold(1)], budget) == []
    assert worker.done["busy"] == 1
    assert total(metrics, "fusecache_rpc_retries_total{method=Load}") == 1


def test_load_block_worker_that_is_gone_fails_its_blocks_and_says_they_may_be_tried_again(
    worker: ScriptedAlluxio,
    client: AlluxioClient,
    budget: Budget,
    short: Callable[[], Budget],
    expected_logs: Declare,
) -> None:
    expected_logs("block worker failed", count=1)
    client.block_workers(budget)
    worker.stop()
    failures = client.load([cold(1), cold(2)], short())
    assert [(failure.block_id, failure.retryable) for failure in failures] == [(1 << 24, True), (2 << 24, True)]


def test_load_answer_that_names_no_block_fails_the_batch(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("upstream data rejected", count=1)
    worker.on("Load", lambda request, context: block_worker_pb2.LoadResponse(status=block_worker_pb2.FAILURE))
    assert len(client.load([cold(1), cold(2)], budget)) == 2


def test_cache_prefers_this_node_and_names_itself_as_source(
    master: ScriptedAlluxio, servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    add_worker(master, servers, 1)
    mine = add_worker(master, servers, 2)
    master.workers[1].address.tieredIdentity.tiers.add(tierName=b"node", value=b"node7")
    client = make_client(master, node_hosts=("node7",))
    for number in range(5):
        client.cache(cold(number + 1), budget)
    assert len(mine.calls("Cache")) == 5


def test_cache_without_block_workers_is_unavailable(client: AlluxioClient, budget: Budget) -> None:
    with pytest.raises(Unavailable, match="no block worker"):
        client.cache(cold(1), budget)


def test_cache_refused_is_an_error(worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.INTERNAL, "disk is gone")

    worker.on("Cache", refuse)
    with pytest.raises(Unavailable, match="disk is gone"):
        client.cache(cold(1), budget)
