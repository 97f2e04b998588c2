"""SIGHUP: a mount goes on with the configuration as it is now, or as it was (S43). The whole daemon, under readers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusecache.daemon.control_client import ask
from fusecache.daemon.mountpoint import find_mount
from fusecache.errors import FusecacheError
from fusecache.kernel import probe
from tests.support.command import environment, fusecache
from tests.support.http_get import http_get
from tests.support.mounting import command, is_mounted, needs_fuse
from tests.support.process_tree import descendants
from tests.support.random_files import random_files
from tests.support.readers import Load
from tests.support.supervised import runs, until

FEATURES = probe.probe()

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(not FEATURES.usable("mount"), reason=f"no mount(2) here: {FEATURES['mount'].why}"),
]

SIZES = (0, 1, 4096, 70_000, 300_000)
START_S = 90
END_S = 30


@pytest.fixture
def source() -> Iterator[Path]:
    with random_files(SIZES) as folder:
        yield folder


class Daemon:
    """A `fusecache` that goes on until a signal comes, in a session of its own: without a terminal."""

    def __init__(self, folder: Path, *arguments: str | Path, before: Sequence[str] = (), terminal: int | None = None):
        """Started in `folder`, with state and sockets there; returns when it says that reads work."""
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*before, *command(), *map(str, arguments)],
                env=environment(folder),
                cwd=folder,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=terminal is None,
            )
        assert self.process.stdout is not None
        assert re.search(rb"is mounted at|are ready$", self.process.stdout.readline().strip()), self.log()

    def log(self) -> str:
        return self.errors.read_text()

    def hang_up(self, pid: int | None = None) -> None:
        os.kill(self.process.pid if pid is None else pid, signal.SIGHUP)

    def says(self, text: str, count: int = 1) -> None:
        """Wait until it has said so, so often."""
        until(lambda: self.log().count(text) >= count, f"{text!r} in the log, {count} times", START_S)

    def end(self) -> None:
        """SIGTERM ends it with 0, and whatever belongs to it."""
        below = descendants(self.process.pid)
        self.process.terminate()
        assert self.process.wait(END_S) == 0
        until(lambda: not any(map(runs, below)), "all parts have ended", END_S)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        sys.stderr.write(self.log())


class Questions:
    """Asks a mount for its status all the time, as commands do, while it is entered."""

    def __init__(self, mountpoint: Path, folder: Path) -> None:
        mounted = find_mount(mountpoint)
        assert mounted is not None
        self._mounted, self._runtime_dir = mounted, folder / "run"
        self._thread = threading.Thread(target=self._run)
        self._is_over = threading.Event()
        self.failures: list[str] = []

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                ask(self._mounted, self._runtime_dir, "status", START_S)
            except FusecacheError as failure:
                self.failures.append(str(failure))

    def __enter__(self) -> Questions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def status(mountpoint: Path, folder: Path) -> dict[str, Any]:
    done = fusecache("status", mountpoint, "--json", state=folder)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def parts(mountpoint: Path, folder: Path) -> dict[str, int]:
    """Process ids, but for the spare gate's, which starts later."""
    return {part["name"]: part["pid"] for part in status(mountpoint, folder)["parts"] if part["name"] != "spare gate"}


def workers(mountpoint: Path, folder: Path) -> int:
    return sum(name.startswith("worker") for name in parts(mountpoint, folder))


