"""Nodes, pods and reports as tests write them."""

from __future__ import annotations

from typing import Any

from fusecache.controller.model import DATASETS, GATE, Node, Pod, node_from_json, pod_from_json
from fusecache.pb.locality import locality_pb2 as pb

GIB = 1 << 30


def node_json(name: str, gpus: int = 8, **more: Any) -> dict[str, Any]:
    """A Ready node; `labels`, `taints`, `unschedulable`, `ready`, `allocatable` as wanted."""
    spec: dict[str, Any] = {}
    if "taints" in more:
        spec["taints"] = more["taints"]
    if more.get("unschedulable"):
        spec["unschedulable"] = True
    allocatable = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **more.get("labels", {})}},
        "spec": spec,
        "status": {
            "allocatable": more.get("allocatable", allocatable),
            "conditions": [{"type": "Ready", "status": "True" if more.get("ready", True) else "False"}],
        },
    }


def pod_json(
    name: str,
    *,
    datasets: str | None = "imagenet",
    gpus: int = 1,
    gates: tuple[str, ...] = (GATE,),
    namespace: str = "default",
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod with our gate."""
    all_annotations = {**({DATASETS: datasets} if datasets is not None else {}), **(annotations or {})}
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus), "cpu": "1"}}
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            **({"annotations": all_annotations} if all_annotations else {}),
        },
        "spec": {
            "containers": [{"name": "c", "image": "x", "resources": resources if gpus else {}}],
            **({"schedulingGates": [{"name": gate} for gate in gates]} if gates else {}),
            **spec,
        },
        "status": {"phase": "Pending"},
    }


def _identified(raw: dict[str, Any]) -> dict[str, Any]:
    raw["metadata"].setdefault("resourceVersion", "1")
    raw["metadata"].setdefault("uid", f"uid-{raw['metadata']['name']}")
    raw["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    return raw


def node(name: str, gpus: int = 8, **more: Any) -> Node:
    return node_from_json(_identified(node_json(name, gpus, **more)))


def pod(name: str, **more: Any) -> Pod:
    return pod_from_json(_identified(pod_json(name, **more)))


def report(
    node_name: str,
    held: dict[str, int] | None = None,
    *,
    sequence: int = 1,
    full: bool = True,
    session: int = 7,
    ready: bool = True,
    total_bytes: int = 100 * GIB,
) -> pb.NodeReport:
    """A report of these bytes in the block worker's tier."""
    return pb.NodeReport(
        node_name=node_name,
        session=session,
        sequence=sequence,
        full=full,
        mounts=[pb.Mount(mountpoint="/mnt/x", ready=ready, reason="" if ready else "starting")],
        datasets=[
            pb.DatasetReport(
                name=name,
                ready=ready,
                total_bytes=total_bytes,
                listed_whole=True,
                tiers=[pb.TierBytes(tier=pb.TIER_LOCAL_BLOCK_WORKER, bytes=held_bytes)],
            )
            for name, held_bytes in (held or {}).items()
        ],
        version="test",
    )
