"""What a benchmark run says: the raw figures as JSON, a Markdown report, a plot.

    python -m perf.report perf/results/NAME.json     writes the report and the plot of an earlier run again

Reads only what bench.py measured; where fusecache is behind or misses a bar, the report says so in words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from perf.bars import AUTO, MODES, ONE_WORKER, auto_over, interval, number, ratio, verdicts
from perf.outcome import (
    ELSEWHERE,
    GATE,
    LOCAL,
    MEGABYTE,
    ORDINARY,
    PASSED_THROUGH,
    WORKERS,
    MeasuredWorkload,
    Outcome,
)
from perf.statistics import Interval, agree, bootstrap_median
from perf.tables import SETS, Row

GIGABYTE = 1e9
MEBIBYTE = 1 << 20


def write(outcome: Outcome, folder: Path, name: str) -> str:
    """Write name.json, .md and .png below `folder`; returns the Markdown text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(outcome.to_json())
    text = markdown(outcome)
    (folder / f"{name}.md").write_text(text)
    plot(outcome, folder / f"{name}.png")
    return text


def markdown(outcome: Outcome) -> str:
    """All sections."""
    ours = [name for name in outcome.about.ours if name in outcome.systems]
    peers = [name for name in outcome.systems if name not in ours]
    lines = [f"# {outcome.about.title}", "", *conditions(outcome)]
    if judged := verdicts(outcome):
        lines += ["", "## Bars", "", *head("bar", "wanted", "measured", "met", "remark")]
        lines += [
            f"| {each.bar} | {each.wanted} | {each.measured} | {'yes' if each.met else '**no**'} | {each.remark} |"
            for each in judged
        ]
        lines += ["", f"{sum(each.met for each in judged)} of {len(judged)} met."]
    lines += ["", "## Rates", "", "Median with its 95 % bootstrap interval.", "", *rates(outcome)]
    if ours and peers:
        lines += ["", "## fusecache / peer", ""]
        lines += ["Median of the ratios within rounds; above 1 = fusecache is faster; bold = surely behind."]
        for name in ours:
            lines += ["", *compared(outcome, [(name, peer) for peer in peers], f"{name} against")]
        lines += ["", "## Where fusecache loses", ""]
        choices = [name for name in ours if name in (*MODES, AUTO)] or ours
        lines += losses(outcome, choices, peers) or ["Nowhere in this run."]
    if outcome.about.reference in ours:
        variants = [(name, outcome.about.reference) for name in ours if name != outcome.about.reference]
        lines += ["", f"## Variant / {outcome.about.reference}", "", "Median of the ratios within rounds.", ""]
        lines += compared(outcome, variants, "row", by_first=True)
    lines += own_comparisons(outcome)
    lines += ["", "## Processor time", "", *processor_time(outcome)]
    lines += ["", "## Memory", "", *memory(outcome)]
    lines += ["", "## Where the bytes came from", "", *sources(outcome)]
    lines += ["", "## Warm-up", "", *warm_up(outcome)]
    lines += ["", "## Set-up", ""]
    lines += [f"* {name}: {setup}" for name, setup in outcome.systems.items()]
    return "\n".join(lines) + "\n"


def head(*cells: str) -> list[str]:
    """A table's first two lines."""
    return ["| " + " | ".join(cells) + " |", "|" + "---|" * len(cells)]


def conditions(outcome: Outcome) -> list[str]:
    """When, on what, over how much data."""
    machine, shape = outcome.machine, outcome.shape
    return [
        f"{machine['date']}, commit {machine['commit']}, {machine['cpu']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}, load average at the end {machine['load']}, {machine['minutes']} minutes.",
        f"{shape['small_files']:,} files of {shape['small_file_bytes'] / 1024:.0f} KiB, large files of "
        f"{shape['large_bytes'] / MEBIBYTE:,.0f} MiB, {shape['epoch_files']:,} files per first epoch; blocks of "
        f"{shape['block_bytes'] / MEBIBYTE:.0f} MiB unless said otherwise. How it is measured: perf/bench.py.",
    ]