def test_a_mount_goes_on_with_new_settings_and_no_reader_notices(
    source: Path, tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """S43; twice, by the process id that `status` shows: that of the process that was started, later its child's. Nor
    does who asks the mount for its status."""
    expected_logs("the agent gets no answer", optional=True)  # it has ended, and the question is asked again
    point, file = tmp_path / "mnt", tmp_path / "fusecache.yaml"
    point.mkdir()
    file.write_text("workers: 2\n")
    with Daemon(tmp_path, "mount", "--config", file.name, source, point) as daemon:
        with (
            Load(point, source, sorted(os.listdir(source)), processes=1) as load,
            Questions(point, tmp_path) as questions,
        ):
            load.wait_for_calls(20)
            assert workers(point, tmp_path) == 2
            first = set(descendants(daemon.process.pid))
            for number, count in ((1, 3), (2, 1)):
                file.write_text(f"workers: {count}\n")
                daemon.hang_up(parts(point, tmp_path)["supervisor"])
                daemon.says('"reloaded"', number)
                assert workers(point, tmp_path) == count
                load.wait_for_calls(20)
            report = load.stop()
        assert report.errors == [], report.describe()
        assert report.wrong == [], report.describe()
        assert questions.failures == []
        assert daemon.process.poll() is None
        until(lambda: not any(map(runs, first)), "the parts that it had first have ended", END_S)
        children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children")
        until(lambda: len(children.read_text().split()) == 1, "one child, however many reloads", END_S)
        daemon.end()
    assert not is_mounted(point)


def test_what_can_not_be_used_changes_nothing_and_is_logged(
    source: Path, tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """S43."""
    expected_logs("not reloaded: ", count=2)
    expected_logs("the process that was taking over is gone", count=1)
    expected_logs("the mount was not taken over: this process goes on serving", count=1)
    # The killed one's embedded server may be there for a moment, and have the folder.
    expected_logs("master does not answer|the agent failed|embedded server ended", optional=True)
    point, file = tmp_path / "mnt", tmp_path / "fusecache.yaml"
    point.mkdir()
    file.write_text("workers: 1\n")
    with Daemon(tmp_path, "mount", "--config", file, source, point) as daemon:
        before = parts(point, tmp_path)
        file.write_text("workerz: 3\n")
        daemon.hang_up()
        daemon.says(f"{file}: unknown key 'workerz'; did you mean 'workers'?")
        assert parts(point, tmp_path) == before
        # One that is killed when everything was given to it.
        file.write_text("workers: 2\n")
        daemon.hang_up()
        daemon.says('"state": "yielded"')
        (successor,) = re.findall(r'"reloading: .*"pid": (\d+)', daemon.log())[1:]
        os.kill(int(successor), signal.SIGKILL)
        daemon.says("this process goes on serving")
        assert (point / "f70000").read_bytes() == (source / "f70000").read_bytes()
        until(lambda: fusecache("status", point, state=tmp_path).returncode == 0, "status answers again", START_S)
        assert workers(point, tmp_path) == 1
        assert parts(point, tmp_path)["supervisor"] == daemon.process.pid
        daemon.end()
    assert not is_mounted(point)


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "exit_code"), [("the one that has the mount", 128 + 9), ("the process that was started", -9)]
)
def test_killed_after_a_reload_it_ends_as_any_mount_whose_supervisor_is_killed(
    source: Path, tmp_path: Path, killed: str, exit_code: int
) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    with Daemon(tmp_path, "mount", source, point) as daemon:
        daemon.hang_up()
        daemon.says('"reloaded"')
        below = descendants(daemon.process.pid)
        supervisor = parts(point, tmp_path)["supervisor"]
        assert Path(f"/proc/{daemon.process.pid}/comm").read_text() == "fc-first proces\n"
        assert supervisor in below
        os.kill(supervisor if exit_code > 0 else daemon.process.pid, signal.SIGKILL)
        assert daemon.process.wait(END_S) == exit_code, killed
        until(lambda: not any(map(runs, below)), "all parts have ended", END_S)
        if exit_code > 0:
            subprocess.run(["umount", "-l", str(point)], check=True)  # dead: nobody was left to unmount it
    assert not is_mounted(point)


def test_a_closed_terminal_ends_the_mount(source: Path, tmp_path: Path) -> None:
    """S43."""
    point = tmp_path / "mnt"
    point.mkdir()
    controller, terminal = os.openpty()
    try:
        with Daemon(
            tmp_path, "mount", source, point, before=("setsid", "--ctty", "--wait"), terminal=terminal
        ) as daemon:
            below = descendants(daemon.process.pid)
            assert is_mounted(point)
            os.close(terminal)
            os.close(controller)
            terminal = controller = -1
            assert daemon.process.wait(END_S) == 0
            until(lambda: not any(map(runs, below)), "all parts have ended", END_S)
            assert '"signal": "SIGHUP"' in daemon.log()
    finally:
        for descriptor in {terminal, controller} - {-1}:
            os.close(descriptor)
    assert not is_mounted(point)


