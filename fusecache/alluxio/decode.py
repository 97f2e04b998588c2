"""From the wire to `alluxio.model`, with every bound checked: the only door for what servers say. Pure.

All bytes from the network are hostile. A message that can't be true is refused with `Rejected` (or, inside a list,
skipped and reported to `rejected(what)`), so that one bad entry never hides its neighbours. Parts that only
help speed (block locations, owner names) are left out and reported, without losing the file.

Nothing here decides what a caller does with a refusal, and nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusecache.alluxio.model import (
    FILE_SEQUENCE,
    MAX_ID,
    BlockPlacement,
    BlockWorkerAddress,
    BlockWorkerInfo,
    Capacity,
    ClusterIdentity,
    FileStatus,
    LoadFailure,
    block_id_of,
)
from fusecache.errors import ProtocolError
from fusecache.pb.alluxio import (
    block_master_pb2,
    block_worker_pb2,
    common_pb2,
    file_system_master_pb2,
    meta_master_pb2,
)

MAX_NAME_BYTES = 255
"""As Linux (NAME_MAX)."""

MAX_PATH_BYTES = 64 << 10
"""Longer paths and UFS addresses are refused; Linux itself stops at 4096 per call, object stores at some KiB."""

MAX_LENGTH = 2**63 - 1
MAX_BLOCKS = FILE_SEQUENCE
"""A block's number has 24 bits and the last one means the file itself."""

MAX_LOCATIONS = 4096
"""Block workers per block that are kept; a cluster that replicates further only loses the hint."""

MAX_TIME_MS = (2**63 - 1) // 1_000_000
"""April 2262: as nanoseconds it still fits into 64 bits. Later times are shown as this one, negative ones as 0: a
strange time is no reason to hide a file."""

MAX_CLUSTER_ID = 64
_CLUSTER_ID_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_HOST_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-:%[]")
MAX_HOST_BYTES = 253

Report = Callable[[str], None]


class Rejected(ProtocolError):
    """A message that can't be true. `what` names the kind for the counter, never the content."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


def check_name(name: bytes) -> bytes:
    """A file name as Linux can show it, byte for byte; Rejected for '/', NUL, '.', '..', empty, or too long."""
    if not name or len(name) > MAX_NAME_BYTES or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise Rejected("name", f"impossible file name of {len(name)} bytes")
    return name


def check_path(path: bytes) -> bytes:
    """An absolute path in normal form: every component a possible name, no trailing slash (but b"/" itself)."""
    if path == b"/":
        return path
    if len(path) > MAX_PATH_BYTES or path[:1] != b"/":
        raise Rejected("path", f"impossible path of {len(path)} bytes")
    for name in path[1:].split(b"/"):
        if not name or len(name) > MAX_NAME_BYTES or b"\0" in name or name in (b".", b".."):
            raise Rejected("path", f"impossible component in a path of {len(path)} bytes")
    return path


def decode_status(info: file_system_master_pb2.FileInfo, rejected: Report, *, asked: bytes | None) -> FileStatus:
    """One FileInfo about the path `asked` (None = by id: any path). Rejected when it can't be true."""
    path = check_path(info.path)
    if asked is not None and path != asked:
        raise Rejected("path", "answer is about another path than the one asked for")
    name = path.rpartition(b"/")[2]
    if info.name != name:
        raise Rejected("name", "name is not the last component of the path")
    return _status(info, path, name, rejected)


def decode_listing(
    infos: Iterable[file_system_master_pb2.FileInfo], folder: bytes, rejected: Report
) -> list[FileStatus]:
    """The children of `folder` (normal form) in one message; impossible ones and second ones of a name are left
    out and reported."""
    prefix = folder if folder == b"/" else folder + b"/"
    found: list[FileStatus] = []
    names: set[bytes] = set()
    for info in infos:
        try:
            name = check_name(info.name)
            path = info.path
            if path != prefix + name or len(path) > MAX_PATH_BYTES:
                raise Rejected("path", "entry is not a child of the listed folder")
            if name in names:
                raise Rejected("name", "second entry of one name")
            status = _status(info, path, name, rejected)
        except Rejected as refusal:
            rejected(refusal.what)
            continue
        names.add(name)
        found.append(status)
    return found


