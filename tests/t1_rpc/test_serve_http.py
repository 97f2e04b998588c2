"""What `serve` answers for all of its mounts, and where. The mounts are what it was shown; nobody listens for them."""

from __future__ import annotations

import socket
import urllib.error
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fusecache.config.settings import MountPlan, Settings
from fusecache.daemon.mount_process import MountProcess
from fusecache.daemon.serve_http import Served, ServeHttp
from fusecache.errors import StateError
from fusecache.metrics import Metrics
from tests.support.http_get import http_get
from tests.support.log_noise import Declare


def taken() -> tuple[socket.socket, str]:
    """A port that somebody listens on, and its address."""
    other = socket.create_server(("127.0.0.1", 0))
    return other, f"127.0.0.1:{other.getsockname()[1]}"


def free() -> str:
    other, address = taken()
    other.close()
    return address


@pytest.fixture
def http() -> Iterator[ServeHttp]:
    own = Metrics(show_unused=False)
    own.gauge("fusecache_build_info", version="1").set(1)
    server = ServeHttp(free(), own, may_wait=False)
    server.listen()
    yield server
    server.stop()


def get(http: ServeHttp, path: str) -> tuple[int, str]:
    assert http.address is not None
    return http_get(http.address, path)


def served(folder: Path, *, is_ready: bool, is_being_replaced: bool = False, exit_code: int | None = None) -> Served:
    plan = MountPlan(
        cluster=None,
        folder=folder,
        path=b"/",
        mountpoint=folder / "mnt",
        settings=Settings(runtime_dir=folder, state_dir=folder),
    )
    process = cast(MountProcess, SimpleNamespace(plan=plan, exit_code=exit_code))
    return Served(process, is_ready=is_ready, is_being_replaced=is_being_replaced)


def test_not_ready_says_what_is_waited_for_and_unhealthy_who_does_not_answer(http: ServeHttp, tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    assert get(http, "/readyz") == (503, "not ready: starting\n")
    http.mounts = [served(tmp_path, is_ready=False)]
    assert get(http, "/readyz") == (503, f"not ready: {point}\n")
    assert get(http, "/healthz") == (200, "ok\n")
    http.mounts = [served(tmp_path, is_ready=True)]
    for path in ("/readyz", "/healthz"):
        status, text = get(http, path)
        assert status == 503
        assert text.startswith(f"mount {point}: the daemon at ")
    http.mounts = [served(tmp_path, is_ready=True, is_being_replaced=True)]
    assert get(http, "/readyz") == get(http, "/healthz") == (200, "ok\n")
    http.handed_over = [str(point)]
    assert get(http, "/readyz") == (503, f"handed over to another process: {point}\n")


def test_metrics_are_those_that_can_be_had(http: ServeHttp, tmp_path: Path, expected_logs: Declare) -> None:
    expected_logs("mount_metrics_missing", count=1)
    http.mounts = [served(tmp_path, is_ready=True), served(tmp_path, is_ready=True, exit_code=0)]
    status, text = get(http, "/metrics")
    assert status == 200
    assert 'fusecache_build_info{version="1"} 1.0' in text


def test_it_moves_to_another_address_and_to_none(http: ServeHttp) -> None:
    before, after = str(http.address), free()
    http.move(after)
    assert http_get(after, "/healthz") == (200, "ok\n")
    with pytest.raises(urllib.error.URLError):
        http_get(before, "/healthz")
    http.move(None)
    http.listen()
    with pytest.raises(urllib.error.URLError):
        http_get(after, "/healthz")
    http.move(before)
    assert http_get(before, "/healthz") == (200, "ok\n")


def test_an_address_that_can_not_be_had_changes_nothing(http: ServeHttp) -> None:
    before = http.address
    other, address = taken()
    with closing(other), pytest.raises(StateError, match=f"'{address}' can't be used: Address already in use"):
        http.move(address)
    assert http.address == before
    assert get(http, "/healthz") == (200, "ok\n")


def test_the_address_of_a_serve_that_hands_over_is_waited_for_and_nobody_elses() -> None:
    other, address = taken()
    with closing(other):
        with pytest.raises(StateError, match="Address already in use"):
            ServeHttp(address, Metrics(), may_wait=False).listen()
        waiting = ServeHttp(address, Metrics(), may_wait=True)
        waiting.listen()
        assert waiting.waits
    waiting.listen()
    assert not waiting.waits
    try:
        assert get(waiting, "/healthz") == (200, "ok\n")
    finally:
        waiting.stop()
