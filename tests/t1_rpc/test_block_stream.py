"""Bytes of blocks: flow control, resuming, what is asked of whom, and that nothing is ever short."""

from __future__ import annotations

import random
import threading
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.decode import decode_status
from fusecache.alluxio.methods import READ_BLOCK
from fusecache.alluxio.read_call import MAX_CHUNK_BYTES
from fusecache.errors import NotFound, ProtocolError, Unavailable, VersionMismatch
from fusecache.metrics import Metrics
from fusecache.pb.alluxio import version_pb2
from fusecache.pb.alluxio.block_worker_pb2 import Chunk, ReadRequest, ReadResponse
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ReadFault, ScriptedAlluxio, file_info
from tests.t1_rpc.conftest import MakeClient, add_worker, block, blocks_of, total

DATA = random.Random(5).randbytes(3_000_001)
BLOCK_ID = 1 << 24


@pytest.fixture
def holder(worker: ScriptedAlluxio) -> ScriptedAlluxio:
    """Block worker 1, which holds DATA as BLOCK_ID."""
    worker.blocks[BLOCK_ID] = DATA
    return worker


def read_all(client: AlluxioClient, budget: Budget, *, locations: tuple[int, ...] = (1,), size: int = 1 << 30) -> bytes:
    stream = client.open_stream(block(BLOCK_ID, len(DATA), locations), 0, len(DATA), budget)
    parts = []
    while stream.position < stream.end:
        parts.append(stream.read(size, budget))
    stream.close()
    return b"".join(parts)


def test_read_whole_block_is_exact_and_not_half_closed(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget, metrics: Metrics
) -> None:
    assert read_all(client, budget) == DATA
    wait_for_the_end(metrics)
    (seen,) = holder.reads
    assert not seen.half_closed_early
    assert total(metrics, "fusecache_rpcs_total{method=ReadBlock,code=OK}") == 1


def test_server_takes_half_close_for_cancel_and_sends_less(holder: ScriptedAlluxio) -> None:
    """Proof that the scripted server has the trap which the test above relies on."""
    holder.auth = False
    with grpc.insecure_channel(holder.target) as channel:
        call = channel.stream_stream(
            READ_BLOCK.path, request_serializer=READ_BLOCK.serialize, response_deserializer=READ_BLOCK.parse
        )
        request = ReadRequest(block_id=BLOCK_ID, offset=0, length=len(DATA), chunk_size=1000)
        got = sum(len(data or b"") for data in call(iter([request])))
    assert got < len(DATA)
    assert holder.reads[0].half_closed_early


def test_request_first_message_asks_for_the_range_with_a_chunk_size(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 1000, 50_000, budget)
    assert stream.read(50_000, budget) == DATA[1000:51_000]
    request = holder.reads[0].request
    assert (request.block_id, request.offset, request.length) == (BLOCK_ID, 1000, 50_000)
    assert 0 < request.chunk_size <= MAX_CHUNK_BYTES


def test_chunks_each_is_acknowledged_with_the_block_offset(
    holder: ScriptedAlluxio, master: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    """The server sends a chunk only after the last one was acknowledged: one missing acknowledgement ends the test."""
    acknowledged = []

    def stop_and_wait(requests: Any, context: grpc.ServicerContext) -> Any:
        request = holder.receive_first("ReadBlock", requests, context)
        position, end = request.offset, request.offset + request.length
        while position < end:
            data = DATA[position : min(end, position + request.chunk_size)]
            position += len(data)
            yield ReadResponse(chunk=Chunk(data=data))
            if position < end:
                acknowledged.append(next(requests).offset_received)

    holder.on("ReadBlock", stop_and_wait)
    client = make_client(master, settings={"chunk_bytes": 1 << 19})
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 1000, 2_000_000, budget)
    assert stream.read(2_000_000, budget) == DATA[1000:2_001_000]
    assert acknowledged == [1000 + (n << 19) for n in (1, 2, 3)]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 1 << 20, 3_000_000, 3_000_001, 4_000_000])
def test_read_any_size_of_reads_gives_the_same_bytes(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget, size: int
) -> None:
    length = min(len(DATA), 200 * size)
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,)), len(DATA) - length, length, budget)
    parts = []
    while stream.position < stream.end:
        before = stream.position
        part = stream.read(size, budget)
        assert len(part) == min(size, stream.end - before)
        parts.append(part)
    assert b"".join(parts) == DATA[-length:]
    assert stream.read(size, budget) == b""


