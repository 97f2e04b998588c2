"""Looking for the next request before going to sleep: what it gains, and its price in processor time.

    python -m perf.micro.spin [flags of perf.bench]

In both modes behind the gate; each mode is compared with its own default. The report's processor time has what
spinning costs while traffic flows, and its last line what an idle mount costs.
"""

from __future__ import annotations

import sys

from perf import bench
from perf.systems import SystemMaker, with_flags
from perf.tables import KERNEL_PATH, Table

MICROSECONDS = (0, 50, 100)
MODES = ("no-open", "passthrough")


def variants(mode: str) -> dict[str, SystemMaker]:
    """A mount for each time."""
    return {f"{mode}, {spin} us": with_flags("--open-mode", mode, "--spin-us", str(spin)) for spin in MICROSECONDS}


def table(mode: str) -> Table:
    """The rows of the kernel path."""
    names = tuple(variants(mode))
    return Table(
        name=f"spin-{mode}",
        title=f"Spinning, mode {mode}",
        workloads=KERNEL_PATH.workloads,
        systems=names,
        ours=names,
        rounds=8,
        reference=names[0],
    )


if __name__ == "__main__":
    sys.exit(max(bench.run(sys.argv[1:], table(mode), variants(mode)) for mode in MODES))