def rates(outcome: Outcome) -> list[str]:
    """Every system's rate in every row."""
    lines = head("row", "unit", "rounds", *outcome.systems)
    for row, workload in outcome.rows():
        found = {name: workload.rates(row, name) for name in outcome.systems}
        cells = [interval(bootstrap_median(values)) if values else "" for values in found.values()]
        lines.append(f"| {row.title} | {row.unit} | {max(map(len, found.values()))} | " + " | ".join(cells) + " |")
    return lines


def compared(outcome: Outcome, pairs: Sequence[tuple[str, str]], title: str, *, by_first: bool = False) -> list[str]:
    """A table of ratios, a column for each (ours, theirs)."""
    names = [first if by_first else second for first, second in pairs]
    lines = head(title, *names)
    for row, _ in outcome.rows():
        found = [ratio(outcome, row.name, first, second) for first, second in pairs]
        if any(found):
            lines.append(f"| {row.title} | " + " | ".join(map(_cell, found)) + " |")
    return lines


def _cell(found: Interval | None) -> str:
    if found is None:
        return ""
    return f"**{interval(found)}**" if found.high < 1 else interval(found)


def losses(outcome: Outcome, ours: Iterable[str], peers: Iterable[str]) -> list[str]:
    """One line for each row and peer that some of ours is behind of, surely (the whole interval is below 1) or perhaps
    (its lower end is, by more than 5 %)."""
    lines = []
    for row, _ in outcome.rows():
        for peer in peers:
            behind, unsure = [], []
            for name in ours:
                found = ratio(outcome, row.name, name, peer)
                if found and found.high < 1:
                    behind.append(f"{name} {interval(found)}")
                elif found and found.low < 0.95:
                    unsure.append(f"{name} {interval(found)}")
            if behind:
                lines.append(f"* {row.title}: behind {peer}: {', '.join(behind)}")
            if unsure:
                lines.append(f"* {row.title}: not surely level with {peer}: {', '.join(unsure)}")
    return lines


def own_comparisons(outcome: Outcome) -> list[str]:
    """`auto` against the modes it chooses from, and two workers against one."""
    lines = []
    modes = [mode for mode in MODES if mode in outcome.systems]
    if AUTO in outcome.systems and modes:
        lines += ["", "## auto / mode", "", *compared(outcome, [(AUTO, mode) for mode in modes], "auto against")]
        for name in SETS:
            found = [auto_over(outcome, name, mode) for mode in modes]
            lines.append(f"| {name}, geometric mean of its rows | " + " | ".join(map(_cell, found)) + " |")
    pairs = [(mode, mode + ONE_WORKER) for mode in modes if mode + ONE_WORKER in outcome.systems]
    if pairs:
        lines += ["", "## Two workers / one", "", *compared(outcome, pairs, "row", by_first=True)]
    return lines


def processor_time(outcome: Outcome) -> list[str]:
    """Medians, by row: what the system spent, and what everybody did."""
    lines = [
        "Seconds of processor time per GB read (rows without bytes: per million calls): the system's own processes, "
        "and in brackets all: with the reader, Alluxio's master and its block worker.",
        "",
        *head("row", *outcome.systems),
    ]
    for row, workload in outcome.rows():
        cells = []
        for name in outcome.systems:
            measured = workload.rows[row.name].get(name, [])
            per_unit = [(each["size_bytes"] / GIGABYTE or each["work"] / 1e6, each["cpu_s"]) for each in measured]
            own = [cpu["system"] / units for units, cpu in per_unit]
            everybody = [sum(cpu.values()) / units for units, cpu in per_unit]
            cells.append(f"{statistics.median(own):.2f} ({statistics.median(everybody):.2f})" if measured else "")
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    if outcome.idle_percent:
        found = [outcome.idle_percent.get(name) for name in outcome.systems]
        cells = ["" if each is None else f"{each:.2f} %" for each in found]
        lines.append("| idle, share of one core | " + " | ".join(cells) + " |")
    return lines


