"""An asyncio loop in a thread of its own, for support code that is called from tests without a loop.

At its end every task that is left is cancelled and waited for (`asyncio.run` does it), gRPC's own ones too: a loop
that is merely stopped destroys them pending, which is an error in the log.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

CALL_S = 20.0


class LoopThread:
    """Started by `start`, ended by `stop`; `do` and `soon` from any other thread in between."""

    def __init__(self, name: str) -> None:
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    def start(self) -> None:
        """Returns when the loop runs."""
        self._thread.start()
        assert self._running.wait(CALL_S)

    def stop(self) -> None:
        """Returns when the thread has ended."""
        assert self._end is not None
        self.soon(self._end.set)
        self._thread.join()

    def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run in the loop and wait for the result."""

        async def run() -> T:
            return await work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(CALL_S)

    def soon(self, call: Callable[[], object]) -> None:
        """Call in the loop, without waiting."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._running.set()
        await self._end.wait()
