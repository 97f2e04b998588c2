"""The embedded server's scripted faults on the wire: what the client sees, and what is counted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusecache.embedded.faults import FaultPlan
from fusecache.embedded.server import EmbeddedServer
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest
from fusecache.pb.alluxio.file_system_master_pb2 import ONCE, GetStatusPRequest, ListStatusPOptions, ListStatusPRequest
from tests.support.embedded import WireClient, common_options, embedded_server, read_request, wait_until

SIZE = 10_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "file").write_bytes(os.urandom(SIZE))
    return folder


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan()


@pytest.fixture
def server(source: Path, tmp_path: Path, plan: FaultPlan) -> Iterator[EmbeddedServer]:
    with embedded_server(source, tmp_path / "state", block_workers=2, entries_per_message=2, faults=plan) as running:
        yield running


@pytest.fixture
def master(server: EmbeddedServer) -> Iterator[WireClient]:
    with WireClient(server.master_target) as connected:
        yield connected


@pytest.fixture
def worker(server: EmbeddedServer) -> Iterator[WireClient]:
    with WireClient(server.worker_targets[0]) as connected:
        yield connected


def received(client: WireClient, request: ReadRequest, timeout_s: float | None = None) -> tuple[bytes, grpc.StatusCode]:
    """(bytes that came, how the stream ended)."""
    answers = client.worker.ReadBlock(_never_ending(request), metadata=client.metadata, timeout=timeout_s)
    data = b""
    try:
        for answer in answers:
            data += answer.chunk.data
    except grpc.RpcError as failure:
        return data, failure.code()
    return data, grpc.StatusCode.OK


def _never_ending(request: ReadRequest) -> Iterator[ReadRequest]:
    """A request stream that is never half-closed; gRPC drops it with the call."""
    yield request
    while True:
        time.sleep(0.01)
        yield ReadRequest(offset_received=0)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "OK"])
def test_cut_stream_ends_at_the_exact_byte(
    plan: FaultPlan, master: WireClient, worker: WireClient, source: Path, code: str
) -> None:
    for number, cut in enumerate((0, 1, 999, 1000, 1001, SIZE - 1, SIZE)):
        rule = plan.on("ReadBlock", nth=1).cut_after(bytes=cut, code=code)
        data, ended = received(worker, read_request(master.stat(b"/file"), chunk_size=1000))
        assert data == (source / "file").read_bytes()[:cut]
        assert ended == getattr(grpc.StatusCode, code)
        assert rule.injected == 1
        assert plan.injected() == number + 1


def test_cut_past_the_end_never_happens(plan: FaultPlan, master: WireClient, worker: WireClient, source: Path) -> None:
    rule = plan.on("ReadBlock").cut_after(bytes=SIZE + 1)
    data, ended = received(worker, read_request(master.stat(b"/file")))
    assert (data, ended) == ((source / "file").read_bytes(), grpc.StatusCode.OK)
    assert (rule.calls, rule.injected) == (1, 0)


def test_cut_read_leaves_no_block(
    plan: FaultPlan, server: EmbeddedServer, master: WireClient, worker: WireClient
) -> None:
    plan.on("ReadBlock", nth=1).cut_after(bytes=5000)
    info = master.stat(b"/file")
    received(worker, read_request(info, chunk_size=1000))
    wait_until(lambda: not list((server.tier_folders[0] / "alluxioworker" / ".tmp_blocks").iterdir()))
    assert server.blocks[0].block_ids() == []
    received(worker, read_request(info, chunk_size=1000))
    assert server.blocks[0].block_ids() == list(info.blockIds)


def test_fault_of_one_worker_spares_the_other(
    plan: FaultPlan, server: EmbeddedServer, master: WireClient, worker: WireClient, source: Path
) -> None:
    plan.on("ReadBlock", worker=0).error("UNAVAILABLE", "going away")
    request = read_request(master.stat(b"/file"))
    assert received(worker, request) == (b"", grpc.StatusCode.UNAVAILABLE)
    with WireClient(server.worker_targets[1]) as other:
        assert received(other, request) == ((source / "file").read_bytes(), grpc.StatusCode.OK)
    assert plan.injected("error") == 1


@pytest.mark.parametrize("by", [7, -7])
def test_wrong_length_of_a_block_ends_with_ok(
    plan: FaultPlan, master: WireClient, worker: WireClient, source: Path, by: int
) -> None:
    plan.on("ReadBlock").wrong_length(by)
    data, ended = received(worker, read_request(master.stat(b"/file"), chunk_size=1000))
    assert len(data) == SIZE + by
    assert data[: SIZE - 7] == (source / "file").read_bytes()[: SIZE - 7]
    assert ended == grpc.StatusCode.OK
    assert plan.injected("wrong_length") == 1


def test_wrong_length_of_metadata_is_told_by_status_and_listing(plan: FaultPlan, master: WireClient) -> None:
    plan.on("GetStatus").wrong_length(-3)
    plan.on("ListStatus").wrong_length(5)
    assert master.stat(b"/file").length == SIZE - 3
    assert [info.length for info in master.entries(b"/")] == [SIZE + 5]
    assert (plan.injected(method="GetStatus"), plan.injected(method="ListStatus")) == (1, 1)


def test_error_answers_the_chosen_call_alone(plan: FaultPlan, master: WireClient) -> None:
    plan.on("GetStatus", nth=2).error("RESOURCE_EXHAUSTED", "too busy")
    master.stat(b"/file")
    with pytest.raises(grpc.RpcError) as failure:
        master.stat(b"/file")
    assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too busy")
    master.stat(b"/file")
    assert plan.injected() == 1


def test_delay_comes_before_the_answer(plan: FaultPlan, master: WireClient) -> None:
    plan.on("GetStatus", nth=1).delay(0.2)
    began = time.monotonic()
    master.stat(b"/file")
    assert time.monotonic() - began >= 0.2
    assert plan.injected("delay") == 1


@pytest.mark.parametrize("sent", [0, 2500])
def test_stalled_stream_sends_its_part_and_then_nothing(
    plan: FaultPlan, master: WireClient, worker: WireClient, source: Path, sent: int
) -> None:
    rule = plan.on("ReadBlock").stall(bytes=sent)
    data, ended = received(worker, read_request(master.stat(b"/file"), chunk_size=1000), timeout_s=0.5)
    assert (data, ended) == ((source / "file").read_bytes()[:sent], grpc.StatusCode.DEADLINE_EXCEEDED)
    assert rule.injected == 1


def test_stalled_call_does_not_hold_up_others_or_the_end(plan: FaultPlan, master: WireClient) -> None:
    plan.on("GetStatus", nth=1).stall()
    waiting = master.files.GetStatus.future(GetStatusPRequest(path=b"/"), metadata=master.metadata)
    wait_until(lambda: plan.injected("stall") == 1)
    assert master.stat(b"/file").length == SIZE
    assert not waiting.done()
    waiting.cancel()


def test_listing_is_cut_between_messages(plan: FaultPlan, master: WireClient, source: Path) -> None:
    for number in range(6):
        (source / f"{number}").touch()
    plan.on("ListStatus").cut_after(messages=2)
    names: list[bytes] = []
    options = ListStatusPOptions(loadMetadataType=ONCE, commonOptions=common_options())
    stream = master.files.ListStatus(ListStatusPRequest(path=b"/", options=options), metadata=master.metadata)
    with pytest.raises(grpc.RpcError) as failure:
        names.extend(info.name for message in stream for info in message.fileInfos)
    assert names == [b"0", b"1", b"2", b"3"]
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert plan.injected("cut_after") == 1


def test_dropped_connection_takes_every_call_on_it_and_can_be_made_again(
    plan: FaultPlan, server: EmbeddedServer, master: WireClient, worker: WireClient, source: Path
) -> None:
    request = read_request(master.stat(b"/file"), chunk_size=1000)
    plan.on("ReadBlock", nth=1).drop_connection(bytes=3000)
    data, ended = received(worker, request, timeout_s=20)
    # What was under way when the connection broke may or may not have arrived, but never anything else.
    assert (source / "file").read_bytes()[:3000].startswith(data)
    assert ended == grpc.StatusCode.UNAVAILABLE
    assert plan.injected("drop_connection") == 1
    # The handshake stream was on it too: the server has forgotten the channel.
    wait_until(lambda: server.authentications[1].users() == [])
    assert received(worker, request, timeout_s=20) == (b"", grpc.StatusCode.UNAUTHENTICATED)
    with WireClient(server.worker_targets[0]) as again:
        assert received(again, request) == ((source / "file").read_bytes(), grpc.StatusCode.OK)
    assert master.stat(b"/file").length == SIZE


def test_handshake_can_be_refused(plan: FaultPlan, server: EmbeddedServer) -> None:
    rule = plan.on("authenticate").error("UNAVAILABLE")
    with pytest.raises(grpc.RpcError) as failure:
        WireClient(server.master_target)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert rule.injected == 1


def test_cleared_plan_leaves_calls_alone(plan: FaultPlan, master: WireClient) -> None:
    plan.on("GetStatus").error("UNAVAILABLE")
    plan.clear()
    assert master.stat(b"/file").length == SIZE


def test_rewriter_changes_every_answer(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def rewrite(method: str, message: Any) -> Any:
        seen.append(method)
        if method == "GetStatus":
            message.fileInfo.name = b"../evil"
        for info in getattr(message, "fileInfos", ()):
            info.length = -1
        return message

    with (
        embedded_server(source, tmp_path / "state", rewrite=rewrite) as running,
        WireClient(running.master_target) as client,
    ):
        assert client.stat(b"/file").name == b"../evil"
        assert [info.length for info in client.entries(b"/")] == [-1]
    assert seen == ["authenticate", "GetStatus", "ListStatus"]
