"""Who holds how much of which data sets, of the reports that count at one moment. Pure.

An `Inventory` is made once per round and asked per pod. Several data sets add up, and each of them must be ready on
the node: a pod that names two needs both (AND, never OR).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fusecache.controller.reports import NodeState, Reports


class Inventory:
    """What counts now."""

    def __init__(self, nodes: Mapping[str, NodeState]) -> None:
        self.nodes = nodes
        self._holders: dict[str, list[str]] = {}
        self._ranked: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
        for name, state in nodes.items():
            for dataset in state.holdings:
                self._holders.setdefault(dataset, []).append(name)

    def knows(self, dataset: str) -> bool:
        """At least one node names the data set, ready or not."""
        return dataset in self._holders

    def ranked(self, datasets: Sequence[str]) -> list[tuple[int, list[str]]]:
        """(bytes, nodes that serve so many of these data sets together), most bytes first.

        Only nodes that name the first data set: no other can be ready for all of them. Made once for all pods that name
        the same data sets.
        """
        key = tuple(datasets)
        if key not in self._ranked:
            groups: dict[int, list[str]] = {}
            for name in self._holders.get(key[0], ()) if key else ():
                groups.setdefault(self.bytes_on(name, key), []).append(name)
            self._ranked[key] = sorted(groups.items(), key=lambda group: -group[0])
        return self._ranked[key]

    def bytes_on(self, node_name: str, datasets: Sequence[str]) -> int:
        """Bytes of these data sets together that the node can serve by itself."""
        state = self.nodes.get(node_name)
        if state is None:
            return 0
        holdings = (state.holdings.get(dataset) for dataset in datasets)
        return sum(holding.served_bytes for holding in holdings if holding is not None)

    def why_not_ready(self, node_name: str, datasets: Sequence[str]) -> str:
        """Why the node can't serve all of these data sets; empty when it can."""
        state = self.nodes.get(node_name)
        if state is None:
            return "it does not report"
        for dataset in datasets:
            holding = state.holdings.get(dataset)
            if holding is None:
                return f"it does not mount data set {dataset!r}"
            if not holding.ready:
                reasons = "; ".join(state.mounts_not_ready)
                return f"its mount of data set {dataset!r} is not ready" + (f" ({reasons})" if reasons else "")
        return ""


def take(reports: Reports, now_s: float) -> Inventory:
    """The inventory of this moment."""
    return Inventory(dict(reports.counting(now_s)))


class Row(NamedTuple):
    """One data set on one node in one tier, for people."""

    dataset: str
    node_name: str
    tier: int
    held_bytes: int
    total_bytes: int
    listed_whole: bool
    ready: bool
    age_s: float
    counts: bool


NO_TIER = 0
"""A node that names the data set and holds nothing of it."""


def rows(reports: Reports, now_s: float, dataset: str = "") -> list[Row]:
    """Every data set (or one) on every node remembered, by data set, most bytes first."""
    found = []
    for node_name, state in reports.all():
        age_s = now_s - state.received_s
        for name, holding in state.holdings.items():
            if dataset and name != dataset:
                continue
            for tier, held_bytes in holding.tiers.items() or ((NO_TIER, 0),):
                found.append(
                    Row(
                        name,
                        node_name,
                        tier,
                        held_bytes,
                        holding.total_bytes,
                        holding.listed_whole,
                        holding.ready,
                        age_s,
                        age_s <= reports.counts_for_s,
                    )
                )
    return sorted(found, key=lambda row: (row.dataset, -row.held_bytes, row.node_name, row.tier))
