"""fusecache in a cluster of tests: the manifests of deploy/ as they are, with this run's addresses and data on top.

The data is a folder of this machine, served to the node by `fusecache embedded` in the node's box (the protocol of an
Alluxio cluster, without its Java). `Installation.start` applies, and waits for nothing; tests wait for what they are
about.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import yaml

from tests.cluster import simulated_nodes
from tests.cluster.api import Object
from tests.cluster.box import Program
from tests.cluster.world import World
from tests.support.mounting import command

NAMESPACE = "fusecache"
TRAINING = "training"
"""The namespace that opts in."""

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTROLLER_PORT = 19465
MASTER_PORT = 19998
MOUNT = "data"
"""The one mount of the node, of everything that is served."""

MOUNTS = "/var/lib/fusecache/mounts"
RUN_AS_USER = 64464
"""Of workers and agents on the node, as deploy/base has it."""
REPORT_INTERVAL_S = 1
START_S = 30.0
POLL_S = 0.1


class Installation:
    """The embedded server, and what `kubectl apply` made."""

    def __init__(self, world: World, datasets: dict[str, str]) -> None:
        """`datasets`: name -> folder below `served`."""
        self.world = world
        self.folder = world.folder / "installation"
        self.served = world.folder / "served"
        self.tiers: list[str] = []
        self._embedded: Program | None = None
        self._datasets = datasets

    @property
    def controller_address(self) -> str:
        """host:port of the controller's Service, which this machine reaches too."""
        return f"{self._service_address}:{CONTROLLER_PORT}"

    @property
    def _service_address(self) -> str:
        return self.world.box.service_network.replace(".0/24", ".50")

    def start(self) -> None:
        """Serve the data, apply the manifests, opt the namespace of training in."""
        self.folder.mkdir()
        self._serve()
        # The cluster has no DNS. Pods on the node's own network see the node's hosts file.
        names = f"{NAMESPACE}-controller.{NAMESPACE}.svc"
        (self.world.folder / "host" / "hosts").write_text(f"127.0.0.1 localhost\n{self._service_address} {names}\n")
        self._write_overlay()
        self.world.kubectl("apply", "-k", self.folder / "overlay")
        self.world.kubectl("apply", "-k", self.folder / "training")

    def _serve(self) -> None:
        self.served.mkdir(exist_ok=True)
        program = self.world.box.start(
            "embedded",
            [*command(), "embedded", str(self.served), f"--port={MASTER_PORT}", "--json"],
            {"FUSECACHE_STATE_DIR": str(self.world.folder / "embedded"), "PYTHONPATH": str(DEPLOY.parent)},
        )
        deadline = time.monotonic() + START_S
        while not (ready := [line for line in program.tail().splitlines() if line.startswith("{")]):
            program.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the embedded server is not ready:\n{program.tail()}")
            time.sleep(POLL_S)
        self.tiers = json.loads(ready[0])["tier_folders"]
        self._embedded = program

    def node_configuration(self) -> dict[str, object]:
        """What the DaemonSet's ConfigMap holds."""
        return {
            "metrics_address": "0.0.0.0:9464",
            "log_format": "json",
            "state_dir": "/var/lib/fusecache/state",
            "runtime_dir": "/run/fusecache",
            "run_as_user": RUN_AS_USER,
            "refresh_s": "2s",
            "controller": {
                "address": f"{NAMESPACE}-controller.{NAMESPACE}.svc:{CONTROLLER_PORT}",
                "report_interval_s": REPORT_INTERVAL_S,
            },
            "clusters": [
                {"name": "train", "masters": [f"127.0.0.1:{MASTER_PORT}"], "user": "root", "tier_folders": self.tiers}
            ],
            "mounts": [{"source": "train:/", "mountpoint": f"{MOUNTS}/{MOUNT}"}],
            "datasets": [{"name": name, "path": f"train:/{path}"} for name, path in self._datasets.items()],
        }

    def controller_configuration(self) -> dict[str, object]:
        """What the Deployment's ConfigMap holds: the one of deploy/ with faster reports."""
        document = yaml.safe_load((DEPLOY / "base" / "config" / "controller.yaml").read_text())
        assert isinstance(document, dict)
        document["placement"]["report_interval_s"] = REPORT_INTERVAL_S
        return document

    def _write_overlay(self) -> None:
        overlay = self.folder / "overlay"
        overlay.mkdir()
        (overlay / "node.yaml").write_text(yaml.safe_dump(self.node_configuration()))
        (overlay / "controller.yaml").write_text(yaml.safe_dump(self.controller_configuration()))
        not_simulated = {"key": simulated_nodes.SIMULATED_LABEL, "operator": "DoesNotExist"}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [not_simulated]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        tier = {"name": "tier", "hostPath": {"path": self.tiers[0], "type": "Directory"}}
        seen = {"name": "tier", "mountPath": self.tiers[0], "readOnly": True, "mountPropagation": "HostToContainer"}
        container = {"name": "node", "volumeMounts": [seen]}
        on_nodes = {"affinity": affinity, "volumes": [tier], "containers": [container]}
        patches = [
            _patch("apps/v1", "DaemonSet", f"{NAMESPACE}-node", {"template": {"spec": on_nodes}}),
            _patch("apps/v1", "Deployment", f"{NAMESPACE}-controller", {"template": {"spec": {"affinity": affinity}}}),
            _patch("v1", "Service", f"{NAMESPACE}-controller", {"clusterIP": self._service_address}),
        ]
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(DEPLOY / "overlays" / "test", overlay.resolve())],
            "configMapGenerator": [
                {"name": name, "namespace": NAMESPACE, "behavior": "replace", "files": [file]}
                for name, file in (("fusecache-node", "node.yaml"), ("fusecache-controller-config", "controller.yaml"))
            ],
            "patches": patches,
        }
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        self._write_training()

    def _write_training(self) -> None:
        training = self.folder / "training"
        training.mkdir()
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TRAINING}}
        (training / "namespace.yaml").write_text(yaml.safe_dump(namespace))
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": TRAINING,
            "resources": ["namespace.yaml"],
            "components": [os.path.relpath(DEPLOY / "components" / "opt-in", training.resolve())],
        }
        (training / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))


def _patch(api_version: str, kind: str, name: str, spec: dict[str, object]) -> dict[str, object]:
    metadata = {"name": name, "namespace": NAMESPACE}
    document = {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
    return {"target": {"kind": kind, "name": name}, "patch": yaml.safe_dump(document)}


def training_pod(name: str, dataset: str, command_line: list[str]) -> Object:
    """A pod as deploy/examples/training makes it: waits for its data set, then runs `command_line`."""
    mount = {
        "name": "fusecache",
        "mountPath": "/mnt/fusecache",
        "mountPropagation": "HostToContainer",
        "readOnly": True,
    }
    waiting = {
        "name": "wait-for-data",
        "image": "localhost/fusecache:test",
        "imagePullPolicy": "Never",
        "args": ["wait", f"/mnt/fusecache/{MOUNT}", "--timeout-s", "120"],
        "volumeMounts": [mount],
    }
    training = {
        "name": "train",
        "image": "localhost/fusecache:test",
        "imagePullPolicy": "Never",
        "command": command_line,
        "volumeMounts": [mount],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"fusecache.io/co-schedule": "true"},
            "annotations": {"fusecache.io/datasets": dataset},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "initContainers": [waiting],
            "containers": [training],
            "volumes": [{"name": "fusecache", "hostPath": {"path": MOUNTS, "type": "Directory"}}],
        },
    }
