"""Bytes of the embedded server: block files, caching while reading, links, and what happens when files change."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from fusecache.embedded.server import EmbeddedServer
from fusecache.pb.alluxio.block_master_pb2 import GetBlockInfoPRequest
from fusecache.pb.alluxio.block_worker_pb2 import (
    FAILURE,
    PARTIAL_FAILURE,
    SUCCESS,
    Block,
    CacheRequest,
    LoadRequest,
    LoadResponse,
    OpenLocalBlockRequest,
    ReadRequest,
    UfsReadOptions,
)
from fusecache.pb.alluxio.file_system_master_pb2 import FileInfo, FreePOptions, FreePRequest
from fusecache.pb.alluxio.protocol_pb2 import OpenUfsBlockOptions
from tests.support.embedded import WireClient, common_options, embedded_server, read_request, replace, wait_until

BLOCK = 4096
NEVER_FREED: dict[str, float | None] = {"free_after_s": None}


both_ways = pytest.mark.parametrize("server", [True, False], indirect=True, ids=["links", "copies"])
"""Where it matters whether blocks are links or copies."""


@pytest.fixture
def server(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """Two block workers; blocks of 4 KiB, hard links unless a test says `both_ways`."""
    link = getattr(request, "param", True)
    with embedded_server(
        source, tmp_path / "state", block_workers=2, block_size=BLOCK, link_blocks=link, free_after_s=0.05
    ) as running:
        yield running


@pytest.fixture
def master(server: EmbeddedServer) -> Iterator[WireClient]:
    with WireClient(server.master_target) as connected:
        yield connected


@pytest.fixture
def workers(server: EmbeddedServer) -> Iterator[list[WireClient]]:
    connected = [WireClient(target) for target in server.worker_targets]
    yield connected
    for client in connected:
        client.close()


def block_file(server: EmbeddedServer, block_id: int, worker: int = 0) -> Path:
    return server.tier_folders[worker] / "alluxioworker" / str(block_id)


def content(size: int) -> bytes:
    return bytes(os.urandom(size))


def read(client: WireClient, request: ReadRequest) -> bytes:
    return b"".join(client.read(request))


def code(failure: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    found: grpc.StatusCode = failure.value.code()
    return found


def no_temporary_files(server: EmbeddedServer) -> bool:
    return not any(any((tier / "alluxioworker" / ".tmp_blocks").iterdir()) for tier in server.tier_folders)


@both_ways
def test_whole_file_read_cold_and_warm_equals_its_bytes(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1):
        data = content(size)
        (source / f"{size}").write_bytes(data)
        info = master.stat(f"/{size}".encode())
        assert len(info.blockIds) == -(-size // BLOCK)
        for _ in ("cold", "warm"):
            assert b"".join(read(workers[0], read_request(info, n)) for n in range(len(info.blockIds))) == data
        for number, block_id in enumerate(info.blockIds):
            assert block_file(server, block_id).read_bytes() == data[number * BLOCK : (number + 1) * BLOCK]
    assert no_temporary_files(server)


@both_ways
def test_block_is_committed_before_the_stream_ends(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(content(BLOCK))
    info = master.stat(b"/file")
    assert info.inAlluxioPercentage == 0
    read(workers[1], read_request(info))
    after = master.stat(b"/file")
    assert [place.workerAddress.host for place in after.fileBlockInfos[0].blockInfo.locations] == [b"127.0.0.2"]
    assert after.inAlluxioPercentage == 100
    assert not block_file(server, info.blockIds[0], 0).exists()
    assert block_file(server, info.blockIds[0], 1).exists()


@both_ways
def test_partial_read_gives_the_bytes_and_caches_nothing(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    data = content(BLOCK)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    for offset, length in ((10, 5), (0, 5), (0, BLOCK - 1), (1, BLOCK - 1)):
        assert read(workers[0], read_request(info, 0, offset, length)) == data[offset : offset + length]
        assert not block_file(server, info.blockIds[0]).exists()
    assert no_temporary_files(server)


@both_ways
def test_no_cache_read_caches_nothing(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    data = content(BLOCK)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    assert read(workers[0], read_request(info, no_cache=True)) == data
    assert not block_file(server, info.blockIds[0]).exists()


def test_chunks_are_as_large_as_asked(master: WireClient, workers: list[WireClient], source: Path) -> None:
    (source / "file").write_bytes(content(BLOCK))
    info = master.stat(b"/file")
    for _ in ("cold", "warm"):
        chunks = workers[0].read(read_request(info, chunk_size=1000))
        assert [len(chunk) for chunk in chunks] == [1000, 1000, 1000, 1000, 96]


def test_chunks_are_at_most_two_mebibytes(source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(bytes(5 << 20))
    with (
        embedded_server(source, tmp_path / "state") as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        chunks = worker.read(read_request(master.stat(b"/file"), chunk_size=64 << 20))
    assert [len(chunk) for chunk in chunks] == [2 << 20, 2 << 20, 1 << 20]


def test_read_past_the_end_of_a_block_ends_there(master: WireClient, workers: list[WireClient], source: Path) -> None:
    data = content(BLOCK)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    for _ in ("cold", "warm"):
        assert read(workers[0], read_request(info, 0, BLOCK - 5, 50)) == data[-5:]
        assert read(workers[0], read_request(info, 0, BLOCK, 50)) == b""
        assert read(workers[0], read_request(info, 0, BLOCK + 1, 50)) == b""
        read(workers[0], read_request(info))


def test_malformed_read_is_an_invalid_argument(workers: list[WireClient]) -> None:
    for block_id, offset, length in ((-1, 0, 5), (5, -1, 5), (5, 0, 0), (5, 0, -1)):
        with pytest.raises(grpc.RpcError) as failure:
            workers[0].read(ReadRequest(block_id=block_id, offset=offset, length=length, chunk_size=100))
        assert code(failure) == grpc.StatusCode.INVALID_ARGUMENT


def test_chunk_size_zero_is_never_answered(master: WireClient, workers: list[WireClient], source: Path) -> None:
    (source / "file").write_bytes(content(BLOCK))
    request = read_request(master.stat(b"/file"))
    request.chunk_size = 0
    requests: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
    requests.put(request)
    answers = workers[0].worker.ReadBlock(iter(requests.get, None), metadata=workers[0].metadata, timeout=0.5)
    with pytest.raises(grpc.RpcError) as failure:
        list(answers)
    requests.put(None)
    assert code(failure) == grpc.StatusCode.DEADLINE_EXCEEDED


def test_half_close_before_the_end_truncates_without_an_error(source: Path, tmp_path: Path) -> None:
    size = 64 << 20
    with (source / "file").open("wb") as file:
        file.truncate(size)
    with (
        embedded_server(source, tmp_path / "state") as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        info = master.stat(b"/file")
        received = sum(len(chunk) for chunk in worker.read(read_request(info), half_close_after=1 << 20))
        assert 1 << 20 <= received < size
        assert not block_file(running, info.blockIds[0]).exists()


def test_stream_ends_by_itself_after_the_last_byte(master: WireClient, workers: list[WireClient], source: Path) -> None:
    data = content(BLOCK)
    (source / "file").write_bytes(data)
    requests: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
    requests.put(read_request(master.stat(b"/file"), chunk_size=100))
    answers = workers[0].worker.ReadBlock(iter(requests.get, None), metadata=workers[0].metadata, timeout=30)
    assert b"".join(answer.chunk.data for answer in answers) == data
    requests.put(None)


def test_uncached_block_without_ufs_options_is_not_found(
    master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(content(BLOCK))
    with pytest.raises(grpc.RpcError) as failure:
        workers[0].read(read_request(master.stat(b"/file"), from_ufs=False))
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_ufs_path_that_is_no_file_of_the_folder_is_not_found(
    workers: list[WireClient], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (source / "out").symlink_to(tmp_path / "outside")
    inside = os.fsencode(source)
    for ufs_path in (
        b"/etc/passwd",
        inside + b"/../outside",
        inside,
        inside + b"/none",
        inside + b"/out",
        b"rel",
        b"/\0",
    ):
        options = OpenUfsBlockOptions(ufs_path=ufs_path, offset_in_file=0, block_size=5, mountId=1)
        request = ReadRequest(block_id=99 << 24, offset=0, length=5, chunk_size=10, open_ufs_block_options=options)
        with pytest.raises(grpc.RpcError) as failure:
            workers[0].read(request)
        assert code(failure) == grpc.StatusCode.NOT_FOUND, ufs_path


def test_unknown_mount_is_unavailable(master: WireClient, workers: list[WireClient], source: Path) -> None:
    (source / "file").write_bytes(content(10))
    request = read_request(master.stat(b"/file"))
    request.open_ufs_block_options.mountId = 7
    with pytest.raises(grpc.RpcError) as failure:
        workers[0].read(request)
    assert code(failure) == grpc.StatusCode.UNAVAILABLE


# -- short circuit -----------------------------------------------------------------------------------------


def open_local(client: WireClient, block_id: int) -> tuple[bytes, Callable[[], None]]:
    """(path, function that ends the call)."""
    requests: queue.SimpleQueue[OpenLocalBlockRequest | None] = queue.SimpleQueue()
    requests.put(OpenLocalBlockRequest(block_id=block_id))
    answers = client.worker.OpenLocalBlock(iter(requests.get, None), metadata=client.metadata)
    try:
        path: bytes = next(answers).path
    except grpc.RpcError:
        requests.put(None)
        raise

    def close() -> None:
        requests.put(None)
        assert list(answers) == []

    return path, close


def test_open_local_block_gives_the_block_file(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    data = content(BLOCK + 10)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    read(workers[0], read_request(info, 1))
    path, close = open_local(workers[0], info.blockIds[1])
    assert path == os.fsencode(block_file(server, info.blockIds[1]))
    assert Path(os.fsdecode(path)).read_bytes() == data[BLOCK:]
    close()


def test_open_local_block_of_another_worker_is_not_found(
    master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(content(10))
    info = master.stat(b"/file")
    read(workers[0], read_request(info))
    with pytest.raises(grpc.RpcError) as failure:
        open_local(workers[1], info.blockIds[0])
    assert code(failure) == grpc.StatusCode.NOT_FOUND


# -- Cache, Load, Free -------------------------------------------------------------------------------------


def cache(server: EmbeddedServer, client: WireClient, info: FileInfo, source_worker: int, *, wait: bool) -> None:
    host, port = server.worker_targets[source_worker].split(":")
    request = CacheRequest(
        block_id=info.blockIds[0],
        source_host=host.encode(),
        source_port=int(port),
        length=info.length,
        open_ufs_block_options=read_request(info).open_ufs_block_options,
    )
    setattr(request, "async", not wait)
    client.worker.Cache(request, metadata=client.metadata)


@both_ways
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_cache_from_itself_reads_the_source(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path, wait: bool
) -> None:
    data = content(100)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    cache(server, workers[0], info, 0, wait=wait)
    wait_until(block_file(server, info.blockIds[0]).exists)
    assert block_file(server, info.blockIds[0]).read_bytes() == data
    assert not block_file(server, info.blockIds[0], 1).exists()


@both_ways
@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
def test_cache_from_another_worker_leaves_the_block_on_both(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path, held: bool
) -> None:
    data = content(100)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    if held:
        read(workers[0], read_request(info))
        (source / "file").unlink()
    cache(server, workers[1], info, 0, wait=True)
    for worker in (0, 1):
        assert block_file(server, info.blockIds[0], worker).read_bytes() == data
    assert len(master.stat(b"/file").fileBlockInfos[0].blockInfo.locations) == 2


def test_cache_of_a_vanished_file_fails_only_when_waited_for(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(content(100))
    info = master.stat(b"/file")
    (source / "file").unlink()
    cache(server, workers[0], info, 0, wait=False)
    with pytest.raises(grpc.RpcError) as failure:
        cache(server, workers[0], info, 0, wait=True)
    assert code(failure) == grpc.StatusCode.UNKNOWN
    assert "NotFound" in str(failure.value.details())


def load(client: WireClient, *pieces: tuple[FileInfo, int]) -> LoadResponse:
    blocks = [
        Block(
            block_id=info.blockIds[number],
            length=min(info.blockSizeBytes, info.length - number * info.blockSizeBytes),
            ufs_path=info.ufsPath,
            offset_in_file=number * info.blockSizeBytes,
            mountId=info.mountId,
        )
        for info, number in pieces
    ]
    request = LoadRequest(blocks=blocks, options=UfsReadOptions(tag=b"test", position_short=False))
    answer: LoadResponse = client.worker.Load(request, metadata=client.metadata)
    return answer


@both_ways
def test_load_makes_blocks_local(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    data = content(2 * BLOCK + 7)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    assert load(workers[1], (info, 0), (info, 1), (info, 2)).status == SUCCESS
    assert b"".join(block_file(server, block, 1).read_bytes() for block in info.blockIds) == data


def test_load_lists_what_failed_with_its_code(master: WireClient, workers: list[WireClient], source: Path) -> None:
    for name in ("gone", "held", "good", "shrunk"):
        (source / name).write_bytes(content(100))
    infos = {info.name: info for info in master.entries(b"/")}
    read(workers[0], read_request(infos[b"held"]))
    (source / "gone").unlink()
    (source / "shrunk").write_bytes(b"short")
    answer = load(workers[0], *((infos[name], 0) for name in (b"gone", b"held", b"good", b"shrunk")))
    assert answer.status == PARTIAL_FAILURE
    assert [(status.block.block_id, status.code, status.retryable) for status in answer.block_status] == [
        (infos[b"gone"].blockIds[0], grpc.StatusCode.NOT_FOUND.value[0], False),
        (infos[b"held"].blockIds[0], grpc.StatusCode.INTERNAL.value[0], False),
        (infos[b"shrunk"].blockIds[0], grpc.StatusCode.UNAVAILABLE.value[0], True),
    ]
    assert load(workers[0], (infos[b"gone"], 0)).status == FAILURE


def test_free_drops_the_blocks_of_a_tree(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "folder" / "deep").mkdir(parents=True)
    (source / "folder" / "deep" / "file").write_bytes(content(100))
    (source / "kept").write_bytes(content(100))
    info, kept = master.stat(b"/folder/deep/file"), master.stat(b"/kept")
    for client in workers:
        read(client, read_request(info))
        read(client, read_request(kept))
    master.files.Free(
        FreePRequest(path=b"/folder", options=FreePOptions(recursive=True, commonOptions=common_options())),
        metadata=master.metadata,
    )
    for worker in (0, 1):
        wait_until(lambda worker=worker: not block_file(server, info.blockIds[0], worker).exists())  # type: ignore[misc]
        assert block_file(server, kept.blockIds[0], worker).exists()
    assert master.stat(b"/folder/deep/file").inAlluxioPercentage == 0


def test_block_info_of_a_current_block_and_of_none(master: WireClient, workers: list[WireClient], source: Path) -> None:
    (source / "file").write_bytes(content(BLOCK + 7))
    info = master.stat(b"/file")
    read(workers[1], read_request(info, 1))
    found = master.blocks.GetBlockInfo(GetBlockInfoPRequest(blockId=info.blockIds[1]), metadata=master.metadata)
    assert (found.blockInfo.length, len(found.blockInfo.locations)) == (7, 1)
    for unknown in (info.blockIds[1] + 1, 999 << 24):
        with pytest.raises(grpc.RpcError) as failure:
            master.blocks.GetBlockInfo(GetBlockInfoPRequest(blockId=unknown), metadata=master.metadata)
        assert code(failure) == grpc.StatusCode.INVALID_ARGUMENT


# -- the source changes ------------------------------------------------------------------------------------


@both_ways
def test_unnoticed_change_mixes_old_and_new_under_one_id(
    master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(b"a" * 2 * BLOCK)
    info = master.stat(b"/file")
    assert read(workers[0], read_request(info, 0)) == b"a" * BLOCK
    (source / "file").write_bytes(b"b" * 2 * BLOCK)
    assert read(workers[0], read_request(info, 0)) == b"a" * BLOCK
    assert read(workers[0], read_request(info, 1)) == b"b" * BLOCK


@both_ways
def test_superseded_id_uncached_gives_the_new_bytes(
    master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(b"old")
    old = master.stat(b"/file")
    replace(source / "file", b"newer")
    assert master.stat(b"/file", sync_interval_ms=0).fileId != old.fileId
    assert read(workers[0], read_request(old)) == b"new"


@both_ways
def test_shrunk_file_ends_early_without_an_error_and_is_not_cached(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(b"a" * 1000)
    info = master.stat(b"/file")
    (source / "file").write_bytes(b"b" * 300)
    assert read(workers[0], read_request(info)) == b"b" * 300
    assert not block_file(server, info.blockIds[0]).exists()
    with pytest.raises(grpc.RpcError) as failure:
        read(workers[0], read_request(info, 0, 500, 100))
    assert code(failure) == grpc.StatusCode.UNAVAILABLE
    assert no_temporary_files(server)


@both_ways
def test_grown_file_is_read_to_its_old_length(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(b"a" * 1000)
    info = master.stat(b"/file")
    replace(source / "file", b"b" * 2000)
    assert read(workers[0], read_request(info)) == b"b" * 1000
    assert block_file(server, info.blockIds[0]).read_bytes() == b"b" * 1000


def test_vanished_file_is_not_found_on_read(master: WireClient, workers: list[WireClient], source: Path) -> None:
    (source / "file").write_bytes(b"a" * 1000)
    info = master.stat(b"/file")
    (source / "file").unlink()
    with pytest.raises(grpc.RpcError) as failure:
        read(workers[0], read_request(info))
    assert code(failure) == grpc.StatusCode.NOT_FOUND


@both_ways
def test_replaced_file_serves_its_old_block_until_it_is_freed(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    (source / "file").write_bytes(b"old")
    old = master.stat(b"/file")
    read(workers[0], read_request(old))
    replace(source / "file", b"new")
    descriptor = os.open(block_file(server, old.blockIds[0]), os.O_RDONLY)
    assert read(workers[0], read_request(old, from_ufs=False)) == b"old"
    new = master.stat(b"/file", sync_interval_ms=0)
    wait_until(lambda: not block_file(server, old.blockIds[0]).exists())
    with pytest.raises(grpc.RpcError) as failure:
        read(workers[0], read_request(old, from_ufs=False))
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    assert os.pread(descriptor, 10, 0) == b"old"
    os.close(descriptor)
    assert read(workers[0], read_request(new)) == b"new"


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
def test_old_block_outlives_the_replacement_when_nothing_frees_it(source: Path, tmp_path: Path, link: bool) -> None:
    (source / "file").write_bytes(b"old")
    with (
        embedded_server(source, tmp_path / "state", link_blocks=link, **NEVER_FREED) as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        old = master.stat(b"/file")
        read(worker, read_request(old))
        replace(source / "file", b"new")
        new = master.stat(b"/file", sync_interval_ms=0)
        assert read(worker, read_request(new)) == b"new"
        assert read(worker, read_request(old)) == b"old"
        assert block_file(running, old.blockIds[0]).read_bytes() == b"old"


# -- hard links --------------------------------------------------------------------------------------------


@pytest.fixture
def linking(source: Path, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(source, tmp_path / "linking", block_workers=2, **NEVER_FREED) as running:
        yield running


@pytest.fixture
def linked(linking: EmbeddedServer, source: Path) -> Iterator[tuple[FileInfo, WireClient, Path]]:
    """A file whose block is a link: (its status, the block worker's client, the block file)."""
    (source / "file").write_bytes(b"old")
    with WireClient(linking.master_target) as master, WireClient(linking.worker_targets[0]) as worker:
        info = master.stat(b"/file")
        assert read(worker, read_request(info)) == b"old"
        block = block_file(linking, info.blockIds[0])
        assert block.samefile(source / "file")
        yield info, worker, block


def test_whole_file_block_is_a_link_that_serves_reads(linked: tuple[FileInfo, WireClient, Path]) -> None:
    info, worker, block = linked
    assert block.stat().st_nlink == 2
    assert read(worker, read_request(info, from_ufs=False)) == b"old"


def test_link_whose_source_was_written_in_place_is_dropped(
    linked: tuple[FileInfo, WireClient, Path], source: Path
) -> None:
    info, worker, block = linked
    (source / "file").write_bytes(b"new")
    with pytest.raises(grpc.RpcError) as failure:
        read(worker, read_request(info, from_ufs=False))
    assert code(failure) == grpc.StatusCode.NOT_FOUND
    assert not block.exists()
    assert (source / "file").read_bytes() == b"new"


def test_link_whose_source_only_changed_its_change_time_is_dropped(
    linked: tuple[FileInfo, WireClient, Path], source: Path
) -> None:
    info, worker, _ = linked
    was = (source / "file").stat()
    (source / "file").write_bytes(b"new")
    os.utime(source / "file", ns=(was.st_atime_ns, was.st_mtime_ns))
    with pytest.raises(grpc.RpcError) as failure:
        read(worker, read_request(info, from_ufs=False))
    assert code(failure) == grpc.StatusCode.NOT_FOUND


def test_links_of_two_workers_do_not_spoil_each_other(
    linking: EmbeddedServer, linked: tuple[FileInfo, WireClient, Path], source: Path
) -> None:
    info, worker, block = linked
    with WireClient(linking.worker_targets[1]) as second:
        assert read(second, read_request(info)) == b"old"
        other = block_file(linking, info.blockIds[0], 1)
        assert other.samefile(block)
        assert read(worker, read_request(info, from_ufs=False)) == b"old"
        # The name of the source goes: both links stay good, and so does one when the other goes.
        replace(source / "file", b"new")
        assert read(worker, read_request(info, from_ufs=False)) == b"old"
        linking.blocks[0].remove(info.blockIds[0])
        assert read(second, read_request(info, from_ufs=False)) == b"old"


def test_link_that_cannot_be_made_becomes_a_copy(
    linking: EmbeddedServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[object] = []

    def refuse(*arguments: object, **_options: object) -> None:
        refused.append(arguments)
        raise PermissionError("protected_hardlinks")

    monkeypatch.setattr(os, "link", refuse)
    (source / "file").write_bytes(b"data")
    with WireClient(linking.master_target) as master, WireClient(linking.worker_targets[0]) as worker:
        info = master.stat(b"/file")
        assert read(worker, read_request(info)) == b"data"
        block = block_file(linking, info.blockIds[0])
        assert refused
        assert block.read_bytes() == b"data"
        assert not block.samefile(source / "file")
        assert read(worker, read_request(info, from_ufs=False)) == b"data"


# -- capacity ----------------------------------------------------------------------------------------------


def test_full_worker_drops_the_least_recently_used_block(source: Path, tmp_path: Path) -> None:
    for number in range(5):
        (source / f"{number}").write_bytes(content(100))
    with (
        embedded_server(source, tmp_path / "state", capacity_bytes=350) as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        infos = master.entries(b"/")
        for info in infos[:3]:
            read(worker, read_request(info))
        open_local(worker, infos[0].blockIds[0])[1]()
        read(worker, read_request(infos[3]))
        held = [block_file(running, info.blockIds[0]).exists() for info in infos]
        assert held == [True, False, True, True, False]
        assert running.blocks[0].used_bytes == 300


def test_block_larger_than_the_worker_is_served_but_not_kept(source: Path, tmp_path: Path) -> None:
    data = content(1000)
    (source / "file").write_bytes(data)
    with (
        embedded_server(source, tmp_path / "state", capacity_bytes=999) as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        info = master.stat(b"/file")
        assert read(worker, read_request(info)) == data
        assert running.blocks[0].block_ids() == []


@pytest.mark.parametrize("link", [True, False], ids=["links", "copies"])
def test_copies_leave_the_disk_its_free_space_and_links_need_none(source: Path, tmp_path: Path, link: bool) -> None:
    data = content(100)
    (source / "file").write_bytes(data)
    with (
        embedded_server(source, tmp_path / "state", keep_free_bytes=1 << 60, link_blocks=link) as running,
        WireClient(running.master_target) as master,
        WireClient(running.worker_targets[0]) as worker,
    ):
        info = master.stat(b"/file")
        for _ in range(2):
            assert read(worker, read_request(info)) == data
        assert running.blocks[0].block_ids() == (list(info.blockIds) if link else [])
        if not link:
            answer = load(worker, (info, 0))
            assert [status.code for status in answer.block_status] == [grpc.StatusCode.UNAVAILABLE.value[0]]


@both_ways
def test_concurrent_readers_of_one_cold_block_all_get_its_bytes(
    server: EmbeddedServer, master: WireClient, workers: list[WireClient], source: Path
) -> None:
    data = content(BLOCK)
    (source / "file").write_bytes(data)
    info = master.stat(b"/file")
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(read(workers[0], read_request(info, chunk_size=64))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [data] * 8
    assert block_file(server, info.blockIds[0]).read_bytes() == data
    assert no_temporary_files(server)
