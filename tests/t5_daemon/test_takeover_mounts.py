"""Upgrades as people make them: `fusecache mount` and `fusecache serve` again, while others read. The whole daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.daemon.mountpoint import FUSE_DEVICE
from fusecache.kernel import probe
from tests.support.command import ROOT, environment, error_line, fusecache
from tests.support.http_get import http_get
from tests.support.mounting import command, is_mounted, needs_fuse
from tests.support.process_tree import descendants
from tests.support.random_files import random_files
from tests.support.reachable import STRANGER, needs_root
from tests.support.readers import Load
from tests.support.supervised import runs, until
from tests.support.upgrades import Upgrades

FEATURES = probe.probe()

pytestmark = [
    pytest.mark.long,
    needs_fuse,
    pytest.mark.skipif(not FEATURES.usable("mount"), reason=f"no mount(2) here: {FEATURES['mount'].why}"),
]

CONTENT = bytes(range(256)) * 1024
SIZES = (0, 1, 4096, 70_000, 300_000, 3_000_000)
START_S = 90


@pytest.fixture
def source() -> Iterator[Path]:
    with random_files(SIZES) as folder:
        yield folder


@pytest.mark.parametrize(("mode", "masked"), [("no-open", "-resend"), ("passthrough", "")])
def test_three_upgrades_under_readers_are_no_error_for_anybody(
    source: Path, tmp_path: Path, mode: str, masked: str
) -> None:
    """S42."""
    if not FEATURES.usable(mode if mode == "passthrough" else "no-open"):
        pytest.skip(FEATURES[mode].why)
    flags = ("--open-mode", mode, *((f"--kernel-features={masked}",) if masked else ()))
    with Upgrades(str(source), tmp_path, *flags) as mount:
        mount.start()
        names = sorted(os.listdir(source))
        with Load(mount.mountpoint, source, names, processes=4) as load:
            load.wait_for_calls(50)
            for _ in range(3):
                mount.start()
                load.wait_for_calls(50)
            report = load.stop()
        assert report.errors == [], report.describe()
        assert report.wrong == [], report.describe()
        mount.end()


def test_a_new_side_that_is_killed_costs_nothing_but_time(
    source: Path, tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """S42: the old one starts its agent and its embedded server again, at the address that its workers know."""
    expected_logs("the process that was taking over is gone", count=1)
    expected_logs("the mount was not taken over: this process goes on serving", count=1)
    # The killed one's embedded server may be there for a moment, and have the folder.
    expected_logs("master does not answer|the agent failed|embedded server ended", optional=True)
    with Upgrades(str(source), tmp_path) as mount:
        mount.start()
        before = set(descendants(mount.pids[0]))
        with subprocess.Popen(
            [*command(), "mount", str(source), str(mount.mountpoint)],
            env=environment(tmp_path), cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as new:  # fmt: skip
            until(lambda: '"state": "yielded"' in mount.log.read_text(), "the old side has ended its agent")
            new.kill()
        shown = mount.mountpoint / "f300000"  # which nobody has read; in a child, which can be given up
        read = subprocess.run(["cat", str(shown)], capture_output=True, check=True, timeout=START_S)
        assert read.stdout == (source / "f300000").read_bytes()
        until(lambda: fusecache("status", mount.mountpoint, state=tmp_path).returncode == 0, "status answers again")
        after = set(descendants(mount.pids[0]))
        assert before - after, "nothing had ended"
        assert any(b"embedded" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in after - before)
        mount.pids = [mount.pids[0], *after]
        mount.start()
        assert (mount.mountpoint / "f70000").read_bytes() == (source / "f70000").read_bytes()
        mount.end()


def test_another_source_is_refused_and_the_mount_goes_on(source: Path, tmp_path: Path) -> None:
    with Upgrades(str(source), tmp_path) as mount:
        mount.start()
        other = tmp_path / "other"
        other.mkdir()
        line = error_line(fusecache("mount", other, mount.mountpoint, state=tmp_path), 3)
        assert f"it serves '{source}', and another source ('{other}') is no upgrade" in line
        assert f"run `fusecache umount {mount.mountpoint}` first" in line
        line = error_line(
            fusecache("mount", "--runtime-dir", tmp_path / "run2", source, mount.mountpoint, state=tmp_path), 3
        )
        assert "was started with another --runtime-dir" in line
        line = error_line(fusecache("mount", "--open-mode", "classic", source, mount.mountpoint, state=tmp_path), 3)
        assert "has a fusecache mount already" in line
        assert sorted(os.listdir(mount.mountpoint)) == sorted(os.listdir(source))
        assert all(map(runs, mount.pids))
        mount.end()


def test_settings_of_the_connection_are_inherited_and_that_is_said(
    source: Path, tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    if not FEATURES.usable("passthrough"):
        pytest.skip(FEATURES["passthrough"].why)
    expected_logs("bound to the kernel's connection", count=1)  # more of a kind within 10 s are only counted
    with Upgrades(str(source), tmp_path, "--open-mode", "no-open") as mount:
        mount.start()
        mount.start("--open-mode", "passthrough", "--max-read-bytes", "128KiB")
        status = fusecache("status", mount.mountpoint, "--json", state=tmp_path).stdout
        assert '"open_mode": "no-open"' in status
        assert '"max_read_bytes": 1048576' in status
        assert (mount.mountpoint / "f70000").read_bytes() == (source / "f70000").read_bytes()
        mount.end()


@needs_root
@pytest.mark.usefixtures("python_for_all")
def test_an_upgrade_can_change_who_workers_and_agent_are(reachable: Path) -> None:
    """As a node that gets `run_as_user` by its next version, and goes back."""
    folder = reachable / "source"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    users = []
    with Upgrades(str(folder), reachable) as mount:
        for flags in ((), ("--run-as-user", str(STRANGER)), ()):
            mount.start(*flags)
            with (mount.mountpoint / "file").open("rb", buffering=0) as file:
                assert os.pread(file.fileno(), len(CONTENT) + 1, 0) == CONTENT
            workers = [pid for pid in mount.pids if Path(f"/proc/{pid}/comm").read_text().startswith("fc-worker")]
            users.append({Path(f"/proc/{pid}").stat().st_uid for pid in workers})
        mount.end()
    assert users == [{0}, {STRANGER}, {0}]


class Served:
    """A `fusecache serve` of two mounts."""

    def __init__(self, folder: Path, number: int, *flags: str) -> None:
        self.errors = folder / f"stderr{number}"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command(), "serve", "--config", str(folder / "fusecache.yaml"), *flags],
                env=environment(folder),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"all 2 mounts of"), self.errors.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(START_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        sys.stderr.write(self.errors.read_text())


def answer(address: str, path: str) -> tuple[int, str]:
    """An HTTP answer; (0, why) when nobody listens."""
    try:
        return http_get(address, path)
    except urllib.error.URLError as failure:
        return 0, str(failure.reason)


@pytest.mark.parametrize("stays", [False, True])
def test_a_serve_hands_all_its_mounts_and_its_address_over(source: Path, tmp_path: Path, stays: bool) -> None:
    """The old one ends with 0, or waits for its signal: then the next end is no end of the mounts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    points = [tmp_path / "mnt0", tmp_path / "mnt1"]
    sources = [source, tmp_path / "other"]
    shutil.copytree(source, sources[1])
    lines = [f"metrics_address: {address}", "mounts:"]
    lines += [f"  - {{source: {folder}, mountpoint: {point}}}" for folder, point in zip(sources, points, strict=True)]
    (tmp_path / "fusecache.yaml").write_text("\n".join(lines) + "\n")
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(contextlib.closing(Served(tmp_path, 0, *(["--stay"] if stays else []))))
        old.wait_ready()
        parts = descendants(old.process.pid)
        new = stack.enter_context(contextlib.closing(Served(tmp_path, 1)))
        new.wait_ready()
        until(lambda: not any(map(runs, parts)), "all mounts of the old one have ended")
        if stays:
            until(lambda: '"handed_over"' in old.errors.read_text() or "handed_over" in old.errors.read_text(), "told")
            assert old.process.poll() is None
            old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(START_S) == 0
        until(lambda: answer(address, "/readyz") == (200, "ok\n"), "the new one has the address, and serves")
        for point in points:
            assert (point / "f70000").read_bytes() == (source / "f70000").read_bytes()
        new.process.terminate()
        assert new.process.wait(START_S) == 0
        assert not any(map(is_mounted, points))


