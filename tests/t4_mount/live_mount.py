"""A mount under test with what a test wants beside its files: metrics, refresh, a cluster of several block workers.

`tests.support.mounting` starts and ends the command; here are state folders of the test's own, the control socket,
and `EmbeddedProcess`, an embedded server in a process of its own (so that its threads are not the test's).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fusecache.daemon import control_client
from fusecache.daemon.control import socket_path
from fusecache.errors import FusecacheError
from tests.support.mounting import Mount, command

PATIENCE_S = 40.0
"""How long a condition may take to come true; ten times what a busy machine of two cores needs."""

STOP_S = 15.0


class Part(NamedTuple):
    """One process of a mount."""

    pid: int | None
    restarts: int
    """How often it was started again."""
    ready: bool


class LiveMount:
    """A mounted source; paths are Path for people and bytes for hostile names."""

    def __init__(self, mount: Mount, runtime_dir: Path) -> None:
        self.mount = mount
        self.root = mount.mountpoint
        self.pid = mount.pid
        self.of_folder = not mount.source.startswith("alluxio://")
        """Whether an embedded server of the mount's own serves the source."""
        self.runtime_dir = runtime_dir
        self._socket = socket_path(runtime_dir, mount.mountpoint)

    def status(self) -> dict[str, Any]:
        """What `fusecache status` shows."""
        return control_client.call(self._socket, "status", PATIENCE_S)

    def answers(self) -> bool:
        """Whether the control socket answers already."""
        try:
            return bool(self.status()["ready"])
        except FusecacheError:
            return False

    def metrics(self) -> dict[str, float]:
        """Every metric now, over all processes of the mount."""
        found: dict[str, float] = self.status()["metrics"]
        return found

    def uptime_s(self) -> float:
        """Seconds since the daemon's start."""
        return float(self.status()["uptime_s"])

    def open_mode(self) -> str:
        """The mode in force."""
        return str(self.status()["open_mode"])

    def gate(self) -> dict[str, Any]:
        """The gate's counters; empty without one."""
        found: dict[str, Any] = self.status().get("gate") or {}
        return found

    def passthrough_opens(self) -> int:
        """Opens that the kernel was given a backing file for."""
        opens: dict[str, int] = self.gate().get("opens", {})
        return sum(count for how, count in opens.items() if how.startswith("passthrough"))

    def reads(self) -> int:
        """READ requests of the kernel so far. Workers count what they answered, and the gate answers many itself: what
        is local, in whichever mode, as soon as it is stored."""
        gate = self.gate()
        if gate:
            return int(gate["answered"].get("READ", 0) + gate["dispatched"].get("READ", 0))
        return int(by_label(self.metrics(), "fusecache_requests_total", "op").get("read", 0))

    def parts(self) -> dict[str, Part]:
        """The processes of the mount that a supervisor looks after, by name; empty in classic mode."""
        return {
            part["name"]: Part(part["pid"], part["restarts"], part["ready"])
            for part in self.status().get("parts") or ()
        }

    def pids(self) -> list[int]:
        """Every process that serves the mount; an embedded server does not count."""
        return sorted({self.pid, *(part.pid for part in self.parts().values() if part.pid is not None)})

    def rpcs(self) -> dict[str, float]:
        """Calls to the cluster so far, by method."""
        return by_label(self.metrics(), "fusecache_rpcs_total", "method")

    def sources(self) -> dict[str, float]:
        """Bytes read so far, by source."""
        return by_label(self.metrics(), "fusecache_read_bytes_total", "source")

    def refresh(self, *paths: str) -> dict[str, Any]:
        """As `fusecache refresh` does it; the root without a path."""
        return control_client.call(self._socket, "refresh", PATIENCE_S, paths=list(paths) or [""])

    def descriptors(self) -> list[str]:
        """What the open descriptors of the mount's processes point at."""
        found = []
        for pid in self.pids():
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed while we looked
                    found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        return found

    def resident_bytes(self) -> int:
        """Memory of the mount's processes, without what they share with files."""
        pages = 0
        for pid in self.pids():
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            pages += resident - shared
        return pages * os.sysconf("SC_PAGESIZE")


def by_label(metrics: dict[str, float], name: str, label: str) -> dict[str, float]:
    """Sum of a metric's cells for each value of a label."""
    sums: dict[str, float] = {}
    for key, value in metrics.items():
        if key.startswith(name + "{"):
            labels = dict(part.split("=", 1) for part in key[len(name) + 1 : -1].split(","))
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums


@contextmanager
def live_mount(source: str | Path, folder: Path, *flags: str, name: str = "mnt") -> Iterator[LiveMount]:
    """Mount `source` at folder/name, with state below `folder`; strictly unmounted at the end."""
    folder.mkdir(exist_ok=True)
    state, runtime = folder / "state", folder / "run"
    mount = Mount(str(source), folder / name, "--state-dir", str(state), "--runtime-dir", str(runtime), *flags)
    mount.by_command = False
    with mount:
        live = LiveMount(mount, runtime)
        # Behind a gate files are served before the agent answers questions.
        eventually(live.answers, "the control socket answers")
        yield live


class EmbeddedProcess:
    """`fusecache embedded` as a process; ends with the block."""

    def __init__(self, folder: Path, state: Path, *flags: str) -> None:
        self.folder = folder
        self._flags = ("--port", "0", "--json", "--state-dir", str(state), "--log-level", "warning", *flags)
        self._process: subprocess.Popen[bytes] | None = None
        self.master = ""
        """host:port."""

    @property
    def url(self) -> str:
        """SOURCE of a mount of the whole folder."""
        return f"alluxio://{self.master}/"

    def __enter__(self) -> EmbeddedProcess:
        self._process = subprocess.Popen(
            [*command(), "embedded", str(self.folder), *self._flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.master = json.loads(self._process.stdout.readline())["master"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.terminate()
        try:
            assert self._process.wait(STOP_S) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


def eventually(condition: Callable[[], bool], what: str, *, within_s: float = PATIENCE_S) -> None:
    """Wait until `condition()`; fails with `what`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.02)


def errno_of(action: Callable[[], object]) -> int:
    """The errno that `action` ends with, 0 when it succeeds."""
    try:
        action()
    except OSError as failure:
        return failure.errno or -1
    return 0
