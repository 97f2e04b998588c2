"""Names, ids and attributes."""

from __future__ import annotations

import grp
import os
import pwd
import shutil

import pytest

from fusecache.alluxio.model import FILE_SEQUENCE, block_id_of
from fusecache.errors import InvalidRequest, NotFound, StaleId
from tests.contract.conftest import BLOCK_SIZE, BLOCK_WORKERS, LOCAL_HOST, Cluster


def test_root_is_folder_zero(cluster: Cluster) -> None:
    root = cluster.client.get_status(b"/", sync_interval_ms=-1, budget=cluster.budget())
    assert (root.file_id, root.folder, root.name, root.path) == (0, True, b"", b"/")


def test_cluster_says_who_it_is_and_keeps_saying_so(cluster: Cluster) -> None:
    first = cluster.client.connect(cluster.budget())
    assert cluster.connect().connect(cluster.budget()) == first
    assert first.cluster_id
    assert first.version.startswith("2.9")


def test_every_block_worker_is_listed_with_its_address_and_capacity(cluster: Cluster) -> None:
    workers = cluster.client.block_workers(cluster.budget())
    assert len(workers) == BLOCK_WORKERS
    assert len({worker.worker_id for worker in workers}) == BLOCK_WORKERS
    assert {worker.address.host for worker in workers} == {LOCAL_HOST, "127.0.0.2"}
    assert all(worker.capacity_bytes > 0 for worker in workers)
    total = cluster.client.capacity(cluster.budget())
    assert total.capacity_bytes == sum(worker.capacity_bytes for worker in workers)
    assert 0 <= total.used_bytes <= total.capacity_bytes


def test_configuration_tells_the_block_size(cluster: Cluster) -> None:
    found = cluster.client.configuration(cluster.budget())
    assert found["alluxio.user.block.size.bytes.default"] == str(BLOCK_SIZE)
    assert found["alluxio.security.authentication.type"] == "SIMPLE"


def test_file_status_tells_what_the_under_storage_has(cluster: Cluster) -> None:
    path = cluster.ufs / "file"
    path.write_bytes(b"x" * 100)
    path.chmod(0o4640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    status = cluster.stat("file")
    assert (status.name, status.path) == (b"file", cluster.path("file"))
    assert (status.folder, status.completed, status.persisted, status.mount_point) == (False, True, True, False)
    assert (status.length, status.block_size, status.block_count) == (100, BLOCK_SIZE, 1)
    assert (status.mtime_ms, status.mode) == (1_700_000_000_123, 0o640)
    assert status.owner == pwd.getpwuid(os.geteuid()).pw_name.encode()
    assert status.group == grp.getgrgid(path.stat().st_gid).gr_name.encode()
    assert status.ufs_path == os.fsencode(path)
    assert status.mount_id == 1


def test_folder_status_tells_what_the_under_storage_has(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir(mode=0o750)
    status = cluster.stat("folder")
    assert (status.name, status.folder, status.mode) == (b"folder", True, 0o750)
    assert (status.block_count, status.length) == (0, 0)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (0, 0),
        (1, 1),
        (BLOCK_SIZE - 1, 1),
        (BLOCK_SIZE, 1),
        (BLOCK_SIZE + 1, 2),
        (3 * BLOCK_SIZE - 1, 3),
        (3 * BLOCK_SIZE, 3),
        (3 * BLOCK_SIZE + 1, 4),
    ],
)
def test_blocks_follow_from_the_file_id(cluster: Cluster, size: int, blocks: int) -> None:
    with (cluster.ufs / "file").open("wb") as file:
        file.truncate(size)
    status = cluster.stat("file")
    assert (status.length, status.block_count) == (size, blocks)
    assert status.file_id & FILE_SEQUENCE == FILE_SEQUENCE
    lengths = []
    for index in range(blocks):
        placement = cluster.client.block_placement(block_id_of(status.file_id, index), cluster.budget())
        assert placement.locations == ()
        lengths.append(placement.length)
    assert sum(lengths) == size
    assert lengths[:-1] == [BLOCK_SIZE] * (blocks - 1 if blocks else 0)


