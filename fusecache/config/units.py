"""Sizes and durations as people write them (`10GiB`, `5m`), to bytes and seconds and back. Pure.

Configuration keys carry the unit they mean (`refresh_s`, `fetch_bytes`), so that a plain number is never
ambiguous; a text may name another unit. `K`, `M`, `G` alone are refused, because half of all tools read them
as powers of 1000 and the other half as powers of 1024.
"""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?\d+(?:\.\d+)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)

_SIZE_UNITS: dict[str, int] = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
}  # fmt: skip
_BINARY_UNITS: tuple[tuple[str, int], ...] = (
    ("PiB", 1 << 50), ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10),
)  # fmt: skip
_DURATION_UNITS: dict[str, float] = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

SIZE_FORMS = "bytes, or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
DURATION_FORMS = "seconds, or a number with ms, s, m, h, d"


def parse_size(value: object) -> int:
    """Bytes of an int (bytes) or a text (`4MiB`). ValueError says what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value)):
        number, unit = match[1], match[2].lower()
        if unit in _SIZE_UNITS:
            size = float(number) * _SIZE_UNITS[unit] if "." in number else int(number) * _SIZE_UNITS[unit]
            if size == int(size):
                return int(size)
    raise ValueError(f"not a size; allowed: {SIZE_FORMS}")


def parse_duration(value: object) -> float:
    """Seconds of a number (seconds) or a text (`5m`). ValueError says what is allowed."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value)):
        number, unit = match[1], match[2].lower()
        if unit in _DURATION_UNITS:
            return float(number) * _DURATION_UNITS[unit]
    raise ValueError(f"not a duration; allowed: {DURATION_FORMS}")


def parse_mode(value: object) -> int:
    """Permission bits of an int or an octal text (`0555`, `0o555`, `555`). ValueError says what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{1,4}", value.strip()):
        return int(value.strip().removeprefix("0o"), 8)
    raise ValueError("not a file mode; allowed: octal digits such as 0555")


def format_size(size_bytes: int) -> str:
    """Exact text of a size, in the largest binary unit that divides it: 4194304 -> `4MiB`, 1000 -> `1000`."""
    for unit, factor in _BINARY_UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def format_duration(duration_s: float) -> str:
    """Exact text of a duration, in the largest unit that divides it: 600 -> `10m`, 0.5 -> `500ms`."""
    for unit, factor in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if duration_s > 0 and duration_s % factor == 0:
            return f"{int(duration_s // factor)}{unit}"
    if duration_s > 0 and (duration_s * 1000) == int(duration_s * 1000):
        return f"{int(duration_s * 1000)}ms"
    return f"{duration_s:g}"


def value_with_unit(key: str, value: Any) -> str:
    """A setting's number as people write it: 4194304 of a `_bytes` key -> 4MiB."""
    if key.endswith("_bytes"):
        return format_size(value)
    if key == "mode_mask":
        return f"0{value:o}"
    if key.endswith("_s") and not key.endswith("_per_s") and value > 0:
        return format_duration(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def approximate_size(size_bytes: float) -> str:
    """A size for people, three digits: 1400000 -> `1.34 MiB`."""
    for unit, factor in _BINARY_UNITS:
        if abs(size_bytes) >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes / factor < 1000
                else f"{size_bytes / factor:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"
