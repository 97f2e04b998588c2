"""What the tests of this folder do to their cluster: apply, make pods that never run, patch them as somebody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.api import MERGE_PATCH, Api, Object, pods
from tests.cluster.world import World

DEPLOY = Path(__file__).parents[3] / "deploy"
KUSTOMIZATIONS = (DEPLOY / "base", DEPLOY / "examples/training", DEPLOY / "examples/training-restricted")

GATE = "fusecache.io/locality"
OTHER_GATE = "other.io/gate"

UNGATE = [
    {"op": "test", "path": "/spec/schedulingGates/0/name", "value": GATE},
    {"op": "remove", "path": "/spec/schedulingGates/0"},
]
"""JSON patch of a pod whose first gate is ours."""


def apply(world: World, kustomization: Path, *more: str) -> str:
    """As a user does, with every unknown field and every warning an error; what kubectl printed."""
    strict = ("--server-side", "--validate=strict", "--warnings-as-errors")
    return world.kubectl("apply", *strict, *more, "-k", kustomization)


def acting_as(world: World, account: str) -> Api:
    """The API with a token of a service account of namespace fusecache."""
    made = world.api.create(f"/api/v1/namespaces/fusecache/serviceaccounts/{account}/token", {"spec": {}})
    plane = world.control_plane
    return Api(plane.server, plane.authority.certificate, token=made["status"]["token"])


def pod(name: str, *gates: str, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """A pod that no node takes."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{name}-",
            "labels": labels or {},
            "annotations": {"fusecache.io/datasets": "imagenet", "other.io/there": "yes"},
        },
        "spec": {
            "containers": [{"name": "c", "image": "nothing"}],
            "initContainers": [{"name": "i", "image": "nothing"}],
            "nodeSelector": {"no-such": "node"},
            "schedulingGates": [{"name": gate} for gate in gates],
            **spec,
        },
    }


def create_pod(world: World, body: Object, namespace: str = "training") -> str:
    """Create it; its name."""
    return str(world.api.create(pods(namespace), body)["metadata"]["name"])


def waiting_pod(world: World) -> str:
    """Name of a new pod that waits for the controller and for somebody else."""
    return create_pod(world, pod("waiting", GATE, OTHER_GATE))


def patch_pod(api: Api, name: str, body: Any, kind: str = MERGE_PATCH, *, subresource: str = "") -> Object:
    """Patch a pod of namespace training."""
    patched: Object = api.patch(pods("training", name) + subresource, body, kind)
    return patched


def gates_of(stored: Object) -> list[str]:
    """Names of a pod's scheduling gates."""
    return [gate["name"] for gate in stored["spec"].get("schedulingGates", ())]


def required(node: str) -> Object:
    """Affinity that only that node fulfils."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
