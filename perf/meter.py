"""One timed stretch of a workload: seconds, and the processor time of everybody involved.

    with meter.stretch() as stretch:
        ...
    return stretch.measured(work=files, size_bytes=total)

Who is involved is found before the clock starts and read once before and once after it: the reader (this process),
and groups of process trees that the bench names: `system` (what serves the mount) and `servers` (Alluxio's master and
block worker, which a system may keep busy instead of itself).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict

from perf import processes

READER = "reader"


class Measured(TypedDict):
    """What one stretch was."""

    work: float
    """In the row's unit before scaling: files, calls, reads, bytes."""
    seconds: float
    size_bytes: int
    cpu_s: dict[str, float]
    """Processor time by group, the reader among them."""


class Stretch:
    """Filled in when its `with` block ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_s: dict[str, float] = {}

    def measured(self, *, work: float, size_bytes: int) -> Measured:
        """With what was done in it."""
        return {"work": work, "seconds": self.seconds, "size_bytes": size_bytes, "cpu_s": self.cpu_s}


class Meter:
    """Measures stretches; `groups` are the roots of process trees by name."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._groups = groups

    @contextmanager
    def stretch(self) -> Iterator[Stretch]:
        """Time the block. A process that ends within it makes the stretch fail: its time would be missing."""
        stretch = Stretch()
        members = {name: processes.trees(roots) for name, roots in self._groups.items()}
        before = {name: sum(map(processes.cpu_s, pids)) for name, pids in members.items()}
        reader = time.process_time()
        begin = time.perf_counter()
        yield stretch
        stretch.seconds = time.perf_counter() - begin
        stretch.cpu_s[READER] = time.process_time() - reader
        for name, pids in members.items():
            stretch.cpu_s[name] = sum(map(processes.cpu_s, pids)) - before[name]
