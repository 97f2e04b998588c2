"""Clusters beside each other, and what a cluster does not notice."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.support.mounting import needs_fuse, sha256_tree
from tests.t4_mount.live_mount import EmbeddedProcess, errno_of, live_mount
from tests.t4_mount.test_mount_versions import overwrite

pytestmark = needs_fuse

BLOCK = 64 << 10


def test_mount_clusters_with_equal_ids_never_mix_in_one_state_folder(tmp_path: Path) -> None:
    """S24: same names, same ids, same state folder, other bytes; also each mounted again where the other was."""
    for name in ("one", "two"):
        (tmp_path / name / "d").mkdir(parents=True)
        for number in range(5):
            (tmp_path / name / "d" / f"f{number}").write_bytes(f"{name} {number} ".encode() * (1000 + number))
    with (
        EmbeddedProcess(tmp_path / "one", tmp_path / "state_one") as one,
        EmbeddedProcess(tmp_path / "two", tmp_path / "state_two") as two,
    ):
        expected = {one.url: sha256_tree(tmp_path / "one"), two.url: sha256_tree(tmp_path / "two")}
        assert expected[one.url] != expected[two.url]
        with (
            live_mount(one.url, tmp_path / "m", name="a") as first,
            live_mount(two.url, tmp_path / "m", name="b") as second,
        ):
            for _ in range(2):
                assert sha256_tree(first.root) == expected[one.url]
                assert sha256_tree(second.root) == expected[two.url]
            pairs = [
                (os.stat(first.root / "d" / f"f{number}").st_ino, os.stat(second.root / "d" / f"f{number}").st_ino)
                for number in range(5)
            ]
            assert {left for left, _ in pairs} == {right for _, right in pairs}, "the ids are equal indeed"
        with (
            live_mount(two.url, tmp_path / "m", name="a") as first,
            live_mount(one.url, tmp_path / "m", name="b") as second,
        ):
            assert sha256_tree(first.root) == expected[two.url]
            assert sha256_tree(second.root) == expected[one.url]


def test_mount_clusters_window_while_a_change_is_unnoticed_ends_with_a_refresh(tmp_path: Path) -> None:
    """S04: changed behind Alluxio's back and not compared yet: stored blocks are old, others new, under one id.

    Shown here so that the window is as large as documented and no larger: a refresh ends it.
    """
    source = tmp_path / "source"
    source.mkdir()
    old, new = os.urandom(4 * BLOCK), os.urandom(4 * BLOCK)
    (source / "f").write_bytes(old)
    flags = ("--block-size-bytes", str(BLOCK))
    with (
        EmbeddedProcess(source, tmp_path / "embedded", *flags) as cluster,
        live_mount(cluster.url, tmp_path, "--sync-interval-s", "-1", "--no-zero-rpc-reads") as mount,
    ):
        descriptor = os.open(mount.root / "f", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            assert os.pread(descriptor, BLOCK, 0) == old[:BLOCK]
            overwrite(source / "f", new)
            assert os.pread(descriptor, BLOCK, 3 * BLOCK) == new[3 * BLOCK :], "not stored, not noticed"
            assert os.pread(descriptor, BLOCK, 0) == old[:BLOCK]
            mount.refresh()
            assert errno_of(lambda: os.pread(descriptor, BLOCK, 2 * BLOCK)) == errno.ESTALE
        finally:
            os.close(descriptor)
        assert (mount.root / "f").read_bytes() == new