def test_a_classic_mount_says_that_it_can_not(source: Path, tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    expected_logs("not reloaded: a mount in classic mode keeps its settings", count=1)
    point = tmp_path / "mnt"
    point.mkdir()
    with Daemon(tmp_path, "mount", "--open-mode", "classic", source, point) as daemon:
        daemon.hang_up()
        daemon.says("not reloaded: a mount in classic mode keeps its settings")
        assert (point / "f4096").read_bytes() == (source / "f4096").read_bytes()
        daemon.end()
    assert not is_mounted(point)


def test_serve_replaces_adds_and_ends_mounts(source: Path, tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    """S43: what is the same in the file stays alone; the process stays."""
    expected_logs('"not_reloaded', count=1)
    expected_logs("mount_not_reloaded", count=1)
    points = [tmp_path / f"mnt{number}" for number in range(3)]
    other, third = tmp_path / "other", tmp_path / "third"
    for folder in (other, third):
        shutil.copytree(source, folder)
    file, ready = tmp_path / "fusecache.yaml", tmp_path / "ready"

    def write(*mounts: tuple[Path, Path, int], address: str) -> None:
        rows = [f"  - {{source: {folder}, mountpoint: {point}, workers: {count}}}" for folder, point, count in mounts]
        file.write_text("\n".join([f"metrics_address: {address}", "mounts:", *rows, ""]))

    def supervisor(point: Path) -> int:
        return parts(point, tmp_path)["supervisor"]

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        address, later = (f"127.0.0.1:{free.getsockname()[1]}" for free in (one, two))

    def health() -> int:
        return http_get(address, "/healthz")[0]

    write((source, points[0], 1), (other, points[1], 1), address=address)
    with Daemon(tmp_path, "serve", "--config", file, "--ready-file", ready) as daemon:
        pids = [supervisor(point) for point in points[:2]]
        with Load(points[0], source, sorted(os.listdir(source)), processes=1) as load:
            load.wait_for_calls(20)
            write((source, points[0], 2), (other, points[1], 1), (third, points[2], 1), address=address)
            os.kill(pids[1], signal.SIGHUP)  # a mount's process passes it on to the one that has the file
            daemon.says('"state": "yielded"')
            assert health() == 200, "a mount that is being replaced is not sick"
            daemon.says("mount_reloaded")
            until(lambda: ready.exists() and is_mounted(points[2]), "the new mount is ready", START_S)
            load.wait_for_calls(20)
            report = load.stop()
        assert report.errors == [], report.describe()
        assert report.wrong == [], report.describe()
        assert workers(points[0], tmp_path) == 2
        assert supervisor(points[0]) != pids[0]
        assert supervisor(points[1]) == pids[1]
        assert (points[2] / "f4096").read_bytes() == (source / "f4096").read_bytes()
        until(lambda: not runs(pids[0]), "the process that was replaced has ended", END_S)

        file.write_text("mounts: [{source: here}]\n")
        daemon.hang_up()
        daemon.says("mountpoint is missing")
        # Another source is no change of settings: the mount goes on. The one that is missing ends.
        write((other, points[0], 2), (third, points[2], 1), address=later)
        daemon.hang_up()
        daemon.says("mount_not_reloaded")
        until(lambda: not is_mounted(points[1]), "the mount that is not in the file any more has ended", END_S)
        assert "another source" in daemon.log()
        assert sorted(os.listdir(points[0])) == sorted(os.listdir(source))
        assert (points[0] / "f4096").read_bytes() == (source / "f4096").read_bytes()
        assert daemon.process.poll() is None
        assert ready.exists()
        assert http_get(later, "/readyz") == (200, "ok\n")
        with pytest.raises(urllib.error.URLError):
            health()
        daemon.end()
    assert not any(map(is_mounted, points))
