"""The process that a mount was started as, after a reload: whose end is its end, and whom signals reach (S43)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fusecache.kernel.features import FEATURE_NAMES, Observation, judge
from fusecache.kernel.spec import MountSpec
from tests.support.command import ROOT
from tests.support.supervised import PYTHON, runs, until

END_S = 20
BECOME = """
import sys
from fusecache.kernel.supervisor.takeover.first_process import become, hold_signals
from fusecache.kernel.log import Log
from fusecache.kernel.supervisor.takeover.reloading import Reloading
from fusecache.kernel.spec import MountSpec
spec = MountSpec.from_descriptor(int(sys.argv[1]))
reloading = Reloading(spec, Log("test"), lambda: None)
reloading.start()
hold_signals()
become(spec, reloading)
"""


class First:
    """The process, with a successor that was started as a supervisor does it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command_fd = os.memfd_create("command", 0)
        spec = MountSpec(
            mountpoint="/mnt/stand-in",
            fsname="stand-in",
            allow_other=True,
            open_mode="no-open",
            features=judge({name: Observation(True, "seen") for name in FEATURE_NAMES}, ()),
            workers=1,
            gate_argv=("none",),
            worker_argv=("none",),
            agent_argv=("none",),
            plan_fd=0,
            agent_socket="none",
            control_socket="none",
            successor_argv=(*PYTHON, "tests.support.stand_in_successor"),
            command_fd=command_fd,
        )
        spec_fd = spec.to_memfd()
        with (folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BECOME, str(spec_fd)],
                pass_fds=(spec_fd, command_fd),
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), "FUSECACHE_STAND_IN": str(folder)},
            )
        os.close(spec_fd)
        os.close(command_fd)
        self.has(1)

    def has(self, number: int) -> int:
        """Wait for the n-th successor; its process id."""
        until(lambda: (self.folder / str(number)).exists(), f"successor {number} runs", END_S)
        return int((self.folder / str(number)).read_text())

    def order(self, text: str) -> None:
        (self.folder / text).touch()

    def says(self, text: str, count: int = 1) -> None:
        until(lambda: (self.folder / "stderr").read_text().count(text) >= count, text, END_S)

    def is_asked(self, number: int) -> bool:
        return (self.folder / f"{number} asked").exists()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for file in self.folder.glob("[0-9]"):
            if runs(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)
        sys.stderr.write((self.folder / "stderr").read_text())


@pytest.fixture
def first(tmp_path: Path) -> Iterator[First]:
    with closing(First(tmp_path)) as running:
        yield running


def test_it_ends_as_the_one_that_has_the_mount(first: First) -> None:
    first.order("1 ready")
    first.says('"reloaded"')
    first.order("1 exit 7")
    assert first.process.wait(END_S) == 7


def test_a_killed_one_is_told_as_a_shell_does(first: First) -> None:
    first.order("1 ready")
    first.says('"reloaded"')
    os.kill(first.has(1), signal.SIGKILL)
    assert first.process.wait(END_S) == 128 + 9


def test_a_signal_is_passed_on(first: First) -> None:
    first.order("1 ready")
    first.says('"reloaded"')
    first.process.terminate()
    assert first.process.wait(END_S) == 0
    assert first.is_asked(1)


def test_the_end_that_counts_is_that_of_the_last_one_that_was_ready(first: First) -> None:
    """The second reload is wanted while the first one is under way, and the one before it ends late."""
    first.process.send_signal(signal.SIGHUP)
    first.order("1 ready")
    first.has(2)
    first.order("2 ready")
    first.says('"reloaded"', 2)
    first.process.send_signal(signal.SIGHUP)  # the first one has not ended yet
    first.has(3)
    first.order("1 exit 0")
    first.order("3 ready")
    first.says('"reloaded"', 3)
    first.order("2 exit 0")
    until(lambda: not runs(first.has(2)), "the second one has ended", END_S)
    assert first.process.poll() is None
    first.order("3 exit 5")
    assert first.process.wait(END_S) == 5


def test_a_reload_that_fails_is_logged_and_no_end(first: First, expected_logs: Callable[..., None]) -> None:
    expected_logs("not reloaded: it ended without a word", count=1)
    first.order("1 ready")
    first.says('"reloaded"')
    first.process.send_signal(signal.SIGHUP)
    first.has(2)
    first.order("2 exit 3")
    first.says("not reloaded: ")
    assert first.process.poll() is None
    first.order("1 exit 6")
    assert first.process.wait(END_S) == 6


def test_unmounted_in_the_middle_of_a_reload_it_ends_with_0(first: First, expected_logs: Callable[..., None]) -> None:
    expected_logs("not reloaded: it ended without a word", count=1)
    first.order("1 ready")
    first.says('"reloaded"')
    first.process.send_signal(signal.SIGHUP)
    first.has(2)
    first.order("1 exit 0")
    until(lambda: not runs(first.has(1)), "the first one has ended", END_S)
    first.order("2 exit 3")
    assert first.process.wait(END_S) == 0


def test_in_the_middle_of_a_reload_the_one_that_has_the_mount_ends_last(first: First) -> None:
    """Both at once would leave the mount behind. A second signal makes sure of the first end."""
    first.order("1 ready")
    first.says('"reloaded"')
    first.order("2 stays")
    first.process.send_signal(signal.SIGHUP)
    second = first.has(2)
    first.process.terminate()
    until(lambda: first.is_asked(2), "the one that is about to take over is asked to end", END_S)
    assert not first.is_asked(1)
    first.process.terminate()
    assert first.process.wait(END_S) == 0
    assert first.is_asked(1)
    assert not runs(second)
