"""`make bench`: fusecache against alluxio-fuse, bindfs and native, in one run, on the same real Alluxio data.

One Alluxio 2.9.3 master and one block worker on this machine; every byte but the first epoch's is in that block
worker and in the page cache. For each row, after warming up, a number of rounds measures every system once, in
random order; each measurement is a process of its own (workloads.py). Ratios are taken within rounds.

Kernel-cold: before each measurement everything the kernel caches is dropped (pages, names and attributes, of
FUSE and of the local file system), then the block files that the row needs are read natively, so that the backing
pages are warm and only what a FUSE file system would have kept in the kernel is missing. Mounts and daemons live
on. The small file rows then list and stat the tree untimed, as a training job does; walk and stat rows time just
that. The first epoch finds the UFS's files on the disk, not in the page cache.

Needs root (dropping caches, mounting), Java, Maven, bindfs. Results: perf/results/NAME.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from perf import dataset, report
from perf.statistics import agree
from perf.systems import AlluxioFuse, Bindfs, Bytes, Fusecache, Native, System
from perf.workloads import ROW_BY_NAME, ROWS, Job, Row
from tests.support.mounting import sha256_tree
from tests.support.real_alluxio import RealAlluxio

ROOT = Path(__file__).resolve().parents[1]
WARM_EPOCHS = 3
MEBIBYTE = 1 << 20
ROW_LIMIT_S = 600


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags: a subset of rows and smaller data for quick trials."""
    parser = argparse.ArgumentParser(prog="python -m perf.bench", description=__doc__.splitlines()[0])
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[row.name for row in ROWS],
        choices=ROW_BY_NAME,
        metavar="ROW",
        help=f"rows to measure: {names}",
    )
    parser.add_argument("--systems", nargs="+", default=["fusecache", "alluxio-fuse", "bindfs", "native"])
    parser.add_argument("--pairs", type=int, default=5, help="rounds per row; quick rows take a multiple")
    parser.add_argument("--small-files", type=int, default=5000)
    parser.add_argument("--small-file-bytes", type=int, default=110 << 10)
    parser.add_argument("--large-bytes", type=int, default=1 << 30)
    parser.add_argument("--epoch-files", type=int, default=300, help="files a system reads in one first epoch")
    parser.add_argument("--random-reads", type=int, default=2000)
    parser.add_argument("--block-bytes", type=int, default=64 * MEBIBYTE, help="Alluxio's block size (its default)")
    parser.add_argument("--mount-flag", action="append", default=[], help="passed to fusecache mount")
    parser.add_argument("--work-dir", type=Path, help="where the data lies during the run (default: a new folder)")
    parser.add_argument("--output", type=Path, default=ROOT / "perf" / "results")
    parser.add_argument("--name", default="first-table")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