def test_old_and_new_are_in_namespaces_of_their_own(source: Path, tmp_path: Path) -> None:
    """As two pods: other mount and PID namespaces, with equal process ids; the mount point is shared among them."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    shared = tmp_path / "shared"
    point = shared / "mnt"
    point.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(shared), str(shared)], check=True)
    isolated = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "unchanged")
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", str(shared)], check=True)
        subprocess.run(["mount", "--make-shared", str(shared)], check=True)
        started = []
        for number in range(2):
            said = tmp_path / f"stderr{number}"
            with said.open("wb") as errors:
                process = subprocess.Popen(
                    [*isolated, *command(), "mount", str(source), str(point)],
                    env=environment(tmp_path),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            stack.callback(lambda said=said: sys.stderr.write(said.read_text()))
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert b"is mounted at" in process.stdout.readline(), said.read_text()
            started.append(process)
        old, new = started
        assert old.wait(START_S) == 0
        for name in ("f0", "f1", "f70000"):
            assert (point / name).read_bytes() == (source / name).read_bytes()
        (first,) = [
            pid for pid in descendants(new.pid) if Path(f"/proc/{pid}/stat").read_text().split()[3] == str(new.pid)
        ]
        os.kill(first, signal.SIGTERM)
        assert new.wait(START_S) == 0
        assert not is_mounted(point)


def test_dev_fuse_is_closed_by_whoever_has_handed_over(source: Path, tmp_path: Path) -> None:
    """One stray descriptor would keep a dead connection alive: only the supervisor and the gate have any."""
    with Upgrades(str(source), tmp_path) as mount:
        mount.start()
        mount.start()
        holders = set()
        for pid in mount.pids:
            for number in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(number) == str(FUSE_DEVICE):
                        holders.add(Path(f"/proc/{pid}/comm").read_text().strip())
        assert holders == {"fc-supervisor", "fc-gate"}
        mount.end()
