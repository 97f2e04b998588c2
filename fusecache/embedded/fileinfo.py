"""Inodes as Alluxio's FileInfo messages, with the places where each block is held now.

Pure apart from the names of users and groups, which are looked up once each. Every value is the one a real
master sends for a file of a local UFS: a folder's length is its number of children, modes are nine bits, a
file without content has no blocks.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable, Sequence
from functools import lru_cache

from fusecache.embedded import inode as inodes
from fusecache.embedded.block_worker import MOUNT_ID
from fusecache.embedded.inode import Inode
from fusecache.pb.alluxio.common_pb2 import BlockInfo, BlockLocation
from fusecache.pb.alluxio.file_system_master_pb2 import FileBlockInfo, FileInfo

Locate = Callable[[int], Sequence[BlockLocation]]
"""Block id -> where it is held now."""


@lru_cache(maxsize=4096)
def owner_name(uid: int) -> bytes:
    """Name of a user, or the number as text when it has none."""
    try:
        return pwd.getpwuid(uid).pw_name.encode()
    except KeyError:
        return str(uid).encode()


@lru_cache(maxsize=4096)
def group_name(gid: int) -> bytes:
    """Name of a group, or the number as text when it has none."""
    try:
        return grp.getgrgid(gid).gr_name.encode()
    except KeyError:
        return str(gid).encode()


def file_info(inode: Inode, path: bytes, ufs_path: bytes, locate: Locate) -> FileInfo:
    """The message for one inode at `path`, stored at `ufs_path` in the local file system."""
    mtime_ms = inode.mtime_ns // 1_000_000
    info = FileInfo(
        fileId=inode.id,
        name=inode.name,
        path=path,
        ufsPath=ufs_path,
        length=inode.children if inode.folder else inode.length,
        blockSizeBytes=inode.block_size,
        creationTimeMs=inode.created_ms,
        completed=True,
        folder=inode.folder,
        pinned=False,
        cacheable=not inode.folder,
        persisted=True,
        lastModificationTimeMs=mtime_ms,
        ttl=-1,
        owner=owner_name(inode.uid),
        group=group_name(inode.gid),
        mode=inode.mode,
        persistenceState=b"PERSISTED",
        mountPoint=False,  # of the root too: only mounts below it count
        mountId=MOUNT_ID,
        lastAccessTimeMs=mtime_ms,
    )
    cached = 0
    for index in range(inode.block_count):
        block = inodes.block_id(inode.id, index)
        length = inode.block_length(index)
        locations = locate(block)
        info.blockIds.append(block)
        info.fileBlockInfos.append(
            FileBlockInfo(
                blockInfo=BlockInfo(blockId=block, length=length, locations=locations),
                offset=index * inode.block_size,
            )
        )
        if locations:
            cached += length
    if not inode.folder:
        percent = 100 if inode.length == 0 else cached * 100 // inode.length
        info.inAlluxioPercentage = percent
        info.inMemoryPercentage = 0  # blocks lie in an SSD tier
    return info
