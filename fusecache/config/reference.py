"""The reference tables of the README, rendered from the table of settings and the table of metrics.

    python -m fusecache.config.reference            print both tables
    python -m fusecache.config.reference README.md  write them between their markers in the file

A test holds the README to what this prints, so the tables there are never behind the code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fusecache.config.co_scheduling import ControllerLink, PlacementConfig
from fusecache.config.settings import ClusterConfig, DatasetConfig, MountConfig, Settings
from fusecache.config.units import value_with_unit
from fusecache.errors import UsageError
from fusecache.metrics import METRICS

LISTS = ("clusters", "mounts", "datasets")
"""Sections with several entries; the others are one mapping each."""


def default_text(field: FieldInfo, key: str) -> str:
    """The default as people write it."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return str(extra["default"])
    if field.is_required():
        return "required"
    return value_text(key, field.get_default(call_default_factory=True, validated_data={}))


def value_text(key: str, value: Any) -> str:
    """A setting's value as people write it: 4194304 of a `_bytes` key -> 4MiB."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list, dict)) and value:
        pairs = [f"{name}={number}" for name, number in value.items()] if isinstance(value, dict) else value
        return ",".join(map(str, pairs))
    if value in ((), {}):
        return "empty"
    return value_with_unit(key, value)


def settings_table() -> str:
    """Settings, then the keys of the other sections of the file, as Markdown."""
    parts = ["| setting | default | meaning |", "|---|---|---|", *_rows(Settings)]
    sections: tuple[tuple[str, type[BaseModel]], ...] = (
        ("clusters", ClusterConfig),
        ("mounts", MountConfig),
        ("datasets", DatasetConfig),
        ("controller", ControllerLink),
        ("placement", PlacementConfig),
    )
    for section, model in sections:
        parts += [
            "",
            f"Keys of an entry of `{section}:`" if section in LISTS else f"Keys of `{section}:`",
            "",
            "| key | default | meaning |",
            "|---|---|---|",
            *_rows(model),
        ]
    return "\n".join(parts) + "\n"


def metrics_table() -> str:
    """Metrics as Markdown."""
    rows = [
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels) or '-'} | {spec.meaning} |"
        for spec in METRICS
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _rows(model: type[BaseModel]) -> list[str]:
    rows = []
    for key, field in model.model_fields.items():
        if key == "overrides":
            rows.append("| *any setting* | the file's | Overrides the file's value for this mount. |")
            continue
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{key}` | {default_text(field, key)} | {meaning} |")
    return rows


def with_tables(text: str) -> str:
    """`text` with both tables between their markers. UsageError when a marker is missing."""
    for name, table in (("settings", settings_table()), ("metrics", metrics_table())):
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise UsageError(f"no markers {begin.strip()!r} and {end!r} in the file; add them on lines of their own")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into the files given."""
    if not arguments:
        print(settings_table(), metrics_table(), sep="\n")
    for name in arguments:
        path = Path(name)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as failure:
        print(f"{os.path.basename(sys.argv[0])}: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
