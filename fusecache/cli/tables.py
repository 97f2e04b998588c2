"""Tables: as wide as the terminal on one, never folded elsewhere, so that `grep` and `awk` see whole rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

WIDE = 1000
"""Columns where no terminal limits them."""


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, styles: dict[str, str] | None = None) -> None:
    """Print rows under headers. A cell that is a key of `styles` is shown in that style on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(table)
