"""Trees through the mount on real Alluxio servers, byte for byte: from the UFS, from the node's own block files,
from a block worker on another host."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.mounting import Mount, needs_fuse, tree_digests
from tests.support.real_alluxio import MEBIBYTE, RealAlluxio

pytestmark = [needs_fuse, pytest.mark.real_cluster, pytest.mark.timeout(300)]

SIZES = [0, 1, 4095, 4096, 4097, 110 * 1024, MEBIBYTE - 1, MEBIBYTE, MEBIBYTE + 1, 3 * MEBIBYTE + 77_777]
RANDOM_READS = 10_000
LONGEST_READ = 300_000


def make_tree(folder: Path, seed: int) -> None:
    """Nested folders, an empty one, awkward names, files around every border of page and block."""
    rng = random.Random(seed)
    for top in ("train", "val", "a b", "zwölf-Ä", "#hash%41"):
        inner = folder / top / "deep" / "deeper"
        inner.mkdir(parents=True)
        for index, size in enumerate(SIZES):
            (inner / f"file-{index}.bin").write_bytes(rng.randbytes(size))
    (folder / "empty").mkdir()
    many = folder / "many"
    many.mkdir()
    for index in range(500):
        (many / f"{index:04d}").write_bytes(rng.randbytes(index))


def sources(mount: Mount) -> dict[str, float]:
    """Bytes by source, as the mount itself counts them."""
    text = (mount.mountpoint / ".fusecache" / "stats").read_text()
    found = re.findall(r'^fusecache_read_bytes_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {source: float(value) for source, value in found}


def share(found: dict[str, float], source: str) -> float:
    """Part of the fetched bytes that came from one source; the read buffer only repeats what was fetched."""
    fetched = sum(size for name, size in found.items() if name != "read_buffer")
    return found[source] / fetched


def blocks(tier: Path) -> int:
    """Complete block files of a block worker."""
    return sum(entry.name.isdigit() for entry in (tier / "alluxioworker").iterdir())


def test_tree_read_from_ufs_then_local_then_remote_is_the_source_each_time(
    cluster: RealAlluxio, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    make_tree(cluster.ufs / "whole", seed=7)
    expected = tree_digests(cluster.ufs / "whole")
    source = f"alluxio://{cluster.master}/whole"
    second = cluster.hosts[1]
    assert blocks(cluster.tier_folders[1]) == 0

    # As seen from the second block worker's host: nothing is cached, so the bytes come from the UFS through it.
    with Mount(source, tmp_path / "mnt", "--node-host", second, environment=environment) as mount:
        assert tree_digests(mount.mountpoint) == expected
        assert sources(mount).get("ufs", 0) > 0
    assert blocks(cluster.tier_folders[1]) > 500

    # A new mount there: the kernel's pages are gone, the blocks are this node's. Nearly all of them: a block worker
    # may end a first read without keeping the block (seen: one block of 550, on a busy machine).
    with Mount(source, tmp_path / "mnt", "--node-host", second, environment=environment) as mount:
        assert tree_digests(mount.mountpoint) == expected
        assert share(sources(mount), "local_block") > 0.99

    # As seen from the first block worker's host: another host holds the blocks. With a state folder of its own, as
    # another machine has: listings kept from before the first read name no block worker.
    elsewhere = {**environment, "FUSECACHE_STATE_DIR": str(tmp_path / "other-state")}
    with Mount(source, tmp_path / "mnt", "--node-host", cluster.hosts[0], environment=elsewhere) as mount:
        assert tree_digests(mount.mountpoint) == expected
        assert share(sources(mount), "block_worker") > 0.99


def test_random_reads_past_the_end_too_equal_the_source(
    cluster: RealAlluxio, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    make_tree(cluster.ufs / "random", seed=8)
    rng = random.Random(9)
    names = [path.relative_to(cluster.ufs / "random") for path in (cluster.ufs / "random").rglob("*") if path.is_file()]
    with Mount(
        f"alluxio://{cluster.master}/random",
        tmp_path / "mnt",
        "--node-host",
        cluster.local_host,
        environment=environment,
    ) as mount:
        wrong = []
        for _ in range(RANDOM_READS):
            name = rng.choice(names)
            content = (cluster.ufs / "random" / name).read_bytes()
            offset = rng.randrange(len(content) + 5000)
            size = rng.randrange(1, LONGEST_READ)
            descriptor = os.open(mount.mountpoint / name, os.O_RDONLY)
            try:
                if os.pread(descriptor, size, offset) != content[offset : offset + size]:
                    wrong.append((name, offset, size))
            finally:
                os.close(descriptor)
        assert wrong == []
