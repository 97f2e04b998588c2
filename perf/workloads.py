"""What a reader does: one workload each, run as `python -m perf.workloads` in a process of its own.

The process reads one JSON object on standard input (`Job`), does the untimed part first (listing), times one or more
stretches, each of them a row of a table, and prints one JSON object: row -> what was measured. It knows paths, not
systems. Every row checks that it got every byte it asked for; whole-tree digests are compared once per system before
anything is timed.

Which rows a table has, under which titles, is in tables.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

from perf.meter import Measured, Meter

READ_SIZE_BYTES = 1 << 20
"""What one read(2) of the whole-file rows asks for."""

STAT_PASSES = 40
"""One pass takes ten milliseconds, and with twenty of them the rates of rounds still scattered by a third."""

RANDOM_KINDS = [(4 << 10, 1), (4 << 10, 4), (128 << 10, 1), (128 << 10, 4)]
"""(bytes of one read, threads) of the random rows that share one process; each has its own part of the file."""

RANDOM_LIMIT_S = 1.0
"""Of each random row. A fast system ends all its reads in some ten milliseconds, a slow one would take a minute."""
LOOK_AT_CLOCK = 16
"""Reads between two looks at the clock."""


class Job(TypedDict):
    """What a workload process is told."""

    workload: str
    tree: str
    """Folder of small files."""
    large: list[str]
    """The large file: one path, or its blocks in order."""
    seed: int
    random_reads: int
    """At most so many in a random row."""
    groups: dict[str, list[int]]
    """Roots of the process trees whose processor time counts (meter.py)."""


Rows = dict[str, Measured]
"""Row -> what was measured."""


def list_tree(folder: str) -> list[str]:
    """Every file below `folder`, in the order the file system gives."""
    return [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]


def listed_and_shuffled(job: Job) -> list[str]:
    """As a training job starts: list once, know every file's size, then visit in random order."""
    paths = list_tree(job["tree"])
    for path in paths:
        os.stat(path)
    random.Random(job["seed"]).shuffle(paths)
    return paths


