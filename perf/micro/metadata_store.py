"""What the metadata cache costs for 1,000,000 files: time to load, disk, memory, look-ups; and calls to the master.

    python -m perf.micro.metadata_store [--files 1000000] [--folders 1000] [--output perf/results]

The tree under test is the real one (store, listing threads, hot entries); the master is a function that makes
listings up, in pieces of 1,000 entries as a stream has them, and holds none. So the numbers are the cache's own:
no network, no protobuf. Each layout runs in a process of its own. Times of single calls are CPU time of the
calling thread, which a busy machine distorts less than the clock on the wall.

Memory is what the process holds privately (RssAnon) above an idle baseline: after imports, with the store open
and the tree running. The pages of the database file are the kernel's to drop and are not counted.

The second part runs the freshness policy of 100 agents (`Agenda`, `TokenBucket`, `FreshnessPolicy`; nothing else
decides when a folder is listed) on a clock of its own for two hours and counts ListStatus calls.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import trio

from fusecache.alluxio.model import FILE_SEQUENCE, FileStatus
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.refresher import Agenda, TokenBucket
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import ROOT, MetadataTree
from fusecache.clock import SystemClock
from fusecache.metrics import Metrics

PIECE = 1000
PAGE = 128
AGENTS = 100
SIMULATED_S = 7200.0


class MadeUpMaster:
    """`folders` folders of equally many files, named and sized like a set of photographs."""

    def __init__(self, files: int, folders: int) -> None:
        self.per_folder = files // folders
        self.folders = folders
        self.listed = 0

    def get_status(self, path: bytes, sync_interval_ms: int) -> FileStatus:
        """The mounted folder."""
        return _status(0, b"", b"/", folder=True)

    def list_folder(self, path: bytes, sync_interval_ms: int) -> Iterator[list[FileStatus]]:
        """A stream of pieces."""
        self.listed += 1
        if path == b"/":
            names = [b"n%08d" % number for number in range(self.folders)]
            yield [_status(number + 1, name, b"/" + name, folder=True) for number, name in enumerate(names)]
            return
        folder = int(path[2:])
        for start in range(0, self.per_folder, PIECE):
            yield [self._file(path, folder, n) for n in range(start, min(start + PIECE, self.per_folder))]

    def _file(self, path: bytes, folder: int, number: int) -> FileStatus:
        name = b"n%08d_%08d.JPEG" % (folder, number)
        return _status(self.folders + 1 + folder * self.per_folder + number, name, path + b"/" + name, folder=False)


def _status(container: int, name: bytes, path: bytes, *, folder: bool) -> FileStatus:
    return FileStatus(
        file_id=(container << 24) | FILE_SEQUENCE,
        name=name,
        path=path,
        folder=folder,
        completed=True,
        persisted=True,
        in_ufs_tier=False,
        mount_point=False,
        length=0 if folder else 110_000 + container % 5000,
        block_size=0 if folder else 64 << 20,
        block_count=0 if folder else 1,
        locations=() if folder else ((7_000_000_000_000_000_000 + container % 4,),),
        mtime_ms=1_700_000_000_000 + container,
        mode=0o755 if folder else 0o644,
        owner=b"alluxio",
        group=b"alluxio",
        mount_id=1,
        ufs_path=b"s3://bucket" + path,
    )


class MemoryWatch:
    """Highest private memory of this process while it runs, in bytes."""

    def __init__(self) -> None:
        self.baseline = self.highest = private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def above(self) -> int:
        """Now, above the baseline."""
        return private_bytes() - self.baseline

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.highest = max(self.highest, private_bytes())


def private_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def microseconds(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """CPU time per call."""
    started = time.thread_time()
    for argument in arguments:
        call(argument)
    return (time.thread_time() - started) / len(arguments) * 1e6


async def measure(files: int, folders: int, state: Path) -> dict[str, float]:
    """One layout, in this process."""
    master = MadeUpMaster(files, folders)
    with MetadataStore(state / "metadata", "benchmark", root_path=b"/", map_bytes=64 << 30) as store:
        tree = MetadataTree(
            store,
            root_path=b"/",
            list_folder=master.list_folder,
            get_status=master.get_status,
            policy=FreshnessPolicy(),
            clock=SystemClock(),
            rng=random.Random(1),
            metrics=Metrics(),
            limiter=trio.CapacityLimiter(8),
            on_change=lambda change: None,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            await tree.start()
            with MemoryWatch() as memory:
                found = await _measure_tree(tree, store, master, memory, files)
            nursery.cancel_scope.cancel()
    return {"files": files, "folders": folders, **found}


async def _measure_tree(
    tree: MetadataTree, store: MetadataStore, master: MadeUpMaster, memory: MemoryWatch, files: int
) -> dict[str, float]:
    started, cpu = time.perf_counter(), time.process_time()
    folders = await all_pages(tree, ROOT)
    for folder in folders:
        await tree.children(folder.inode, 0, 1)
    load_s, load_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    list_calls = master.listed
    loaded_bytes, loading_bytes = memory.above(), memory.highest - memory.baseline
    memory.highest = private_bytes()
    started, cpu = time.perf_counter(), time.process_time()
    for folder in folders:
        await tree.refresh(folder.inode, force_sync=False)
    refresh_s, refresh_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    refreshing_bytes = memory.highest - memory.baseline

    started = time.thread_time()
    known: list[tuple[int, bytes, int]] = []
    pages = 0
    for folder in folders:
        after = 0
        while page := await tree.children(folder.inode, after, PAGE):
            known.extend((folder.inode, entry.name, entry.inode) for entry in page[:: max(1, files // 400_000)])
            after = page[-1].inode
            pages += 1
    pages_per_s = pages / (time.thread_time() - started)

    random.Random(2).shuffle(known)
    sample = known[:200_000]
    names = [(parent, name) for parent, name, _ in sample]
    with store.read() as txn:
        shelves = {parent: store.folder_state(txn, parent) for parent in {parent for parent, _ in names}}
    started = time.thread_time()
    for parent, name in names:
        state = shelves[parent]
        assert state is not None
        with store.read() as txn:
            assert store.child(txn, parent, state.shelf, name) is not None
    store_us = (time.thread_time() - started) / len(names) * 1e6
    child_us = microseconds(lambda key: tree.hot_child(*key), names)
    inode_us = microseconds(tree.hot, [inode for *_, inode in sample])
    hot = names[-20_000:]
    microseconds(lambda key: tree.hot_child(*key), hot)
    hot_child_us = microseconds(lambda key: tree.hot_child(*key), hot)
    hot_inode_us = microseconds(tree.hot, [inode for *_, inode in sample[-20_000:]])
    call_us = microseconds(lambda key: _nothing(*key), hot)
    return {
        "idle_private_bytes": memory.baseline,
        "list_calls": list_calls,
        "load_s": load_s,
        "load_cpu_s": load_cpu_s,
        "refresh_unchanged_s": refresh_s,
        "refresh_unchanged_cpu_s": refresh_cpu_s,
        "disk_bytes": store.size_bytes(),
        "private_bytes_while_loading": loading_bytes,
        "private_bytes_loaded": loaded_bytes,
        "private_bytes_refreshing": refreshing_bytes,
        "store_lookups_per_s": 1e6 / store_us,
        "tree_lookup_from_lmdb_us": child_us - call_us,
        "tree_inode_from_lmdb_us": inode_us,
        "tree_lookup_hot_us": hot_child_us - call_us,
        "tree_inode_hot_us": hot_inode_us,
        "pages_of_128_per_s": pages_per_s,
    }


def _nothing(parent: int, name: bytes) -> None:
    """What the measuring loop itself costs."""


async def all_pages(tree: MetadataTree, inode: int) -> list[Any]:
    """Every entry of a folder."""
    entries: list[Any] = []
    while page := await tree.children(inode, entries[-1].inode if entries else 0, PAGE):
        entries.extend(page)
    return entries


def calls_per_minute(folders: int, policy: FreshnessPolicy, *, immutable: bool) -> float:
    """ListStatus calls a minute of AGENTS agents, each using every folder all the time; first listings apart."""
    if immutable:
        return 0.0
    rng = random.Random(3)
    rule = policy.rule_for(b"/")
    calls = 0
    # Agents decide alone, so a few of them, times what they stand for, are as good as all.
    simulated = 4
    for _ in range(simulated):
        agenda, bucket, now = Agenda(), TokenBucket(policy.refresh_calls_per_s, 0.0), 0.0
        for folder in range(folders):
            listed_at = folder / policy.refresh_calls_per_s
            agenda.set(folder, policy.refresh_at(rule, policy.fresh_until(rule, listed_at, rng.random())))
        while (due := agenda.next_at()) is not None:
            now = max(now, due)
            while wait_s := bucket.take(now):
                now += wait_s
            if now > SIMULATED_S:
                break
            chosen = agenda.pop(now)
            assert chosen is not None
            calls += now > SIMULATED_S / 2
            agenda.set(chosen, policy.refresh_at(rule, policy.fresh_until(rule, now, rng.random())))
    return calls / simulated * AGENTS / (SIMULATED_S / 2 / 60)


def simulate() -> list[dict[str, float | bool]]:
    """Master calls for 1,000,000 files laid out in few or many folders."""
    policy = FreshnessPolicy()
    return [
        {
            "folders": folders,
            "immutable": immutable,
            "calls_per_minute": calls_per_minute(folders, policy, immutable=immutable),
        }
        for folders in (1, 10, 100, 1000, 10_000)
        for immutable in (False, True)
    ]


ROWS = (
    ("load, seconds", "load_s", 1.0, "{:.1f}"),
    ("  of it CPU, seconds", "load_cpu_s", 1.0, "{:.1f}"),
    ("list all again, nothing changed, seconds", "refresh_unchanged_s", 1.0, "{:.1f}"),
    ("  of it CPU, seconds", "refresh_unchanged_cpu_s", 1.0, "{:.1f}"),
    ("ListStatus calls to load", "list_calls", 1.0, "{:.0f}"),
    ("disk, MB", "disk_bytes", 1e-6, "{:.0f}"),
    ("private memory, idle, MB", "idle_private_bytes", 1e-6, "{:.1f}"),
    ("private memory above idle: highest while loading, MB", "private_bytes_while_loading", 1e-6, "{:.1f}"),
    ("private memory above idle: loaded, MB", "private_bytes_loaded", 1e-6, "{:.1f}"),
    ("private memory above idle: highest while listing again, MB", "private_bytes_refreshing", 1e-6, "{:.1f}"),
    ("store look-ups a second, one thread", "store_lookups_per_s", 1.0, "{:,.0f}"),
    ("look-up by name, from LMDB, us", "tree_lookup_from_lmdb_us", 1.0, "{:.2f}"),
    ("look-up by name, hot, us", "tree_lookup_hot_us", 1.0, "{:.2f}"),
    ("attributes by inode, from LMDB, us", "tree_inode_from_lmdb_us", 1.0, "{:.2f}"),
    ("attributes by inode, hot, us", "tree_inode_hot_us", 1.0, "{:.2f}"),
    ("readdir pages of 128 a second", "pages_of_128_per_s", 1.0, "{:,.0f}"),
)


def report(layouts: list[dict[str, float]], calls: list[dict[str, float | bool]]) -> str:
    """Both tables as text."""
    lines: list[str] = []
    heads = [f"{layout['files']:,.0f} files, {layout['folders']:,.0f} folders" for layout in layouts]
    lines.append(f"{'':59}" + "".join(f"{head:>34}" for head in heads))
    for title, key, factor, form in ROWS:
        lines.append(f"{title:59}" + "".join(f"{form.format(layout[key] * factor):>34}" for layout in layouts))
    policy = FreshnessPolicy()
    lines.append(
        f"\nListStatus calls a minute at the master, {AGENTS} agents, all folders in use all the time\n"
        f"(refresh_s {policy.refresh_s:.0f}, at most {policy.refresh_calls_per_s:.0f} calls a second and agent; "
        "first listings not counted):"
    )
    for row in calls:
        kind = "immutable" if row["immutable"] else "refreshed"
        lines.append(f"{row['folders']:>10,} folders, {kind}: {row['calls_per_minute']:>10,.0f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both layouts in child processes, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=1000, help="folders of the second layout; the first has one")
    parser.add_argument("--output", type=Path, help="folder for metadata-store.json and .txt")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        with tempfile.TemporaryDirectory() as state:
            found = trio.run(measure, arguments.files, arguments.measure, Path(state))
        print(json.dumps(found))
        return
    layouts = []
    for folders in (1, arguments.folders):
        command = [sys.executable, "-m", "perf.micro.metadata_store", "--files", str(arguments.files)]
        child = subprocess.run([*command, "--measure", str(folders)], check=True, stdout=subprocess.PIPE)
        layouts.append(json.loads(child.stdout))
    calls = simulate()
    text = report(layouts, calls)
    print(text, end="")
    if arguments.output:
        numbers = json.dumps({"layouts": layouts, "master_calls": calls}, indent=2) + "\n"
        (arguments.output / "metadata-store.json").write_text(numbers)
        (arguments.output / "metadata-store.txt").write_text(text)


if __name__ == "__main__":
    main()
