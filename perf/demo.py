"""`make demo`: the main job on one machine, checked. Needs no cluster, no JVM and no configuration.

Makes a small image data set (PNG files in class folders), mounts it with `fusecache mount FOLDER`, which serves it
from the embedded Alluxio-compatible server, reads every file three times in random order and compares it with its
checksum:

    first epoch   nothing is stored yet: bytes come from the folder through the block worker, which stores the blocks
    kernel-cold   the kernel's pages are dropped: bytes come from local block files, without a call to Alluxio
    kernel-warm   bytes come from the kernel's page cache; the daemon is not asked

and prints rates and where the bytes came from. Ends non-zero when a byte is wrong or anything stays mounted.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

CLASSES = ("cat", "dog", "fox", "hen", "owl")
IMAGES_PER_CLASS = 120
EDGE_PIXELS = 190
"""190 x 190 x 3 random bytes: about 108 KiB a file, as ImageNet's mean."""

FUSECACHE = (sys.executable, "-m", "fusecache")
console = Console(width=None if sys.stdout.isatty() else 110)


def png(rng: random.Random, edge: int) -> bytes:
    """An RGB image of `edge` x `edge` random pixels (PNG specification, filter type 0)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + rng.randbytes(edge * 3) for _ in range(edge))
    header = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def make_dataset(folder: Path) -> dict[str, str]:
    """Write the images; returns relative path -> sha256."""
    rng = random.Random(2026)
    checksums = {}
    names = [f"{name}/{name}_{index:04}.png" for name in CLASSES for index in range(IMAGES_PER_CLASS)]
    for name in track(names, "making a data set", console=console, disable=not console.is_terminal):
        image = png(rng, EDGE_PIXELS)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        checksums[name] = hashlib.sha256(image).hexdigest()
    return checksums


def read_all(mountpoint: Path, checksums: dict[str, str], seed: str) -> tuple[float, int, list[str]]:
    """Read every file found by walking the mount, in random order: (seconds, bytes, wrong files)."""
    found = [path for path in mountpoint.rglob("*") if path.is_file()]
    random.Random(seed).shuffle(found)
    wrong = [name for name in checksums if not (mountpoint / name).exists()]
    total = 0
    contents = []
    started = time.perf_counter()
    for path in found:
        content = path.read_bytes()
        total += len(content)
        contents.append((path, content))
    seconds = time.perf_counter() - started
    for path, content in contents:
        name = str(path.relative_to(mountpoint))
        if checksums.get(name) != hashlib.sha256(content).hexdigest():
            wrong.append(name)
    return seconds, total, wrong


def drop_pages(mountpoint: Path) -> None:
    """Make the kernel forget the mount's pages (not those of the block files below)."""
    for path in mountpoint.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bytes_by_source(mountpoint: Path) -> dict[str, float]:
    """The daemon's own count, from the mount's hidden stats file."""
    prefix = 'fusecache_read_bytes_total{source="'
    sources = {}
    for line in (mountpoint / ".fusecache/stats").read_text().splitlines():
        if line.startswith(prefix):
            source, _, value = line[len(prefix) :].partition('"} ')
            sources[source] = float(value)
    return sources


def main() -> int:
    """Run the demo; the exit code."""
    with tempfile.TemporaryDirectory(prefix="fusecache-demo-") as scratch_name:
        scratch = Path(scratch_name)
        mountpoint, folder = scratch / "mnt", scratch / "images"
        mountpoint.mkdir()
        checksums = make_dataset(folder)
        folders = ("--state-dir", str(scratch / "state"), "--runtime-dir", str(scratch / "run"))
        console.print(f"fusecache mount --daemon {folder} {mountpoint}")
        subprocess.run((*FUSECACHE, "mount", "--daemon", *folders, str(folder), str(mountpoint)), check=True)
        try:
            failed = run_rounds(mountpoint, checksums)
        finally:
            subprocess.run((*FUSECACHE, "umount", str(mountpoint)), check=True)
        if os.path.ismount(mountpoint):
            console.print(f"[red]{mountpoint} is still mounted")
            return 1
        console.print(f"unmounted; {'FAILED' if failed else 'every file had its checksum, every time'}")
        return 1 if failed else 0


def run_rounds(mountpoint: Path, checksums: dict[str, str]) -> bool:
    """Three rounds and their table; True when a file was wrong."""
    table = Table("round", "files/s", "MB/s", "kernel", "local block", "worker", "folder", "checksums")
    failed = False
    before = bytes_by_source(mountpoint)
    for name in ("first epoch", "kernel-cold", "kernel-warm"):
        if name == "kernel-cold":
            drop_pages(mountpoint)
        seconds, total, wrong = read_all(mountpoint, checksums, name)
        after = bytes_by_source(mountpoint)
        served = {source: after[source] - before.get(source, 0) for source in after}
        before = after
        kernel = max(0.0, total - sum(served.values()))
        fetched = served.get("block_worker", 0) + served.get("read_buffer", 0)
        shares = (kernel, served.get("local_block", 0), fetched, served.get("ufs", 0))
        table.add_row(
            name,
            f"{len(checksums) / seconds:,.0f}",
            f"{total / seconds / 1e6:,.0f}",
            *(f"{share / total:.0%}" for share in shares),
            f"{len(wrong)} WRONG" if wrong else f"{len(checksums)} ok",
        )
        failed = failed or bool(wrong)
    console.print(table)
    console.print("columns 4-7: share of the bytes that came from there", style="dim")
    return failed


if __name__ == "__main__":
    sys.exit(main())
