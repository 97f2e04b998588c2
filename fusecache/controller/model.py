"""Pods and nodes as the controller needs them: small values made from the API's raw JSON. Pure.

A typed object of the Kubernetes client takes 26 KiB; these take a few hundred bytes, so that a cluster's pods fit into
memory. Resource quantities are counted as kube-scheduler counts them: CPU in thousandths, everything else in whole
units, both rounded up.

Nothing here decides. A pod that can't be read (a quantity that is none) carries the reason instead of its requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any

GATE = "fusecache.io/locality"
"""The scheduling gate that is ours to remove."""

PREFIX = "fusecache.io/"
DATASETS = PREFIX + "datasets"
PLACEMENT = PREFIX + "placement"
MAX_WAIT = PREFIX + "max-wait"
DECISION = PREFIX + "decision"

Resources = Mapping[str, int]
"""Name -> CPU in thousandths of a core, everything else in whole units (bytes, devices, pods)."""

POD_COUNT = "pods"
"""A node's allocatable has this resource; every pod takes one of it."""

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,3}))?", re.ASCII)
_SUFFIXES: Mapping[str, Fraction] = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(1 << 10), "Mi": Fraction(1 << 20), "Gi": Fraction(1 << 30),
    "Ti": Fraction(1 << 40), "Pi": Fraction(1 << 50), "Ei": Fraction(1 << 60),
}  # fmt: skip


@lru_cache(maxsize=10_000)
def parse_quantity(text: str) -> Fraction:
    """The value of a resource quantity (`100m`, `1.5Gi`, `12e6`). ValueError when it is none.

    Source: k8s.io/apimachinery/pkg/api/resource/quantity.go.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > 64:
        raise ValueError(f"{text[:64]!r} is not a resource quantity")
    number, suffix, exponent = match.groups()
    if exponent is not None:
        return Fraction(number) * Fraction(10) ** int(exponent)
    return Fraction(number) * (_SUFFIXES[suffix] if suffix else 1)


def parse_resources(raw: Mapping[str, Any] | None) -> dict[str, int]:
    """A `requests`, `limits` or `allocatable` mapping. ValueError names the resource that can't be read."""
    found = {}
    for name, text in (raw or {}).items():
        try:
            found[name] = ceil(parse_quantity(str(text)) * (1000 if name == "cpu" else 1))
        except ValueError as failure:
            raise ValueError(f"{name}: {failure}") from None
    return found


def add(first: Resources, second: Resources) -> dict[str, int]:
    """Sum of both."""
    total = dict(first)
    for name, amount in second.items():
        total[name] = total.get(name, 0) + amount
    return total


def largest(first: Resources, second: Resources) -> dict[str, int]:
    """Of each resource the larger amount."""
    result = dict(first)
    for name, amount in second.items():
        result[name] = max(result.get(name, 0), amount)
    return result


