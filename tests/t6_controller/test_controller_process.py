"""The whole command against a double of the API: what users and other processes see of it.

Promise S32 of SEMANTICS.md: a controller that ends or is killed, and the next one.
"""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from fusecache.config.co_scheduling import PlacementConfig
from fusecache.controller import main
from fusecache.controller.model import DECISION, GATE
from fusecache.errors import ApiUnavailable
from tests.support import log_noise
from tests.support.command import error_line, fusecache
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.controller_process import ControllerProcess, NodeStream
from tests.t6_controller.objects import GIB, node_json, pod_json

LEASE = "fusecache/fusecache-controller"


def test_story_from_reports_to_a_bound_pod_and_the_questions_about_it(api: ApiDouble, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name in "abc":
            api.create("nodes", node_json(name))
        controller = stack.enter_context(ControllerProcess(api, tmp_path))
        ask = ("--controller", controller.address)
        for name, held in (("a", 1), ("b", 3), ("c", 2)):
            stack.enter_context(NodeStream(controller.address, name, {"imagenet": held * GIB}))
        api.create("pods", pod_json("train"))
        api.wait_for("the pod is bound", lambda: "nodeName" in api.get("pods", "default/train")["spec"])
        pod = api.get("pods", "default/train")
        assert pod["spec"]["nodeName"] == pod["status"]["nominatedNodeName"] == "b"
        assert pod["spec"]["schedulingGates"] == []
        decision = json.loads(pod["metadata"]["annotations"][DECISION])
        assert (decision["state"], decision["node"], decision["bytes"]) == ("placed", "b", 3 * GIB)
        api.wait_for("an event", lambda: bool(api.all("events")))

        listed = json.loads(fusecache("locality", "--json", *ask, state=tmp_path).stdout)
        assert listed["nodes_reporting"] == 3
        assert [(row["node"], row["bytes"], row["percent"], row["counts"]) for row in listed["rows"]] == [
            ("b", 3 * GIB, 3.0, True),
            ("c", 2 * GIB, 2.0, True),
            ("a", 1 * GIB, 1.0, True),
        ]
        table = fusecache("locality", "imagenet", *ask, state=tmp_path).stdout.splitlines()
        assert table[0].split() == ["data", "set", "node", "tier", "bytes", "percent", "ready", "age", "counts"]
        assert table[1].split()[:7] == ["imagenet", "b", "block", "worker", "3", "GiB", "3"]
        assert table[-1] == "3 nodes report"
        nobody = fusecache("locality", "other", *ask, state=tmp_path).stdout
        assert nobody == "none of 3 nodes that report knows data set 'other'\n"

        told = json.loads(fusecache("explain", "pod", "train", "--json", *ask, state=tmp_path).stdout)
        assert (told["state"], told["node"], told["placement"]) == ("bound", "b", "prefer")
        assert [candidate["node"] for candidate in told["candidates"]] == ["b", "c"]
        api.create("pods", pod_json("huge", gpus=99, annotations={"fusecache.io/placement": "require"}))
        api.wait_for(
            "it is told to wait", lambda: DECISION in api.get("pods", "default/huge")["metadata"]["annotations"]
        )
        text = fusecache("explain", "pod", "huge", *ask, state=tmp_path).stdout
        assert "state      waiting\n" in text
        assert "reason     0 of 3 nodes can take it: 3 not enough nvidia.com/gpu\n" in text
        assert "not enough nvidia.com/gpu: 99 wanted, 8 left" in text
        missing = fusecache("explain", "pod", "nobody", "-n", "x", *ask, state=tmp_path)
        assert error_line(missing, 7) == "fusecache: no pod 'nobody' in namespace 'x'"

        assert controller.get("/healthz") == (200, "ok\n")
        assert controller.get("/readyz") == (200, "ok\n")
        status, metrics = controller.get("/metrics")
        assert status == 200
        for line in (
            "fusecache_controller_leader 1.0",
            'fusecache_controller_decisions_total{outcome="placed"} 1.0',
            "fusecache_controller_streams 3.0",
            "fusecache_controller_pods_waiting 1.0",
        ):
            assert f"\n{line}\n" in metrics
        assert "\nfusecache_mount_ready" not in metrics  # nothing of a node


def test_address_of_the_controller_comes_from_the_configuration(api: ApiDouble, tmp_path: Path) -> None:
    with ControllerProcess(api, tmp_path) as controller:
        file = tmp_path / "node.yaml"
        file.write_text(json.dumps({"controller": {"address": controller.address}}))
        listed = fusecache("locality", "--json", "--config", file, state=tmp_path)
        assert json.loads(listed.stdout) == {"nodes_reporting": 0, "rows": []}


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    line = error_line(fusecache("locality", "--controller", "127.0.0.1:1", state=tmp_path), 7)
    assert line.startswith("fusecache: controller 127.0.0.1:1: ")
    assert "give --controller HOST:PORT" in line
    wrong = error_line(fusecache("locality", "--controller", "here", state=tmp_path), 2)
    assert wrong == "fusecache: --controller: 'here' has no port; write HOST:PORT"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly_and_gives_the_lease_back(
    api: ApiDouble, tmp_path: Path, number: signal.Signals
) -> None:
    controller = ControllerProcess(api, tmp_path)
    try:
        with NodeStream(controller.address, "a", {"imagenet": 1}) as stream:
            api.wait_for("a report", lambda: "fusecache_controller_streams 1.0" in controller.get("/metrics")[1])
            assert api.get("leases", LEASE)["spec"]["holderIdentity"] != ""
            assert controller.stop(number) == 0
            code, _ = stream.end()
            assert code is grpc.StatusCode.UNAVAILABLE
        spec = api.get("leases", LEASE)["spec"]
        assert spec["holderIdentity"] == ""
        assert spec["renewTime"] == "1970-01-01T00:00:00.000000Z"
    finally:
        controller.stop(signal.SIGKILL)
    assert "not-for-logs" not in controller.logged()


def test_standby_refuses_nodes_until_it_takes_over(api: ApiDouble, tmp_path: Path) -> None:
    api.create("nodes", node_json("a"))
    with ExitStack() as stack:
        first = stack.enter_context(ControllerProcess(api, tmp_path / "first"))
        second = stack.enter_context(ControllerProcess(api, tmp_path / "second", leads=False))
        assert second.get("/readyz") == (503, "another instance leads\n")
        assert second.get("/healthz") == (200, "ok\n")
        with NodeStream(second.address, "a", {"imagenet": 1}) as refused:
            assert refused.end() == (grpc.StatusCode.UNAVAILABLE, "this instance does not lead")
        assert first.stop() == 0
        api.wait_for("the second leads", lambda: second.get("/readyz")[0] == 200)
        stack.enter_context(NodeStream(second.address, "a", {"imagenet": 1}))
        api.create("pods", pod_json("train"))
        api.wait_for("the pod is bound", lambda: "nodeName" in api.get("pods", "default/train")["spec"])
        assert json.loads(api.get("pods", "default/train")["metadata"]["annotations"][DECISION])["state"] == "placed"
        assert api.get("leases", LEASE)["spec"]["leaseTransitions"] == 1


def test_killed_leader_is_followed_when_its_lease_has_run_out(api: ApiDouble, tmp_path: Path) -> None:
    api.create("nodes", node_json("a"))
    with ExitStack() as stack:
        first = ControllerProcess(api, tmp_path / "first", lease_duration_s=3)
        second = stack.enter_context(ControllerProcess(api, tmp_path / "second", leads=False, lease_duration_s=3))
        first.process.kill()
        assert first.stop() == -signal.SIGKILL
        api.create("pods", pod_json("train"))
        assert api.get("leases", LEASE)["spec"]["holderIdentity"] != ""  # it had no time to give it back
        api.wait_for("the second leads", lambda: second.get("/readyz")[0] == 200)
        stack.enter_context(NodeStream(second.address, "a", {"imagenet": 1}))
        api.wait_for("the pod is bound", lambda: "nodeName" in api.get("pods", "default/train")["spec"])
        assert json.loads(api.get("pods", "default/train")["metadata"]["annotations"][DECISION])["node"] == "a"


def test_controller_killed_between_nomination_and_release_is_finished_by_the_next(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("pod_not_written", optional=True)
    api.create("nodes", node_json("a"))
    first = ControllerProcess(api, tmp_path / "first", lease_duration_s=3)
    try:
        with NodeStream(first.address, "a", {"imagenet": 1}):
            api.refuse("PATCH", "/api/v1/namespaces/default/pods/train", 503, 1000)
            api.create("pods", pod_json("train"))
            api.wait_for(
                "it is nominated", lambda: api.get("pods", "default/train")["status"].get("nominatedNodeName") == "a"
            )
            first.process.kill()
    finally:
        first.stop(signal.SIGKILL)
    assert [gate["name"] for gate in api.get("pods", "default/train")["spec"]["schedulingGates"]] == [GATE]
    api.allow_all()
    with ExitStack() as stack:
        second = stack.enter_context(ControllerProcess(api, tmp_path / "second", lease_duration_s=3))
        stack.enter_context(NodeStream(second.address, "a", {"imagenet": 1}))
        api.wait_for("the pod is bound", lambda: "nodeName" in api.get("pods", "default/train")["spec"])
        assert json.loads(api.get("pods", "default/train")["metadata"]["annotations"][DECISION])["state"] == "placed"


def test_rights_that_are_missing_end_the_start_with_the_reason(
    api: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_logs: log_noise.Declare
) -> None:
    expected_logs("watch_failed")
    monkeypatch.setattr(main, "FIRST_LIST_S", 1.0)
    api.refuse("GET", "/api/v1/pods", 403, 1000, 'User "x" cannot list resource "pods"')
    settings = PlacementConfig(listen_address="127.0.0.1:0", kubeconfig=api.kubeconfig(tmp_path))
    with pytest.raises(ApiUnavailable, match='User "x" cannot list resource "pods"'):
        main.run(settings, None, lambda address: pytest.fail("it must not listen"))
    assert api.all("leases") == []


def test_without_credentials_it_says_what_to_give(tmp_path: Path) -> None:
    done = fusecache("controller", state=tmp_path)
    assert "not in a pod" in error_line(done, 2)
    assert "give --kubeconfig FILE" in done.stderr


def test_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    line = error_line(fusecache("controller", "--kubeconfig", "/no/such", state=tmp_path), 2)
    assert line == "fusecache: kubeconfig '/no/such' can't be read: No such file or directory"
