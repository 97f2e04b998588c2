"""One measurement from a cold kernel: drop what the kernel caches, warm what lies behind the mount, run a workload.

Used by the bench and by the micro measurements; what kernel-cold means is told in bench.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from perf import dataset
from perf.workloads import Job, Rows

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD_LIMIT_S = 600


def measure(job: Job, names: Path, pages: Iterable[Path]) -> Rows:
    """Names and attributes below `names` and the pages of the files `pages` are warm when the workload starts, nothing
    else is. Needs root. RuntimeError with its words when the workload fails."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    dataset.warm_names(names)
    dataset.warm_pages(pages)
    done = subprocess.run(
        [sys.executable, "-m", "perf.workloads"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=WORKLOAD_LIMIT_S,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{job['workload']} on {job['tree']} failed:\n{done.stderr}")
    rows: Rows = json.loads(done.stdout)
    return rows