def _status(info: file_system_master_pb2.FileInfo, path: bytes, name: bytes, rejected: Report) -> FileStatus:
    file_id = info.fileId
    if not 0 <= file_id <= MAX_ID:
        raise Rejected("file_id", "file id out of range")
    mode = info.mode
    if not 0 <= mode <= 0o7777:
        raise Rejected("mode", "mode has other bits than permissions")
    state = info.persistenceState
    in_ufs_tier = state == b"TO_BE_PERSISTED"
    persisted = info.persisted or in_ufs_tier
    folder = info.folder
    length = block_size = block_count = 0
    locations: tuple[tuple[int, ...], ...] = ()
    completed = info.completed
    if folder:
        completed = True
    else:
        if file_id & FILE_SEQUENCE != FILE_SEQUENCE:
            raise Rejected("file_id", "a file's id does not end in the file sequence number")
        block_size = info.blockSizeBytes
        if block_size < 0:
            raise Rejected("block_size", "block size is negative")
        # While a writer has the file open, its length and blocks are not final: nothing of them is shown.
        if completed:
            length = info.length
            block_count = _count_blocks(info, file_id, length, block_size)
            if info.fileBlockInfos:
                locations = _locations(info, file_id, length, block_size, block_count, rejected)
    mount_id = info.mountId
    ufs_path = info.ufsPath
    if mount_id < 0 or len(ufs_path) > MAX_PATH_BYTES or b"\0" in ufs_path:
        if ufs_path:
            rejected("ufs_path")
        mount_id = max(0, mount_id)
        ufs_path = b""
    return FileStatus(
        file_id,
        name,
        path,
        folder,
        completed,
        persisted,
        in_ufs_tier,
        info.mountPoint,
        length,
        block_size,
        block_count,
        locations,
        min(max(0, info.lastModificationTimeMs), MAX_TIME_MS),
        mode,
        _person(info.owner, rejected),
        _person(info.group, rejected),
        mount_id,
        ufs_path,
    )


