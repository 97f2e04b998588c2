"""Whole mounts that take each other over: `fusecache mount --daemon` again and again at one mount point.

The latest process is the one that serves; the one before must have ended by itself, with nothing unmounted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.command import ROOT, environment
from tests.support.mounting import command, is_mounted
from tests.support.process_tree import descendants
from tests.support.supervised import runs, until

START_S = 90.0
END_S = 20.0


class Upgrades:
    """One mount point; a context manager that takes down what is there."""

    def __init__(self, source: str, folder: Path, *flags: str) -> None:
        """State and sockets lie below `folder`."""
        self.source = source
        self.mountpoint = folder / "mnt"
        self.mountpoint.mkdir(exist_ok=True)
        self.log = folder / "log"
        self._folder = folder
        self._flags: Sequence[str] = flags
        self.pids: list[int] = []
        """Of the process that serves, and its parts."""

        self.took_s: list[float] = []
        """From the command to its word that reads work."""

    def start(self, *flags: str) -> None:
        """The first mount, or an upgrade of it, with more flags; ends with the old side gone."""
        before = self.pids
        began_s = time.monotonic()
        done = subprocess.run(
            [
                *(*command(), "mount", "--daemon", "--log-file", str(self.log), *self._flags, *flags),
                *(self.source, str(self.mountpoint)),
            ],
            env=environment(self._folder),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.log.read_text()[-3000:]}"
        self.took_s.append(time.monotonic() - began_s)
        found = re.search(r"process (\d+)", done.stdout)
        assert found is not None, done.stdout
        pid = int(found[1])
        assert pid not in before, "it was not taken over"
        until(lambda: not any(map(runs, before)), "every process of the old side has ended", END_S)
        assert runs(pid)
        self.pids = [pid, *descendants(pid)]
        assert self.lines() == 1

    def lines(self) -> int:
        """How many mounts lie on the mount point."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return sum(line.split()[4] == str(self.mountpoint) for line in lines)

    def end(self) -> None:
        """SIGTERM: unmounted, and all processes gone."""
        os.kill(self.pids[0], signal.SIGTERM)
        until(lambda: not any(map(runs, self.pids)), "every process has ended", END_S)
        assert not is_mounted(self.mountpoint)

    def __enter__(self) -> Upgrades:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + END_S
        while any(map(runs, self.pids)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        while is_mounted(self.mountpoint):
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True)
        if self.log.exists():
            sys.stderr.write(self.log.read_text(errors="replace"))
