"""Which block files a worker offers to the gate: confirmed ones only."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from fusecache.alluxio.model import Block
from fusecache.cache.record import Entry
from fusecache.clock import SystemClock
from fusecache.daemon.comparisons import Comparisons
from fusecache.daemon.passthrough_offers import PassthroughOffers
from fusecache.errors import Unavailable
from fusecache.kernel.offers import MOST_AT_ONCE, MOST_PENDING, OfferReceiver, OfferSender, close_all
from fusecache.prefetch.open_blocks import OpenBlock, OpenBlocks

FOLDER = 77


class Metadata:
    """Answers "confirm" as the agent does, or fails."""

    def __init__(self) -> None:
        self.immutable = False
        self.current = True
        self.takes_s = 0.0
        self.failing = False
        self.asked: list[int] = []

    def is_immutable(self, folder: int) -> bool:
        return self.immutable

    def is_current(self, inode: int) -> bool:
        return self.current

    async def ask(self, kind: str, **fields: object) -> dict[str, object]:
        assert kind == "confirm"
        folder = fields["folder"]
        assert isinstance(folder, int)
        self.asked.append(folder)
        await trio.sleep(self.takes_s)
        if self.failing:
            raise Unavailable("no answer")
        return {}


def entry_of(inode: int, length: int) -> Entry:
    return Entry(
        inode, FOLDER, b"f", False, True, True, False, False, length, 1 << 20, 1, ((1,),), 0, 0o644, b"", b"", 1, b""
    )  # fmt: skip


class LoopClock(SystemClock):
    """The event loop's time, which a test can move."""

    def now(self) -> float:
        return trio.current_time()


class Offering(NamedTuple):
    """A worker's offers, and who hears them."""

    metadata: Metadata
    offers: PassthroughOffers
    comparisons: Comparisons
    gate: OfferReceiver


@pytest.fixture
def offering() -> Iterator[Offering]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = OfferReceiver(ours.detach())
    metadata = Metadata()
    comparisons = Comparisons(metadata, SystemClock())
    offers = PassthroughOffers(theirs.detach(), comparisons)
    yield Offering(metadata, offers, comparisons, receiver)
    offers.close()
    receiver.close()


@pytest.fixture
def block(tmp_path: Path) -> Iterator[OpenBlock]:
    path = tmp_path / "block"
    path.write_bytes(b"content")
    blocks = OpenBlocks(lambda block: None, 4)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    opened = blocks.adopt(Block(1, 7, (), None, 0, 0, False), fd)
    yield opened
    blocks.close_all()


def taken(receiver: OfferReceiver, inode: int) -> bytes | None:
    """What the gate would read of an offered file."""
    taken = receiver.take(inode)
    try:
        return os.pread(taken[0].descriptor, 100, 0) if taken else None
    finally:
        close_all(taken)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.002)


@asynccontextmanager
async def compared(offering: Offering, block: OpenBlock) -> AsyncIterator[None]:
    """A first offer gave the gate nothing, and had the folder compared."""
    metadata, offers, comparisons, gate = offering
    time.sleep(0.02)  # the file system's clock ticks every few milliseconds: the block is older than what follows
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comparisons.run)
        offers.offer(entry_of(5, 7), 0, block)
        assert taken(gate, 5) is None
        await until(lambda: metadata.asked == [FOLDER])
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def test_passthrough_offers_immutable_data_at_once(offering: Offering, block: OpenBlock) -> None:
    metadata, offers, _, gate = offering
    metadata.immutable = True
    offers.offer(entry_of(5, 7), 0, block)
    assert taken(gate, 5) == b"content"
    assert metadata.asked == []


async def test_passthrough_offers_nothing_before_the_folder_is_confirmed(offering: Offering, block: OpenBlock) -> None:
    """S34: the first open is an ordinary one; the comparison that it asks for lets the next one through."""
    async with compared(offering, block):
        offering.offers.offer(entry_of(5, 7), 0, block)
        assert taken(offering.gate, 5) == b"content"