@pytest.mark.parametrize("length", [1, 10, 4095, 4096, 4097])
def test_report_29_tiny_block_is_exact_whatever_is_asked(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget, length: int
) -> None:
    holder.blocks[BLOCK_ID] = DATA[:length]
    stream = client.open_stream(block(BLOCK_ID, length, (1,)), 0, length, budget)
    assert stream.read(4096, budget) == DATA[: min(4096, length)]
    assert stream.read(4096, budget) == DATA[4096:length]


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_report_27_file_around_a_block_multiple_is_exact(
    master: ScriptedAlluxio, worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget, delta: int
) -> None:
    size = 4096
    content = DATA[: 8 * size + delta]
    info = file_info(b"/f", container=1, length=len(content), block_size=size)
    master.files[b"/f"] = info
    for index, block_id in enumerate(info.blockIds):
        worker.blocks[block_id] = content[index * size : (index + 1) * size]
    status = client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    got = b""
    for part in blocks_of(status):
        got += client.open_stream(part, 0, part.length, budget).read(part.length, budget)
    assert got == content
    last = blocks_of(status)[-1]
    tail = client.open_stream(last, last.length - 1, 1, budget)
    assert tail.read(4096, budget) == content[-1:]


def test_report_28_block_ids_with_the_high_bits_set_are_served(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    block_id = ((1 << 39) - 2) << 24
    worker.blocks[block_id] = b"high"
    assert client.open_stream(block(block_id, 4, (1,)), 0, 4, budget).read(4, budget) == b"high"


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 1001), (1000, 1), (5, -1)])
def test_range_outside_the_block_is_a_programming_error(
    client: AlluxioClient, budget: Budget, offset: int, length: int
) -> None:
    with pytest.raises(ValueError, match="not within block"):
        client.open_stream(block(), offset, length, budget)


def test_range_at_the_end_of_the_block_is_empty_and_asks_nobody(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    assert client.open_stream(block(), 1000, 0, budget).read(10, budget) == b""
    assert not holder.reads


# what is asked of whom


def ufs_options(server: ScriptedAlluxio) -> Any:
    request = server.reads[-1].request
    assert request.HasField("open_ufs_block_options")
    return request.open_ufs_block_options


def test_ufs_options_block_size_is_the_length_of_the_block(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    info = file_info(b"/f", container=1, length=10_000, block_size=4096)
    *_, last = blocks_of(decode_status(info, print, asked=b"/f"))
    worker.blocks[last.block_id] = DATA[: last.length]
    client.open_stream(last, 0, last.length, budget).read(last.length, budget)
    options = ufs_options(worker)
    assert options.block_size == last.length == 10_000 - 2 * 4096
    assert options.offset_in_file == 2 * 4096
    assert options.ufs_path == b"/ufs/f"
    assert options.mountId == 1
    assert options.maxUfsReadConcurrency == 2**31 - 1
    assert not options.HasField("user")


def test_ufs_options_of_a_superseded_id_are_not_sent(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,), ufs_path=None), 0, 10, budget)
    stream.read(10, budget)
    assert not holder.reads[0].request.HasField("open_ufs_block_options")


