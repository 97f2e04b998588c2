"""The data every system serves: made once in the UFS, loaded once into the local block worker.

    <ufs>/train/class_NNN/img_NNNNN.jpg   small files (110 KiB, as resized ImageNet photographs are)
    <ufs>/large/large.bin                 one large file
    <ufs>/epoch/NN/...                    folders of small files that are each read once, by one system

`link_blocks` shows the block files of the block worker under the names of the data set, by hard links: the same
inodes, so the peers that know nothing of Alluxio read the same bytes from the same pages. Which block is which
file is found by content, which at the same time proves that the block worker holds what the UFS holds.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import NamedTuple

FILES_PER_FOLDER = 100
COPY_BYTES = 8 << 20


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
    (ufs / "large").mkdir()
    random_file(ufs / "large" / "large.bin", shape.large_bytes, rng)
    for epoch in range(shape.epochs):
        small_files(ufs / "epoch" / f"{epoch:02d}", shape.epoch_files, shape.small_file_bytes, rng)


def digest(data: bytes) -> bytes:
    """What a block is recognised by."""
    return hashlib.blake2b(data, digest_size=16).digest()


def link_blocks(ufs: Path, tier: Path, target: Path, block_bytes: int) -> list[Path]:
    """Mirror train/ and large/ below `target` as hard links to block files; returns the large file's blocks."""
    by_content: dict[bytes, Path] = {}
    for entry in os.scandir(tier / "alluxioworker"):
        if entry.name.isdigit():
            by_content[digest(Path(entry.path).read_bytes())] = Path(entry.path)

    def link(piece: bytes, place: Path) -> Path:
        block = by_content.get(digest(piece))
        if block is None:
            raise RuntimeError(f"the local block worker does not hold the bytes of {place.relative_to(target)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(block, place)
        return place

    for path in sorted((ufs / "train").rglob("*.jpg")):
        link(path.read_bytes(), target / path.relative_to(ufs))
    pieces = []
    with (ufs / "large" / "large.bin").open("rb") as file:
        while piece := file.read(block_bytes):
            pieces.append(link(piece, target / "large" / f"block_{len(pieces):03d}"))
    return pieces


def warm(links: Path, folder: str) -> None:
    """Make what lies behind a row warm: all names and attributes, and the pages of one folder's block files."""
    for top, _, names in os.walk(links):
        for name in names:
            os.stat(os.path.join(top, name))
    if not folder:
        return
    buffer = bytearray(COPY_BYTES)
    for top, _, names in os.walk(links / folder):
        for name in names:
            with open(os.path.join(top, name), "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
