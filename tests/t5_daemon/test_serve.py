"""`fusecache serve`: several mounts of one file, one address, one end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment, fusecache
from tests.support.http_get import http_get
from tests.support.mounting import command, is_mounted, needs_fuse
from tests.support.process_tree import descendants, signal_all
from tests.support.supervised import until

pytestmark = needs_fuse

START_S = 90


class Serve:
    """A running `fusecache serve` with two mounts, ready."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points = [folder / "mnt0", folder / "mnt1"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        lines = [f"metrics_address: {self.address}", "mounts:"]
        for number, point in enumerate(self.points):
            source = folder / f"source{number}"
            source.mkdir()
            (source / "photo.jpg").write_bytes(b"bytes %d" % number)
            if number:
                point.mkdir()  # the other one is made by `serve`
            lines.append(f"  - {{source: {source}, mountpoint: {point}}}")
        (folder / "fusecache.yaml").write_text("\n".join(lines) + "\n")
        self.ready_file = folder / "ready"
        self.ready_file.touch()  # of a process before, which was killed
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command(), "serve", f"--ready-file={self.ready_file}", "--config", str(folder / "fusecache.yaml")],
                env=environment(folder),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"all 2 mounts of"), self.errors.read_text()

    def get(self, path: str) -> tuple[int, str]:
        return http_get(self.address, path)

    def child(self, number: int) -> int:
        """Process id of a mount."""
        done = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", str(self.points[number])], capture_output=True, check=True
        )
        return int(done.stdout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for point in self.points:
            if is_mounted(point):
                subprocess.run(["fusermount3", "-uz", str(point)], check=False)
        sys.stderr.write(self.errors.read_text())


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with contextlib.closing(Serve(tmp_path)) as running:
        yield running


def test_serve_all_mounts_read_and_one_address_tells_of_all(serve: Serve) -> None:
    for number, point in enumerate(serve.points):
        assert (point / "photo.jpg").read_bytes() == b"bytes %d" % number
    assert serve.get("/healthz") == (200, "ok\n")
    assert serve.get("/readyz") == (200, "ok\n")
    status, text = serve.get("/metrics")
    assert status == 200
    for point in serve.points:
        assert f'fusecache_requests_total{{mount="{point}",op="read"}} ' in text
    assert serve.ready_file.exists()
    # One is unmounted on purpose: the others go on, and readiness says so.
    assert fusecache("umount", serve.points[0], state=serve.folder).returncode == 0
    until(lambda: serve.get("/readyz") == (503, f"not ready: {serve.points[0]}\n"), "readiness says so")
    with contextlib.suppress(subprocess.TimeoutExpired):
        serve.process.wait(2)
    assert serve.process.poll() is None
    assert not serve.ready_file.exists()
    assert (serve.points[1] / "photo.jpg").exists()
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(60) == 0
    assert not any(is_mounted(point) for point in serve.points)
    # What root makes refuses everybody else while nothing is mounted on it: no empty folder passes for the data set.
    assert serve.points[0].stat().st_mode & 0o777 == (0 if os.geteuid() == 0 else 0o755)


def test_serve_mount_that_dies_is_named_and_the_others_are_stopped(serve: Serve) -> None:
    os.kill(serve.child(1), signal.SIGKILL)
    assert serve.process.wait(60) == 3
    line = serve.errors.read_text().splitlines()[-1]
    assert line == f"fusecache: mount '{serve.points[1]}' ended with SIGKILL; all others were stopped"
    assert not any(is_mounted(point) for point in serve.points)


@pytest.mark.long
def test_serve_stuck_mount_is_unhealthy_and_not_ready(serve: Serve) -> None:
    stuck = serve.child(0)
    signal_all(stuck, signal.SIGSTOP)
    try:
        answers = [serve.get(path) for path in ("/healthz", "/readyz")]
    finally:
        signal_all(stuck, signal.SIGCONT)
    for status, text in answers:
        assert status == 503
        assert f"mount {serve.points[0]}" in text
        assert "did not answer 'status'" in text
    assert serve.get("/healthz") == serve.get("/readyz") == (200, "ok\n")


@pytest.mark.long
def test_serve_signal_ends_a_stuck_mount_too(serve: Serve) -> None:
    """Kubernetes sends SIGTERM to what its probe found stuck, and kills everything if that did not help."""
    stuck = serve.child(0)
    members = descendants(stuck)
    signal_all(stuck, signal.SIGSTOP)
    serve.process.send_signal(signal.SIGTERM)
    try:
        assert serve.process.wait(60) == 0
    finally:
        for member in members:  # a stopped embedded server does not see that its mount has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGCONT)
    assert not any(is_mounted(point) for point in serve.points)
    assert not Path(f"/proc/{stuck}").exists()


def test_serve_ready_file_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "fusecache.yaml").write_text(f"mounts: [{{source: {tmp_path}, mountpoint: {tmp_path / 'mnt'}}}]\n")
    refused = fusecache(
        "serve", "--ready-file", tmp_path / "nowhere" / "ready", "--config", tmp_path / "fusecache.yaml", state=tmp_path
    )
    assert refused.returncode == 2
    assert (
        refused.stderr == f"fusecache: ready file '{tmp_path}/nowhere/ready' can't be made: No such file or directory\n"
    )


def test_serve_mount_that_can_not_start_ends_all(tmp_path: Path) -> None:
    for name in ("source", "mnt0", "mnt1"):
        (tmp_path / name).mkdir()
    file = tmp_path / "fusecache.yaml"
    file.write_text(
        "mounts:\n"
        f"  - {{source: {tmp_path}/source, mountpoint: {tmp_path}/mnt0}}\n"
        f"  - {{source: 'alluxio://127.0.0.1:1/x', mountpoint: {tmp_path}/mnt1, metadata_budget_s: 1}}\n"
    )
    done = fusecache("serve", "--config", file, "--log-level", "error", state=tmp_path)
    assert done.returncode == 6
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fusecache: ")
    assert "127.0.0.1:1" in last
    assert f"(mount {tmp_path}/mnt1)" in last
    assert not is_mounted(tmp_path / "mnt0")
