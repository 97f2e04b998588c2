"""FileReader over a fake client: right bytes from every source, each byte fetched once, errors, never short reads."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache.alluxio.model import Block, block_id_of
from fusecache.cache.record import Entry
from fusecache.clock import SystemClock
from fusecache.config.settings import Settings
from fusecache.errors import Incomplete, ProtocolError, StaleId, Unavailable, UpstreamError
from fusecache.metrics import Metrics
from fusecache.prefetch import fetcher
from fusecache.prefetch.reader import Readers
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare

KIB, MIB = 1 << 10, 1 << 20
FILE_ID = (5 << 24) | 0xFFFFFF


class MovedClock(SystemClock):
    """Stands still but for `sleep`."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class FakeStream:
    """A range of the content; counts what it gives."""

    def __init__(self, client: FakeClient, content: bytes, source: str, start: int = 0) -> None:
        self._client = client
        self._content = content
        self._start = start
        self._position = 0
        self.source = source
        self.closed = False

    def read(self, size: int, budget: Budget) -> bytes:
        if self._client.gate is not None:
            assert self._client.gate.wait(10)
        if self._client.needs_s:
            self._client.given_s.append(budget.total_s)
            if budget.total_s < self._client.needs_s:
                self._client.clock.sleep(budget.total_s)
                raise Unavailable("not within the time given")
        if self._client.fail_reads:
            raise Unavailable("no block worker answers")
        if self._client.read_error is not None:
            raise self._client.read_error
        data = self._content[self._position : self._position + size]
        assert len(data) == size, "asked past the stream's end"
        self._client.fetched.append((self._start + self._position, self._start + self._position + size))
        self._position += size
        return data

    def read_ready(self, budget: Budget) -> bytes | None:
        self._client.asked_ready += 1
        if self._client.answer == "part":
            return None
        return self.read(len(self._content), budget)

    def close(self) -> None:
        self.closed = True


class FakeClient:
    """Serves one file's content, locally from `folder` when a block file is there."""

    def __init__(self, content: bytes, block_size: int, folder: Path, source: str = "block_worker") -> None:
        self.content = content
        self.block_size = block_size
        self.folder = folder
        self.source = source
        self.streams: list[FakeStream] = []
        self.fetched: list[tuple[int, int]] = []
        """Ranges given, from the block's start, in the order of the reads."""
        self.learned: list[int] = []
        self.fail_reads = False
        self.needs_s = 0.0
        self.given_s: list[float] = []
        self.clock = MovedClock()
        self.read_error: Exception | None = None
        self.gate: threading.Event | None = None
        self.answer = "none"
        """What comes before anybody waits: none (a read can't be started without waiting), part of the bytes, all of
        them; late = a read is started and its answer does not come."""
        self.asked_ready = 0
        self.started = 0

    def block_bytes(self, block_id: int) -> bytes:
        index = block_id & 0xFFFFFF
        return self.content[index * self.block_size : (index + 1) * self.block_size]

    def make_local(self, index: int) -> Path:
        path = self.folder / str(block_id_of(FILE_ID, index))
        path.write_bytes(self.block_bytes(block_id_of(FILE_ID, index)))
        return path

    def open_local(self, block: Block) -> int | None:
        try:
            fd = os.open(self.folder / str(block.block_id), os.O_RDONLY)
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_size != block.length:
            os.close(fd)
            return None
        return fd

    def learn_local(self, block: Block, budget: Budget) -> int | None:
        self.learned.append(block.block_id)
        return None

    def open_stream(self, block: Block, offset: int, length: int, budget: Budget) -> FakeStream:
        stream = FakeStream(self, self.block_bytes(block.block_id)[offset : offset + length], self.source, offset)
        self.streams.append(stream)
        return stream

    def start_read(
        self, block: Block, offset: int, length: int, budget: Budget, on_answer: Callable[[], None]
    ) -> FakeStream | None:
        if self.answer == "none":
            return None
        self.started += 1
        if self.answer != "late":
            threading.Thread(target=on_answer).start()
        return self.open_stream(block, offset, length, budget)


