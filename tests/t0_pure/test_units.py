"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.config.units import (
    approximate_size,
    format_duration,
    format_size,
    parse_duration,
    parse_mode,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), ("17", 17), (17, 17), ("17B", 17), ("4KiB", 4096), ("4 kib", 4096), ("1.5MiB", 3 << 19),
        ("10GiB", 10 << 30), ("2TiB", 2 << 40), ("10GB", 10**10), ("1KB", 1000), ("-1", -1),
    ],
)  # fmt: skip
def test_parse_size_known_forms_are_bytes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("wrong", ["", "x", "10G", "10M", "1 2", "0.3B", "1e9", "0x10", True, None, 1.5, [], "٣KiB"])
def test_parse_size_unclear_text_is_refused_with_the_allowed_forms(wrong: object) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB"):
        parse_size(wrong)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("0", 0),
        ("5", 5),
        (2.5, 2.5),
        ("250ms", 0.25),
        ("90s", 90),
        ("5m", 300),
        ("1.5h", 5400),
        ("1d", 86400),
        (-1, -1),
    ],
)
def test_parse_duration_known_forms_are_seconds(text: object, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("wrong", ["", "x", "5 minutes", "1:30", "inf", "nan", float("inf"), float("nan"), True, None])
def test_parse_duration_unclear_text_is_refused_with_the_allowed_forms(wrong: object) -> None:
    with pytest.raises(ValueError, match="ms, s, m, h, d"):
        parse_duration(wrong)


@pytest.mark.parametrize(("text", "mode"), [("0555", 0o555), ("0o555", 0o555), ("555", 0o555), (0o444, 0o444)])
def test_parse_mode_is_octal(text: object, mode: int) -> None:
    assert parse_mode(text) == mode


@pytest.mark.parametrize("wrong", ["", "888", "rwx", "-555", "0x1ff", True, None])
def test_parse_mode_no_octal_digits_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="octal"):
        parse_mode(wrong)


@given(st.integers(0, 1 << 60))
def test_format_size_any_size_parses_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**9))
def test_format_duration_any_whole_second_parses_back(duration_s: int) -> None:
    assert parse_duration(format_duration(duration_s)) == duration_s


def test_format_duration_names_the_largest_unit_that_divides() -> None:
    assert [format_duration(s) for s in (0.25, 90, 600, 7200, 86400, 0)] == ["250ms", "90s", "10m", "2h", "1d", "0"]


def test_approximate_size_keeps_three_digits() -> None:
    sizes = [0, 999, 1 << 10, 1_400_000, 1023 << 10, 591 << 20, 77.5 * (1 << 30), 5 << 50]
    assert [approximate_size(size) for size in sizes] == [
        "0 B", "999 B", "1 KiB", "1.34 MiB", "1023 KiB", "591 MiB", "77.5 GiB", "5 PiB",
    ]  # fmt: skip
