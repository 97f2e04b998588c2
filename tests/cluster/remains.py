"""What a box would leave on this machine, written down before it is made, and how it is taken away again.

One record a box: {"owner", "init": [pid, start time], "folder", "cgroup", "link"}. A record whose owner no longer
lives is of a run that was killed; the next start takes away what the record names, and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.alluxio_jars import cache_folder

CGROUPS = Path("/sys/fs/cgroup")
GONE_S = 10.0
POLL_S = 0.05


def records() -> Path:
    """Where every box is written down while it exists."""
    return cache_folder() / "boxes"


def identity(pid: int) -> list[int]:
    """[pid, start time]: a pid alone may be somebody else's by now."""
    return [pid, _start_time(pid) or 0]


def lives(who: Sequence[int] | None) -> bool:
    """Whether exactly this process still runs."""
    return who is not None and _start_time(who[0]) == who[1]


def _start_time(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def clean_up_after_the_dead() -> None:
    """Take away what runs have left whose owner no longer lives."""
    records().mkdir(parents=True, exist_ok=True)
    with (records() / "cleaning.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time: another one may just do the same
        for path in sorted(records().glob("*.json")):
            try:
                owner = json.loads(path.read_text())["owner"]
            except FileNotFoundError:
                continue  # its run has just ended
            if not lives(owner):
                print(f"cleaning up after process {owner[0]}, which was killed", file=sys.stderr, flush=True)
                remove_remains(path)


def remove_remains(path: Path) -> None:
    """End a box and remove everything its record names, then the record. RuntimeError when something stays."""
    record = json.loads(path.read_text())
    if lives(record["init"]):
        os.kill(record["init"][0], signal.SIGKILL)
        _wait_until(lambda: not lives(record["init"]), f"process {record['init'][0]} did not end")
    subprocess.run(["ip", "link", "delete", record["link"]], capture_output=True, check=False)
    _wait_until(lambda: remove_cgroups(record["cgroup"]), f"control group {record['cgroup']} is still in use")
    folder = Path(record["folder"])
    # Never follow a mount that should not be there.
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    left = [point for point in mounted if point.startswith(f"{folder}/")]
    if left:
        raise RuntimeError(f"still mounted: {', '.join(left)}")
    if folder.exists():
        shutil.rmtree(folder)
    path.unlink()


def remove_cgroups(name: str) -> bool:
    """Remove a control group with all below it, in every hierarchy; whether it is gone."""
    roots = [root for root in (CGROUPS, *CGROUPS.glob("*")) if (root / name.lstrip("/")).is_dir()]
    for root in roots:
        top = root / name.lstrip("/")
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            top.rmdir()
    return not any((root / name.lstrip("/")).exists() for root in roots)


def _wait_until(condition: Callable[[], bool], else_: str) -> None:
    deadline = time.monotonic() + GONE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(else_)
        time.sleep(POLL_S)
