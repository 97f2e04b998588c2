"""One question for all who ask at the same time."""

from __future__ import annotations

import pytest
import trio

from fusecache.cache.singleflight import SingleFlight
from fusecache.errors import NotFound, Unavailable


async def test_singleflight_many_callers_ask_once(nursery: trio.Nursery) -> None:
    flights: SingleFlight[str, int] = SingleFlight(nursery)
    asked, answers, go = [], [], trio.Event()

    async def ask() -> int:
        asked.append(1)
        await go.wait()
        return 42

    async def caller() -> None:
        answers.append(await flights.do("key", ask))

    for _ in range(50):
        nursery.start_soon(caller)
    await trio.testing.wait_all_tasks_blocked()
    assert "key" in flights
    go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert (len(asked), answers) == (1, [42] * 50)
    assert len(flights) == 0
    assert await flights.do("key", ask) == 42
    assert len(asked) == 2


async def test_singleflight_nobody_joins_a_question_that_departed(nursery: trio.Nursery) -> None:
    flights: SingleFlight[str, int] = SingleFlight(nursery)
    answers: list[int] = []
    gates = [trio.Event(), trio.Event()]
    asked = []

    async def ask() -> int:
        number = len(asked)
        asked.append(number)
        flights.depart("key")
        await gates[number].wait()
        return number

    async def caller() -> None:
        answers.append(await flights.do("key", ask))

    nursery.start_soon(caller)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(caller)
    await trio.testing.wait_all_tasks_blocked()
    for gate in gates:
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
    assert (answers, len(flights)) == ([0, 1], 0)


async def test_singleflight_cancelled_caller_takes_nothing_from_the_others(nursery: trio.Nursery) -> None:
    flights: SingleFlight[str, int] = SingleFlight(nursery)
    go, answers = trio.Event(), []

    async def ask() -> int:
        await go.wait()
        return 42

    async def other() -> None:
        answers.append(await flights.do("key", ask))

    with trio.CancelScope() as scope:
        nursery.start_soon(other)
        scope.deadline = trio.current_time()
        await flights.do("key", ask)
    assert scope.cancelled_caught
    go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert answers == [42]


async def test_singleflight_error_reaches_every_caller_and_is_not_kept(nursery: trio.Nursery) -> None:
    flights: SingleFlight[str, int] = SingleFlight(nursery)
    errors = []

    async def fail() -> int:
        await trio.lowlevel.checkpoint()
        raise NotFound("gone")

    async def succeed() -> int:
        return 1

    async def caller() -> None:
        with pytest.raises(NotFound) as caught:
            await flights.do("key", fail)
        errors.append(caught.value)

    for _ in range(3):
        nursery.start_soon(caller)
    await trio.testing.wait_all_tasks_blocked()
    assert len(errors) == 3
    assert await flights.do("key", succeed) == 1


async def test_singleflight_shut_down_wakes_the_callers() -> None:
    outcome: list[str] = []
    async with trio.open_nursery() as callers, trio.open_nursery() as inner:
        flights: SingleFlight[str, int] = SingleFlight(inner)

        async def caller() -> None:
            try:
                await flights.do("key", _forever)
            except Unavailable:
                outcome.append("woken")

        callers.start_soon(caller)
        await trio.testing.wait_all_tasks_blocked()
        inner.cancel_scope.cancel()
    assert outcome == ["woken"]
    with pytest.raises(Unavailable):
        await flights.do("key", _forever)


async def _forever() -> int:
    await trio.sleep_forever()
