"""The retry loop and budgets, in a time that only moves when somebody sleeps."""

from __future__ import annotations

import random

import pytest

from fusecache.rpc.budget import Budget
from fusecache.rpc.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, call_with_retry, pause_s
from tests.support.clocks import MovedClock


class Later(Exception):
    """A failure that may pass."""


class Never(Exception):
    """A failure that will not."""


class Flaky:
    """Fails with each of `failures`, then answers; a try takes `takes_s`."""

    def __init__(self, clock: MovedClock, failures: list[Exception], takes_s: float = 0.0) -> None:
        self.clock = clock
        self.failures = list(failures)
        self.takes_s = takes_s
        self.limits: list[float] = []

    def __call__(self, limit_s: float) -> str:
        self.limits.append(limit_s)
        self.clock.time_s += min(self.takes_s, limit_s)
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


def run(clock: MovedClock, call: Flaky, total_s: float, *, try_s: float = 30.0) -> tuple[str, list[int]]:
    retries: list[int] = []
    answer = call_with_retry(
        call,
        budget=Budget(clock, total_s),
        try_s=try_s,
        is_temporary=lambda error: isinstance(error, Later),
        clock=clock,
        rng=random.Random(1),
        on_retry=lambda number, error: retries.append(number),
    )
    return answer, retries


def test_retry_first_answer_is_taken_without_a_pause() -> None:
    clock = MovedClock()
    assert run(clock, Flaky(clock, []), 10.0) == ("answer", [])
    assert clock.slept == []


def test_retry_temporary_failures_are_tried_again_with_growing_pauses() -> None:
    clock = MovedClock()
    answer, retries = run(clock, Flaky(clock, [Later()] * 12), 120.0)
    assert (answer, retries) == ("answer", list(range(1, 13)))
    for number, slept in enumerate(clock.slept, start=1):
        full = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1))
        assert full / 2 <= slept <= full


def test_retry_final_failure_is_raised_at_once() -> None:
    clock = MovedClock()
    call = Flaky(clock, [Later(), Never(), Later()])
    with pytest.raises(Never):
        run(clock, call, 120.0)
    assert len(call.limits) == 2


def test_retry_spent_budget_raises_in_time_what_the_try_before_the_last_said() -> None:
    """The last one has what is left of the budget, and seldom more to say than that."""
    clock = MovedClock()
    call = Flaky(clock, [Later(str(n)) for n in range(1000)])
    with pytest.raises(Later) as raised:
        run(clock, call, 20.0)
    assert clock.time_s - 1000.0 == pytest.approx(20.0)
    tries = len(call.limits)
    assert tries > 2
    assert str(raised.value) == str(tries - 2)
    assert str(raised.value.__cause__) == str(tries - 1)
    assert call.limits[-1] < 0.01, "the last try had no time"


def test_retry_budget_of_one_try_raises_what_that_one_said() -> None:
    clock = MovedClock()
    with pytest.raises(Later, match="alone"):
        run(clock, Flaky(clock, [Later("alone")], takes_s=100.0), 20.0)


def test_retry_no_try_is_given_more_than_what_is_left() -> None:
    clock = MovedClock()
    call = Flaky(clock, [Later()] * 100, takes_s=100.0)
    with pytest.raises(Later):
        run(clock, call, 70.0, try_s=30.0)
    assert call.limits[:2] == [30.0, 30.0]
    assert call.limits[2] < 10.0
    assert clock.time_s - 1000.0 <= 70.0 + 0.001


def test_retry_spent_budget_still_makes_one_try() -> None:
    clock = MovedClock()
    assert run(clock, Flaky(clock, []), 0.0)[0] == "answer"


def test_pause_clients_of_one_restarted_server_do_not_come_back_together() -> None:
    pauses = {round(pause_s(5, random.Random(seed)), 4) for seed in range(100)}
    assert len(pauses) > 90


def test_pause_number_of_tries_may_be_huge() -> None:
    assert pause_s(10_000, random.Random(1)) <= LONGEST_PAUSE_S


def test_budget_part_never_outlives_the_whole() -> None:
    clock = MovedClock()
    budget = Budget(clock, 10.0)
    assert budget.part(3.0).remaining_s() == pytest.approx(3.0)
    clock.sleep(9.0)
    part = budget.part(3.0)
    assert part.remaining_s() == pytest.approx(1.0)
    clock.sleep(1.0)
    assert part.spent()
    assert budget.spent()
