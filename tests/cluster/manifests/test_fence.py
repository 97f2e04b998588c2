"""The fence: what the controller's account may do with `patch` on pods, and what an administrator still may."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.cluster.api import JSON_PATCH, MERGE_PATCH, Api, Refused, pods
from tests.cluster.manifests.actions import (
    GATE,
    OTHER_GATE,
    UNGATE,
    create_pod,
    gates_of,
    patch_pod,
    pod,
    required,
    waiting_pod,
)
from tests.cluster.world import World

PREFERENCE = {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
PREFERRED = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [PREFERENCE]}}
APART_TERM = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
APART = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [APART_TERM]}}
BOTH = {"nodeAffinity": PREFERRED["nodeAffinity"] | required("n")["nodeAffinity"]}
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "0e1b7a5c-0000-4000-8000-000000000000"}

IMAGE = {"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}
INIT_IMAGE = {"op": "replace", "path": "/spec/initContainers/0/image", "value": "evil"}
TOLERATION = {"op": "add", "path": "/spec/tolerations/-", "value": {"operator": "Exists"}}


class Case(NamedTuple):
    """A patch, and the rule that refuses it to the controller."""

    what: str
    rule: str
    body: Any
    kind: str = MERGE_PATCH
    subresource: str = ""


METADATA = "annotations only, no other metadata"
ANNOTATIONS = "annotations of fusecache.io only"
SPEC = "affinity and scheduling gates only"
GATES = "its own scheduling gate only"
AFFINITY = "required node affinity only"
STATUS = "nominatedNodeName only"

REFUSED = [
    Case("image", SPEC, [IMAGE], JSON_PATCH),
    Case("init image", SPEC, [INIT_IMAGE], JSON_PATCH),
    Case("image beside the release", SPEC, [IMAGE, *UNGATE], JSON_PATCH),
    Case("toleration", SPEC, [TOLERATION], JSON_PATCH),
    Case("deadline", SPEC, {"spec": {"activeDeadlineSeconds": 1}}),
    Case("node selector", SPEC, {"spec": {"nodeSelector": {"more": "labels"}}}),
    Case("label", METADATA, {"metadata": {"labels": {"app": "service"}}}),
    Case("finalizer", METADATA, {"metadata": {"finalizers": ["other.io/a"]}}),
    Case("owner", METADATA, {"metadata": {"ownerReferences": [OWNER]}}),
    Case("foreign annotation", ANNOTATIONS, {"metadata": {"annotations": {"other.io/new": "b"}}}),
    Case("foreign annotation changed", ANNOTATIONS, {"metadata": {"annotations": {"other.io/there": "no"}}}),
    Case("foreign annotation removed", ANNOTATIONS, {"metadata": {"annotations": {"other.io/there": None}}}),
    Case("data sets", ANNOTATIONS, {"metadata": {"annotations": {"fusecache.io/datasets": "b"}}}),
    Case("data sets removed", ANNOTATIONS, {"metadata": {"annotations": {"fusecache.io/datasets": None}}}),
    Case("placement", ANNOTATIONS, {"metadata": {"annotations": {"fusecache.io/placement": "require"}}}),
    Case("foreign gate", GATES, [{"op": "remove", "path": "/spec/schedulingGates/1"}], JSON_PATCH),
    Case("all gates", GATES, [{"op": "remove", "path": "/spec/schedulingGates"}], JSON_PATCH),
    Case("preferred affinity", AFFINITY, {"spec": {"affinity": PREFERRED}}),
    Case("preferred beside required affinity", AFFINITY, {"spec": {"affinity": BOTH}}),
    Case("phase", STATUS, {"status": {"phase": "Failed"}}, subresource="/status"),
    Case("phase and node", STATUS, {"status": {"phase": "Failed", "nominatedNodeName": "n"}}, subresource="/status"),
    Case("condition", STATUS, {"status": {"conditions": [{"type": "a", "status": "True"}]}}, subresource="/status"),
    Case("label through the status", METADATA, {"metadata": {"labels": {"app": "service"}}}, subresource="/status"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.what)
def test_controller_is_refused_what_an_administrator_may_do(world: World, controller: Api, case: Case) -> None:
    name = waiting_pod(world)
    with pytest.raises(Refused) as caught:
        patch_pod(controller, name, case.body, case.kind, subresource=case.subresource)
    assert "ValidatingAdmissionPolicy 'fusecache-fence'" in caught.value.message
    assert case.rule in caught.value.message
    patch_pod(world.api, name, case.body, case.kind, subresource=case.subresource)


def nominate(node: str | None) -> dict[str, Any]:
    return {"status": {"nominatedNodeName": node}}


def test_waiting_pod_may_be_nominated_annotated_and_released(world: World, controller: Api) -> None:
    name = waiting_pod(world)
    patch_pod(controller, name, nominate("simulated-000"), subresource="/status")
    patch_pod(controller, name, {"metadata": {"annotations": {"fusecache.io/decision": "{}"}}})
    released = patch_pod(controller, name, UNGATE, JSON_PATCH)
    assert gates_of(released) == [OTHER_GATE]
    assert released["status"]["nominatedNodeName"] == "simulated-000"
    # Afterwards the reason may be written again and the nomination taken back, but no new one be made.
    patch_pod(controller, name, {"metadata": {"annotations": {"fusecache.io/decision": "{1}"}}})
    with pytest.raises(Refused, match="nominates a node for pods that wait for it only"):
        patch_pod(controller, name, nominate("other"), subresource="/status")
    assert "nominatedNodeName" not in patch_pod(controller, name, nominate(None), subresource="/status")["status"]


def test_waiting_pod_may_be_pinned_and_released_in_one_patch(world: World, controller: Api) -> None:
    name = waiting_pod(world)
    version = world.api.get(pods("training", name))["metadata"]["resourceVersion"]
    operations = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/spec/affinity", "value": required("simulated-000")},
        {"op": "add", "path": "/metadata/annotations/fusecache.io~1decision", "value": "{}"},
        *UNGATE,
    ]
    pinned = patch_pod(controller, name, operations, JSON_PATCH)
    assert pinned["spec"]["affinity"] == required("simulated-000")
    assert gates_of(pinned) == [OTHER_GATE]


def test_affinity_of_the_pods_owner_stays_when_it_is_pinned(world: World, controller: Api) -> None:
    name = create_pod(world, pod("own", GATE, affinity=PREFERRED | APART))
    replace = {"op": "add", "path": "/spec/affinity", "value": required("n") | APART}
    with pytest.raises(Refused, match=AFFINITY):
        patch_pod(controller, name, [replace, *UNGATE], JSON_PATCH)
    beside = {"op": "add", "path": "/spec/affinity", "value": BOTH | APART}
    assert patch_pod(controller, name, [beside, *UNGATE], JSON_PATCH)["spec"]["affinity"] == BOTH | APART


def test_required_terms_of_the_pods_owner_may_be_narrowed(world: World, controller: Api) -> None:
    expression = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    name = create_pod(world, pod("own", GATE, affinity={"nodeAffinity": {key: terms}}))
    fields = [{"key": "metadata.name", "operator": "In", "values": ["n"]}]
    path = f"/spec/affinity/nodeAffinity/{key}/nodeSelectorTerms/0/matchFields"
    narrowed = patch_pod(controller, name, [{"op": "add", "path": path, "value": fields}, *UNGATE], JSON_PATCH)
    stored = narrowed["spec"]["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"]
    assert stored == [{"matchExpressions": [expression], "matchFields": fields}]


def test_pod_that_does_not_wait_for_the_controller_is_none_of_its_business(world: World, controller: Api) -> None:
    name = create_pod(world, pod("foreign", OTHER_GATE))
    with pytest.raises(Refused, match=AFFINITY):
        patch_pod(controller, name, {"spec": {"affinity": required("simulated-000")}})
    patch_pod(world.api, name, {"spec": {"affinity": required("simulated-000")}})
    with pytest.raises(Refused, match="nominates a node for pods that wait for it only"):
        patch_pod(controller, name, nominate("simulated-000"), subresource="/status")
    patch_pod(world.api, name, nominate("simulated-000"), subresource="/status")
