"""Where a command's output goes: closed, full, unread. Where it runs: in a folder that is gone, with few files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.embedded.server import EmbeddedServer
from tests.support.command import environment, error_line, fusecache
from tests.support.mounting import Mount, is_mounted, needs_fuse


def shell(
    script: str, state: Path, *arguments: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`"$@"` of the script is `fusecache` with the arguments."""
    return fusecache(*arguments, state=state, before=("bash", "-c", script, "bash"), cwd=cwd)


@pytest.mark.parametrize("arguments", [("version",), ("config", "show"), ("status",)])
def test_output_that_is_closed_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = shell('"$@" >&-', tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


@needs_fuse
def test_daemon_starts_without_any_stream(tmp_path: Path) -> None:
    """What is opened next gets the number of what was closed: no pipe of ours may be somebody's output."""
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    done = shell('"$@" <&- >&- 2>&-', tmp_path, "mount", "--daemon", tmp_path / "source", tmp_path / "mnt")
    try:
        assert done.returncode == 0
        assert is_mounted(tmp_path / "mnt")
    finally:
        assert fusecache("umount", tmp_path / "mnt", state=tmp_path).returncode == 0


@pytest.mark.parametrize("arguments", [("version",), ("config", "show")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_full_is_one_line(tmp_path: Path, arguments: tuple[str, ...], unbuffered: str) -> None:
    done = shell(f'PYTHONUNBUFFERED={unbuffered} "$@" > /dev/full', tmp_path, *arguments)
    assert error_line(done, 1) == "fusecache: the output can't be written: No space left on device"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_141_and_silent(tmp_path: Path, unbuffered: str) -> None:
    names = tmp_path / "names"
    names.mkdir()
    for number in range(300):
        (names / f"{number}").touch()
    script = f'PYTHONUNBUFFERED={unbuffered} "$@" | true; exit ${{PIPESTATUS[0]}}'
    with EmbeddedServer(names, tmp_path / "embedded") as server:
        done = shell(script, tmp_path, "ls", f"alluxio://{server.master_target}/")
    assert (done.returncode, done.stderr) == (141, "")


def test_relative_name_in_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for arguments in (
        ("status", "x"),
        ("umount", "x"),
        ("mount", "./a", "/mnt"),
        ("config", "show", "--state-dir", "x"),
    ):
        gone.mkdir()
        done = shell(f'rmdir {gone}; "$@"', tmp_path, *arguments, cwd=gone)
        line = error_line(done, 2)
        assert "is relative, and the folder that the command is in was removed; give an absolute path" in line


def test_absolute_name_in_a_folder_that_is_gone_is_fine(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f'rmdir {gone}; "$@"', tmp_path, "umount", tmp_path, cwd=gone)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: not mounted\n")


def test_interrupt_while_the_program_is_loaded_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    own = environment(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "fusecache", "version"],
        env={**own, "PYTHONPATH": os.pathsep.join((str(tmp_path), own["PYTHONPATH"]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as loading:
        assert loading.stdout is not None
        assert loading.stdout.readline() == "loading\n"
        loading.send_signal(signal.SIGINT)
        _, errors = loading.communicate(timeout=30)
    assert (loading.returncode, errors) == (-signal.SIGINT, "")


@needs_fuse
def test_umount_of_the_folder_it_is_in(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    mount = Mount(str(tmp_path / "source"), tmp_path / "mnt", environment=environment(tmp_path))
    try:
        mount.start()
        done = fusecache("umount", "--timeout-s", "100ms", ".", state=tmp_path, cwd=mount.mountpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ".: detached; programs that have files open keep them\n"
        assert mount.process is not None
        assert mount.process.wait(30) == 0
    finally:
        mount.cleanup()


@needs_fuse
@pytest.mark.parametrize("limit", [10, 20])
def test_too_few_descriptors_are_one_line(tmp_path: Path, limit: int) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    flags = ("--open-mode", "classic", "--daemon", "--log-file", tmp_path / "log")
    done = shell(f'ulimit -n {limit}; "$@"', tmp_path, "mount", tmp_path / "source", tmp_path / "mnt", *flags)
    assert error_line(done, 1) == "fusecache: too many open files; raise the limit (ulimit -n, LimitNOFILE=)"


def test_version_as_a_flag(tmp_path: Path) -> None:
    assert fusecache("--version", state=tmp_path).stdout == fusecache("version", state=tmp_path).stdout


def test_completion_of_a_mount_point_is_the_shells(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "fusecache umount /m", "COMP_CWORD": "2", "_FUSECACHE_COMPLETE": "bash_complete"}
    assert fusecache(state=tmp_path, extra=words).stdout.split() == ["dir,/m"]
