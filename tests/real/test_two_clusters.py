"""Fresh clusters number files and blocks from the same ids; one state folder must never mix them up."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.mounting import Mount, needs_fuse, tree_digests
from tests.support.real_alluxio import RealAlluxio

pytestmark = [needs_fuse, pytest.mark.real_cluster, pytest.mark.timeout(300)]

NAMES = [f"class_{index % 5}/{index:03d}.bin" for index in range(50)]
SIZE_BYTES = 110 * 1024


@pytest.fixture(scope="module")
def twins(wanted_and_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealAlluxio]]:
    """Two clusters with the same names and sizes and different bytes."""
    folder = tmp_path_factory.mktemp("twins")
    with (
        RealAlluxio(folder / "one", block_workers=1) as one,
        RealAlluxio(folder / "two", block_workers=1) as two,
    ):
        for number, cluster in enumerate((one, two)):
            rng = random.Random(number)
            for name in NAMES:
                path = cluster.ufs / "data" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rng.randbytes(SIZE_BYTES))
        yield [one, two]


def mount_of(cluster: RealAlluxio, mountpoint: Path, environment: Mapping[str, str]) -> Mount:
    """The data folder of a cluster, seen from its own block worker's host."""
    return Mount(
        f"alluxio://{cluster.master}/data",
        mountpoint,
        *("--node-host", cluster.local_host),
        environment=environment,
    )


def inodes(mount: Mount) -> dict[str, int]:
    """Inode number (file id + 1) of every file."""
    return {name: (mount.mountpoint / name).stat().st_ino for name in NAMES}


def test_two_clusters_mounted_together_from_one_state_folder_show_their_own_bytes(
    twins: list[RealAlluxio], tmp_path: Path, environment: Mapping[str, str]
) -> None:
    with (
        mount_of(twins[0], tmp_path / "mnt-one", environment) as one,
        mount_of(twins[1], tmp_path / "mnt-two", environment) as two,
    ):
        for _ in range(2):  # the second time from block files and stored metadata
            assert tree_digests(one.mountpoint) == tree_digests(twins[0].ufs / "data")
            assert tree_digests(two.mountpoint) == tree_digests(twins[1].ufs / "data")
        # The danger was real: both clusters use the same ids.
        assert set(inodes(one).values()) & set(inodes(two).values())


def test_two_clusters_mounted_in_turn_at_one_place_show_their_own_bytes(
    twins: list[RealAlluxio], tmp_path: Path, environment: Mapping[str, str]
) -> None:
    seen = []
    for cluster in (twins[0], twins[1], twins[0]):
        with mount_of(cluster, tmp_path / "mnt", environment) as mount:
            assert tree_digests(mount.mountpoint) == tree_digests(cluster.ufs / "data")
            seen.append(set(inodes(mount).values()))
    assert seen[0] & seen[1]
    assert seen[0] == seen[2]
