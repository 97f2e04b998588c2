"""Reads that are begun and taken without waiting for anything; what does not go that way goes on in a thread."""

from __future__ import annotations

import random
import threading

import pytest

from fusecache.alluxio.block_stream import BlockStream
from fusecache.alluxio.client import AlluxioClient
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from tests.support.embedded import wait_until
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ReadFault, ScriptedAlluxio
from tests.t1_rpc.conftest import MakeClient, block, total

DATA = random.Random(5).randbytes(300_001)
BLOCK_ID = 1 << 24


@pytest.fixture
def holder(worker: ScriptedAlluxio) -> ScriptedAlluxio:
    """Block worker 1, which holds DATA as BLOCK_ID."""
    worker.blocks[BLOCK_ID] = DATA
    return worker


def started(client: AlluxioClient, budget: Budget, length: int = 110_000) -> BlockStream:
    """A read of the block's first bytes from the holder, begun without waiting, when its first answer is there."""
    answered = threading.Event()
    stream = client.start_read(block(BLOCK_ID, len(DATA), (1,)), 0, length, budget, answered.set)
    assert stream is not None
    assert answered.wait(10)
    return stream


@pytest.fixture
def acquainted(client: AlluxioClient, holder: ScriptedAlluxio, budget: Budget) -> AlluxioClient:
    """A client that has spoken to the holder."""
    client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 0, 10, budget).read(10, budget)
    holder.reads.clear()
    return client


def test_start_stranger_would_have_to_wait(holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    wanted = block(BLOCK_ID, len(DATA), (1,))
    assert client.start_read(wanted, 0, 10, budget, lambda: None) is None
    assert not holder.received
    client.block_workers(budget)
    assert client.start_read(wanted, 0, 10, budget, lambda: None) is None
    assert not holder.received


def test_start_one_answer_has_all_bytes_and_the_call_ends_well(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget, metrics: Metrics
) -> None:
    stream = started(acquainted, budget)
    assert stream.read_ready(budget) == DATA[:110_000]
    stream.close()
    wait_until(lambda: total(metrics, "fusecache_rpcs_total{method=ReadBlock,code=OK}") == 2)
    (seen,) = holder.reads
    assert not seen.half_closed_early


def test_start_session_that_was_forgotten_is_mended_by_reading(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget
) -> None:
    holder.forget_sessions()
    stream = started(acquainted, budget)
    assert stream.read_ready(budget) is None
    assert stream.read(110_000, budget) == DATA[:110_000]
    assert holder.done["unauthenticated"] == 1


def test_start_without_a_session_nobody_waits_for_a_login(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget
) -> None:
    holder.end_sessions()
    wait_until(lambda: not holder.sessions)
    wanted = block(BLOCK_ID, len(DATA), (1,))
    wait_until(lambda: acquainted.start_read(wanted, 0, 10, budget, lambda: None) is None)
    assert acquainted.open_stream(wanted, 0, 10, budget).read(10, budget) == DATA[:10]


def test_start_old_list_of_block_workers_is_not_asked_for(
    master: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusecache.alluxio.block_workers.LIST_AGE_S", 0.0)
    assert acquainted.start_read(block(BLOCK_ID, len(DATA), (1,)), 0, 10, budget, lambda: None) is None
    assert len(master.calls("GetWorkerInfoList")) == 1


@pytest.mark.parametrize(
    "fault",
    [
        ReadFault(chunk_bytes=1000),
        ReadFault(cut_after=0),
        ReadFault(cut_after=1000),
        ReadFault(fail_after=0),
        ReadFault(empty_chunks=1),
    ],
    ids=["many answers", "cut before the first byte", "cut after some", "refused", "an empty answer"],
)
def test_start_what_one_answer_does_not_give_is_read_on_from_there(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget, fault: ReadFault, expected_logs: Declare
) -> None:
    expected_logs("block worker failed", optional=True)
    holder.read_faults.append(fault)
    stream = started(acquainted, budget)
    assert stream.read_ready(budget) is None
    assert stream.read(110_000, budget) == DATA[:110_000]
    stream.close()


def test_start_silence_is_ended_by_the_stall_watch(
    holder: ScriptedAlluxio, master: ScriptedAlluxio, make_client: MakeClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("block worker failed", count=1)
    client = make_client(master, settings={"stall_s": 0.3})
    client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 0, 10, budget).read(10, budget)
    holder.read_faults.append(ReadFault(stall_after=0))
    stream = started(client, budget)
    assert stream.read_ready(budget) is None
    assert stream.read(110_000, budget) == DATA[:110_000]
    assert holder.done["stalled"] == 1


def test_start_lie_is_dropped_and_counted(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget, metrics: Metrics, expected_logs: Declare
) -> None:
    expected_logs("upstream data rejected", count=1)
    holder.read_faults.append(ReadFault(surplus=b"x"))
    stream = started(acquainted, budget)
    assert stream.read_ready(budget) is None
    assert total(metrics, "fusecache_upstream_rejected_total{what=chunk}") == 1
    assert stream.read(110_000, budget) == DATA[:110_000]


def test_start_abandoned_read_is_cancelled(
    holder: ScriptedAlluxio, acquainted: AlluxioClient, budget: Budget, metrics: Metrics
) -> None:
    holder.read_faults.append(ReadFault(stall_after=0))
    stream = acquainted.start_read(block(BLOCK_ID, len(DATA), (1,)), 0, 1000, budget, lambda: None)
    assert stream is not None
    stream.close()
    assert total(metrics, "fusecache_rpcs_total{method=ReadBlock,code=CANCELLED}") == 1
