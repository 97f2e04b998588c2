"""A real API server takes every object of deploy/, and the pods that come of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.cluster.api import Object, pods
from tests.cluster.manifests.actions import DEPLOY, KUSTOMIZATIONS, apply
from tests.cluster.world import World


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_every_object_is_there_and_applying_again_changes_nothing(world: World, kustomization: Path) -> None:
    rendered = list(yaml.safe_load_all(world.kubectl("kustomize", kustomization)))
    there = stored(world, kustomization)
    assert sorted(map(kind_and_name, there)) == sorted(map(kind_and_name, rendered))
    apply(world, kustomization)
    assert list(map(spec_of, stored(world, kustomization))) == list(map(spec_of, there))


def stored(world: World, kustomization: Path) -> list[Object]:
    listed: list[Object] = json.loads(world.kubectl("get", "-k", kustomization, "-o", "json"))["items"]
    return listed


def kind_and_name(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def spec_of(item: Object) -> tuple[str, Object]:
    """What stays when nothing is changed: all but status and bookkeeping."""
    kept = {key: value for key, value in item.items() if key not in ("status", "metadata")}
    return item["metadata"]["uid"], kept


@pytest.mark.parametrize("overlay", ["test", "example"])
def test_overlays_and_the_network_policy_are_taken_too(world: World, tmp_path: Path, overlay: str) -> None:
    kustomization = {
        "resources": [os.path.relpath(DEPLOY / "overlays" / overlay, tmp_path.resolve())],
        "components": [os.path.relpath(DEPLOY / "components/network-policy", tmp_path.resolve())],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    said = apply(world, tmp_path, "--dry-run=server", "--force-conflicts")
    assert "networkpolicy.networking.k8s.io/fusecache-controller serverside-applied (server dry run)" in said
    assert "daemonset.apps/fusecache-node serverside-applied (server dry run)" in said


@pytest.mark.parametrize(
    ("namespace", "selector"),
    [
        ("fusecache", "app.kubernetes.io/name=fusecache-node"),
        ("fusecache", "app.kubernetes.io/name=fusecache-controller"),
        ("training", "job-name=train"),
        ("training-restricted", "job-name=train"),
    ],
)
def test_the_pod_of_every_workload_is_admitted(world: World, namespace: str, selector: str) -> None:
    """Pod Security refuses pods, not the objects that make them."""
    path = f"{pods(namespace)}?labelSelector={selector.replace('/', '%2F').replace('=', '%3D')}"
    world.wait_until(lambda: len(world.api.get(path)["items"]) == 1, f"no pod {selector} in {namespace}", 60)


def test_the_claim_of_the_restricted_example_is_bound_to_its_volume(world: World) -> None:
    path = "/api/v1/namespaces/training-restricted/persistentvolumeclaims/fusecache"
    world.wait_until(lambda: world.api.get(path)["status"].get("phase") == "Bound", "the claim is not bound", 60)


def test_no_expression_of_the_fence_is_doubted_by_the_type_checker(world: World) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/fusecache-fence"
    world.wait_until(lambda: "typeChecking" in world.api.get(path).get("status", {}), "it was not checked", 60)
    assert world.api.get(path)["status"]["typeChecking"].get("expressionWarnings", []) == []
