"""The bars of the kernel path, and whether a run met them: pure, over what the run measured.

A bar is a least ratio of rates within rounds. It is met when the median reaches it; where the interval of the median
starts below, that is said. Where a bar is missed, a sentence states what the same run shows about how far anything
could have come: native reads the same bytes without a file system in between, so no file system is faster than native
for long, and native / alluxio-fuse is the ceiling of any ratio to alluxio-fuse.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from perf.meter import READER, Measured
from perf.outcome import Outcome
from perf.statistics import Interval, bootstrap_median, paired_ratio
from perf.tables import SETS, Row

PEER = "alluxio-fuse"
NATIVE = "native"
MODES = ("no-open", "passthrough")
AUTO = "auto"
AUTO_AT_LEAST = 0.9
ONE_WORKER = "-1-worker"


class Bar(NamedTuple):
    """The mode's rate over the peer's, in one row, is at least this."""

    row: str
    mode: str
    peer: str
    least: float


BARS = (
    Bar("small-warm-1", "no-open", PEER, 5),
    Bar("small-warm-1", "no-open", NATIVE, 0.6),
    Bar("small-cold-4", "passthrough", PEER, 15),
    Bar("small-cold-4", "no-open", PEER, 4),
    Bar("sequential-one-block", "passthrough", PEER, 10),
    Bar("sequential-one-block", "passthrough", NATIVE, 0.5),
    Bar("sequential", "no-open", PEER, 4),
    Bar("sequential", "passthrough", PEER, 4),
    Bar("random-4k-4", "passthrough", PEER, 5),
    Bar("random-4k-4", "passthrough", NATIVE, 0.5),
    Bar("random-128k-4", "passthrough", PEER, 5),
    Bar("random-128k-4", "passthrough", NATIVE, 0.5),
    Bar("stat-after-read", "no-open", PEER, 1),
    Bar("stat-after-read", "passthrough", PEER, 1),
    Bar("stat-after-read", "no-open", NATIVE, 0.5),
    Bar("stat-after-read", "passthrough", NATIVE, 0.5),
)


class Verdict(NamedTuple):
    """One line of the table of bars."""

    bar: str
    wanted: str
    measured: str
    met: bool
    remark: str
    """Why not, or how surely."""


def number(value: float) -> str:
    """Three significant figures, thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def interval(found: Interval) -> str:
    """Median and 95 % interval."""
    return f"{number(found.median)} [{number(found.low)}, {number(found.high)}]"


def ratio(outcome: Outcome, row: str, ours: str, theirs: str) -> Interval | None:
    """Within rounds; None where one of the two was not measured."""
    mine, other = outcome.rates(row, ours), outcome.rates(row, theirs)
    return paired_ratio(mine, other) if mine and other else None


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Every bar that this run can judge."""
    found = [verdict for bar in BARS if (verdict := _judge(outcome, bar))]
    found += [verdict for name in SETS if (verdict := _judge_auto(outcome, name))]
    found += [verdict for mode in MODES if (verdict := _judge_workers(outcome, mode))]
    return found


def _judge(outcome: Outcome, bar: Bar) -> Verdict | None:
    found = ratio(outcome, bar.row, bar.mode, bar.peer)
    if found is None:
        return None
    met = found.median >= bar.least
    remark = ""
    if not met:
        remark = ceiling(outcome, bar)
    elif found.low < bar.least:
        remark = "not surely: the interval starts below"
    title = next(row.title for row in outcome.about.rows if row.name == bar.row)
    return Verdict(f"{title}: {bar.mode} / {bar.peer}", f">= {bar.least:g}", interval(found), met, remark)


def ceiling(outcome: Outcome, bar: Bar) -> str:
    """What this run says about a bar that was missed."""
    sentences = []
    possible = ratio(outcome, bar.row, NATIVE, PEER)
    reached = ratio(outcome, bar.row, bar.mode, NATIVE)
    if bar.peer == PEER and possible:
        if possible.median < bar.least:
            sentences.append(f"out of reach here: native itself is {interval(possible)} of {PEER}")
        else:
            sentences.append(f"native is {interval(possible)} of {PEER}")
    if reached:
        sentences.append(f"{bar.mode} has {number(reached.median)} of native")
    row, workload = next((row, workload) for row, workload in outcome.rows() if row.name == bar.row)
    mine, native = workload.rows[row.name].get(bar.mode), workload.rows[row.name].get(NATIVE)
    if mine and native:
        sentences.append(f"{_costs(row, mine)}, native {_costs(row, native)}")
    return "; ".join(sentences)


def _costs(row: Row, measured: Sequence[Measured]) -> str:
    """Time on the clock and on the processors for one unit of work."""

    def middle(of: list[float]) -> str:
        return number(statistics.median(of) * row.scale * 1e6)

    clock = middle([each["seconds"] / each["work"] for each in measured])
    reader = middle([each["cpu_s"][READER] / each["work"] for each in measured])
    system = middle([each["cpu_s"]["system"] / each["work"] for each in measured])
    unit = row.unit.partition("/")[0].removesuffix("s") if row.scale == 1 else row.unit.partition("/")[0]
    return f"{clock} us a {unit} (processor time: reader {reader}, system {system})"


def auto_over(outcome: Outcome, set_name: str, mode: str) -> Interval | None:
    """auto / mode over a set: by round the geometric mean over the set's rows, so that each row weighs the same."""
    pairs = [(outcome.rates(row, AUTO), outcome.rates(row, mode)) for row in SETS[set_name]]
    measured = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    if not measured:
        return None
    rounds = min(len(ours) for ours, _ in measured)
    means = [
        prod(ours[number] / theirs[number] for ours, theirs in measured) ** (1 / len(measured))
        for number in range(rounds)
    ]
    return bootstrap_median(means)


def _judge_auto(outcome: Outcome, set_name: str) -> Verdict | None:
    against = {mode: found for mode in MODES if (found := auto_over(outcome, set_name, mode))}
    if not against:
        return None
    better = min(against, key=lambda mode: against[mode].median)
    found = against[better]
    remark = f"the better mode is {better}"
    if len(against) < len(MODES):
        remark += f", the only one measured of {', '.join(MODES)}"
    return Verdict(
        f"auto / the better mode, {set_name} (geometric mean of its rows)",
        f">= {AUTO_AT_LEAST}",
        interval(found),
        found.median >= AUTO_AT_LEAST,
        remark,
    )


def _judge_workers(outcome: Outcome, mode: str) -> Verdict | None:
    """Behind is a row whose whole interval lies below 1; by chance that is one row in forty where both are equal."""
    found = {
        row.title: against
        for row in outcome.about.rows
        if (against := ratio(outcome, row.name, mode, mode + ONE_WORKER))
    }
    if not found:
        return None
    behind = [f"{title} {interval(against)}" for title, against in found.items() if against.high < 1]
    worst = min(found, key=lambda title: found[title].median)
    return Verdict(
        f"{mode}: 2 workers not behind 1 in any row",
        "no interval below 1",
        f"lowest: {interval(found[worst])} ({worst})",
        not behind,
        "behind: " + "; ".join(behind) if behind else "",
    )
