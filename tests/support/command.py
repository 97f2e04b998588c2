"""Runs `fusecache` as people do: a process of its own, its exit code, its two streams."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.mounting import command

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90.0


def environment(state: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without settings of fusecache from outside, with state and sockets below `state`."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("FUSECACHE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    folders = {"FUSECACHE_STATE_DIR": str(state / "state"), "FUSECACHE_RUNTIME_DIR": str(state / "run")}
    return {**own, "PYTHONPATH": path, **folders, **(extra or {})}


def fusecache(
    *arguments: str | Path,
    state: Path,
    before: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. `before` is a command that runs it (setpriv, unshare)."""
    return subprocess.run(
        [*before, *command(), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(state, extra),
        timeout=TIMEOUT_S,
        cwd=cwd or ROOT,
        check=False,
    )


def error_line(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one line of a failed command, after checking that it is one and nothing else."""
    shown = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == exit_code, shown
    assert "Traceback" not in done.stderr, shown
    lines = done.stderr.splitlines()
    assert len(lines) == 1, shown
    assert lines[0].startswith("fusecache: "), shown
    assert done.stdout == "", shown
    return lines[0]
