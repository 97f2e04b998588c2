"""What the stories ask of a cluster with fusecache in it: is it up, who holds what, where did a pod go, what did it
print.

Waits end with what was seen last, so that a failure says what was there instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster import image
from tests.cluster.api import JSON_PATCH, MERGE_PATCH, Object, Refused, pods
from tests.cluster.installation import MOUNT, MOUNTS, NAMESPACE, TRAINING, Installation, training_pod
from tests.cluster.world import World
from tests.support.mounting import command

WAIT_S = 90.0
POLL_S = 0.05
GATE = "fusecache.io/locality"
DECISION = "fusecache.io/decision"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/fusecache-controller"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/fusecache-controller"
DATASETS = {"imagenet": (40, 100_000), **{f"set-{number}": (3, 50_000 + number) for number in range(5)}}
"""Name -> (files, size of each in bytes). A data set is the folder of its name in what is served."""

NODE_PODS = "?labelSelector=app.kubernetes.io%2Fname%3Dfusecache-node"
DAEMON_SET = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/fusecache-node"


class Stories:
    """A cluster and the fusecache in it, with the questions of the stories."""

    def __init__(self, world: World, installation: Installation) -> None:
        self.world = world
        self.installation = installation
        self.api = world.api

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        """The first true answer of `condition`. AssertionError with `what`, a pod list and last words when none
        came."""
        deadline = time.monotonic() + timeout_s
        while not (answer := condition()):
            self.world.check()
            assert time.monotonic() < deadline, f"not so after {timeout_s:g} s: {what}\n{self.picture()}"
            time.sleep(POLL_S)
        return answer

    def picture(self) -> str:
        """Pods, events and the logs of fusecache's own pods, for the message of a failure."""
        listed = self.world.kubectl("get", "pods", "-A", "-o", "wide")
        events = self.world.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")
        logs = ""
        for pod in self.api.get(pods(NAMESPACE))["items"]:
            name = pod["metadata"]["name"]
            try:
                logs += f"--- {name}\n" + self.api.text(pods(NAMESPACE, name) + "/log?tailLines=30")
            except Refused as refusal:
                logs += f"--- {name}: {refusal}\n"
        return f"{listed}\n{events[-4000:]}\n{logs[-12000:]}"

    # --- fusecache's own pods

    def wait_installed(self) -> None:
        """Until the controller leads and the node's mounts serve reads."""
        self.wait(self.controller_is_ready, "the controller is ready")
        self.wait(self.node_is_ready, "the node's pod is ready")

    def controller_is_ready(self) -> bool:
        """Whether an instance of the Deployment leads."""
        return bool(self.api.get(DEPLOYMENT)["status"].get("readyReplicas", 0) == 1)

    def node_is_ready(self) -> bool:
        """Whether the real node's mounts serve reads."""
        return bool(self.api.get(DAEMON_SET)["status"].get("numberReady", 0) == 1)

    def node_pods(self) -> list[Object]:
        """The DaemonSet's pods: one, and during a roll two."""
        found: list[Object] = self.api.get(pods(NAMESPACE) + NODE_PODS)["items"]
        return found

    def roll(self, patch: Any, kind: str = MERGE_PATCH) -> str:
        """Change the DaemonSet and wait until the new pod has replaced the old one; the new one's name."""
        (old,) = self.node_pods()
        self.api.patch(DAEMON_SET, patch, kind)

        def replaced() -> str | None:
            names = [pod["metadata"]["name"] for pod in self.node_pods()]
            return names[0] if len(names) == 1 and names != [old["metadata"]["name"]] and self.node_is_ready() else None

        name: str = self.wait(replaced, "a new pod of the node has replaced the old one")
        return name

    def node_restarts(self) -> int:
        """How often the kubelet has started the container of the node's pod again."""
        return sum(
            one["restartCount"] for pod in self.node_pods() for one in pod["status"].get("containerStatuses", [])
        )

    def scale_controller(self, replicas: int) -> None:
        """Ask for so many instances and wait until they are there, or gone."""
        self.api.patch(DEPLOYMENT, {"spec": {"replicas": replicas}})
        if replicas:
            self.wait(self.controller_is_ready, "the controller is ready")
        else:
            self.wait(lambda: not self.controller_pods(), "the controller's pods are gone")

    def controller_pods(self) -> list[Object]:
        """The Deployment's pods."""
        found: list[Object] = self.api.get(
            pods(NAMESPACE) + "?labelSelector=app.kubernetes.io%2Fname%3Dfusecache-controller"
        )["items"]
        return found

    # --- data

    def rows(self, dataset: str = "") -> list[dict[str, Any]]:
        """`fusecache locality --json`: who holds how much, as the controller counts it. Empty while nobody answers."""
        arguments = [
            "locality",
            *filter(None, [dataset]),
            "--json",
            "--controller",
            self.installation.controller_address,
        ]
        done = subprocess.run(
            [*command(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            env={key: value for key, value in os.environ.items() if not key.startswith("FUSECACHE_")},
            check=False,
        )
        if done.returncode != 0:
            return []
        found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
        return found

    def counted(self, datasets: set[str]) -> set[tuple[str, str]]:
        """(data set, node) of everything that counts now."""
        return {(row["dataset"], row["node"]) for row in self.rows() if row["counts"] and row["dataset"] in datasets}

    def held_bytes(self, dataset: str, node_name: str) -> int:
        """What counts for a node now."""
        return sum(row["bytes"] for row in self.rows(dataset) if row["node"] == node_name and row["counts"])

    def wait_held(self, dataset: str, node_name: str, size_bytes: int) -> None:
        """Until the controller counts so many bytes for the node."""
        self.wait(
            lambda: self.held_bytes(dataset, node_name) == size_bytes,
            f"{node_name} holds {size_bytes} bytes of {dataset}: {self.rows(dataset)}",
        )

    def read_on_node(self, folder: str) -> str:
        """sha256 of every file below a folder of the node's mount, read by a process of the node: makes it warm."""
        return self.world.box.run(*reads_all(f"/var/lib/fusecache/mounts/data/{folder}"), timeout_s=WAIT_S).stdout

    def make_warm(self, dataset: str, node_name: str) -> int:
        """Read a data set on the real node and wait until it counts there; its bytes."""
        folder = self.installation.served / dataset
        assert self.read_on_node(dataset) == sums_of(folder)
        size_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self.wait_held(dataset, node_name, size_bytes)
        return size_bytes

    def is_mounted(self) -> bool:
        """Whether the node has the mount, by its own list of mounts (a stat of a dead one may hang)."""
        lines = self.world.box.run("cat", "/proc/self/mountinfo").stdout.splitlines()
        return any(line.split()[4] == f"{MOUNTS}/{MOUNT}" for line in lines)

    def kill(self, part_of_command: str) -> int:
        """SIGKILL the one process of the node with that in its command line; its pid, after it was sent."""
        found = [pid for pid, line in self.world.box.processes().items() if part_of_command in line]
        assert len(found) == 1, f"{len(found)} processes with {part_of_command!r}: {self.world.box.processes()}"
        os.kill(found[0], signal.SIGKILL)
        return found[0]

    # --- training pods

    def create(self, pod: Object, namespace: str = TRAINING) -> Object:
        """Create a pod; as the API server stored it."""
        created: Object = self.api.create(pods(namespace), pod)
        return created

    def read(self, name: str, namespace: str = TRAINING) -> Object:
        """The pod now."""
        found: Object = self.api.get(pods(namespace, name))
        return found

    def wait_bound(self, name: str, namespace: str = TRAINING) -> str:
        """The node the scheduler bound the pod to."""
        bound: str = self.wait(
            lambda: self.read(name, namespace)["spec"].get("nodeName"), f"pod {name} is bound to a node"
        )
        return bound

    def wait_phase(self, name: str, phase: str, namespace: str = TRAINING) -> None:
        """Until the pod is in that phase; AssertionError at once when it ended in the other way."""

        def reached() -> bool:
            now = self.read(name, namespace)["status"]["phase"]
            assert now == phase or now not in ("Succeeded", "Failed"), f"pod {name}: {now}\n{self.log(name, namespace)}"
            return bool(now == phase)

        self.wait(reached, f"pod {name} is {phase}")

    def log(self, name: str, namespace: str = TRAINING, container: str = "train") -> str:
        """What a container printed."""
        try:
            return self.api.text(f"{pods(namespace, name)}/log?container={container}")
        except Refused as refusal:
            return str(refusal)

    def delete(self, name: str, namespace: str = TRAINING) -> None:
        """Delete the pod at once and wait until it is gone."""
        self.api.delete(pods(namespace, name), grace_period_s=0)
        self.wait(lambda: not self.api.exists(pods(namespace, name)), f"pod {name} is gone")

    def container_runs(self, name: str, container: str, namespace: str = TRAINING) -> bool:
        """Whether a container or init container of a pod runs now."""
        status = self.read(name, namespace)["status"]
        states = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        return any(one["name"] == container and "running" in one["state"] for one in states)

    def run_in(self, name: str, command_line: list[str], namespace: str = TRAINING) -> str:
        """Run a command in a running pod; what it printed."""
        return self.world.kubectl("exec", "-n", namespace, name, "-c", "train", "--", *command_line)

    def remove_gate(self, name: str, gate: str, namespace: str = TRAINING) -> None:
        """Remove a scheduling gate, as whoever put it there would."""
        index = gates(self.read(name, namespace)).index(gate)
        path = f"/spec/schedulingGates/{index}"
        operations = [{"op": "test", "path": f"{path}/name", "value": gate}, {"op": "remove", "path": path}]
        self.api.patch(pods(namespace, name), operations, JSON_PATCH)

    def gated_at_creation(self, name: str) -> Object | None:
        """Create a pod, look at it, delete it: as it was stored when it was gated, else None."""
        created = self.create(training_pod(name, "imagenet", ["true"]))
        self.delete(name)
        return created if gates(created) else None

    def written(self, pod: Object) -> dict[str, Any] | None:
        """The decision on the pod, or None when none was written yet."""
        return self.decision(pod) if DECISION in pod["metadata"]["annotations"] else None

    def decision(self, pod: Object) -> dict[str, Any]:
        """The annotation the controller wrote."""
        found: dict[str, Any] = json.loads(pod["metadata"]["annotations"][DECISION])
        return found

    def lease(self) -> Object:
        """The spec of the controller's Lease; empty when there is none."""
        if not self.api.exists(LEASE):
            return {}
        found: Object = self.api.get(LEASE)["spec"]
        return found

    def lease_is_fresh(self) -> bool:
        """Whether somebody holds the Lease and has renewed it in time."""
        lease = self.lease()
        if not lease.get("holderIdentity"):
            return False
        age_s = (datetime.now(UTC) - _time(lease["renewTime"])).total_seconds()
        return bool(age_s <= lease["leaseDurationSeconds"])


def install(world: World) -> Stories:
    """Make the data, load the image of this checkout, apply the manifests; returns when reads and placing work."""
    assert world.node is not None, "fusecache needs the real node"
    world.node.load_image(image.build(world.folder / "fusecache.tar"))
    installation = Installation(world, {name: name for name in DATASETS})
    for name, (files, size_bytes) in DATASETS.items():
        folder = installation.served / name
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number:03d}.bin").write_bytes(os.urandom(size_bytes))
    installation.start()
    installed = Stories(world, installation)
    installed.wait_installed()
    return installed


def gates(pod: Object) -> list[str]:
    """Names of a pod's scheduling gates."""
    return [gate["name"] for gate in pod["spec"].get("schedulingGates", [])]


def reads_all(path: str) -> list[str]:
    """A command that prints the sha256 of every file below `path`, in byte order of names."""
    return ["sh", "-c", f"cd {path} && find . -type f | LC_ALL=C sort | xargs sha256sum"]


def sums_of(folder: Path) -> str:
    """What `reads_all` prints for a folder of this machine."""
    return subprocess.run(reads_all(str(folder)), check=True, capture_output=True, text=True).stdout


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
