"""What a master may say about files, block workers and the cluster, and what is refused (named cases)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fusecache.alluxio import decode
from fusecache.alluxio.model import FILE_SEQUENCE, MAX_ID, ClusterIdentity, block_id_of
from fusecache.errors import ProtocolError
from fusecache.pb.alluxio import (
    block_master_pb2,
    block_worker_pb2,
    common_pb2,
    file_system_master_pb2,
    meta_master_pb2,
)
from tests.support.scripted_alluxio import file_info, folder_info

MIB = 1 << 20


def listing(*infos: Any, folder: bytes = b"/d") -> tuple[list[bytes], Counter[str]]:
    rejected: Counter[str] = Counter()

    def reject(what: str) -> None:
        rejected[what] += 1

    return [status.name for status in decode.decode_listing(infos, folder, reject)], rejected


def quiet(what: str) -> None:
    raise AssertionError(f"{what} was rejected")


def status(info: Any) -> Any:
    return decode.decode_status(info, quiet, asked=None)


def test_file_good_is_taken_over() -> None:
    found = status(file_info(b"/d/a.jpg", container=2, length=150 * MIB, mode=0o640))
    assert found.file_id == 2 << 24 | FILE_SEQUENCE
    assert (found.name, found.path, found.ufs_path) == (b"a.jpg", b"/d/a.jpg", b"/ufs/d/a.jpg")
    assert (found.length, found.block_size, found.block_count) == (150 * MIB, 64 * MIB, 3)
    assert (found.mode, found.owner, found.group, found.mount_id) == (0o640, b"alice", b"staff", 1)
    assert found.completed
    assert found.persisted
    assert not found.in_ufs_tier
    assert found.locations == ()


def test_folder_length_is_not_its_child_count() -> None:
    found = status(folder_info(b"/d", file_id=7, children=4711))
    assert found.folder
    assert (found.length, found.block_count) == (0, 0)


def test_root_has_an_empty_name() -> None:
    found = status(folder_info(b"/", file_id=0))
    assert (found.file_id, found.name, found.path) == (0, b"", b"/")


@pytest.mark.parametrize("length", [0, 1, 10, 4095, 4096, 4097])
def test_file_tiny_length_is_exact(length: int) -> None:
    found = status(file_info(b"/f", container=1, length=length))
    assert (found.length, found.block_count) == (length, min(length, 1))


@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_file_around_a_block_multiple_has_the_blocks_that_cover_it(delta: int) -> None:
    found = status(file_info(b"/f", container=1, length=8 * 64 * MIB + delta))
    assert found.block_count == (9 if delta > 0 else 8)


def test_file_block_ids_with_the_high_bit_of_the_container_are_good() -> None:
    container = (1 << 39) - 2  # the largest whose inode, file id + 1, stays below 2**63
    found = status(file_info(b"/f", container=container, length=130 * MIB))
    assert found.file_id <= MAX_ID
    assert block_id_of(found.file_id, 2) == container << 24 | 2


def test_file_incomplete_shows_no_length_and_no_blocks() -> None:
    found = status(file_info(b"/f", container=1, length=5, completed=False, blockIds=[16777216, 16777217]))
    assert not found.completed
    assert (found.length, found.block_count, found.locations) == (0, 0, ())


def test_file_to_be_persisted_is_read_through_the_ufs_tier() -> None:
    found = status(file_info(b"/f", container=1, length=5, persisted=False, persistenceState=b"TO_BE_PERSISTED"))
    assert found.persisted
    assert found.in_ufs_tier


def located(container: int, index: int, length: int, *workers: int) -> Any:
    block = common_pb2.BlockInfo(
        blockId=container << 24 | index,
        length=length,
        locations=[common_pb2.BlockLocation(workerId=worker) for worker in workers],
    )
    return file_system_master_pb2.FileBlockInfo(blockInfo=block)


def test_locations_are_kept_per_block() -> None:
    blocks = [located(1, 0, 64 * MIB, 5, 6), located(1, 1, 64 * MIB), located(1, 2, 2 * MIB, 6)]
    found = status(file_info(b"/f", container=1, length=130 * MIB, fileBlockInfos=blocks))
    assert found.locations == ((5, 6), (), (6,))


@pytest.mark.parametrize(
    "bad",
    [
        located(2, 0, 64 * MIB, 5),
        located(1, 3, 64 * MIB, 5),
        located(1, 1, 64 * MIB - 1, 5),
        located(1, 2, 64 * MIB, 5),
        located(1, 0, 64 * MIB, 5),
        located(1, 1, 64 * MIB, -5),
    ],
    ids=["other file", "beyond the file", "short", "last block too long", "second of an index", "negative worker"],
)
def test_location_that_cannot_be_true_is_left_out_and_the_file_kept(bad: Any) -> None:
    rejected: Counter[str] = Counter()
    blocks = [located(1, 0, 64 * MIB, 7), bad]
    info = file_info(b"/f", container=1, length=130 * MIB, fileBlockInfos=blocks)
    found = decode.decode_status(info, lambda what: rejected.update([what]), asked=b"/f")
    assert found.locations[0] == (7,)
    assert found.locations[1:] == ((), ())
    assert rejected == {"location": 1}


HOSTILE_NAMES = [b"", b".", b"..", b"a/b", b"/", b"a\0b", b"x" * 256]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_listing_hostile_name_is_counted_and_hides_nobody(name: bytes) -> None:
    good = [file_info(b"/d/a", container=1, length=1), file_info(b"/d/z", container=3, length=1)]
    hostile = file_info(b"/d/" + name, container=2, length=1, name=name)
    names, rejected = listing(good[0], hostile, good[1])
    assert names == [b"a", b"z"]
    assert rejected == {"name": 1}


GOOD_NAMES = [b"x" * 255, b"...", b".hidden", b"\xff\xfe", b"a b\n\\", "ü".encode(), b"-rf", b"*"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_listing_odd_but_possible_name_is_kept_byte_for_byte(name: bytes) -> None:
    names, rejected = listing(file_info(b"/d/" + name, container=1, length=1))
    assert (names, rejected) == ([name], {})


WRONG_FILES: list[tuple[str, dict[str, Any]]] = [
    ("length", {"length": -1}),
    ("blocks", {"length": 2**63 - 1}),
    ("blocks", {"length": 2**63 - 1, "blockSizeBytes": 1}),
    ("block_size", {"blockSizeBytes": 0}),
    ("block_size", {"blockSizeBytes": -1}),
    ("blocks", {"blockIds": []}),
    ("blocks", {"blockIds": [2 << 24]}),
    ("blocks", {"blockIds": [(2 << 24) + 1, 2 << 24]}),
    ("blocks", {"blockIds": [2 << 24, 2 << 24]}),
    ("blocks", {"blockIds": [3 << 24, (3 << 24) + 1]}),
    ("blocks", {"length": 0}),
    ("file_id", {"fileId": -1}),
    ("file_id", {"fileId": 2**63 - 1}),
    ("file_id", {"fileId": 5}),
    ("mode", {"mode": 0o10644}),
    ("mode", {"mode": -1}),
    ("path", {"path": b"/e/f"}),
    ("path", {"path": b"/d/../f"}),
    ("path", {"path": b"/d"}),
    ("path", {"path": b""}),
]


@pytest.mark.parametrize(("what", "wrong"), WRONG_FILES, ids=[str(wrong) for _, wrong in WRONG_FILES])
def test_listing_impossible_file_is_counted_and_hides_nobody(what: str, wrong: dict[str, Any]) -> None:
    hostile = file_info(b"/d/f", container=2, length=100 * MIB)
    for field, value in wrong.items():
        hostile.ClearField(field)
        hostile.MergeFrom(file_system_master_pb2.FileInfo(**{field: value}))
    names, rejected = listing(file_info(b"/d/a", container=1, length=1), hostile)
    assert names == [b"a"]
    assert rejected == {what: 1}


def test_listing_second_entry_of_a_name_is_left_out() -> None:
    names, rejected = listing(file_info(b"/d/a", container=1, length=1), file_info(b"/d/a", container=2, length=1))
    assert (names, rejected) == ([b"a"], {"name": 1})


def test_listing_of_the_root_joins_paths_once() -> None:
    names, rejected = listing(file_info(b"/a", container=1, length=1), folder=b"/")
    assert (names, rejected) == ([b"a"], {})


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"owner": b"o" * 256}, "owner"),
        ({"group": b"a\0b"}, "owner"),
        ({"ufsPath": b"/a\0b"}, "ufs_path"),
        ({"mountId": -1}, "ufs_path"),
    ],
)
def test_file_detail_that_cannot_be_true_is_blanked_and_the_file_kept(wrong: dict[str, Any], what: str) -> None:
    rejected: Counter[str] = Counter()
    info = file_info(b"/f", container=1, length=1, **wrong)
    found = decode.decode_status(info, lambda kind: rejected.update([kind]), asked=b"/f")
    assert rejected == {what: 1}
    assert b"" in (found.owner, found.group, found.ufs_path)
    assert found.mount_id >= 0


@pytest.mark.parametrize("time_ms", [-(2**63), -1, 0, 1, 2**63 - 1])
def test_file_strange_time_fits_nanoseconds_of_64_bits(time_ms: int) -> None:
    found = status(file_info(b"/f", container=1, length=1, lastModificationTimeMs=time_ms))
    assert 0 <= found.mtime_ms * 1_000_000 < 2**63


@pytest.mark.parametrize("path", [b"", b"a", b"/a/", b"//a", b"/a//b", b"/./a", b"/a/..", b"/a\0", b"/" + b"x" * 256])
def test_path_not_in_normal_form_is_refused(path: bytes) -> None:
    with pytest.raises(decode.Rejected) as refusal:
        decode.decode_file_path(file_system_master_pb2.GetFilePathPResponse(path=path))
    assert refusal.value.what == "path"


def test_status_about_another_path_is_refused() -> None:
    with pytest.raises(decode.Rejected, match="another path"):
        decode.decode_status(file_info(b"/f", container=1, length=1), quiet, asked=b"/g")


def address(**fields: Any) -> common_pb2.WorkerNetAddress:
    return common_pb2.WorkerNetAddress(**{"host": b"node1", "rpcPort": 29999, "dataPort": 30001, **fields})


def test_address_dials_container_host_and_data_port() -> None:
    assert decode.decode_address(address(containerHost=b"10.0.0.7")).target == "10.0.0.7:30001"
    assert decode.decode_address(address()).target == "node1:30001"


def test_address_node_comes_from_the_tiered_identity() -> None:
    tiers = common_pb2.TieredIdentity(
        tiers=[
            common_pb2.LocalityTier(tierName=b"rack", value=b"r1"),
            common_pb2.LocalityTier(tierName=b"node", value=b"node1.example"),
        ]
    )
    assert decode.decode_address(address(tieredIdentity=tiers)).node == "node1.example"


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": b""},
        {"host": b"a b"},
        {"host": b"evil\n"},
        {"host": b"\xff"},
        {"host": b"h" * 254},
        {"host": b"unix:/run/x"},
        {"dataPort": 0},
        {"dataPort": 65536},
        {"rpcPort": -1},
        {"domainSocketPath": b"/a\0"},
    ],
    ids=str,
)
def test_block_worker_that_cannot_be_dialled_is_left_out(wrong: dict[str, Any]) -> None:
    rejected: Counter[str] = Counter()
    answer = block_master_pb2.GetWorkerInfoListPResponse(
        workerInfos=[
            block_master_pb2.WorkerInfo(id=1, address=address(**wrong)),
            block_master_pb2.WorkerInfo(id=2, address=address()),
            block_master_pb2.WorkerInfo(id=2, address=address()),
            block_master_pb2.WorkerInfo(id=3, address=address(), capacityBytes=-1),
        ]
    )
    found = decode.decode_block_workers(answer, lambda what: rejected.update([what]))
    assert [worker.worker_id for worker in found] == [2]
    assert rejected == {"worker_address": 1, "block_worker": 2}


@pytest.mark.parametrize("cluster_id", [b"", b"a/b", b"..", b".", b"a\0", b"x" * 65, b"\xff", b"a b"])
def test_cluster_id_that_is_no_file_name_is_refused(cluster_id: bytes) -> None:
    with pytest.raises(decode.Rejected, match="cluster id"):
        decode.decode_identity(meta_master_pb2.MasterInfo(clusterId=cluster_id), "m:1")


def test_cluster_id_uuid_is_good() -> None:
    info = meta_master_pb2.MasterInfo(clusterId=b"6f76c0dd-815a-4c09-8d4f-2c9dfa22510d", version=b"2.9.3\x1b[0m")
    assert decode.decode_identity(info, "m:1") == ClusterIdentity(
        "6f76c0dd-815a-4c09-8d4f-2c9dfa22510d", "2.9.3?[0m", "m:1"
    )


@pytest.mark.parametrize("path", [b"/mem/alluxioworker/16777216", b"/16777216"])
def test_local_path_ends_in_the_block_id(path: bytes) -> None:
    answer = block_worker_pb2.OpenLocalBlockResponse(path=path)
    if path.count(b"/") == 1:
        with pytest.raises(decode.Rejected):
            decode.decode_local_path(answer, 16777216)
    else:
        assert decode.decode_local_path(answer, 16777216) == (b"/mem/alluxioworker", b"16777216")


@pytest.mark.parametrize("path", [b"/etc/shadow", b"16777216", b"/a/../16777216", b"/a/16777217", b"/a/16777216/"])
def test_local_path_to_anything_else_is_refused(path: bytes) -> None:
    with pytest.raises(decode.Rejected):
        decode.decode_local_path(block_worker_pb2.OpenLocalBlockResponse(path=path), 16777216)


def test_block_placement_about_another_block_is_refused() -> None:
    with pytest.raises(decode.Rejected):
        decode.decode_block_placement(common_pb2.BlockInfo(blockId=2), 1, quiet)


def test_capacity_negative_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode.decode_capacity(block_master_pb2.BlockMasterInfo(capacityBytes=-1))


def block_status(block_id: int, code: int) -> block_worker_pb2.BlockStatus:
    return block_worker_pb2.BlockStatus(
        block=block_worker_pb2.Block(block_id=block_id, length=1), code=code, message=b"no\nspace", retryable=True
    )


def test_load_failures_are_those_that_were_asked_for() -> None:
    rejected: Counter[str] = Counter()
    answer = block_worker_pb2.LoadResponse(
        status=block_worker_pb2.PARTIAL_FAILURE,
        block_status=[block_status(1, 8), block_status(2, 0), block_status(9, 8), block_status(1, 8)],
    )
    found = decode.decode_load_failures(answer, [1, 2, 3], lambda what: rejected.update([what]))
    assert [(f.block_id, f.code, f.message, f.retryable) for f in found] == [(1, 8, "no space", True)]
    assert rejected == {"load_status": 2}


def test_load_failure_without_a_block_is_refused() -> None:
    with pytest.raises(decode.Rejected):
        decode.decode_load_failures(block_worker_pb2.LoadResponse(status=block_worker_pb2.FAILURE), [1], quiet)


def test_configuration_hostile_entries_are_left_out() -> None:
    rejected: Counter[str] = Counter()
    answer = meta_master_pb2.GetConfigurationPResponse(
        clusterConfigs=[
            common_pb2.ConfigProperty(name=b"a.b", value=b"\xff1"),
            common_pb2.ConfigProperty(name=b"", value=b"x"),
        ]
    )
    assert decode.decode_configuration(answer, lambda what: rejected.update([what])) == {"a.b": "�1"}
    assert rejected == {"configuration": 1}
