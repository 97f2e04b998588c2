"""A million look-ups that the kernel does not take back: `python -m tests.many_look_ups --help`.

    python -m tests.many_look_ups                    1,000,000 files, mode no-open
    python -m tests.many_look_ups --entries 100000 --open-mode classic

A file system whose inode numbers are handles into a table of its own keeps a row for every name that the kernel has
looked up, until the kernel sends FORGET: for as long as the node has memory to remember the name in (F17). Here inode
numbers are Alluxio's file ids, FORGET is read and dropped, and what is kept is the entries used last
(`metadata_hot_entries`). To show it, every file of a large folder is looked up once. Proven first: the kernel holds an
inode for each of them, and has sent no FORGET. Checked: attributes; the memory of each process of the mount, before and
after; that files are found as before after the kernel has forgotten them all. Exit code 1 when anything was wrong. Root
only, on a machine with 1.1 KiB of memory for each file, which the kernel takes. Too long for an everyday test run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.large_folder import MEBIBYTE, PATIENCE_S, STATS, name_of
from tests.t4_mount.board import Board
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, by_label, eventually
from tests.t4_mount.modes import MODES

FORGETS = ("FORGET", "BATCH_FORGET")


class Held(NamedTuple):
    """What a mount costs at one moment."""

    inodes: int
    """Inodes of FUSE that the kernel holds; those of other mounts too."""

    look_ups: int
    """LOOKUPs of the kernel so far."""

    forgets: int
    """Messages of the kernel so far that take look-ups back; 0 in classic mode, where nobody counts them."""

    anonymous_bytes: dict[str, int]
    """Memory of its own, of each process."""

    def grown_bytes(self, before: Held) -> int:
        """Over all processes."""
        return sum(self.anonymous_bytes.values()) - sum(before.anonymous_bytes.values())


def held(mount: LiveMount) -> Held:
    """Now. PermissionError for who may not see what the kernel holds."""
    answered = mount.gate().get("answered", {})
    look_ups = by_label(mount.metrics(), "fusecache_requests_total", "op").get("lookup", 0)
    names = {mount.pid: "supervisor" if mount.parts() else "mount"}
    names |= {part.pid: name for name, part in mount.parts().items() if part.pid is not None}
    return Held(
        inodes=inodes_of_kernel(),
        look_ups=round(look_ups),
        forgets=sum(answered.get(name, 0) for name in FORGETS),
        anonymous_bytes={name: anonymous_bytes(pid) for pid, name in names.items()},
    )


def inodes_of_kernel() -> int:
    """Inodes of all FUSE file systems of the machine. (This slab has a constructor, so it is merged with no other.)"""
    for line in Path("/proc/slabinfo").read_text().splitlines():
        name, *counts = line.split()
        if name == "fuse_inode":
            return int(counts[0])
    return 0


def anonymous_bytes(pid: int) -> int:
    """A process's resident memory, without what it shares with files, such as the store of the metadata."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"process {pid} has no memory: it has ended")


def look_up(mount: LiveMount, numbers: Iterable[int]) -> list[str]:
    """Ask for each file's attributes once; what was wrong."""
    wrong = []
    folder = mount.root / "large"
    for number in numbers:
        status = os.stat(f"{folder}/{name_of(number)}")
        if status.st_size != size_of(number):
            wrong.append(f"{name_of(number)} has {status.st_size} bytes")
    return wrong


def size_of(number: int) -> int:
    """Files are sparse: their sizes cost nothing."""
    return number % 1000


def make_files(source: Path, entries: int) -> None:
    """A folder `large` of so many files."""
    (source / "large").mkdir()
    for number in range(entries):
        descriptor = os.open(f"{source}/large/{name_of(number)}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.ftruncate(descriptor, size_of(number))
        os.close(descriptor)


def look_everything_up(mount: LiveMount, entries: int, most_bytes: int) -> list[str]:
    """What was wrong. `most_bytes`: what the processes may grow by, over all look-ups."""
    look_up(mount, [0])  # has the folder listed, which takes memory of its own
    eventually(
        lambda: mount.metrics()["fusecache_metadata_entries"] >= entries, "the folder is listed", within_s=PATIENCE_S
    )
    eventually(lambda: all(part.ready for part in mount.parts().values()), "every process of the mount has started")
    before = held(mount)
    began = time.monotonic()
    wrong = look_up(mount, range(entries))
    after = held(mount)
    print(
        f"  looked up in {time.monotonic() - began:.1f} s: {after.look_ups - before.look_ups:,} LOOKUPs, "
        f"{after.forgets - before.forgets} FORGETs; the kernel holds {after.inodes:,} inodes"
    )
    for name, now in after.anonymous_bytes.items():
        was = before.anonymous_bytes[name]
        print(
            f"  {name}: {was / MEBIBYTE:.1f} -> {now / MEBIBYTE:.1f} MiB, {(now - was) / entries:.1f} bytes a look-up"
        )
    if after.look_ups - before.look_ups < entries - 1 or after.inodes < entries:
        wrong.append("the kernel has not looked up every name, or has forgotten some: this run shows nothing")
    if after.forgets != before.forgets:
        wrong.append("the kernel sent FORGET: this run shows nothing")
    if after.grown_bytes(before) > most_bytes:
        wrong.append(f"the processes have grown by {after.grown_bytes(before):,} bytes; at most {most_bytes:,}")
    return wrong


def have_forgotten(mount: LiveMount, entries: int, rng: random.Random) -> list[str]:
    """Make the kernel forget, and ask for some again; what was wrong."""
    before = held(mount)
    Path("/proc/sys/vm/drop_caches").write_text("2")
    eventually(lambda: inodes_of_kernel() < before.inodes / 2, "the kernel forgets")
    after = held(mount)
    print(
        f"  forgotten: the kernel holds {after.inodes:,} inodes, sent {after.forgets - before.forgets:,} FORGETs; "
        f"the processes have {sum(after.anonymous_bytes.values()) / MEBIBYTE:.1f} MiB"
    )
    return look_up(mount, rng.sample(range(entries), min(STATS, entries)))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.many_look_ups", description="Look a million files up.")
    parser.add_argument("--entries", type=int, default=1_000_000, help="files of the folder (default 1,000,000)")
    parser.add_argument("--open-mode", choices=MODES, default="no-open")
    parser.add_argument("--most-mib", type=int, default=64, help="what all processes may grow by (default 64)")
    chosen = parser.parse_args()
    mode = MODES[chosen.open_mode]
    # Nothing is listed again meanwhile: what grows then grows by look-ups.
    flags = ("--refresh-s", "6h", "--metadata-budget-s", str(PATIENCE_S))
    with tempfile.TemporaryDirectory(prefix="fusecache-many-look-ups-") as name, Board(mode, Path(name)) as board:
        source = board.new_source("many")
        make_files(source, chosen.entries)
        print(f"{mode.name}: a folder of {chosen.entries:,} files", flush=True)
        with (
            EmbeddedProcess(source, Path(name) / "embedded") as server,
            board.own(server.url, Path(name), *flags) as mount,
        ):
            wrong = look_everything_up(mount, chosen.entries, chosen.most_mib * MEBIBYTE)
            wrong += have_forgotten(mount, chosen.entries, random.Random(1))
    for text in wrong[:10]:
        print(f"  WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