def test_ufs_options_of_the_ufs_tier_have_no_path(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    tiered = block(BLOCK_ID, len(DATA), ufs_path=b"/ufs/f")._replace(in_ufs_tier=True, ufs_offset=999)
    client.open_stream(tiered, 0, 10, budget).read(10, budget)
    options = ufs_options(holder)
    assert options.block_in_ufs_tier
    assert not options.HasField("ufs_path")
    assert options.offset_in_file == 0


@pytest.mark.parametrize(
    ("read_type", "offset", "no_cache"),
    [("cache", 0, False), ("cache", 1, True), ("no_cache", 0, True)],
    ids=["whole is stored", "part is not", "no_cache never"],
)
def test_ufs_options_only_a_whole_block_is_stored_while_it_is_read(
    holder: ScriptedAlluxio,
    master: ScriptedAlluxio,
    make_client: MakeClient,
    budget: Budget,
    read_type: str,
    offset: int,
    no_cache: bool,
) -> None:
    client = make_client(master, settings={"read_type": read_type})
    stream = client.open_stream(block(BLOCK_ID, len(DATA)), offset, len(DATA) - offset, budget)
    assert stream.read(len(DATA), budget) == DATA[offset:]
    assert stream.source == "ufs"
    assert ufs_options(holder).no_cache is no_cache
    assert not holder.reads[0].request.promote


def wait_for_the_end(metrics: Metrics) -> None:
    """Until a ReadBlock call has ended with OK: the reader itself does not wait for that."""
    waiting = threading.Event()
    for _ in range(500):
        if total(metrics, "fusecache_rpcs_total{method=ReadBlock,code=OK}"):
            return
        waiting.wait(0.01)
    raise AssertionError("no ReadBlock call has ended")


def wait_for_calls(server: ScriptedAlluxio, method: str, count: int) -> list[Any]:
    waiting = threading.Event()
    for _ in range(500):
        if len(server.calls(method)) >= count:
            break
        waiting.wait(0.01)
    return [call.request for call in server.calls(method)]


def test_cache_after_parts_from_the_ufs_the_block_is_requested_once(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    for offset in (0, 1000, 2000):
        client.open_stream(block(BLOCK_ID, len(DATA)), offset, 1000, budget).read(1000, budget)
    (request,) = wait_for_calls(holder, "Cache", 1)
    assert request.block_id == BLOCK_ID
    assert request.length == len(DATA)
    assert getattr(request, "async")
    assert f"127.0.0.1:{request.source_port}" == holder.target
    assert request.open_ufs_block_options.ufs_path == b"/ufs/f"
    assert not request.open_ufs_block_options.no_cache


@pytest.mark.parametrize(
    ("settings", "locations", "offset"),
    [({"read_type": "no_cache"}, (), 5), ({}, (1,), 5), ({}, (), 0)],
    ids=["no_cache", "already held", "stored while it was read"],
)
def test_cache_is_not_requested_when_there_is_no_need(
    holder: ScriptedAlluxio,
    master: ScriptedAlluxio,
    make_client: MakeClient,
    budget: Budget,
    metrics: Metrics,
    settings: dict[str, Any],
    locations: tuple[int, ...],
    offset: int,
) -> None:
    client = make_client(master, settings=settings)
    stream = client.open_stream(block(BLOCK_ID, len(DATA), locations), offset, len(DATA) - offset, budget)
    stream.read(len(DATA), budget)
    wait_for_the_end(metrics)
    client.close()
    assert holder.reads
    assert not holder.calls("Cache")


@pytest.mark.parametrize("passive_cache", [False, True])
def test_passive_cache_copies_to_this_node_only_when_switched_on(
    holder: ScriptedAlluxio,
    master: ScriptedAlluxio,
    servers: list[ScriptedAlluxio],
    make_client: MakeClient,
    budget: Budget,
    metrics: Metrics,
    passive_cache: bool,
) -> None:
    mine = add_worker(master, servers, 2)
    master.workers[1].address.host = b"127.0.0.2"
    master.workers[1].address.containerHost = b"127.0.0.1"
    client = make_client(master, settings={"passive_cache": passive_cache}, node_hosts=("127.0.0.2",))
    client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 0, 1000, budget).read(1000, budget)
    wait_for_the_end(metrics)
    if passive_cache:
        (request,) = wait_for_calls(mine, "Cache", 1)
        assert f"127.0.0.1:{request.source_port}" == holder.target
    client.close()
    assert len(mine.calls("Cache")) == int(passive_cache)
    assert not holder.calls("Cache")


# resuming


def test_f07_stream_cut_at_200_random_bytes_resumes_elsewhere_with_the_same_bytes(
    holder: ScriptedAlluxio,
    second: ScriptedAlluxio,
    client: AlluxioClient,
    budget: Budget,
    metrics: Metrics,
    expected_logs: Declare,
) -> None:
    expected_logs("block worker failed")
    data = DATA[:300_000]
    holder.blocks[BLOCK_ID] = second.blocks[BLOCK_ID] = data
    rng = random.Random(20261129)
    cuts = 200
    for number in range(cuts):
        offset = rng.randrange(len(data) - 1)
        cut = rng.randrange(len(data) - offset)
        fault = ReadFault(cut_after=cut) if number % 2 else ReadFault(fail_after=cut)
        # Whichever is asked first takes the fault; the next call is whole.
        holder.read_faults = second.read_faults = deque([fault])
        stream = client.open_stream(block(BLOCK_ID, len(data), (1, 2)), offset, len(data) - offset, budget)
        got = b""
        while stream.position < stream.end:
            got += stream.read(rng.choice([1000, 4096, 100_000, 1 << 20]), budget)
        stream.close()
        assert got == data[offset:], f"cut {cut} bytes after offset {offset}"
    done = holder.done + second.done
    assert done["cut"] + done["failed"] == cuts
    assert done["cut"] >= 90
    assert total(metrics, "fusecache_block_sources_failed_total{source=block_worker}") == cuts


def test_f07_resumed_request_starts_at_the_first_missing_byte(
    holder: ScriptedAlluxio, second: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    second.blocks[BLOCK_ID] = DATA
    holder.read_faults.append(ReadFault(cut_after=1_234_567))
    second.read_faults.append(ReadFault(cut_after=1_234_567))
    assert read_all(client, budget, locations=(1, 2)) == DATA
    first, resumed = sorted(holder.reads + second.reads, key=lambda seen: seen.request.offset)[:2]
    assert first.sent == 1_234_567
    assert resumed.request.offset == 1_234_567
    assert resumed.request.length == len(DATA) - 1_234_567


def test_f07_no_other_source_is_an_error_never_a_short_read(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    """The only source has no more than 1000 bytes: what it sent is not given out as if it were all."""

    def cut(requests: Any, context: grpc.ServicerContext) -> Any:
        request = holder.receive_first("ReadBlock", requests, context)
        if request.offset < 1000:
            data = DATA[request.offset : min(1000, request.offset + request.length)]
            yield ReadResponse(chunk=Chunk(data=data))
        holder.done["cut"] += 1

    holder.on("ReadBlock", cut)
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,), ufs_path=None), 0, len(DATA), budget)
    with pytest.raises(ProtocolError, match=r"bytes too early"):
        stream.read(5000, budget)
    assert stream.position == 0
    assert holder.done["cut"] >= 2
    assert stream.read(1000, budget) == DATA[:1000]


