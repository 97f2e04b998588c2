"""`make bench`: fusecache against its peers and native, in one run, on the same real Alluxio data.

    python -m perf.bench --table first          the default mount against alluxio-fuse and bindfs, first epoch included
    python -m perf.bench --table kernel-path    every open mode, workers, processor time and memory, with its bars

One Alluxio 2.9.3 master and one block worker on this machine; every byte but the first epoch's is in that block
worker and in the page cache. For each workload, after warming up, a number of rounds measures every system once, in
random order; each measurement is a process of its own (workloads.py). Ratios are taken within rounds.

Kernel-cold: before each measurement everything the kernel caches is dropped (pages, names and attributes, of
FUSE and of the local file system), then the block files that the row needs are read natively, so that the backing
pages are warm and only what a FUSE file system would have kept in the kernel is missing. Mounts and daemons live
on. Systems that know nothing of Alluxio read copies of the block files, on the same file system and as warm. The
small file rows then list and stat the tree untimed, as a training job does; walk and stat rows time just that. The
first epoch finds the UFS's files on the disk, not in the page cache.

Needs root (dropping caches, mounting), Java, Maven, bindfs. Results: perf/results/NAME.json, .md and .png.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from perf import cold, dataset, processes, report
from perf.outcome import MeasuredWorkload, Outcome
from perf.statistics import agree
from perf.systems import SYSTEMS, Ground, System, SystemMaker
from perf.tables import ONE_BLOCK, TABLES, Table, Workload, takes_part
from perf.workloads import Job, Rows
from tests.support.mounting import sha256_tree
from tests.support.real_alluxio import RealAlluxio

ROOT = Path(__file__).resolve().parents[1]
WARM_EPOCHS = 3
IDLE_SETTLE_S = 3.0
MEBIBYTE = 1 << 20
DISKS = {"ext4", "xfs", "btrfs"}
"""File systems that block files may lie on here: with pages on a disk, not stacked on another file system (whose files
the kernel refuses to pass through), able to do O_DIRECT."""


def arguments(argv: Sequence[str], table: Table | None = None) -> tuple[argparse.Namespace, Table]:
    """Flags: a part of the rows or systems and smaller data for quick trials. A given table is not chosen by flag."""
    parser = argparse.ArgumentParser(description=(table.title if table else __doc__.splitlines()[0]))
    if table is None:
        parser.add_argument("--table", choices=TABLES, default="first")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows to measure, by name (default: all)")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="columns, by name (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds per workload; quick ones take a multiple (default: table's)")
    parser.add_argument("--small-files", type=int, default=5000)
    parser.add_argument("--small-file-bytes", type=int, default=110 << 10)
    parser.add_argument("--large-bytes", type=int, default=1 << 30)
    parser.add_argument("--epoch-files", type=int, default=300, help="files a system reads in one first epoch")
    parser.add_argument("--random-reads", type=int, default=8192, help="of each kind, at most")
    parser.add_argument("--block-bytes", type=int, default=64 * MEBIBYTE, help="Alluxio's block size (its default)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="seconds that the mounts are left alone at the end")
    parser.add_argument("--mount-flag", action="append", default=[], help="passed to every fusecache mount")
    parser.add_argument("--work-dir", type=Path, help="where the data lies during the run (default: a new folder)")
    parser.add_argument("--output", type=Path, default=ROOT / "perf" / "results")
    parser.add_argument("--name", help="of the result files (default: the table's)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    chosen = table or TABLES[options.table]
    for given, known in ((options.rows, [row.name for row in chosen.rows]), (options.systems, chosen.systems)):
        if unknown := set(given or ()) - set(known):
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    options.rows = options.rows or [row.name for row in chosen.rows]
    options.systems = options.systems or list(chosen.systems)
    options.rounds = options.rounds or chosen.rounds
    options.name = options.name or chosen.name
    return options, chosen


class Bench:
    """One run: the cluster, the systems, the measurements taken so far."""

    def __init__(
        self, options: argparse.Namespace, table: Table, makers: Mapping[str, SystemMaker], work: Path
    ) -> None:
        self.options = options
        self.table = table
        self.makers = makers
        self.workloads = [
            workload for workload in table.workloads if any(row.name in options.rows for row in workload.rows)
        ]
        self.work = work
        self.copies = work / "copies-of-blocks"
        self.tier = work
        self.blocks: dict[str, list[Path]] = {}
        """Folder of the data set -> its block files in the block worker's tier folder."""
        self.rng = random.Random(options.seed)
        self.systems: list[System] = []
        self.servers: list[int] = []
        self.large: dict[tuple[str, str], list[str]] = {}
        """(system, folder) -> the large file, or its blocks."""
        self.epochs = 0
        self.results: list[MeasuredWorkload] = []
        self.idle_percent: dict[str, float] = {}

    def shape(self) -> dataset.Shape:
        """How much data the options ask for; an epoch folder for every measurement of that row."""
        readers = sum(name not in ("bindfs", "native") for name in self.options.systems)
        runs = sum(WARM_EPOCHS + self.rounds(workload) for workload in self.workloads if workload.reads_ufs)
        return dataset.Shape(
            self.options.small_files,
            self.options.small_file_bytes,
            self.options.large_bytes,
            self.options.epoch_files,
            runs * readers,
            self.options.block_bytes,
        )

    def rounds(self, workload: Workload) -> int:
        """Of one workload."""
        rounds: int = self.options.rounds * workload.rounds
        return rounds

    def prepare(self, cluster: RealAlluxio, stack: ExitStack) -> None:
        """Load train/ and large/ into the block worker, start the systems, compare what they show."""
        say("loading the data into the block worker")
        loader = self.work / "loader"
        server = cluster.start_fuse(loader)
        for folder in ("train", "large"):
            sha256_tree(loader / folder)
        cluster.stop_fuse(server, loader)
        one_block = any(workload.folder == ONE_BLOCK for workload in self.workloads)
        if one_block:
            dataset.write_one_block(cluster, self.options.large_bytes, self.work / "one-block", self.options.seed)
        (self.tier,) = cluster.tier_folders
        blocks = self.options.small_files + -(-self.options.large_bytes // self.options.block_bytes) + one_block
        dataset.wait_for_blocks(self.tier, blocks)
        self.blocks = dataset.copy_blocks(cluster.ufs, self.tier, self.copies, self.options.block_bytes)
        self.servers = cluster.server_pids()
        ground = Ground(cluster, self.copies, self.work, self.options.mount_flag)
        expected = sha256_tree(cluster.ufs / "train")
        for name in self.options.systems:
            say(f"starting {name}")
            system = self.makers[name](name, ground)
            system.start(stack)
            if sha256_tree(system.place("train")) != expected:
                raise RuntimeError(f"{name} shows other bytes than the UFS holds")
            for workload in self.workloads:
                if workload.folder.startswith("large"):
                    found = sorted(system.place(workload.folder).iterdir())
                    self.large[name, workload.folder] = [str(path) for path in found]
            self.systems.append(system)

    def job(self, workload: Workload, system: System, seed: int) -> Job:
        """What the workload process is told; each first epoch gets a folder nobody has read."""
        folder = workload.folder
        if workload.reads_ufs:
            folder = f"{folder}/{self.epochs:02d}"
            self.epochs += 1
        return {
            "workload": workload.name,
            "tree": str(system.place(folder)),
            "large": self.large.get((system.name, folder), []),
            "seed": seed,
            "random_reads": self.options.random_reads,
            "groups": {"system": system.pids(workload.folder), "servers": self.servers},
        }

    def measure(self, workload: Workload, system: System, seed: int) -> Rows:
        """One measurement of all rows of a workload, from a cold kernel."""
        job = self.job(workload, system, seed)
        if system.reads_blocks:
            return cold.measure(job, self.tier, self.blocks[workload.warm] if workload.warm else [])
        copies = (self.copies / workload.warm).rglob("*") if workload.warm else []
        return cold.measure(job, self.copies, [path for path in copies if path.is_file()])

    def warm_up(self, workload: Workload, system: System) -> list[float]:
        """Until two runs agree within 10 %, or the system's limit: JIT-compiled code, filled metadata caches. Returns
        the rate of each run, the geometric mean over the workload's rows."""
        rates: list[float] = []
        limit = WARM_EPOCHS if workload.reads_ufs else system.warm_up_runs
        while len(rates) < limit:
            rows = self.measure(workload, system, self.options.seed)
            rates.append(statistics.geometric_mean(each["work"] / each["seconds"] for each in rows.values()))
            if len(rates) >= 2 and agree(rates[-2], rates[-1]) and not workload.reads_ufs:
                break
        return rates

    def run(self, workload: Workload) -> None:
        """Warm every system up, then the rounds."""
        systems = [
            system
            for system in self.systems
            if takes_part(system.name, workload) and (system.reads_blocks or not workload.reads_ufs)
        ]
        names = [system.name for system in systems]
        found = MeasuredWorkload(workload.name, {row.name: {name: [] for name in names} for row in workload.rows})
        found.warm_up_rates = {system.name: self.warm_up(workload, system) for system in systems}
        found.memory = {name: [] for name in names}
        counted: dict[str, Counter[str]] = {name: Counter() for name in names}
        for number in range(self.rounds(workload)):
            for system in self.rng.sample(systems, len(systems)):
                before = system.counters()
                for row_name, measured in self.measure(workload, system, self.options.seed + 100 + number).items():
                    found.rows[row_name][system.name].append(measured)
                after = system.counters()
                counted[system.name].update({key: after[key] - before.get(key, 0) for key in after})
                found.memory[system.name].append(processes.memory(processes.trees(system.pids(workload.folder))))
        found.counters = {name: dict(counters) for name, counters in counted.items() if counters}
        self.results.append(found)
        for row in workload.rows:
            rates = {name: statistics.median(found.rates(row, name)) for name in names}
            say(f"{row.title}: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()) + f" {row.unit}")

    def idle(self) -> None:
        """Leave all mounts alone for a while, at the same time."""
        # What the last reads have started in the background ends first.
        time.sleep(IDLE_SETTLE_S)
        folder = self.workloads[-1].folder
        pids = {system.name: processes.trees(system.pids(folder)) for system in self.systems if system.pids(folder)}
        before = {name: sum(map(processes.cpu_s, each)) for name, each in pids.items()}
        begin = time.monotonic()
        time.sleep(self.options.idle_s)
        seconds = time.monotonic() - begin
        self.idle_percent = {
            name: 100 * (sum(map(processes.cpu_s, each)) - before[name]) / seconds for name, each in pids.items()
        }

    def outcome(self, shape: dataset.Shape) -> Outcome:
        """Everything measured so far, and what it depends on."""
        return Outcome(
            about=self.table,
            machine=machine() | {"minutes": f"{(time.monotonic() - START) / 60:.0f}"},
            shape=shape._asdict(),
            systems={system.name: system.setup for system in self.systems},
            workloads=self.results,
            idle_percent=self.idle_percent,
        )


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


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder lies on."""
    done = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True)
    # What stat calls ext2/ext3 has one magic number for all three.
    return done.stdout.strip().replace("ext2/ext3", "ext4")


def run(argv: Sequence[str], table: Table | None = None, makers: Mapping[str, SystemMaker] = SYSTEMS) -> int:
    """Prepare, measure, report. Without `table` the flag --table chooses."""
    options, table = arguments(argv, table)
    if os.geteuid() != 0:
        print("bench: needs root, to drop the kernel's caches between measurements", file=sys.stderr)
        return 1
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="fusecache-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    if (kind := file_system_of(work)) not in DISKS:
        print(f"bench: {work} lies on {kind}; --work-dir must be on one of {sorted(DISKS)}", file=sys.stderr)
        return 1
    bench = Bench(options, table, makers, work)
    shape = bench.shape()
    total = shape.small_files * shape.small_file_bytes + 2 * shape.large_bytes
    total += shape.epochs * shape.epoch_files * shape.small_file_bytes
    # Ended by a signal, it still has to unmount and to stop its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
            for workload in bench.workloads:
                bench.run(workload)
                # After each workload, so that a run that is ended early has shown something.
                report.write(bench.outcome(shape), options.output, options.name)
            bench.idle()
            text = report.write(bench.outcome(shape), options.output, options.name)
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
