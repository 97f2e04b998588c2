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

from perf.processes import cpu_s, memory, tree

SETTLE_S = 3.0
"""After the first reads: time for what they started in the background."""


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
        pids = tree(daemon.pid)
        before = sum(map(cpu_s, pids))
        began = time.monotonic()
        time.sleep(seconds)
        used = sum(map(cpu_s, pids)) - before
        return {
            "processes": len(pids),
            "seconds": round(time.monotonic() - began, 1),
            "cpu_percent": round(100 * used / (time.monotonic() - began), 2),
            "resident_mib": round(memory(pids).resident_bytes / (1 << 20), 1),
            "proportional_mib": round(memory(pids).proportional_bytes / (1 << 20), 1),
        }
    finally:
        daemon.terminate()
        daemon.communicate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fusecache-idle-") as temporary:
        print(json.dumps(measure(Path(temporary), float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)))
