"""One folder of a million entries through a mount: `python -m tests.large_folder --help`.

    python -m tests.large_folder                    1,000,000 entries, mode no-open
    python -m tests.large_folder --entries 100000 --open-mode classic

An embedded server serves a folder of empty files. A first process lists it, then as many as asked for list it at once
(F17), while another one reads a small file of another folder over and over. Checked: every name once, in each listing;
one ListStatus and not one call per file; the attributes of some. Printed: times, resident memory, the longest of the
other reader's calls. Exit code 1 when anything was wrong. Too long for an everyday test run.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from tests.t4_mount.board import Board
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount
from tests.t4_mount.modes import MODES

MEBIBYTE = 1 << 20
STATS = 1000
CONTENT = b"another folder's file"
PATIENCE_S = 1800.0


class Listing(NamedTuple):
    """What one process saw."""

    entries: int
    digest: int
    """Of all names, in whatever order they came."""
    took_s: float


LISTER = """
import os, sys, time, zlib
began = time.monotonic()
names = [entry.name for entry in os.scandir(sys.argv[1])]
took_s = time.monotonic() - began
print(len(names), sum(zlib.crc32(name.encode()) for name in names), took_s)
"""
"""As `ls` lists, without a look at the entries; a small process, because many of them run at once."""


def start_listing(folder: str) -> subprocess.Popen[str]:
    """A process that lists a folder once."""
    return subprocess.Popen([sys.executable, "-S", "-c", LISTER, folder], stdout=subprocess.PIPE, text=True)


def listing_of(process: subprocess.Popen[str]) -> Listing:
    """What it saw. RuntimeError when it failed."""
    printed, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"a listing ended with {process.returncode}")
    entries, digest, took_s = printed.split()
    return Listing(int(entries), int(digest), float(took_s))


class OtherReader:
    """Reads a file of another folder, past the kernel's cache of its pages, until it is stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.calls = 0
        self.longest_s = 0.0
        self.wrong: list[str] = []

    def __enter__(self) -> OtherReader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        while not self._stop.is_set():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            try:
                content = os.pread(descriptor, 100, 0)
            except OSError as error:
                self.wrong.append(str(error))
            else:
                if content != CONTENT:
                    self.wrong.append(f"{content!r}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.calls += 1
            time.sleep(0.005)
        os.close(descriptor)


def run(mount: LiveMount, expected: Listing, processes: int, rng: random.Random) -> list[str]:
    """List, and list from many processes; what was wrong."""
    wrong: list[str] = []
    folder = str(mount.root / "large")
    memory_before = mount.resident_bytes()
    calls_before = mount.rpcs()
    with OtherReader(mount.root / "other" / "file") as other:
        first = listing_of(start_listing(folder))
        print(f"  first listing: {first.entries:,} names in {first.took_s:.1f} s", flush=True)
        again = listing_of(start_listing(folder))
        print(f"  second listing: {again.entries:,} names in {again.took_s:.1f} s", flush=True)
        began = time.monotonic()
        started = [start_listing(folder) for _ in range(processes)]
        listings = [listing_of(process) for process in started]
        print(f"  {processes} processes at once: all done after {time.monotonic() - began:.1f} s", flush=True)
        began = time.monotonic()
        for number in rng.sample(range(expected.entries), min(STATS, expected.entries)):
            status = os.stat(f"{folder}/{name_of(number)}")
            if status.st_size:
                wrong.append(f"{name_of(number)} has {status.st_size} bytes")
        print(f"  {STATS:,} stat calls by chance: {time.monotonic() - began:.2f} s", flush=True)
    for listing in (first, again, *listings):
        if listing[:2] != expected[:2]:
            wrong.append(f"a listing has {listing.entries:,} names, or others than there are")
    calls = {name: count - calls_before.get(name, 0) for name, count in mount.rpcs().items()}
    print(f"  calls to the master: { {name: round(count) for name, count in calls.items() if count} }")
    print(
        f"  resident memory {memory_before / MEBIBYTE:.0f} -> {mount.resident_bytes() / MEBIBYTE:.0f} MiB; "
        f"another folder's file: {other.calls:,} reads meanwhile, longest {other.longest_s:.3f} s"
    )
    if calls.get("GetStatus", 0) > STATS / 10:
        wrong.append("files were asked for one by one")
    return wrong + other.wrong


def name_of(number: int) -> str:
    """As data sets name their files."""
    return f"n{number:08d}.jpeg"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.large_folder", description="List one very large folder.")
    parser.add_argument("--entries", type=int, default=1_000_000, help="files of the folder (default 1,000,000)")
    parser.add_argument("--processes", type=int, default=50, help="that list it at once (default 50)")
    parser.add_argument("--open-mode", choices=MODES, default="no-open")
    chosen = parser.parse_args()
    mode = MODES[chosen.open_mode]
    with tempfile.TemporaryDirectory(prefix="fusecache-large-folder-") as name, Board(mode, Path(name)) as board:
        source = board.new_source("large")
        (source / "large").mkdir()
        (source / "other").mkdir()
        (source / "other" / "file").write_bytes(CONTENT)
        for number in range(chosen.entries):
            os.close(os.open(f"{source}/large/{name_of(number)}", os.O_CREAT | os.O_WRONLY, 0o644))
        digest = sum(zlib.crc32(name_of(number).encode()) for number in range(chosen.entries))
        expected = Listing(chosen.entries, digest, 0.0)
        print(f"{mode.name}: a folder of {chosen.entries:,} files", flush=True)
        with (
            EmbeddedProcess(source, Path(name) / "embedded") as server,
            board.own(server.url, Path(name), "--metadata-budget-s", str(PATIENCE_S)) as mount,
        ):
            wrong = run(mount, expected, chosen.processes, random.Random(1))
    for text in wrong:
        print(f"  WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
