"""SEMANTICS.md and the tests hold each other: every promise is quoted by a test, every quoted number is a promise."""

from __future__ import annotations

import re
from pathlib import Path

from fusecache.config.settings import Settings
from fusecache.fs.errno_map import ERRNO_TABLE, errno_name

ROOT = Path(__file__).resolve().parents[2]
SEMANTICS = (ROOT / "SEMANTICS.md").read_text()
NUMBER = re.compile(r"\bS\d\d\b")


def quoted() -> set[str]:
    """Promise numbers in the text of the tests."""
    return {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        for number in NUMBER.findall(path.read_text())
    }


def test_semantics_every_promise_is_quoted_by_a_test() -> None:
    promised = set(re.findall(r"^\* \*\*(S\d\d)\*\*", SEMANTICS, re.MULTILINE))
    assert len(promised) >= 25
    assert promised - quoted() == set()


def test_semantics_no_test_quotes_a_promise_that_is_not_there() -> None:
    assert quoted() - set(NUMBER.findall(SEMANTICS)) == set()


def test_semantics_errno_table_is_the_codes_table() -> None:
    documented = dict(re.findall(r"^\| (E[A-Z]+) \| (.+) \|$", SEMANTICS, re.MULTILINE))
    assert {errno_name(number) for _, number, _ in ERRNO_TABLE} <= set(documented)
    for _, number, meaning in ERRNO_TABLE:
        if errno_name(number) in ("ENOENT", "ESTALE", "EBUSY"):
            assert documented[errno_name(number)] == meaning


def test_semantics_numbers_are_the_defaults() -> None:
    settings = Settings()
    for name in ("refresh_s", "read_budget_s", "metadata_budget_s", "stall_s", "stale_if_error_s"):
        value = re.search(rf"`{name}` \((\d+) s\)|`{name}`, (\d+) s", SEMANTICS)
        assert value is not None, name
        assert float(value.group(1) or value.group(2)) == getattr(settings, name), name
    assert f"`metadata_hot_entries` ({settings.metadata_hot_entries:,})" in SEMANTICS
    assert "`mode_mask` (0555)" in SEMANTICS
    assert settings.mode_mask == 0o555
