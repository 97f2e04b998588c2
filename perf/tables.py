"""Which tables there are: their rows and titles, the workloads that measure them, and the systems compared.

A workload is one process (workloads.py) and may measure several rows one after the other, as a job would: the first
pass over small files, the second, the stat after them. That a cold row and its warm row come from one process saves
half of the run, which is spent on making the kernel cold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from perf.workloads import STAT_PASSES

SMALL = "train"
BLOCKS = "large/blocks"
ONE_BLOCK = "large/one-block"
NAMES_ONLY = ""


class Row(NamedTuple):
    """One line of a table."""

    name: str
    title: str
    unit: str
    scale: float = 1
    """Amount of work that counts as one unit."""


class Workload(NamedTuple):
    """One process that measures some rows."""

    name: str
    rows: tuple[Row, ...]
    folder: str
    """Which part of the data it reads."""
    warm: str
    """The part whose block files are read natively before; NAMES_ONLY for names and attributes."""
    rounds: int = 1
    """Rounds for each that was asked for: what takes milliseconds scatters more and costs little."""
    reads_ufs: bool = False
    """Its bytes are not in the block worker yet: only for systems that can fetch them."""


class Table(NamedTuple):
    """One report."""

    name: str
    title: str
    workloads: tuple[Workload, ...]
    systems: tuple[str, ...]
    ours: tuple[str, ...]
    """The systems that are fusecache; each is compared with every peer."""
    rounds: int
    reference: str | None = None
    """The one of ours that the others are variants of."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in order."""
        return tuple(row for workload in self.workloads for row in workload.rows)


COLD_1 = Row("small-cold-1", "small files, kernel-cold, 1 thread", "files/s")
WARM_1 = Row("small-warm-1", "small files, kernel-warm, 1 thread", "files/s")
COLD_4 = Row("small-cold-4", "small files, kernel-cold, 4 threads", "files/s")
WARM_4 = Row("small-warm-4", "small files, kernel-warm, 4 threads", "files/s")
STAT_AFTER_READ = Row("stat-after-read", f"stat after read, {STAT_PASSES} passes", "calls/s")
SEQUENTIAL_ONE_BLOCK = Row("sequential-one-block", "large file, sequential, one block, kernel-cold", "MB/s", 1e6)
SEQUENTIAL = Row("sequential", "large file, sequential, kernel-cold", "MB/s", 1e6)
SEQUENTIAL_BLOCKS = SEQUENTIAL._replace(title="large file, sequential, 64 MB blocks, kernel-cold")
RANDOM = tuple(
    Row(
        f"random-{size}k-{threads}",
        f"large file, random {size} KiB, {threads} thread{'s' if threads > 1 else ''}, kernel-cold",
        "reads/s",
    )
    for size in (4, 128)
    for threads in (1, 4)
)

FIRST = Table(
    name="first-table",
    title="fusecache against its peers, on the same real Alluxio data",
    workloads=(
        Workload("walk", (Row("walk", "walk, kernel-cold", "files/s"),), SMALL, NAMES_ONLY, rounds=3),
        Workload(
            "stat",
            (Row("stat", f"stat, {STAT_PASSES} passes after the walk", "calls/s"),),
            SMALL,
            NAMES_ONLY,
            rounds=8,
        ),
        Workload("small-1", (COLD_1, WARM_1, STAT_AFTER_READ), SMALL, SMALL, rounds=2),
        Workload("small-4", (COLD_4, WARM_4), SMALL, SMALL),
        Workload("sequential", (SEQUENTIAL,), BLOCKS, BLOCKS, rounds=3),
        Workload(
            "random-4k",
            (Row("random-4k", "large file, random 4 KiB, kernel-cold", "reads/s"),),
            BLOCKS,
            BLOCKS,
            rounds=3,
        ),
        Workload(
            "random-128k",
            (Row("random-128k", "large file, random 128 KiB, kernel-cold", "reads/s"),),
            BLOCKS,
            BLOCKS,
            rounds=3,
        ),
        Workload(
            "first-epoch",
            (Row("first-epoch", "first epoch from the UFS, list and read", "files/s"),),
            "epoch",
            NAMES_ONLY,
            rounds=3,
            reads_ufs=True,
        ),
    ),
    systems=("fusecache", "classic", "alluxio-fuse", "alluxio-fuse-permissions", "bindfs", "native"),
    ours=("fusecache", "classic"),
    rounds=5,
)

KERNEL_PATH = Table(
    name="kernel-path",
    title="The kernel path: open modes against their peers, on the same real Alluxio data",
    workloads=(
        Workload("small-1", (COLD_1, WARM_1, STAT_AFTER_READ), SMALL, SMALL),
        Workload("small-4", (COLD_4, WARM_4), SMALL, SMALL),
        Workload("sequential-one-block", (SEQUENTIAL_ONE_BLOCK,), ONE_BLOCK, ONE_BLOCK),
        Workload("sequential", (SEQUENTIAL_BLOCKS,), BLOCKS, BLOCKS),
        Workload("random", RANDOM, ONE_BLOCK, ONE_BLOCK),
    ),
    systems=(
        "no-open",
        "passthrough",
        "auto",
        "classic",
        "no-open-1-worker",
        "passthrough-1-worker",
        "alluxio-fuse",
        "alluxio-fuse-permissions",
        "bindfs",
        "native",
    ),
    ours=("no-open", "passthrough", "auto", "classic", "no-open-1-worker", "passthrough-1-worker"),
    rounds=10,
)

TABLES = {"first": FIRST, "kernel-path": KERNEL_PATH}
SETS = {
    "small-file set": ("small-cold-1", "small-warm-1", "small-cold-4", "small-warm-4"),
    "large-file set": ("sequential-one-block", "sequential", *(row.name for row in RANDOM)),
}
"""What `auto` is judged on: the rows of each set."""
STAT_ONLY = frozenset({"alluxio-fuse-permissions"})
"""Systems that differ from another one only in how a path is looked up: measured where stat is."""


def takes_part(system: str, workload: Workload) -> bool:
    """Whether a system is measured in a workload."""
    return system not in STAT_ONLY or any(row.name.startswith("stat") for row in workload.rows)


def of_setting(name: str, title: str, values: Iterable[str], reference: str) -> Table:
    """The kernel path's rows for the values of one setting, each a column; `reference` is compared with the others."""
    columns = tuple(values)
    return Table(
        name=name,
        title=title,
        workloads=KERNEL_PATH.workloads,
        systems=columns,
        ours=columns,
        rounds=5,
        reference=reference,
    )
