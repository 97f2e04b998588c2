"""Both ends of the protocol together: fusecache's own reporters and the controller's process."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from fusecache.controller.model import DECISION
from fusecache.errors import ControllerUnavailable
from fusecache.rpc.locality_client import LocalityClient
from tests.support import log_noise
from tests.support.simulated_reporter import SimulatedNodes
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.controller_process import ControllerProcess, free_port
from tests.t6_controller.objects import node_json, pod_json

NAMES = ("a", "b", "c")
WAIT_S = 30.0


def locality(client: LocalityClient) -> dict[str, int]:
    """Node -> bytes, of those that count."""
    try:
        return {row.node_name: row.bytes for row in client.list_locality("").rows if row.counts}
    except ControllerUnavailable:
        return {}


def wait_for(address: str, expected: dict[str, int]) -> None:
    """Until exactly these nodes count, with so many bytes."""
    deadline = time.monotonic() + WAIT_S
    with LocalityClient(address, 5.0) as client:
        while (seen := locality(client)) != expected:
            assert time.monotonic() < deadline, f"{seen} instead of {expected}"
            time.sleep(0.05)


def placed(api: ApiDouble, name: str) -> dict[str, Any]:
    """Create a pod; the decision on it."""
    api.create("pods", pod_json(name))
    api.wait_for(f"{name} is bound", lambda: "nodeName" in api.get("pods", f"default/{name}")["spec"])
    document: dict[str, Any] = json.loads(api.get("pods", f"default/{name}")["metadata"]["annotations"][DECISION])
    return document


def test_reports_follow_changes_and_a_dead_node_counts_for_nothing(api: ApiDouble, tmp_path: Path) -> None:
    for name in NAMES:
        api.create("nodes", node_json(name))
    with (
        ControllerProcess(api, tmp_path, report_interval_s=0.5) as controller,
        SimulatedNodes(controller.address, NAMES, interval_s=0.5) as reporters,
    ):
        for held, name in enumerate(NAMES):
            reporters.set_bytes(name, "imagenet", held, total_bytes=100)
        wait_for(controller.address, {"a": 0, "b": 1, "c": 2})
        assert placed(api, "first")["node"] == "c"
        reporters.set_bytes("a", "imagenet", 50)
        wait_for(controller.address, {"a": 50, "b": 1, "c": 2})
        assert placed(api, "second")["node"] == "a"
        reporters.set_ready("a", False, "its process ended")
        reporters.stop("c")
        wait_for(controller.address, {"a": 50, "b": 1})
        decision = placed(api, "third")
        assert decision["node"] == "b"
        assert decision["refused"][0]["because"].endswith(
            "is not ready (/var/lib/fusecache/mounts/data: its process ended)"
        )


def test_nodes_come_back_to_a_controller_that_was_killed(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("controller_stream_failed")
    for name in NAMES:
        api.create("nodes", node_json(name))
    port = free_port()
    settings: dict[str, Any] = {"listen_address": f"127.0.0.1:{port}", "report_interval_s": 1, "lease_duration_s": 3}
    first = ControllerProcess(api, tmp_path / "first", **settings)
    try:
        with SimulatedNodes(first.address, NAMES, interval_s=1.0) as reporters:
            for held, name in enumerate(NAMES):
                reporters.set_bytes(name, "imagenet", held, total_bytes=100)
            wait_for(first.address, {"a": 0, "b": 1, "c": 2})
            first.process.kill()
            first.process.wait()
            with ControllerProcess(api, tmp_path / "second", **settings) as second:
                assert second.address == first.address
                wait_for(second.address, {"a": 0, "b": 1, "c": 2})
                assert placed(api, "later")["node"] == "c"
    finally:
        first.stop(signal.SIGKILL)
