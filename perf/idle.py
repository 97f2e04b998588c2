"""Idle use of a mount: CPU of its processes over some seconds, and their memory.

    python -m perf.idle [SECONDS] [FLAG OF fusecache mount ...]

Mounts a small folder by the real command, reads it once, then leaves it alone and reads /proc. Prints one JSON object.
The figure to hold: under 1 % of one core, the embedded server included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perf.processes import cpu_s, memory, tree

SETTLE_S = 3.0
"""After the first reads: time for what they started in the background."""
NAME_LENGTH = 60


def name_of(pid: int) -> str:
    """The beginning of its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:NAME_LENGTH].strip()


def measure(folder: Path, seconds: float, flags: list[str]) -> dict[str, Any]:
    """Mount, read, wait, look."""
    source, mountpoint = folder / "source", folder / "mnt"
    for place in (source, mountpoint):
        place.mkdir()
    (source / "file").write_bytes(os.urandom(1 << 20))
    environment = {**os.environ, "FUSECACHE_STATE_DIR": str(folder / "state"), "FUSECACHE_RUNTIME_DIR": str(folder)}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "fusecache", "mount", *flags, str(source), str(mountpoint)],
        env=environment, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert (mountpoint / "file").read_bytes() == (source / "file").read_bytes()
        time.sleep(SETTLE_S)
        pids = tree(daemon.pid)
        before = {pid: cpu_s(pid) for pid in pids}
        began = time.monotonic()
        time.sleep(seconds)
        used = {pid: cpu_s(pid) - before[pid] for pid in pids}
        passed = time.monotonic() - began
        return {
            "seconds": round(passed, 1),
            "cpu_percent": round(100 * sum(used.values()) / passed, 2),
            "resident_mib": round(memory(pids).resident_bytes / (1 << 20), 1),
            "proportional_mib": round(memory(pids).proportional_bytes / (1 << 20), 1),
            "processes": [
                {
                    "name": name_of(pid),
                    "cpu_percent": round(100 * used[pid] / passed, 2),
                    "proportional_mib": round(memory([pid]).proportional_bytes / (1 << 20), 1),
                }
                for pid in pids
            ],
        }
    finally:
        daemon.terminate()
        daemon.communicate()


def main() -> None:
    """Print what one mount uses."""
    parser = argparse.ArgumentParser(prog="python -m perf.idle", description="Idle use of a mount, as JSON.")
    parser.add_argument("seconds", type=float, nargs="?", default=10.0, help="how long it is left alone (default 10)")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAG", help="of `fusecache mount`")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-idle-") as temporary:
        print(json.dumps(measure(Path(temporary), given.seconds, given.flags), indent=1))


if __name__ == "__main__":
    main()
