"""Node objects without machines: Ready, with GPUs, for the scheduler to bind pods to. Nothing ever runs there."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.cluster.api import NODES, STRATEGIC_PATCH, Api

GPUS = 8
SIMULATED_LABEL = "fusecache.io/simulated"
"""On every simulated node, so that a DaemonSet can stay away from them."""

CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}


def names(count: int) -> list[str]:
    """Of the first `count` simulated nodes."""
    return [f"simulated-{number:03d}" for number in range(count)]


def create(api: Api, count: int) -> list[str]:
    """Create that many nodes and make them Ready; their names."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Simulated",
        "message": "there is no machine",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready]}
    for name in names(count):
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, SIMULATED_LABEL: "true"}}
        api.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        api.patch(f"{NODES}/{name}/status", {"status": status}, STRATEGIC_PATCH)
        # Admission adds a taint to every new node; a kubelet would have it removed by being ready.
        api.patch(f"{NODES}/{name}", {"spec": {"taints": None}})
    return names(count)
