"""May this pod run on that node? The rules of kube-scheduler that a placement could run into. Pure.

`refusal` answers with one reason in words, or with nothing when the node is fine. It knows: mount and data sets ready
by the node's report, resources left after pods bound or promised, taints and tolerations, node selector, required node
affinity, readiness and cordon. It does not know volumes bound to nodes, affinity between pods, spread constraints, host
ports and resource claims: a pod with one of these is nominated and never pinned (`Pod.unpinnable`), and the scheduler
has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusecache.controller.inventory import Inventory
from fusecache.controller.model import Node, Pod, Resources, Taint

REPELLING = ("NoSchedule", "NoExecute")
"""Effects that keep a pod away; PreferNoSchedule does not."""

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class Ledger:
    """What is left on every node: allocatable less what bound, nominated and promised pods take."""

    def __init__(self, nodes: Mapping[str, Node], pods: Iterable[tuple[str, Pod]]) -> None:
        """`pods` with the node that each takes its resources from."""
        self._left: dict[str, dict[str, int]] = {name: dict(node.allocatable) for name, node in nodes.items()}
        self._fullness: dict[str, tuple[int, int, str]] = {}
        for node_name, pod in pods:
            self.promise(node_name, pod.requests)

    def promise(self, node_name: str, requests: Resources) -> None:
        """Take resources of a node, for good in this ledger."""
        left = self._left[node_name]
        for name, amount in requests.items():
            left[name] = left.get(name, 0) - amount
        self._fullness.pop(node_name, None)

    def left(self, node_name: str) -> Resources:
        """Resources left; negative where more is taken than there is."""
        return self._left[node_name]

    def fullness(self, node_name: str) -> tuple[int, int, str]:
        """Sorts the fullest first: fewest devices left, then least CPU, then by name."""
        known = self._fullness.get(node_name)
        if known is None:
            left = self._left[node_name]
            devices = sum(amount for name, amount in left.items() if "/" in name)
            known = self._fullness[node_name] = (devices, left.get("cpu", 0), node_name)
        return known


def refusal(pod: Pod, node: Node, datasets: Sequence[str], inventory: Inventory, ledger: Ledger) -> str:
    """Why the pod can't run there with its data; empty when it can."""
    return (
        inventory.why_not_ready(node.name, datasets)
        or ("it is not Ready" if not node.ready else "")
        or ("it is cordoned" if node.unschedulable else "")
        or why_selector_refuses(pod, node)
        or why_taints_refuse(pod.tolerations, node.taints)
        or why_too_small(pod.requests, ledger.left(node.name))
    )


def why_too_small(requests: Resources, left: Resources) -> str:
    """The first resource that does not fit; empty when all do. A request of nothing fits everywhere."""
    for name, amount in requests.items():
        if amount > max(0, left.get(name, 0)) and amount > 0:
            free = max(0, left.get(name, 0))
            return f"not enough {name}: {_amount(name, amount)} wanted, {_amount(name, free)} left"
    return ""


def _amount(name: str, amount: int) -> str:
    return f"{amount / 1000:g}" if name == "cpu" else str(amount)


def why_taints_refuse(tolerations: Sequence[Mapping[str, Any]], taints: Iterable[Taint]) -> str:
    """The first taint that the pod does not tolerate; empty when it tolerates all."""
    for taint in taints:
        if taint.effect in REPELLING and not any(_tolerates(toleration, taint) for toleration in tolerations):
            return f"taint {taint} is not tolerated"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Source: k8s.io/component-helpers/scheduling/corev1 ToleratesTaint. An unknown operator tolerates nothing."""
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key = toleration.get("key") or ""
    if key and key != taint.key:
        return False
    match toleration.get("operator") or "Equal":
        case "Exists":
            return True
        case "Equal":
            return bool(key) and (toleration.get("value") or "") == taint.value
        case _:
            return False


def why_selector_refuses(pod: Pod, node: Node) -> str:
    """Why node selector or required node affinity exclude the node; empty when they do not."""
    for key, value in pod.node_selector.items():
        if node.labels.get(key) != value:
            return f"nodeSelector {key}={value} does not match"
    terms = pod.required_terms
    if terms is not None and not any(term_matches(term, node) for term in terms):
        return "its required node affinity does not match"
    return ""


def term_matches(term: Mapping[str, Any], node: Node) -> bool:
    """Whether one nodeSelectorTerm matches: all its requirements do; an empty term matches nothing."""
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_matches(requirement, node.labels) for requirement in expressions) and all(
        _matches(requirement, {"metadata.name": node.name}) for requirement in fields
    )


def _matches(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """One requirement. Source: k8s.io/apimachinery/pkg/labels Requirement.Matches."""
    value = labels.get(requirement.get("key", ""))
    values = requirement.get("values") or ()
    match requirement.get("operator"):
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _compare(value, values) > 0
        case "Lt":
            return _compare(value, values) < 0
        case _:
            return False


def _compare(value: str | None, values: Sequence[str]) -> int:
    """-1, 0, 1 as the label's number is less, equal, more; 0 also when either is no number: then neither matches."""
    if value is None or len(values) != 1 or not _INTEGER.fullmatch(value) or not _INTEGER.fullmatch(values[0]):
        return 0
    number, bound = int(value), int(values[0])
    return (number > bound) - (number < bound)
