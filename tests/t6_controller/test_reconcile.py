"""The loop against an API that enforces the real rules: what happens to pods, and what happens in between.

Promises S27 (what is touched), S29 (`prefer`), S30 (`require`) and S31 (what is written) of SEMANTICS.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusecache.controller.model import DECISION, GATE, MAX_WAIT, PLACEMENT
from fusecache.controller.reconcile import LONGEST_PLANNING_S
from tests.support import log_noise
from tests.t6_controller import pod_rules
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.objects import node_json, pod_json
from tests.t6_controller.rig import Rig, run, running

REQUIRE = {PLACEMENT: "require"}


def nodes(api: ApiDouble, *names: str, **more: Any) -> None:
    for name in names:
        api.create("nodes", node_json(name, **more))


def decision(pod: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(pod["metadata"]["annotations"][DECISION])
    return document


def gates(pod: dict[str, Any]) -> list[str]:
    return [gate["name"] for gate in pod["spec"].get("schedulingGates") or ()]


def reasons(rig: Rig) -> list[str]:
    return [event["reason"] for event in rig.events()]


def test_prefer_is_nominated_then_let_go(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})
            api.create("pods", pod_json("p"))
            pod = await rig.gate_gone()
            assert pod["spec"]["nodeName"] == pod["status"]["nominatedNodeName"] == "b"
            assert "affinity" not in pod["spec"]
            assert decision(pod)["state"] == "placed"
            assert reasons(rig) == ["FusecachePlaced"]

    run(story)


def test_require_is_pinned_in_the_patch_that_lets_it_go(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["a", "b"]}]}, {}]
        affinity = {"nodeAffinity": {pod_rules.REQUIRED: {"nodeSelectorTerms": terms}}}
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})
            api.create("pods", pod_json("p", annotations=REQUIRE, affinity=affinity))
            pod = await rig.gate_gone()
            after = pod["spec"]["affinity"]["nodeAffinity"][pod_rules.REQUIRED]["nodeSelectorTerms"]
            pin = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["b"]}]}
            assert after == [{**terms[0], **pin}, {}]
            assert pod["spec"]["nodeName"] == "b"
            assert "nominatedNodeName" not in pod["status"]
            assert api.calls.count(("PATCH", "/api/v1/namespaces/default/pods/p")) == 1

    run(story)


def test_without_a_feasible_node_prefer_is_released_at_once_with_the_reason(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", gpus=4)
        api.binds = False
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p", gpus=8))
            pod = await rig.gate_gone()
            assert "nominatedNodeName" not in pod["status"]
            assert decision(pod)["reason"] == "0 of 1 nodes can take it: 1 not enough nvidia.com/gpu"
            assert decision(pod)["refused"][0]["because"] == "not enough nvidia.com/gpu: 8 wanted, 4 left"
            assert reasons(rig) == ["FusecacheReleasedUnplaced"]

    run(story)


def test_require_stays_with_the_reason_shown_until_there_is_room(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", gpus=4)
        api.create("pods", pod_json("other", gates=(), gpus=4, nodeName="a"))
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p", gpus=1, annotations=REQUIRE))
            await rig.until("the reason is shown", lambda: DECISION in rig.pod()["metadata"]["annotations"])
            await rig.until("the event", lambda: bool(rig.events()))
            rig.pass_time(5.0)
            await rig.rounds()
            pod = rig.pod()
            assert gates(pod) == [GATE]
            assert decision(pod)["state"] == "waiting"
            assert reasons(rig) == ["FusecacheWaiting"]
            assert api.calls.count(("PATCH", "/api/v1/namespaces/default/pods/p")) == 1  # said once, not every round
            api.delete("pods", "default/other")
            pod = await rig.gate_gone()
            await rig.until("it is bound", lambda: rig.pod()["spec"].get("nodeName") == "a")

    run(story)


def test_foreign_gate_is_waited_for_and_never_touched(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p", gates=("x.io/a", GATE, "x.io/b"), annotations={MAX_WAIT: "10m"}))
            api.create("pods", pod_json("q", gates=(GATE, "x.io/a"), annotations={MAX_WAIT: "30s"}))
            await rig.until("both are seen", lambda: len(rig.pods.selected) == 2)
            await rig.rounds()
            assert gates(rig.pod()) == ["x.io/a", GATE, "x.io/b"]
            rig.pass_time(14.0)
            await rig.rounds()
            assert gates(rig.pod("default/q")) == [GATE, "x.io/a"]
            rig.pass_time(16.1)
            late = await rig.gate_gone("default/q")
            assert gates(late) == ["x.io/a"]
            assert decision(late)["reason"] == "other gates hold it: x.io/a after max-wait (30 s)"
            rig.report({"a": 1})

            def lift(pod: dict[str, Any]) -> None:
                pod["spec"]["schedulingGates"] = [{"name": GATE}]

            api.change("pods", "default/p", lift)
            placed = await rig.gate_gone("default/p")
            assert decision(placed)["state"] == "placed"

    run(story)


def test_controller_that_just_began_waits_for_every_node(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        api.create("nodes", node_json("down", ready=False))
        api.create("nodes", node_json("cordoned", unschedulable=True))
        api.create("pods", pod_json("p"))
        async with running(api, tmp_path, lead=False) as rig:
            rig.lead()
            rig.report({"a": 1})
            await rig.rounds()
            assert gates(rig.pod()) == [GATE]
            explanation = rig.loop.explain("default", "p")
            assert explanation is not None
            assert "just started" in explanation.reason
            rig.report({"b": 2})  # all that can take pods have reported: no need to wait longer
            pod = await rig.gate_gone()
            assert decision(pod)["node"] == "b"

    run(story)


def test_controller_that_just_began_waits_two_intervals_at_most(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "silent")
        api.create("pods", pod_json("p"))
        async with running(api, tmp_path, lead=False) as rig:
            rig.lead()
            rig.report({"a": 1})
            rig.pass_time(9.9)
            await rig.rounds()
            assert gates(rig.pod()) == [GATE]
            rig.pass_time(0.2)
            assert decision(await rig.gate_gone())["node"] == "a"

    run(story)


def test_pods_that_are_overdue_at_the_start_are_still_placed(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        overdue = pod_json("p")
        overdue["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        api.create("pods", overdue)
        async with running(api, tmp_path, lead=False) as rig:
            rig.lead()
            await rig.rounds()
            assert gates(rig.pod()) == [GATE]
            rig.report({"a": 1, "b": 2})
            assert decision(await rig.gate_gone())["node"] == "b"

    run(story)


def test_nothing_is_written_without_the_lead(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a")
        api.create("pods", pod_json("p"))
        async with running(api, tmp_path) as rig:
            await rig.gate_gone()
            rig.leading = False
            rig.loop.lead_changed(False)
            api.create("pods", pod_json("q"))
            await rig.until("it is seen", lambda: "default/q" in rig.pods.selected)
            await rig.rounds(5)
            assert gates(rig.pod("default/q")) == [GATE]

    run(story)


def intrude(api: ApiDouble, change: Callable[[dict[str, Any]], None]) -> None:
    """Somebody else changes the pod between our decision and our patch."""
    api.before_patch = lambda pod: (
        api.change("pods", f"{pod['metadata']['namespace']}/{pod['metadata']['name']}", change) and None
    )


@pytest.mark.parametrize("placement", ["prefer", "require"])
def test_pod_that_changed_meanwhile_is_read_and_planned_again(api: ApiDouble, tmp_path: Path, placement: str) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})

            def move(pod: dict[str, Any]) -> None:
                pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "a"}

            intrude(api, move)
            api.create("pods", pod_json("p", annotations={PLACEMENT: placement}))
            pod = await rig.gate_gone()
            assert api.before_patch is None  # it did come in between
            assert rig.metrics.counter("fusecache_controller_conflicts_total").value == 1
            assert decision(pod)["node"] == "a"

    run(story)


def test_pod_changed_between_nomination_and_release_is_planned_again(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})

            def move(pod: dict[str, Any]) -> None:
                pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "a"}

            def after_the_nomination(pod: dict[str, Any]) -> None:
                # The first patch is the nomination, the second takes the gate.
                intrude(api, move)

            api.before_patch = after_the_nomination
            api.create("pods", pod_json("p"))
            pod = await rig.gate_gone()
            assert rig.metrics.counter("fusecache_controller_conflicts_total").value == 1
            assert pod["status"]["nominatedNodeName"] == decision(pod)["node"] == "a"

    run(story)


def test_gate_taken_by_somebody_else_is_left_alone(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})

            def ungate(pod: dict[str, Any]) -> None:
                pod["spec"]["schedulingGates"] = []

            intrude(api, ungate)
            api.create("pods", pod_json("p", annotations=REQUIRE))
            await rig.until("it is seen ungated", lambda: not rig.pods.selected and "default/p" in rig.pods.values)
            await rig.rounds()
            assert DECISION not in rig.pod()["metadata"]["annotations"]
            assert "affinity" not in rig.pod()["spec"]

    run(story)


def test_pod_deleted_meanwhile_is_forgotten(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.before_patch = lambda pod: api.delete("pods", "default/p")
            api.create("pods", pod_json("p"))
            await rig.until("it is gone", lambda: api.before_patch is None and not rig.pods.values)
            api.create("pods", pod_json("q"))
            await rig.gate_gone("default/q")
            assert list(rig.pods.values) == ["default/q"]

    run(story)


def test_change_that_the_api_never_takes_releases_prefer_with_its_words(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("change_refused")

    async def story() -> None:
        nodes(api, "a")
        path = "/api/v1/namespaces/default/pods/p/status"
        api.refuse("PATCH", path, 422, 1, "denied by a policy")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p"))
            pod = await rig.gate_gone()
            assert api.refusals_left() == 0
            assert "denied by a policy" in decision(pod)["reason"]
            assert decision(pod)["state"] == "released"

    run(story)


def test_change_that_was_refused_is_tried_again_for_require(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("change_refused", count=1)

    async def story() -> None:
        nodes(api, "a")
        api.refuse("PATCH", "/api/v1/namespaces/default/pods/p", 422, 1, "denied by a policy")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p", annotations=REQUIRE))
            await rig.until("the reason is shown", lambda: DECISION in rig.pod()["metadata"]["annotations"])
            assert "denied by a policy" in decision(rig.pod())["reason"]
            rig.pass_time(10.0)
            rig.report({"a": 1})
            await rig.rounds()
            assert gates(rig.pod()) == [GATE]
            rig.pass_time(51.0)
            rig.report({"a": 1})
            await rig.until("it is let go", lambda: gates(rig.pod()) == [])
            assert decision(rig.pod())["node"] == "a"

    run(story)


def test_write_that_fails_for_a_while_is_tried_again_and_explained(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("pod_not_written", count=3)

    async def story() -> None:
        nodes(api, "a")
        api.refuse("PATCH", "/api/v1/namespaces/default/pods/p/status", 503, 3, "etcd is busy")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p"))
            await rig.until("two tries failed", lambda: api.refusals_left() == 1)
            await rig.rounds()
            explanation = rig.loop.explain("default", "p")
            assert explanation is not None
            assert "etcd is busy" in explanation.reason
            while gates(rig.pod()):
                rig.pass_time(1.0)
                rig.report({"a": 1})
                await rig.rounds(1)
            assert decision(await rig.gate_gone())["state"] == "placed"

    run(story)


def test_pod_that_can_not_be_written_keeps_no_room_from_others(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("pod_not_written.*no rights here")

    async def story() -> None:
        nodes(api, "a", "b")
        path = "/api/v1/namespaces/closed/pods/greedy/status"
        api.refuse("PATCH", path, 403, 1000, "no rights here")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 2, "b": 1})
            api.create("pods", pod_json("greedy", namespace="closed", gpus=8, priority=1000))
            await rig.until("it was refused", lambda: ("PATCH", path) in api.calls)
            await rig.rounds()
            api.create("pods", pod_json("p", gpus=8))
            assert decision(await rig.gate_gone())["node"] == "a"

    run(story)


def test_event_that_can_not_be_written_stops_nothing(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("event_not_written", count=1)

    async def story() -> None:
        nodes(api, "a")
        api.refuse("POST", "/api/v1/namespaces/default/events", 403, 1)
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p"))
            await rig.until("it is bound", lambda: "nodeName" in rig.pod()["spec"])
            await rig.until("the event was refused", lambda: api.refusals_left() == 0)
            api.create("pods", pod_json("q"))
            await rig.gate_gone("default/q")

    run(story)


def test_pods_of_one_round_do_not_count_on_the_same_room(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b", "c")
        for name in ("p", "q", "r"):
            api.create("pods", pod_json(name, gpus=8))
        async with running(api, tmp_path, lead=False) as rig:
            rig.report({"a": 3, "b": 2, "c": 1})
            rig.lead()
            chosen = {decision(await rig.gate_gone(f"default/{name}"))["node"] for name in ("p", "q", "r")}
            assert chosen == {"a", "b", "c"}

    run(story)


def test_higher_priority_chooses_first(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        api.create("pods", pod_json("p", gpus=8))
        api.create("pods", pod_json("q", gpus=8, priority=1000))
        async with running(api, tmp_path, lead=False) as rig:
            rig.report({"a": 3, "b": 2})
            rig.lead()
            assert decision(await rig.gate_gone("default/q"))["node"] == "a"
            assert decision(await rig.gate_gone("default/p"))["node"] == "b"

    run(story)


def test_pods_that_wait_for_room_do_not_keep_others_from_being_seen(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a")
        for number in range(12):
            api.create("pods", pod_json(f"old-{number}", gpus=16, priority=1000, annotations=REQUIRE))
        api.create("pods", pod_json("p"))
        async with running(api, tmp_path, lead=False, report_interval_s=300) as rig:
            rig.report({"a": 1})
            rig.clock.step_s = LONGEST_PLANNING_S / 3  # a round reaches three pods at most
            rig.lead()
            pod = await rig.gate_gone()
            assert decision(pod)["node"] == "a"
            assert len(rig.pods.selected) == 12  # those before it by priority are all still there

    run(story)


def test_placed_pod_keeps_its_room_until_it_is_bound(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        api.binds = False  # a scheduler that is slow
        async with running(api, tmp_path) as rig:
            rig.report({"a": 3, "b": 2})
            for name, placement in (("p", "prefer"), ("q", "require")):
                api.create("pods", pod_json(name, gpus=8, annotations={PLACEMENT: placement}))
                await rig.gate_gone(f"default/{name}")
            assert decision(rig.pod("default/p"))["node"] == "a"
            assert decision(rig.pod("default/q"))["node"] == "b"
            api.create("pods", pod_json("r", gpus=1))
            assert decision(await rig.gate_gone("default/r"))["state"] == "released"

    run(story)


def test_nomination_left_by_a_dead_controller_is_replaced_or_cleared(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        api.binds = False
        for name, gpus in (("p", 1), ("q", 16)):
            left = pod_json(name, gpus=gpus)
            left["status"]["nominatedNodeName"] = "a"
            api.create("pods", left)
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})
            placed = await rig.gate_gone("default/p")
            assert placed["status"]["nominatedNodeName"] == "b"
            released = await rig.gate_gone("default/q")
            assert "nominatedNodeName" not in released["status"]

    run(story)


@pytest.mark.parametrize("placement", ["prefer", "require"])
def test_pod_that_names_no_data_set_is_released(api: ApiDouble, tmp_path: Path, placement: str) -> None:
    async def story() -> None:
        nodes(api, "a")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1})
            api.create("pods", pod_json("p", datasets=None, annotations={PLACEMENT: placement}))
            pod = await rig.gate_gone()
            assert "it names no data set" in decision(pod)["reason"]

    run(story)


def test_node_whose_mount_is_not_ready_gets_no_pod(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 9}, ready=False)
            rig.report({"b": 1})
            api.create("pods", pod_json("p"))
            pod = await rig.gate_gone()
            assert decision(pod)["node"] == "b"
            assert "not ready" in decision(pod)["refused"][0]["because"]

    run(story)


def test_node_that_fell_silent_gets_no_pod(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        async with running(api, tmp_path) as rig:
            rig.report({"a": 9})
            rig.pass_time(15.1)
            rig.report({"b": 1})
            api.create("pods", pod_json("p"))
            assert decision(await rig.gate_gone())["node"] == "b"

    run(story)


def test_explain_follows_a_pod_from_waiting_to_bound(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        nodes(api, "a", "b")
        api.create("pods", pod_json("plain", gates=(), datasets=None))
        async with running(api, tmp_path) as rig:
            rig.report({"a": 1, "b": 2})
            assert rig.loop.explain("default", "nobody") is None
            plain = rig.loop.explain("default", "plain")
            assert plain is not None
            assert plain.state == "foreign"
            api.create("pods", pod_json("p"))
            await rig.gate_gone()
            await rig.until("the binding is seen", lambda: rig.pods.values["default/p"].node_name == "b")
            bound = rig.loop.explain("default", "p")
            assert bound is not None
            assert (bound.state, bound.node_name) == ("bound", "b")
            assert [candidate.node_name for candidate in bound.candidates] == ["b", "a"]

            def elsewhere(pod: dict[str, Any]) -> None:
                pod["spec"]["nodeName"] = "a"

            api.change("pods", "default/p", elsewhere)
            await rig.until("the move is seen", lambda: rig.pods.values["default/p"].node_name == "a")
            moved = rig.loop.explain("default", "p")
            assert moved is not None
            assert moved.reason.startswith("the scheduler chose a instead of b")

    run(story)
