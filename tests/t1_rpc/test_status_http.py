"""/metrics, /healthz, /readyz over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

import pytest

from fusecache import status_http
from fusecache.errors import StateError
from fusecache.status_http import StatusServer
from tests.support import log_noise
from tests.support.http_get import http_get
from tests.support.limits import no_more_descriptors


class State:
    """What the three callables say."""

    def __init__(self) -> None:
        self.healthy: str | None = None
        self.ready: str | None = "starting"


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[StatusServer]:
    with StatusServer(
        "127.0.0.1:0", exposition=lambda: "x_total 1\n", health=lambda: state.healthy, ready=lambda: state.ready
    ) as running:
        yield running


def get(server: StatusServer, path: str) -> tuple[int, str]:
    return http_get(server.address, path)


def connect(server: StatusServer) -> socket.socket:
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 10)


def ended(connection: socket.socket) -> bool:
    """Closed by the other side without an answer; with a reset when it had not read everything."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_metrics_are_the_exposition(server: StatusServer) -> None:
    with urllib.request.urlopen(f"http://{server.address}/metrics?x=1", timeout=10) as answer:
        assert answer.read() == b"x_total 1\n"
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_verdicts_are_200_or_503_with_the_reason(server: StatusServer, state: State) -> None:
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/readyz") == (503, "starting\n")
    state.ready, state.healthy = None, "the loop is stuck"
    assert get(server, "/healthz") == (503, "the loop is stuck\n")
    assert get(server, "/readyz") == (200, "ok\n")


def test_unknown_path_is_404(server: StatusServer) -> None:
    assert get(server, "/etc/passwd")[0] == 404


def test_head_has_no_body(server: StatusServer) -> None:
    request = urllib.request.Request(f"http://{server.address}/metrics", method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Length"] == "10"
        assert answer.read() == b""


def test_method_that_changes_things_is_refused(server: StatusServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{server.address}/metrics", data=b"x", timeout=10)
    with caught.value as answer:
        assert answer.code == 501


def test_failing_callable_is_500_and_the_next_request_is_served(expected_logs: log_noise.Declare) -> None:
    expected_logs("status_http_answer_failed", count=1)
    answers = iter([ZeroDivisionError("broken"), "fine 1\n"])

    def exposition() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with StatusServer("127.0.0.1:0", exposition=exposition, health=lambda: None, ready=lambda: None) as server:
        assert get(server, "/metrics")[0] == 500
        assert get(server, "/metrics") == (200, "fine 1\n")


def test_more_connections_than_allowed_are_closed_and_the_first_go_on(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "MAX_CONNECTIONS", 2)
    first, second, third = connect(server), connect(server), connect(server)
    with first, second, third:
        assert ended(third)
        first.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert first.recv(100).startswith(b"HTTP/1.0 200")


def test_connection_that_sends_nothing_is_cut_off(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_http, "CONNECTION_S", 0.1)
    with connect(server) as silent:
        silent.sendall(b"GET /heal")
        assert ended(silent)
    assert get(server, "/healthz") == (200, "ok\n")


def test_f17_no_descriptor_left_is_no_endless_loop_and_who_came_is_answered(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "ACCEPT_PAUSE_S", 0.2)
    tried_at_s: list[float] = []
    twice = threading.Event()
    accept = HTTPServer.get_request

    def get_request(self: HTTPServer) -> Any:
        tried_at_s.append(time.monotonic())
        if len(tried_at_s) >= 2:
            twice.set()
        return accept(self)

    monkeypatch.setattr(HTTPServer, "get_request", get_request)
    host, port = server.address.rsplit(":", 1)
    with socket.socket() as waiting:
        waiting.settimeout(10)
        with no_more_descriptors(os.getpid()):
            waiting.connect((host, int(port)))
            assert twice.wait(10)
        assert tried_at_s[1] - tried_at_s[0] >= 0.2
        waiting.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert waiting.recv(100).startswith(b"HTTP/1.0 200")


def test_f17_no_thread_left_costs_connections_and_not_their_places(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(status_http.MAX_CONNECTIONS + 1):
            with connect(server) as refused:
                assert ended(refused)
    assert get(server, "/healthz") == (200, "ok\n")


def test_stop_ends_open_connections_and_frees_the_port(state: State) -> None:
    server = StatusServer("127.0.0.1:0", exposition=str, health=lambda: None, ready=lambda: None)
    server.start()
    address = server.address
    with connect(server) as waiting:
        waiting.sendall(b"GET ")
        server.stop()
        assert ended(waiting)
    server.stop()  # a second time is nothing
    with StatusServer(address, exposition=str, health=lambda: None, ready=lambda: None) as again:
        assert again.address == address


def test_taken_port_is_named(server: StatusServer) -> None:
    other = StatusServer(server.address, exposition=str, health=lambda: None, ready=lambda: None)
    with pytest.raises(StateError, match=f"metrics_address '{server.address}'.*in use"):
        other.start()


def test_address_before_start_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        _ = StatusServer("127.0.0.1:0", exposition=str, health=lambda: None, ready=lambda: None).address
