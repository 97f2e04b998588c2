"""The agent's socket for metadata: who may use it, what it takes, and that one bad worker is its own problem."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache import logs
from fusecache.cache.record import Entry
from fusecache.cache.tree import ROOT
from fusecache.daemon import agent_messages as messages
from fusecache.daemon import metadata_service
from fusecache.daemon.agent_messages import Frames
from fusecache.errors import FusecacheError, ProtocolError, StaleId
from fusecache.metrics import Metrics
from tests.support.log_noise import Declare
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t3_operations.remote_rig import SharedMount, shared_mount
from tests.t3_operations.test_remote_tree import until

HELLO = {"tell": "hello", "index": 7, "pid": 1, "token": "t"}


@pytest.fixture
def model() -> AlluxioModel:
    model = AlluxioModel()
    for number in range(5):
        model.write(b"/f%d" % number, number)
    return model


class Raw:
    """A connection that says what the test wants."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.frames = Frames(stream, messages.MAX_FROM_AGENT)

    async def say(self, message: dict[str, Any]) -> None:
        await self.stream.send_all(messages.frame(message))

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        await self.say({**message, "id": 1})
        answer = await self.frames.next()
        assert answer is not None
        return answer

    async def closed(self) -> bool:
        """Wait until the other side closes; True when it did so without an answer."""
        try:
            return await self.frames.next() is None
        except (trio.BrokenResourceError, ProtocolError):
            return True


@asynccontextmanager
async def raw(mount: SharedMount, *, hello: bool = True) -> AsyncIterator[Raw]:
    connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await connection.connect(str(mount.socket))
    async with trio.SocketStream(connection) as stream:
        peer = Raw(stream)
        if hello:
            await peer.say(HELLO)
        yield peer


