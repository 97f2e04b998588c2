"""What a run of the benchmark found: the raw measurements, as they are kept in results/NAME.json.

bench.py fills it in, report.py and bars.py read it; `from_json` makes a report of an earlier run again.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from perf.meter import Measured
from perf.processes import Memory
from perf.tables import TABLES, Row, Table

Counters = dict[str, float]
"""What a system says of itself since it started; the names are the table's heads."""
LOCAL = "MB from local block files"
ELSEWHERE = "MB from elsewhere"
PASSED_THROUGH = "opens passed through"
ORDINARY = "ordinary opens"
GATE = "requests answered by the gate"
WORKERS = "requests answered by workers"
MEGABYTE = 1e6


@dataclass
class MeasuredWorkload:
    """Everything about one workload."""

    name: str
    rows: dict[str, dict[str, list[Measured]]]
    """Row -> system -> one measurement for each round."""
    warm_up_rates: dict[str, list[float]] = field(default_factory=dict)
    """System -> the rate of each warm-up run, the geometric mean over the rows."""
    memory: dict[str, list[Memory]] = field(default_factory=dict)
    """System -> what its processes occupied after each measurement."""
    counters: dict[str, Counters] = field(default_factory=dict)
    """System -> what its own counters counted over all rounds."""

    def rates(self, row: Row, system: str) -> list[float]:
        """In the row's unit per second, by round; nothing where a system was not measured."""
        return [each["work"] / each["seconds"] / row.scale for each in self.rows[row.name].get(system, [])]


@dataclass
class Outcome:
    """One run."""

    about: Table
    """Titles and roles."""
    machine: dict[str, str]
    shape: dict[str, int]
    systems: dict[str, str]
    """Name -> how it was set up."""
    workloads: list[MeasuredWorkload]
    idle_percent: dict[str, float] = field(default_factory=dict)
    """System -> processor time of one core while nobody used any of them."""

    def rows(self) -> list[tuple[Row, MeasuredWorkload]]:
        """The rows that were measured, in the table's order."""
        found = {workload.name: workload for workload in self.workloads}
        return [
            (row, found[workload.name])
            for workload in self.about.workloads
            if workload.name in found
            for row in workload.rows
        ]

    def rates(self, row_name: str, system: str) -> list[float]:
        """By round; nothing when row or system was not measured."""
        for row, workload in self.rows():
            if row.name == row_name:
                return workload.rates(row, system)
        return []

    def to_json(self) -> str:
        """Indented, with lists of numbers on one line each."""
        found = {**{part.name: getattr(self, part.name) for part in fields(self)}, "about": self.about.name}
        found["workloads"] = [asdict(workload) for workload in self.workloads]
        text = json.dumps(found, indent=1)
        return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Of an earlier run of one of the two tables."""
        found: dict[str, Any] = json.loads(text)
        workloads = [
            MeasuredWorkload(
                each["name"],
                each["rows"],
                each["warm_up_rates"],
                {name: [Memory(*pair) for pair in pairs] for name, pairs in each["memory"].items()},
                each["counters"],
            )
            for each in found["workloads"]
        ]
        about = next(table for table in TABLES.values() if table.name == found["about"])
        return cls(**{**found, "about": about, "workloads": workloads})
