"""`fusecache drill`: it kills what it says, nothing else, and reports what a reader saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusecache.daemon import drill
from fusecache.errors import MountError, Unavailable, UsageError
from tests.support.mounting import command, needs_fuse
from tests.t4_mount.live_mount import eventually, live_mount

KILLS = 3


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command(), "drill", *arguments], capture_output=True, text=True, timeout=110)


def source_of(folder: Path) -> Path:
    source = folder / "source"
    (source / "sub").mkdir(parents=True)
    for number in range(5):
        (source / "sub" / f"{number}").write_bytes(os.urandom(100_000))
    (source / "empty").touch()
    return source


@needs_fuse
def test_drill_kills_workers_and_no_read_fails(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    expected_logs("a worker ended")  # within 10 s further ones are only counted
    with live_mount(source_of(tmp_path), tmp_path, "--open-mode", "no-open") as mount:
        before = mount.parts()
        done = run(str(mount.root), "--kills", str(KILLS), "--json", "--runtime-dir", str(mount.runtime_dir))
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
        after = mount.parts()
        assert report["errors"] == []
        assert report["reads"] > 0
        killed = [kill["part"] for kill in report["kills"]]
        assert killed == ["worker 0", "worker 1", "worker 0"]
        for name, part in after.items():
            assert part.restarts - before[name].restarts == killed.count(name)


@needs_fuse
def test_drill_needs_parts_to_kill(tmp_path: Path) -> None:
    with live_mount(source_of(tmp_path), tmp_path, "--open-mode", "classic") as mount:
        refused = run(str(mount.root), "--runtime-dir", str(mount.runtime_dir))
    assert refused.returncode == 2
    assert "classic" in refused.stderr
    elsewhere = run(str(tmp_path))
    assert elsewhere.returncode == 3
    assert elsewhere.stderr == f"fusecache: '{tmp_path}' is no mount of fusecache; `fusecache status` lists them\n"


class Daemon:
    """Answers as a mount does whose only part is a process of the test's; not at once after that one was killed."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self.process = self._start()
        self._silent = 0

    def _start(self) -> subprocess.Popen[bytes]:
        program = (
            "import sys, time; from fusecache.kernel.process_name import set_process_name; "
            "set_process_name('worker 0', sys.argv[1]); time.sleep(100)"
        )
        return subprocess.Popen([sys.executable, "-c", program, str(self._mountpoint)])

    def status(self) -> dict[str, Any]:
        if self.process.poll() is not None:
            self.process = self._start()
            self._silent = 3
        if self._silent:
            self._silent -= 1
            raise Unavailable("nobody answers")
        ready = drill.is_part(self.process.pid, "worker 0", self._mountpoint)
        return {"parts": [{"name": "worker 0", "pid": self.process.pid, "ready": ready}]}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_drill_tells_reads_that_failed_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "BETWEEN_S", 0.1)
    source = source_of(tmp_path)
    daemon = Daemon(source)

    def spoil(kill: drill.Kill) -> None:
        (source / "sub" / "1").write_bytes(b"other bytes")
        (source / "sub" / "2").unlink()

    try:
        report = drill.run(source, daemon.status, ["worker"], 1, spoil)
    finally:
        daemon.end()
    assert len(report.kills) == len(report.pauses_s) == 1
    assert f"{source}/sub/1: other bytes than the first time" in report.errors
    assert f"{source}/sub/2: No such file or directory" in report.errors
    assert report.reads > len(report.errors)


def test_drill_kills_no_process_that_is_not_the_part(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        status = {"parts": [{"name": "worker 0", "pid": other.pid, "ready": True}]}
        with pytest.raises(MountError, match=f"process {other.pid} is not worker 0"):
            drill.run(source, lambda: status, ["worker"], 1, lambda kill: None)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert not drill.is_part(other.pid, "worker 0", source), "no process at all"


def test_drill_needs_files_and_known_parts(tmp_path: Path) -> None:
    status = {"parts": [{"name": "gate", "pid": 1, "ready": True}]}
    with pytest.raises(UsageError, match="no part called worker; it has gate"):
        drill.run(tmp_path, lambda: status, ["worker"], 1, lambda kill: None)
    with pytest.raises(UsageError, match="no file that can be read"):
        drill.run(tmp_path, lambda: status, ["gate"], 1, lambda kill: None)


def test_drill_kills_one_of_each_kind_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["supervisor", "gate", "agent", "worker 0", "worker 1"]
    killed: list[str] = []

    def kill(mountpoint: Path, ask: drill.Ask, name: str) -> drill.Kill:
        killed.append(name)
        return drill.Kill(name, 1, time.monotonic(), 0.0)

    monkeypatch.setattr(drill, "BETWEEN_S", 0.0)
    monkeypatch.setattr(drill, "_kill", kill)
    status = {"parts": [{"name": name, "pid": 1, "ready": True} for name in names]}
    drill.run(source_of(tmp_path), lambda: status, ["worker", "agent", "gate"], 5, lambda kill: None)
    assert killed == ["worker 0", "agent", "gate", "worker 1", "worker 0"]


def test_drill_gives_up_on_a_part_that_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "BETWEEN_S", 0.0)
    monkeypatch.setattr(drill, "BACK_S", 0.5)
    source = source_of(tmp_path)
    daemon = Daemon(source)
    pid = daemon.process.pid
    try:
        eventually(lambda: daemon.status()["parts"][0]["ready"], "it calls itself a worker")
        with pytest.raises(MountError, match=r"worker 0 was killed and is not back within"):
            drill.run(
                source, lambda: {"parts": [{"name": "worker 0", "pid": pid, "ready": True}]}, ["worker"], 1, print
            )
        assert daemon.process.wait() == -9
    finally:
        daemon.end()
