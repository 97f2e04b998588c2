"""Who has a mount while it is taken over: the two tables, each row, and what holds for any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.kernel.supervisor.takeover.states import (
    NEW,
    OLD,
    NewCourse,
    NewEvent,
    NewState,
    OldAction,
    OldCourse,
    OldEvent,
    OldState,
)

OLD_EVENTS: tuple[OldEvent, ...] = (
    "hello", "parts ended", "ready", "gate emptied", "gate ended", "serving", "lost", "late", "died serving",
)  # fmt: skip
NEW_EVENTS: tuple[NewEvent, ...] = ("all ready", "drained", "withdrawn", "late", "orphaned")
GATE_BACK: set[OldAction] = {"refill gate", "replace gate"}


def walked(*events: OldEvent) -> tuple[OldState, list[OldAction]]:
    """The state after these events, and all that was done on the way."""
    side = OldCourse(60)
    done: list[OldAction] = []
    for event in events:
        done += side.step(event)
    return side.state, done


def test_an_upgrade_in_order() -> None:
    state, done = walked("hello", "parts ended", "ready", "gate emptied", "serving")
    assert state == "handed over"
    assert done == ["stop parts", "give", "empty gate", "pass on", "leave"]


@pytest.mark.parametrize(
    ("events", "done"),
    [
        (["hello", "lost"], ["start parts"]),
        (["hello", "late"], ["withdraw", "start parts"]),
        (["hello", "parts ended", "lost"], ["start parts"]),
        (["hello", "parts ended", "late"], ["withdraw", "start parts"]),
        (["hello", "parts ended", "gate ended"], ["withdraw", "replace gate", "start parts"]),
        (["hello", "parts ended", "ready", "gate ended"], ["withdraw", "replace gate", "start parts"]),
        (["hello", "parts ended", "ready", "lost", "gate emptied"], ["refill gate", "start parts"]),
        (["hello", "parts ended", "ready", "lost", "gate ended"], ["replace gate", "start parts"]),
        (
            ["hello", "parts ended", "ready", "late", "gate ended"],
            ["withdraw", "kill gate", "replace gate", "start parts"],
        ),
        (["hello", "parts ended", "ready", "gate emptied", "lost"], ["pass on", "refill gate", "start parts"]),
        (
            ["hello", "parts ended", "ready", "gate emptied", "late"],
            ["pass on", "withdraw", "refill gate", "start parts"],
        ),
        (["hello", "parts ended", "ready", "gate emptied", "died serving"], ["pass on", "replace gate", "start parts"]),
    ],
)
def test_every_way_back_to_serving(events: list[OldEvent], done: list[OldAction]) -> None:
    state, actions = walked(*events)
    assert state == "serving"
    assert actions[-len(done) :] == done


@given(st.lists(st.sampled_from(OLD_EVENTS), max_size=40))
def test_in_any_order_it_has_what_it_needs_when_it_serves(events: list[OldEvent]) -> None:
    """Whenever the mount is back, agent and gate run again, and no state on the way lasts for ever."""
    side = OldCourse(60)
    parts, gate = True, True
    with_gate: set[OldState] = {"serving", "yielding", "yielded"}
    for event in events:
        if event in ("gate emptied", "gate ended"):
            # A gate ends once, and is emptied only when it was told to; outside take-overs its end is not this table's.
            if not gate or side.state == "serving" or (event == "gate emptied" and side.state in with_gate):
                continue
            gate = False
        for action in side.step(event):
            parts = {"stop parts": False, "start parts": True}.get(action, parts)
            gate = gate or action in GATE_BACK
        assert gate or side.state not in with_gate
        assert parts or side.state != "serving"
        assert (side.limit_s is not None) == side.is_active


@pytest.mark.parametrize("state", sorted({state for state, _ in OLD} - {"serving"}))
def test_every_state_on_the_way_ends_by_time_and_by_loss(state: OldState) -> None:
    """`returning` waits for its own gate only: nobody is left to be lost."""
    assert (state, "late") in OLD
    assert (state, "lost") in OLD or state == "returning"
    assert (state, "died serving") in OLD or state in ("yielding", "returning")


def test_nothing_but_serving_makes_the_old_side_leave() -> None:
    leaving = {key for key, (_, actions) in OLD.items() if "leave" in actions}
    assert leaving == {("drained", "serving")}


def test_the_new_side_in_order_and_alone() -> None:
    side = NewCourse()
    assert [side.step("all ready"), side.step("drained"), side.step("all ready")] == [("say ready",), ("take",), ()]
    assert side.state == "serving"
    alone = NewCourse()
    assert [alone.step("orphaned"), alone.step("all ready"), alone.step("all ready")] == [("save",), ("serve",), ()]
    assert alone.state == "serving"


@given(st.lists(st.sampled_from(NEW_EVENTS), max_size=20))
def test_in_any_order_the_new_side_takes_or_saves_or_fails_once(events: list[NewEvent]) -> None:
    side = NewCourse()
    done = [action for event in events for action in side.step(event)]
    assert sum(done.count(action) for action in ("take", "save", "fail")) <= 1  # type: ignore[arg-type]
    assert done.count("serve") <= done.count("save")
    if side.state == "failed":
        assert done[-1] == "fail"


def test_the_new_side_waits_for_nothing_without_a_limit() -> None:
    waiting: set[NewState] = {"preparing", "ready"}
    assert {state for state, event in NEW if event == "withdrawn"} == waiting
    assert ("ready", "late") in NEW, "while it prepares, the old side watches the time"
