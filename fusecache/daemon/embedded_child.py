"""The embedded server of a folder SOURCE, as a child process that ends with its parent.

The child prints one JSON line when it serves and ends when its standard input reaches its end, which the kernel sees to
however the parent dies. Its log goes to the parent's standard error.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from fusecache import errors
from fusecache.config.settings import ClusterConfig, MountPlan
from fusecache.errors import FusecacheError, UsageError

START_S = 60.0
"""A first start creates its database; later ones take a second."""

STOP_S = 10.0


class EmbeddedAddress(NamedTuple):
    """How to reach the child."""

    master: str
    """host:port."""
    tier_folders: tuple[str, ...]


class EmbeddedChild:
    """One embedded server for one folder."""

    def __init__(self, folder: Path, state_dir: Path) -> None:
        self._folder = folder
        self._state_dir = state_dir
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> EmbeddedAddress:
        """Start it and wait until it serves; its own error when it does not."""
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "fusecache", "embedded", str(self._folder),
                "--state-dir", str(self._state_dir), "--child",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the mount first, and the mount ends the child
        )  # fmt: skip
        line = self._first_line()
        if line is None:
            self.stop()
            raise FusecacheError(f"{self._folder}: the embedded server did not start within {START_S:.0f} s")
        if not line:
            code = self._process.wait(STOP_S)
            self.stop()
            raise UsageError(
                f"{self._folder}: the embedded server ended with exit code {code}; its message stands above"
            )
        ready = json.loads(line)
        if "error" in ready:
            self.stop()
            raise errors.named(ready["type"], ready["error"])
        return EmbeddedAddress(ready["master"], tuple(ready["tier_folders"]))

    def keep_over_exec(self) -> int:
        """Its process id; it goes on when this process is replaced by exec, and still ends with it.

        Only the pipe that is its standard input has to survive: its end is what tells the child.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        os.set_inheritable(self._process.stdin.fileno(), True)
        return self._process.pid

    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it: politely by closing its standard input, then by signal."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _first_line(self) -> bytes | None:
        """The child's first line, b"" when it ended without one, None when it said nothing in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(START_S):
                return None
        return self._process.stdout.readline()


def restart_argv(folder: Path, state_dir: Path, address: EmbeddedAddress) -> tuple[str, ...]:
    """The command that serves the same again, at the same address, for a parent that sees to its end by itself."""
    port = address.master.rpartition(":")[2]
    own = ("--state-dir", str(state_dir), "--port", port)
    return (sys.executable, "-m", "fusecache", "embedded", str(folder), *own)


def with_embedded(plan: MountPlan, stack: ExitStack) -> MountPlan:
    """`plan` with a cluster: for a folder SOURCE its embedded server is started, and ends with `stack`."""
    if plan.folder is None:
        return plan
    child = EmbeddedChild(plan.folder, plan.settings.state_dir / "embedded")
    stack.callback(child.stop)
    return served_by(plan, child.start())


def served_by(plan: MountPlan, address: EmbeddedAddress) -> MountPlan:
    """`plan` with a running embedded server as its cluster."""
    cluster = ClusterConfig(name="embedded", masters=(address.master,), tier_folders=address.tier_folders)
    return plan.model_copy(update={"cluster": cluster})
