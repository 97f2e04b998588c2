"""Which block worker to ask for a block, and which one to have it loaded by. Pure: values in, values out.

Reading: block workers that hold the block, this node's first; then the under storage through one (a supposed holder
too: it may have evicted the block) chosen as
Alluxio's LocalFirstAvoidEvictionPolicy does: of those with room for the block beside `reserved_bytes`, this node's,
else a random one; when none has room, the same among all that could ever hold it. Those that failed lately come
last, never not at all: all may have failed lately.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fusecache.alluxio.model import Block, BlockWorkerInfo

MAX_UFS_SOURCES = 3
"""Block workers of one round that are asked to read the under storage: they all meet the same storage, so that a file
that is gone need not be asked for on each of some hundred."""


class Source(NamedTuple):
    """One way to get a block's bytes."""

    worker: BlockWorkerInfo
    ufs: bool
    """True when the worker is expected to fetch it from the under storage."""

    @property
    def kind(self) -> str:
        """As metrics name it."""
        return "ufs" if self.ufs else "block_worker"


def readable_from_ufs(block: Block) -> bool:
    """True when a block worker may fetch the block from the under storage."""
    return block.ufs_path is not None or block.in_ufs_tier


def sources(
    block: Block,
    workers: Sequence[BlockWorkerInfo],
    *,
    node_ids: Collection[int],
    suspects: Collection[int],
    reserved_bytes: int,
    rng: random.Random,
) -> Iterator[Source]:
    """Every sensible source of `block`, best first; nothing when nobody can have it.

    An iterator, because most reads use the first one, and ordering some hundred block workers for the under storage
    would cost more than the request.
    """
    by_id = {worker.worker_id: worker for worker in workers}
    holders = [by_id[worker_id] for worker_id in block.locations if worker_id in by_id]
    rng.shuffle(holders)
    avoided: list[Source] = []
    for worker in _nearest_first(holders, node_ids):
        if worker.worker_id in suspects:
            avoided.append(Source(worker, ufs=False))
        else:
            yield Source(worker, ufs=False)
    if readable_from_ufs(block):
        held = {worker.worker_id for worker in holders}
        others = [worker for worker in workers if worker.worker_id not in held]
        ordered = ufs_order(others, block.length, node_ids=node_ids, reserved_bytes=reserved_bytes, rng=rng)
        for worker in ordered[:MAX_UFS_SOURCES]:
            if worker.worker_id in suspects:
                avoided.append(Source(worker, ufs=True))
            else:
                yield Source(worker, ufs=True)
    yield from avoided


def ufs_order(
    workers: Sequence[BlockWorkerInfo],
    length: int,
    *,
    node_ids: Collection[int],
    reserved_bytes: int,
    rng: random.Random,
) -> list[BlockWorkerInfo]:
    """Block workers in the order LocalFirstAvoidEvictionPolicy would take them for a block of `length` bytes."""
    shuffled = list(workers)
    rng.shuffle(shuffled)

    def rank(worker: BlockWorkerInfo) -> tuple[int, bool]:
        if worker.capacity_bytes - worker.used_bytes - reserved_bytes >= length:
            room = 0
        elif worker.capacity_bytes >= length:
            room = 1
        else:
            room = 2  # too small to ever cache the block; it can still pass the bytes on
        return room, worker.worker_id not in node_ids

    return sorted(shuffled, key=rank)


def _nearest_first(workers: Sequence[BlockWorkerInfo], node_ids: Collection[int]) -> list[BlockWorkerInfo]:
    return sorted(workers, key=lambda worker: worker.worker_id not in node_ids)


def of_this_node(workers: Sequence[BlockWorkerInfo], node_hosts: Collection[str]) -> frozenset[int]:
    """Ids of the block workers that run on this node: host, container host or tiered identity is one of its names."""
    names = {name.lower() for name in node_hosts}
    return frozenset(
        worker.worker_id
        for worker in workers
        if not names.isdisjoint(
            name.lower() for name in (worker.address.host, worker.address.container_host, worker.address.node) if name
        )
    )
