"""Which process has which mount of a `serve`: the ways there are, and what holds for any order of events."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusecache.daemon.serve_mounts import (
    Action,
    Announce,
    AskedToEnd,
    Ended,
    Event,
    Fail,
    Failed,
    HangUp,
    Log,
    ReadAgain,
    Readiness,
    Ready,
    Reloaded,
    ServedMounts,
    Start,
    TellAllEnd,
    TellEnd,
    Terminate,
    There,
    Watch,
)
from fusecache.daemon.serve_plans import Changes

A, B, C = (Path(f"/mnt/{name}") for name in "abc")


def serving(*points: Path) -> ServedMounts:
    """All ready; the processes are 1, 2 ... in this order."""
    mounts = ServedMounts()
    for start in mounts.begin(points):
        assert isinstance(start, Start)
        mounts.step(Ready(start.process))
    return mounts


def after(mounts: ServedMounts, *events: Event) -> list[Action]:
    """What follows from them, without what is only written to the log."""
    return [action for event in events for action in mounts.step(event) if not isinstance(action, Log)]


def changed(*, started: tuple[Path, ...] = (), replaced: tuple[Path, ...] = (), ended: tuple[Path, ...] = ()) -> Event:
    return Reloaded(Changes(started, replaced, ended))


def test_ready_when_the_last_one_is_and_announced_once() -> None:
    mounts = ServedMounts()
    assert mounts.begin([A, B]) == [Start(1, A), Start(2, B)]
    assert after(mounts, Ready(2)) == [Readiness(False)]
    assert after(mounts, Ready(1)) == [Readiness(True), Announce()]
    assert mounts.runs


def test_a_first_start_that_fails_is_the_end() -> None:
    mounts = ServedMounts()
    mounts.begin([A, B])
    assert after(mounts, Failed(2, "no master", 6, "nothing")) == [
        TellEnd(2, "no master"),
        Fail("no master (mount /mnt/b)", 6),
    ]
    assert 1 in mounts.left


def test_a_mount_that_dies_ends_the_others_and_one_that_was_unmounted_does_not() -> None:
    mounts = serving(A, B)
    assert after(mounts, Ended(1, True, "exit code 0", "nothing")) == [Readiness(False), TellEnd(1, "it was unmounted")]
    assert after(mounts, Ended(2, False, "SIGKILL", "ours")) == [
        Readiness(False),
        TellEnd(2, "its process ended with SIGKILL"),
        Fail("mount '/mnt/b' ended with SIGKILL; all others were stopped", 3),
    ]
    assert {1, 2} <= set(mounts.left), "what may have left a dead mount"
    assert not mounts.runs


@pytest.mark.parametrize(("there", "handed_over"), [("ours", True), ("something else", False), ("nothing", False)])
def test_handed_over_is_what_somebody_else_of_us_serves(there: There, handed_over: bool) -> None:
    mounts = serving(A)
    ended = after(mounts, Ended(1, True, "exit code 0", there))
    assert (mounts.handed_over == ["/mnt/a"]) is handed_over
    assert (TellEnd(1, "it was unmounted") in ended) is not handed_over
    assert not any(isinstance(action, Fail) for action in ended)


@pytest.mark.parametrize("old_end_is_first", [False, True])
def test_a_successor_has_the_mount_and_the_end_of_the_one_before_is_no_event(old_end_is_first: bool) -> None:
    mounts = serving(A, B)
    assert after(mounts, HangUp()) == [ReadAgain()]
    assert after(mounts, changed(replaced=(A,))) == [Start(3, A), Readiness(True)]
    assert [shown.is_being_replaced for shown in mounts.shown] == [True, False]
    old_end, ready = Ended(1, True, "exit code 0", "ours"), Ready(3)
    follows = after(mounts, *((old_end, ready) if old_end_is_first else (ready, old_end)))
    assert follows == [Watch(3), Readiness(True)]
    assert [(shown.process, shown.is_ready) for shown in mounts.shown] == [(3, True), (2, True)]
    assert mounts.handed_over == []
    assert sorted(mounts.left) == [2, 3]
    assert after(mounts, changed(replaced=(A,)), Failed(4, "no master", 6, "ours")) == [Start(4, A), Readiness(True)]


def test_a_successor_that_fails_changes_nothing() -> None:
    mounts = serving(A, B)
    mounts.step(changed(replaced=(A,)))
    (told,) = mounts.step(Failed(3, "another source", 3, "ours"))
    assert told == Log("error", "mount_not_reloaded /mnt/a: another source")
    assert [shown.process for shown in mounts.shown] == [1, 2]
    assert after(mounts, HangUp()) == [ReadAgain()]


def test_a_successor_that_fails_when_the_mount_has_ended_leaves_it_ended() -> None:
    unmounted = serving(A, B)
    unmounted.step(changed(replaced=(A,)))
    assert after(unmounted, Ended(1, True, "exit code 0", "nothing")) == []
    assert after(unmounted, Failed(3, "gone", 3, "nothing")) == [Readiness(False), TellEnd(1, "it was unmounted")]
    died = serving(A, B)
    died.step(changed(replaced=(A,)))
    died.step(Ended(1, False, "SIGKILL", "ours"))
    assert after(died, Failed(3, "gone", 3, "ours"))[-1] == Fail(
        "mount '/mnt/a' ended with SIGKILL; all others were stopped", 3
    )
    taken = serving(A, B)
    taken.step(changed(replaced=(A,)))
    taken.step(Ended(1, True, "exit code 0", "ours"))
    assert after(taken, Failed(3, "no root", 6, "ours"))[-1] == Fail("no root (mount /mnt/a)", 6)


def test_a_mount_that_a_reload_adds_is_awaited_and_its_failure_harms_nobody() -> None:
    mounts = serving(A)
    assert after(mounts, changed(started=(B,))) == [Start(2, B), Watch(2), Readiness(False)]
    assert after(mounts, Failed(2, "no master", 6, "nothing")) == [TellEnd(2, "no master"), Readiness(True)]
    assert [shown.process for shown in mounts.shown] == [1]


def test_when_nothing_is_left_to_serve_a_failure_is_the_end() -> None:
    mounts = serving(A)
    assert after(mounts, changed(started=(B,), ended=(A,))) == [
        *(TellEnd(1, "it is not in the configuration any more"), Terminate(1)),
        *(Start(2, B), Watch(2), Readiness(False)),
    ]
    assert after(mounts, Failed(2, "no master", 6, "nothing")) == [
        TellEnd(2, "no master"),
        Fail("no master (mount /mnt/b)", 6),
    ]
    assert mounts.left == [1]


def test_a_mount_that_has_ended_is_forgotten_with_its_place_in_the_file() -> None:
    mounts = serving(A, B)
    mounts.step(Ended(1, True, "exit code 0", "nothing"))
    assert after(mounts, changed(ended=(A,))) == [Readiness(True)]
    assert [shown.process for shown in mounts.shown] == [2]


def test_the_file_is_read_when_nothing_is_on_its_way() -> None:
    mounts = ServedMounts()
    mounts.begin([A])
    assert after(mounts, HangUp(), HangUp()) == []
    assert after(mounts, Ready(1))[-1] == ReadAgain()
    mounts.step(changed(replaced=(A,), started=(B,)))
    assert after(mounts, HangUp(), Ready(2)) == [Readiness(True)]
    assert after(mounts, Ready(3))[-1] == ReadAgain()


def test_the_file_is_not_read_by_who_has_handed_over() -> None:
    mounts = serving(A, B)
    mounts.step(Ended(1, True, "exit code 0", "ours"))
    assert mounts.step(HangUp()) == [Log("warning", "not_reloaded: another process has mounts: /mnt/a")]


def test_who_is_asked_to_end_ends_all_and_fails_by_nothing() -> None:
    mounts = serving(A, B)
    mounts.step(changed(replaced=(A,)))
    assert after(mounts, HangUp(), AskedToEnd("SIGTERM")) == [
        *(Readiness(False), TellAllEnd("the node's daemon ends (SIGTERM)")),
        *(Terminate(1), Terminate(2), Terminate(3)),
    ]
    assert after(mounts, Failed(3, "ended by SIGTERM", 143, "ours")) == []
    assert after(mounts, Ended(1, False, "SIGKILL", "ours"), Ended(2, True, "exit code 0", "nothing")) == [
        *(Readiness(False), TellEnd(1, "its process ended with SIGKILL")),
        *(Readiness(False), TellEnd(2, "it was unmounted")),
    ]
    assert not mounts.runs


Stage = Literal["starting", "ready", "ended"]
often = st.integers(0, 7).map(bool)
"""So that what ends the whole does not end most examples at once."""

anything: st.SearchStrategy[There] = st.sampled_from(["nothing", "ours", "something else"])


class Node(RuleBasedStateMachine):
    """Processes that start, are ready and end as they like, under a `serve` whose file is changed as somebody likes."""

    def __init__(self) -> None:
        super().__init__()
        self.mounts = ServedMounts()
        self.stage: dict[int, Stage] = {}
        self.point: dict[int, Path] = {}
        self.tries: set[int] = set()
        """Started by a reload, and not ready yet."""

        self.successors: set[int] = set()
        """Those of them at whose mount point there was a mount."""

        self.terminated: set[int] = set()
        self.wanted: set[Path] = {A, B}
        self.unwanted: set[int] = set()
        """Whose mount points were taken out of the file, or that were replaced."""

        self.file_is_there = False
        self.announced = 0
        self.has_failed = False
        self.is_read = False

    @initialize(are_ready=often)
    def begin(self, are_ready: bool) -> None:
        self.carry_out(self.mounts.begin([A, B]))
        for process in list(self.stage) if are_ready else ():
            self.ready(process)

    def carry_out(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            assert not self.has_failed, "nothing follows a failure"
            match action:
                case Start(process, point):
                    self.stage[process], self.point[process] = "starting", point
                case Terminate(process):
                    assert self.runs(process)
                    self.terminated.add(process)
                case Readiness(is_ready):
                    self.file_is_there = is_ready
                case Announce():
                    self.announced += 1
                case ReadAgain():
                    assert "starting" not in self.stage.values()
                    assert not self.mounts.is_stopping
                    self.is_read = True
                case Fail():
                    self.has_failed = True
        return actions

    @property
    def goes_on(self) -> bool:
        """Another event may come: reading the file again takes no time here."""
        return not (self.has_failed or self.is_read)

    def runs(self, process: int) -> bool:
        return self.stage[process] != "ended"

    def serve(self, point: Path) -> bool:
        """Whether reads work there, or will when the one that takes over has done so."""
        here = [process for process in self.stage if self.point[process] == point and process not in self.unwanted]
        return any(self.stage[process] == "ready" for process in here) or any(
            self.runs(process) and process in self.successors for process in here
        )

    def some(self, data: st.DataObject, stage: Stage) -> int:
        return data.draw(st.sampled_from([process for process, is_at in self.stage.items() if is_at == stage]))

    @precondition(lambda self: self.goes_on and "starting" in self.stage.values())
    @rule(data=st.data())
    def is_ready(self, data: st.DataObject) -> None:
        self.ready(self.some(data, "starting"))

    def ready(self, process: int) -> None:
        self.stage[process] = "ready"
        if process in self.successors:
            here = {other for other in self.stage if self.point[other] == self.point[process]}
            self.unwanted |= here - {process}
        self.tries.discard(process)
        self.successors.discard(process)
        self.carry_out(self.mounts.step(Ready(process)))

    @precondition(lambda self: self.goes_on and "starting" in self.stage.values())
    @rule(data=st.data(), is_of_reload=often, there=anything)
    def fails(self, data: st.DataObject, is_of_reload: bool, there: There) -> None:
        process = self.some(data, "starting")
        if is_of_reload and process not in self.tries:
            return
        point = self.point[process]
        others_go_on = any(self.runs(other) and other not in self.unwanted | {process} for other in self.stage)
        is_added = process in self.tries - self.successors
        self.stage[process] = "ended"
        self.tries.discard(process)
        self.successors.discard(process)
        self.carry_out(self.mounts.step(Failed(process, "why", 6, there)))
        if is_added and not self.mounts.is_stopping and not self.has_failed:
            self.wanted.discard(point)
        if others_go_on and (is_added or self.serve(point)):
            assert not self.has_failed, "who only tries harms nobody"

    @precondition(lambda self: self.goes_on and "ready" in self.stage.values())
    @rule(data=st.data(), is_in_order=often, there=anything)
    def ends(self, data: st.DataObject, is_in_order: bool, there: There) -> None:
        process = self.some(data, "ready")
        self.stage[process] = "ended"
        follows = self.carry_out(self.mounts.step(Ended(process, is_in_order, "somehow", there)))
        if process in self.unwanted:
            assert all(isinstance(action, Log | ReadAgain) for action in follows), "it has no mount any more"

    @precondition(lambda self: self.goes_on)
    @rule()
    def hang_up(self) -> None:
        self.carry_out(self.mounts.step(HangUp()))

    @precondition(lambda self: self.is_read and not self.has_failed)
    @rule(data=st.data(), can_be_had=often, wanted=st.sets(st.sampled_from([A, B, C]), min_size=1))
    def reload(self, data: st.DataObject, can_be_had: bool, wanted: set[Path]) -> None:
        self.is_read = False
        if not can_be_had:
            return
        running = {self.point[shown.process] for shown in self.mounts.shown if shown.runs}
        assert running == {point for point in self.wanted if self.serve(point)}
        replaced = data.draw(st.sets(st.sampled_from(sorted(running & wanted)))) if running & wanted else set()
        before, leaving = set(self.stage), set(self.unwanted)
        self.unwanted |= {process for process in self.stage if self.point[process] not in wanted}
        changes = Changes(*(tuple(sorted(points)) for points in (wanted - running, replaced, self.wanted - wanted)))
        self.wanted = wanted
        self.carry_out(self.mounts.step(Reloaded(changes)))
        assert {process for process in before if self.runs(process) and self.point[process] not in wanted} <= (
            self.terminated | leaving
        )
        self.tries = set(self.stage) - before
        assert {self.point[process] for process in self.tries} == (wanted - running) | replaced
        self.successors = {process for process in self.tries if self.point[process] in replaced}

    @precondition(lambda self: self.goes_on)
    @rule(goes_on=often)
    def ask_to_end(self, goes_on: bool) -> None:
        if goes_on:
            return
        self.carry_out(self.mounts.step(AskedToEnd("SIGTERM")))
        assert {process for process in self.stage if self.runs(process)} <= self.terminated

    @precondition(lambda self: self.has_failed)
    @rule()
    def all_is_over(self) -> None:
        """What is left is stopped by `serve`."""

    @invariant()
    def one_has_each_mount(self) -> None:
        processes = [shown.process for shown in self.mounts.shown]
        points = [self.point[process] for process in processes]
        assert len(set(processes)) == len(set(points)) == len(points)
        assert not self.unwanted & set(processes)
        if not self.has_failed:
            assert set(points) == self.wanted

    @invariant()
    def the_file_is_there_exactly_while_all_serve(self) -> None:
        serve = all(self.serve(point) for point in self.wanted) and not self.mounts.is_stopping
        assert self.has_failed or self.file_is_there == serve
        assert self.announced <= 1
        assert self.announced or not self.file_is_there

    @invariant()
    def every_process_is_accounted_for(self) -> None:
        running = {process for process in self.stage if self.runs(process)}
        assert running <= set(self.mounts.left)
        assert self.mounts.runs == bool(running)


TestAnyOrder = Node.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=30)
