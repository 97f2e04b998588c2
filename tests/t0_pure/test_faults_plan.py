"""The fault plan: which calls are hit, what is counted, and what a wrong plan is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusecache.embedded.faults import MASTER, FaultPlan, FaultRule
from fusecache.errors import UsageError


def hits(plan: FaultPlan, method: str, calls: int, worker: int = MASTER) -> list[int]:
    """Numbers (from 1) of the calls that a rule was due for."""
    return [number for number in range(1, calls + 1) if plan.take(method, worker) is not None]


def test_rule_without_nth_hits_every_call() -> None:
    plan = FaultPlan()
    plan.on("GetStatus").error("UNAVAILABLE")
    assert hits(plan, "GetStatus", 4) == [1, 2, 3, 4]


def test_rule_with_nth_hits_that_call_alone() -> None:
    plan = FaultPlan()
    rule = plan.on("GetStatus", nth=3).error("UNAVAILABLE")
    assert hits(plan, "GetStatus", 6) == [3]
    assert rule.calls == 6


def test_rule_with_nth_and_times_hits_a_run_of_calls() -> None:
    plan = FaultPlan()
    plan.on("GetStatus", nth=2, times=3).error("UNAVAILABLE")
    assert hits(plan, "GetStatus", 6) == [2, 3, 4]


def test_rule_with_times_alone_hits_the_first_calls() -> None:
    plan = FaultPlan()
    plan.on("GetStatus", times=2).error("UNAVAILABLE")
    assert hits(plan, "GetStatus", 4) == [1, 2]


def test_rule_of_one_worker_ignores_calls_of_others() -> None:
    plan = FaultPlan()
    plan.on("ReadBlock", worker=1, nth=2).stall()
    assert hits(plan, "ReadBlock", 5, worker=0) == []
    assert hits(plan, "ReadBlock", 5, worker=1) == [2]


def test_rule_of_another_method_is_not_counted() -> None:
    plan = FaultPlan()
    rule = plan.on("ReadBlock").stall()
    assert plan.take("OpenLocalBlock", 0) is None
    assert rule.calls == 0


def test_two_due_rules_first_wins_and_both_count_the_call() -> None:
    plan = FaultPlan()
    first = plan.on("GetStatus", nth=1).delay(0.5)
    second = plan.on("GetStatus", nth=2).error("UNAVAILABLE")
    assert plan.take("GetStatus", MASTER) is first
    assert plan.take("GetStatus", MASTER) is second
    assert (first.calls, second.calls) == (2, 2)


def test_rule_without_a_kind_does_nothing() -> None:
    plan = FaultPlan()
    plan.on("GetStatus")
    assert hits(plan, "GetStatus", 3) == []


def test_injected_counts_what_happened_not_what_was_due() -> None:
    plan = FaultPlan()
    cut = plan.on("ReadBlock").cut_after(bytes=10)
    plan.on("GetStatus").error("NOT_FOUND")
    plan.take("ReadBlock", 0)
    assert plan.injected() == 0
    cut.happened()
    assert plan.injected() == 1
    assert plan.injected("cut_after") == 1
    assert plan.injected("error") == 0
    assert plan.injected(method="ReadBlock") == 1
    assert plan.injected(method="GetStatus") == 0


def test_clear_makes_the_server_healthy() -> None:
    plan = FaultPlan()
    plan.on("GetStatus").error("UNAVAILABLE")
    plan.clear()
    assert hits(plan, "GetStatus", 2) == []


def test_yaml_plan_reads_every_kind() -> None:
    plan = FaultPlan.from_yaml(
        """
        faults:
          - {method: ReadBlock, worker: 0, nth: 3, cut_after: {bytes: 1234, code: OK}}
          - {method: GetStatus, times: 2, error: {code: UNAVAILABLE, message: going away}}
          - {method: GetFilePath, delay: {seconds: 0.25}}
          - {method: ListStatus, stall: {messages: 1}}
          - {method: ReadBlock, wrong_length: {by: -3}}
          - {method: Load, drop_connection: }
        """
    )
    kinds = [rule.fault.kind for rule in plan.rules if rule.fault is not None]
    assert kinds == ["cut_after", "error", "delay", "stall", "wrong_length", "drop_connection"]
    cut = plan.rules[0]
    assert cut.fault is not None
    assert (cut.worker, cut.fault.bytes, cut.fault.code) == (0, 1234, "OK")
    assert hits(plan, "GetStatus", 4) == [1, 2]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{method: ReadBlok, stall: }", ["faults[0].method", "'ReadBlok'", "ReadBlock"]),
        ("{method: ReadBlock}", ["faults[0]", "exactly one of", "cut_after"]),
        ("{method: ReadBlock, stall: , delay: {seconds: 1}}", ["faults[0]", "'stall'", "exactly one of"]),
        ("{method: ReadBlock, stall: , often: 3}", ["faults[0] key", "'often'", "nth"]),
        ("{method: ReadBlock, nth: 0, stall: }", ["faults[0].nth", "0", "at least 1"]),
        ("{method: ReadBlock, nth: true, stall: }", ["faults[0].nth", "True", "an integer"]),
        ("{method: ReadBlock, worker: -1, stall: }", ["faults[0].worker", "-1", "at least 0"]),
        ("{method: GetStatus, worker: 1, stall: }", ["faults[0].worker", "1", "call to the master"]),
        ("{method: ReadBlock, cut_after: {bytes: -1}}", ["faults[0].cut_after.bytes", "-1", "at least 0"]),
        (
            "{method: ReadBlock, cut_after: {bytes: 1, messages: 1}}",
            ["faults[0].cut_after.messages", "1", "beside bytes"],
        ),
        (
            "{method: ReadBlock, cut_after: {bytes: 1, code: OKAY}}",
            ["faults[0].cut_after.code", "'OKAY'", "UNAVAILABLE"],
        ),
        ("{method: GetStatus, cut_after: {messages: 0}}", ["faults[0].cut_after", "'GetStatus'", "ListStatus"]),
        ("{method: ListStatus, stall: {bytes: 5}}", ["faults[0].stall.bytes", "5", "use messages"]),
        ("{method: GetStatus, stall: {messages: 1}}", ["faults[0].stall.messages", "1", "without a stream"]),
        ("{method: GetStatus, error: {code: OK}}", ["faults[0].error.code", "'OK'", "UNAVAILABLE"]),
        ("{method: GetStatus, error: }", ["faults[0].error", "code"]),
        ("{method: GetStatus, error: {code: ABORTED, message: 3}}", ["faults[0].error.message", "3", "text"]),
        ("{method: GetStatus, delay: {seconds: soon}}", ["faults[0].delay.seconds", "'soon'", "a number"]),
        ("{method: GetStatus, delay: 3}", ["faults[0].delay", "3", "seconds"]),
        ("{method: GetStatus, delay: {minutes: 3}}", ["faults[0].delay key", "'minutes'", "seconds"]),
        ("{method: ReadBlock, wrong_length: {by: 0}}", ["faults[0].wrong_length.by", "0", "other than 0"]),
        ("{method: Free, wrong_length: {by: 1}}", ["faults[0].wrong_length", "'Free'", "GetStatus"]),
        ("stall", ["faults[0]", "'stall'", "a mapping"]),
    ],
)
def test_wrong_entry_is_refused_by_key_value_and_allowed(entry: str, named: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        FaultPlan.from_yaml(f"faults:\n  - {entry}\n")
    for words in named:
        assert words in str(refusal.value)


@pytest.mark.parametrize("text", ["", "faults", "{}", "faults: 3", "{faults: [], other: 1}", "faults: ["])
def test_document_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="fault plan"):
        FaultPlan.from_yaml(text)


def test_programmatic_mistake_names_the_call() -> None:
    with pytest.raises(UsageError, match=r"on\('ReadBlock'\)\.cut_after\.bytes: -1"):
        FaultPlan().on("ReadBlock").cut_after(bytes=-1)


def test_second_kind_on_one_rule_is_refused() -> None:
    rule: FaultRule = FaultPlan().on("ReadBlock").stall()
    with pytest.raises(UsageError, match="one kind of fault a rule"):
        rule.cut_after(bytes=1)


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        FaultPlan.from_file(tmp_path / "nowhere.yaml")


def test_file_with_a_wrong_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("faults: [{method: Nothing, stall: }]")
    with pytest.raises(UsageError, match=r"plan\.yaml: faults\[0\]\.method: 'Nothing'"):
        FaultPlan.from_file(path)
