"""The data every system serves: made once in the UFS, loaded once into the local block worker.

    <ufs>/train/class_NNN/img_NNNNN.jpg   small files (110 KiB, as resized ImageNet photographs are)
    <ufs>/large/blocks/large.bin          one large file, in blocks of the cluster's size
    <ufs>/large/one-block/large.bin       another of that size, in a single block: written through Alluxio, because
                                          what Alluxio finds in the UFS gets the cluster's block size
    <ufs>/epoch/NN/...                    folders of small files that are each read once, by one system

`copy_blocks` copies the block files of the block worker under the names of the data set, for the peers that know
nothing of Alluxio. Which block is which file is found by content, which at the same time proves that the block worker
holds what the UFS holds. Copies, not hard links: a block file with a second name could be written through that name,
so it is never passed through to the kernel.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tests.support.real_alluxio import RealAlluxio

FILES_PER_FOLDER = 100
COPY_BYTES = 8 << 20
LARGE = "large.bin"
COPY_LIMIT_S = 300
STORE_S = 60.0
POLL_S = 0.2


class Shape(NamedTuple):
    """How much data."""

    small_files: int
    small_file_bytes: int
    large_bytes: int
    epoch_files: int
    epochs: int
    block_bytes: int


def random_file(path: Path, size_bytes: int, rng: random.Random) -> None:
    """Bytes that no layer can compress or share."""
    with path.open("wb") as file:
        for start in range(0, size_bytes, COPY_BYTES):
            file.write(rng.randbytes(min(COPY_BYTES, size_bytes - start)))


def small_files(folder: Path, count: int, size_bytes: int, rng: random.Random) -> None:
    """`count` files in class folders of a hundred."""
    for index in range(count):
        parent = folder / f"class_{index // FILES_PER_FOLDER:03d}"
        if index % FILES_PER_FOLDER == 0:
            parent.mkdir(parents=True)
        random_file(parent / f"img_{index:05d}.jpg", size_bytes, rng)


def make(ufs: Path, shape: Shape, seed: int) -> None:
    """Write the whole data set."""
    rng = random.Random(seed)
    small_files(ufs / "train", shape.small_files, shape.small_file_bytes, rng)
    for folder in ("blocks", "one-block"):
        (ufs / "large" / folder).mkdir(parents=True)
    random_file(ufs / "large" / "blocks" / LARGE, shape.large_bytes, rng)
    for epoch in range(shape.epochs):
        small_files(ufs / "epoch" / f"{epoch:02d}", shape.epoch_files, shape.small_file_bytes, rng)


def write_one_block(cluster: RealAlluxio, size_bytes: int, scratch: Path, seed: int) -> None:
    """The large file of a single block: into the local block worker and the UFS at once. Alluxio must have seen the
    folder, by a listing."""
    random_file(scratch, size_bytes, random.Random(seed + 1))
    properties = {
        "alluxio.user.block.size.bytes.default": str(size_bytes),
        "alluxio.user.file.writetype.default": "CACHE_THROUGH",
    }
    cluster.run(
        *("alluxio.cli.fs.FileSystemShell", "copyFromLocal", str(scratch), f"/large/one-block/{LARGE}"),
        properties=cluster.properties() | properties,
        timeout_s=COPY_LIMIT_S,
    )
    scratch.unlink()


def wait_for_blocks(tier: Path, count: int) -> None:
    """Until the block worker has so many complete blocks: it stores what was read in the background."""
    deadline = time.monotonic() + STORE_S
    while (found := sum(entry.name.isdigit() for entry in os.scandir(tier / "alluxioworker"))) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the local block worker holds {found} blocks of {count} after {STORE_S:.0f} s")
        time.sleep(POLL_S)


def copy_blocks(ufs: Path, tier: Path, target: Path, block_bytes: int) -> dict[str, list[Path]]:
    """Mirror train/ and large/ below `target` as copies of block files; a large file as a folder of its blocks.

    Returns the block files of each folder of the data set ("train", "large/blocks", "large/one-block"). RuntimeError
    when the block worker does not hold some bytes of the UFS."""
    by_content: dict[tuple[int, bytes], Path] = {}
    for entry in os.scandir(tier / "alluxioworker"):
        if entry.name.isdigit():
            with open(entry.path, "rb") as file:
                by_content[digest(file, sys.maxsize)] = Path(entry.path)
    blocks: dict[str, list[Path]] = {}

    def copy(source: BinaryIO, most_bytes: int, folder: str, place: Path) -> int:
        content = digest(source, most_bytes)
        if content not in by_content:
            raise RuntimeError(f"the local block worker does not hold the bytes of {place.relative_to(target)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(by_content[content], place)
        blocks.setdefault(folder, []).append(by_content[content])
        return content[0]

    for path in sorted((ufs / "train").rglob("*.jpg")):
        with path.open("rb") as file:
            copy(file, sys.maxsize, "train", target / path.relative_to(ufs))
    for path in sorted((ufs / "large").rglob(LARGE)):
        folder = path.parent.relative_to(ufs)
        most_bytes = sys.maxsize if folder.name == "one-block" else block_bytes
        done = 0
        with path.open("rb") as file:
            while done < path.stat().st_size:
                done += copy(file, most_bytes, str(folder), target / folder / f"block_{done // most_bytes:03d}")
    return blocks


def digest(file: BinaryIO, most_bytes: int) -> tuple[int, bytes]:
    """What a block is recognised by: the length and a hash of the next bytes of a file."""
    hashed = hashlib.blake2b(digest_size=16)
    done = 0
    while done < most_bytes and (piece := file.read(min(COPY_BYTES, most_bytes - done))):
        hashed.update(piece)
        done += len(piece)
    return done, hashed.digest()


def warm_names(folder: Path) -> None:
    """Make names and attributes below a folder warm."""
    for top, _, names in os.walk(folder):
        for name in names:
            os.stat(os.path.join(top, name))


def warm_pages(files: Iterable[Path]) -> None:
    """Read files to their end."""
    buffer = bytearray(COPY_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
