"""Clusters beside each other, and what a cluster does not notice."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.support.mounting import needs_fuse, sha256_tree
from tests.t4_mount.board import BLOCK, Board, started
from tests.t4_mount.live_mount import EmbeddedProcess, errno_of
from tests.t4_mount.test_mount_versions import overwrite

pytestmark = needs_fuse
shared_mounts = started("unsynced")


def test_mount_clusters_with_equal_ids_never_mix_in_one_state_folder(board: Board, tmp_path: Path) -> None:
    """S24: same names, same ids, same state folder, other bytes; also each mounted again where the other was."""
    folders = [board.new_source(name) for name in ("one", "two")]
    for folder in folders:
        (folder / "d").mkdir()
        for number in range(5):
            (folder / "d" / f"f{number}").write_bytes(f"{folder.name} {number} ".encode() * (1000 + number))
    with (
        EmbeddedProcess(folders[0], tmp_path / "state_one") as one,
        EmbeddedProcess(folders[1], tmp_path / "state_two") as two,
    ):
        expected = {one.url: sha256_tree(one.folder), two.url: sha256_tree(two.folder)}
        assert expected[one.url] != expected[two.url]
        with (
            board.own(one.url, tmp_path / "m", name="a") as first,
            board.own(two.url, tmp_path / "m", name="b") as second,
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
            board.own(two.url, tmp_path / "m", name="a") as first,
            board.own(one.url, tmp_path / "m", name="b") as second,
        ):
            assert sha256_tree(first.root) == expected[two.url]
            assert sha256_tree(second.root) == expected[one.url]


def test_mount_clusters_window_while_a_change_is_unnoticed_ends_with_a_refresh(board: Board) -> None:
    """S04: changed behind Alluxio's back and not compared yet: stored blocks are old, others new, under one id.

    Shown here so that the window is as large as documented and no larger: a refresh ends it.
    """
    place = board.place("unsynced", "window")
    old, new = os.urandom(4 * BLOCK), os.urandom(4 * BLOCK)
    (place.source / "f").write_bytes(old)
    descriptor = os.open(place.shown / "f", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        assert os.pread(descriptor, BLOCK, 0) == old[:BLOCK]
        overwrite(place.source / "f", new)
        assert os.pread(descriptor, BLOCK, 3 * BLOCK) == new[3 * BLOCK :], "not stored, not noticed"
        assert os.pread(descriptor, BLOCK, 0) == old[:BLOCK]
        place.refresh()
        assert errno_of(lambda: os.pread(descriptor, BLOCK, 2 * BLOCK)) == errno.ESTALE
    finally:
        os.close(descriptor)
    assert (place.shown / "f").read_bytes() == new
