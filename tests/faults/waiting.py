"""Waiting for a condition, and the errno of a refused request: what the scenarios share."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
from pyfuse3 import FUSEError

POLL_S = 0.02


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within_s: float, what: str) -> float:
    """Seconds until `condition` held; the test fails when it did not within `within_s`."""
    started = trio.current_time()
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return trio.current_time() - started
        assert trio.current_time() - started < within_s, f"not within {within_s} s: {what}"
        await trio.sleep(POLL_S)


@contextmanager
def refused(number: int) -> Iterator[None]:
    """The block must end with this errno, as the kernel would be told."""
    with pytest.raises(FUSEError) as caught:
        yield
    got = caught.value.errno
    assert got == number, f"{errno.errorcode.get(got, got)} instead of {errno.errorcode[number]}"