def memory(outcome: Outcome) -> list[str]:
    """Medians after each workload."""
    lines = [
        "MiB of all processes of the system after the workload: resident set sizes added up (RSS), and in brackets "
        "with shared pages counted once (PSS).",
        "",
        *head("after", *outcome.systems),
    ]
    for workload in outcome.workloads:
        cells = []
        for name in outcome.systems:
            found = workload.memory.get(name, [])
            resident = statistics.median(each.resident_bytes for each in found) / MEBIBYTE if found else 0
            proportional = statistics.median(each.proportional_bytes for each in found) / MEBIBYTE if found else 0
            cells.append(f"{resident:,.0f} ({proportional:,.0f})" if resident else "")
        lines.append(f"| {workload.name} | " + " | ".join(cells) + " |")
    return lines


def sources(outcome: Outcome) -> list[str]:
    """Each system's own counters over the rounds: short circuit and passthrough are shown, not assumed."""
    heads = (LOCAL, ELSEWHERE, PASSED_THROUGH, ORDINARY, GATE, WORKERS)
    lines = [
        "By the systems' own counters over all rounds. Bytes that the kernel passes through no process sees.",
        "",
        *head("workload", "system", "MB read", *heads),
    ]
    for workload in outcome.workloads:
        for name, counters in workload.counters.items():
            read = sum(each["size_bytes"] for row in workload.rows.values() for each in row[name]) / MEGABYTE
            cells = [f"{counters[key]:,.0f}" if key in counters else "" for key in heads]
            lines.append(f"| {workload.name} | {name} | {read:,.0f} | " + " | ".join(cells) + " |")
    return lines


def warm_up(outcome: Outcome) -> list[str]:
    """Which workloads were measured although the last two warm-up runs differed by more than 10 %: noise, where the
    rates do not rise; a JVM that was still compiling, where they do."""
    lines = []
    for workload in outcome.workloads:
        for name, rates in workload.warm_up_rates.items():
            if len(rates) >= 2 and not agree(rates[-2], rates[-1]):
                runs = ", ".join(number(each) for each in rates)
                lines.append(f"* {workload.name}, {name}: the last two runs differ by more than 10 %: {runs}")
    return lines or ["Every system's last two warm-up runs of every workload agreed within 10 %."]


def plot(outcome: Outcome, path: Path) -> None:
    """One small panel per row, a bar per system, every round as a dot; fusecache in colour, peers in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = outcome.rows()
    columns = 4 if len(outcome.systems) > 5 else 5
    lines = -(-len(rows) // columns)
    size = (4.2 * columns, (0.8 + 0.22 * len(outcome.systems)) * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    for panel in axes.flat[len(rows) :]:
        panel.set_visible(False)
    for panel, (row, workload) in zip(axes.flat, rows, strict=False):
        _panel(panel, outcome, row, workload)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel: object, outcome: Outcome, row: Row, workload: MeasuredWorkload) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    found = {name: values for name in outcome.systems if (values := workload.rates(row, name))}
    for place, (name, values) in enumerate(found.items()):
        middle = statistics.median(values)
        panel.barh(place, middle, color="tab:blue" if name in outcome.about.ours else "0.7")
        panel.plot(values, [place] * len(values), "k.", markersize=2)
        panel.annotate(f" {number(middle)}", (max(values), place), va="center", fontsize=7)
    panel.set_yticks(range(len(found)), list(found), fontsize=7)
    panel.invert_yaxis()
    panel.set_title(f"{row.title}, {row.unit}".replace(", ", "\n", 1), fontsize=8)
    panel.tick_params(axis="x", labelsize=7)
    panel.locator_params(axis="x", nbins=5)
    panel.margins(x=0.25)


def main() -> int:
    """Report an earlier run again."""
    parser = argparse.ArgumentParser(prog="python -m perf.report", description="Write an earlier run's report again.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of a run of perf.bench")
    flags = parser.parse_args()
    if missing := [str(path) for path in flags.results if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    for path in flags.results:
        print(write(Outcome.from_json(path.read_text()), path.parent, path.stem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
