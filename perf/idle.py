"""Idle use of a mount: CPU of its processes over some seconds, and their memory.

    python -m perf.idle [SECONDS]

Mounts a small folder by the real command, reads it once, then leaves it alone and reads /proc. Prints one JSON object.
The figure to hold: under 1 % of one core, the embedded server included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTLE_S = 3.0
"""After the first reads: time for what they started in the background."""


def processes(pid: int) -> list[int]:
    """The process and everything below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += processes(int(child))
    return found


def cpu_s(pid: int) -> float:
    """User and system time so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """VmRSS."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def measure(folder: Path, seconds: float) -> dict[str, float]:
    """Mount, read, wait, look."""
    source, mountpoint = folder / "source", folder / "mnt"
    for place in (source, mountpoint):
        place.mkdir()
    (source / "file").write_bytes(os.urandom(1 << 20))
    environment = {**os.environ, "FUSECACHE_STATE_DIR": str(folder / "state"), "FUSECACHE_RUNTIME_DIR": str(folder)}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "fusecache", "mount", str(source), str(mountpoint)],
        env=environment, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert (mountpoint / "file").read_bytes() == (source / "file").read_bytes()
        time.sleep(SETTLE_S)
        pids = processes(daemon.pid)
        before = sum(map(cpu_s, pids))
        began = time.monotonic()
        time.sleep(seconds)
        used = sum(map(cpu_s, pids)) - before
        return {
            "processes": len(pids),
            "seconds": round(time.monotonic() - began, 1),
            "cpu_percent": round(100 * used / (time.monotonic() - began), 2),
            "resident_mib": round(sum(map(resident_bytes, pids)) / (1 << 20), 1),
        }
    finally:
        daemon.terminate()
        daemon.communicate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fusecache-idle-") as temporary:
        print(json.dumps(measure(Path(temporary), float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)))
