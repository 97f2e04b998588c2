"""The systems under test: how each is started over the same data, and how it proves where its bytes came from.

All of them stay mounted for the whole run, side by side, each on mount points of its own; one at a time is measured.
What the rows do is in workloads.py.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fusecache.daemon import control_client
from perf.outcome import ELSEWHERE, GATE, LOCAL, MEGABYTE, ORDINARY, PASSED_THROUGH, WORKERS, Counters
from perf.tables import BLOCKS, ONE_BLOCK, SMALL
from tests.support.mounting import Mount, is_mounted
from tests.support.real_alluxio import FUSE_KERNEL_OPTIONS, FUSE_PROPERTIES, RealAlluxio, Server

MOUNT_S = 30.0
POLL_S = 0.05
STATUS_S = 10.0


class Ground(NamedTuple):
    """What a system is started on."""

    cluster: RealAlluxio
    copies: Path
    """Copies of the block files under the names of the data set (dataset.copy_blocks)."""
    work: Path
    """Where its mount points and state folders go."""
    mount_flags: list[str]
    """Extra flags of every fusecache mount."""


class System(Protocol):
    """One column of the table."""

    name: str
    setup: str
    """Versions and options, for the report."""
    reads_blocks: bool
    """Whether it is a client of Alluxio: reads the block worker's block files (others: the copies), and can fetch what
    no block worker holds."""
    warm_up_runs: int
    """At most so many before a workload is measured; fewer when two agree within 10 %."""

    def start(self, stack: ExitStack) -> None:
        """Mount; what must be undone goes on the stack."""

    def place(self, folder: str) -> Path:
        """Where it shows this part of the data."""

    def pids(self, folder: str) -> list[int]:
        """The roots of the process trees that serve this part of the data."""

    def counters(self) -> Counters:
        """Its own; nothing when it has none."""


class Native:
    """Copies of the block files, under the names of the data set."""

    setup = "copies of the block worker's block files on the same local file system, no FUSE"
    reads_blocks = False
    warm_up_runs = 1

    def __init__(self, name: str, ground: Ground) -> None:
        self.name = name
        self._copies = ground.copies

    def start(self, stack: ExitStack) -> None:
        """Nothing to start."""

    def place(self, folder: str) -> Path:
        """The links."""
        return self._copies / folder

    def pids(self, folder: str) -> list[int]:
        """The reader does everything."""
        return []

    def counters(self) -> Counters:
        """Nothing counts."""
        return {}


class Bindfs:
    """bindfs over copies of the block files: what FUSE alone costs, in C."""

    reads_blocks = False
    warm_up_runs = 1
    options = ("-r", "--multithreaded", "-o", "kernel_cache,attr_timeout=7200,entry_timeout=7200")

    def __init__(self, name: str, ground: Ground) -> None:
        self.name = name
        version = subprocess.run(["bindfs", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        self.setup = f"{version} {' '.join(self.options)} over copies of the block files"
        self._copies = ground.copies
        self._mountpoint = ground.work / f"mnt-{name}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, stack: ExitStack) -> None:
        """Mount in the foreground."""
        self._mountpoint.mkdir()
        process = subprocess.Popen(["bindfs", "-f", *self.options, str(self._copies), str(self._mountpoint)])
        self._process = process
        stack.callback(process.wait)
        stack.callback(subprocess.run, ["umount", str(self._mountpoint)], check=True)
        deadline = time.monotonic() + MOUNT_S
        while not is_mounted(self._mountpoint):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"bindfs is not mounted, exit code {process.returncode}")
            time.sleep(POLL_S)

    def place(self, folder: str) -> Path:
        """One mount for everything."""
        return self._mountpoint / folder

    def pids(self, folder: str) -> list[int]:
        """Its only process."""
        assert self._process is not None
        return [self._process.pid]

    def counters(self) -> Counters:
        """bindfs counts nothing."""
        return {}


class AlluxioFuse:
    """alluxio-fuse 2.9.3 with its documented tuning for training; `extra` are more mount options."""

    reads_blocks = True
    warm_up_runs = 8

    def __init__(self, name: str, ground: Ground, *extra: str) -> None:
        self.name = name
        self._options = ",".join([FUSE_KERNEL_OPTIONS, *extra])
        properties = " ".join(f"{key}={value}" for key, value in FUSE_PROPERTIES.items())
        self.setup = f"2.9.3, -Xmx1g, -o {self._options}, {properties}"
        self._cluster = ground.cluster
        self._mountpoint = ground.work / f"mnt-{name}"
        self._server: Server | None = None

    def start(self, stack: ExitStack) -> None:
        """Mounted after the data was loaded: statuses it cached before would hide the block locations, and with
        them its short circuit, for as long as its metadata cache lives."""
        self._server = self._cluster.start_fuse(self._mountpoint, kernel_options=self._options)
        stack.callback(self._cluster.stop_fuse, self._server, self._mountpoint)

    def place(self, folder: str) -> Path:
        """One mount for everything."""
        return self._mountpoint / folder

    def pids(self, folder: str) -> list[int]:
        """The JVM."""
        assert self._server is not None
        return [self._server.process.pid]

    def counters(self) -> Counters:
        """Client.BytesReadLocal counts short-circuit bytes, the block worker's counters all others."""
        client = self._cluster.fuse_metrics(self._mountpoint)
        local = sum(value for name, value in client.items() if name.startswith("Client.BytesReadLocal."))
        return {LOCAL: local / MEGABYTE, ELSEWHERE: self._cluster.bytes_read_remotely() / MEGABYTE}


