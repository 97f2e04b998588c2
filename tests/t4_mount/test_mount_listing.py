"""Large trees: one listing per folder, no call per file, and every name exactly once."""

from __future__ import annotations

import os
import subprocess
from collections import Counter

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board, Place
from tests.t4_mount.live_mount import LiveMount, by_label, eventually

pytestmark = needs_fuse

FOLDERS, FILES = 20, 1_000
ALL_FOLDERS = FOLDERS + 2
"""With the root and an empty one."""


@pytest.fixture(scope="module")
def place(board: Board) -> Place:
    place = board.place("folder", "listing")
    for number in range(FOLDERS):
        below = place.source / f"class{number:03d}"
        below.mkdir()
        made = os.open(below, os.O_RDONLY)
        for file in range(FILES):
            os.close(os.open(f"image{file:06d}.jpg", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=made))
        os.close(made)
    (place.source / "empty").mkdir()
    return place


def metadata_calls(mount: LiveMount) -> tuple[float, float]:
    """(listings, calls for one name) so far."""
    rpcs = mount.rpcs()
    return rpcs.get("ListStatus", 0), rpcs.get("GetStatus", 0)


def test_mount_listing_find_costs_one_listing_a_folder_and_no_call_a_file(place: Place) -> None:
    """User report 43: `find` with a look at every file's attributes over 20,000 files in 22 folders.

    A second one costs no call at all. S16: df -i shows the files that the mount knows then.
    """
    before = metadata_calls(place.mount)
    find = ["find", place.shown, "-printf", "%y %s\n"]
    found = subprocess.run(find, capture_output=True, check=True, env={"LC_ALL": "C"}).stdout
    kinds = Counter(found.split(b"\n"))
    assert kinds[b"f 0"] == FOLDERS * FILES
    assert sum(count for line, count in kinds.items() if line.startswith(b"d ")) == ALL_FOLDERS
    after = metadata_calls(place.mount)
    assert after[0] - before[0] <= ALL_FOLDERS
    assert after[1] - before[1] <= ALL_FOLDERS, "none for files"
    assert subprocess.run(find, capture_output=True, check=True, env={"LC_ALL": "C"}).stdout == found
    assert metadata_calls(place.mount) == after
    eventually(lambda: os.statvfs(place.shown).f_files >= FOLDERS * FILES, "df -i shows them")


def test_mount_listing_every_name_comes_once_whatever_the_buffer(place: Place) -> None:
    """The kernel asks for replies of different sizes, and programs go back in a listing."""
    folder = place.shown / "class007"
    expected = {f"image{file:06d}.jpg" for file in range(FILES)}
    with os.scandir(folder) as entries:
        first = [next(entries).name for _ in range(100)]
    for _ in range(3):
        names = os.listdir(folder)
        assert len(names) == FILES
        assert set(names) == expected
        assert names[:100] == first, "the order is the inodes' and does not move"
    assert len({entry.inode() for entry in os.scandir(folder)}) == FILES


def test_mount_listing_unknown_names_cost_no_call_once_listed(place: Place) -> None:
    """A data loader that probes for files that do not exist must not reach the master."""
    folder = place.shown / "class003"
    os.listdir(folder)
    before = metadata_calls(place.mount)
    for number in range(200):
        assert not os.path.exists(folder / f"missing{number}")
    assert metadata_calls(place.mount) == before
    assert by_label(place.mount.metrics(), "fusecache_metadata_lookups_total", "result")["negative_hit"] >= 200


def test_mount_listing_empty_folder_is_empty(place: Place) -> None:
    assert os.listdir(place.shown / "empty") == []