class FakeContext:
    """Metadata of the one file."""

    def __init__(self) -> None:
        self.dead = False
        self.confirmed = 0
        self.whole: list[bool] = []
        self.replaced = False
        self.stored_confirmed = False

    def ufs_path(self, inode: int) -> bytes | None:
        return b"/ufs/file"

    def superseded(self, inode: int) -> bool:
        return self.dead

    def confirm_stored(self, entry: Entry, fd: int) -> bool:
        return self.stored_confirmed

    def confirm(self, entry: Entry, *, whole: bool) -> Callable[[], None]:
        self.whole.append(whole)

        def check(limit_s: float | None = None, *, compare: bool = False) -> None:
            self.confirmed += 1
            if self.replaced:
                raise StaleId("replaced")

        return check


def entry_of(content: bytes, block_size: int, *, locations: bool = True) -> Entry:
    count = -(-len(content) // block_size)
    return Entry(
        inode=FILE_ID + 1, parent=1, name=b"f", folder=False, completed=True, persisted=True, in_ufs_tier=False,
        mount_point=False, length=len(content), block_size=block_size, block_count=count,
        locations=((7,),) * count if locations else (), mtime_ms=0, mode=0o644, owner=b"", group=b"", mount_id=1,
        ufs_path=b"",
    )  # fmt: skip


@asynccontextmanager
async def readers_over(
    client: FakeClient, context: FakeContext, metrics: Metrics, **settings: object
) -> AsyncIterator[Readers]:
    readers = Readers(
        client, context, Settings.model_validate(settings), metrics=metrics,
        clock=client.clock if client.needs_s else SystemClock(),
        limiter=trio.CapacityLimiter(8),
    )  # fmt: skip
    async with trio.open_nursery() as nursery:
        await nursery.start(readers.fetcher.run)
        try:
            yield readers
        finally:
            readers.close_all()
            nursery.cancel_scope.cancel()


def content_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("size", [1, 10, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 200 * KIB])
async def test_reader_odd_sizes_give_exact_bytes_everywhere(tmp_path: Path, size: int, local: bool) -> None:
    """User reports 27 and 29: block multiples and their neighbours, tiny files, reads at and past the end."""
    content, block_size = content_of(size), 64 * KIB
    client = FakeClient(content, block_size, tmp_path)
    if local:
        for index in range(-(-size // block_size)):
            client.make_local(index)
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, block_size))
        offsets = {0, 1, size - 1, size, size + 1, size // 2, block_size - 1, block_size, block_size + 1}
        for offset in sorted(o for o in offsets if o >= 0):
            for want in (1, 4096, 128 * KIB, MIB):
                hot = reader.hot_read(offset, want)
                data = await reader.read(offset, want) if hot is None else hot
                assert bytes(data) == content[offset : offset + want], (offset, want)
    assert bool(client.streams) != local


async def test_reader_thousands_of_random_reads_equal_the_content(tmp_path: Path) -> None:
    content, block_size = content_of(3 * MIB + 12345), MIB
    client = FakeClient(content, block_size, tmp_path)
    client.make_local(1)
    rng = random.Random(4)
    async with readers_over(client, FakeContext(), Metrics(), read_buffer_bytes=MIB, fetch_bytes=256 * KIB) as readers:
        reader = readers.open(entry_of(content, block_size))
        for _ in range(2000):
            offset, want = rng.randrange(len(content) + 100), rng.randrange(1, 300 * KIB)
            hot = reader.hot_read(offset, want)
            data = await reader.read(offset, want) if hot is None else hot
            assert bytes(data) == content[offset : offset + want]
        assert readers.fetcher.buffer.held_bytes <= MIB


async def test_reader_local_bytes_in_memory_are_answered_inline(tmp_path: Path) -> None:
    content = content_of(110 * KIB)
    client, metrics = FakeClient(content, 64 * MIB, tmp_path), Metrics()
    client.make_local(0)
    async with readers_over(client, FakeContext(), metrics) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        data = reader.hot_read(0, 128 * KIB)
        assert data is not None
        assert bytes(data) == content
    assert metrics.snapshot()["fusecache_read_bytes_total{source=local_block}"] == len(content)
    assert not client.streams


async def test_reader_concurrent_reads_fetch_each_byte_once(tmp_path: Path) -> None:
    content = content_of(8 * MIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.gate = threading.Event()
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        seen: list[bool] = []

        async def one(offset: int) -> None:
            seen.append(bytes(await reader.read(offset, 128 * KIB)) == content[offset : offset + 128 * KIB])

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                for offset in range(0, MIB, 128 * KIB):
                    nursery.start_soon(one, offset)
            await trio.testing.wait_all_tasks_blocked(0.01)
            client.gate.set()
        assert seen == [True] * 32
    # The tasks run in any order, so one may be taken for a sequential reader and fetch ahead; nothing comes twice.
    ranges = sorted(client.fetched)
    assert ranges[0][0] == 0
    assert ranges[-1][1] >= MIB
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges)), ranges


async def test_reader_sequential_read_uses_one_stream_a_block(tmp_path: Path) -> None:
    content, block_size = content_of(16 * MIB), 8 * MIB
    client = FakeClient(content, block_size, tmp_path)
    async with readers_over(client, FakeContext(), Metrics(), fetch_bytes=2 * MIB) as readers:
        reader = readers.open(entry_of(content, block_size))
        got = b"".join([bytes(await reader.read(offset, MIB)) for offset in range(0, len(content), MIB)])
        assert got == content
    assert len(client.streams) == 2
    assert all(stream.closed for stream in client.streams)


async def test_reader_failed_fetch_is_an_error_and_the_next_read_tries_again(tmp_path: Path) -> None:
    content = content_of(MIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.fail_reads = True
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        with pytest.raises(Unavailable):
            await reader.read(0, 4096)
        client.fail_reads = False
        assert bytes(await reader.read(0, 4096)) == content[:4096]


async def test_reader_slow_source_is_given_longer_and_longer(tmp_path: Path) -> None:
    """A source that needs 30 s for a fetch unit delivers in the end; equal tries of 5 s would never have."""
    content = content_of(MIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.needs_s = 30.0
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        assert bytes(await reader.read(0, MIB)) == content
    assert client.given_s == [5.0, 10.0, 20.0, 40.0]


async def test_reader_truncated_block_file_is_not_used(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    """A block file cut under an open descriptor: the bytes come from elsewhere, none is invented."""
    content = content_of(256 * KIB)
    client, metrics = FakeClient(content, 64 * MIB, tmp_path), Metrics()
    path = client.make_local(0)
    expected_logs(r"local block file failed")
    async with readers_over(client, FakeContext(), metrics) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        assert reader.hot_read(0, 4096) is not None
        os.truncate(path, 100 * KIB)
        assert reader.hot_read(64 * KIB, 128 * KIB) is None
        assert bytes(await reader.read(64 * KIB, 128 * KIB)) == content[64 * KIB : 192 * KIB]
    assert metrics.snapshot()["fusecache_block_sources_failed_total{source=local_block}"] == 1


async def test_reader_bytes_from_the_under_storage_are_confirmed(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        assert bytes(await reader.read(0, len(content))) == content
        assert context.confirmed == 1


@pytest.mark.parametrize("answer", ["none", "part", "all", "late"])
@pytest.mark.parametrize("source", ["block_worker", "ufs"])
async def test_reader_bytes_that_are_there_or_not_when_nobody_waits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, source: str
) -> None:
    monkeypatch.setattr(fetcher, "PROMPT_S", 0.02 if answer == "late" else 10.0)
    content = content_of(200 * KIB)
    client, context, metrics = FakeClient(content, 64 * KIB, tmp_path, source=source), FakeContext(), Metrics()
    client.answer = answer
    async with readers_over(client, context, metrics) as readers:
        reader = readers.open(entry_of(content, 64 * KIB))
        assert bytes(await reader.read(100, 150 * KIB)) == content[100 : 100 + 150 * KIB]
        assert context.confirmed == (3 if source == "ufs" else 0)
        assert metrics.snapshot()[f"fusecache_read_bytes_total{{source={source}}}"] == 192 * KIB
    assert client.started == (0 if answer == "none" else 3)
    assert client.asked_ready == (3 if answer in ("part", "all") else 0)
    assert len(client.streams) == 3, "a thread goes on with the stream that was started"
    assert all(stream.closed for stream in client.streams)


@pytest.mark.parametrize("error", [Unavailable("spent"), RuntimeError("a bug")])
async def test_reader_failure_of_what_is_there_fails_the_read_and_closes_the_stream(
    tmp_path: Path, expected_logs: Declare, error: Exception
) -> None:
    expected_logs("fetch failed unexpectedly", optional=True)
    content = content_of(100 * KIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.answer, client.read_error = "all", error
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        with pytest.raises(type(error)):
            await reader.read(0, 4096)
    assert [stream.closed for stream in client.streams] == [True]


async def test_reader_shutdown_while_an_answer_is_awaited_closes_the_stream(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.answer = "late"

    async def read() -> None:
        with pytest.raises(UpstreamError, match="shut down"):
            await reader.read(0, 4096)

    async with trio.open_nursery() as nursery, readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        nursery.start_soon(read)
        while not client.streams:
            await trio.sleep(0)
    assert [stream.closed for stream in client.streams] == [True]


async def test_reader_starts_no_more_reads_than_there_are_threads_for(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client = FakeClient(content, 64 * MIB, tmp_path)
    client.answer = "all"
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        readers.limiter.total_tokens = 1
        async with trio.open_nursery() as nursery, readers.limiter:
            nursery.start_soon(reader.read, 0, 4096)
            await trio.testing.wait_all_tasks_blocked()
            assert not client.streams
        assert len(client.streams) == 1
    assert client.started == 0


@pytest.mark.parametrize("confirmed", [False, True])
async def test_reader_block_stored_while_open_needs_a_call_unless_its_folder_was_compared(
    tmp_path: Path, confirmed: bool
) -> None:
    """S03; a reader behind the gate lives on, so its second epoch would cost a call per file."""
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        assert bytes(await reader.read(0, MIB)) == content
        fetched, streams = context.confirmed, len(client.streams)
        client.make_local(0)
        context.stored_confirmed = confirmed
        assert reader.hot_read(4096, MIB) is None, "only the start of a pass looks for it"
        assert bytes(reader.hot_read(0, MIB) or await reader.read(0, MIB)) == content
        assert (context.confirmed - fetched, len(client.streams)) == (0 if confirmed else 1, streams)
        assert bytes(reader.hot_read(0, MIB) or b"") == content, "from now on like any other"
        stored = readers.open_blocks.open(reader.block(0))
        assert stored is not None
        readers.open_blocks.close(stored)  # as for lack of room
        assert bytes(reader.hot_read(0, MIB) or b"") == content
        assert (context.confirmed - fetched, len(client.streams)) == (0 if confirmed else 1, streams)


async def test_reader_block_stored_of_a_replaced_id_is_stale(tmp_path: Path) -> None:
    """S03: what was stored while the file was open may be the version after this one."""
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        assert bytes(await reader.read(0, MIB)) == content
        client.make_local(0)
        context.replaced = True
        with pytest.raises(StaleId):
            await reader.read(0, MIB)


async def test_reader_replaced_bytes_that_are_there_are_stale(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    client.answer, context.replaced = "all", True
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        with pytest.raises(StaleId):
            await reader.read(0, 4096)
    assert [stream.closed for stream in client.streams] == [True]


async def test_reader_replaced_file_is_stale_not_the_new_bytes(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    context.replaced = True
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        with pytest.raises(StaleId):
            await reader.read(0, 4096)
        assert context.confirmed == 1


async def test_reader_superseded_id_never_names_the_under_storage(tmp_path: Path) -> None:
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path), FakeContext()
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        assert reader.block(0).ufs_path == b"/ufs/file"
        context.dead = True
        assert reader.block(0).ufs_path is None


async def test_reader_incomplete_file_can_not_be_opened(tmp_path: Path) -> None:
    client = FakeClient(b"", MIB, tmp_path)
    async with readers_over(client, FakeContext(), Metrics()) as readers:
        with pytest.raises(Incomplete):
            readers.open(entry_of(b"x", MIB)._replace(completed=False))


async def test_reader_release_closes_descriptors_and_forgets_bytes(tmp_path: Path) -> None:
    content = content_of(2 * MIB)
    client, metrics = FakeClient(content, MIB, tmp_path), Metrics()
    client.make_local(0)
    async with readers_over(client, FakeContext(), metrics) as readers:
        reader = readers.open(entry_of(content, MIB))
        readers.open(entry_of(content, MIB))
        assert reader.hot_read(0, 4096) is not None
        await reader.read(MIB, 4096)
        readers.release(FILE_ID + 1)
        assert len(readers.open_blocks) == 1
        readers.release(FILE_ID + 1)
        assert len(readers.open_blocks) == 0
        assert readers.fetcher.buffer.held_bytes == 0
        assert metrics.snapshot()["fusecache_open_files"] == 0


async def test_reader_open_blocks_stay_below_the_limit(tmp_path: Path) -> None:
    content, block_size = content_of(40 * KIB), KIB
    client = FakeClient(content, block_size, tmp_path)
    for index in range(40):
        client.make_local(index)
    async with readers_over(client, FakeContext(), Metrics(), max_open_blocks=16) as readers:
        reader = readers.open(entry_of(content, block_size))
        for _ in range(2):
            for offset in range(0, len(content), KIB):
                data = reader.hot_read(offset, KIB)
                assert data is not None
                assert bytes(data) == content[offset : offset + KIB]
        assert len(readers.open_blocks) <= 16


async def test_reader_linked_block_file_that_is_written_to_is_not_used(tmp_path: Path) -> None:
    """A block that is a hard link to a source file holds other bytes once somebody writes into that file."""
    content = content_of(256 * KIB)
    client, metrics = FakeClient(content, 64 * MIB, tmp_path), Metrics()
    path = client.make_local(0)
    os.utime(path, ns=(1, 1))
    os.link(path, tmp_path / "source")
    async with readers_over(client, FakeContext(), metrics) as readers:
        reader = readers.open(entry_of(content, 64 * MIB))
        assert reader.hot_read(0, 4096) is not None
        with open(tmp_path / "source", "r+b") as file:
            file.write(b"x" * (256 * KIB))
        assert reader.hot_read(64 * KIB, 4096) is None
        assert bytes(await reader.read(64 * KIB, 4096)) == content[64 * KIB : 68 * KIB]
        assert reader.hot_read(64 * KIB, 4096) is None, "not opened again either"
    assert metrics.snapshot()["fusecache_block_sources_failed_total{source=local_block}"] == 1


async def test_reader_source_that_ends_early_is_stale_when_the_file_was_replaced(tmp_path: Path) -> None:
    """A shorter file under the same path: the block worker's stream ends early, which alone would be EIO."""
    content = content_of(100 * KIB)
    client, context = FakeClient(content, 64 * MIB, tmp_path, source="ufs"), FakeContext()
    client.read_error = ProtocolError("stream ended too early")
    async with readers_over(client, context, Metrics()) as readers:
        reader = readers.open(entry_of(content, 64 * MIB, locations=False))
        with pytest.raises(ProtocolError):
            await reader.read(0, 4096)
        context.replaced = True
        with pytest.raises(StaleId):
            await reader.read(0, 4096)
        assert context.confirmed == 2
