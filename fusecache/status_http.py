"""/metrics, /healthz and /readyz over HTTP, from a thread of its own.

A standard-library server in daemon threads, so that it answers while the event loop is stuck: exactly then
somebody asks. What it says comes from three callables; it knows neither mounts nor metrics. A request is answered
and its connection closed; connections and their time are bounded, since every pod of a node may reach the port.

    /metrics   200 Prometheus text
    /healthz   200 `ok`, or 503 and why: restart the process
    /readyz    200 `ok`, or 503 and why: wait, reads don't work yet
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any

import structlog

from fusecache.config.source import parse_host_port
from fusecache.errors import StateError

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 16
"""Connections served at a time; more are closed at once. A scraper needs one."""

CONNECTION_S = 10.0
"""Seconds a connection may last, however slowly its bytes come."""

STOP_S = 5.0
"""Seconds `stop` waits for the accepting thread."""

ACCEPT_PAUSE_S = 0.5
"""After accept(2) failed (no descriptors left): seconds before the next try, which the connection waits for."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Verdict = Callable[[], str | None]
"""None = fine; a text = why not."""


class StatusServer:
    """The server; a context manager. Bound by `start`, so that a taken port is an error of the start."""

    def __init__(self, address: str, *, exposition: Callable[[], str], health: Verdict, ready: Verdict) -> None:
        self._address = address
        self._exposition = exposition
        self._health = health
        self._ready = ready
        self._server: _BoundedServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """host:port it listens on; the real port when 0 was asked for. RuntimeError before `start`."""
        if self._server is None:
            raise RuntimeError("not started")
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Bind and serve. StateError names the address when it can't be bound."""
        try:
            host, port = parse_host_port(self._address, default_port=None, lowest_port=0)
            self._server = _BoundedServer((host, port), self._answer)
        except (OSError, ValueError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
            raise StateError(
                f"metrics_address {self._address!r} can't be used: {reason}; give another host:port, or none"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop accepting, close what is open. May be called twice."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server.close_connections()
        self._thread.join(STOP_S)
        self._server = self._thread = None

    def __enter__(self) -> StatusServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        """(status, content type, text) of a path."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, METRICS_TYPE, self._exposition()
            case "/healthz":
                reason = self._health()
            case "/readyz":
                reason = self._ready()
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", "try /metrics, /healthz or /readyz\n"
        if reason is None:
            return HTTPStatus.OK, "text/plain", "ok\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", reason + "\n"


class _BoundedServer(socketserver.ThreadingMixIn, HTTPServer):
    """A thread per connection, at most MAX_CONNECTIONS, each cut off after CONNECTION_S."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], answer: Callable[[str], tuple[HTTPStatus, str, str]]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.answer = answer
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's name up in the DNS, which may take seconds and is used for nothing here.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # serve_forever tries again at once, for as long as the connection waits: a processor for nothing.
            time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            admitted = len(self._open) < MAX_CONNECTIONS
            if admitted:
                self._open.add(request)
        if admitted:
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread to be had; whoever calls closes the connection
                self._forget(request)
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A receive timeout alone would let one byte every few seconds hold a connection for ever.
        cut_off = threading.Timer(CONNECTION_S, _shut, (request,))
        cut_off.daemon = True
        try:
            cut_off.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # no thread to be had for the timer
            self.shutdown_request(request)
        finally:
            cut_off.cancel()
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.discard(request)

    def close_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("status_http_connection_failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _BoundedServer
    timeout = CONNECTION_S
    server_version = "fusecache"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            status, content_type, text = self.server.answer(self.path)
        except Exception:
            log.exception("status_http_answer_failed", path=self.path)
            status, content_type, text = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", "see the log\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: a scrape every few seconds is no event."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have closed it first
        connection.shutdown(socket.SHUT_RDWR)
