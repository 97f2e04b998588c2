"""Work in threads on a machine that may have none left (F17)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.errors import Unavailable
from fusecache.threads import PATIENCE_S, in_thread, start_if_possible
from tests.support.log_noise import Declare

REFUSED = "can't start new thread"
"""Python's words."""


def refused_times(number: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """trio gets no thread so often; when it tried."""
    tries: list[float] = []
    original = trio.to_thread.run_sync

    async def run_sync(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        tries.append(trio.current_time())
        if len(tries) <= number:
            raise RuntimeError(REFUSED)
        return await original(work, *arguments, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    return tries


async def test_work_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    tries = refused_times(10, monkeypatch)
    assert await in_thread(lambda number: number + 1, 5) == 6
    assert len(tries) == 11
    assert tries[-1] > tries[0], "it did not wait between two tries"


async def test_work_is_unavailable_when_no_thread_comes(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, expected_logs: Declare
) -> None:
    expected_logs("no thread can be started", count=1)
    tries = refused_times(10**6, monkeypatch)
    with pytest.raises(Unavailable, match="no thread"):
        await in_thread(lambda: None)
    assert PATIENCE_S <= tries[-1] - tries[0] < PATIENCE_S + 1


async def test_work_that_gets_no_thread_of_its_own_is_not_done_twice(expected_logs: Declare) -> None:
    expected_logs("no thread can be started", count=1)
    begun = []

    def work() -> None:
        begun.append(1)
        raise RuntimeError(REFUSED)

    with pytest.raises(Unavailable, match="no thread"):
        await in_thread(work)
    assert begun == [1]


async def test_work_that_fails_otherwise_fails_as_ever() -> None:
    def work() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await in_thread(work)


def test_a_thread_that_may_be_left_out_is_left_out(monkeypatch: pytest.MonkeyPatch, expected_logs: Declare) -> None:
    expected_logs("no thread can be started", count=1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError(REFUSED)

    monkeypatch.setattr(threading.Thread, "start", start)
    start_if_possible(threading.Thread(target=lambda: None))
