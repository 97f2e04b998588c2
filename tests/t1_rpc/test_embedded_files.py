"""Names, ids and listings of the embedded server, on the wire: what a real master was seen to answer."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusecache.embedded.server import EmbeddedServer
from fusecache.pb.alluxio.file_system_master_pb2 import (
    ALWAYS,
    NEVER,
    FreePOptions,
    FreePRequest,
    GetFileInfoPRequest,
    GetFilePathPRequest,
    GetStatusPRequest,
)
from tests.support.clocks import MovedClock
from tests.support.embedded import WireClient, common_options, embedded_server, replace


@pytest.fixture
def server(source: Path, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(source, tmp_path / "state", block_size=1000, entries_per_message=100) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[WireClient]:
    with WireClient(server.master_target) as connected:
        yield connected


def names(client: WireClient, path: bytes, **options: Any) -> list[bytes]:
    return [info.name for info in client.entries(path, **options)]


def code(failure: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    found: grpc.StatusCode = failure.value.code()
    return found


def test_root_of_a_fresh_cluster_has_id_zero(client: WireClient, source: Path) -> None:
    root = client.stat(b"/")
    assert (root.fileId, root.folder, root.name, root.path) == (0, True, b"", b"/")
    assert root.ufsPath == os.fsencode(source)


def test_first_file_and_folder_get_alluxio_ids(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"x" * 2500)
    (source / "folder").mkdir()
    info = client.stat(b"/file")
    assert info.fileId == 33554431
    assert list(info.blockIds) == [16777216, 16777217, 16777218]
    assert client.stat(b"/folder").fileId == 1


def test_file_status_has_every_field_a_reader_needs(client: WireClient, source: Path) -> None:
    path = source / "file"
    path.write_bytes(b"x" * 2500)
    path.chmod(0o4640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    info = client.stat(b"/file")
    assert (info.length, info.blockSizeBytes, info.completed, info.persisted) == (2500, 1000, True, True)
    assert (info.lastModificationTimeMs, info.mode, info.mountId) == (1_700_000_000_123, 0o640, 1)
    assert info.ufsPath == os.fsencode(path)
    assert info.persistenceState == b"PERSISTED"
    assert [(block.offset, block.blockInfo.length) for block in info.fileBlockInfos] == [
        (0, 1000),
        (1000, 1000),
        (2000, 500),
    ]
    assert info.owner
    assert info.group


def test_empty_file_has_no_blocks(client: WireClient, source: Path) -> None:
    (source / "empty").touch()
    info = client.stat(b"/empty")
    assert (info.length, list(info.blockIds), info.blockSizeBytes) == (0, [], 1000)


def test_folder_length_is_its_number_of_known_children(client: WireClient, source: Path) -> None:
    for number in range(5):
        (source / f"{number}").touch()
    assert client.stat(b"/").length == 0
    client.entries(b"/")
    assert client.stat(b"/").length == 5


def test_empty_folder_lists_as_no_message(client: WireClient, source: Path) -> None:
    (source / "empty").mkdir()
    assert client.messages(b"/empty") == []


def test_listing_is_split_into_messages_without_gap_or_repeat(client: WireClient, source: Path) -> None:
    for number in range(250):
        (source / f"{number:03}").touch()
    messages = client.messages(b"/")
    assert [len(message.fileInfos) for message in messages] == [100, 100, 50]
    assert sorted(info.name for message in messages for info in message.fileInfos) == [
        f"{number:03}".encode() for number in range(250)
    ]


def test_listing_of_exactly_one_message_sends_no_empty_one(client: WireClient, source: Path) -> None:
    for number in range(100):
        (source / f"{number:03}").touch()
    assert [len(message.fileInfos) for message in client.messages(b"/")] == [100]


def test_listing_a_file_gives_the_file(client: WireClient, source: Path) -> None:
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"1")
    assert [info.path for info in client.entries(b"/folder/file")] == [b"/folder/file"]


def test_recursive_listing_gives_all_descendants(client: WireClient, source: Path) -> None:
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "c").touch()
    (source / "d").touch()
    assert sorted(info.path for info in client.entries(b"/", recursive=True)) == [b"/a", b"/a/b", b"/a/b/c", b"/d"]


def test_load_metadata_only_sends_nothing_but_loads(client: WireClient, source: Path) -> None:
    (source / "a").touch()
    assert client.messages(b"/", loadMetadataOnly=True) == []
    assert names(client, b"/", load=NEVER) == [b"a"]


NAMES = [b"a?b", b"a#b", b"a%2Fb", b"%", b" lead", b"trail ", b"a\\b", b"a:b", b"a\nb", b"\xff\xfe", "数据".encode(),
     "é".encode(), "e\u0301".encode(), b"~x", b".hidden", b"-", b"x" * 255]  # fmt: skip


def test_names_are_served_byte_for_byte(client: WireClient, source: Path) -> None:
    for name in NAMES:
        full = os.fsencode(source) + b"/" + name
        with open(full, "wb") as file:
            file.write(name)
        info = client.stat(b"/" + name)
        assert (info.name, info.path, info.ufsPath) == (name, b"/" + name, full)
        answer = client.files.GetFilePath(GetFilePathPRequest(fileId=info.fileId), metadata=client.metadata)
        assert answer.path == b"/" + name
    assert names(client, b"/") == sorted(NAMES)


def test_malformed_path_is_an_invalid_argument(client: WireClient) -> None:
    for path in (b"", b"a", b"//a", b"/a\0b", b"/.."):
        with pytest.raises(grpc.RpcError) as failure:
            client.stat(path)
        assert code(failure) == grpc.StatusCode.INVALID_ARGUMENT, path


def test_unusual_path_is_resolved(client: WireClient, source: Path) -> None:
    (source / "a").mkdir()
    (source / "a" / "f").touch()
    for path in (b"/a/f/", b"/a//f", b"/./a/f", b"/a/../a/f"):
        assert client.stat(path).path == b"/a/f"


@pytest.mark.parametrize("path", [b"/none", b"/none/deeper", b"/" + b"x" * 300])
def test_missing_path_is_not_found(client: WireClient, path: bytes) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(path)
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as failure:
        client.entries(path)
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_path_below_a_file_is_an_invalid_argument(client: WireClient, source: Path) -> None:
    (source / "file").touch()
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/file/x")
    assert code(failure) == grpc.StatusCode.INVALID_ARGUMENT


# -- when the source is looked at --------------------------------------------------------------------------


def test_load_never_finds_nothing_that_was_not_loaded(client: WireClient, source: Path) -> None:
    (source / "file").touch()
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/file", load=NEVER)
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    assert names(client, b"/", load=NEVER) == []
    client.stat(b"/file")
    assert client.stat(b"/file", load=NEVER).length == 0


def test_options_left_out_mean_never(client: WireClient, source: Path) -> None:
    (source / "file").touch()
    with pytest.raises(grpc.RpcError) as failure:
        client.files.GetStatus(GetStatusPRequest(path=b"/file"), metadata=client.metadata)
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_listed_folder_is_not_listed_again_by_once(client: WireClient, source: Path) -> None:
    (source / "old").touch()
    assert names(client, b"/") == [b"old"]
    (source / "new").touch()
    assert names(client, b"/") == [b"old"]
    assert names(client, b"/", load=ALWAYS) == [b"new", b"old"]


def test_new_name_in_a_listed_folder_is_found_by_status(client: WireClient, source: Path) -> None:
    client.entries(b"/")
    (source / "new").touch()
    assert client.stat(b"/new").name == b"new"
    assert names(client, b"/") == [b"new"]


def test_absent_name_stays_absent_until_synchronised(client: WireClient, source: Path) -> None:
    with pytest.raises(grpc.RpcError):
        client.stat(b"/late")
    (source / "late").touch()
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/late")
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/late", sync_interval_ms=3_600_000)
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    assert client.stat(b"/late", sync_interval_ms=0).name == b"late"
    assert client.stat(b"/late").name == b"late"


def test_absent_name_is_found_after_its_folder_was_synchronised(client: WireClient, source: Path) -> None:
    with pytest.raises(grpc.RpcError):
        client.stat(b"/late")
    (source / "late").touch()
    client.entries(b"/", sync_interval_ms=0)
    assert client.stat(b"/late").name == b"late"


def test_change_goes_unnoticed_without_sync(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"1")
    before = client.stat(b"/file")
    replace(source / "file", b"222")
    (source / "gone").touch()
    client.stat(b"/gone")
    (source / "gone").unlink()
    after = client.stat(b"/file")
    assert (after.fileId, after.length) == (before.fileId, 1)
    assert client.stat(b"/gone").name == b"gone"


def test_changed_content_gets_a_new_id_on_sync(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"1")
    before = client.stat(b"/file")
    replace(source / "file", b"222")
    after = client.stat(b"/file", sync_interval_ms=0)
    assert after.length == 3
    assert after.fileId != before.fileId
    assert set(after.blockIds).isdisjoint(before.blockIds)
    with pytest.raises(grpc.RpcError) as failure:
        client.files.GetFilePath(GetFilePathPRequest(fileId=before.fileId), metadata=client.metadata)
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_changed_time_alone_gets_a_new_id_on_sync(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"1")
    before = client.stat(b"/file")
    os.utime(source / "file", ns=(0, 10**18))
    assert client.stat(b"/file", sync_interval_ms=0).fileId != before.fileId


def test_same_length_and_time_keep_the_id(client: WireClient, source: Path) -> None:
    path = source / "file"
    path.write_bytes(b"old")
    before = client.stat(b"/file")
    was = path.stat()
    path.write_bytes(b"new")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert client.stat(b"/file", sync_interval_ms=0).fileId == before.fileId


def test_changed_mode_keeps_the_id(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"1")
    before = client.stat(b"/file")
    (source / "file").chmod(0o600)
    assert client.stat(b"/file").mode == before.mode
    after = client.stat(b"/file", sync_interval_ms=0)
    assert (after.fileId, after.mode) == (before.fileId, 0o600)


def test_removed_file_is_not_found_after_sync(client: WireClient, source: Path) -> None:
    (source / "file").write_bytes(b"1")
    before = client.stat(b"/file")
    (source / "file").unlink()
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/file", sync_interval_ms=0)
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError):
        client.stat(b"/file")
    with pytest.raises(grpc.RpcError) as failure:
        client.ids.GetFileInfo(GetFileInfoPRequest(fileId=before.fileId), metadata=client.metadata)
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_listing_with_sync_adds_changes_and_removes(client: WireClient, source: Path) -> None:
    for name in ("same", "changed", "removed"):
        (source / name).write_bytes(b"1")
    (source / "tree" / "deep").mkdir(parents=True)
    (source / "tree" / "deep" / "file").touch()
    client.stat(b"/tree/deep/file")
    before = {info.name: info.fileId for info in client.entries(b"/")}
    replace(source / "changed", b"22")
    (source / "removed").unlink()
    (source / "added").touch()
    shutil.rmtree(source / "tree")
    after = {info.name: info.fileId for info in client.entries(b"/", sync_interval_ms=0)}
    assert set(after) == {b"same", b"changed", b"added"}
    assert after[b"same"] == before[b"same"]
    assert after[b"changed"] != before[b"changed"]
    assert client.stat(b"/").length == 3
    with pytest.raises(grpc.RpcError):
        client.stat(b"/tree/deep/file", load=NEVER)


def test_file_that_became_a_folder_is_one_after_sync(client: WireClient, source: Path) -> None:
    (source / "x").touch()
    client.entries(b"/")
    (source / "x").unlink()
    (source / "x").mkdir()
    (source / "x" / "inside").touch()
    assert [(info.name, info.folder) for info in client.entries(b"/", sync_interval_ms=0)] == [(b"x", True)]
    assert names(client, b"/x") == [b"inside"]


def test_folder_that_became_a_file_is_one_after_sync(client: WireClient, source: Path) -> None:
    (source / "x").mkdir()
    (source / "x" / "inside").touch()
    client.stat(b"/x/inside")
    (source / "x" / "inside").unlink()
    (source / "x").rmdir()
    (source / "x").write_bytes(b"file")
    assert client.stat(b"/x", sync_interval_ms=0).length == 4
    assert client.stat(b"/").length == 1


def test_status_of_a_folder_with_sync_does_not_list_it(client: WireClient, source: Path) -> None:
    (source / "folder").mkdir()
    client.entries(b"/folder")
    (source / "folder" / "new").touch()
    assert client.stat(b"/folder", sync_interval_ms=0).length == 0
    assert names(client, b"/folder") == []
    assert names(client, b"/folder", sync_interval_ms=0) == [b"new"]


def test_interval_looks_again_only_when_the_last_look_is_older(source: Path, tmp_path: Path) -> None:
    clock = MovedClock()
    (source / "file").write_bytes(b"1")
    with (
        embedded_server(source, tmp_path / "state", clock=clock) as running,
        WireClient(running.master_target) as client,
    ):
        before = client.entries(b"/", sync_interval_ms=5000)[0]
        replace(source / "file", b"22")
        clock.time_s += 4.9
        assert client.entries(b"/", sync_interval_ms=5000)[0].fileId == before.fileId
        # A listing counts as a look at each child.
        assert client.stat(b"/file", sync_interval_ms=5000).fileId == before.fileId
        clock.time_s += 0.2
        assert client.stat(b"/file", sync_interval_ms=5000).length == 2
        assert client.entries(b"/", sync_interval_ms=5000)[0].length == 2


def test_server_default_interval_is_used_when_a_request_names_none(source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(b"1")
    with (
        embedded_server(source, tmp_path / "state", sync_interval_ms=0) as running,
        WireClient(running.master_target) as client,
    ):
        answer = client.files.GetStatus(GetStatusPRequest(path=b"/file"), metadata=client.metadata)
        replace(source / "file", b"22")
        answer = client.files.GetStatus(GetStatusPRequest(path=b"/file"), metadata=client.metadata)
        assert answer.fileInfo.length == 2


# -- what is left out --------------------------------------------------------------------------------------


def test_special_files_are_left_out(client: WireClient, source: Path) -> None:
    (source / "file").touch()
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
    assert names(client, b"/") == [b"file"]
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/pipe")
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_links_inside_are_followed_and_others_left_out(client: WireClient, source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (source / "target").write_bytes(b"123")
    (source / "folder").mkdir()
    (source / "folder" / "inner").touch()
    (source / "to_file").symlink_to("target")
    (source / "to_folder").symlink_to(source / "folder")
    (source / "out").symlink_to(tmp_path / "outside")
    (source / "out_folder").symlink_to(tmp_path)
    (source / "broken").symlink_to("nothing")
    (source / "itself").symlink_to("itself")
    found = {info.name: (info.folder, info.length) for info in client.entries(b"/")}
    assert found == {
        b"target": (False, 3),
        b"folder": (True, 0),
        b"to_file": (False, 3),
        b"to_folder": (True, 0),
    }
    assert names(client, b"/to_folder") == [b"inner"]
    with pytest.raises(grpc.RpcError) as failure:
        client.stat(b"/out")
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_links_that_make_an_endless_tree_are_left_out(client: WireClient, source: Path) -> None:
    (source / "a").mkdir()
    (source / "b").mkdir()
    (source / "a" / "up").symlink_to("..")
    (source / "a" / "to_b").symlink_to("../b")
    (source / "b" / "to_a").symlink_to("../a")
    found = sorted(info.path for info in client.entries(b"/", recursive=True))
    assert found == [b"/a", b"/a/to_b", b"/b", b"/b/to_a"]


def test_state_folder_inside_the_source_is_left_out(source: Path) -> None:
    (source / "file").touch()
    with embedded_server(source, source / "state") as running, WireClient(running.master_target) as client:
        assert names(client, b"/") == [b"file"]


# -- by id, free -------------------------------------------------------------------------------------------


def test_unknown_ids_are_not_found(client: WireClient) -> None:
    for unknown in (12345678, -1):
        with pytest.raises(grpc.RpcError) as failure:
            client.files.GetFilePath(GetFilePathPRequest(fileId=unknown), metadata=client.metadata)
        assert code(failure) == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as failure:
            client.ids.GetFileInfo(GetFileInfoPRequest(fileId=unknown), metadata=client.metadata)
        assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_ids_answer_without_a_look_at_the_source(client: WireClient, source: Path) -> None:
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"1")
    info = client.stat(b"/folder/file")
    shutil.rmtree(source / "folder")
    assert (
        client.files.GetFilePath(GetFilePathPRequest(fileId=info.fileId), metadata=client.metadata).path
        == b"/folder/file"
    )
    answer = client.ids.GetFileInfo(GetFileInfoPRequest(fileId=info.fileId), metadata=client.metadata)
    assert answer.fileInfo == info


def test_free_of_a_full_folder_needs_recursive(client: WireClient, source: Path) -> None:
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"1")
    client.entries(b"/folder")
    with pytest.raises(grpc.RpcError) as failure:
        client.files.Free(
            FreePRequest(path=b"/folder", options=FreePOptions(commonOptions=common_options())),
            metadata=client.metadata,
        )
    assert code(failure) == grpc.StatusCode.UNKNOWN
    assert "recursive" in str(failure.value.details())