async def test_socket_is_private_and_replaces_that_of_a_killed_agent(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        for _ in range(2):
            async with mount.living_agent():
                assert stat.S_IMODE(mount.socket.stat().st_mode) == 0o600
                assert stat.S_IMODE(mount.socket.parent.stat().st_mode) == 0o700
                async with raw(mount) as peer:
                    assert "entries" in await peer.ask({"ask": "getattr", "inode": ROOT})


def name(text: bytes) -> str:
    return messages.packed_bytes(text)


@pytest.mark.parametrize(
    "message",
    [
        {"ask": "getattr", "inode": 1},  # no id
        {"ask": "getattr", "inode": 1, "id": -1},
        {"ask": "getattr", "inode": 1, "id": "1"},
        {"ask": "getattr", "inode": 1, "id": True},
        {"ask": "getattr", "id": 1},
        {"ask": "getattr", "inode": 1 << 64, "id": 1},
        {"ask": "getattr", "inode": 1.5, "id": 1},
        {"ask": "lookup", "parent": 1, "name": "not base64!", "id": 1},
        {"ask": "lookup", "parent": 1, "name": name(b""), "id": 1},
        {"ask": "lookup", "parent": 1, "name": name(b".."), "id": 1},
        {"ask": "lookup", "parent": 1, "name": name(b"a/b"), "id": 1},
        {"ask": "lookup", "parent": 1, "name": name(b"a\0"), "id": 1},
        {"ask": "lookup", "parent": 1, "name": name(b"x" * 256), "id": 1},
        {"ask": "children", "inode": 1, "after": -1, "limit": 5, "id": 1},
        {"ask": "run", "id": 1},
        {"ask": ["lookup"], "id": 1},
        {"tell": "used", "folders": [1, "2"]},
        {"tell": "used", "folders": list(range(5000))},
        {"tell": "used", "folders": {"1": 2}},
        {"tell": "metrics", "dump": [["no_such_metric", [], 1]]},
        {"tell": "metrics", "dump": [["fusecache_requests_total", [], 1]]},
        {"tell": "metrics", "dump": [["fusecache_requests_total", ["read"], "many"]]},
        {"tell": "metrics"},
        {"tell": "nothing"},
        {},
    ],
)
async def test_message_that_can_not_be_ends_its_connection_and_no_other(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, message: dict[str, Any], expected_logs: Declare
) -> None:
    expected_logs("a worker was not understood", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker, raw(mount) as peer:
            await peer.say(message)
            assert await peer.closed()
            await until(lambda: [line.number for line in agent.service.workers()] == [0])
            assert (await worker.tree.lookup(ROOT, b"f1")).length == 1


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", messages.MAX_FROM_WORKER + 1),
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000,
        struct.pack("<I", 3) + b"{a}",
        struct.pack("<I", 4) + b"1234",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 20_000) + b"[" * 20_000,
        struct.pack("<I", 2) + b"\xff\xfe",
        struct.pack("<I", 0),
    ],
)
async def test_bytes_that_are_no_message_end_their_connection(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, sent: bytes, expected_logs: Declare
) -> None:
    expected_logs("a worker was not understood", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker, raw(mount) as peer:
            await peer.stream.send_all(sent)
            assert await peer.closed()
            assert (await worker.tree.lookup(ROOT, b"f1")).length == 1


async def test_connection_that_ends_within_a_message_is_forgotten(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, expected_logs: Declare
) -> None:
    expected_logs("a worker was not understood", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent:
            async with raw(mount) as peer:
                await until(lambda: len(agent.service.workers()) == 1)
                await peer.stream.send_all(struct.pack("<I", 100) + b"{")
            await until(lambda: agent.service.workers() == [])


async def test_peer_that_says_nothing_is_cut_off(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, raw(mount, hello=False) as peer:
            await until(lambda: agent.service._connections == 1)
            await wait_all_tasks_blocked()
            mock_clock.jump(metadata_service.HELLO_S + 1)
            assert await peer.closed()
            await until(lambda: agent.service._connections == 0)


async def test_worker_that_takes_no_answers_is_cut_off_and_the_others_are_answered(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker() as worker, raw(mount) as peer:
            sent = 0

            async def ask_on() -> None:
                nonlocal sent
                while True:
                    question = {"ask": "children", "inode": ROOT, "after": 0, "limit": 9, "id": sent}
                    await peer.stream.send_all(messages.frame(question))
                    sent += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_on)
                while True:
                    before = sent
                    await wait_all_tasks_blocked(0.05)
                    if sent == before:  # nothing is taken any more
                        break
                nursery.cancel_scope.cancel()
            # At most so many of its questions are worked on; the rest waits in its socket.
            assert sent > metadata_service.MAX_QUESTIONS
            assert max(line.questions for line in agent.service.workers()) < sent
            assert (await worker.tree.lookup(ROOT, b"f1")).length == 1
            mock_clock.jump(metadata_service.SEND_S + 1)
            await until(lambda: [line.number for line in agent.service.workers()] == [0])
            assert (await worker.tree.lookup(ROOT, b"f2")).length == 2


async def test_connections_are_bounded(
    tmp_path: Path,
    mock_clock: MockClock,
    model: AlluxioModel,
    monkeypatch: pytest.MonkeyPatch,
    expected_logs: Declare,
) -> None:
    expected_logs("a connection for metadata was refused", count=1)
    monkeypatch.setattr(metadata_service, "MAX_CONNECTIONS", 2)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, raw(mount) as first, raw(mount):
            await until(lambda: len(agent.service.workers()) == 2)
            async with raw(mount, hello=False) as third:
                assert await third.closed()
            assert "entries" in await first.ask({"ask": "getattr", "inode": ROOT})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_other_users_are_refused(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, expected_logs: Declare
) -> None:
    expected_logs("a connection for metadata was refused", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent():
            # As if the folder let anybody in.
            mount.socket.chmod(0o666)
            for folder in (mount.socket.parent, *mount.socket.parent.parents):
                if folder.owner() == "root" and folder != Path("/"):
                    folder.chmod(folder.stat().st_mode | 0o055)
            command = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(9))"
            found = await trio.run_process(
                ["/usr/bin/env", "python3", "-c", command, str(mount.socket)],
                capture_stdout=True,
                user=65534,
                group=65534,
                extra_groups=(),
            )
            assert found.stdout == b"b''\n"


async def test_answer_that_fails_unexpectedly_is_an_error_and_the_service_goes_on(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, expected_logs: Declare
) -> None:
    expected_logs("a question about metadata could not be answered", count=1)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            with pytest.raises(FusecacheError, match="see its log"):
                await worker.tree.ask("echo")  # the handler wants a text
            assert await worker.tree.ask("echo", text="again") == {"said": "again"}


async def test_answer_that_is_too_long_is_an_error(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FROM_AGENT", 4096)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            with pytest.raises(ProtocolError, match="too long"):
                await worker.tree.ask("echo", text="x" * 5000)
            assert await worker.tree.ask("echo", text="x") == {"said": "x"}


async def test_page_ends_at_its_bytes_and_the_listing_goes_on(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PAGE_BYTES", 200)
    model.write(b"/growing", 1, completed=False)  # so that nobody lists it without the agent
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent(), mount.worker() as worker:
            assert 0 < len(await worker.tree.children(ROOT, 0, 100)) < 6
            assert len(await worker.list_all(ROOT, page=100)) == 6


# ---- what workers count ----


async def test_metrics_are_of_all_workers_also_of_those_that_are_gone(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel
) -> None:
    def count(metrics: Metrics, name: str) -> float:
        return metrics.snapshot().get(name, 0.0)

    requests = "fusecache_requests_total{op=read}"
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent:
            agent.metrics.counter("fusecache_requests_total", op="read").inc(1)
            async with mount.worker(0) as first:
                first.metrics.counter("fusecache_requests_total", op="read").inc(10)
                first.metrics.gauge("fusecache_open_files").set(3)
                first.metrics.histogram("fusecache_request_duration_seconds", op="read").observe(0.001)
                async with mount.worker(1) as second:
                    second.metrics.counter("fusecache_requests_total", op="read").inc(100)
                    second.metrics.gauge("fusecache_open_files").set(4)
                    second.metrics.histogram("fusecache_request_duration_seconds", op="read").observe(5.0)
                    gathered = await agent.service.gathered_metrics()
                    assert count(gathered, requests) == 111
                    assert count(gathered, "fusecache_open_files") == 7
                    assert count(gathered, "fusecache_request_duration_seconds_count{op=read}") == 2
                    assert count(gathered, "fusecache_request_duration_seconds_sum{op=read}") == 5.001
                    assert 'fusecache_requests_total{op="read"} 111.0' in gathered.exposition()
                await until(lambda: len(agent.service.workers()) == 1)
                gathered = await agent.service.gathered_metrics()
                assert count(gathered, requests) == 111
                assert count(gathered, "fusecache_open_files") == 3
                assert count(await agent.service.gathered_metrics(), requests) == 111


async def test_metrics_of_many_dead_workers_are_summed_up(
    tmp_path: Path, mock_clock: MockClock, model: AlluxioModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_service, "MAX_REMEMBERED", 2)
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent:
            for number in range(5):
                async with mount.worker(number) as worker:
                    worker.metrics.counter("fusecache_requests_total", op="read").inc(10**number)
                    await agent.service.gathered_metrics()
                await until(lambda: agent.service.workers() == [])
            assert len(agent.service._counted) == 2
            gathered = await agent.service.gathered_metrics()
            assert gathered.snapshot()["fusecache_requests_total{op=read}"] == 11111


async def test_log_level_is_set_in_workers(tmp_path: Path, mock_clock: MockClock, model: AlluxioModel) -> None:
    before = logs.level()
    with shared_mount(tmp_path, model, mock_clock) as mount:
        async with mount.living_agent() as agent, mount.worker():
            try:
                await agent.service.set_log_level("error")
                assert logs.level() == "error"
            finally:
                logs.set_level(next(level for level in logs.LEVELS if level == before))


# ---- messages ----

ENTRIES = st.builds(
    Entry,
    st.integers(2, 2**64 - 1),
    st.integers(1, 2**64 - 1),
    st.binary(min_size=1, max_size=255),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**63),
    st.integers(0, 2**40),
    st.integers(0, 2**30),
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple), max_size=4).map(tuple),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 0xFFFF),
    st.binary(max_size=255),
    st.binary(max_size=255),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=300),
)