def test_f07_only_source_that_cuts_again_and_again_still_gives_every_byte(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    holder.read_faults.extend(ReadFault(cut_after=300_000) for _ in range(9))
    assert read_all(client, budget) == DATA
    assert holder.done["cut"] == 9
    assert [seen.request.offset for seen in holder.reads] == [300_000 * n for n in range(10)]


def test_f07_block_worker_that_dies_in_the_middle_is_replaced(
    holder: ScriptedAlluxio,
    second: ScriptedAlluxio,
    client: AlluxioClient,
    budget: Budget,
    expected_logs: Declare,
) -> None:
    expected_logs("block worker failed", count=1)
    second.blocks[BLOCK_ID] = DATA
    holder.read_faults.append(ReadFault(stall_after=1 << 20))
    second.read_faults.append(ReadFault(stall_after=1 << 20))
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1, 2)), 0, len(DATA), budget)
    assert stream.read(1 << 20, budget) == DATA[: 1 << 20]
    victim, other = (holder, second) if holder.reads else (second, holder)
    other.read_faults.clear()
    victim.stop()
    assert stream.read(1 << 30, budget) == DATA[1 << 20 :]
    assert other.reads[0].request.offset == 1 << 20


def test_f08_stalled_stream_is_left_for_the_next_source(
    holder: ScriptedAlluxio,
    second: ScriptedAlluxio,
    master: ScriptedAlluxio,
    make_client: MakeClient,
    budget: Budget,
    expected_logs: Declare,
) -> None:
    expected_logs(r"block worker failed.*no bytes for 1 s", count=1)
    client = make_client(master, settings={"stall_s": 1.0})
    second.blocks[BLOCK_ID] = DATA
    holder.read_faults = second.read_faults = deque([ReadFault(stall_after=100_000)])
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1, 2)), 0, len(DATA), budget)
    stream.read(100_000, budget)
    assert stream.read(1 << 30, budget) == DATA[100_000:]
    assert holder.done["stalled"] + second.done["stalled"] == 1


def test_suspect_after_a_failure_the_next_streams_ask_the_other_first(
    holder: ScriptedAlluxio, second: ScriptedAlluxio, client: AlluxioClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("block worker failed", count=1)
    second.blocks[BLOCK_ID] = DATA
    holder.read_faults.append(ReadFault(fail_after=0))
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,)), 0, 10, budget)
    assert stream.read(10, budget) == DATA[:10]
    holder.reads.clear()
    for _ in range(10):
        assert read_all(client, budget, locations=(1, 2)) == DATA
    assert not holder.reads


