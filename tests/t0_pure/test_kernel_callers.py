"""Whether a thread is being killed, as /proc tells."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from fusecache.kernel.gate import callers


def test_a_thread_that_runs_is_not_being_killed() -> None:
    assert callers.is_being_killed(threading.get_native_id()) is False


def test_a_signal_that_waits_and_does_not_kill_is_none_that_kills() -> None:
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        try:
            stopped.send_signal(signal.SIGSTOP)
            stopped.send_signal(signal.SIGWINCH)
            assert callers.is_being_killed(stopped.pid) is False
        finally:
            stopped.kill()


@pytest.mark.parametrize("thread", [0, 1 << 30])
def test_a_thread_that_can_t_be_seen_counts_as_one_that_lives(thread: int) -> None:
    """0 is what the kernel says of callers in another PID namespace."""
    assert callers.is_being_killed(thread) is False


@pytest.mark.parametrize(("mask", "killed"), [("0000000000000100", True), ("0000000000000080", False)])
@pytest.mark.parametrize("field", ["SigPnd", "ShdPnd"])
def test_sigkill_pending_means_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str, mask: str, killed: bool
) -> None:
    other = "ShdPnd" if field == "SigPnd" else "SigPnd"
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\n{field}:\t{mask}\n{other}:\t0000000000000000\nSigBlk:\t0000000000000100\n")
    monkeypatch.setattr("builtins.open", lambda path, mode: status.open(mode))
    assert callers.is_being_killed(5) is killed