class Fusecache:
    """This project: `fusecache mount`, as a user starts it."""

    reads_blocks = True
    # Passthrough begins with a folder's second open: the first has its version confirmed.
    warm_up_runs = 3

    def __init__(self, name: str, ground: Ground, *flags: str, path: str = "") -> None:
        self.name = name
        # Names shown as alluxio-fuse shows them, so that no system has less to look up than another.
        self._flags = ["--map-names", *flags, *ground.mount_flags]
        self._path = path
        self.setup = " ".join(["fusecache mount", f"alluxio://MASTER/{path} MOUNTPOINT", *self._flags])
        place = "".join(letter if letter.isalnum() else "-" for letter in name)
        self._runtime = ground.work / f"run-{place}"
        service = ["--state-dir", str(ground.work / f"state-{place}"), "--runtime-dir", str(self._runtime)]
        source = f"alluxio://{ground.cluster.master}/{path}"
        self._mount = Mount(source, ground.work / f"mnt-{place}", *self._flags, *service)

    def start(self, stack: ExitStack) -> None:
        """Mount; taken down strictly at the end."""
        stack.enter_context(self._mount)
        status = self.status()
        # Classic gives no reason.
        self.setup += f" ({': '.join(status[key] for key in ('open_mode', 'why') if key in status)})"

    def place(self, folder: str) -> Path:
        """Below the path that is mounted."""
        return self._mount.mountpoint / Path(folder).relative_to(self._path or ".")

    def pids(self, folder: str) -> list[int]:
        """The process that was started; what serves may be below it."""
        return [self._mount.pid]

    def status(self) -> dict[str, Any]:
        """What `fusecache status` shows."""
        socket = control_client.socket_path(self._runtime, self._mount.mountpoint)
        return control_client.call(socket, "status", STATUS_S)

    def counters(self) -> Counters:
        """By its control socket. Bytes that the kernel reads by itself (passthrough) no process counts: the opens show
        that it did."""
        status = self.status()
        read = {
            source: status["metrics"].get(f"fusecache_read_bytes_total{{source={source}}}", 0.0) / MEGABYTE
            for source in ("local_block", "block_worker", "ufs")
        }
        found = {LOCAL: read["local_block"], ELSEWHERE: read["block_worker"] + read["ufs"]}
        if gate := status.get("gate"):
            # Counted in mode passthrough only: in no-open there are no opens to tell apart.
            opens: dict[str, int] = gate.get("opens", {})
            found[ORDINARY] = opens.get("ordinary", 0)
            found[PASSED_THROUGH] = sum(opens.values()) - found[ORDINARY]
            found[GATE] = sum(gate["answered"].values())
            found[WORKERS] = sum(gate["dispatched"].values())
        return found


class Auto:
    """`--open-mode auto` chooses for a whole mount by what lies in it: each folder of the data set, of small files or
    of a large one, is a mount of its own. A row's processor time and memory are those of the mount that serves it."""

    reads_blocks = True
    warm_up_runs = Fusecache.warm_up_runs

    def __init__(self, name: str, ground: Ground) -> None:
        self.name = name
        self._parts = {
            folder: Fusecache(f"{name}-{folder}", ground, "--open-mode", "auto", path=folder)
            for folder in (SMALL, BLOCKS, ONE_BLOCK)
        }
        self.setup = ""

    def start(self, stack: ExitStack) -> None:
        """All of them."""
        for part in self._parts.values():
            part.start(stack)
        self.setup = "; ".join(part.setup for part in self._parts.values())

    def place(self, folder: str) -> Path:
        """In the mount of its kind."""
        return self._parts[folder].place(folder)

    def pids(self, folder: str) -> list[int]:
        """Of the mount of its kind."""
        return self._parts[folder].pids(folder)

    def counters(self) -> Counters:
        """Of all."""
        found: Counter[str] = Counter()
        for part in self._parts.values():
            found.update(part.counters())
        return dict(found)


SystemMaker = Callable[[str, Ground], System]
"""Makes a system of this name."""


def with_flags(*flags: str) -> SystemMaker:
    """A mount of fusecache with these flags."""
    return lambda name, ground: Fusecache(name, ground, *flags)


SYSTEMS: dict[str, SystemMaker] = {
    "fusecache": with_flags(),
    "no-open": with_flags("--open-mode", "no-open"),
    "passthrough": with_flags("--open-mode", "passthrough"),
    "auto": Auto,
    "classic": with_flags("--open-mode", "classic"),
    "no-open-1-worker": with_flags("--open-mode", "no-open", "--workers", "1"),
    "passthrough-1-worker": with_flags("--open-mode", "passthrough", "--workers", "1"),
    "alluxio-fuse": AlluxioFuse,
    "alluxio-fuse-permissions": lambda name, ground: AlluxioFuse(name, ground, "default_permissions"),
    "bindfs": Bindfs,
    "native": Native,
}
"""Every column there is, by name; a table chooses (tables.py)."""
