"""What is measured: one row each, run as `python -m perf.workloads` in a process of its own.

The process reads one JSON object on standard input (`Job`), does the untimed part first (listing, first pass),
times the row, and prints one JSON object: the amount of work and the seconds it took. It knows paths, not
systems. Every row checks that it got every byte it asked for; whole-tree digests are compared once per system
before anything is timed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

READ_SIZE_BYTES = 1 << 20
"""What one read(2) of the whole-file rows asks for."""

STAT_PASSES = 40


class Job(TypedDict):
    """What a workload process is told."""

    row: str
    tree: str
    """Folder of small files."""
    large: list[str]
    """The large file: one path, or its blocks in order."""
    seed: int
    random_reads: int


class Row(NamedTuple):
    """One line of the table."""

    name: str
    title: str
    unit: str
    scale: float
    """Amount of work that counts as one unit."""
    run: Callable[[Job], tuple[float, float]]
    """Returns (work, seconds)."""
    warm: str
    """The folder whose block files are read natively before: "train", "large", or "" for names and attributes only."""
    rounds: int = 1
    """Rounds of this row for each that was asked for: rows that take milliseconds scatter more and cost little."""


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


def read_all(paths: Sequence[str], threads: int) -> float:
    """Seconds to read every file with so many threads, each with its share; every byte must come."""
    totals = [0] * threads
    failures: list[BaseException] = []

    def share(index: int) -> None:
        try:
            totals[index] = sum(read_whole(path) for path in paths[index::threads])
        except OSError as error:
            failures.append(error)

    workers = [threading.Thread(target=share, args=(index,)) for index in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    expected = sum(os.stat(path).st_size for path in paths)
    if sum(totals) != expected:
        raise RuntimeError(f"read {sum(totals)} bytes of {expected}")
    return seconds


def walk(job: Job) -> tuple[float, float]:
    """os.walk over a tree of which the kernel remembers nothing."""
    begin = time.perf_counter()
    count = len(list_tree(job["tree"]))
    return count, time.perf_counter() - begin


def stat(job: Job) -> tuple[float, float]:
    """os.stat of every file after a walk, in many passes: one takes ten milliseconds, and with twenty of them the
    rates of rounds still scattered by a third."""
    paths = list_tree(job["tree"])
    random.Random(job["seed"]).shuffle(paths)
    begin = time.perf_counter()
    for _ in range(STAT_PASSES):
        for path in paths:
            os.stat(path)
    return STAT_PASSES * len(paths), time.perf_counter() - begin


def small_cold(job: Job, threads: int) -> tuple[float, float]:
    """Every small file once; names and sizes known to the kernel, bytes not."""
    paths = listed_and_shuffled(job)
    return len(paths), read_all(paths, threads)


def small_warm(job: Job, threads: int) -> tuple[float, float]:
    """Every small file once more, in another order, right after a first pass."""
    paths = listed_and_shuffled(job)
    read_all(paths, threads)
    random.Random(job["seed"] + 1).shuffle(paths)
    return len(paths), read_all(paths, threads)


def sequential(job: Job) -> tuple[float, float]:
    """The large file from its first byte to its last."""
    begin = time.perf_counter()
    total = sum(read_whole(path) for path in job["large"])
    return total, time.perf_counter() - begin


def random_reads(job: Job, size_bytes: int) -> tuple[float, float]:
    """pread at random aligned places of the large file, no place twice, without advice to the kernel."""
    descriptors = [os.open(path, os.O_RDONLY) for path in job["large"]]
    try:
        places = [
            (descriptor, offset)
            for descriptor in descriptors
            for offset in range(0, os.fstat(descriptor).st_size - size_bytes + 1, size_bytes)
        ]
        chosen = random.Random(job["seed"]).sample(places, min(job["random_reads"], len(places)))
        begin = time.perf_counter()
        for descriptor, offset in chosen:
            if len(os.pread(descriptor, size_bytes, offset)) != size_bytes:
                raise RuntimeError(f"short read at {offset}")
        return len(chosen), time.perf_counter() - begin
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def first_epoch(job: Job) -> tuple[float, float]:
    """List a folder that nobody has asked for and read it in random order: the bytes come from the UFS."""
    begin = time.perf_counter()
    paths = listed_and_shuffled(job)
    read_all(paths, 1)
    return len(paths), time.perf_counter() - begin


ROWS = [
    Row("walk", "walk, kernel-cold", "files/s", 1, walk, "", rounds=3),
    Row("stat", f"stat, {STAT_PASSES} passes after the walk", "calls/s", 1, stat, "", rounds=5),
    Row("small-cold-1", "small files, kernel-cold, 1 thread", "files/s", 1, lambda job: small_cold(job, 1), "train"),
    Row(
        "small-warm-1",
        "small files, kernel-warm, 1 thread",
        "files/s",
        1,
        lambda job: small_warm(job, 1),
        "train",
        rounds=2,
    ),
    Row("small-cold-4", "small files, kernel-cold, 4 threads", "files/s", 1, lambda job: small_cold(job, 4), "train"),
    Row("small-warm-4", "small files, kernel-warm, 4 threads", "files/s", 1, lambda job: small_warm(job, 4), "train"),
    Row("sequential", "large file, sequential, kernel-cold", "MB/s", 1e6, sequential, "large", rounds=3),
    Row(
        "random-4k",
        "large file, random 4 KiB, kernel-cold",
        "reads/s",
        1,
        lambda job: random_reads(job, 4 << 10),
        "large",
        rounds=3,
    ),
    Row(
        "random-128k",
        "large file, random 128 KiB, kernel-cold",
        "reads/s",
        1,
        lambda job: random_reads(job, 128 << 10),
        "large",
        rounds=3,
    ),
    Row("first-epoch", "first epoch from the UFS, list and read", "files/s", 1, first_epoch, "", rounds=3),
]
ROW_BY_NAME = {row.name: row for row in ROWS}


def main() -> int:
    """Run one job from standard input."""
    job: Job = json.load(sys.stdin)
    work, seconds = ROW_BY_NAME[job["row"]].run(job)
    json.dump({"work": work, "seconds": seconds}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