def pod_requests(spec: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> dict[str, int]:
    """What a pod takes from its node, as kube-scheduler counts it. ValueError when a quantity can't be read.

    Containers run together with the sidecars (init containers that always restart); an init container runs with the
    sidecars before it; the larger of the two phases counts. Requests of the whole pod replace that for the resources
    they name. The runtime's overhead comes on top. While a running container is being resized it takes the larger of
    what it asks for and what its status says it still has. Source: k8s.io/component-helpers/resource/helpers.go.
    """
    has = _held_by_status(status or {})
    running: dict[str, int] = {}
    for container in spec.get("containers") or ():
        running = add(running, largest(_container_requests(container), has.get(container.get("name"), {})))
    sidecars: dict[str, int] = {}
    starting: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = largest(_container_requests(container), has.get(container.get("name"), {}))
        if container.get("restartPolicy") == "Always":
            running = add(running, requests)
            sidecars = add(sidecars, requests)
            starting = largest(starting, sidecars)
        else:
            starting = largest(starting, add(requests, sidecars))
    total = largest(running, starting)
    total.update(_container_requests(spec))
    total = add(total, parse_resources(spec.get("overhead")))
    total[POD_COUNT] = 1
    return total


def _held_by_status(status: Mapping[str, Any]) -> dict[Any, dict[str, int]]:
    """Container -> resources that the node has given it."""
    found = {}
    for kind in ("containerStatuses", "initContainerStatuses"):
        for container in status.get(kind) or ():
            actual = (container.get("resources") or {}).get("requests")
            allocated = parse_resources(container.get("allocatedResources"))
            if held := largest(parse_resources(actual), allocated):
                found[container.get("name")] = held
    return found


def _container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    """A limit without a request is the request too, as the API server fills it in."""
    resources = container.get("resources") or {}
    return {**parse_resources(resources.get("limits")), **parse_resources(resources.get("requests"))}


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. What only a pod with our gate needs is empty in all others."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    annotations: Mapping[str, str]
    """Those of ours."""
    annotated: bool
    """It has annotations, ours or others."""
    gates: tuple[str, ...]
    node_name: str
    """Where it is bound; empty when it is not."""
    nominated_node: str
    phase: str
    terminating: bool
    created: str
    """creationTimestamp, RFC 3339: sorts as it stands."""
    priority: int
    requests: Resources
    unschedulable: bool
    """The scheduler tried and found no node."""
    problem: str = ""
    """Why its requests can't be read; empty when they can."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: Mapping[str, Any] = field(default_factory=dict)
    """spec.affinity as it stands."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    unpinnable: str = ""
    """Why it must not be pinned to one node (a rule that `feasibility` does not model); empty when it may be."""
    active_deadline_s: int | None = None

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def gated(self) -> bool:
        """Our gate holds it."""
        return GATE in self.gates

    @property
    def waiting(self) -> bool:
        """Ours to decide on."""
        return self.gated and not self.terminating

    @property
    def ended(self) -> bool:
        """It holds no resources any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def required_terms(self) -> tuple[Mapping[str, Any], ...] | None:
        """nodeSelectorTerms of its required node affinity; None when it has no such rule."""
        required = (self.affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        return None if required is None else tuple(required.get("nodeSelectorTerms") or ())


def pod_from_json(raw: Mapping[str, Any]) -> Pod:
    """The projection of a pod as the API gives it."""
    metadata = raw["metadata"]
    spec = raw.get("spec") or {}
    status = raw.get("status") or {}
    gates = tuple(gate["name"] for gate in spec.get("schedulingGates") or ())
    problem = ""
    try:
        requests = pod_requests(spec, status)
    except ValueError as failure:
        requests, problem = {POD_COUNT: 1}, str(failure)
    common: dict[str, Any] = {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "resource_version": metadata["resourceVersion"],
        "annotations": {
            key: value for key, value in (metadata.get("annotations") or {}).items() if key.startswith(PREFIX)
        },
        "annotated": bool(metadata.get("annotations")),
        "gates": gates,
        "node_name": spec.get("nodeName") or "",
        "nominated_node": status.get("nominatedNodeName") or "",
        "phase": status.get("phase") or "",
        "terminating": "deletionTimestamp" in metadata,
        "created": metadata.get("creationTimestamp") or "",
        "priority": spec.get("priority") or 0,
        "requests": requests,
        "unschedulable": any(
            condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
            for condition in status.get("conditions") or ()
        ),
        "problem": problem,
    }
    if GATE not in gates:
        return Pod(**common)
    return Pod(
        **common,
        node_selector=spec.get("nodeSelector") or {},
        affinity=spec.get("affinity") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        unpinnable=_why_unpinnable(spec),
        active_deadline_s=spec.get("activeDeadlineSeconds"),
    )


def _why_unpinnable(spec: Mapping[str, Any]) -> str:
    """The first rule of the scheduler that a pin could run into for ever: such pods may be nominated only."""
    if spec.get("resourceClaims"):
        return "it has resource claims"
    for volume in spec.get("volumes") or ():
        if "persistentVolumeClaim" in volume or "ephemeral" in volume:
            return f"its volume {volume.get('name')!r} may be bound to other nodes"
    affinity = spec.get("affinity") or {}
    for kind, text in (("podAffinity", "pod affinity"), ("podAntiAffinity", "pod anti-affinity")):
        if (affinity.get(kind) or {}).get("requiredDuringSchedulingIgnoredDuringExecution"):
            return f"it has required {text}"
    for constraint in spec.get("topologySpreadConstraints") or ():
        if constraint.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule":
            return "it has a topology spread constraint"
    for container in _all_containers(spec):
        if any(port.get("hostPort") or spec.get("hostNetwork") for port in container.get("ports") or ()):
            return "it has host ports"
    return ""


def _all_containers(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    yield from spec.get("initContainers") or ()
    yield from spec.get("containers") or ()


@dataclass(frozen=True, slots=True)
class Taint:
    """A node's taint."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        """As `kubectl taint` writes it."""
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    resource_version: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    unschedulable: bool
    ready: bool
    allocatable: Resources

    @property
    def key(self) -> str:
        """Its name."""
        return self.name


def node_from_json(raw: Mapping[str, Any]) -> Node:
    """The projection of a node as the API gives it; an allocatable that can't be read is an empty one."""
    metadata = raw["metadata"]
    spec = raw.get("spec") or {}
    status = raw.get("status") or {}
    try:
        allocatable = parse_resources(status.get("allocatable"))
    except ValueError:
        allocatable = {}
    return Node(
        name=metadata["name"],
        resource_version=metadata["resourceVersion"],
        labels=metadata.get("labels") or {},
        taints=tuple(
            Taint(taint.get("key") or "", taint.get("value") or "", taint.get("effect") or "")
            for taint in spec.get("taints") or ()
        ),
        unschedulable=bool(spec.get("unschedulable")),
        ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        allocatable=allocatable,
    )