def _count_blocks(info: file_system_master_pb2.FileInfo, file_id: int, length: int, block_size: int) -> int:
    """Blocks of a completed file; Rejected unless the ids sent are exactly those that follow from the file id."""
    ids = info.blockIds
    if length == 0:
        if ids:
            raise Rejected("blocks", "an empty file has blocks")
        return 0
    if length < 0:
        raise Rejected("length", "length is negative")
    if block_size < 1:
        raise Rejected("block_size", "a file with content has no block size")
    count = -(-length // block_size)
    if count > MAX_BLOCKS:
        raise Rejected("blocks", "more blocks than ids exist")
    if len(ids) != count:
        raise Rejected("blocks", "number of blocks does not follow from length and block size")
    first = file_id & ~FILE_SEQUENCE
    if count == 1:
        if ids[0] != first:
            raise Rejected("blocks", "block id does not follow from the file id")
    elif any(block_id != first + index for index, block_id in enumerate(ids)):
        raise Rejected("blocks", "block ids do not follow from the file id")
    return count


def _locations(
    info: file_system_master_pb2.FileInfo,
    file_id: int,
    length: int,
    block_size: int,
    block_count: int,
    rejected: Report,
) -> tuple[tuple[int, ...], ...]:
    """Per block the block workers that hold it; () when nobody holds any. Impossible hints are left out."""
    held: dict[int, tuple[int, ...]] = {}
    for file_block in info.fileBlockInfos:
        block = file_block.blockInfo
        if not block.locations:
            continue
        index = block.blockId - (file_id & ~FILE_SEQUENCE)
        if not 0 <= index < block_count:
            rejected("location")
            continue
        if block.length != min(block_size, length - index * block_size) or index in held:
            rejected("location")
            continue
        held[index] = _worker_ids(block, rejected)
    if not any(held.values()):
        return ()
    return tuple(held.get(index, ()) for index in range(block_count))


def _worker_ids(block: common_pb2.BlockInfo, rejected: Report) -> tuple[int, ...]:
    ids: list[int] = []
    for location in block.locations:
        worker_id = location.workerId
        if worker_id < 0 or len(ids) >= MAX_LOCATIONS:
            rejected("location")
        elif worker_id not in ids:
            ids.append(worker_id)
    return tuple(ids)


def _person(name: bytes, rejected: Report) -> bytes:
    if len(name) > MAX_NAME_BYTES or b"\0" in name:
        rejected("owner")
        return b""
    return name


def decode_file_path(answer: file_system_master_pb2.GetFilePathPResponse) -> bytes:
    """The path of an id."""
    return check_path(answer.path)


def decode_block_workers(
    answer: block_master_pb2.GetWorkerInfoListPResponse, rejected: Report
) -> tuple[BlockWorkerInfo, ...]:
    """The live block workers; impossible ones and second ones of an id are left out and reported."""
    found: dict[int, BlockWorkerInfo] = {}
    for info in answer.workerInfos:
        try:
            worker = _block_worker(info)
            if worker.worker_id in found:
                raise Rejected("block_worker", "second block worker of one id")
        except Rejected as refusal:
            rejected(refusal.what)
            continue
        found[worker.worker_id] = worker
    return tuple(found.values())


def _block_worker(info: block_master_pb2.WorkerInfo) -> BlockWorkerInfo:
    if info.id < 0 or info.capacityBytes < 0 or info.usedBytes < 0:
        raise Rejected("block_worker", "a block worker's id or size is negative")
    return BlockWorkerInfo(
        worker_id=info.id,
        address=decode_address(info.address),
        capacity_bytes=info.capacityBytes,
        used_bytes=info.usedBytes,
        state=info.state[:64].decode("ascii", "replace"),
    )


def decode_address(address: common_pb2.WorkerNetAddress) -> BlockWorkerAddress:
    """Where a block worker listens; Rejected unless it can be dialled."""
    host = _host(address.host)
    container_host = _host(address.containerHost)
    if not host and not container_host:
        raise Rejected("worker_address", "a block worker has no host")
    if not 1 <= address.dataPort <= 65535 or not 0 <= address.rpcPort <= 65535:
        raise Rejected("worker_address", "a block worker's port is out of range")
    socket_path = address.domainSocketPath
    if len(socket_path) > MAX_PATH_BYTES or b"\0" in socket_path:
        raise Rejected("worker_address", "impossible domain socket path")
    node = b""
    for tier in address.tieredIdentity.tiers:
        if tier.tierName == b"node":
            node = tier.value
            break
    return BlockWorkerAddress(
        host=host,
        container_host=container_host,
        rpc_port=address.rpcPort,
        data_port=address.dataPort,
        domain_socket_path=socket_path.decode("utf-8", "surrogateescape"),
        node=_host(node),
    )


def _host(name: bytes) -> str:
    if len(name) > MAX_HOST_BYTES or not _HOST_BYTES.issuperset(name):
        raise Rejected("worker_address", "impossible host name")
    return name.decode("ascii")


def decode_block_placement(block: common_pb2.BlockInfo, block_id: int, rejected: Report) -> BlockPlacement:
    """Answer to GetBlockInfo about `block_id`."""
    if block.blockId != block_id:
        raise Rejected("blocks", "answer is about another block than the one asked for")
    if block.length < 0:
        raise Rejected("length", "a block's length is negative")
    return BlockPlacement(block_id, block.length, _worker_ids(block, rejected))


def decode_identity(info: meta_master_pb2.MasterInfo, primary: str) -> ClusterIdentity:
    """Who the cluster is. Its id becomes part of file and database names, hence the charset."""
    cluster_id = info.clusterId
    if not 1 <= len(cluster_id) <= MAX_CLUSTER_ID or not _CLUSTER_ID_BYTES.issuperset(cluster_id):
        raise Rejected("cluster_id", f"{primary}: impossible cluster id of {len(cluster_id)} bytes")
    if cluster_id in (b".", b".."):
        raise Rejected("cluster_id", f"{primary}: impossible cluster id")
    version = "".join(c if c.isprintable() else "?" for c in info.version[:64].decode("utf-8", "replace"))
    return ClusterIdentity(cluster_id.decode("ascii"), version, primary)


def decode_capacity(info: block_master_pb2.BlockMasterInfo) -> Capacity:
    """Size of the whole cluster's cache."""
    if info.capacityBytes < 0 or info.usedBytes < 0:
        raise Rejected("capacity", "the cluster's capacity is negative")
    return Capacity(info.capacityBytes, info.usedBytes)


def decode_configuration(answer: meta_master_pb2.GetConfigurationPResponse, rejected: Report) -> dict[str, str]:
    """The cluster's properties as sent (values may hold `${other.key}`)."""
    found: dict[str, str] = {}
    for entry in answer.clusterConfigs:
        if not 1 <= len(entry.name) <= MAX_PATH_BYTES or len(entry.value) > MAX_PATH_BYTES:
            rejected("configuration")
            continue
        found[entry.name.decode("utf-8", "replace")] = entry.value.decode("utf-8", "replace")
    return found


def decode_local_path(answer: block_worker_pb2.OpenLocalBlockResponse, block_id: int) -> tuple[bytes, bytes]:
    """(folder, file name) of a block file. The name must be the block's id: no server can make us open another
    file than one called like a block."""
    path = check_path(answer.path)
    folder, _, name = path.rpartition(b"/")
    if name != b"%d" % block_id or not folder:
        raise Rejected("local_path", "a block's local path does not end in its id")
    return folder, name


def decode_load_failures(
    answer: block_worker_pb2.LoadResponse, asked: Sequence[int], rejected: Report
) -> list[LoadFailure]:
    """Which of the `asked` blocks were not loaded; answers about other blocks are left out and reported."""
    if answer.status == block_worker_pb2.SUCCESS:
        return []
    missing = set(asked)
    failures: list[LoadFailure] = []
    for status in answer.block_status:
        block_id = status.block.block_id
        if block_id not in missing:
            rejected("load_status")
            continue
        missing.remove(block_id)
        if status.code == 0:
            continue
        text = status.message[:1024].decode("utf-8", "replace")
        failures.append(
            LoadFailure(
                block_id,
                status.code,
                "".join(c if c.isprintable() else " " for c in text)[:256],
                status.retryable,
            )
        )
    if not failures:
        raise Rejected("load_status", "Load failed without naming a block")
    return failures


def expected_block_ids(status: FileStatus) -> Iterable[int]:
    """The ids of a file's blocks, in order."""
    return (block_id_of(status.file_id, index) for index in range(status.block_count))
