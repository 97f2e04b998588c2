"""`fusecache serve` with a controller: the reported bytes are those in the block folder; who serves them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.daemon.control_client import call, socket_path
from tests.support.command import ROOT, environment
from tests.support.embedded import wait_until
from tests.support.http_get import http_get
from tests.support.log_noise import Declare
from tests.support.mounting import Mount, command, is_mounted, needs_fuse
from tests.support.process_tree import signal_all
from tests.support.scripted_controller import ScriptedController

pytestmark = needs_fuse

MIB = 1 << 20


class Node:
    """An embedded cluster, `fusecache serve` over it with one mount of everything, and a controller."""

    def __init__(self, folder: Path, controller: ScriptedController) -> None:
        self.folder = folder
        self.mountpoint = folder / "mnt"
        source = folder / "source"
        (source / "train" / "deep").mkdir(parents=True)
        (source / "other").mkdir()
        self.lengths = {"train/one": 3 * MIB + 7, "train/deep/two": 100, "other/three": 5000}
        for name, length in self.lengths.items():
            (source / name).write_bytes(os.urandom(length))
        self.cluster = subprocess.Popen(
            [*command(), "embedded", str(source), "--port", "0", "--block-size-bytes", "1MiB", "--json"],
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.cluster.stdout is not None
        told = json.loads(self.cluster.stdout.readline())
        self.block_folder = Path(told["tier_folders"][0]) / "alluxioworker"
        self._cluster = f"{{name: c, masters: ['{told['master']}'], tier_folders: ['{told['tier_folders'][0]}']}}"
        self._config = folder / "node.yaml"
        self.configure(controller)
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command(), "serve", "--config", str(self._config)],
                env=environment(folder),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"all 1 mounts of"), self.errors.read_text()

    def configure(self, controller: ScriptedController) -> None:
        """Write the file; for `serve` to read it again, SIGHUP."""
        self._config.write_text(
            f"clusters: [{self._cluster}]\n"
            f"mounts: [{{source: 'c:/', mountpoint: {self.mountpoint}}}]\n"
            "datasets: [{name: train, path: 'c:/train'}, {name: other, path: 'c:/other'}]\n"
            f"controller: {{address: '{controller.address}', report_interval_s: 0.4, node_name: node-1}}\n"
            "metrics_address: 127.0.0.1:0\n"
        )

    def held_bytes(self) -> int:
        """Bytes of all block files."""
        return sum(entry.stat().st_size for entry in os.scandir(self.block_folder) if entry.name.isdigit())

    def logged(self, event: str) -> dict[str, object]:
        """The first log line of an event."""
        lines = [json.loads(line) for line in self.errors.read_text().splitlines() if line.startswith("{")]
        return next(line for line in lines if line["event"] == event)

    def metrics(self) -> str:
        """What `serve` answers to a scrape."""
        return http_get(str(self.logged("status_http_listening")["address"]), "/metrics")[1]

    def child(self) -> int:
        """Process id of the mount."""
        done = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, check=True)
        return int(done.stdout)

    def close(self) -> None:
        for process in (self.process, self.cluster):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if is_mounted(self.mountpoint):
            subprocess.run(["fusermount3", "-uz", str(self.mountpoint)], check=False)
        sys.stderr.write(self.errors.read_text())


@pytest.fixture
def controller() -> Iterator[ScriptedController]:
    with ScriptedController() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path, controller: ScriptedController) -> Iterator[Node]:
    with contextlib.closing(Node(tmp_path, controller)) as running:
        yield running


def test_reported_bytes_are_those_in_the_block_folder_and_follow_it(
    node: Node, controller: ScriptedController, expected_logs: Declare
) -> None:
    expected_logs("controller_stream_failed", count=1)
    train_bytes = node.lengths["train/one"] + node.lengths["train/deep/two"]
    stream = controller.stream()

    def listed() -> bool:
        train = stream.known().get("train")
        return train is not None and train.listed_whole and train.ready and not stream.not_ready()

    controller.wait(listed, "every folder listed, though nobody read")
    assert (stream.known()["train"].total_bytes, stream.known()["other"].total_bytes) == (train_bytes, 5000)
    assert stream.local_bytes("train") == node.held_bytes() == 0
    (room,) = stream.reports[-1].capacities
    assert 0 < room.free_bytes <= room.capacity_bytes

    for name in ("train/one", "train/deep/two"):
        (node.mountpoint / name).read_bytes()
    controller.wait(lambda: stream.local_bytes("train") == train_bytes, "bytes that were read")
    assert node.held_bytes() == train_bytes
    assert stream.local_bytes("other") == 0

    # Evicted behind everybody's back: the next measurement shows it.
    last = max(node.block_folder.glob("[0-9]*"), key=lambda path: path.stat().st_size)
    last.unlink()
    controller.wait(lambda: stream.local_bytes("train") == train_bytes - MIB, "one block less")
    assert node.held_bytes() == train_bytes - MIB

    told = call(socket_path(node.folder / "run", node.mountpoint), "locality", 10)
    assert (told["source"], told["ready"]) == ("block_files", True)
    by_name = {dataset["name"]: dataset for dataset in told["datasets"]}
    assert by_name["train"]["tiers"] == {"local_block_worker": train_bytes - MIB}
    metrics = node.metrics()
    assert f'fusecache_locality_stream_up{{controller="{controller.address}"}} 1.0' in metrics
    assert 'fusecache_locality_reports_total{kind="full"} 1.0' in metrics
    gauge = f'fusecache_locality_dataset_bytes{{dataset="train",mount="{node.mountpoint}",what="local"}} '
    (held,) = (line for line in metrics.splitlines() if line.startswith(gauge))
    assert float(held.removeprefix(gauge)) == train_bytes - MIB
    assert "fusecache_mount_ready 0.0" not in metrics  # `serve` itself is no mount

    # Without a controller the node works alone; when it is back, it is told everything.
    controller.stop()
    controller.wait(lambda: stream.ended, "the end of the stream")
    assert (node.mountpoint / "other" / "three").read_bytes() == (node.folder / "source/other/three").read_bytes()
    controller.start()
    stream = controller.stream(1)
    controller.wait(lambda: stream.local_bytes("other") == 5000, "what was read meanwhile")
    assert stream.local_bytes("train") == train_bytes - MIB

    # Ended by a signal: the last word is that nothing is served here any longer.
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(60) == 0
    assert stream.not_ready() == {str(node.mountpoint): "the node's daemon ends (SIGTERM)"}
    assert not any(dataset.ready for dataset in stream.known().values())
    assert len(controller.streams) == 2


def test_stuck_and_killed_mount_is_reported_not_ready_with_the_reason(
    node: Node, controller: ScriptedController, expected_logs: Declare
) -> None:
    """S26: stuck = it does not answer in time; dead = at once, before `serve` itself ends."""
    expected_logs(r"did not answer.*mount_not_ready", count=1)
    expected_logs(r"mount_not_ready", optional=True)  # asked in the moment in which it is killed
    stream = controller.stream()
    where = str(node.mountpoint)
    controller.wait(lambda: not stream.not_ready() and stream.known()["train"].ready, "a ready mount")
    child = node.child()
    signal_all(child, signal.SIGSTOP)
    controller.wait(stream.not_ready, "a mount that is not ready")
    assert "did not answer 'locality' within 1 s" in stream.not_ready()[where]
    assert not any(dataset.ready for dataset in stream.known().values())
    signal_all(child, signal.SIGCONT)
    controller.wait(lambda: not stream.not_ready() and stream.known()["train"].ready, "the mount is back")
    assert node.process.poll() is None
    os.kill(child, signal.SIGKILL)
    assert node.process.wait(60) == 3
    assert stream.not_ready() == {where: "its process ended with SIGKILL"}
    assert not any(dataset.ready for dataset in stream.known().values())


def test_a_reload_reports_to_another_controller_and_the_mount_stays_alone(
    node: Node, controller: ScriptedController
) -> None:
    """S43."""
    before = controller.stream()
    controller.wait(lambda: not before.not_ready(), "a ready mount")
    child = node.child()
    with ScriptedController() as other:
        node.configure(other)
        node.process.send_signal(signal.SIGHUP)
        after = other.stream()
        other.wait(lambda: not after.not_ready() and after.known()["train"].ready, "a ready mount")
        assert before.not_ready() == {
            str(node.mountpoint): "the node's daemon has another configuration of the controller"
        }
        up = 'fusecache_locality_stream_up{controller="%s"} %s'
        other.wait(lambda: up % (other.address, 1.0) in node.metrics(), "it counts as reporting")
        assert up % (controller.address, 0.0) in node.metrics()
        assert node.child() == child
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(60) == 0
        assert after.not_ready() == {str(node.mountpoint): "the node's daemon ends (SIGTERM)"}
    assert len(controller.streams) == 1


def test_mount_that_is_detached_under_an_open_file_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"bytes")
    mount = Mount(str(tmp_path / "source"), tmp_path / "mnt", environment=environment(tmp_path))
    control = socket_path(tmp_path / "run", mount.mountpoint)
    try:
        mount.start()
        with (mount.mountpoint / "file").open("rb") as file:
            wait_until(lambda: bool(call(control, "locality", 10)["ready"]))
            subprocess.run(["fusermount3", "-uz", str(mount.mountpoint)], check=True)
            told = call(control, "locality", 10)
            assert (told["ready"], told["reason"]) == (False, "it is no longer what is mounted there")
            assert file.read() == b"bytes"
        assert mount.process is not None
        assert mount.process.wait(30) == 0
    finally:
        mount.cleanup()
