"""What `doctor` says of the kernel's features: one row where one reason holds for all."""

from __future__ import annotations

import pytest

from fusecache.config.settings import Settings
from fusecache.daemon import machine_checks
from fusecache.daemon.machine_checks import Check, check_kernel_features
from fusecache.kernel.features import FEATURE_NAMES, Observation, judge


def rows(monkeypatch: pytest.MonkeyPatch, why_not: dict[str, str]) -> list[Check]:
    """With these features missing, and why."""
    seen = {name: Observation(name not in why_not, why_not.get(name, "seen")) for name in FEATURE_NAMES}
    monkeypatch.setattr(machine_checks, "probe", lambda mask: judge(seen, mask))
    return list(check_kernel_features(Settings()))


def test_no_rights_are_one_row_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    features, mode = rows(monkeypatch, dict.fromkeys(FEATURE_NAMES, "mount(2) needs CAP_SYS_ADMIN"))
    assert features == Check(
        "kernel features",
        "warn",
        "none can be used: mount(2) needs CAP_SYS_ADMIN",
        "mount as root; open_mode classic works without",
    )
    assert mode.found.startswith("classic: ")


def test_each_feature_that_is_missing_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(monkeypatch, {"resend": "Linux 6.9 has it", "passthrough": "Linux 6.9 has it"})
    assert [row.name for row in found] == [
        "kernel features",
        "kernel feature passthrough",
        "kernel feature resend",
        "open mode",
    ]
    assert all(row.advice for row in found if row.verdict == "warn")
