"""When a part is asked for a sign of life, and when its silence counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.supervisor.part_watch import PartWatch

START_S = 30.0


def test_a_part_that_answers_is_asked_again_and_again() -> None:
    watch = PartWatch(30.0, START_S)
    said = []
    for now_s in range(100, 130):
        said.append(watch.look(float(now_s)))
        watch.answered()
    assert [index for index, verdict in enumerate(said) if verdict == "ask"] == [0, 5, 10, 15, 20, 25]
    assert set(said) == {"ask", "wait"}


def started(silent_s: float) -> PartWatch:
    """One whose part has said something."""
    watch = PartWatch(silent_s, START_S)
    watch.answered()
    return watch


def test_a_part_that_is_starting_has_longer() -> None:
    watch = PartWatch(3.0, START_S)
    verdicts = [watch.look(100.0 + second) for second in range(32)]
    assert verdicts.count("stuck") == 1
    assert verdicts[31] == "stuck"


def test_a_part_that_is_silent_is_stuck_once() -> None:
    watch = started(3.0)
    assert [watch.look(100.0 + second) for second in range(8)] == [
        "ask", "wait", "wait", "wait", "stuck", "wait", "wait", "ask",
    ]  # fmt: skip


def test_silence_counts_from_the_question() -> None:
    """The supervisor itself was stopped for an hour: the part was not asked meanwhile."""
    watch = PartWatch(3.0, START_S)
    assert watch.look(100.0) == "ask"
    watch.answered()
    assert watch.look(3700.0) == "ask"


def test_a_question_that_was_open_while_everything_was_frozen_counts_anew() -> None:
    """The part goes on a moment after who looks: its answer is not there yet."""
    watch = started(3.0)
    assert watch.look(100.0) == "ask"
    verdicts = [watch.look(3700.0 + second) for second in range(5)]
    assert verdicts == ["wait", "wait", "wait", "wait", "stuck"]


def test_another_process_is_not_blamed_for_the_last_one_and_asked_at_once() -> None:
    watch = PartWatch(3.0, START_S)
    assert watch.look(100.0) == "ask"
    watch.started()
    assert watch.look(100.1) == "ask"
    watch.started()
    assert watch.look(110.0) == "ask"


@given(st.lists(st.tuples(st.floats(min_value=0.01, max_value=5.0), st.booleans()), max_size=80))
def test_stuck_means_that_a_question_was_open_for_longer_than_the_limit(steps: list[tuple[float, bool]]) -> None:
    watch = started(3.0)
    now_s = 1000.0
    open_since_s: float | None = None
    for wait_s, answers in steps:
        now_s += wait_s
        verdict = watch.look(now_s)
        assert (verdict == "stuck") == (open_since_s is not None and now_s - open_since_s > 3.0)
        if verdict == "ask":
            assert open_since_s is None
            open_since_s = now_s
        if verdict == "stuck":
            open_since_s = None
        if answers:
            watch.answered()
            open_since_s = None
