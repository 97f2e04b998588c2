"""Bars of the kernel path: judged on made-up measurements whose answer is known."""

from __future__ import annotations

from perf import bars, report
from perf.meter import Measured
from perf.outcome import MeasuredWorkload, Outcome
from perf.processes import Memory
from perf.tables import KERNEL_PATH, SETS, Workload

ROUNDS = 5


def measured(rate: float, number: int) -> Measured:
    """One measurement: each round has its own speed, the same for every system, as a disturbed machine has."""
    seconds = 1000 / rate * (1 + number % 3)
    return {"work": 1000, "seconds": seconds, "size_bytes": 1 << 20, "cpu_s": {"system": seconds / 2, "reader": 0.1}}


def outcome(rates: dict[str, float], exceptions: dict[tuple[str, str], float] | None = None) -> Outcome:
    """Every system with its rate in every row, but for the exceptions by (row, system)."""

    def workload(about: Workload) -> MeasuredWorkload:
        rows = {
            row.name: {
                name: [measured((exceptions or {}).get((row.name, name), rate), number) for number in range(ROUNDS)]
                for name, rate in rates.items()
            }
            for row in about.rows
        }
        memory = {name: [Memory(3 << 20, 2 << 20)] * ROUNDS for name in rates}
        return MeasuredWorkload(
            about.name,
            rows,
            {name: [1.0, 1.05] for name in rates},
            memory,
            {"no-open": {"MB from local block files": 5}},
        )

    machine = dict.fromkeys(("cpu", "kernel", "python", "commit", "load", "date", "minutes"), "?")
    shape = dict.fromkeys(("small_files", "small_file_bytes", "large_bytes", "epoch_files", "block_bytes"), 1)
    return Outcome(
        KERNEL_PATH, machine, shape, dict.fromkeys(rates, "set up"), list(map(workload, KERNEL_PATH.workloads))
    )


GOOD = {
    "no-open": 60.0,
    "passthrough": 160.0,
    "auto": 150.0,
    "no-open-1-worker": 60.0,
    "passthrough-1-worker": 160.0,
    "alluxio-fuse": 10.0,
    "native": 100.0,
}


def verdict(found: Outcome, start: str) -> bars.Verdict:
    (one,) = [each for each in bars.verdicts(found) if each.bar.startswith(start)]
    return one


def test_all_bars_are_met_by_a_run_that_meets_them() -> None:
    found = bars.verdicts(outcome(GOOD))
    assert [each.bar for each in found if not each.met] == []
    assert len(found) == len(bars.BARS) + len(SETS) + len(bars.MODES)


def test_every_bar_is_missed_by_a_run_that_is_slow_everywhere() -> None:
    slow = {**GOOD, "no-open": 4.0, "passthrough": 3.0, "auto": 2.0}
    assert [each.bar for each in bars.verdicts(outcome(slow)) if each.met] == []


def test_a_bar_above_what_native_reaches_is_called_out_of_reach() -> None:
    found = outcome(GOOD | {"passthrough": 40.0}, {("sequential-one-block", "native"): 80.0})
    missed = verdict(found, "large file, sequential, one block, kernel-cold: passthrough / alluxio-fuse")
    assert not missed.met
    assert missed.measured == "4 [4, 4]"
    assert "out of reach here: native itself is 8 [8, 8] of alluxio-fuse" in missed.remark
    assert "passthrough has 0.5 of native" in missed.remark


def test_a_missed_bar_below_native_states_the_room_there_was() -> None:
    found = outcome(GOOD | {"passthrough": 40.0})
    missed = verdict(found, "large file, random 4 KiB, 4 threads, kernel-cold: passthrough / native")
    assert not missed.met
    assert "out of reach" not in missed.remark
    assert "us a read" in missed.remark


def test_auto_is_held_against_the_better_mode() -> None:
    found = outcome({**GOOD, "auto": 60.0})
    judged = verdict(found, "auto / the better mode, small-file set")
    assert (judged.met, judged.remark) == (False, "the better mode is passthrough")
    assert verdict(outcome({**GOOD, "auto": 145.0}), "auto / the better mode, small-file set").met


def test_two_workers_behind_one_in_a_single_row_is_found() -> None:
    found = outcome(GOOD, {("random-128k-4", "no-open"): 50.0})
    judged = verdict(found, "no-open: 2 workers")
    assert not judged.met
    assert "random 128 KiB, 4 threads" in judged.remark
    assert verdict(found, "passthrough: 2 workers").met


def test_systems_that_were_not_measured_have_no_verdict() -> None:
    found = outcome({"passthrough": 100.0, "native": 100.0})
    assert {each.bar.rpartition("/")[2].strip() for each in bars.verdicts(found)} == {"native"}


def test_a_report_can_be_made_again_from_what_was_kept() -> None:
    found = outcome({**GOOD, "no-open": 30.0})
    again = Outcome.from_json(found.to_json())
    assert again == found
    assert report.markdown(again) == report.markdown(found)
    assert "**no**" in report.markdown(found)
