"""What is written: annotations that fit, and patches that a real API server takes and that keep the user's terms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.controller.decision import (
    ANNOTATION_BYTES,
    annotation_text,
    decide,
    event_of,
    holds_on,
    nomination_patch,
    pin_operations,
    read_annotation,
    ungate_patch,
)
from fusecache.controller.feasibility import term_matches
from fusecache.controller.model import DECISION, GATE, PLACEMENT, pod_from_json
from fusecache.controller.planner import Candidate, Choice
from fusecache.controller.verdict import wish_of
from tests.t6_controller import json_patch, pod_rules
from tests.t6_controller.objects import node, pod, pod_json

WISH = wish_of(pod("p"), "prefer", 60.0)
CHOICE = Choice(Candidate("b", 3, ""), Candidate("c", 2, ""), (Candidate("a", 9, "it is cordoned"),), "")


def raw_pod(**more: Any) -> dict[str, Any]:
    raw = pod_json("p", **more)
    raw["metadata"].update(uid="u", resourceVersion="5")
    return raw


def test_annotation_says_node_bytes_next_and_refused() -> None:
    document = json.loads(annotation_text(decide("placed", WISH, "", CHOICE)))
    assert document == {
        "state": "placed",
        "placement": "prefer",
        "node": "b",
        "reason": "b serves 3 B of imagenet by itself; next is c with 2 B",
        "datasets": ["imagenet"],
        "bytes": 3,
        "runner_up": {"node": "c", "bytes": 2},
        "refused": [{"node": "a", "bytes": 9, "because": "it is cordoned"}],
    }


def test_annotation_read_back_names_the_candidates() -> None:
    written = read_annotation(annotation_text(decide("placed", WISH, "", CHOICE)))
    assert written is not None
    assert (written.state, written.node_name) == ("placed", "b")
    assert written.candidates() == [Candidate("b", 3, ""), Candidate("c", 2, ""), Candidate("a", 9, "it is cordoned")]


TEXTS = st.text(max_size=2000)


@given(
    TEXTS,
    st.lists(st.builds(Candidate, TEXTS, st.integers(0, 1 << 60), TEXTS), max_size=20),
    st.lists(TEXTS, min_size=1, max_size=32),
)
def test_annotation_always_fits_and_is_read_back(reason: str, refused: list[Candidate], datasets: list[str]) -> None:
    wish = WISH._replace(datasets=tuple(datasets))
    text = annotation_text(decide("released", wish, reason, Choice(None, None, tuple(refused), reason)))
    assert len(text.encode()) <= ANNOTATION_BYTES
    written = read_annotation(text)
    assert written is not None
    assert written.state == "released"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "x",
        "[]",
        "1",
        "null",
        "{}",
        '{"state":[],"node":"","reason":""}',
        '{"state":"placed","node":1,"reason":""}',
    ],
)
def test_annotation_that_is_not_ours_is_none(text: str | None) -> None:
    assert read_annotation(text) is None


@given(
    st.dictionaries(
        st.sampled_from(["runner_up", "refused", "bytes", "x"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["node", "bytes", "because"]), inner, max_size=3)
            ),
            max_leaves=6,
        ),
    )
)
def test_candidates_of_an_annotation_that_somebody_else_wrote(more: dict[str, Any]) -> None:
    written = read_annotation(json.dumps({**more, "state": "placed", "node": "n", "reason": ""}))
    assert written is not None
    assert all(0 <= candidate.held_bytes < 1 << 63 for candidate in written.candidates())


def test_event_names_the_pod_and_fits() -> None:
    made = event_of(pod("p"), decide("released", WISH, "ü" * 3000, None), "p.1", "2026-01-01T00:00:00Z", "i")
    assert (made["reason"], made["type"]) == ("FusecacheReleasedUnplaced", "Warning")
    assert made["involvedObject"]["name"] == "p"
    assert len(made["message"].encode()) <= 1000


def test_books_count_a_pod_where_it_is_or_was_directed() -> None:
    def made(node_name: str = "", nominated: str = "", annotation: str = "", gates: tuple[str, ...] = ()) -> str:
        raw = raw_pod(gates=gates, annotations={DECISION: annotation} if annotation else {}, nodeName=node_name)
        raw["status"]["nominatedNodeName"] = nominated
        return holds_on(pod_from_json(raw))

    pinned = annotation_text(decide("placed", WISH, "", CHOICE))
    assert made() == ""
    assert made(node_name="x", nominated="y", annotation=pinned) == "x"
    assert made(nominated="y") == "y"
    assert made(annotation=pinned) == "b"
    assert made(annotation=pinned, gates=(GATE,)) == ""
    raw = raw_pod(gates=(), annotations={DECISION: pinned})
    raw["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    assert holds_on(pod_from_json(raw)) == ""
    raw = raw_pod(gates=(), nodeName="x")
    raw["status"]["phase"] = "Succeeded"
    assert holds_on(pod_from_json(raw)) == ""


def ungated(raw: dict[str, Any], *, pin: bool) -> dict[str, Any]:
    """The pod after our patch, which the API server must take."""
    made = pod_from_json(raw)
    wish = wish_of(made, "prefer", 60.0)
    changed: dict[str, Any] = json_patch.apply(raw, ungate_patch(made, decide("placed", wish, "", CHOICE), pin=pin))
    assert pod_rules.why_refused(raw, changed) == ""
    return changed


@pytest.mark.parametrize("gates", [(GATE,), ("x/a", GATE), (GATE, "x/a"), ("x/a", GATE, "x/b")])
def test_only_our_gate_is_removed(gates: tuple[str, ...]) -> None:
    raw = raw_pod(gates=gates)
    changed = ungated(raw, pin=False)
    assert [gate["name"] for gate in changed["spec"]["schedulingGates"]] == [gate for gate in gates if gate != GATE]
    assert {**changed["spec"], "schedulingGates": 0} == {**raw["spec"], "schedulingGates": 0}


def test_patch_fails_on_a_pod_that_changed() -> None:
    raw = raw_pod()
    patch = ungate_patch(pod_from_json(raw), decide("placed", WISH, "", CHOICE), pin=True)
    newer = {**raw, "metadata": {**raw["metadata"], "resourceVersion": "6"}}
    with pytest.raises(json_patch.TestFailed):
        json_patch.apply(newer, patch)
    other_gate = {**raw, "spec": {**raw["spec"], "schedulingGates": [{"name": "x/a"}]}}
    with pytest.raises(json_patch.TestFailed):
        json_patch.apply(other_gate, patch)


def test_foreign_annotations_stay() -> None:
    raw = raw_pod()
    raw["metadata"]["annotations"]["other/note"] = "kept"
    assert ungated(raw, pin=False)["metadata"]["annotations"]["other/note"] == "kept"
    raw = raw_pod(datasets=None)
    assert set(ungated(raw, pin=False)["metadata"]["annotations"]) == {DECISION}
    raw["metadata"]["annotations"] = {"other/note": "kept"}
    assert set(ungated(raw, pin=False)["metadata"]["annotations"]) == {"other/note", DECISION}


REQUIREMENT = st.fixed_dictionaries(
    {"key": st.sampled_from(["zone", "disk"]), "operator": st.just("In"), "values": st.sampled_from([["a"], ["b"]])}
)
FIELD = st.fixed_dictionaries(
    {
        "key": st.just("metadata.name"),
        "operator": st.sampled_from(["In", "NotIn"]),
        "values": st.sampled_from([["b"], ["c"]]),
    }
)
TERM = st.fixed_dictionaries(
    {},
    optional={
        "matchExpressions": st.lists(REQUIREMENT, min_size=1, max_size=2),
        "matchFields": st.lists(FIELD, min_size=1, max_size=1),
    },
)
NODE_AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        pod_rules.REQUIRED: st.fixed_dictionaries({"nodeSelectorTerms": st.lists(TERM, min_size=1, max_size=3)}),
        "preferredDuringSchedulingIgnoredDuringExecution": st.just([{"weight": 1, "preference": {}}]),
    },
)
AFFINITY = st.none() | st.fixed_dictionaries(
    {}, optional={"nodeAffinity": NODE_AFFINITY, "podAffinity": st.just({"x": 1})}
)


@given(AFFINITY, st.sampled_from(["a", "b", None]))
def test_pin_is_taken_by_the_api_and_narrows_to_the_node(affinity: dict[str, Any] | None, zone: str | None) -> None:
    raw = raw_pod(annotations={PLACEMENT: "require"}, **({"affinity": affinity} if affinity is not None else {}))
    changed = ungated(raw, pin=True)
    before, after = pod_from_json(raw).required_terms, changed["spec"]["affinity"]["nodeAffinity"][pod_rules.REQUIRED]
    labels = {"zone": zone} if zone else {}
    for name in ("b", "c"):
        there = node(name, labels=labels)
        matched_before = before is None or any(term_matches(term, there) for term in before)
        matches_now = any(term_matches(term, there) for term in after["nodeSelectorTerms"])
        assert matches_now is (name == "b" and matched_before)


def test_pin_of_an_empty_affinity_replaces_nothing() -> None:
    assert pin_operations({}, "n") == [
        {
            "op": "add",
            "path": "/spec/affinity",
            "value": {
                "nodeAffinity": {
                    pod_rules.REQUIRED: {
                        "nodeSelectorTerms": [
                            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
                        ]
                    }
                }
            },
        }
    ]


def test_nomination_carries_the_version_it_was_decided_on() -> None:
    assert nomination_patch(pod("p"), "n") == {
        "metadata": {"resourceVersion": "1", "uid": "uid-p"},
        "status": {"nominatedNodeName": "n"},
    }
