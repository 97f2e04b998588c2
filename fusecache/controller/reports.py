"""What nodes said: every report is checked as hostile input, kept per node, and ages by our own clock.

A report comes in through `receive`, which says what became of it: taken; taken from nothing (ask for a full one);
refused because it can't be true; or out of sequence. A report is taken whole or not at all. The newest stream of a node
is the node: an older one, left over from a broken connection, is told to end.

A node whose last report is older than three intervals counts for nothing, whatever it said. It stays in the table for
a while, so that people see when it was last heard.

Time comes in as seconds of a monotonic clock. No network here, and no decision about pods.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fusecache.pb.locality import locality_pb2 as pb

COUNTING_INTERVALS = 3
"""A report counts during this many intervals after it came in."""

REMEMBERED_S = 600.0
"""A silent node is shown, as one that does not count, for this long."""

MAX_NODES = 20_000
MAX_MOUNTS = 256
MAX_DATASETS = 1000
"""Data sets of one node."""
MAX_DIRECTIVES = 1000
MAX_NAME = 512
"""Characters of a data set's name or an id."""
MAX_PATH = 4096
MAX_REASON = 256
MAX_REASONS = 3
"""Mounts that are not ready whose reasons are kept: they are written on pods."""
MAX_BYTES = 1 << 60
"""An exbibyte: more than any node, and sums of it stay far from 64 bits."""

_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class Outcome(Enum):
    """What became of a report."""

    TAKEN = "taken"
    REPORT_FULLY = "report_fully"
    """Nothing is known that a delta could change: the next one must be full."""
    INVALID = "invalid"
    GAP = "gap"
    SUPERSEDED = "superseded"
    """A newer stream speaks for this node."""
    FULL = "full"
    """More nodes than we keep."""


class Receipt(NamedTuple):
    """Answer to one report."""

    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """One data set on one node."""

    ready: bool
    """A mount of the node serves it whole, and reads work."""
    total_bytes: int
    listed_whole: bool
    tiers: Mapping[int, int]
    """Tier (number of the protocol) -> bytes."""

    @property
    def served_bytes(self) -> int:
        """Bytes the node can serve by itself: of all tiers together, and never more than there are."""
        held = sum(self.tiers.values())
        return min(held, self.total_bytes) if self.listed_whole else held


@dataclass(slots=True)
class NodeState:
    """What is known of one node."""

    session: int
    received_s: float
    mounts_not_ready: tuple[str, ...] = ()
    """Mount point and why, of the first few."""
    holdings: dict[str, Holding] = field(default_factory=dict)


class Stream:
    """One connection of a node, from its first report to its end."""

    __slots__ = ("node_name", "sequence", "session")

    def __init__(self) -> None:
        self.node_name = ""
        self.session = 0
        self.sequence = 0
        """Of the last report taken."""


class Reports:
    """The table of nodes. One thread uses it."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._nodes: dict[str, NodeState] = {}
        self._speaking: dict[str, Stream] = {}

    @property
    def counts_for_s(self) -> float:
        """Seconds a report counts."""
        return COUNTING_INTERVALS * self._interval_s

    def receive(self, stream: Stream, message: pb.NodeReport, now_s: float) -> Receipt:
        """Take a report of a stream, or say why not."""
        reason = _why_invalid(message, stream)
        if reason:
            return Receipt(Outcome.INVALID, reason)
        name = message.node_name
        if message.sequence != stream.sequence + 1:
            return Receipt(Outcome.GAP, f"report {message.sequence} came after {stream.sequence}")
        first = stream.sequence == 0
        if first:
            if name not in self._nodes and len(self._nodes) >= MAX_NODES:
                self.forget_silent(now_s, self.counts_for_s)
                if len(self._nodes) >= MAX_NODES:
                    return Receipt(Outcome.FULL, f"{MAX_NODES} nodes report already")
            self._speaking[name] = stream
        elif self._speaking.get(name) is not stream:
            return Receipt(Outcome.SUPERSEDED, f"a newer stream reports for node {name}")
        stream.node_name, stream.session, stream.sequence = name, message.session, message.sequence
        known = self._nodes.get(name)
        if not message.full and (known is None or known.session != message.session):
            self._nodes.pop(name, None)
            return Receipt(Outcome.REPORT_FULLY, "nothing is known that this report could change")
        holdings = {} if message.full or known is None else dict(known.holdings)
        for removed in message.removed_datasets:
            holdings.pop(removed, None)
        for dataset in message.datasets:
            holdings[dataset.name] = _holding(dataset)
        if len(holdings) > MAX_DATASETS:
            return Receipt(Outcome.INVALID, f"more than {MAX_DATASETS} data sets")
        self._nodes[name] = NodeState(
            session=message.session,
            received_s=now_s,
            mounts_not_ready=tuple(
                f"{shown(mount.mountpoint)}: {shown(mount.reason)}" for mount in message.mounts if not mount.ready
            )[:MAX_REASONS],
            holdings=holdings,
        )
        return Receipt(Outcome.TAKEN)

    def close(self, stream: Stream) -> None:
        """The stream ended. What it said goes on counting until it is too old: most streams come back at once."""
        if self._speaking.get(stream.node_name) is stream:
            del self._speaking[stream.node_name]

    def clear(self) -> None:
        """Forget everything: another instance leads, and this one's knowledge ages unseen."""
        self._nodes.clear()
        self._speaking.clear()

    def forget_silent(self, now_s: float, older_than_s: float = REMEMBERED_S) -> None:
        """Drop nodes not heard for so long."""
        for name in [name for name, state in self._nodes.items() if now_s - state.received_s > older_than_s]:
            del self._nodes[name]

    def counting(self, now_s: float) -> Iterator[tuple[str, NodeState]]:
        """Nodes whose last report counts."""
        for name, state in self._nodes.items():
            if now_s - state.received_s <= self.counts_for_s:
                yield name, state

    def all(self) -> Iterator[tuple[str, NodeState]]:
        """Every node remembered."""
        yield from self._nodes.items()


