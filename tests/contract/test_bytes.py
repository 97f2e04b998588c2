"""Reading blocks, where they are kept, and how they get there and go."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import grpc
import pytest

from fusecache.alluxio.model import Block
from fusecache.errors import NotFound, Unavailable, UpstreamError
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest
from tests.contract.conftest import BLOCK_SIZE, Cluster, blocks_of
from tests.support.embedded import WireClient, read_request, wait_until

NOT_FOUND = 5
"""google.rpc code."""


def make(cluster: Cluster, size: int, name: str = "file") -> bytes:
    """A file of random bytes that are the same in every run."""
    data = random.Random(size).randbytes(size)
    (cluster.ufs / name).write_bytes(data)
    return data


def wire_read(client: WireClient, request: ReadRequest) -> bytes:
    return b"".join(client.read(request))


@pytest.mark.parametrize(
    "size",
    [1, 4096, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1],
)
def test_whole_file_read_cold_and_warm_equals_its_bytes(cluster: Cluster, size: int) -> None:
    data = make(cluster, size)
    for state in ("cold", "warm"):
        blocks = blocks_of(cluster.stat("file"))
        assert bool(blocks[0].locations) == (state == "warm")
        assert b"".join(cluster.read(block) for block in blocks) == data
    for index, block in enumerate(blocks):
        assert cluster.block_file(block).read_bytes() == data[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_pieces_of_blocks_equal_the_bytes_there(cluster: Cluster, warm: bool) -> None:
    size = 2 * BLOCK_SIZE + 777
    data = make(cluster, size)
    blocks = blocks_of(cluster.stat("file"))
    if warm:
        for block in blocks:
            cluster.read(block)
    rng = random.Random(5)
    for _ in range(30):
        index = rng.randrange(len(blocks))
        offset = rng.randrange(blocks[index].length)
        length = rng.randint(1, blocks[index].length - offset)
        start = index * BLOCK_SIZE + offset
        assert cluster.read(blocks[index], offset, length) == data[start : start + length]
    last = blocks[-1]
    assert cluster.read(last, last.length - 1, 1) == data[-1:]


def test_block_read_whole_is_kept_by_its_worker_and_told_by_the_master(cluster: Cluster) -> None:
    make(cluster, 100)
    status = cluster.stat("file")
    (block,) = blocks_of(status)
    assert cluster.client.block_placement(block.block_id, cluster.budget()).locations == ()
    assert cluster.held(block) == [False, False]
    info = cluster.wire("master").stat(cluster.path("file"))
    wire_read(cluster.wire("other"), read_request(info))
    assert cluster.held(block) == [False, True]
    wait_until(lambda: cluster.stat("file").locations != status.locations)
    ((place,),) = cluster.stat("file").locations
    workers = {worker.worker_id: worker for worker in cluster.client.block_workers(cluster.budget())}
    assert workers[place].address.host == "127.0.0.2"
    assert cluster.client.block_placement(block.block_id, cluster.budget()).locations == (place,)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, BLOCK_SIZE - 1), (1, BLOCK_SIZE - 1), (BLOCK_SIZE // 2, 10)]
)
def test_block_read_in_part_is_not_kept(cluster: Cluster, offset: int, length: int) -> None:
    data = make(cluster, BLOCK_SIZE)
    info = cluster.wire("master").stat(cluster.path("file"))
    assert wire_read(cluster.wire("local"), read_request(info, 0, offset, length)) == data[offset : offset + length]
    assert cluster.held(blocks_of(cluster.stat("file"))[0]) == [False, False]


def test_block_read_without_caching_is_not_kept(cluster: Cluster) -> None:
    data = make(cluster, 100)
    info = cluster.wire("master").stat(cluster.path("file"))
    assert wire_read(cluster.wire("local"), read_request(info, no_cache=True)) == data
    assert cluster.held(blocks_of(cluster.stat("file"))[0]) == [False, False]


def test_chunks_are_as_large_as_asked(cluster: Cluster) -> None:
    make(cluster, 10_000)
    info = cluster.wire("master").stat(cluster.path("file"))
    for _ in ("cold", "warm"):
        chunks = cluster.wire("local").read(read_request(info, chunk_size=4096))
        assert [len(chunk) for chunk in chunks] == [4096, 4096, 1808]


def test_read_past_the_end_of_a_block_ends_there(cluster: Cluster) -> None:
    data = make(cluster, 1000)
    info = cluster.wire("master").stat(cluster.path("file"))
    worker = cluster.wire("local")
    for _ in ("cold", "warm"):
        assert wire_read(worker, read_request(info, 0, 995, 50)) == data[-5:]
        assert wire_read(worker, read_request(info, 0, 1000, 50)) == b""
        assert wire_read(worker, read_request(info, 0, 1001, 50)) == b""
        wire_read(worker, read_request(info))


def test_half_close_before_the_end_truncates_without_an_error(cluster: Cluster) -> None:
    make(cluster, 4 * BLOCK_SIZE)
    info = cluster.wire("master").stat(cluster.path("file"))
    worker = cluster.wire("local")
    received = sum(len(chunk) for chunk in worker.read(read_request(info, chunk_size=512), half_close_after=512))
    assert 512 <= received <= BLOCK_SIZE


# -- zero-RPC reads ----------------------------------------------------------------------------------------


def local_bytes(descriptor: int | None) -> bytes:
    assert descriptor is not None
    try:
        return os.pread(descriptor, 2 * BLOCK_SIZE, 0)
    finally:
        os.close(descriptor)


def test_block_of_this_node_opens_without_a_call_and_equals_its_bytes(cluster: Cluster) -> None:
    data = make(cluster, BLOCK_SIZE + 10)
    blocks = blocks_of(cluster.stat("file"))
    assert [cluster.client.open_local(block) for block in blocks] == [None, None]
    for block in blocks:
        cluster.read(block)
    assert b"".join(local_bytes(cluster.client.open_local(block)) for block in blocks) == data


def test_block_file_of_another_length_is_not_opened(cluster: Cluster) -> None:
    make(cluster, 1000)
    (block,) = blocks_of(cluster.stat("file"))
    cluster.read(block)
    assert cluster.client.open_local(block._replace(length=999)) is None
    assert local_bytes(cluster.client.open_local(block))


def test_client_learns_the_tier_folder_from_the_block_worker(cluster: Cluster) -> None:
    data = make(cluster, 1000)
    (block,) = blocks_of(cluster.stat("file"))
    cluster.read(block)
    (held,) = blocks_of(cluster.stat("file"))
    fresh = cluster.connect()
    assert fresh.open_local(held) is None
    assert local_bytes(fresh.learn_local(held, cluster.budget())) == data
    assert local_bytes(fresh.open_local(held)) == data


def test_touch_counts_the_blocks_this_node_holds(cluster: Cluster) -> None:
    make(cluster, 2 * BLOCK_SIZE)
    first, second = blocks_of(cluster.stat("file"))
    cluster.read(first)
    assert cluster.client.touch([first.block_id, second.block_id], cluster.budget()) == 1


# -- moving blocks -----------------------------------------------------------------------------------------


def held_somewhere(cluster: Cluster, blocks: list[Block]) -> bool:
    return all(any(cluster.held(block)) for block in blocks)


def test_cache_brings_a_block_in(cluster: Cluster) -> None:
    data = make(cluster, 1000)
    (block,) = blocks_of(cluster.stat("file"))
    cluster.client.cache(block, cluster.budget())
    wait_until(lambda: held_somewhere(cluster, [block]), timeout_s=30)
    assert cluster.block_file(block).read_bytes() == data


def test_load_brings_blocks_in_before_it_returns(cluster: Cluster) -> None:
    data = make(cluster, 2 * BLOCK_SIZE + 1)
    make(cluster, 50, "small")
    blocks = [block for name in ("file", "small") for block in blocks_of(cluster.stat(name))]
    assert cluster.client.load(blocks, cluster.budget()) == []
    assert held_somewhere(cluster, blocks)
    wait_until(lambda: all(cluster.stat("file").locations))
    assert b"".join(cluster.read(block) for block in blocks[:3]) == data


def test_load_tells_which_block_failed(cluster: Cluster) -> None:
    for name in ("good", "gone"):
        make(cluster, 100, name)
    (good,), (gone,) = (blocks_of(cluster.stat(name)) for name in ("good", "gone"))
    (cluster.ufs / "gone").unlink()
    failures = cluster.client.load([good, gone], cluster.budget())
    assert [(failure.block_id, failure.code) for failure in failures] == [(gone.block_id, NOT_FOUND)]
    assert held_somewhere(cluster, [good])
    assert cluster.held(gone) == [False, False]


def test_free_drops_blocks_and_keeps_the_file(cluster: Cluster) -> None:
    data = make(cluster, BLOCK_SIZE + 1)
    (cluster.ufs / "kept").write_bytes(b"kept")
    blocks, (kept,) = blocks_of(cluster.stat("file")), blocks_of(cluster.stat("kept"))
    for block in [*blocks, kept]:
        cluster.read(block)
    descriptor = cluster.client.open_local(blocks[0])
    cluster.client.free(cluster.path("file"), cluster.budget())
    wait_until(lambda: not any(any(cluster.held(block)) for block in blocks), timeout_s=30)
    assert held_somewhere(cluster, [kept])
    assert local_bytes(descriptor) == data[:BLOCK_SIZE]
    wait_until(lambda: not any(cluster.stat("file").locations))
    assert b"".join(cluster.read(block) for block in blocks_of(cluster.stat("file"))) == data


def test_free_of_a_full_folder_needs_recursive(cluster: Cluster) -> None:
    (cluster.ufs / "folder").mkdir()
    make(cluster, 10, "folder/file")
    (block,) = blocks_of(cluster.stat("folder/file"))
    cluster.read(block)
    with pytest.raises(UpstreamError):
        cluster.client.free(cluster.path("folder"), cluster.budget())
    assert held_somewhere(cluster, [block])
    cluster.client.free(cluster.path("folder"), cluster.budget(), recursive=True)
    wait_until(lambda: cluster.held(block) == [False, False], timeout_s=30)


# -- the under storage is not what it was -------------------------------------------------------------------


def test_block_that_nobody_holds_and_no_under_storage_is_an_error(cluster: Cluster) -> None:
    make(cluster, 100)
    (block,) = blocks_of(cluster.stat("file"), from_ufs=False)
    with pytest.raises(Unavailable):
        cluster.read(block, total_s=2)
    info = cluster.wire("master").stat(cluster.path("file"))
    with pytest.raises(grpc.RpcError) as failure:
        cluster.wire("local").read(read_request(info, from_ufs=False))
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND


def test_file_gone_from_the_under_storage_is_not_found(cluster: Cluster) -> None:
    make(cluster, 100)
    (block,) = blocks_of(cluster.stat("file"))
    (cluster.ufs / "file").unlink()
    with pytest.raises(NotFound):
        cluster.read(block, total_s=2)


def test_file_gone_from_the_under_storage_is_served_while_cached(cluster: Cluster) -> None:
    data = make(cluster, 100)
    (block,) = blocks_of(cluster.stat("file"))
    cluster.read(block)
    (cluster.ufs / "file").unlink()
    (held,) = blocks_of(cluster.stat("file"))
    assert cluster.read(held) == data


def test_shrunk_file_is_an_error_and_never_a_short_read(cluster: Cluster) -> None:
    make(cluster, 1000)
    (block,) = blocks_of(cluster.stat("file"))
    (cluster.ufs / "file").write_bytes(b"x" * 300)
    with pytest.raises(UpstreamError):
        cluster.read(block, total_s=2)
    assert cluster.held(block) == [False, False]


def test_grown_file_is_read_to_its_old_length(cluster: Cluster) -> None:
    data = make(cluster, 1000)
    (block,) = blocks_of(cluster.stat("file"))
    with (cluster.ufs / "file").open("ab") as file:
        file.write(b"more")
    assert cluster.read(block) == data


def test_tree_has_the_same_digest_through_the_client(cluster: Cluster) -> None:
    rng = random.Random(3)
    for number in range(40):
        path = cluster.ufs / f"class{number % 4}" / f"sub{number % 3}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 5000, BLOCK_SIZE, BLOCK_SIZE + 5))))

    def from_disk(folder: Path, prefix: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for path in folder.iterdir():
            name = f"{prefix}{path.name}"
            if path.is_dir():
                found |= from_disk(path, f"{name}/")
            else:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def from_cluster(name: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for status in cluster.entries(name).values():
            child = f"{name}/{status.name.decode()}" if name else status.name.decode()
            if status.folder:
                found |= from_cluster(child)
            else:
                data = b"".join(cluster.read(block) for block in blocks_of(status))
                found[child] = hashlib.sha256(data).hexdigest()
        return found

    expected = from_disk(cluster.ufs)
    assert from_cluster() == expected
    assert from_cluster() == expected