def read_whole(path: str) -> int:
    """Open, read to the end, close; bytes read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        total = 0
        while piece := os.read(descriptor, READ_SIZE_BYTES):
            total += len(piece)
        return total
    finally:
        os.close(descriptor)


def in_threads(meter: Meter, shares: Sequence[Callable[[], int]], unit_bytes: int = 1) -> Measured:
    """Run each share in a thread of its own. A share returns the bytes it read; work is counted in units of bytes."""
    totals = [0] * len(shares)
    failures: list[OSError | RuntimeError] = []

    def run(index: int) -> None:
        try:
            totals[index] = shares[index]()
        except (OSError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(shares))]
    with meter.stretch() as stretch:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return stretch.measured(work=sum(totals) / unit_bytes, size_bytes=sum(totals))


def read_all(paths: Sequence[str], threads: int, meter: Meter) -> Measured:
    """Read every file with so many threads, each with its share; every byte must come."""
    measured = in_threads(meter, [partial(read_files, paths[index::threads]) for index in range(threads)])
    check(measured["size_bytes"], paths)
    return {**measured, "work": len(paths)}


def read_files(paths: Sequence[str]) -> int:
    """Each to its end; bytes read."""
    return sum(map(read_whole, paths))


def check(total_bytes: int, paths: Sequence[str]) -> None:
    """Raise when less or more was read than the files hold."""
    expected = sum(os.stat(path).st_size for path in paths)
    if total_bytes != expected:
        raise RuntimeError(f"read {total_bytes} bytes of {expected}")


def stat_all(paths: Sequence[str], meter: Meter) -> Measured:
    """os.stat of every file, in many passes."""
    with meter.stretch() as stretch:
        for _ in range(STAT_PASSES):
            for path in paths:
                os.stat(path)
    return stretch.measured(work=STAT_PASSES * len(paths), size_bytes=0)


def walk(job: Job, meter: Meter) -> Rows:
    """os.walk over a tree of which the kernel remembers nothing."""
    with meter.stretch() as stretch:
        count = len(list_tree(job["tree"]))
    return {"walk": stretch.measured(work=count, size_bytes=0)}


def stat(job: Job, meter: Meter) -> Rows:
    """os.stat of every file after a walk."""
    paths = list_tree(job["tree"])
    random.Random(job["seed"]).shuffle(paths)
    return {"stat": stat_all(paths, meter)}


def small(job: Job, meter: Meter, threads: int) -> Rows:
    """Every small file once, names and sizes known to the kernel, bytes not; then once more in another order; then
    with one thread stat of every file, whose atime the reads would have made stale."""
    paths = listed_and_shuffled(job)
    rows = {f"small-cold-{threads}": read_all(paths, threads, meter)}
    random.Random(job["seed"] + 1).shuffle(paths)
    rows[f"small-warm-{threads}"] = read_all(paths, threads, meter)
    if threads == 1:
        random.Random(job["seed"] + 2).shuffle(paths)
        rows["stat-after-read"] = stat_all(paths, meter)
    return rows


def sequential(job: Job, meter: Meter, row: str) -> Rows:
    """The large file from its first byte to its last."""
    with meter.stretch() as stretch:
        total = read_files(job["large"])
    check(total, job["large"])
    return {row: stretch.measured(work=total, size_bytes=total)}


def read_places(places: Sequence[tuple[int, int]], size_bytes: int) -> int:
    """pread at each (descriptor, offset), without advice to the kernel, for RANDOM_LIMIT_S at most; bytes read."""
    until = time.perf_counter() + RANDOM_LIMIT_S
    done = 0
    for descriptor, offset in places:
        if len(os.pread(descriptor, size_bytes, offset)) != size_bytes:
            raise RuntimeError(f"short read at {offset}")
        done += 1
        if done % LOOK_AT_CLOCK == 0 and time.perf_counter() > until:
            break
    return done * size_bytes


def random_reads(job: Job, meter: Meter, size_bytes: int) -> Rows:
    """Random aligned places of the large file, no place twice and at most half of them, one thread."""
    descriptors = [os.open(path, os.O_RDONLY) for path in job["large"]]
    try:
        places = [
            (descriptor, offset)
            for descriptor in descriptors
            for offset in range(0, os.fstat(descriptor).st_size - size_bytes + 1, size_bytes)
        ]
        chosen = random.Random(job["seed"]).sample(places, min(job["random_reads"], len(places) // 2))
        measured = in_threads(meter, [partial(read_places, chosen, size_bytes)], size_bytes)
        return {f"random-{size_bytes >> 10}k": measured}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def random_kinds(job: Job, meter: Meter) -> Rows:
    """Random reads of one file, both sizes with one and with four threads, a descriptor for each thread; each kind in
    a quarter of the file that no other kind has touched, so that all of them are kernel-cold."""
    (path,) = job["large"]
    rng = random.Random(job["seed"])
    rows: Rows = {}
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(max(threads for _, threads in RANDOM_KINDS))]
    try:
        part = os.fstat(descriptors[0]).st_size // len(RANDOM_KINDS)
        # Shuffled parts: that one comes first or last in the file must not always be the same kind's luck.
        starts = rng.sample(range(0, part * len(RANDOM_KINDS), part), len(RANDOM_KINDS))
        for (size_bytes, threads), start in zip(RANDOM_KINDS, starts, strict=True):
            places = range(-(-start // size_bytes) * size_bytes, start + part - size_bytes + 1, size_bytes)
            chosen = rng.sample(places, min(job["random_reads"], len(places) // 2))
            shares = [
                partial(read_places, [(descriptors[index], offset) for offset in chosen[index::threads]], size_bytes)
                for index in range(threads)
            ]
            rows[f"random-{size_bytes >> 10}k-{threads}"] = in_threads(meter, shares, size_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return rows


def first_epoch(job: Job, meter: Meter) -> Rows:
    """List a folder that nobody has asked for and read it in random order: the bytes come from the UFS."""
    with meter.stretch() as stretch:
        paths = listed_and_shuffled(job)
        total = read_files(paths)
    check(total, paths)
    return {"first-epoch": stretch.measured(work=len(paths), size_bytes=total)}


RUN: dict[str, Callable[[Job, Meter], Rows]] = {
    "walk": walk,
    "stat": stat,
    "small-1": lambda job, meter: small(job, meter, 1),
    "small-4": lambda job, meter: small(job, meter, 4),
    "sequential": lambda job, meter: sequential(job, meter, "sequential"),
    "sequential-one-block": lambda job, meter: sequential(job, meter, "sequential-one-block"),
    "random-4k": lambda job, meter: random_reads(job, meter, 4 << 10),
    "random-128k": lambda job, meter: random_reads(job, meter, 128 << 10),
    "random": random_kinds,
    "first-epoch": first_epoch,
}
"""Workload -> what it does."""


def main() -> int:
    """Run one job from standard input."""
    job: Job = json.load(sys.stdin)
    json.dump(RUN[job["workload"]](job, Meter(job["groups"])), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
