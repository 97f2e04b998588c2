"""Whatever a server sends is decoded to values within their bounds, or refused: never another exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.alluxio import decode
from fusecache.alluxio.model import MAX_ID, FileStatus, block_id_of
from fusecache.pb.alluxio import (
    block_master_pb2,
    block_worker_pb2,
    common_pb2,
    file_system_master_pb2,
    meta_master_pb2,
)

EXAMPLES = settings(max_examples=80)

# Small alphabets on purpose: collisions, separators and edges must be frequent, not one in 2**64.
NAMES = st.lists(st.sampled_from([b"a", b"b", b".", b"/", b"\0", b"\xff", b"x" * 250]), max_size=3).map(b"".join)
NUMBERS = st.sampled_from(
    [0, 1, -1, 5, 63, 64, 65, 16777215, 16777216, 16777217, 33554431, 2**31 - 1, 2**62, MAX_ID, 2**63 - 1, -(2**63)]
) | st.integers(-(2**63), 2**63 - 1)
SMALL = st.sampled_from([0, 1, -1, 29999, 65535, 65536, 0o755, 0o7777, 0o10000, 2**31 - 1, -(2**31)])
LOCATIONS = st.builds(common_pb2.BlockLocation, workerId=NUMBERS)
BLOCKS = st.builds(common_pb2.BlockInfo, blockId=NUMBERS, length=NUMBERS, locations=st.lists(LOCATIONS, max_size=3))
FILES = st.builds(
    file_system_master_pb2.FileInfo,
    fileId=NUMBERS,
    name=NAMES,
    path=NAMES | NAMES.map(lambda name: b"/d/" + name),
    ufsPath=NAMES,
    length=NUMBERS,
    blockSizeBytes=NUMBERS,
    completed=st.booleans(),
    folder=st.booleans(),
    persisted=st.booleans(),
    persistenceState=st.sampled_from([b"", b"PERSISTED", b"TO_BE_PERSISTED", b"\xff"]),
    mountPoint=st.booleans(),
    blockIds=st.lists(NUMBERS, max_size=4),
    fileBlockInfos=st.lists(st.builds(file_system_master_pb2.FileBlockInfo, blockInfo=BLOCKS), max_size=3),
    lastModificationTimeMs=NUMBERS,
    mode=SMALL,
    owner=NAMES,
    group=NAMES,
    mountId=NUMBERS,
)
ADDRESSES = st.builds(
    common_pb2.WorkerNetAddress,
    host=NAMES,
    containerHost=NAMES,
    rpcPort=SMALL,
    dataPort=SMALL,
    domainSocketPath=NAMES,
)
WORKERS = st.builds(
    block_master_pb2.WorkerInfo, id=NUMBERS, address=ADDRESSES, capacityBytes=NUMBERS, usedBytes=NUMBERS, state=NAMES
)


def ignore(what: str) -> None:
    assert what.replace("_", "").isalpha()


def assert_in_bounds(status: FileStatus) -> None:
    assert 0 <= status.file_id <= MAX_ID
    assert 0 <= status.length < 2**63
    assert 0 <= status.mode <= 0o7777
    assert 0 <= status.mtime_ms * 10**6 < 2**63
    assert status.mount_id >= 0
    assert status.path.startswith(b"/")
    assert status.path.endswith(status.name)
    assert b"\0" not in status.path + status.ufs_path
    assert len(status.name) <= 255
    assert b"/" not in status.name
    assert status.name not in (b".", b"..")
    if status.length:
        assert status.block_count == -(-status.length // status.block_size)
        assert block_id_of(status.file_id, status.block_count - 1) < status.file_id
    else:
        assert status.block_count == 0
    assert len(status.locations) in (0, status.block_count)
    assert all(worker_id >= 0 for held in status.locations for worker_id in held)


@EXAMPLES
@given(st.lists(FILES, max_size=3))
def test_listing_any_entries_are_in_bounds_or_left_out(infos: list[Any]) -> None:
    refused: list[str] = []
    found = decode.decode_listing(infos, b"/d", refused.append)
    assert len(found) + len(refused) >= len(infos)
    assert len({status.name for status in found}) == len(found)
    for status in found:
        assert status.path == b"/d/" + status.name
        assert_in_bounds(status)


@EXAMPLES
@given(FILES)
def test_status_any_message_is_in_bounds_or_refused(info: Any) -> None:
    try:
        status = decode.decode_status(info, ignore, asked=None)
    except decode.Rejected:
        return
    assert_in_bounds(status)


@EXAMPLES
@given(st.lists(WORKERS, max_size=5))
def test_block_workers_any_entries_can_be_dialled_or_are_left_out(infos: list[Any]) -> None:
    answer = block_master_pb2.GetWorkerInfoListPResponse(workerInfos=infos)
    found = decode.decode_block_workers(answer, ignore)
    for worker in found:
        host, _, port = worker.address.target.rpartition(":")
        assert host
        assert 1 <= int(port) <= 65535
        assert worker.capacity_bytes >= 0
    assert len({worker.worker_id for worker in found}) == len(found)


DOORS: list[tuple[type[Message], Callable[[Any], object]]] = [
    (file_system_master_pb2.FileInfo, lambda m: decode.decode_status(m, ignore, asked=None)),
    (file_system_master_pb2.FileInfo, lambda m: decode.decode_listing([m], b"/", ignore)),
    (file_system_master_pb2.GetFilePathPResponse, decode.decode_file_path),
    (block_master_pb2.GetWorkerInfoListPResponse, lambda m: decode.decode_block_workers(m, ignore)),
    (common_pb2.BlockInfo, lambda m: decode.decode_block_placement(m, 5, ignore)),
    (block_master_pb2.BlockMasterInfo, decode.decode_capacity),
    (meta_master_pb2.MasterInfo, lambda m: decode.decode_identity(m, "m:1")),
    (meta_master_pb2.GetConfigurationPResponse, lambda m: decode.decode_configuration(m, ignore)),
    (block_worker_pb2.OpenLocalBlockResponse, lambda m: decode.decode_local_path(m, 5)),
    (block_worker_pb2.LoadResponse, lambda m: decode.decode_load_failures(m, [5], ignore)),
]

FIELD = st.tuples(
    st.integers(1, 40),
    st.one_of(
        st.integers(0, 2**64 - 1).map(lambda n: (0, n)),
        st.binary(max_size=40).map(lambda b: (2, b)),
    ),
)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def wire(fields: list[tuple[int, tuple[int, Any]]]) -> bytes:
    """Any fields of any number with varint or length-delimited content, as protobuf has them on the wire."""
    out = b""
    for number, (kind, content) in fields:
        out += varint(number << 3 | kind)
        out += varint(content) if kind == 0 else varint(len(content)) + content
    return out


@settings(max_examples=300)
@given(st.sampled_from(DOORS), st.lists(FIELD, max_size=12).map(wire))
def test_every_door_any_bytes_that_parse_give_a_value_or_a_refusal(
    door: tuple[type[Message], Callable[[Any], object]], data: bytes
) -> None:
    kind, decoded = door
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return  # grpc ends such a call with INTERNAL before anything of ours sees it
    try:
        decoded(message)
    except decode.Rejected as refusal:
        ignore(refusal.what)
