"""What Alluxio tells us, after it was checked: immutable values without any protobuf in them.

Made only by `alluxio.decode` (from the wire) and by tests. Names and paths are bytes, as file names are.
NamedTuples rather than frozen dataclasses: a listing of 1,000,000 files makes as many, and a NamedTuple is
built several times faster.
"""

from __future__ import annotations

from typing import NamedTuple

FILE_SEQUENCE = (1 << 24) - 1
"""The sequence number that makes a container id a file id (Alluxio BlockId)."""

MAX_ID = (1 << 63) - 2
"""Largest file id accepted: inode = file id + 1 must stay below 2**63, where `.fusecache` inodes begin."""


def block_id_of(file_id: int, index: int) -> int:
    """Block `index` of a file: same container, sequence = index."""
    return (file_id & ~FILE_SEQUENCE) | index


def file_id_of(block_id: int) -> int:
    """The file that a block belongs to."""
    return block_id | FILE_SEQUENCE


class FileStatus(NamedTuple):
    """One file or folder as the master sees it (wire: FileInfo)."""

    file_id: int
    """0 .. MAX_ID."""
    name: bytes
    """Last component; b"" for the cluster's root."""
    path: bytes
    """Absolute Alluxio path."""
    folder: bool
    completed: bool
    """False while a writer has it open: length and blocks are not final."""
    persisted: bool
    """True when the UFS has (or, TO_BE_PERSISTED, will have) the bytes: blocks may be read from the UFS."""
    in_ufs_tier: bool
    """TO_BE_PERSISTED: the block is read through the UFS tier, without a UFS path."""
    mount_point: bool
    length: int
    """Bytes; 0 for a folder (Alluxio sends its child count there)."""
    block_size: int
    """Bytes per block; >= 1 for a file with content."""
    block_count: int
    """ceil(length / block_size); block ids follow from file_id (`block_id_of`)."""
    locations: tuple[tuple[int, ...], ...]
    """Per block the ids of the block workers that hold it; () when no block is cached anywhere."""
    mtime_ms: int
    mode: int
    """Permission bits, 0 .. 0o7777."""
    owner: bytes
    group: bytes
    mount_id: int
    ufs_path: bytes
    """Full UFS path of this file or folder, b"" when unknown."""


class BlockWorkerAddress(NamedTuple):
    """Where a block worker listens (wire: WorkerNetAddress)."""

    host: str
    container_host: str
    rpc_port: int
    data_port: int
    domain_socket_path: str
    node: str
    """Tiered identity `node`, "" when not given."""

    @property
    def target(self) -> str:
        """host:port to dial: the container's host when there is one, the data port always."""
        return f"{self.container_host or self.host}:{self.data_port}"


class BlockWorkerInfo(NamedTuple):
    """A live block worker (wire: WorkerInfo)."""

    worker_id: int
    address: BlockWorkerAddress
    capacity_bytes: int
    used_bytes: int
    state: str


class Block(NamedTuple):
    """Everything needed to read one block; made by the reader from metadata."""

    block_id: int
    length: int
    """This block's own length (the last one is shorter than the block size)."""
    locations: tuple[int, ...]
    """Ids of block workers that held it when the folder was listed; a hint."""
    ufs_path: bytes | None
    """UFS file to read it from when nobody holds it; None = never from the UFS (not persisted, or id superseded)."""
    ufs_offset: int
    mount_id: int
    in_ufs_tier: bool


class BlockPlacement(NamedTuple):
    """Answer to GetBlockInfo."""

    block_id: int
    length: int
    locations: tuple[int, ...]


class ClusterIdentity(NamedTuple):
    """Who the cluster is (wire: MasterInfo)."""

    cluster_id: str
    """[A-Za-z0-9_.-]{1,64}: it becomes part of file and database names."""
    version: str
    primary: str
    """host:port of the primary master."""


class Capacity(NamedTuple):
    """Cache capacity of the whole cluster, in bytes."""

    capacity_bytes: int
    used_bytes: int


class LoadFailure(NamedTuple):
    """A block that Load did not load."""

    block_id: int
    code: int
    """google.rpc code."""
    message: str
    retryable: bool
