"""Which deaths of a part count, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.supervisor.restart_policy import (
    COUNTED_DEATHS,
    HEALTHY_S,
    LOOP_DELAY_S,
    WINDOW_S,
    RestartPolicy,
    Verdict,
)


def test_three_deaths_before_ready_within_the_window_are_a_crash_loop() -> None:
    policy = RestartPolicy()
    assert policy.died(0.0, None) == Verdict(0.0, False)
    assert policy.died(4.0, None) == Verdict(0.0, False)
    assert policy.died(9.9, None) == Verdict(LOOP_DELAY_S, True)


def test_three_deaths_spread_over_more_than_the_window_are_none() -> None:
    policy = RestartPolicy()
    for now_s in (0.0, 5.1, 10.2, 15.3, 20.4):
        assert policy.died(now_s, None) == Verdict(0.0, False)


def test_a_death_right_after_ready_counts_as_well() -> None:
    policy = RestartPolicy()
    verdicts = [policy.died(now_s, now_s - 0.99) for now_s in (1.0, 2.0, 3.0)]
    assert [verdict.looping for verdict in verdicts] == [False, False, True]


def test_a_crash_loop_lasts_until_the_part_was_healthy() -> None:
    policy = RestartPolicy()
    for now_s in (0.0, 0.1, 0.2):
        policy.died(now_s, None)
    assert policy.died(10.3, None) == Verdict(LOOP_DELAY_S, True), "the others are out of the window"
    assert policy.died(30.0, 29.0) == Verdict(0.0, False)
    assert not policy.looping
    assert policy.died(30.1, None) == Verdict(0.0, False), "counting began anew"


@given(st.lists(st.floats(min_value=0.0, max_value=0.5), max_size=100))
def test_kills_of_a_healthy_part_never_count(waits_s: list[float]) -> None:
    policy = RestartPolicy(first_delay_s=0.1)
    now_s = 0.0
    for wait_s in waits_s:
        now_s += HEALTHY_S + wait_s
        assert policy.died(now_s, now_s - HEALTHY_S - wait_s) == Verdict(0.0, False)


@given(st.lists(st.tuples(st.floats(min_value=0.0, max_value=20.0), st.booleans()), max_size=60))
def test_it_loops_exactly_when_enough_counted_deaths_came_together(deaths: list[tuple[float, bool]]) -> None:
    """Against the sentence of the module's docstring, written down again."""
    policy = RestartPolicy()
    now_s = 0.0
    counted: list[float] = []
    looping = False
    for wait_s, healthy in deaths:
        now_s += wait_s
        verdict = policy.died(now_s, now_s - 2 * HEALTHY_S if healthy else None)
        counted = [] if healthy else [*counted, now_s]
        recent = [when for when in counted if now_s - when < WINDOW_S]
        looping = not healthy and (looping or len(recent) >= COUNTED_DEATHS)
        assert verdict.looping == policy.looping == looping
        assert verdict.delay_s == (LOOP_DELAY_S if looping else 0.0)


@pytest.mark.parametrize(("deaths", "delay_s"), [(1, 0.1), (2, 0.2), (3, LOOP_DELAY_S), (4, LOOP_DELAY_S)])
def test_delays_grow(deaths: int, delay_s: float) -> None:
    policy = RestartPolicy(first_delay_s=0.1)
    verdicts = [policy.died(float(number), None) for number in range(deaths)]
    assert verdicts[-1].delay_s == pytest.approx(delay_s)
