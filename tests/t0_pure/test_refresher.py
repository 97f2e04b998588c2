"""The background refresher's cap and agenda."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.cache.refresher import Agenda, TokenBucket


@given(st.lists(st.floats(0, 5), min_size=1, max_size=200), st.floats(0.1, 50))
def test_bucket_never_lets_more_through_than_its_rate_and_one_burst(pauses: list[float], per_s: float) -> None:
    bucket, now, taken = TokenBucket(per_s, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        taken += bucket.take(now) == 0.0
    assert taken <= now * per_s + max(1.0, per_s) + 1e-6


def test_bucket_says_how_long_to_wait() -> None:
    bucket = TokenBucket(2.0, 0.0)
    assert bucket.take(0.0) == bucket.take(0.0) == 0.0
    wait_s = bucket.take(0.0)
    assert wait_s > 0
    assert bucket.take(wait_s) == 0.0


@given(st.floats(0.01, 1000), st.floats(0, 1e6))
def test_bucket_gives_a_call_to_who_waited_as_long_as_told(per_s: float, now: float) -> None:
    bucket = TokenBucket(per_s, now)
    for _ in range(20):
        now += bucket.take(now)
        if wait_s := bucket.take(now):
            assert bucket.take(now + wait_s) == 0.0
            now += wait_s


def test_bucket_counts_calls_that_can_not_wait() -> None:
    bucket = TokenBucket(1.0, 0.0)
    assert bucket.take(0.0, may_owe=True) == 0.0
    assert bucket.take(0.0, may_owe=True) == 0.0
    assert bucket.take(1.0) > 0.0
    assert bucket.take(2.0) == 0.0


def test_bucket_without_a_rate_never_lets_the_background_through() -> None:
    bucket = TokenBucket(0.0, 0.0)
    assert bucket.take(1e9) == float("inf")
    assert bucket.take(1e9, may_owe=True) == 0.0


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 100)), max_size=300))
def test_agenda_gives_each_folder_once_at_its_latest_time(times: list[tuple[int, float]]) -> None:
    agenda, latest = Agenda(), {}
    for folder, at in times:
        agenda.set(folder, at)
        latest[folder] = at
    assert len(agenda) == len(latest)
    assert agenda.next_at() == (min(latest.values()) if latest else None)
    given_out = []
    while (folder := agenda.pop(100.0)) is not None:
        given_out.append(folder)
    assert [latest[folder] for folder in given_out] == sorted(latest.values())
    assert sorted(given_out) == sorted(latest)


def test_agenda_holds_back_what_is_not_due_or_was_dropped() -> None:
    agenda = Agenda()
    agenda.set(1, 10.0)
    agenda.set(2, 5.0)
    agenda.drop(2)
    assert agenda.pop(9.0) is None
    assert agenda.pop(10.0) == 1
    assert agenda.pop(10.0) is None
