"""What is written about a pod: the annotation, the event, and the patches that direct it and let it go. Pure.

`prefer`    a merge patch of the status (nominatedNodeName), then `ungate_patch`
`require`   one JSON patch: `ungate_patch` with a pin, so that the pod is never seen ungated and unpinned
released    `ungate_patch` alone

Every JSON patch tests the resource version it was made from and the name of the gate it removes; a test that fails is
the answer that the pod changed meanwhile. A pin is a `matchFields metadata.name` ANDed into each of the user's terms
(terms can't be added beside existing ones, and ones free of the pin would be a way around it); an empty term matches
nothing and can't be narrowed, so it stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fusecache.config.units import approximate_size
from fusecache.controller.model import DECISION, GATE, Pod
from fusecache.controller.planner import Candidate, Choice
from fusecache.controller.verdict import Wish

ANNOTATION_BYTES = 4096
"""Largest annotation we write."""

REASON_CHARACTERS = 600
"""Longest sentence on a pod: it repeats what nodes and the API server said."""

EVENT_CHARACTERS = 1000
"""The API refuses messages of more than 1024 bytes."""

JsonPatch = list[dict[str, Any]]
State = Literal["placed", "released", "waiting"]

EVENT_REASONS: Mapping[State, str] = {
    "placed": "FusecachePlaced",
    "released": "FusecacheReleasedUnplaced",
    "waiting": "FusecacheWaiting",
}


class Decision(NamedTuple):
    """What was decided about a pod, and why."""

    state: State
    placement: str
    node_name: str
    """Empty unless placed."""
    reason: str
    """One sentence."""
    datasets: tuple[str, ...]
    held_bytes: int
    choice: Choice | None


def decide(state: State, wish: Wish, reason: str, choice: Choice | None) -> Decision:
    """The decision of a verdict; for `placed` the sentence is made from the choice."""
    best = choice.best if choice is not None and state == "placed" else None
    if best is not None:
        datasets = ", ".join(wish.datasets)
        reason = f"{best.node_name} serves {approximate_size(best.held_bytes)} of {datasets} by itself"
        if choice is not None and choice.runner_up is not None:
            runner_up = choice.runner_up
            reason += f"; next is {runner_up.node_name} with {approximate_size(runner_up.held_bytes)}"
    if wish.note:
        reason += f" ({wish.note})"
    reason = reason[:REASON_CHARACTERS]
    return Decision(
        state,
        wish.placement,
        best.node_name if best else "",
        reason,
        wish.datasets,
        best.held_bytes if best else 0,
        choice,
    )


def annotation_text(decision: Decision) -> str:
    """The annotation fusecache.io/decision: JSON of at most 4 KiB; refused nodes are left out until it fits."""
    document: dict[str, Any] = {
        "state": decision.state,
        "placement": decision.placement,
        "node": decision.node_name,
        "reason": decision.reason,
        "datasets": [name[:100] for name in decision.datasets[:8]],
        "bytes": decision.held_bytes,
    }
    choice = decision.choice
    if choice is not None and decision.state == "placed" and choice.runner_up is not None:
        document["runner_up"] = {"node": choice.runner_up.node_name, "bytes": choice.runner_up.held_bytes}
    refused = choice.refused if choice is not None else ()
    for kept in range(len(refused), -1, -1):
        if refused:
            document["refused"] = [
                {"node": one.node_name, "bytes": one.held_bytes, "because": one.refused_because[:200]}
                for one in refused[:kept]
            ]
            if kept < len(refused):
                document["refused_not_shown"] = len(refused) - kept
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        if len(text.encode()) <= ANNOTATION_BYTES:
            return text
    # Only texts of four bytes a character get here: without the refused nodes, the ASCII of it is cut to fit.
    document["reason"], document["datasets"] = decision.reason[:200], []
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


class Written(NamedTuple):
    """What an annotation says, read back."""

    state: str
    node_name: str
    reason: str
    document: Mapping[str, Any]
    """All of it; what is not above is unchecked."""

    def candidates(self) -> list[Candidate]:
        """The nodes it names: the chosen one, the next, and those refused."""
        found = []
        if self.node_name:
            found.append(_candidate({**self.document, "because": ""}))
        if isinstance(runner_up := self.document.get("runner_up"), dict):
            found.append(_candidate(runner_up))
        if isinstance(refused := self.document.get("refused"), list):
            found += [_candidate(one) for one in refused if isinstance(one, dict)]
        return found


def _candidate(document: Mapping[str, Any]) -> Candidate:
    held_bytes = document.get("bytes")
    if not isinstance(held_bytes, int) or not 0 <= held_bytes < 1 << 63:
        held_bytes = 0
    return Candidate(str(document.get("node", "")), held_bytes, str(document.get("because", "")))


def read_annotation(text: str | None) -> Written | None:
    """Read a decision back. None when there is none or it is not ours: anybody may write annotations."""
    try:
        document = json.loads(text or "")
        state, node_name, reason = document["state"], document["node"], document["reason"]
    except (ValueError, TypeError, KeyError):
        return None
    if (
        not isinstance(state, str)
        or state not in EVENT_REASONS
        or not isinstance(node_name, str)
        or not isinstance(reason, str)
    ):
        return None
    return Written(state, node_name, reason, document)


def holds_on(pod: Pod) -> str:
    """The node whose resources the pod takes, for the books: where it is bound, or was directed to; "" for none.

    A pod with our gate takes nothing yet, whatever its status nominates: it is about to be planned. Nor does one that
    only an annotation, which anybody may write, directs to a node and that the scheduler did not get there.
    """
    if pod.ended or pod.gated:
        return ""
    if pod.node_name or pod.nominated_node or pod.unschedulable:
        return pod.node_name or pod.nominated_node
    written = read_annotation(pod.annotations.get(DECISION))
    return written.node_name if written is not None and written.state == "placed" else ""


def nomination_patch(pod: Pod, node_name: str | None) -> dict[str, Any]:
    """A merge patch of the status; None clears. The resource version in it makes it fail (409) on a changed pod."""
    return {
        "metadata": {"resourceVersion": pod.resource_version, "uid": pod.uid},
        "status": {"nominatedNodeName": node_name},
    }


def annotation_patch(pod: Pod, decision: Decision) -> JsonPatch:
    """Only write the decision; the pod stays gated."""
    return [_test_version(pod), *_annotate(pod, decision)]


def ungate_patch(pod: Pod, decision: Decision, *, pin: bool) -> JsonPatch:
    """Write the decision and remove our gate and no other; with `pin` also narrow the pod to the decision's node."""
    index = pod.gates.index(GATE)
    return [
        _test_version(pod),
        *_annotate(pod, decision),
        *(pin_operations(pod.affinity, decision.node_name) if pin else ()),
        {"op": "test", "path": f"/spec/schedulingGates/{index}/name", "value": GATE},
        {"op": "remove", "path": f"/spec/schedulingGates/{index}"},
    ]