def test_stale_location_the_master_is_asked_where_the_block_is_now(
    master: ScriptedAlluxio, worker: ScriptedAlluxio, second: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    second.blocks[BLOCK_ID] = DATA
    master.placements[BLOCK_ID] = [2]
    stream = client.open_stream(block(BLOCK_ID, len(DATA), (1,), ufs_path=None), 0, len(DATA), budget)
    assert stream.read(len(DATA), budget) == DATA
    assert worker.reads
    assert master.calls("GetBlockInfo")


def test_block_that_nobody_has_is_unavailable_at_once(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stream = client.open_stream(block(BLOCK_ID, 10, (), ufs_path=None), 0, 10, budget)
    with pytest.raises(Unavailable, match="no block worker holds it"):
        stream.read(10, budget)


def test_ufs_file_that_is_gone_is_not_found(
    worker: ScriptedAlluxio, second: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    with pytest.raises(NotFound):
        client.open_stream(block(BLOCK_ID, 10), 0, 10, budget).read(10, budget)
    assert worker.reads
    assert second.reads


def test_all_sources_down_waits_and_reads_when_one_is_back(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("block worker failed", count=1)
    assert read_all(client, budget) == DATA
    holder.stop()
    back = threading.Timer(0.8, holder.start)
    back.start()
    assert read_all(client, budget) == DATA
    back.join()


def test_all_sources_down_ends_with_the_budget(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget, short: Callable[[], Budget], expected_logs: Declare
) -> None:
    expected_logs("block worker failed", count=1)
    client.block_workers(budget)
    holder.stop()
    stream = client.open_stream(block(BLOCK_ID, 10, (1,)), 0, 10, short())
    with pytest.raises(Unavailable, match=rf"block {BLOCK_ID}"):
        stream.read(10, short())


def test_block_worker_of_another_protocol_version_is_refused(
    holder: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    holder.versions[version_pb2.BLOCK_WORKER_CLIENT_SERVICE] = 2
    with pytest.raises(VersionMismatch, match="block worker service has version 2"):
        client.open_stream(block(BLOCK_ID, 10, (1,)), 0, 10, budget).read(10, budget)


def test_evicted_block_of_a_superseded_id_is_unavailable_not_missing(
    worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stream = client.open_stream(block(BLOCK_ID, 10, (1,), ufs_path=None), 0, 10, budget)
    with pytest.raises(Unavailable, match="no block worker holds it"):
        stream.read(10, budget)
    assert worker.reads


def test_block_worker_session_that_ended_costs_one_more_login_and_no_other_source(
    holder: ScriptedAlluxio, second: ScriptedAlluxio, master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    second.blocks[BLOCK_ID] = DATA
    assert read_all(client, budget) == DATA
    holder.forget_sessions()
    assert read_all(client, budget) == DATA
    assert holder.done["unauthenticated"] == 1
    assert len(set(holder.session_ids)) == 2
    assert not second.reads
    assert not master.calls("GetBlockInfo")


def test_close_from_another_thread_ends_a_waiting_read(
    holder: ScriptedAlluxio, master: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(master, settings={"stall_s": 60.0})
    holder.read_faults.append(ReadFault(stall_after=0))
    stream = client.open_stream(block(BLOCK_ID, 10, (1,)), 0, 10, budget)
    closer = threading.Timer(0.2, stream.close)
    closer.start()
    with pytest.raises(Unavailable, match="closed"):
        stream.read(10, budget)
    closer.join()


RECORDS = 64
RECORD_BYTES = 5000


def test_report_26_heavy_load_on_a_failing_backend_gives_whole_records_or_errors(
    holder: ScriptedAlluxio,
    second: ScriptedAlluxio,
    client: AlluxioClient,
    budget: Budget,
    expected_logs: Declare,
) -> None:
    """Checked records (as TFRecord has them) read by many threads while streams are cut and fail: never zeros."""
    expected_logs("block worker failed")
    rng = random.Random(26)
    records = []
    for _ in range(RECORDS):
        payload = rng.randbytes(RECORD_BYTES - 4)
        records.append(payload + zlib.crc32(payload).to_bytes(4, "little"))
    content = b"".join(records)
    holder.blocks[BLOCK_ID] = second.blocks[BLOCK_ID] = content
    faults = [
        rng.choice(
            [ReadFault(cut_after=rng.randrange(RECORD_BYTES)), ReadFault(fail_after=rng.randrange(RECORD_BYTES))]
        )
        for _ in range(150)
    ]
    holder.read_faults = second.read_faults = deque(faults)
    wanted = block(BLOCK_ID, len(content), (1, 2))

    def check(number: int) -> bool:
        offset = number % RECORDS * RECORD_BYTES
        record = client.open_stream(wanted, offset, RECORD_BYTES, budget).read(RECORD_BYTES, budget)
        return zlib.crc32(record[:-4]).to_bytes(4, "little") == record[-4:] and record == records[number % RECORDS]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(4 * RECORDS)))
    assert not holder.read_faults, "every fault was met"
    done = holder.done + second.done
    assert done["cut"] > 20
    assert done["failed"] > 20
