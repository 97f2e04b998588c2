"""The best node for one pod: of the feasible ones the one that holds most of its data. Pure.

Nodes are looked at by falling bytes, so that in a large cluster only the few that hold something are examined closely.
Where several hold the same, the fullest is taken (fewest free devices, then least free CPU: what stays free stays in
one piece), then the first by name. The score is bytes: rates are reported but not used yet, and pods are planned one
at a time; a gang is not known as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fusecache.controller.feasibility import Ledger, refusal
from fusecache.controller.inventory import Inventory
from fusecache.controller.model import Node, Pod

REFUSED_KEPT = 20
"""Refused nodes kept in a choice, those with most bytes first; the decision on the pod has room for about as many."""


class Candidate(NamedTuple):
    """One node that was looked at."""

    node_name: str
    held_bytes: int
    """Bytes of the pod's data sets that it can serve by itself."""
    refused_because: str
    """Empty when it is feasible."""

    @property
    def feasible(self) -> bool:
        """The pod can run there with its data."""
        return not self.refused_because


class Choice(NamedTuple):
    """The node for a pod, and why not others."""

    best: Candidate | None
    runner_up: Candidate | None
    refused: tuple[Candidate, ...]
    """Nodes that were looked at first and refused although they hold as much, or when there is no best: those that hold
    most."""
    nobody: str
    """When there is no best: why, counted over all nodes."""


def choose(
    pod: Pod, datasets: Sequence[str], nodes: Mapping[str, Node], inventory: Inventory, ledger: Ledger
) -> Choice:
    """The feasible node with the most bytes."""
    refused: list[Candidate] = []
    feasible: list[Candidate] = []
    for held_bytes, names in inventory.ranked(datasets):
        for name in sorted((name for name in names if name in nodes), key=ledger.fullness):
            candidate = Candidate(name, held_bytes, refusal(pod, nodes[name], datasets, inventory, ledger))
            (feasible if candidate.feasible else refused).append(candidate)
            if len(feasible) == 2:
                break
        if len(feasible) == 2:
            break
    best = feasible[0] if feasible else None
    runner_up = feasible[1] if len(feasible) > 1 else None
    kept = tuple(candidate for candidate in refused if best is None or candidate.held_bytes >= max(1, best.held_bytes))[
        :REFUSED_KEPT
    ]
    return Choice(best, runner_up, kept, "" if best else _nobody(refused, len(nodes), datasets))


def look_at_all(
    pod: Pod, datasets: Sequence[str], nodes: Mapping[str, Node], inventory: Inventory, ledger: Ledger
) -> list[Candidate]:
    """Every node: feasible ones first, most bytes first. For people; `choose` looks at as few as it can."""
    found = [
        Candidate(name, inventory.bytes_on(name, datasets), refusal(pod, node, datasets, inventory, ledger))
        for name, node in nodes.items()
    ]
    return sorted(
        found,
        key=lambda candidate: (
            not candidate.feasible,
            -candidate.held_bytes,
            ledger.fullness(candidate.node_name),
        ),
    )


def _nobody(refused: Sequence[Candidate], node_count: int, datasets: Sequence[str]) -> str:
    """`0 of 50 nodes: 3 not enough nvidia.com/gpu, 47 do not mount data set 'a'`, as kube-scheduler counts."""
    counts = Counter(candidate.refused_because.partition(":")[0] for candidate in refused)
    if others := node_count - len(refused):
        counts[f"no report that names data set {datasets[0]!r}"] += others
    reasons = ", ".join(f"{number} {reason.removeprefix('it is ')}" for reason, number in counts.most_common(8))
    return f"0 of {node_count} nodes can take it: {reasons}" if reasons else "the cluster has no nodes"
