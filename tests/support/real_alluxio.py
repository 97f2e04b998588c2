"""A real Alluxio cluster on this machine: one master, one or more block workers, a local folder as UFS.

`RealAlluxio` is a context manager: it formats, starts, waits until every block worker is registered, and stops
by pid. It can start alluxio-fuse on the same servers. Everything it writes lies below the folder it was given.

Block worker n listens on 127.0.0.n with tier folder n, so that one machine has several "hosts"; the first is
the one that counts as this node's (`local_host`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.support import alluxio_jars

START_S = 90.0
STOP_S = 15.0
POLL_S = 0.2
MEBIBYTE = 1 << 20

ADD_OPENS = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in (
        "jdk.internal.loader",
        "java.lang",
        "java.lang.reflect",
        "java.net",
        "java.nio",
        "java.util",
        "sun.nio.ch",
    )
]
"""Alluxio 2.9 supports Java 8 and 11; on 17 it runs with these packages opened."""

FUSE_KERNEL_OPTIONS = "attr_timeout=7200,entry_timeout=7200,kernel_cache,allow_other,max_idle_threads=64"
"""What Alluxio documents for read-only training data."""

FUSE_PROPERTIES = {
    "alluxio.fuse.jnifuse.libfuse.version": "3",
    "alluxio.user.metadata.cache.enabled": "true",
    "alluxio.user.metadata.cache.max.size": "1000000",
    "alluxio.user.metadata.cache.expiration.time": "2h",
    "alluxio.user.update.file.accesstime.disabled": "true",
    "alluxio.user.file.passive.cache.enabled": "false",
    "alluxio.user.short.circuit.enabled": "true",
}
"""The documented tuning of alluxio-fuse for training jobs."""


def free_port(host: str) -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One JVM: its process and its log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def check(self) -> None:
        """Raise with the end of the log when the JVM is gone."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def tail(self, size_bytes: int = 4000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size_bytes:]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; always waits."""
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RealAlluxio:
    """Master and block workers; the attributes below are valid inside the `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        block_workers: int = 2,
        block_size_bytes: int = 64 * MEBIBYTE,
        tier_quota_bytes: int = 4096 * MEBIBYTE,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.ufs = folder / "ufs"
        """The UFS: what lies here is the cluster's root folder."""
        self.hosts = tuple(f"127.0.0.{number}" for number in range(1, block_workers + 1))
        self.local_host = self.hosts[0]
        self.tier_folders = tuple(folder / f"tier-{host}" for host in self.hosts)
        """One per block worker; block files are `<tier folder>/alluxioworker/<block id>`."""
        self._block_size_bytes = block_size_bytes
        self._tier_quota_bytes = tier_quota_bytes
        self._extra = dict(properties or {})
        self._rpc_port = free_port("127.0.0.1")
        self._web_port = free_port("127.0.0.1")
        self._stack = ExitStack()
        self._servers: list[Server] = []
        self._fuse_web_ports: dict[Path, int] = {}
        self._worker_web_ports: dict[str, int] = {}
        self._class_path = ""

    @property
    def master(self) -> str:
        """The master's "host:port"."""
        return f"127.0.0.1:{self._rpc_port}"

    def __enter__(self) -> RealAlluxio:
        self._class_path = alluxio_jars.class_path()
        for folder in (self.ufs, self.folder / "journal", self.folder / "logs", *self.tier_folders):
            folder.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.run("alluxio.cli.Format", "MASTER")
        self._serve("master", "alluxio.master.AlluxioMaster", self.properties(), heap="512m")
        for host, tier in zip(self.hosts, self.tier_folders, strict=True):
            properties = self.properties() | self._worker_properties(host, tier)
            self.run("alluxio.cli.Format", "WORKER", properties=properties)
            self._serve(f"block-worker-{host}", "alluxio.worker.AlluxioWorker", properties, heap="512m")
        self._wait_until_registered()

    def properties(self) -> dict[str, str]:
        """What every process of the cluster is told."""
        return {
            "alluxio.home": str(self.folder),
            "alluxio.conf.dir": str(self.folder / "conf"),
            "alluxio.logs.dir": str(self.folder / "logs"),
            "alluxio.master.hostname": "127.0.0.1",
            "alluxio.master.rpc.port": str(self._rpc_port),
            "alluxio.master.web.port": str(self._web_port),
            "alluxio.master.mount.table.root.ufs": str(self.ufs),
            "alluxio.master.journal.type": "UFS",
            "alluxio.master.journal.folder": str(self.folder / "journal"),
            "alluxio.master.metastore": "HEAP",
            # The server would ask a host on the Internet for news of itself.
            "alluxio.master.update.check.enabled": "false",
            # Leave safe mode as soon as the first block worker has registered.
            "alluxio.master.worker.connect.wait.time": "3s",
            "alluxio.user.hostname": self.local_host,
            "alluxio.user.block.size.bytes.default": str(self._block_size_bytes),
            "alluxio.security.authorization.permission.enabled": "true",
            **self._extra,
        }

    def _worker_properties(self, host: str, tier: Path) -> dict[str, str]:
        self._worker_web_ports[host] = free_port(host)
        return {
            "alluxio.worker.hostname": host,
            "alluxio.worker.bind.host": host,
            "alluxio.worker.rpc.port": str(free_port(host)),
            "alluxio.worker.web.port": str(self._worker_web_ports[host]),
            "alluxio.worker.web.bind.host": host,
            "alluxio.worker.tieredstore.levels": "1",
            "alluxio.worker.tieredstore.level0.alias": "SSD",
            "alluxio.worker.tieredstore.level0.dirs.path": str(tier),
            "alluxio.worker.tieredstore.level0.dirs.mediumtype": "SSD",
            "alluxio.worker.tieredstore.level0.dirs.quota": str(self._tier_quota_bytes),
        }

    def java(self, main: str, *arguments: str, properties: Mapping[str, str], heap: str) -> list[str]:
        """The command line of one JVM."""
        settings = [f"-D{key}={value}" for key, value in properties.items()]
        # Warnings and errors to standard output; without it log4j says nothing at all.
        options = [f"-Xmx{heap}", "-XX:MaxDirectMemorySize=1g", "-Dorg.apache.logging.log4j.level=WARN"]
        return ["java", *options, *ADD_OPENS, *settings, "-cp", self._class_path, main, *arguments]

    def run(
        self, main: str, *arguments: str, properties: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> str:
        """Run one of Alluxio's own commands to its end and return what it printed."""
        command = self.java(main, *arguments, properties=properties or self.properties(), heap="256m")
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{main} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def shell(self, *arguments: str) -> str:
        """`alluxio fs ...` (free, load, stat, setTtl ...)."""
        return self.run("alluxio.cli.fs.FileSystemShell", *arguments)

    def _serve(self, name: str, main: str, properties: Mapping[str, str], *arguments: str, heap: str) -> Server:
        log = self.folder / "logs" / f"{name}.out"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.java(main, *arguments, properties=properties, heap=heap),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        server = Server(name, process, log)
        self._servers.append(server)
        self._stack.callback(server.stop)
        return server

    def server_pids(self) -> list[int]:
        """The master and the block workers, without what mounts."""
        return [server.process.pid for server in self._servers if not server.name.startswith("alluxio-fuse")]

    def start_fuse(
        self,
        mountpoint: Path,
        path: str = "/",
        *,
        properties: Mapping[str, str] | None = None,
        kernel_options: str = FUSE_KERNEL_OPTIONS,
    ) -> Server:
        """alluxio-fuse over `path` with its documented tuning; returns when it is mounted."""
        mountpoint.mkdir(parents=True, exist_ok=True)
        web = {"alluxio.fuse.web.enabled": "true", "alluxio.fuse.web.port": str(free_port("127.0.0.1"))}
        self._fuse_web_ports[mountpoint] = int(web["alluxio.fuse.web.port"])
        server = self._serve(
            f"alluxio-fuse-{mountpoint.name}",
            "alluxio.fuse.AlluxioFuse",
            self.properties() | FUSE_PROPERTIES | web | dict(properties or {}),
            *("-m", str(mountpoint), "-a", path, "-o", kernel_options),
            heap="1g",
        )
        self._stack.callback(_detach, mountpoint)
        _wait(lambda: _mounted(mountpoint), f"{mountpoint} is not mounted", [server])
        return server

    def fuse_metrics(self, mountpoint: Path) -> dict[str, float]:
        """The counters and meters that an alluxio-fuse keeps of itself, e.g. Client.BytesReadLocal."""
        return _metrics("127.0.0.1", self._fuse_web_ports[mountpoint])

    def bytes_read_remotely(self) -> float:
        """Bytes that the block workers have sent over the network (no short circuit), all clients together."""
        found = [_metrics(host, port) for host, port in self._worker_web_ports.items()]
        return sum(
            value for cells in found for name, value in cells.items() if name.startswith("Worker.BytesReadRemote.")
        )

    def stop_fuse(self, server: Server, mountpoint: Path) -> None:
        """Unmount and end an alluxio-fuse before the cluster ends."""
        server.stop()
        _detach(mountpoint)
        self._servers.remove(server)

    def _wait_until_registered(self) -> None:
        url = f"http://127.0.0.1:{self._web_port}/api/v1/master/webui_workers"

        def registered() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    nodes = json.load(answer)["normalNodeInfos"]
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                return False
            return len(nodes) == len(self.hosts)

        _wait(registered, "not all block workers are registered", self._servers)


def _metrics(host: str, port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics/json/", timeout=10) as answer:
        found = json.load(answer)
    return {name: cell["count"] for kind in ("counters", "meters") for name, cell in found[kind].items()}


def _mounted(mountpoint: Path) -> bool:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(mountpoint) for line in lines)


def _detach(mountpoint: Path) -> None:
    while _mounted(mountpoint):
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)


def _wait(condition: Callable[[], bool], complaint: str, servers: list[Server]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        for server in servers:
            server.check()
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {server.name}\n{server.tail()}" for server in servers)
            raise TimeoutError(f"{complaint} after {START_S} s\n{logs}")
        time.sleep(POLL_S)
