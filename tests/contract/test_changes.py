"""When changes of the under storage are noticed, and what an id means before and after."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from fusecache.errors import NotFound, StaleId, UpstreamError
from tests.contract.conftest import BLOCK_SIZE, Cluster, blocks_of
from tests.support.embedded import replace, wait_until

HOUR_MS = 3_600_000


def test_listed_folder_is_not_looked_at_again_without_sync(cluster: Cluster) -> None:
    (cluster.ufs / "old").touch()
    assert set(cluster.entries()) == {b"old"}
    (cluster.ufs / "new").touch()
    assert set(cluster.entries()) == {b"old"}
    assert set(cluster.entries(sync_interval_ms=0)) == {b"old", b"new"}
    assert set(cluster.entries()) == {b"old", b"new"}


def test_folder_never_listed_is_listed_once(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    (cluster.ufs / "folder" / "file").touch()
    cluster.stat("folder")
    assert set(cluster.entries("folder")) == {b"file"}


def test_new_name_in_a_listed_folder_is_found_by_status(cluster: Cluster) -> None:
    cluster.entries()
    (cluster.ufs / "new").touch()
    assert cluster.stat("new").name == b"new"
    assert set(cluster.entries()) == {b"new"}


def test_absent_name_stays_absent_until_synchronised(cluster: Cluster) -> None:
    for _ in range(100):
        # A real master notes an absence in the background, a moment after it has answered.
        with pytest.raises(NotFound):
            cluster.stat("late")
    (cluster.ufs / "late").touch()
    for interval_ms in (-1, HOUR_MS):
        with pytest.raises(NotFound):
            cluster.stat("late", interval_ms)
    assert cluster.stat("late", 0).name == b"late"
    assert cluster.stat("late").name == b"late"


def test_absent_name_is_found_after_its_folder_was_synchronised(cluster: Cluster) -> None:
    for _ in range(100):
        # A real master notes an absence in the background, a moment after it has answered.
        with pytest.raises(NotFound):
            cluster.stat("late")
    (cluster.ufs / "late").touch()
    cluster.entries(sync_interval_ms=0)
    assert cluster.stat("late").name == b"late"


def test_changed_file_keeps_its_old_status_without_sync(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    before = cluster.stat("file")
    replace(cluster.ufs / "file", b"22")
    assert cluster.stat("file") == before


def test_changed_file_gets_a_new_id_on_sync(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    before = cluster.stat("file")
    replace(cluster.ufs / "file", b"22")
    after = cluster.stat("file", 0)
    assert after.length == 2
    assert after.file_id != before.file_id
    assert cluster.stat("file") == after
    with pytest.raises(StaleId):
        cluster.client.get_file_path(before.file_id, cluster.budget())
    with pytest.raises(StaleId):
        cluster.client.get_file_info(before.file_id, cluster.budget())


def test_changed_time_alone_gets_a_new_id_on_sync(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    before = cluster.stat("file")
    os.utime(cluster.ufs / "file", ns=(0, 10**18))
    after = cluster.stat("file", 0)
    assert after.file_id != before.file_id
    assert after.mtime_ms == 10**12


def test_same_length_and_time_keep_the_id(cluster: Cluster) -> None:
    path = cluster.ufs / "file"
    path.write_bytes(b"old")
    before = cluster.stat("file")
    was = path.stat()
    path.write_bytes(b"new")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert cluster.stat("file", 0) == before


def test_changed_mode_keeps_the_id(cluster: Cluster) -> None:
    path = cluster.ufs / "file"
    path.write_bytes(b"1")
    before = cluster.stat("file")
    path.chmod(0o604)
    assert cluster.stat("file") == before
    assert cluster.stat("file", 0) == before._replace(mode=0o604)


def test_changed_mode_of_a_folder_keeps_the_id(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir(mode=0o755)
    before = cluster.stat("folder")
    (cluster.ufs / "folder").chmod(0o705)
    assert cluster.stat("folder", 0) == before._replace(mode=0o705)


def test_removed_file_is_there_until_synchronised(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    before = cluster.stat("file")
    (cluster.ufs / "file").unlink()
    assert cluster.stat("file") == before
    with pytest.raises(NotFound):
        cluster.stat("file", 0)
    with pytest.raises(NotFound):
        cluster.stat("file")
    with pytest.raises(StaleId):
        cluster.client.get_file_path(before.file_id, cluster.budget())


def test_removed_tree_is_gone_with_all_below_when_its_parent_is_synchronised(cluster: Cluster) -> None:
    (cluster.ufs / "a" / "b").mkdir(parents=True)
    (cluster.ufs / "a" / "b" / "file").touch()
    status = cluster.stat("a/b/file")
    shutil.rmtree(cluster.ufs / "a")
    assert cluster.entries(sync_interval_ms=0) == {}
    with pytest.raises(NotFound):
        cluster.stat("a/b/file")
    with pytest.raises(StaleId):
        cluster.client.get_file_path(status.file_id, cluster.budget())


def test_listing_with_sync_adds_changes_and_removes(cluster: Cluster) -> None:
    for name in ("same", "changed", "removed"):
        (cluster.ufs / name).write_bytes(b"1")
    before = cluster.entries()
    replace(cluster.ufs / "changed", b"22")
    (cluster.ufs / "removed").unlink()
    (cluster.ufs / "added").touch()
    after = cluster.entries(sync_interval_ms=0)
    assert set(after) == {b"same", b"changed", b"added"}
    assert after[b"same"] == before[b"same"]
    assert after[b"changed"].file_id != before[b"changed"].file_id


def test_listing_with_sync_does_not_go_into_subfolders(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    (cluster.ufs / "folder" / "old").touch()
    cluster.entries("folder")
    (cluster.ufs / "folder" / "new").touch()
    cluster.entries(sync_interval_ms=0)
    assert set(cluster.entries("folder")) == {b"old"}


def test_status_of_a_folder_with_sync_does_not_list_it(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    cluster.entries("folder")
    (cluster.ufs / "folder" / "new").touch()
    cluster.stat("folder", 0)
    assert cluster.entries("folder") == {}


@pytest.mark.parametrize("first", ["file", "folder"])
def test_file_and_folder_replace_each_other_on_sync(cluster: Cluster, first: str) -> None:
    path = cluster.ufs / "x"

    def make(kind: str) -> None:
        if kind == "file":
            path.write_bytes(b"1")
        else:
            path.mkdir()
            (path / "inside").touch()

    make(first)
    before = cluster.entries()[b"x"]
    assert before.folder == (first == "folder")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make("folder" if first == "file" else "file")
    after = cluster.entries(sync_interval_ms=0)[b"x"]
    assert after.folder == (first == "file")
    assert after.file_id != before.file_id


def test_interval_looks_again_only_when_the_last_look_is_older(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    before = cluster.entries(sync_interval_ms=0)[b"file"]
    replace(cluster.ufs / "file", b"22")
    assert cluster.entries(sync_interval_ms=HOUR_MS)[b"file"] == before
    # The listing counts as a look at each child.
    assert cluster.stat("file", HOUR_MS) == before
    time.sleep(0.01)
    assert cluster.stat("file", 1).length == 2


# -- bytes under an id -------------------------------------------------------------------------------------


def test_unnoticed_change_mixes_old_and_new_under_one_id(cluster: Cluster) -> None:
    path = cluster.ufs / "file"
    path.write_bytes(b"a" * 2 * BLOCK_SIZE)
    first, second = blocks_of(cluster.stat("file"))
    assert cluster.read(first) == b"a" * BLOCK_SIZE
    path.write_bytes(b"b" * 2 * BLOCK_SIZE)
    assert cluster.read(first) == b"a" * BLOCK_SIZE
    assert cluster.read(second) == b"b" * BLOCK_SIZE


def test_superseded_id_uncached_gives_the_new_bytes(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"old")
    (old,) = blocks_of(cluster.stat("file"))
    replace(cluster.ufs / "file", b"newer")
    (new,) = blocks_of(cluster.stat("file", 0))
    assert old.block_id != new.block_id
    assert cluster.read(old) == b"new"
    assert cluster.read(new) == b"newer"


def test_superseded_block_is_freed_but_an_open_descriptor_keeps_the_old_bytes(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"old")
    (old,) = blocks_of(cluster.stat("file"))
    assert cluster.read(old) == b"old"
    descriptor = cluster.client.open_local(old)
    assert descriptor is not None
    replace(cluster.ufs / "file", b"new")
    (new,) = blocks_of(cluster.stat("file", 0))
    assert cluster.read(new) == b"new"
    wait_until(lambda: cluster.held(old) == [False, False], timeout_s=30)
    assert os.pread(descriptor, 10, 0) == b"old"
    os.close(descriptor)
    with pytest.raises(UpstreamError):
        cluster.read(old._replace(ufs_path=None, locations=()), total_s=2)
