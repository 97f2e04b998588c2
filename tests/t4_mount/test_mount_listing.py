"""Large trees: one listing per folder, no call per file, and every name exactly once."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.live_mount import LiveMount, by_label, live_mount

pytestmark = needs_fuse

FOLDERS, FILES = 20, 5_000
ALL_FOLDERS = FOLDERS + 2
"""With the root and an empty one."""


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMount]:
    folder = tmp_path_factory.mktemp("listing")
    source = folder / "source"
    source.mkdir()
    for number in range(FOLDERS):
        below = source / f"class{number:03d}"
        below.mkdir()
        made = os.open(below, os.O_RDONLY)
        for file in range(FILES):
            os.close(os.open(f"image{file:06d}.jpg", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=made))
        os.close(made)
    (source / "empty").mkdir()
    with live_mount(source, folder) as mounted:
        yield mounted
    # 100,000 files that nobody looks at again would otherwise be kept for three test runs.
    subprocess.run(["rm", "-rf", folder / "source"], check=True)


def test_mount_listing_find_costs_one_listing_a_folder_and_no_call_a_file(mount: LiveMount) -> None:
    """User report 43: `find` with a look at every file's attributes over 100,000 files in 22 folders."""
    before = mount.rpcs()
    found = subprocess.run(
        ["find", mount.root, "-printf", "%y %s\n"], capture_output=True, check=True, env={"LC_ALL": "C"}
    ).stdout
    kinds = Counter(found.split(b"\n"))
    assert kinds[b"f 0"] == FOLDERS * FILES
    assert sum(count for line, count in kinds.items() if line.startswith(b"d ")) == ALL_FOLDERS
    after = mount.rpcs()
    assert after["ListStatus"] - before.get("ListStatus", 0) <= ALL_FOLDERS
    assert after.get("GetStatus", 0) - before.get("GetStatus", 0) <= ALL_FOLDERS, "none for files"


def test_mount_listing_a_second_find_costs_no_call_at_all(mount: LiveMount) -> None:
    os.listdir(mount.root)
    subprocess.run(["find", mount.root, "-size", "+1"], capture_output=True, check=True)
    before = mount.rpcs()
    subprocess.run(["find", mount.root, "-size", "+1"], capture_output=True, check=True)
    after = mount.rpcs()
    for method in ("GetStatus", "ListStatus"):
        assert after.get(method, 0) == before.get(method, 0)


def test_mount_listing_every_name_comes_once_whatever_the_buffer(mount: LiveMount) -> None:
    """The kernel asks for replies of different sizes, and programs go back in a listing."""
    folder = mount.root / "class007"
    expected = {f"image{file:06d}.jpg" for file in range(FILES)}
    with os.scandir(folder) as entries:
        first = [next(entries).name for _ in range(100)]
    for _ in range(3):
        names = os.listdir(folder)
        assert len(names) == FILES
        assert set(names) == expected
        assert names[:100] == first, "the order is the inodes' and does not move"
    assert len({entry.inode() for entry in os.scandir(folder)}) == FILES


def test_mount_listing_unknown_names_cost_no_call_once_listed(mount: LiveMount) -> None:
    """A data loader that probes for files that do not exist must not reach the master."""
    folder = mount.root / "class003"
    os.listdir(folder)
    before = mount.rpcs()
    for number in range(200):
        assert not os.path.exists(folder / f"missing{number}")
    after = mount.rpcs()
    for method in ("GetStatus", "ListStatus"):
        assert after.get(method, 0) == before.get(method, 0)
    assert by_label(mount.metrics(), "fusecache_metadata_lookups_total", "result")["negative_hit"] >= 200


def test_mount_listing_entries_known_are_counted(mount: LiveMount) -> None:
    """S16: df -i shows the files that the mount knows."""
    for number in range(FOLDERS):
        os.listdir(mount.root / f"class{number:03d}")
    assert os.statvfs(mount.root).f_files >= FOLDERS * FILES


def test_mount_listing_empty_folder_is_empty(mount: LiveMount) -> None:
    assert os.listdir(mount.root / "empty") == []
