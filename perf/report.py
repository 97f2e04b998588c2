"""What a benchmark run says: the raw figures as JSON, a Markdown table with ratios and intervals, a plot.

Reads only what bench.py measured; where fusecache is behind, the report says so in words.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from perf.statistics import Interval, bootstrap_median, paired_ratio
from perf.workloads import ROW_BY_NAME

OURS = "fusecache"
PEER = "alluxio-fuse"
SEED = 20

Outcome = dict[str, Any]


def write(outcome: Outcome, folder: Path, name: str) -> str:
    """Write name.json, .md and .png below `folder`; returns the Markdown text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(outcome, indent=1) + "\n")
    text = markdown(outcome)
    (folder / f"{name}.md").write_text(text)
    plot(outcome, folder / f"{name}.png")
    return text


def number(value: float) -> str:
    """Three significant figures, thousands separated."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def interval(found: Interval) -> str:
    """Median and 95 % interval."""
    return f"{number(found.median)} [{number(found.low)}, {number(found.high)}]"


def markdown(outcome: Outcome) -> str:
    """The tables and the sentences below them."""
    systems = list(outcome["systems"])
    peers = [name for name in systems if name != OURS]
    shape = outcome["shape"]
    lines = [
        "# fusecache against its peers, on the same real Alluxio data",
        "",
        f"{outcome['machine']['date']}, commit {outcome['machine']['commit']}, {outcome['machine']['cpu']}, "
        f"Linux {outcome['machine']['kernel']}, Python {outcome['machine']['python']}, "
        f"load average at the end {outcome['machine']['load']}.",
        f"{shape['small_files']:,} files of {shape['small_file_bytes'] / 1024:.0f} KiB, one of "
        f"{shape['large_bytes'] / (1 << 20):,.0f} MiB, {shape['epoch_files']:,} files per first epoch; blocks of "
        f"{shape['block_bytes'] / (1 << 20):.0f} MiB. How it is measured: perf/bench.py.",
        "",
        "Rates: median with its 95 % bootstrap interval.",
        "",
        "| row | unit | rounds | " + " | ".join(systems) + " |",
        "|---|---|---|" + "---|" * len(systems),
    ]
    for row in outcome["rows"]:
        about = ROW_BY_NAME[row["row"]]
        cells = [
            interval(bootstrap_median(row["rates"][name], random.Random(SEED))) if name in row["rates"] else ""
            for name in systems
        ]
        rounds = max(len(rates) for rates in row["rates"].values())
        lines.append(f"| {about.title} | {about.unit} | {rounds} | " + " | ".join(cells) + " |")
    if OURS in systems and peers:
        lines += [
            "",
            "## fusecache / peer",
            "",
            "Median of the ratios within rounds; above 1 = fusecache is faster.",
            "",
        ]
        lines += ["| row | " + " | ".join(peers) + " |", "|---|" + "---|" * len(peers)]
        for row in outcome["rows"]:
            cells = [interval(ratios(row)[name]) if name in ratios(row) else "" for name in peers]
            lines.append(f"| {ROW_BY_NAME[row['row']].title} | " + " | ".join(cells) + " |")
        lines += ["", "## Where fusecache loses", ""]
        lines += losses(outcome) or ["Nowhere in this run."]
    lines += ["", "## Where the bytes came from", "", *sources(outcome)]
    lines += ["", "## Warm-up", "", *warm_up(outcome)]
    lines += ["", "## Set-up", ""]
    lines += [f"* {name}: {setup}" for name, setup in outcome["systems"].items()]
    return "\n".join(lines) + "\n"


def ratios(row: dict[str, Any]) -> dict[str, Interval]:
    """fusecache's rate over each peer's, for one row."""
    ours = row["rates"].get(OURS)
    if ours is None:
        return {}
    return {
        name: paired_ratio(ours, theirs, random.Random(SEED)) for name, theirs in row["rates"].items() if name != OURS
    }


def losses(outcome: Outcome) -> list[str]:
    """One line for each row and peer where the whole interval, or its lower end by more than 5 %, is below 1."""
    lines = []
    for row in outcome["rows"]:
        for name, ratio in ratios(row).items():
            title = ROW_BY_NAME[row["row"]].title
            if ratio.high < 1:
                lines.append(f"* {title}: behind {name}, {interval(ratio)}")
            elif ratio.low < 0.95:
                lines.append(f"* {title}: not surely level with {name}, {interval(ratio)}")
    return lines


def sources(outcome: Outcome) -> list[str]:
    """Each system's own counters over the rounds: the short circuit is shown, not assumed."""
    lines = ["| row | system | from local block files, MB | from elsewhere, MB |", "|---|---|---|---|"]
    for row in outcome["rows"]:
        for name, served in row["served"].items():
            if served is not None:
                local, elsewhere = served["local_block"] / 1e6, served["elsewhere"] / 1e6
                lines.append(f"| {ROW_BY_NAME[row['row']].title} | {name} | {local:,.1f} | {elsewhere:,.1f} |")
    return lines


def warm_up(outcome: Outcome) -> list[str]:
    """Which rows were measured although the last two warm-up runs differed by more than 10 %: noise, where the
    runs do not rise; a JVM that was still compiling, where they do."""
    lines = []
    for row in outcome["rows"]:
        for name, agreed in row["agreed"].items():
            if not agreed:
                runs = ", ".join(number(rate) for rate in row["warm_up"][name])
                lines.append(
                    f"* {ROW_BY_NAME[row['row']].title}, {name}: the last two runs differ by more than 10 %: {runs}"
                )
    return lines or ["Every system's last two warm-up runs of every row agreed within 10 %."]


def plot(outcome: Outcome, path: Path) -> None:
    """One small panel per row, a bar per system, every round as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = outcome["rows"]
    columns = 5
    height = -(-len(rows) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(3.2 * columns, 3.0 * height), squeeze=False)
    for panel in axes.flat[len(rows) :]:
        panel.set_visible(False)
    colours = dict(zip(outcome["systems"], pyplot.get_cmap("tab10").colors, strict=False))
    for panel, row in zip(axes.flat, rows, strict=False):
        about = ROW_BY_NAME[row["row"]]
        for place, (name, rates) in enumerate(row["rates"].items()):
            middle = bootstrap_median(rates, random.Random(SEED)).median
            panel.bar(place, middle, color=colours[name], alpha=0.7)
            panel.plot([place] * len(rates), rates, "k.", markersize=4)
            panel.annotate(number(middle), (place, middle), ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(row["rates"])), list(row["rates"]), fontsize=7, rotation=20)
        panel.set_title(about.title.replace(", ", "\n", 1), fontsize=8)
        panel.set_ylabel(about.unit, fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
        panel.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
