"""Metadata calls: what every request carries, what becomes of answers, listings that break off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.master import LISTING_PIECE
from fusecache.errors import InvalidRequest, NotFound, PermissionDenied, ProtocolError, StaleId, Unavailable
from fusecache.metrics import Metrics
from fusecache.pb.alluxio import common_pb2, file_system_master_pb2
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio, file_info, folder_info
from tests.t1_rpc.conftest import MakeClient, total


def names(client: AlluxioClient, path: bytes, budget: Budget) -> list[bytes]:
    pieces = client.list_status(path, sync_interval_ms=-1, budget=budget)
    return [status.name for piece in pieces for status in piece]


def assert_safe(common: file_system_master_pb2.FileSystemMasterCommonPOptions, sync_interval_ms: int) -> None:
    """Without these a master may delete what it loads, from the under storage too."""
    assert common.ttl == -1
    assert common.ttlAction == common_pb2.FREE
    assert common.HasField("syncIntervalMs")
    assert common.syncIntervalMs == sync_interval_ms


@pytest.mark.parametrize("sync_interval_ms", [-1, 0, 300_000])
def test_request_status_carries_load_type_ttl_and_sync_interval(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, sync_interval_ms: int
) -> None:
    master.files[b"/f"] = file_info(b"/f", container=1, length=5)
    client.get_status(b"/f", sync_interval_ms=sync_interval_ms, budget=budget)
    options = master.calls("GetStatus")[0].request.options
    assert options.loadMetadataType == file_system_master_pb2.ONCE
    assert options.HasField("updateTimestamps")
    assert not options.updateTimestamps
    assert not options.HasField("accessMode")
    assert_safe(options.commonOptions, sync_interval_ms)


def test_request_listing_carries_load_type_ttl_and_sync_interval(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    list(client.list_status(b"/d", sync_interval_ms=0, budget=budget))
    options = master.calls("ListStatus")[0].request.options
    assert options.loadMetadataType == file_system_master_pb2.ONCE
    assert not options.recursive
    assert_safe(options.commonOptions, 0)


def test_request_free_carries_ttl_and_sync_interval(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    client.free(b"/d", budget, recursive=True)
    options = master.calls("Free")[0].request.options
    assert options.recursive
    assert not options.forced
    assert_safe(options.commonOptions, -1)


def test_identity_is_the_clusters(master: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    identity = client.connect(budget)
    assert (identity.cluster_id, identity.version, identity.primary) == (
        master.cluster_id.decode(),
        "2.9.3",
        master.target,
    )


def test_identity_that_is_no_file_name_is_refused(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, metrics: Metrics, expected_logs: Declare
) -> None:
    expected_logs("upstream data rejected", count=1)
    master.cluster_id = b"../../etc"
    with pytest.raises(ProtocolError, match="cluster id"):
        client.connect(budget)
    assert total(metrics, "fusecache_upstream_rejected_total{what=cluster_id}") == 1


def test_status_missing_is_not_found(client: AlluxioClient, budget: Budget) -> None:
    with pytest.raises(NotFound, match="/nope"):
        client.get_status(b"/nope", sync_interval_ms=-1, budget=budget)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.PERMISSION_DENIED, PermissionDenied), (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest)],
)
def test_status_refused_for_good_is_asked_once(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(code, "no")

    master.on("GetStatus", refuse)
    with pytest.raises(kind):
        client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    assert len(master.calls("GetStatus")) == 1


def test_status_try_that_hangs_is_ended_and_repeated(
    master: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    master.files[b"/f"] = file_info(b"/f", container=1, length=5)
    client = make_client(master, settings={"rpc_try_s": 0.4})
    client.connect(budget)
    hung = threading.Event()

    def hang_once(request: Any, context: grpc.ServicerContext) -> Any:
        if not hung.is_set():
            hung.set()
            gone = threading.Event()
            if not context.add_callback(gone.set):
                gone.set()  # the client has gone already
            gone.wait()
        return master._get_status(request, context)

    master.on("GetStatus", hang_once)
    assert client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length == 5
    assert hung.is_set()


def test_status_non_utf8_path_is_bytes_both_ways(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    path = b"/\xff\xfe/caf\xe9"
    master.files[path] = file_info(path, container=1, length=5)
    assert client.get_status(path, sync_interval_ms=-1, budget=budget).path == path


def test_id_unknown_is_stale(client: AlluxioClient, budget: Budget) -> None:
    with pytest.raises(StaleId):
        client.get_file_path(5, budget)
    with pytest.raises(StaleId):
        client.get_file_info(5, budget)


def test_id_known_gives_path_and_status(master: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    info = file_info(b"/d/f", container=3, length=5)
    master.files[b"/d/f"] = info
    assert client.get_file_path(info.fileId, budget) == b"/d/f"
    assert client.get_file_info(info.fileId, budget).path == b"/d/f"


def test_id_answer_about_another_file_is_refused(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("upstream data rejected", count=1)

    def other(request: Any, context: grpc.ServicerContext) -> Any:
        return file_system_master_pb2.GetFileInfoPResponse(fileInfo=file_info(b"/g", container=9, length=1))

    master.on("GetFileInfo", other)
    with pytest.raises(ProtocolError):
        client.get_file_info(5, budget)


def test_capacity_and_configuration_are_read(master: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    assert client.capacity(budget).capacity_bytes == 1 << 40


def test_listing_empty_folder_is_no_message_at_all(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    master.children[b"/empty"] = []
    assert names(client, b"/empty", budget) == []


def test_listing_folders_do_not_take_their_child_count_for_a_size(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    master.children[b"/d"] = [[folder_info(b"/d/sub", file_id=9, children=77)]]
    ((sub,),) = client.list_status(b"/d", sync_interval_ms=-1, budget=budget)
    assert (sub.folder, sub.length) == (True, 0)


def test_listing_several_messages_arrive_in_pieces_in_order(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    files = [file_info(b"/d/%05d" % i, container=i + 1, length=1) for i in range(2 * LISTING_PIECE + 10)]
    master.children[b"/d"] = [files[: LISTING_PIECE + 5], files[LISTING_PIECE + 5 :]]
    pieces = list(client.list_status(b"/d", sync_interval_ms=-1, budget=budget))
    assert [len(piece) for piece in pieces] == [LISTING_PIECE, 5, LISTING_PIECE, 5]
    assert [status.name for piece in pieces for status in piece] == [f.name for f in files]


def test_listing_message_beyond_grpcs_default_limit_is_received(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    files = [file_info(b"/d/%05d" % i, container=i + 1, length=1, ufsPath=b"/ufs/" + b"x" * 900) for i in range(6000)]
    message = file_system_master_pb2.ListStatusPResponse(fileInfos=files)
    assert message.ByteSize() > 4 << 20
    master.children[b"/d"] = [files]
    assert len(names(client, b"/d", budget)) == 6000


def test_listing_hostile_entries_are_counted_and_hide_nobody(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, metrics: Metrics, expected_logs: Declare
) -> None:
    expected_logs("upstream data rejected", count=2)
    master.children[b"/d"] = [
        [
            file_info(b"/d/a", container=1, length=1),
            file_info(b"/d/../x", container=2, length=1, name=b"../x"),
            file_info(b"/d/..", container=3, length=1),
            file_info(b"/d/n", container=4, length=-1),
            file_info(b"/d/z", container=5, length=1),
        ]
    ]
    assert names(client, b"/d", budget) == [b"a", b"z"]
    assert total(metrics, "fusecache_upstream_rejected_total{what=name}") == 2
    assert total(metrics, "fusecache_upstream_rejected_total{what=length}") == 1


def test_listing_of_a_file_is_not_an_empty_folder(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    master.children[b"/f"] = [[file_info(b"/f", container=1, length=1)]]
    with pytest.raises(NotFound, match="not a folder"):
        names(client, b"/f", budget)


def break_off(master: ScriptedAlluxio, *, after_messages: int, code: grpc.StatusCode, times: int) -> None:
    """Have listings of /d break off; `times` of them, then they are whole."""

    def listing(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        broken = master.done["broken"] < times
        for number, infos in enumerate(master.children[request.path]):
            if broken and number == after_messages:
                master.done["broken"] += 1
                context.abort(code, "primary has changed")
            yield file_system_master_pb2.ListStatusPResponse(fileInfos=infos)

    master.on("ListStatus", listing)


def hundred_thousand(path: bytes) -> list[list[Any]]:
    files = [file_info(path + b"/%06d" % i, container=i + 1, length=1) for i in range(100_000)]
    return [files[i : i + 10_000] for i in range(0, len(files), 10_000)]


def test_f09_leader_change_in_a_listing_of_100_000_is_an_error_never_a_part(
    servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    old, new = (ScriptedAlluxio().start() for _ in range(2))
    servers += [old, new]
    old.children[b"/d"] = new.children[b"/d"] = hundred_thousand(b"/d")

    def standby(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAVAILABLE, "standby")

    new.on("getServiceVersion", standby)
    break_off(old, after_messages=4, code=grpc.StatusCode.UNAVAILABLE, times=1)
    client = make_client(old, new)
    seen: list[bytes] = []
    pieces = client.list_status(b"/d", sync_interval_ms=-1, budget=budget)
    with pytest.raises(Unavailable, match="broke off"):
        seen.extend(status.name for piece in pieces for status in piece)
    assert old.done["broken"] == 1
    assert len(seen) == 40_000

    old.on("getServiceVersion", standby)
    new.on("getServiceVersion", new._get_service_version)
    again = names(client, b"/d", budget)
    assert len(again) == len(set(again)) == 100_000
    assert new.calls("ListStatus")


def test_f09_listing_that_fails_before_its_first_message_is_repeated(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    master.children[b"/d"] = [[file_info(b"/d/a", container=1, length=1)]]
    break_off(master, after_messages=0, code=grpc.StatusCode.UNAVAILABLE, times=2)
    assert names(client, b"/d", budget) == [b"a"]
    assert master.done["broken"] == 2


def test_listing_that_is_abandoned_half_way_is_cancelled(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    cancelled = threading.Event()

    def endless(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if not context.add_callback(cancelled.set):
            cancelled.set()  # the client has gone already
        number = 0
        while context.is_active():
            number += 1
            yield file_system_master_pb2.ListStatusPResponse(
                fileInfos=[file_info(b"/d/%d" % number, container=number, length=1)]
            )

    master.on("ListStatus", endless)
    pieces = client.list_status(b"/d", sync_interval_ms=-1, budget=budget)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert cancelled.wait(5)


def test_f15_endless_listing_ends_with_the_budget(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget, short: Callable[[], Budget]
) -> None:
    client.connect(budget)

    def endless(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        while context.is_active():
            master.done["empty_message"] += 1
            yield file_system_master_pb2.ListStatusPResponse()

    master.on("ListStatus", endless)
    with pytest.raises(Unavailable, match="broke off"):
        names(client, b"/d", short())
    assert master.done["empty_message"] > 0


def test_block_workers_list_is_kept_and_renewed(
    master: ScriptedAlluxio, worker: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    (info,) = client.block_workers(budget)
    assert info.address.target == worker.target
    client.block_workers(budget)
    assert len(master.calls("GetWorkerInfoList")) == 1
    client.block_workers(budget, max_age_s=0.0)
    assert len(master.calls("GetWorkerInfoList")) == 2


def test_block_workers_old_list_serves_while_no_master_answers(
    master: ScriptedAlluxio,
    worker: ScriptedAlluxio,
    client: AlluxioClient,
    budget: Budget,
    short: Callable[[], Budget],
    expected_logs: Declare,
) -> None:
    expected_logs("block worker list not refreshed", count=1)
    expected_logs("master does not answer")
    before = client.block_workers(budget)
    master.stop()
    assert client.block_workers(short(), max_age_s=0.0) == before


def test_block_placement_of_an_unknown_block_is_not_found(
    master: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    master.placements[16777216] = [4, 5]
    assert client.block_placement(16777216, budget).locations == (4, 5)
    with pytest.raises(NotFound):
        client.block_placement(33554432, budget)
