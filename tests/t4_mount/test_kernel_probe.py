"""The probe of kernel features, against this machine's kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.kernel import probe
from fusecache.kernel.features import FEATURE_NAMES
from tests.support.mounting import needs_fuse
from tests.support.supervised import PACKAGE_FOLDER

pytestmark = needs_fuse

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) needs root")


def kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


@as_root
def test_what_a_kernel_of_this_version_has_is_found() -> None:
    """Distribution kernels may have more than their version says, none has less."""
    found = probe.probe()
    for known in probe.KNOWN_FEATURES:
        if known.since <= kernel_version():
            assert found.usable(known.name), found[known.name]
        assert found[known.name].why


@as_root
def test_the_probe_leaves_no_mount_and_no_process() -> None:
    before = Path("/proc/self/mountinfo").read_text()
    probe.probe()
    assert Path("/proc/self/mountinfo").read_text() == before


@as_root
def test_the_mask_lies_over_what_was_found() -> None:
    found = probe.probe(("as-5.14",))
    assert [row.name for row in found.rows if row.masked] == ["init-ext", "passthrough", "resend"]


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="drops a right that root has")
def test_without_cap_sys_admin_nothing_is_there_and_the_reason_says_so() -> None:
    code = "from fusecache.kernel.probe import probe\nfor row in probe().rows: print(row.name, row.present, row.why)"
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", "--", sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(FEATURE_NAMES)
    for line in lines:
        assert line.endswith("False mount(2) needs CAP_SYS_ADMIN, which this process lacks (Operation not permitted)")


def test_a_probe_that_can_not_run_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    assert all(not row.present and row.why.startswith("the probe ended with 1") for row in probe.probe().rows)


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(hanging))
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    assert all(row.why == "the probe did not end within 0.2 s" for row in probe.probe().rows)
