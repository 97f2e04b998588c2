"""The node's side of the locality protocol as a state machine: which report comes next, what a directive means. Pure.

A stream begins with a full report, number 1; later ones carry what changed since the one before. A ReportFully
directive makes the next report full. Directives of a lower epoch than one seen before come from a leader that was
replaced: they are refused, for as long as this process lives. A directive whose time is over, by this node's own
monotonic clock, is dropped. ReportFully is done with by one report, so no report lists a directive as live yet.

It sends nothing and waits for nothing: `locality.reporter` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

from fusecache.locality.holdings import DatasetHolding, Holdings
from fusecache.pb.locality import locality_pb2 as pb

TIERS: Mapping[str, pb.Tier] = {
    "local_block_worker": pb.TIER_LOCAL_BLOCK_WORKER,
    "node_cache": pb.TIER_NODE_CACHE,
}
"""Tiers as `Holdings` and as the protocol name them; one that the protocol does not have is not told."""


MAX_TEXT = 1024
"""Characters of a path or reason that are told."""


class Verdict(Enum):
    """What became of a directive."""

    TAKEN = "taken"
    REFUSED = "refused: a newer leader was heard"
    UNKNOWN = "ignored: this version does not know the action"


class ReportState:
    """See the module. One thread."""

    def __init__(self, node_name: str, *, session: int, version: str) -> None:
        """`session`: random, not 0, another one at every start."""
        self.node_name = node_name
        self._session = session
        self._version = version
        self._sequence = 0
        self._told: dict[str, pb.DatasetReport] | None = None
        """Data sets as the controller knows them by this stream; None: it knows nothing, the next report is full."""
        self._epoch = 0
        self._full_until_s = -math.inf
        """The next report is full when it is made before this time: a directive asked for it."""

    def begin_stream(self) -> None:
        """A new stream: whoever listens knows nothing. What an earlier stream asked for is answered by the full report
        that this one begins with."""
        self._sequence = 0
        self._told = None
        self._full_until_s = -math.inf

    def receive(self, directive: pb.Directive, now_s: float) -> Verdict:
        """A directive came in. TAKEN: a report is to be sent at once."""
        if directive.lease_transitions < self._epoch:
            return Verdict.REFUSED
        self._epoch = directive.lease_transitions
        if directive.WhichOneof("action") != "report_fully":
            return Verdict.UNKNOWN
        # 0 = at once, and the report is due at once: only a time that was named can be over.
        until_s = now_s + directive.expires_after_ms / 1000 if directive.expires_after_ms else math.inf
        self._full_until_s = max(self._full_until_s, until_s)
        return Verdict.TAKEN

    def next_report(self, holdings: Holdings, now_s: float) -> pb.NodeReport:
        """The report to send now. It counts as sent: after a failure the stream must end."""
        datasets = {name: _dataset(holding) for name, holding in holdings.datasets.items()}
        told = None if now_s < self._full_until_s else self._told
        self._full_until_s = -math.inf
        self._sequence += 1
        report = pb.NodeReport(
            node_name=self.node_name,
            session=self._session,
            sequence=self._sequence,
            full=told is None,
            mounts=[
                pb.Mount(mountpoint=_text(mount.mountpoint), ready=mount.ready, reason=_text(mount.reason))
                for mount in holdings.mounts
            ],
            datasets=[dataset for name, dataset in datasets.items() if told is None or told.get(name) != dataset],
            removed_datasets=[name for name in told or () if name not in datasets],
            capacities=[
                pb.TierCapacity(tier=tier, capacity_bytes=room.capacity_bytes, free_bytes=room.free_bytes)
                for name, room in holdings.rooms.items()
                if (tier := TIERS.get(name)) is not None
            ],
            version=self._version,
        )
        self._told = datasets
        return report


def _text(text: str) -> str:
    """As the protocol can carry it: a path may have bytes that are no UTF-8, and a reason may be long."""
    return text.encode("utf-8", "replace").decode()[:MAX_TEXT]


def _dataset(holding: DatasetHolding) -> pb.DatasetReport:
    return pb.DatasetReport(
        name=holding.name,
        ready=holding.ready,
        total_bytes=holding.total_bytes,
        listed_whole=holding.listed_whole,
        tiers=[
            pb.TierBytes(tier=tier, bytes=held)
            for name, held in sorted(holding.tiers.items())
            if held and (tier := TIERS.get(name)) is not None
        ],
    )