async def test_passthrough_offers_no_block_that_came_after_the_comparison(
    offering: Offering, block: OpenBlock, tmp_path: Path
) -> None:
    """S34: a block stored later may hold what Alluxio has not noticed yet."""
    _, offers, _, gate = offering
    async with compared(offering, block):
        time.sleep(0.02)
        os.rename(tmp_path / "block", tmp_path / "moved into place")  # changes its ctime, as the block worker does
        offers.offer(entry_of(5, 7), 0, block)
        assert taken(gate, 5) is None


async def test_passthrough_offers_nothing_of_an_id_that_the_comparison_found_replaced(
    offering: Offering, block: OpenBlock
) -> None:
    """S34: the block of a replaced id may have been stored after the change, which is what the comparison found."""
    metadata, offers, _, gate = offering
    async with compared(offering, block):
        metadata.current = False
        offers.offer(entry_of(5, 7), 0, block)
        assert taken(gate, 5) is None


async def test_passthrough_offers_large_folder_is_not_compared_all_the_time(
    offering: Offering, block: OpenBlock, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A comparison that took a minute is not asked for again for ten, however many blocks are stored meanwhile."""
    metadata = offering.metadata
    metadata.takes_s = 60.0
    comparisons = Comparisons(metadata, LoopClock())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comparisons.run)
        asked = []
        for _ in range(20 * 60):
            comparisons.confirm(entry_of(5, 7), block.fd)
            await trio.sleep(1)
            os.utime(tmp_path / "block")  # another block was stored
            asked.append(len(metadata.asked))
        assert asked[-1] == 2
        nursery.cancel_scope.cancel()


async def test_passthrough_offers_nothing_while_nobody_can_confirm(offering: Offering, block: OpenBlock) -> None:
    """And the agent is not asked again for each open."""
    metadata, offers, comparisons, gate = offering
    metadata.failing = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(comparisons.run)
        for _ in range(3):
            offers.offer(entry_of(5, 7), 0, block)
            await until(lambda: metadata.asked == [FOLDER])
            await trio.testing.wait_all_tasks_blocked()
            assert taken(gate, 5) is None
        nursery.cancel_scope.cancel()


async def test_passthrough_offers_forget_confirmations_when_the_wall_clock_jumps(
    offering: Offering, block: OpenBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was put back would make a new block look older than an old comparison."""
    _, offers, _, gate = offering
    async with compared(offering, block):
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        offers.offer(entry_of(5, 7), 0, block)
        assert taken(gate, 5) is None


def test_f17_offers_without_end_do_not_take_all_descriptors(tmp_path: Path) -> None:
    """A worker that offers and does not answer: the oldest are closed, whether of one inode or of many."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver, sender = OfferReceiver(ours.detach()), OfferSender(theirs.detach())
    path = tmp_path / "block"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(4 * MOST_PENDING):
            assert sender.offer(number // 32, file.fileno(), number % 32, 7)
            assert receiver.take(10**6) == []  # nobody's: but everything is received
        assert len(os.listdir("/proc/self/fd")) - before == MOST_PENDING
        assert taken(receiver, 4 * MOST_PENDING // 32 - 1) == b"content", "the latest are there"
        assert taken(receiver, 0) is None
    sender.close()
    receiver.close()


class Endless(socket.socket):
    """The gate's end of a worker that offers faster than anybody can take."""

    taken = 0

    def recvmsg(self, *arguments: Any) -> Any:
        self.taken += 1
        assert self.taken <= MOST_AT_ONCE, "the gate would be here for ever"
        return b"no offer", [], 0, None


def test_a_worker_that_never_stops_offering_does_not_keep_the_gate() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver = OfferReceiver(os.dup(ours.fileno()))
    receiver._socket.close()
    receiver._socket = endless = Endless(fileno=ours.detach())
    for calls in range(1, 3):
        assert receiver.take(50) == []
        assert receiver.refused == calls * MOST_AT_ONCE
        endless.taken = 0
    receiver.close()
    theirs.close()
