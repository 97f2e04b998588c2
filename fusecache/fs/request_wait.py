"""Waits for the kernel's next request with fewer detours than pyfuse3 takes by itself.

pyfuse3 finds its event loop through its own module attribute `trio` (`pyfuse3.asyncio` replaces it the same way).
Between two requests plain trio makes two passes of its scheduler and registers the descriptor with epoll anew. While
requests come back to back, that costs more than answering them: here poll(2) says first whether a request is there
already, and the lock that keeps one task at the descriptor is taken without a pass when nobody holds it.

A sleeping processor wakes slowly. So after a request the next one is looked for for `spin_s` before going to sleep, but
only while requests come that fast: one that does not come in time ends the spinning until one has come quickly again.
An idle mount never spins. Measured on two quiet cores, 110 KiB files on one thread: 5,300 -> 8,000 warm files a second,
2,500 -> 3,700 cold, with 15 % less processor time a file.

Every BURST requests the scheduler gets its turn all the same, so that threads' results, timers, signals and the control
socket are never kept waiting for longer than so many requests take.

A request that was there may be gone when it is read: the kernel takes it back when its caller is killed. libfuse leaves
the device blocking, and pyfuse3 reads with the interpreter locked: the whole process stood still until somebody else
asked for something, with every request in flight (12 of 20 direct readers that were killed together hung in D state,
once in some hundred times). So the device does not block here, and a read that finds nothing is a wait again.
"""

from __future__ import annotations

import errno
import os
import select
from time import perf_counter
from types import TracebackType
from typing import Any

import pyfuse3
import trio

BURST = 16
"""Requests in a row without a pass of the scheduler: about half a millisecond, two with spinning."""


class _UnhurriedLock:
    """trio.Lock whose `async with` makes no scheduler pass when the lock is free."""

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class _Lowlevel:
    """trio.lowlevel with another `wait_readable`."""

    def __init__(self, spin_s: float) -> None:
        self._spin_s = spin_s
        self._spinning = False
        self._pollers: dict[int, select.poll] = {}
        self._burst = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, descriptor: int) -> None:
        """Return when `descriptor` is readable; without a checkpoint when it is now, or soon, and no turn is due.

        Raises ClosedResourceError, upon which pyfuse3 ends, when it is a socket whose other end (the gate) was closed;
        libfuse would complain about a short read.
        """
        poller = self._pollers.get(descriptor)
        if poller is None:
            poller = self._pollers[descriptor] = select.poll()
            poller.register(descriptor, select.POLLIN)
            os.set_blocking(descriptor, False)
        self._burst += 1
        if self._burst < BURST:
            if found := poller.poll(0):
                return _check(found)
            if self._spinning:
                until = perf_counter() + self._spin_s
                while perf_counter() < until:
                    if found := poller.poll(0):
                        return _check(found)
                self._spinning = False  # traffic has stopped, or comes too slowly for it
        self._burst = 0
        started = perf_counter()
        await trio.lowlevel.wait_readable(descriptor)
        self._spinning = perf_counter() - started < 2 * self._spin_s
        _check(poller.poll(0))


def _check(found: list[tuple[int, int]]) -> None:
    if found and found[0][1] & select.POLLHUP:
        raise trio.ClosedResourceError


_session_loop = pyfuse3._session_loop  # type: ignore[attr-defined]  # not in the stub


async def _serve_on(nursery: trio.Nursery, min_tasks: int, max_tasks: int) -> None:
    """pyfuse3's loop of one task, which takes EAGAIN for the end of the mount (of all errors but EINTR).

    Its buffer is lost then: 1 MiB of addresses, of which a page or two were ever touched.
    """
    while True:
        try:
            await _session_loop(nursery, min_tasks, max_tasks)
        except BlockingIOError as nothing:
            if nothing.errno != errno.EAGAIN:
                raise
        else:
            return


class _Trio:
    """What pyfuse3 sees as trio."""

    Lock = _UnhurriedLock

    def __init__(self, spin_s: float) -> None:
        self.lowlevel = _Lowlevel(spin_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)


def install(spin_s: float) -> None:
    """From now on pyfuse3 waits this way, spinning at most `spin_s` seconds a request; before `pyfuse3.main`."""
    pyfuse3.trio = _Trio(spin_s)  # type: ignore[attr-defined]  # not in the stub
    pyfuse3._session_loop = _serve_on  # type: ignore[attr-defined]
