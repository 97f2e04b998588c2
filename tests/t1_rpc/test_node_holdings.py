"""What `serve` makes of its mounts' answers, and of those that give none. The mounts are sockets of the test."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon.control_client import socket_path
from fusecache.daemon.mount_process import MountProcess
from fusecache.daemon.node_holdings import NodeHoldings
from fusecache.locality.holdings import MountState
from tests.support.embedded import wait_until
from tests.support.log_noise import Declare

ANSWER = {
    "ok": True,
    "ready": True,
    "reason": "",
    "cluster_id": "c",
    "measured_age_s": 0.1,
    "datasets": [
        {"name": "a", "whole": True, "total_bytes": 9, "listed_whole": True, "tiers": {"local_block_worker": 5}}
    ],
    "block_workers": [],
}


class FakeMount:
    """A mount's process and control socket, as far as `serve` sees them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.exit_code: int | None = None
        self.pid = 1
        self.plan = MountPlan(
            cluster=None,
            folder=folder,
            path=b"/",
            mountpoint=folder / name,
            settings=Settings(runtime_dir=folder, state_dir=folder),
        )
        self.answer: dict[str, Any] | bytes | None = ANSWER
        """None: it does not answer."""
        self._path = socket_path(folder, self.plan.mountpoint)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._held: list[socket.socket] = []

    @property
    def process(self) -> MountProcess:
        return cast(MountProcess, self)

    def listen(self) -> None:
        self._path.parent.mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread.start()

    def _serve(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.recv(1000)
            if self.answer is None:
                self._held.append(connection)  # closed at the end: silence, not an end
                continue
            with connection:
                told = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
                connection.sendall(told + b"\n")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._thread.join()
        for connection in self._held:
            connection.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FakeMount]:
    with closing(FakeMount(tmp_path, "a")) as fake:
        yield fake


class Told:
    """Holdings of one mount, and how often a change was announced."""

    def __init__(self, *mounts: FakeMount) -> None:
        self.changes = 0
        self.node = NodeHoldings(0.1, on_change=self._count)
        self.node.watch([mount.process for mount in mounts])

    def _count(self) -> None:
        self.changes += 1

    @property
    def state(self) -> MountState:
        return self.node.holdings().mounts[0]

    def close(self) -> None:
        self.node.close()


def test_mount_that_starts_answers_ends(mount: FakeMount) -> None:
    with closing(Told(mount)) as told:
        assert told.state == MountState(str(mount.plan.mountpoint), False, "it is starting")
        mount.listen()
        wait_until(lambda: told.state.ready)
        assert told.node.holdings().datasets["a"].ready
        assert told.node.holdings().datasets["a"].tiers == {"local_block_worker": 5}
        mount.answer = {**ANSWER, "datasets": []}
        wait_until(lambda: not told.node.holdings().datasets)
        mount.answer = ANSWER
        wait_until(lambda: bool(told.node.holdings().datasets))
        assert told.changes == 1
        told.node.ended(mount.process, "it was unmounted")
        assert told.state[1:] == (False, "it was unmounted")
        # Still known, and not to be read here.
        assert not told.node.holdings().datasets["a"].ready
        assert told.changes == 2
        mount.exit_code = 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "did not answer 'locality' within 1 s"),
        (b"no json", "which is not JSON"),
        ({"ok": True, "ready": True}, "answered 'locality' with something else"),
        ({"ok": False, "type": "UsageError", "error": "the kind 'locality' is not known"}, "is not known"),
        ({**ANSWER, "ready": False, "reason": "it does not serve reads yet"}, "does not serve reads yet"),
    ],
)
def test_mount_that_gives_no_answer_is_not_ready_until_it_gives_one(
    answer: dict[str, Any] | bytes | None, reason: str, mount: FakeMount, expected_logs: Declare
) -> None:
    expected_logs("mount_not_ready", count=1)
    mount.listen()
    with closing(Told(mount)) as told:
        wait_until(lambda: told.state.ready)
        mount.answer = answer
        wait_until(lambda: not told.state.ready)
        assert reason in told.state.reason
        assert not any(dataset.ready for dataset in told.node.holdings().datasets.values())
        mount.answer = ANSWER
        wait_until(lambda: told.state.ready)
        assert told.state.reason == ""
        assert told.changes == 3


def test_stuck_mount_does_not_hold_up_the_others(mount: FakeMount, tmp_path: Path) -> None:
    with closing(FakeMount(tmp_path, "b")) as other:
        mount.answer = None
        mount.listen()
        other.listen()
        with closing(Told(mount, other)) as told:
            wait_until(lambda: told.node.holdings().mounts[1].ready)
            assert not told.state.ready
            assert told.node.holdings().datasets["a"].ready
