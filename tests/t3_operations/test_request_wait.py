"""The wait for the kernel's next request: right whether it comes early, late or never, and fair to everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from time import thread_time

import pytest
import trio

from fusecache.fs.request_wait import BURST, _Trio

PATIENCE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


async def test_request_wait_what_is_there_already_needs_no_scheduler_pass(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    seen = _Trio(0)
    with trio.testing.assert_no_checkpoints():
        await seen.lowlevel.wait_readable(pipe[0])


async def test_request_wait_every_burst_the_scheduler_gets_its_turn(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    seen = _Trio(0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        before = turns
        for _ in range(10 * BURST):
            await seen.lowlevel.wait_readable(pipe[0])
        # One pass for every burst; in the first and the last one the other task may stand before or behind this one.
        assert turns - before >= 8
        nursery.cancel_scope.cancel()


async def test_request_wait_late_request_is_waited_for(pipe: tuple[int, int]) -> None:
    seen = _Trio(0.0001)
    async with trio.open_nursery() as nursery:
        done = trio.Event()

        async def wait() -> None:
            await seen.lowlevel.wait_readable(pipe[0])
            done.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not done.is_set()
        os.write(pipe[1], b"x")
        with trio.fail_after(5):
            await done.wait()


async def test_request_wait_spins_only_while_requests_come_fast(pipe: tuple[int, int]) -> None:
    """After one that came late, the next wait goes to sleep at once."""
    seen = _Trio(0.05)
    lowlevel = seen.lowlevel
    lowlevel._spinning = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lowlevel.wait_readable, pipe[0])
        await trio.testing.wait_all_tasks_blocked(0.2)  # it has spun for 0.05 s, in vain
        assert not lowlevel._spinning
        os.write(pipe[1], b"x")
    assert not lowlevel._spinning, "it came after more than twice the time"
    os.read(pipe[0], 1)
    with trio.move_on_after(0) as scope:
        started = thread_time()
        await lowlevel.wait_readable(pipe[0])
    assert scope.cancelled_caught
    assert thread_time() - started < 0.05, "no spinning before it goes to sleep"


async def test_request_wait_lock_keeps_one_holder_and_lets_the_next_in() -> None:
    lock = _Trio(0).Lock()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with lock:
            order.append(f"{name} in")
            await trio.lowlevel.checkpoint()
            order.append(f"{name} out")

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(hold, name)
    assert [entry[2:] for entry in order] == ["in", "out"] * 3


def test_request_wait_everything_else_is_trios_own() -> None:
    seen = _Trio(0)
    assert seen.open_nursery is trio.open_nursery
    assert seen.lowlevel.current_task is trio.lowlevel.current_task


TAKEN_BACK = """
import socket, struct
import pyfuse3, trio, trio.testing
from fusecache.fs import request_wait

ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

def init(unique):
    header = struct.pack("<IIQQIIIHH", 104, 26, unique, 0, 0, 0, 0, 0, 0)
    kernel.send(header + struct.pack("<IIII48x", 7, 38, 1 << 20, 1 << 13))

async def main():
    options = set(pyfuse3.default_options) - {"default_permissions"}
    pyfuse3.init(pyfuse3.Operations(), f"/dev/fd/{ours.fileno()}", options)
    request_wait.install(0)
    wait_readable = pyfuse3.trio.lowlevel.wait_readable
    taken_back = trio.Event()

    async def wait(descriptor):
        await wait_readable(descriptor)
        if not taken_back.is_set():
            assert len(ours.recv(1 << 20)) == 104
            taken_back.set()

    pyfuse3.trio.lowlevel.wait_readable = wait
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        init(2)
        await taken_back.wait()
        await trio.testing.wait_all_tasks_blocked(0.1)
        init(4)
        await trio.lowlevel.wait_readable(kernel)
        print("answered", struct.unpack_from("<IiQ", kernel.recv(1 << 20))[1:], flush=True)
        kernel.close()

trio.run(main)
"""


def test_request_wait_request_that_was_taken_back_does_not_stop_the_process() -> None:
    """Seen: direct readers were killed, one of them between the wait and the read; the others hung until somebody else
    asked for something, because reading with nothing there blocked the whole process."""
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_BACK], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert "answered (0, 4)" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
