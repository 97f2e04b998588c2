"""A real node: containerd, kubelet and kube-proxy in a box, joined to the cluster as any node would be.

Containers come from images that are loaded here (`load_image`); nothing is ever pulled. The node has 8 GPUs by word
only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import yaml

from tests.cluster.box import Box, Program
from tests.cluster.control_plane import ControlPlane

NAME = "real"
"""The node's name in the cluster."""

PAUSE_IMAGE = "localhost/pause:test"
PAUSE_SOURCE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
CNI_PROGRAMS = Path("/usr/lib/cni")
START_S = 90.0
POLL_S = 0.2


class Node:
    """containerd, kubelet and kube-proxy of one node."""

    def __init__(self, box: Box, programs: Path, control_plane: ControlPlane) -> None:
        self._box = box
        self._programs = programs
        self._control_plane = control_plane
        self.folder = box.folder / "node"
        self.socket = self.folder / "containerd.sock"
        self._running: list[Program] = []

    def start(self) -> None:
        """Start everything; the node joins a moment later."""
        self.folder.mkdir()
        self._start_containerd()
        self._load_pause_image()
        self._start_kubelet()
        self._start_proxy()

    def check(self) -> None:
        """RuntimeError when a program of the node has ended."""
        for program in self._running:
            program.check()

    def ctr(self, *arguments: str | Path, timeout_s: float = 60.0) -> str:
        """containerd's own client, in the namespace of Kubernetes; what it printed."""
        command = ("ctr", f"--address={self.socket}", "--namespace=k8s.io", *arguments)
        return self._box.run(*command, timeout_s=timeout_s).stdout

    def load_image(self, archive: Path) -> None:
        """Make an OCI archive's image known under the name it carries."""
        self.ctr("images", "import", archive, timeout_s=300.0)

    def _start_containerd(self) -> None:
        network = self.folder / "cni"
        network.mkdir()
        routes = [{"dst": "0.0.0.0/0"}]
        pods = {"type": "host-local", "subnet": self._box.pod_network, "routes": routes}
        pods["dataDir"] = str(self.folder / "pod-addresses")
        plugins = [{"type": "ptp", "ipMasq": False, "ipam": pods}]
        (network / "10-pods.conflist").write_text(
            json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": plugins})
        )
        configuration = self.folder / "containerd.toml"
        configuration.write_text(
            f'''version = 2
root = "{self.folder / "containerd"}"
state = "/run/containerd"
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # A container of this machine may not lower anybody's score.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{self._snapshotter()}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{network}"
'''
        )
        program = self._box.start("containerd", ["containerd", f"--config={configuration}"])
        self._running.append(program)
        deadline = time.monotonic() + START_S
        while self._box.run("ctr", f"--address={self.socket}", "version", check=False).returncode != 0:
            program.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"containerd does not answer:\n{program.tail()}")
            time.sleep(POLL_S)

    def _snapshotter(self) -> str:
        """`overlayfs` where the folder can carry it; `native` copies every file for each container."""
        folders = [self.folder / "overlay-try" / name for name in ("lower", "upper", "work", "merged")]
        for folder in folders:
            folder.mkdir(parents=True)
        lower, upper, work, merged = folders
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        if self._box.run("mount", "-t", "overlay", "overlay", "-o", options, merged, check=False).returncode != 0:
            return "native"
        self._box.run("umount", merged)
        return "overlayfs"

    def _load_pause_image(self) -> None:
        """The image of the container that holds a pod's namespaces: one static program."""
        folder = self.folder / "pause"
        folder.mkdir()
        (folder / "pause.c").write_text(PAUSE_SOURCE)
        command = ["gcc", "-static", "-Os", "-s", "-o", str(folder / "pause"), str(folder / "pause.c")]
        subprocess.run(command, check=True, capture_output=True)
        archive = self.folder / "pause.tar"
        oci_archive(archive, PAUSE_IMAGE, folder / "pause")
        self.load_image(archive)

    def _start_kubelet(self) -> None:
        kubeconfig = self._control_plane.kubeconfig("kubelet", f"/O=system:nodes/CN=system:node:{NAME}")
        configuration = self.folder / "kubelet.yaml"
        document = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": str(self._control_plane.authority.certificate)},
            },
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._box.cgroup,
            # The machine's own control groups are left alone, and either version of them will do.
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            # Whoever runs tests may have a full disk; the node is not to throw pods out for it.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": "/var/log/pods",
            "volumePluginDir": str(self.folder / "volume-plugins"),
            "resolvConf": "",
            "clusterDomain": "cluster.local",
            # Tests wait for what it does.
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "5s",
        }
        configuration.write_text(yaml.safe_dump(document))
        self._running.append(
            self._box.start(
                "kubelet",
                [
                    self._programs / "kubelet",
                    f"--config={configuration}",
                    f"--kubeconfig={kubeconfig}",
                    f"--hostname-override={NAME}",
                    f"--node-ip={self._box.address}",
                    f"--root-dir={self.folder / 'kubelet'}",
                    f"--cert-dir={self.folder / 'kubelet-certificates'}",
                ],
            )
        )

    def _start_proxy(self) -> None:
        kubeconfig = self._control_plane.kubeconfig("proxy", "/CN=system:kube-proxy")
        self._running.append(
            self._box.start(
                "kube-proxy",
                [
                    self._programs / "kube-proxy",
                    f"--kubeconfig={kubeconfig}",
                    f"--hostname-override={NAME}",
                    "--proxy-mode=nftables",
                    f"--cluster-cidr={self._box.pod_network}",
                    # Limits of the whole machine, which are not the node's to change.
                    "--conntrack-max-per-core=0",
                    "--conntrack-tcp-timeout-established=0s",
                    "--conntrack-tcp-timeout-close-wait=0s",
                ],
            )
        )


def oci_archive(archive: Path, name: str, program: Path) -> None:
    """An image of one program and nothing else."""
    with_root = ("--root", archive.parent / "buildah", "--runroot", archive.parent / "buildah-run")
    storage = ("--storage-driver", "vfs")

    def buildah(*arguments: str | Path) -> str:
        command = ["buildah", *map(str, (*with_root, *storage, *arguments))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"buildah {arguments[0]}: {done.stderr}")
        return done.stdout.strip()

    container = buildah("from", "scratch")
    buildah("copy", container, program, f"/{program.name}")
    buildah("config", "--entrypoint", f'["/{program.name}"]', container)
    buildah("commit", "--quiet", container, f"oci-archive:{archive}:{name}")
    buildah("rm", container)
    for folder in with_root[1::2]:
        shutil.rmtree(folder)
