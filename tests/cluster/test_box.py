"""A box leaves nothing behind, also when the run that made it was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import remains
from tests.cluster.box import Box

HOLD = """
import sys
from pathlib import Path
from tests.cluster.box import Box
with Box(Path(sys.argv[1])) as held:
    # A program of its own session, as containers are, with a mount and a control group.
    held.start("stray", ["sh", "-c", "setsid sleep 1000 & mount -t tmpfs none /opt; exec sleep 1000"])
    held.run("mkdir", "-p", f"{sys.argv[2]}{held.cgroup}/pod")
    held.run("sh", "-c", "until mountpoint -q /opt; do sleep 0.1; done")
    print(held.number, flush=True)
    sys.stdin.read()
"""


MEMORY = Path("/sys/fs/cgroup/memory")
CGROUPS = MEMORY if MEMORY.is_dir() else MEMORY.parent
"""A hierarchy of control groups of this machine, of either version."""


def links() -> set[int]:
    """This machine's network devices, by numbers that are not used again."""
    return {int((device / "ifindex").read_text()) for device in Path("/sys/class/net").iterdir()}


def recorded() -> set[str]:
    """Folders of all boxes that are written down."""
    return {json.loads(path.read_text())["folder"] for path in remains.records().glob("*.json")}


def test_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    with Box(folder) as held:
        program = held.start("sleep", ["sleep", "1000"])
        held.run("sh", "-c", "until pidof sleep; do sleep 0.1; done")
        everybody = [remains.identity(pid) for pid in held.processes()]
        link = int(Path(f"/sys/class/net/fusecache{held.number}/ifindex").read_text())
        assert remains.identity(program.pid) in everybody
        assert link in links()
        assert str(folder) in recorded()
    assert not folder.exists()
    assert link not in links()
    assert str(folder) not in recorded()
    assert not any(remains.lives(one) for one in everybody)


def test_the_next_run_cleans_up_after_one_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", HOLD, str(folder), str(CGROUPS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        number = int(owner.stdout.readline())
        record = json.loads((remains.records() / f"{number}.json").read_text())
        owner.kill()
    # The fault happened: its end left these.
    assert owner.returncode == -9
    assert folder.exists()
    assert Path(f"{CGROUPS}{record['cgroup']}").exists()

    with Box(tmp_path / "next"):
        assert not remains.lives(record["init"])
        assert not folder.exists()
    assert not Path(f"{CGROUPS}{record['cgroup']}").exists()


def test_a_folder_that_the_box_would_not_see_is_refused() -> None:
    with pytest.raises(RuntimeError, match="would not be seen in the box"):
        Box(Path("/run/box")).__enter__()
    assert not Path("/run/box").exists()
