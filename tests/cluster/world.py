"""A whole Kubernetes cluster on this machine: control plane, simulated nodes, and one real node if asked for.

with World(folder) as world:
    world.api.get("/api/v1/nodes") ...; world.kubectl("apply", "-k", ...)
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from kubernetes import client, config

from tests.cluster import binaries, node, simulated_nodes
from tests.cluster.api import NODES, Api
from tests.cluster.box import Box
from tests.cluster.control_plane import ControlPlane
from tests.cluster.node import Node

READY_S = 120.0
POLL_S = 0.2


class World:
    """The cluster; the attributes below are valid inside the `with` block."""

    box: Box
    control_plane: ControlPlane
    node: Node | None
    api: Api
    """As administrator; plain JSON."""
    core: client.CoreV1Api
    """As administrator; the client library that the controller uses."""
    kubeconfig: Path
    """Of an administrator."""

    def __init__(self, folder: Path, *, real_node: bool = True, simulated: int = 0) -> None:
        self.folder = folder
        self._real_node = real_node
        self._simulated = simulated
        self._stack = ExitStack()
        self._programs = Path()

    def __enter__(self) -> World:
        self._programs = binaries.folder()
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.box = self._stack.enter_context(Box(self.folder))
        self.control_plane = ControlPlane(self.box, self._programs)
        self.control_plane.start()
        self.kubeconfig = self.control_plane.admin
        self.api = self.control_plane.api()
        self.core = client.CoreV1Api(config.new_client_from_config(str(self.kubeconfig)))
        self._stack.callback(self.core.api_client.close)
        self.node = None
        if self._real_node:
            self.node = Node(self.box, self._programs, self.control_plane)
            self.node.start()
        simulated_nodes.create(self.api, self._simulated)
        # Without it the API server refuses pods.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.wait_until(lambda: self.api.exists(account), "there is no default service account")
        if self._real_node:
            self.wait_until(self._node_is_ready, "the node is not Ready", READY_S)
            # By word only: no program here uses one.
            gpus = {"nvidia.com/gpu": str(simulated_nodes.GPUS)}
            self.api.patch(f"{NODES}/{node.NAME}/status", {"status": {"capacity": gpus, "allocatable": gpus}})

    def _node_is_ready(self) -> bool:
        if not self.api.exists(f"{NODES}/{node.NAME}"):
            return False
        found = self.api.get(f"{NODES}/{node.NAME}")
        conditions = {condition["type"]: condition["status"] for condition in found["status"].get("conditions", [])}
        return conditions.get("Ready") == "True" and not found["spec"].get("taints")

    def check(self) -> None:
        """RuntimeError when a program of the cluster has ended."""
        self.control_plane.check()
        if self.node is not None:
            self.node.check()

    def wait_until(self, condition: Callable[[], bool], else_: str, timeout_s: float = 60.0) -> None:
        """RuntimeError with `else_` when `condition` does not hold in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{else_} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def kubectl(self, *arguments: str | Path, given: str | None = None, timeout_s: float = 60.0) -> str:
        """kubectl as administrator; what it printed. RuntimeError with what it said when it fails."""
        # A cache that outlives the cluster would tell of another one with the same address.
        ours = (f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder / 'kubectl'}")
        command = [self._programs / "kubectl", *ours, *arguments]
        done = subprocess.run(
            list(map(str, command)), input=given or "", capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr}")
        return done.stdout
