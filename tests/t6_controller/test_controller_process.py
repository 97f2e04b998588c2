"""The whole command against a double of the API: what users and other processes see of it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from fusecache.controller.model import DECISION
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.controller_process import ControllerProcess, NodeStream
from tests.t6_controller.objects import GIB, node_json, pod_json


def test_prefer_pod_is_nominated_to_the_node_with_most_bytes_and_ungated(tmp_path: Path) -> None:
    with ApiDouble() as api, ExitStack() as stack:
        for name in "abc":
            api.create("nodes", node_json(name))
        controller = stack.enter_context(ControllerProcess(api, tmp_path))
        for name, held in (("a", 1), ("b", 3), ("c", 2)):
            stack.enter_context(NodeStream(controller.address, name, {"imagenet": held * GIB}))
        api.create("pods", pod_json("train"))
        api.wait_for("the pod is bound", lambda: "nodeName" in api.get("pods", "default/train")["spec"])
        pod = api.get("pods", "default/train")
        assert pod["spec"]["nodeName"] == "b"
        assert pod["status"]["nominatedNodeName"] == "b"
        assert pod["spec"]["schedulingGates"] == []
        decision = json.loads(pod["metadata"]["annotations"][DECISION])
        assert (decision["state"], decision["node"], decision["bytes"]) == ("placed", "b", 3 * GIB)
        api.wait_for("an event", lambda: bool(api.all("events")))
