"""Projections of pods and nodes: quantities and requests as kube-scheduler counts them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.controller.model import node_from_json, parse_quantity, parse_resources, pod_from_json, pod_requests
from tests.t6_controller.objects import node, node_json, pod, pod_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("1", 1), ("+1", 1), ("-2", -2), ("100m", Fraction(1, 10)), ("1.5Gi", 3 << 29),
        (".5", Fraction(1, 2)), ("1.", 1),
        ("1k", 1000), ("1Ki", 1024), ("3E", 3 * 10**18), ("3Ei", 3 << 60), ("12e6", 12_000_000),
        ("1E3", 1000), ("1e-3", Fraction(1, 1000)), ("5n", Fraction(5, 10**9)), ("7u", Fraction(7, 10**6)),
    ],
)  # fmt: skip
def test_quantity_is_read_as_kubernetes_does(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "1 Gi", "1gi", "1K", "Gi", "1e", "--1", "1e9999", "\u0663", "1" * 65, "1_0", "0x1"]
)
def test_quantity_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a resource quantity"):
        parse_quantity(text)


@given(st.integers(0, 10**12), st.sampled_from(["", "m", "k", "Ki", "Mi", "Gi", "e3"]))
def test_resources_are_rounded_up_cpu_in_thousandths(number: int, suffix: str) -> None:
    exact = parse_quantity(f"{number}{suffix}")
    read = parse_resources({"cpu": f"{number}{suffix}", "memory": f"{number}{suffix}"})
    assert exact <= read["memory"] < exact + 1
    assert exact * 1000 <= read["cpu"] < exact * 1000 + 1


def container(cpu: str, *, sidecar: bool = False, **limits: str) -> dict[str, Any]:
    always = {"restartPolicy": "Always"} if sidecar else {}
    return {"resources": {"requests": {"cpu": cpu}, "limits": limits}, **always}


@pytest.mark.parametrize(
    ("spec", "cpu_thousandths"),
    [
        ({"containers": [container("1"), container("2")]}, 3000),
        ({"containers": [container("1")], "initContainers": [container("5")]}, 5000),
        ({"containers": [container("4")], "initContainers": [container("3"), container("2")]}, 4000),
        # A sidecar runs beside the containers, and beside the init containers that come after it.
        ({"containers": [container("1")], "initContainers": [container("2", sidecar=True), container("3")]}, 5000),
        ({"containers": [container("1")], "initContainers": [container("3"), container("2", sidecar=True)]}, 3000),
        ({"containers": [container("4")], "initContainers": [container("2", sidecar=True), container("3")]}, 6000),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1250),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "7"}}, "overhead": {"cpu": "1"}}, 8000),
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], cpu_thousandths: int) -> None:
    assert pod_requests(spec)["cpu"] == cpu_thousandths


def test_container_that_is_being_resized_takes_the_larger_amount() -> None:
    spec = {"containers": [{"name": "a", **container("1")}, {"name": "b", **container("4")}]}
    shrinking = {"containerStatuses": [{"name": "a", "allocatedResources": {"cpu": "3"}}, {"name": "b"}]}
    growing = {"containerStatuses": [{"name": "b", "resources": {"requests": {"cpu": "2"}}}]}
    assert pod_requests(spec, shrinking)["cpu"] == 7000
    assert pod_requests(spec, growing)["cpu"] == 5000


def test_limit_without_request_is_the_request() -> None:
    requests = pod_requests({"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]})
    assert requests == {"nvidia.com/gpu": 8, "pods": 1}


def test_pod_with_an_unreadable_quantity_says_so() -> None:
    raw = pod_json("a")
    raw["metadata"].update(uid="u", resourceVersion="1")
    raw["spec"]["containers"][0]["resources"] = {"requests": {"memory": "much"}}
    assert pod_from_json(raw).problem == "memory: 'much' is not a resource quantity"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, ""),
        ({"volumes": [{"name": "d", "hostPath": {"path": "/x"}}]}, ""),
        ({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}]}, "its volume 'd'"),
        ({"volumes": [{"name": "d", "ephemeral": {}}]}, "its volume 'd'"),
        ({"resourceClaims": [{"name": "gpu"}]}, "resource claims"),
        ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}, "pod affinity"),
        ({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}, "anti-affinity"),
        ({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}}, ""),
        ({"topologySpreadConstraints": [{"topologyKey": "zone"}]}, "spread"),
        ({"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]}, ""),
        ({"containers": [{"ports": [{"containerPort": 80, "hostPort": 80}]}]}, "host ports"),
        ({"containers": [{"ports": [{"containerPort": 80}]}]}, ""),
        ({"hostNetwork": True, "containers": [{"ports": [{"containerPort": 80}]}]}, "host ports"),
        ({"initContainers": [{"ports": [{"hostPort": 80}]}]}, "host ports"),
    ],
)
def test_pod_with_a_rule_that_is_not_modelled_must_not_be_pinned(spec: dict[str, Any], why: str) -> None:
    unpinnable = pod("a", **spec).unpinnable
    assert why in unpinnable
    assert bool(why) == bool(unpinnable)


def test_only_a_pod_with_our_gate_keeps_its_rules() -> None:
    selector = {"nodeSelector": {"a": "b"}}
    assert pod("a", **selector).node_selector == {"a": "b"}
    assert pod("a", gates=(), **selector).node_selector == {}
    assert pod("a", gates=("foreign/x",), **selector).node_selector == {}


def test_node_projection() -> None:
    made = node("a", taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}], labels={"zone": "z"})
    assert (made.ready, made.unschedulable, made.labels["zone"]) == (True, False, "z")
    assert str(made.taints[0]) == "k=v:NoSchedule"
    assert made.allocatable["cpu"] == 64_000
    assert not node("b", ready=False).ready
    raw = node_json("c", allocatable={"cpu": "lots"})
    raw["metadata"]["resourceVersion"] = "1"
    assert node_from_json(raw).allocatable == {}