def shown(text: str) -> str:
    """A text of a node for people: one line, bounded."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_REASON])


def _holding(message: pb.DatasetReport) -> Holding:
    # A tier that this version does not know comes from a newer node: its bytes are not counted, the rest is.
    known: dict[int, int] = {tier.tier: tier.bytes for tier in message.tiers if tier.tier in pb.Tier.values()}
    return Holding(message.ready, message.total_bytes, message.listed_whole, known)


def _why_invalid(message: pb.NodeReport, stream: Stream) -> str:
    """Why the report can't be true; empty when it can."""
    if not _NODE_NAME.fullmatch(message.node_name):
        return f"node_name {shown(message.node_name)!r} is not the name of a node"
    if stream.node_name and message.node_name != stream.node_name:
        return f"node_name changed from {stream.node_name!r} to {message.node_name!r} within a stream"
    if message.session == 0:
        return "session is 0"
    if message.sequence == 0:
        return "sequence is 0"
    if stream.sequence == 0 and not message.full:
        return "the first report of a stream is not full"
    if message.full and message.removed_datasets:
        return "a full report has removed_datasets"
    for what, number, limit in (
        ("mounts", len(message.mounts), MAX_MOUNTS),
        ("datasets", len(message.datasets), MAX_DATASETS),
        ("removed_datasets", len(message.removed_datasets), MAX_DATASETS),
        ("live_directives", len(message.live_directives), MAX_DIRECTIVES),
        ("capacities", len(message.capacities), len(pb.Tier.values()) + 8),
    ):
        if number > limit:
            return f"{number} {what}; at most {limit}"
    for name in message.removed_datasets:
        if reason := _why_no_name(name, "removed_datasets"):
            return reason
    for mount in message.mounts:
        if not 0 < len(mount.mountpoint) <= MAX_PATH:
            return "a mountpoint is empty or too long"
    return _why_datasets_invalid(message) or _why_numbers_invalid(message)


def _why_datasets_invalid(message: pb.NodeReport) -> str:
    seen: set[str] = set()
    for dataset in message.datasets:
        if reason := _why_no_name(dataset.name, "datasets"):
            return reason
        if dataset.name in seen:
            return f"data set {shown(dataset.name)!r} is reported twice"
        seen.add(dataset.name)
        if dataset.total_bytes > MAX_BYTES:
            return f"data set {shown(dataset.name)!r}: total_bytes {dataset.total_bytes}"
        tiers: set[int] = set()
        for tier in dataset.tiers:
            if tier.tier == pb.TIER_UNSPECIFIED or tier.tier in tiers or tier.bytes > MAX_BYTES:
                return f"data set {shown(dataset.name)!r}: tier {tier.tier} with {tier.bytes} bytes"
            tiers.add(tier.tier)
    return ""


def _why_numbers_invalid(message: pb.NodeReport) -> str:
    for capacity in message.capacities:
        if capacity.capacity_bytes > MAX_BYTES or capacity.free_bytes > capacity.capacity_bytes:
            return f"tier {capacity.tier}: {capacity.free_bytes} bytes free of {capacity.capacity_bytes}"
    for name in ("local_bytes_per_s", "peer_bytes_per_s", "ufs_bytes_per_s"):
        rate = getattr(message.rates, name)
        if not (math.isfinite(rate) and rate >= 0):
            return f"rates: {name} {rate}"
    for directive in message.live_directives:
        if len(directive.id) > MAX_NAME or len(directive.gang_uid) > MAX_NAME:
            return "a live directive's id is too long"
    return "" if len(message.version) <= MAX_NAME else "version is too long"


def _why_no_name(name: str, where: str) -> str:
    if 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip() and "," not in name:
        return ""
    return f"{where}: {shown(name)!r} is not the name of a data set"
