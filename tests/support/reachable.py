"""What other users can enter and run: pytest's folders are closed to them, and so may be this very Python.

`reachable` is a folder, `python_for_all` lets `fusecache` run with a Python that other users may execute; both also for
fixtures of a module, as context managers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.mounting import PYTHON_VARIABLE

STRANGER = 65_533
"""Uid and gid of somebody who has nothing to do with a mount."""

PROGRAM_S = 30.0
ROOT = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Empty, 0755, on the file system of the temporary folders; gone afterwards."""
    with reachable_folder() as folder:
        yield folder


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """See `reachable`."""
    folder = Path(tempfile.mkdtemp(prefix="fusecache-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def python_for_all() -> Iterator[str]:
    """The interpreter with which `fusecache` runs in this test; other users may run it, with the same libraries."""
    with run_by_python_for_all() as python:
        yield python


@contextlib.contextmanager
def run_by_python_for_all() -> Iterator[str]:
    """See `python_for_all`."""
    found = _python_for_all()
    if found is None:
        pytest.skip(f"other users can't run {sys.executable}, and there is no /usr/bin/{_NAME} in its place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON_VARIABLE, found)
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), sysconfig.get_path("purelib"))))
        yield found


_NAME = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@functools.cache
def _python_for_all() -> str | None:
    """A Python of a version manager lies in somebody's home; the system's has the same version or is none."""
    for python in (sys.executable, f"/usr/bin/{_NAME}"):
        try:
            if as_user(STRANGER, [python, "-c", ""]).returncode == 0:
                return python
        except OSError:
            continue
    return None


def as_user(uid: int, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a program of the system as another user, in no other group."""
    return subprocess.run(
        command,
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
        timeout=PROGRAM_S,
        cwd="/",
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
