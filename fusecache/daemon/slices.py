"""Long work of a thread in slices, so that the event loop, which serves reads, gets the interpreter in between.

For threads started by trio alone: between two slices is also where such a thread ends when the mount does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

SLICE = 64
"""Records looked up or summed between two pauses: about a millisecond of work, in which the interpreter is kept from
reads."""

PAUSE_S = 0.002


def pause() -> None:
    """Let reads go first; end here when the mount ends."""
    trio.from_thread.check_cancelled()
    time.sleep(PAUSE_S)


def every(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """A function that does `call` once in `count` times."""
    left = count

    def counted() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            left = count
            call()

    return counted
