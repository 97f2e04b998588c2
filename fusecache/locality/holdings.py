"""What a node holds, put together from what its mounts answer. Pure.

Each mount answers its control socket's message `locality` for itself (`answer_of` reads it). A data set may be served
by several mounts and counts once: the mount that serves most of it speaks. Block workers of one cluster are seen by
every mount of it and count once too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fusecache.errors import ProtocolError


class TierRoom(NamedTuple):
    """Size of a tier on this node."""

    capacity_bytes: int
    free_bytes: int


class MountState(NamedTuple):
    """One mount of the node."""

    mountpoint: str
    ready: bool
    reason: str
    """Why its reads don't work; "" when they do."""


class DatasetHolding(NamedTuple):
    """One data set on the node."""

    name: str
    ready: bool
    """A ready mount serves the whole of it."""
    total_bytes: int
    listed_whole: bool
    tiers: Mapping[str, int]
    """Tier (`local_block_worker`, `node_cache`) -> bytes that can be served now."""


class Holdings(NamedTuple):
    """The node."""

    mounts: tuple[MountState, ...]
    datasets: Mapping[str, DatasetHolding]
    rooms: Mapping[str, TierRoom]
    """Tier -> its size."""


class MountAnswer(NamedTuple):
    """What one mount told, or why it told nothing."""

    state: MountState
    datasets: tuple[DatasetHolding, ...] = ()
    """`ready` says that the mount serves the whole of it, whatever the mount's own state."""
    block_workers: Mapping[tuple[str, int], TierRoom] = {}
    """(cluster id, worker id) -> its size, for the block workers on this node."""


def silent(mountpoint: str, reason: str) -> MountAnswer:
    """A mount that told nothing."""
    return MountAnswer(MountState(mountpoint, False, reason))


def answer_of(mountpoint: str, reply: Mapping[str, Any], max_age_s: float) -> MountAnswer:
    """The reply to `locality`. ProtocolError when it is none.

    Bytes that were measured longer than `max_age_s` ago count as nothing: who measures is stuck, and nobody knows.
    """
    try:
        ready = bool(reply["ready"])
        state = MountState(mountpoint, ready, "" if ready else str(reply["reason"]))
        age_s = reply["measured_age_s"]
        current = age_s is not None and float(age_s) <= max_age_s
        datasets = tuple(
            DatasetHolding(
                str(dataset["name"]),
                bool(dataset["whole"]),
                _bytes(dataset["total_bytes"]),
                bool(dataset["listed_whole"]),
                {str(tier): _bytes(held) for tier, held in dataset["tiers"].items()} if current else {},
            )
            for dataset in reply["datasets"]
        )
        cluster_id = str(reply["cluster_id"])
        block_workers = {}
        for worker in reply["block_workers"]:
            capacity_bytes, used_bytes = _bytes(worker["capacity_bytes"]), _bytes(worker["used_bytes"])
            room = TierRoom(capacity_bytes, max(0, capacity_bytes - used_bytes))
            block_workers[cluster_id, int(worker["id"])] = room
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the mount at {mountpoint} answered 'locality' with something else: {error!r}") from None
    return MountAnswer(state, datasets, block_workers)


def merge(answers: Iterable[MountAnswer]) -> Holdings:
    """The node from its mounts."""
    mounts: list[MountState] = []
    best: dict[str, tuple[tuple[bool, bool, bool, int], DatasetHolding]] = {}
    block_workers: dict[tuple[str, int], TierRoom] = {}
    for answer in answers:
        mounts.append(answer.state)
        block_workers.update(answer.block_workers)
        for dataset in answer.datasets:
            holding = dataset._replace(ready=dataset.ready and answer.state.ready)
            rank = (holding.ready, dataset.ready, dataset.listed_whole, sum(dataset.tiers.values()))
            known = best.get(dataset.name)
            if known is None or rank > known[0]:
                best[dataset.name] = (rank, holding)
    rooms = {}
    if block_workers:
        rooms["local_block_worker"] = TierRoom(
            sum(room.capacity_bytes for room in block_workers.values()),
            sum(room.free_bytes for room in block_workers.values()),
        )
    return Holdings(tuple(mounts), {name: holding for name, (_, holding) in best.items()}, rooms)


def not_ready(holdings: Holdings, reason: str) -> Holdings:
    """The same node when none of its mounts serves any longer."""
    return Holdings(
        tuple(mount._replace(ready=False, reason=mount.reason or reason) for mount in holdings.mounts),
        {name: dataset._replace(ready=False) for name, dataset in holdings.datasets.items()},
        holdings.rooms,
    )


def _bytes(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{value!r} is no number of bytes")
    return number
