"""Kubernetes without a node: etcd, API server (RBAC, service accounts, TLS), controller-manager, scheduler.

Everybody shows a client certificate of the cluster's own authority; pods get tokens from the controller-manager's and
the API server's service accounts. Ports are the usual ones, in the box.
"""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from tests.cluster.api import Api, Refused
from tests.cluster.box import Box, Program
from tests.cluster.certificates import Authority

API_PORT = 6443
START_S = 90.0
POLL_S = 0.2

NODE_GRACE_S = 86400
"""A node that nobody renews stays Ready: simulated nodes have no kubelet, and tests must not wait for heartbeats."""


class ControlPlane:
    """The four programs, and kubeconfig files for whoever talks to them."""

    def __init__(self, box: Box, programs: Path) -> None:
        self._box = box
        self._programs = programs
        self.folder = box.folder / "control-plane"
        self.authority = Authority(self.folder / "certificates")
        self.server = f"https://{box.address}:{API_PORT}"
        """The API server's address, from this machine and from the box."""
        self.service_address = box.service_network.replace(".0/24", ".1")
        """The address of the Service `kubernetes`, which pods use."""
        self.admin = self.kubeconfig("admin", "/O=system:masters/CN=admin")
        self._running: list[Program] = []

    def kubeconfig(self, name: str, subject: str) -> Path:
        """A kubeconfig file for the user of a new certificate."""
        certificate, key = self.authority.issue(name, subject)
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.server, "certificate-authority": str(self.authority.certificate)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": {"client-certificate": str(certificate), "client-key": str(key)}}],
            "contexts": [{"name": name, "context": {"cluster": "test", "user": name}}],
            "current-context": name,
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def start(self) -> None:
        """Start all four and wait until the API server is ready."""
        self._start_etcd()
        self._start_api_server()
        self.wait_ready()
        self._start_controller_manager()
        self._start_scheduler()

    def _start_etcd(self) -> None:
        self._running.append(
            self._box.start(
                "etcd",
                [
                    "etcd",
                    f"--data-dir={self.folder / 'etcd'}",
                    "--listen-client-urls=http://127.0.0.1:2379",
                    "--advertise-client-urls=http://127.0.0.1:2379",
                    "--listen-peer-urls=http://127.0.0.1:2380",
                    # Nobody needs this database after a power cut.
                    "--unsafe-no-fsync",
                ],
            )
        )

    def _start_api_server(self) -> None:
        names = f"IP:{self._box.address},IP:127.0.0.1,IP:{self.service_address},DNS:localhost"
        names += (
            ",DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
        )
        certificate, key = self.authority.issue("api-server", "/CN=kube-apiserver", names)
        client_certificate, client_key = self.authority.issue(
            "api-client", "/O=system:masters/CN=kube-apiserver-client"
        )
        private, public = self.authority.key_pair("service-accounts")
        self._running.append(
            self._box.start(
                "kube-apiserver",
                [
                    self._programs / "kube-apiserver",
                    "--etcd-servers=http://127.0.0.1:2379",
                    f"--secure-port={API_PORT}",
                    "--bind-address=0.0.0.0",
                    f"--advertise-address={self._box.address}",
                    f"--tls-cert-file={certificate}",
                    f"--tls-private-key-file={key}",
                    f"--client-ca-file={self.authority.certificate}",
                    f"--kubelet-client-certificate={client_certificate}",
                    f"--kubelet-client-key={client_key}",
                    # The node's name resolves nowhere.
                    "--kubelet-preferred-address-types=InternalIP",
                    f"--service-account-key-file={public}",
                    f"--service-account-signing-key-file={private}",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    "--authorization-mode=Node,RBAC",
                    "--enable-admission-plugins=NodeRestriction",
                    f"--service-cluster-ip-range={self._box.service_network}",
                    # The DaemonSet mounts.
                    "--allow-privileged=true",
                ],
            )
        )

    def _start_controller_manager(self) -> None:
        kubeconfig = self.kubeconfig("controller-manager", "/CN=system:kube-controller-manager")
        private = self.authority.folder / "service-accounts.key"
        self._running.append(
            self._box.start(
                "kube-controller-manager",
                [
                    self._programs / "kube-controller-manager",
                    f"--kubeconfig={kubeconfig}",
                    f"--authentication-kubeconfig={kubeconfig}",
                    f"--authorization-kubeconfig={kubeconfig}",
                    f"--service-account-private-key-file={private}",
                    f"--root-ca-file={self.authority.certificate}",
                    "--use-service-account-credentials=true",
                    "--leader-elect=false",
                    f"--flex-volume-plugin-dir={self.folder / 'volume-plugins'}",
                    f"--node-monitor-grace-period={NODE_GRACE_S}s",
                    f"--node-startup-grace-period={NODE_GRACE_S}s",
                ],
            )
        )

    def _start_scheduler(self) -> None:
        kubeconfig = self.kubeconfig("scheduler", "/CN=system:kube-scheduler")
        self._running.append(
            self._box.start(
                "kube-scheduler",
                [
                    self._programs / "kube-scheduler",
                    f"--kubeconfig={kubeconfig}",
                    f"--authentication-kubeconfig={kubeconfig}",
                    f"--authorization-kubeconfig={kubeconfig}",
                    "--leader-elect=false",
                ],
            )
        )

    def wait_ready(self) -> None:
        """Until the API server says so. RuntimeError when a program ended or time is over."""
        deadline = time.monotonic() + START_S
        while (why_not := self._why_not_ready()) is not None:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the API server is not ready: {why_not}\n{self._running[-1].tail()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """RuntimeError when one of the programs has ended."""
        for program in self._running:
            program.check()

    def api(self) -> Api:
        """The API as administrator."""
        folder = self.authority.folder
        return Api(self.server, self.authority.certificate, (folder / "admin.crt", folder / "admin.key"))

    def _why_not_ready(self) -> str | None:
        try:
            self.api().text("/readyz")
            self.api().get("/api/v1/namespaces/default")
        except (OSError, Refused) as failure:
            return str(failure)
        return None
