"""What an API server answers to changes of a pod, as cases: asked of the double here, and of a real server in
tests/cluster, so that the double can't drift from the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fusecache.controller.model import GATE
from tests.t6_controller.pod_rules import REQUIRED

Json = dict[str, Any]
Patch = Callable[[Json], Any]
"""From the pod as it was created."""

BARE = "the server rejected our request due to an error in our request"
"""All that a server says about a failed `test`."""

TERMS = f"/spec/affinity/nodeAffinity/{REQUIRED}/nodeSelectorTerms"
HOST = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["a", "b"]}


class Rule(NamedTuple):
    """One case."""

    spec: Json
    """Beside one container."""
    patch: Patch
    code: int
    says: str = ""
    """Part of the message."""
    status: bool = False
    """A merge patch of the status, instead of a JSON patch of the pod."""


def name_in(*names: str, operator: str = "In") -> Json:
    return {"key": "metadata.name", "operator": operator, **({"values": list(names)} if names else {})}


def required(*terms: Json) -> Json:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


GATED: Json = {"schedulingGates": [{"name": GATE}]}
TWO_GATES: Json = {"schedulingGates": [{"name": "x.io/a"}, {"name": GATE}]}
USERS_TERM: Json = {**GATED, "affinity": required({"matchExpressions": [HOST]})}
EMPTY_TERM: Json = {**GATED, "affinity": required({}, {"matchExpressions": [HOST]})}


def add(path: str, value: Any) -> Patch:
    return lambda pod: [{"op": "add", "path": path, "value": value}]


def tested(path: str, value: Any) -> Json:
    return {"op": "test", "path": path, "value": value}


REMOVE_FIRST = {"op": "remove", "path": "/spec/schedulingGates/0"}
PIN = add("/spec/affinity", required({"matchFields": [name_in("a")]}, {"matchFields": [name_in("b")]}))

RULES: dict[str, Rule] = {
    "pin and ungate in one patch": Rule(
        GATED,
        lambda pod: [
            tested("/metadata/resourceVersion", pod["metadata"]["resourceVersion"]),
            *PIN(pod),
            tested("/spec/schedulingGates/0/name", GATE),
            REMOVE_FIRST,
        ],
        200,
    ),
    "ungate one of two": Rule(TWO_GATES, lambda pod: [{"op": "remove", "path": "/spec/schedulingGates/1"}], 200),
    "add a gate later": Rule(
        GATED, add("/spec/schedulingGates/-", {"name": "x.io/late"}), 422, "only deletion is allowed"
    ),
    "stale resource version": Rule(
        GATED, lambda pod: [tested("/metadata/resourceVersion", "1"), REMOVE_FIRST], 422, BARE
    ),
    "another gate at the index": Rule(
        TWO_GATES, lambda pod: [tested("/spec/schedulingGates/0/name", GATE), REMOVE_FIRST], 422, BARE
    ),
    "gate that is gone": Rule({}, lambda pod: [tested("/spec/schedulingGates/0/name", GATE), REMOVE_FIRST], 422, BARE),
    "two values in one matchFields": Rule(
        GATED, add("/spec/affinity", required({"matchFields": [name_in("a", "b")]})), 422, "must be only one value"
    ),
    "matchFields of another operator": Rule(
        GATED, add("/spec/affinity", required({"matchFields": [name_in(operator="Exists")]})), 422, "matchFields"
    ),
    "AND into the user's term": Rule(USERS_TERM, add(f"{TERMS}/0/matchFields", [name_in("a")]), 200),
    "replace the user's terms": Rule(
        USERS_TERM, add("/spec/affinity", required({"matchFields": [name_in("a")]})), 422, "nodeSelectorTerms"
    ),
    "a term beside the user's": Rule(
        USERS_TERM, add(f"{TERMS}/-", {"matchFields": [name_in("a")]}), 422, "nodeSelectorTerms"
    ),
    "narrow an empty term": Rule(EMPTY_TERM, add(f"{TERMS}/0/matchFields", [name_in("a")]), 422, "nodeSelectorTerms"),
    "narrow the term beside an empty one": Rule(EMPTY_TERM, add(f"{TERMS}/1/matchFields", [name_in("a")]), 200),
    "requirement before the user's": Rule(
        USERS_TERM,
        add(f"{TERMS}/0/matchExpressions/0", {"key": "zone", "operator": "Exists"}),
        422,
        "nodeSelectorTerms",
    ),
    "pin a pod that is not gated": Rule({}, PIN, 422, "pod updates may not change fields other than"),
    "pod affinity of a gated pod": Rule(
        GATED,
        add(
            "/spec/affinity",
            {
                "podAffinity": {
                    REQUIRED: [{"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}],
                }
            },
        ),
        422,
        "pod updates may not change fields other than",
    ),
    "preferred node affinity of a gated pod": Rule(
        GATED,
        add(
            "/spec/affinity",
            {
                "nodeAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "preference": {"matchExpressions": [HOST]}}
                    ]
                }
            },
        ),
        200,
    ),
    "key added to the node selector of a gated pod": Rule(GATED, add("/spec/nodeSelector", {"zone": "a"}), 200),
    "key of the node selector changed": Rule(
        {**GATED, "nodeSelector": {"zone": "a"}}, add("/spec/nodeSelector/zone", "b"), 422, "nodeSelector"
    ),
    "annotation": Rule({}, add("/metadata/annotations", {"fusecache.io/decision": "{}"}), 200),
    "nominate a gated pod": Rule(
        GATED,
        lambda pod: {
            "metadata": {key: pod["metadata"][key] for key in ("resourceVersion", "uid")},
            "status": {"nominatedNodeName": "a"},
        },
        200,
        status=True,
    ),
    "nominate with a stale version": Rule(
        GATED,
        lambda pod: {"metadata": {"resourceVersion": "1"}, "status": {"nominatedNodeName": "a"}},
        409,
        "the object has been modified",
        status=True,
    ),
    "nominate another pod of that name": Rule(
        GATED,
        lambda pod: {"metadata": {"uid": "another"}, "status": {"nominatedNodeName": "a"}},
        422,
        "metadata.uid: Invalid value",
        status=True,
    ),
}


def pod_of(rule: Rule, name: str, namespace: str) -> Json:
    """The pod of a case."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "c", "image": "x"}], **rule.spec},
    }
