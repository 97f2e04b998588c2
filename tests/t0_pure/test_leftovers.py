"""The leftover check itself: each kind of leftover is seen while it is there, and no longer afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tests.support import leftovers


def test_differences_of_an_unchanged_process_are_none(tmp_path: Path) -> None:
    assert leftovers.differences(leftovers.take(tmp_path)) == []


def test_differences_name_an_open_file_until_it_is_closed(tmp_path: Path) -> None:
    before = leftovers.take(tmp_path)
    with (tmp_path / "open").open("w"):
        assert leftovers.differences(before) == [f"1 descriptor(s) on {tmp_path}/open"]
    assert leftovers.differences(before) == []


def test_differences_name_a_child_and_a_zombie_until_it_is_waited_for(tmp_path: Path) -> None:
    before = leftovers.take(tmp_path)
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()  # it runs: right after exec its command line still reads as empty
        assert any(f"child {child.pid}: {sys.executable}" in line for line in leftovers.differences(before))
        child.stdin.close()
        # Ended, but nobody has asked for its exit code.
        while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "Z":
            pass
        assert f"child {child.pid}: (ended, never waited for)" in leftovers.differences(before)
    assert leftovers.differences(before) == []


def test_differences_name_a_thread_until_it_ends(tmp_path: Path) -> None:
    before = leftovers.take(tmp_path)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert leftovers.differences(before) == ["thread forgotten"]
    stop.set()
    thread.join()
    assert leftovers.wait_until_gone(before) == []
