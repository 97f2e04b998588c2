"""A whole mount under the real supervisor and the real gate, with stand-ins for agent and workers.

`Supervised` writes the specification, starts the supervisor as a daemon would, and waits for the word on the ready
pipe. `parts()` tells pids from the supervisor's own table; every wait has an end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusecache
from fusecache.kernel.features import Features
from fusecache.kernel.spec import MountSpec
from tests.support.mounting import is_mounted
from tests.support.taker import asked

WAIT_S = 20.0
SOURCE = "stand-in, with a comma"
_numbers = itertools.count()
POLL_S = 0.02
PACKAGE_FOLDER = Path(fusecache.__file__).parents[1]
PYTHON = (sys.executable, "-S", "-m")
DIES_IF = 'test -e "$0" && exit 3; exec "$@"'
"""A part's command line that ends with 3 at its start for as long as a file is there."""


def until(condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    """Wait for `condition`, and give what it gave."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(POLL_S)
    return found


def runs(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Supervised:
    """One mount; use as a context manager."""

    def __init__(
        self,
        folder: Path,
        features: Features,
        *,
        mode: str = "no-open",
        package: Path = PACKAGE_FOLDER,
        **fields: Any,
    ) -> None:
        """`folder` is the test's own; the agent chooses `mode`; `fields` replace those of the specification. `package`:
        where supervisor and gate come from."""
        self.folder = folder
        self.mountpoint = folder / "mnt"
        self.mountpoint.mkdir(exist_ok=True)
        self.orders = folder / "orders"
        self.orders.mkdir(exist_ok=True)
        self.takeover_socket = folder / "takeover" / "takeover.sock"
        self.takeover_socket.parent.mkdir(mode=0o700, exist_ok=True)
        number = next(_numbers)
        self.agent_socket = folder / f"agent{number}.socket"
        self._features = features
        self._mode = mode
        self._fields = fields
        self._stderr = folder / f"stderr{number}"
        self._package = package
        self.process: subprocess.Popen[bytes] | None = None
        self.report = b""

    def dies_at_start(self, part: str) -> Path:
        """The file that makes `part` (agent, gate, worker) end at its start while it is there."""
        return self.orders / f"{part} dies"

    def _argv(self, part: str, module: str) -> tuple[str, ...]:
        return ("/bin/sh", "-c", DIES_IF, str(self.dies_at_start(part)), *PYTHON, module)

    def start(self, *, wait: bool = True, takes_over: bool = False) -> None:
        """Start the supervisor; with `wait` until it reported on the ready pipe (`report`). `takes_over`: from the one
        that has the mount."""
        ready_end = self._start(takes_over)
        os.set_blocking(ready_end, False)
        try:
            if wait:
                self.report = until(lambda: self._read(ready_end), "a word on the ready pipe")
        finally:
            os.close(ready_end)

    def _start(self, takes_over: bool) -> int:
        """The end of the ready pipe."""
        taker, takeover, numbers = asked(self.takeover_socket, SOURCE) if takes_over else (None, {}, [])
        plan_fd = os.memfd_create("plan", 0)
        os.write(plan_fd, b"plan")
        ready_end, ready_fd = os.pipe()
        spec = {
            "mountpoint": str(self.mountpoint),
            "fsname": SOURCE,
            "allow_other": True,
            "open_mode": "auto",
            "features": self._features,
            "workers": 2,
            "gate_argv": self._argv("gate", "fusecache.kernel.gate.main"),
            "worker_argv": self._argv("worker", "tests.support.stand_in_worker"),
            "agent_argv": self._argv("agent", "tests.support.stand_in_agent"),
            "plan_fd": plan_fd,
            "ready_fd": ready_fd,
            "agent_socket": str(self.agent_socket),
            "control_socket": str(self.folder / "control" / "control.sock"),
            "takeover_socket": str(self.takeover_socket),
            "takeover": takeover,
            "environment": {"FUSECACHE_STAND_IN": str(self.orders), "FUSECACHE_STAND_IN_MODE": self._mode},
            **self._fields,
        }
        spec_fd = MountSpec(**spec).to_memfd()
        try:
            with self._stderr.open("ab") as stderr:
                self.process = subprocess.Popen(
                    [*PYTHON, "fusecache.kernel.supervisor.main", "--spec-fd", str(spec_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(spec_fd, plan_fd, ready_fd, *numbers),
                    cwd=self.folder,
                    env={**os.environ, "PYTHONPATH": f"{self._package}:{PACKAGE_FOLDER}"},
                    start_new_session=True,
                )
        finally:
            for descriptor in (spec_fd, plan_fd, ready_fd):
                os.close(descriptor)
            if taker is not None:
                taker.close()
        return ready_end

    @staticmethod
    def _read(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, 4096) or b"(closed)"
        except BlockingIOError:
            return b""

    @property
    def pid(self) -> int:
        """The supervisor's."""
        assert self.process is not None
        return self.process.pid

    def parts(self) -> dict[str, dict[str, Any]]:
        """The supervisor's table, by name, as its agent gets it."""
        return {part["name"]: part for part in self.status()["parts"]}

    def status(self) -> dict[str, Any]:
        """What the agent is told."""
        answer = self.orders / "agent-status.json"
        answer.unlink(missing_ok=True)
        (self.orders / "ask").touch()
        until(answer.exists, "the agent has asked for the status")
        status: dict[str, Any] = json.loads(answer.read_text())
        return status

    def pids(self) -> list[int]:
        """Of every process of the mount."""
        return [part["pid"] for part in self.parts().values() if part["pid"]]

    def read(self, name: str, *, within_s: float = WAIT_S, cold: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Read a file in a child that can be given up: standard output is the content, 1 an error."""
        flags = ["iflag=direct", "bs=64k"] if cold else ["bs=64k"]
        return subprocess.run(
            ["dd", f"if={self.mountpoint / name}", "status=none", *flags],
            capture_output=True,
            timeout=within_s,
            check=False,
        )

    def reading(self, name: str, *, direct: bool = False) -> subprocess.Popen[bytes]:
        """The first 64 KiB, going on. `direct`: one READ whose error the caller sees; a buffered one is tried again."""
        flags = ["iflag=direct"] if direct else []
        return subprocess.Popen(
            ["dd", f"if={self.mountpoint / name}", "status=none", "bs=64k", "count=1", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def ended(self, within_s: float = WAIT_S) -> int:
        """Exit code of the supervisor, which ends by itself."""
        assert self.process is not None
        return self.process.wait(timeout=within_s)

    def stderr(self) -> str:
        """All that supervisor and parts wrote."""
        return self._stderr.read_text(errors="replace")

    def events(self) -> list[str]:
        """Events of the supervisor's log so far."""
        lines = [line for line in self.stderr().splitlines() if line.startswith("{")]
        return [json.loads(line)["event"] for line in lines]

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *failure: object) -> None:
        """Take down what is there; log noise of the parts reaches the test's own standard error."""
        if self.process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self.process.poll() is None:
                    self.process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(WAIT_S)
        while is_mounted(self.mountpoint):
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True)
        sys.stderr.write(self.stderr())