def test_ids_of_two_files_and_a_folder_differ(cluster: Cluster) -> None:
    for name in ("one", "two"):
        (cluster.ufs / name).touch()
    (cluster.ufs / "folder").mkdir()
    ids = {cluster.stat(name).file_id for name in ("one", "two", "folder")}
    assert len(ids) == 3


NAMES = [
    "a#b", "a%2Fb", "%", "a%zz", "a b", " lead", "trail ", "数据", "a:b", "a\nb", "a\tb", "a+b", "a&b=c", "q'\"",
    "a;b", "a*b", "~x", ".hidden", "-", "[x]", "x" * 255, "é", "e\u0301", "🎉",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_same_in_status_listing_and_path_by_id(cluster: Cluster, name: str) -> None:
    (cluster.ufs / name).write_bytes(b"1")
    status = cluster.stat(name)
    assert (status.name, status.path) == (os.fsencode(name), cluster.path(name))
    assert status.ufs_path == os.fsencode(cluster.ufs / name)
    assert cluster.entries() == {os.fsencode(name): status}
    assert cluster.client.get_file_path(status.file_id, cluster.budget()) == cluster.path(name)


def test_names_that_differ_only_in_unicode_form_are_two_files(cluster: Cluster) -> None:
    for name in ("é", "e\u0301"):
        (cluster.ufs / name).write_bytes(name.encode())
    found = cluster.entries()
    assert {name: status.length for name, status in found.items()} == {"é".encode(): 2, "e\u0301".encode(): 3}


def test_listing_tells_the_same_as_status(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    for size in (0, 1, BLOCK_SIZE + 1):
        (cluster.ufs / f"{size}").write_bytes(b"x" * size)
    found = cluster.entries()
    assert found == {name: cluster.stat(os.fsdecode(name)) for name in found}
    assert set(found) == {b"folder", b"0", b"1", str(BLOCK_SIZE + 1).encode()}


def test_large_folder_is_listed_whole(cluster: Cluster) -> None:
    names = {f"{number:05}".encode() for number in range(2500)}
    for name in names:
        (cluster.ufs / name.decode()).touch()
    assert set(cluster.entries()) == names


def test_empty_folder_lists_as_nothing(cluster: Cluster) -> None:
    (cluster.ufs / "empty").mkdir()
    pieces = cluster.client.list_status(cluster.path("empty"), sync_interval_ms=-1, budget=cluster.budget())
    assert list(pieces) == []


def test_listing_of_a_file_gives_the_file_which_is_no_folder_to_the_client(cluster: Cluster) -> None:
    (cluster.ufs / "file").write_bytes(b"1")
    assert [info.path for info in cluster.wire("master").entries(cluster.path("file"))] == [cluster.path("file")]
    with pytest.raises(NotFound):
        cluster.entries("file")


def test_missing_names_are_not_found(cluster: Cluster) -> None:
    for name in ("none", "none/deeper", "x" * 300):
        with pytest.raises(NotFound):
            cluster.stat(name)
        with pytest.raises(NotFound):
            cluster.entries(name)


def test_path_below_a_file_is_refused(cluster: Cluster) -> None:
    (cluster.ufs / "file").touch()
    cluster.stat("file")
    with pytest.raises(InvalidRequest):
        cluster.stat("file/x")


def test_id_answers_with_path_and_status(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    (cluster.ufs / "folder" / "file").write_bytes(b"1")
    status = cluster.stat("folder/file")
    assert cluster.client.get_file_path(status.file_id, cluster.budget()) == cluster.path("folder/file")
    assert cluster.client.get_file_info(status.file_id, cluster.budget()) == status
    # By id nothing is looked up in the under storage.
    shutil.rmtree(cluster.ufs / "folder")
    assert cluster.client.get_file_info(status.file_id, cluster.budget()) == status


def test_unknown_id_is_stale(cluster: Cluster) -> None:
    unknown = (1 << 38 << 24) | FILE_SEQUENCE
    with pytest.raises(StaleId):
        cluster.client.get_file_path(unknown, cluster.budget())
    with pytest.raises(StaleId):
        cluster.client.get_file_info(unknown, cluster.budget())
