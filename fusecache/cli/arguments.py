"""Kinds of arguments that click does not have: paths that nobody looks at, durations and sizes as people write them.

click's own Path asks the file system about what was typed. That hangs on a mount that hangs, and refuses a mount point
that is closed while nothing is mounted on it, before `wait` could wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from fusecache.config.units import format_duration, format_size, parse_duration, parse_size


class PathName(click.ParamType[Path]):
    """The name of a file or folder, as it was typed. An empty one is a variable that was not set, and no folder."""

    name = "path"

    def __init__(self, completed_as: Literal["file", "dir"] = "file") -> None:
        self._completed_as = completed_as

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path."""
        if value == "":
            self.fail("it is empty; give a path", param, ctx)
        return Path(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The shell knows them."""
        return [CompletionItem(incomplete, type=self._completed_as)]


class Duration(click.ParamType[float]):
    """Seconds, or a text such as 5m, within limits."""

    name = "duration"

    def __init__(self, lowest_s: float, highest_s: float) -> None:
        self._lowest_s = lowest_s
        self._highest_s = highest_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds of what was typed."""
        try:
            duration_s = parse_duration(value)
        except ValueError as failure:
            self.fail(f"{value!r}: {failure}", param, ctx)
        if not self._lowest_s <= duration_s <= self._highest_s:
            allowed = f"{format_duration(self._lowest_s)} to {format_duration(self._highest_s)}"
            self.fail(f"{value!r}: allowed: {allowed}", param, ctx)
        return duration_s


class Size(click.ParamType[int]):
    """Bytes, or a text such as 64MiB, within limits."""

    name = "size"

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of what was typed."""
        try:
            size = parse_size(value)
        except ValueError as failure:
            self.fail(f"{value!r}: {failure}", param, ctx)
        if not self._lowest <= size <= self._highest:
            allowed = f"{format_size(self._lowest)} to {format_size(self._highest)}"
            self.fail(f"{value!r}: allowed: {allowed}", param, ctx)
        return size
