"""Calls to one block worker other than reading: where a block's file is, keep it young, store it, load many.

Blocking; each function makes one call and translates its error. Whom to ask is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from fusecache.alluxio import decode
from fusecache.alluxio.connection import Connection, PendingCall
from fusecache.alluxio.methods import CACHE, LOAD, OPEN_LOCAL_BLOCK
from fusecache.alluxio.model import Block, BlockWorkerAddress
from fusecache.alluxio.read_call import ufs_options
from fusecache.alluxio.status import to_error
from fusecache.errors import Unavailable
from fusecache.pb.alluxio.block_worker_pb2 import (
    Block as LoadBlock,
)
from fusecache.pb.alluxio.block_worker_pb2 import (
    CacheRequest,
    CacheResponse,
    LoadRequest,
    LoadResponse,
    OpenLocalBlockRequest,
    UfsReadOptions,
)


def open_local_block(connection: Connection, block_id: int, timeout_s: float) -> tuple[bytes, bytes]:
    """(folder, name) of the block's file on the worker's host; counts as a use of the block. NotFound.

    The lock is given back at once: a reader that opens the file keeps its bytes whatever happens to the name, and
    one that comes too late finds another length or nothing.
    """
    request = OpenLocalBlockRequest(block_id=block_id, promote=False)
    what = f"block {block_id} on {connection.target}"
    try:
        stream, call = connection.converse(OPEN_LOCAL_BLOCK, request, login_s=timeout_s, timeout_s=timeout_s)
        try:
            answer = next(stream, None)
            stream.end()
            # The server unlocks the block when it sees the half-close, and then ends the call; cancelling at once would
            # make it log an error for every touched block.
            next(stream, None)
        except grpc.RpcError as error:
            call.failed(error)
            raise
        finally:
            stream.cancel()
        call.succeeded()
    except grpc.RpcError as error:
        raise to_error(error, what) from error
    if answer is None:
        raise Unavailable(f"{what}: stream ended without an answer")
    return decode.decode_local_path(answer, block_id)


def start_cache(
    connection: Connection, block: Block, source: BlockWorkerAddress, timeout_s: float
) -> PendingCall[CacheResponse]:
    """Ask a block worker to store a block, in its own time. `source`: itself = from the under storage, another
    block worker = copy from there."""
    request = CacheRequest(
        block_id=block.block_id,
        source_host=(source.container_host or source.host).encode(),
        source_port=source.data_port,
        length=block.length,
        open_ufs_block_options=ufs_options(block, no_cache=False),
    )
    setattr(request, "async", True)  # a keyword in Python
    return connection.future(CACHE, request, timeout_s)


def start_load(connection: Connection, blocks: Sequence[Block], timeout_s: float) -> PendingCall[LoadResponse]:
    """Ask a block worker to load blocks from the under storage; it answers when it is done with all of them."""
    request = LoadRequest(
        blocks=[
            LoadBlock(
                block_id=block.block_id,
                length=block.length,
                ufs_path=block.ufs_path,
                offset_in_file=block.ufs_offset,
                mountId=block.mount_id,
            )
            for block in blocks
        ],
        options=UfsReadOptions(tag=b"fusecache", position_short=False),
    )
    return connection.future(LOAD, request, timeout_s)
