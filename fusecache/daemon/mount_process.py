"""A process that runs one mount, seen from its parent: start it, learn when reads work, end it.

The plan travels pickled through the child's standard input: from this program to itself over a private pipe, with
everything that was read from files, environment and flags already resolved; with it goes the command that it was made
from, where the mount may read that again (SIGHUP). The program is executed anew rather than forked, because a fork of a
process with threads (grpc has them) may inherit held locks. The child's half is `daemon.mount_child`; its word on
readiness comes over `kernel.ready_pipe`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import fusecache
from fusecache.config.mount_command import MountCommand
from fusecache.config.settings import MountPlan
from fusecache.errors import UNEXPECTED, FusecacheError
from fusecache.kernel import ready_pipe
from fusecache.kernel.supervisor.parts import ending

STOP_S = 20.0
"""Seconds a mount may take to end after SIGTERM, before SIGKILL: it has an unmount and open streams to finish."""


class MountFailed(FusecacheError):
    """A mount's own error, with its own exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class MountProcess:
    """One running child."""

    def __init__(
        self,
        plan: MountPlan,
        source: str,
        *,
        command: MountCommand | None = None,
        die_with_parent: bool,
        log: IO[bytes] | None = None,
    ) -> None:
        """Start it. `source` is for the process list only; `log` None = the parent's standard error. `command`: what it
        reads again at SIGHUP; one that dies with this parent passes the signal on to it."""
        self.plan = plan
        self.source = source
        self._asked_to_end = False
        self._ready_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fusecache.daemon.mount_child"),
                    *("--ready-fd", str(write_end)),
                    *(("--die-with-parent",) if die_with_parent else ()),
                    *("--", source, str(plan.mountpoint)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to the parent, which ends the children in order
                pass_fds=(write_end,),
                cwd="/",  # a daemon must not keep the folder busy that its command was given in
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        except BaseException:
            os.close(self._ready_end)
            raise
        finally:
            os.close(write_end)
        assert self._process.stdin is not None
        try:
            pickle.dump((plan, command), self._process.stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; its exit code says so

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until reads work. MountFailed with the child's error line and exit code otherwise."""
        try:
            report = ready_pipe.read_report(self._ready_end)
        finally:
            os.close(self._ready_end)
        if report is None:
            raise MountFailed(
                f"mount {str(self.plan.mountpoint)!r} ended with {self.wait_end()} before it was ready", UNEXPECTED
            )
        if not report.ready:
            self.wait_end()
            raise MountFailed(report.error, report.exit_code)

    def wait_end(self) -> str:
        """Block until it has ended; `exit code 0`, `SIGKILL` ..."""
        return ending(self._process.wait())

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative = killed by that signal."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), once: a second signal would make it end without waiting for what is in flight."""
        if not self._asked_to_end and self._process.poll() is None:
            self._asked_to_end = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self, patience_s: float = STOP_S) -> None:
        """Ask it to end, and after `patience_s` seconds make it. Returns when it has ended."""
        self.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def release(self) -> None:
        """Let it go on without this parent."""
        # Keeps Popen's destructor from warning about a child that nobody waited for.
        self._process.returncode = 0


def python_path() -> str:
    """So that the child finds this very package from its own folder, installed or not."""
    own = str(Path(fusecache.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