def pin_operations(affinity: Mapping[str, Any], node_name: str) -> JsonPatch:
    """Operations after which the pod fits the node and no other; what the user required stays required."""
    requirement = {"key": "metadata.name", "operator": "In", "values": [node_name]}
    required = {"nodeSelectorTerms": [{"matchFields": [requirement]}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    if not affinity:
        return [{"op": "add", "path": "/spec/affinity", "value": {"nodeAffinity": {key: required}}}]
    node_affinity = affinity.get("nodeAffinity")
    if not node_affinity:
        return [{"op": "add", "path": "/spec/affinity/nodeAffinity", "value": {key: required}}]
    terms: Sequence[Mapping[str, Any]] = (node_affinity.get(key) or {}).get("nodeSelectorTerms") or ()
    if not terms:
        return [{"op": "add", "path": f"/spec/affinity/nodeAffinity/{key}", "value": required}]
    operations: JsonPatch = []
    for index, term in enumerate(terms):
        path = f"/spec/affinity/nodeAffinity/{key}/nodeSelectorTerms/{index}/matchFields"
        if term.get("matchFields"):
            operations.append({"op": "add", "path": f"{path}/-", "value": requirement})
        elif term.get("matchExpressions"):
            operations.append({"op": "add", "path": path, "value": [requirement]})
    return operations


def event_of(pod: Pod, decision: Decision, name: str, now_rfc3339: str, instance: str) -> dict[str, Any]:
    """An Event about the pod."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "resourceVersion": pod.resource_version,
        },
        "reason": EVENT_REASONS[decision.state],
        "message": decision.reason.encode()[:EVENT_CHARACTERS].decode(errors="ignore"),
        "type": "Normal" if decision.state == "placed" else "Warning",
        "source": {"component": "fusecache-controller", "host": instance},
        "reportingComponent": "fusecache.io/controller",
        "reportingInstance": instance,
        "firstTimestamp": now_rfc3339,
        "lastTimestamp": now_rfc3339,
        "count": 1,
    }


def _test_version(pod: Pod) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/resourceVersion", "value": pod.resource_version}


def _annotate(pod: Pod, decision: Decision) -> JsonPatch:
    text = annotation_text(decision)
    if not pod.annotated:
        return [{"op": "add", "path": "/metadata/annotations", "value": {DECISION: text}}]
    return [{"op": "add", "path": "/metadata/annotations/" + DECISION.replace("/", "~1"), "value": text}]
