"""Worker processes of a mount: what more of them gain on this machine, and cost in memory.

    python -m perf.micro.workers [flags of perf.bench]

In mode no-open, where every READ of bytes that the kernel does not have reaches a worker.
"""

from __future__ import annotations

import sys

from perf import bench
from perf.systems import with_flags
from perf.tables import KERNEL_PATH, Table

DEFAULT = "2 workers"
VARIANTS = {
    f"{count} worker{'s' if count > 1 else ''}": with_flags("--open-mode", "no-open", "--workers", str(count))
    for count in (1, 2, 3, 4)
}
TABLE = Table(
    name="workers",
    title="Worker processes of a mount, mode no-open",
    workloads=KERNEL_PATH.workloads,
    systems=tuple(VARIANTS),
    ours=tuple(VARIANTS),
    rounds=8,
    reference=DEFAULT,
)

if __name__ == "__main__":
    sys.exit(bench.run(sys.argv[1:], TABLE, VARIANTS))
