"""The systems under test: how each is started over the same data, and how it proves where its bytes came from.

All of them stay mounted for the whole run; one at a time is measured. What the rows do is in workloads.py.
"""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.support.mounting import Mount, is_mounted
from tests.support.real_alluxio import FUSE_KERNEL_OPTIONS, FUSE_PROPERTIES, RealAlluxio, Server, free_port

MOUNT_S = 30.0
POLL_S = 0.05


class Bytes(NamedTuple):
    """Bytes a system has served to the kernel since it started, by where it got them."""

    local_block: float
    elsewhere: float


class System(Protocol):
    """One column of the table."""

    name: str
    setup: str
    """Versions and options, for the report."""
    root: Path
    """Where it shows train/."""
    large: list[Path]
    reads_ufs: bool
    """Whether it can fetch what no block worker holds."""
    warm_up_runs: int
    """At most so many before a row is measured; fewer when two agree within 10 %."""

    def start(self, stack: ExitStack) -> None:
        """Mount; what must be undone goes on the stack."""

    def served(self) -> Bytes | None:
        """Its own counters; None when it has none."""


class Native:
    """The block files themselves, under the names of the data set."""

    name = "native"
    setup = "the block worker's block files on the local file system, no FUSE"
    reads_ufs = False
    warm_up_runs = 2

    def __init__(self, links: Path, large: list[Path]) -> None:
        self.root = links
        self.large = large

    def start(self, stack: ExitStack) -> None:
        """Nothing to start."""

    def served(self) -> Bytes | None:
        """Nothing counts."""
        return None


class Bindfs:
    """bindfs over the block files: what FUSE alone costs, in C."""

    name = "bindfs"
    reads_ufs = False
    warm_up_runs = 2
    options = ("-r", "--multithreaded", "-o", "kernel_cache,attr_timeout=7200,entry_timeout=7200")

    def __init__(self, links: Path, large: list[Path], mountpoint: Path) -> None:
        self.root = mountpoint
        self.large = [mountpoint / path.relative_to(links) for path in large]
        version = subprocess.run(["bindfs", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        self.setup = f"{version} {' '.join(self.options)} over the block files"
        self._links = links

    def start(self, stack: ExitStack) -> None:
        """Mount in the foreground."""
        self.root.mkdir()
        process = subprocess.Popen(["bindfs", "-f", *self.options, str(self._links), str(self.root)])
        stack.callback(process.wait)
        stack.callback(subprocess.run, ["umount", str(self.root)], check=True)
        deadline = time.monotonic() + MOUNT_S
        while not is_mounted(self.root):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"bindfs is not mounted, exit code {process.returncode}")
            time.sleep(POLL_S)

    def served(self) -> Bytes | None:
        """bindfs counts nothing."""
        return None


class AlluxioFuse:
    """alluxio-fuse 2.9.3 with its documented tuning for training."""

    name = "alluxio-fuse"
    reads_ufs = True
    warm_up_runs = 8

    def __init__(self, cluster: RealAlluxio, mountpoint: Path) -> None:
        self.root = mountpoint
        self.large = [mountpoint / "large" / "large.bin"]
        properties = " ".join(f"{key}={value}" for key, value in FUSE_PROPERTIES.items())
        self.setup = f"2.9.3, -Xmx1g, -o {FUSE_KERNEL_OPTIONS}, {properties}"
        self._cluster = cluster
        self.server: Server | None = None

    def start(self, stack: ExitStack) -> None:
        """Mounted after the data was loaded: statuses it cached before would hide the block locations, and with
        them its short circuit, for as long as its metadata cache lives."""
        self.server = self._cluster.start_fuse(self.root)
        stack.callback(self.stop)

    def stop(self) -> None:
        """End the JVM."""
        assert self.server is not None
        self._cluster.stop_fuse(self.server, self.root)

    def served(self) -> Bytes:
        """Client.BytesReadLocal counts short-circuit bytes, the block worker's counters all others."""
        client = self._cluster.fuse_metrics(self.root)
        local = sum(value for name, value in client.items() if name.startswith("Client.BytesReadLocal."))
        return Bytes(local, self._cluster.bytes_read_remotely())


class Fusecache:
    """This project: `fusecache mount`, as a user starts it."""

    name = "fusecache"
    reads_ufs = True
    warm_up_runs = 4

    def __init__(self, cluster: RealAlluxio, mountpoint: Path, state: Path, flags: list[str]) -> None:
        self.root = mountpoint
        self.large = [mountpoint / "large" / "large.bin"]
        self.setup = " ".join(["fusecache mount", "alluxio://MASTER/ MOUNTPOINT", *flags])
        self._metrics_address = f"127.0.0.1:{free_port('127.0.0.1')}"
        service = ["--state-dir", str(state), "--runtime-dir", str(state / "run")]
        service += ["--metrics-address", self._metrics_address]
        self.mount = Mount(f"alluxio://{cluster.master}/", mountpoint, *flags, *service)

    def start(self, stack: ExitStack) -> None:
        """Mount; taken down strictly at the end."""
        stack.enter_context(self.mount)

    def served(self) -> Bytes:
        """fusecache_read_bytes_total by source."""
        with urllib.request.urlopen(f"http://{self._metrics_address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = {
            source: float(value)
            for source, value in re.findall(r'^fusecache_read_bytes_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
        }
        return Bytes(found.get("local_block", 0.0), found.get("block_worker", 0.0) + found.get("ufs", 0.0))
