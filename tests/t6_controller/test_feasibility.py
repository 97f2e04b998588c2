"""May this pod run there: each rule alone, and all of them together against a naive reading of the API's documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.controller.feasibility import Ledger, refusal, term_matches, why_taints_refuse, why_too_small
from fusecache.controller.inventory import Inventory, take
from fusecache.controller.model import Node, Pod, Taint
from fusecache.controller.reports import Reports, Stream
from tests.t6_controller.objects import node, pod, report


def inventory(*names: str, ready: bool = True) -> Inventory:
    reports = Reports(5.0)
    for name in names:
        reports.receive(Stream(), report(name, {"imagenet": 1}, ready=ready), 0.0)
    return take(reports, 0.0)


def why(wanted: Pod, there: Node, *bound: Pod) -> str:
    ledger = Ledger({there.name: there}, [(there.name, other) for other in bound])
    return refusal(wanted, there, ("imagenet",), inventory(there.name), ledger)


def test_fitting_pod_is_not_refused() -> None:
    assert why(pod("p"), node("n")) == ""


def test_node_that_is_not_ready_or_cordoned_is_refused() -> None:
    assert why(pod("p"), node("n", ready=False)) == "it is not Ready"
    assert why(pod("p"), node("n", unschedulable=True)) == "it is cordoned"


def test_data_must_be_ready_there() -> None:
    there = node("n")
    ledger = Ledger({"n": there}, [])
    assert refusal(pod("p"), there, ("imagenet",), inventory(), ledger) == "it does not report"
    not_ready = refusal(pod("p"), there, ("imagenet",), inventory("n", ready=False), ledger)
    assert not_ready == "its mount of data set 'imagenet' is not ready (/mnt/x: starting)"
    both = refusal(pod("p"), there, ("imagenet", "labels"), inventory("n"), ledger)
    assert both == "it does not mount data set 'labels'"


def test_resources_of_bound_and_promised_pods_are_taken() -> None:
    there = node("n", gpus=8)
    assert why(pod("p", gpus=4), there, pod("q", gpus=4)) == ""
    refused = why(pod("p", gpus=4), there, pod("q", gpus=4), pod("r", gpus=1))
    assert refused == "not enough nvidia.com/gpu: 4 wanted, 3 left"
    ledger = Ledger({"n": there}, [])
    ledger.promise("n", pod("q", gpus=8).requests)
    assert ledger.left("n")["nvidia.com/gpu"] == 0
    assert ledger.left("n")["pods"] == 109


def test_request_of_nothing_fits_a_node_that_has_none_of_it() -> None:
    assert why_too_small({"nvidia.com/gpu": 0}, {}) == ""
    assert why_too_small({"nvidia.com/gpu": 0}, {"nvidia.com/gpu": -2}) == ""
    assert why_too_small({"cpu": 1500}, {"cpu": 1000}) == "not enough cpu: 1.5 wanted, 1 left"


def test_node_selector() -> None:
    assert why(pod("p", nodeSelector={"zone": "a"}), node("n", labels={"zone": "a"})) == ""
    assert why(pod("p", nodeSelector={"zone": "a"}), node("n")) == "nodeSelector zone=a does not match"


TAINT = Taint("k", "v", "NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "k", "operator": "Equal", "value": "other"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"value": "v"}, False),
        ({"key": "k", "operator": "Lt", "value": "v"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], tolerates: bool) -> None:
    assert why_taints_refuse((toleration,), (TAINT,)) == ("" if tolerates else "taint k=v:NoSchedule is not tolerated")


def test_only_repelling_taints_count() -> None:
    assert why_taints_refuse((), (Taint("k", "", "PreferNoSchedule"),)) == ""
    assert why_taints_refuse((), (Taint("k", "", "NoExecute"),)) == "taint k:NoExecute is not tolerated"


LABELS = {"a": "1", "b": "x"}


@pytest.mark.parametrize(
    ("requirement", "matches"),
    [
        ({"key": "a", "operator": "In", "values": ["0", "1"]}, True),
        ({"key": "a", "operator": "In", "values": ["2"]}, False),
        ({"key": "c", "operator": "In", "values": ["1"]}, False),
        ({"key": "a", "operator": "NotIn", "values": ["2"]}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, False),
        ({"key": "c", "operator": "NotIn", "values": ["1"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "c", "operator": "Exists"}, False),
        ({"key": "c", "operator": "DoesNotExist"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
        ({"key": "a", "operator": "Gt", "values": ["0"]}, True),
        ({"key": "a", "operator": "Gt", "values": ["1"]}, False),
        ({"key": "a", "operator": "Lt", "values": ["2"]}, True),
        ({"key": "b", "operator": "Lt", "values": ["2"]}, False),
        ({"key": "c", "operator": "Gt", "values": ["0"]}, False),
        ({"key": "a", "operator": "Gt", "values": ["x"]}, False),
        ({"key": "a", "operator": "Newer", "values": ["1"]}, False),
    ],
)
def test_operators(requirement: dict[str, Any], matches: bool) -> None:
    assert term_matches({"matchExpressions": [requirement]}, node("n", labels=LABELS)) is matches


def test_terms_are_alternatives_and_requirements_are_all_needed() -> None:
    here = {"key": "metadata.name", "operator": "In", "values": ["n"]}
    elsewhere = {"key": "metadata.name", "operator": "In", "values": ["m"]}
    exists = {"key": "a", "operator": "Exists"}

    def with_terms(*terms: dict[str, Any]) -> str:
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        affinity = {"nodeAffinity": {key: {"nodeSelectorTerms": list(terms)}}}
        return why(pod("p", affinity=affinity), node("n", labels=LABELS))

    refused = "its required node affinity does not match"
    assert with_terms({"matchFields": [here]}) == ""
    assert with_terms({"matchFields": [elsewhere]}) == refused
    assert with_terms({"matchFields": [elsewhere]}, {"matchExpressions": [exists]}) == ""
    assert with_terms({"matchFields": [elsewhere], "matchExpressions": [exists]}) == refused
    assert with_terms({}) == refused
    assert with_terms({}, {"matchFields": [here]}) == ""
    assert with_terms() == refused


LABEL_VALUES = st.sampled_from(["", "1", "2", "x"])
REQUIREMENTS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["a", "b"]),
        "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
        "values": st.lists(LABEL_VALUES, min_size=1, max_size=2),
    }
)
TERMS = st.lists(st.fixed_dictionaries({"matchExpressions": st.lists(REQUIREMENTS, max_size=2)}), max_size=2)
TAINTS = st.builds(
    Taint, st.sampled_from(["k", "l"]), st.sampled_from(["", "v"]), st.sampled_from(["NoSchedule", "PreferNoSchedule"])
)
TOLERATIONS = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from(["k", "l"]),
        "operator": st.just("Exists"),
        "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
    },
).filter(lambda toleration: "key" not in toleration or "operator" in toleration)


@given(
    labels=st.dictionaries(st.sampled_from(["a", "b"]), LABEL_VALUES),
    terms=st.none() | TERMS,
    taints=st.lists(TAINTS, max_size=2),
    tolerations=st.lists(TOLERATIONS, max_size=2),
    wanted_gpus=st.integers(0, 3),
    taken_gpus=st.integers(0, 4),
    ready=st.booleans(),
    cordoned=st.booleans(),
)
def test_all_rules_together_are_what_the_documents_say(
    labels: dict[str, str],
    terms: list[dict[str, Any]] | None,
    taints: list[Taint],
    tolerations: list[dict[str, str]],
    wanted_gpus: int,
    taken_gpus: int,
    ready: bool,
    cordoned: bool,
) -> None:
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {} if terms is None else {"nodeAffinity": {key: {"nodeSelectorTerms": terms}}}
    there = node(
        "n",
        gpus=4,
        labels=labels,
        ready=ready,
        unschedulable=cordoned,
        taints=[{"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in taints],
    )
    wanted = pod("p", gpus=wanted_gpus, affinity=affinity, tolerations=tolerations)

    def holds(requirement: dict[str, Any]) -> bool:
        present = requirement["key"] in labels
        inside = present and labels[requirement["key"]] in requirement["values"]
        return {"In": inside, "NotIn": not inside, "Exists": present, "DoesNotExist": not present}[
            requirement["operator"]
        ]

    chosen = terms is None or any(
        term["matchExpressions"] and all(map(holds, term["matchExpressions"])) for term in terms
    )
    tolerated = all(
        taint.effect == "PreferNoSchedule"
        or any(
            toleration.get("operator") == "Exists"
            and toleration.get("key", taint.key) == taint.key
            and toleration.get("effect", taint.effect) == taint.effect
            for toleration in tolerations
        )
        for taint in taints
    )
    fits = wanted_gpus <= 4 - taken_gpus
    expected = ready and not cordoned and chosen and tolerated and fits
    assert (why(wanted, there, pod("q", gpus=taken_gpus)) == "") is expected