@given(ENTRIES, st.floats(0, 1e9))
def test_entry_comes_over_as_it_was(entry: Entry, kernel_until: float) -> None:
    text = json.dumps(messages.packed_entry(entry, kernel_until=kernel_until))
    assert messages.told_entry(json.loads(text), "kernel_until") == (entry, kernel_until)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["inode", "parent", "record", "until", "error", "text", "entries"]), JSON))
def test_any_answer_is_an_entry_or_a_protocol_error(answer: dict[str, Any]) -> None:
    for read in (
        lambda: messages.told_entry(answer, "until"),
        lambda: messages.told_entries(answer, "entries", "until"),
        lambda: messages.number(answer, "inode"),
        lambda: messages.seconds(answer, "until"),
        lambda: messages.name(answer, "record"),
        lambda: messages.numbers(answer, "entries", 3),
        lambda: messages.told_error(answer),
    ):
        with suppress(ProtocolError):
            read()


def test_error_comes_over_by_its_name() -> None:
    error = messages.told_error(messages.packed_error(StaleId("file 7 is gone")))
    assert type(error) is StaleId
    assert str(error) == "file 7 is gone"
    assert type(messages.told_error({"error": "SystemExit", "text": "no"})) is FusecacheError


class Pieces:
    """A stream that gives its bytes in the pieces it was given."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@given(st.lists(st.dictionaries(st.text(max_size=4), st.integers()), max_size=5), st.integers(1, 40))
def test_messages_are_found_however_the_bytes_come(sent: list[dict[str, int]], piece: int) -> None:
    whole = b"".join(messages.frame(message) for message in sent)
    frames = Frames(Pieces([whole[at : at + piece] for at in range(0, len(whole), piece)]), 10_000)

    async def receive() -> list[dict[str, Any]]:
        found = []
        while (message := await frames.next()) is not None:
            found.append(message)
        return found

    assert trio.run(receive) == sent


@given(st.binary(max_size=64))
def test_any_bytes_are_messages_or_a_protocol_error(sent: bytes) -> None:
    async def receive() -> None:
        frames = Frames(Pieces([sent]), 1000)
        try:
            while await frames.next() is not None:
                pass
        except ProtocolError:
            pass

    trio.run(receive)