class Bench:
    """One run: the cluster, the systems, the measurements taken so far."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.rng = random.Random(options.seed)
        self.systems: list[System] = []
        self.epochs = 0
        self.results: list[dict[str, Any]] = []

    def shape(self) -> dataset.Shape:
        """How much data the options ask for; an epoch folder for every measurement of that row."""
        readers = [name for name in self.options.systems if name in ("fusecache", "alluxio-fuse")]
        epochs = (
            (WARM_EPOCHS + self.options.pairs * ROW_BY_NAME["first-epoch"].rounds) * len(readers)
            if "first-epoch" in self.options.rows
            else 0
        )
        return dataset.Shape(
            self.options.small_files,
            self.options.small_file_bytes,
            self.options.large_bytes,
            self.options.epoch_files,
            epochs,
            self.options.block_bytes,
        )

    def prepare(self, cluster: RealAlluxio, stack: ExitStack) -> None:
        """Load train/ and large/ into the block worker, start the systems, compare what they show."""
        say("loading the data into the block worker")
        loader = self.work / "loader"
        server = cluster.start_fuse(loader)
        for folder in ("train", "large"):
            sha256_tree(loader / folder)
        cluster.stop_fuse(server, loader)
        links = self.work / "blocks-by-name"
        large = dataset.link_blocks(cluster.ufs, cluster.tier_folders[0], links, self.options.block_bytes)
        self.links = links
        available: dict[str, System] = {}
        if "fusecache" in self.options.systems:
            available["fusecache"] = Fusecache(
                cluster, self.work / "mnt-fusecache", self.work / "state", self.options.mount_flag
            )
        if "alluxio-fuse" in self.options.systems:
            available["alluxio-fuse"] = AlluxioFuse(cluster, self.work / "mnt-alluxio-fuse")
        if "bindfs" in self.options.systems:
            available["bindfs"] = Bindfs(links, large, self.work / "mnt-bindfs")
        if "native" in self.options.systems:
            available["native"] = Native(links, large)
        expected = sha256_tree(cluster.ufs / "train")
        for name in self.options.systems:
            system = available[name]
            say(f"starting {name}")
            system.start(stack)
            if sha256_tree(system.root / "train") != expected:
                raise RuntimeError(f"{name} shows other bytes than the UFS holds")
            self.systems.append(system)

    def job(self, row: Row, system: System, seed: int) -> Job:
        """What the workload process is told; each first epoch gets a folder nobody has read."""
        tree = system.root / "train"
        if row.name == "first-epoch":
            tree = system.root / "epoch" / f"{self.epochs:02d}"
            self.epochs += 1
        return {
            "row": row.name,
            "tree": str(tree),
            "large": [str(path) for path in system.large],
            "seed": seed,
            "random_reads": self.options.random_reads,
        }

    def measure(self, row: Row, system: System, seed: int) -> float:
        """One measurement from a cold kernel, in the row's unit per second."""
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        dataset.warm(self.links, row.warm)
        done = subprocess.run(
            [sys.executable, "-m", "perf.workloads"],
            input=json.dumps(self.job(row, system, seed)),
            capture_output=True,
            text=True,
            timeout=ROW_LIMIT_S,
            cwd=ROOT,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{row.name} on {system.name} failed:\n{done.stderr}")
        answer = json.loads(done.stdout)
        return float(answer["work"] / answer["seconds"] / row.scale)

    def warm_up(self, row: Row, system: System) -> list[float]:
        """Until two runs agree within 10 %, or the system's limit: JIT-compiled code, filled metadata caches."""
        rates: list[float] = []
        limit = WARM_EPOCHS if row.name == "first-epoch" else system.warm_up_runs
        while len(rates) < limit:
            rates.append(self.measure(row, system, self.options.seed))
            if len(rates) >= 2 and agree(rates[-2], rates[-1]) and row.name != "first-epoch":
                break
        return rates

    def run(self, row: Row) -> None:
        """Warm every system up, then the rounds."""
        systems = [system for system in self.systems if row.name != "first-epoch" or system.reads_ufs]
        warm = {system.name: self.warm_up(row, system) for system in systems}
        before = {system.name: system.served() for system in systems}
        rates: dict[str, list[float]] = {system.name: [] for system in systems}
        for round_number in range(self.options.pairs * row.rounds):
            for system in self.rng.sample(systems, len(systems)):
                rates[system.name].append(self.measure(row, system, self.options.seed + 100 + round_number))
        served = {system.name: delta(before[system.name], system.served()) for system in systems}
        agreed = {name: len(runs) >= 2 and agree(runs[-2], runs[-1]) for name, runs in warm.items()}
        self.results.append({"row": row.name, "rates": rates, "warm_up": warm, "agreed": agreed, "served": served})
        say(
            f"{row.title}: "
            + ", ".join(f"{name} {sorted(r)[len(r) // 2]:,.0f} {row.unit}" for name, r in rates.items())
        )

    def outcome(self, shape: dataset.Shape) -> report.Outcome:
        """Everything measured so far, and what it depends on."""
        return {
            "machine": machine(),
            "shape": shape._asdict(),
            "pairs": self.options.pairs,
            "systems": {system.name: system.setup for system in self.systems},
            "rows": self.results,
        }


def delta(before: Bytes | None, after: Bytes | None) -> dict[str, float] | None:
    """Bytes served during a row."""
    if before is None or after is None:
        return None
    return {"local_block": after.local_block - before.local_block, "elsewhere": after.elsewhere - before.elsewhere}


def say(text: str) -> None:
    """Progress, with the time since start."""
    print(f"[{time.monotonic() - START:6.0f} s] {text}", flush=True)


START = time.monotonic()


def machine() -> dict[str, str]:
    """What the figures depend on."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": f"{os.cpu_count()} x {cpu.partition(':')[2].strip()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        # Far above the number of cores: something else was running, and the rates are too low.
        "load": f"{os.getloadavg()[1]:.1f}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def main(argv: Sequence[str]) -> int:
    """Prepare, measure, report."""
    options = arguments(argv)
    if os.geteuid() != 0:
        print("bench: needs root, to drop the kernel's caches between measurements", file=sys.stderr)
        return 1
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="fusecache-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, work)
    shape = bench.shape()
    total = shape.small_files * shape.small_file_bytes + shape.large_bytes
    total += shape.epochs * shape.epoch_files * shape.small_file_bytes
    # Ended by a signal, it still has to unmount and to stop its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    text = ""
    try:
        with ExitStack() as stack:
            say(f"starting Alluxio in {work}")
            cluster = stack.enter_context(
                RealAlluxio(
                    work / "alluxio",
                    block_workers=1,
                    block_size_bytes=shape.block_bytes,
                    tier_quota_bytes=max(2 * total, 1 << 30),
                )
            )
            dataset.make(cluster.ufs, shape, options.seed)
            bench.prepare(cluster, stack)
            for row in ROWS:
                if row.name in options.rows:
                    bench.run(row)
                    # After each row, so that a run that is ended early has shown something.
                    text = report.write(bench.outcome(shape), options.output, options.name)
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
