"""A TCP proxy that misbehaves on command: what stands between a client and a server when the network is the fault.

    with FaultyProxy("127.0.0.1:19998") as proxy:
        client(proxy.target) ...
        proxy.black_hole()      # connections are taken and bytes go nowhere; those that exist fall silent
        assert proxy.swallowed_bytes > 0
        proxy.heal()            # new connections work again; those that lost bytes are reset

Modes: `heal` (pass everything), `black_hole`, `reset` (RST to everybody, now and later), `down` (nobody listens:
connection refused), `delay` (every piece waits, with seeded jitter), `limit` (each connection is cut after so many
bytes from the server), `trickle` (so many bytes a second from the server). Every mode counts what it did. One thread,
no external program, seeded.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType

PIECE_BYTES = 64 << 10
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: close(2) sends RST instead of FIN."""


class _Link:
    """One connection: the client's socket and the server's."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.silent = False
        self.from_server = 0
        self.busy_until_s = 0.0
        """Trickling: when the last of what the server has sent so far will have gone on."""

    def peer(self, end: socket.socket) -> socket.socket:
        return self.server if end is self.client else self.client


class FaultyProxy:
    """One proxied server. Methods are called from the test's thread; the proxy's own thread moves the bytes."""

    def __init__(self, target: str, *, host: str = "127.0.0.1", seed: int = 0) -> None:
        self._server_host, _, port = target.rpartition(":")
        self._server_port = int(port)
        self._rng = random.Random(seed)
        self._host = host
        self._port = 0
        self._mode = "heal"
        self._delay_s = self._jitter_s = 0.0
        self._limit_bytes = 0
        self._trickle_bytes_per_s = 0
        self._links: set[_Link] = set()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._commands: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="faulty-proxy")
        self.connections = 0
        """Connections accepted so far, whatever became of them."""
        self.attempts_s: list[float] = []
        """time.monotonic() of each of them."""
        self.swallowed_bytes = 0
        self.resets = 0
        self.delayed_pieces = 0
        self.trickled_bytes = 0
        """Let through so far by `trickle`."""
        self.cut = 0
        """Connections cut by `limit`."""
        self.refusing_since_s: float | None = None

    @property
    def target(self) -> str:
        """host:port to connect to; the same for the proxy's whole life."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> FaultyProxy:
        self._listen()
        self._wake_receive.setblocking(False)
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._finish)
        self._thread.join()
        self._selector.close()
        self._wake_receive.close()
        self._wake_send.close()

    # ---- commands ----

    def heal(self) -> None:
        """Pass everything. A connection that fell silent has lost bytes, one that trickles has some to come: it is
        reset, as a router that has forgotten it would do."""

        def pass_all() -> None:
            self._set("heal")
            for link in [link for link in self._links if link.silent or link.busy_until_s]:
                self._reset(link)

        self._do(pass_all)

    def lead_to(self, target: str) -> None:
        """New connections go to another server (or to the same one, restarted on another port)."""

        def turn() -> None:
            self._server_host, _, port = target.rpartition(":")
            self._server_port = int(port)

        self._do(turn)

    def black_hole(self) -> None:
        """From now on bytes go nowhere, on old and new connections."""

        def silence() -> None:
            self._set("black_hole")
            for link in self._links:
                link.silent = True

        self._do(silence)

    def reset(self) -> None:
        """RST on every connection, and on every new one."""

        def break_all() -> None:
            self._set("reset")
            for link in list(self._links):
                self._reset(link)

        self._do(break_all)

    def down(self) -> None:
        """Nobody listens, and existing connections end: a server whose process has died."""

        def go_down() -> None:
            self._set("down")
            for link in list(self._links):
                self._close(link)
            if self._listener is not None:
                self._selector.unregister(self._listener)
                self._listener.close()
                self._listener = None

        self._do(go_down)

    def delay(self, seconds: float, jitter_s: float = 0.0) -> None:
        """Every piece, either way, arrives so much later."""

        def slow() -> None:
            self._set("delay")
            self._delay_s, self._jitter_s = seconds, jitter_s

        self._do(slow)

    def limit(self, size_bytes: int) -> None:
        """Each connection ends after so many bytes from the server, counted from now."""

        def bound() -> None:
            self._set("limit")
            self._limit_bytes = size_bytes
            for link in self._links:
                link.from_server = 0

        self._do(bound)

    def trickle(self, bytes_per_s: int) -> None:
        """What servers send goes on at this rate, a tenth of a second's bytes at a time, each connection for itself."""

        def slow() -> None:
            self._set("trickle")
            self._trickle_bytes_per_s = bytes_per_s

        self._do(slow)

    # ---- the proxy's thread ----

    def _do(self, command: Callable[[], None]) -> None:
        """Run in the proxy's thread and wait until it has."""
        done = threading.Event()

        def step() -> None:
            command()
            done.set()

        with self._lock:
            self._commands.append(step)
        self._wake_send.send(b"x")
        assert done.wait(10), "the proxy's thread does not answer"

    def _set(self, mode: str) -> None:
        self._mode = mode
        self.refusing_since_s = time.monotonic() if mode == "down" else None
        if mode != "down" and self._listener is None:
            self._listen()

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self._port))
        listener.listen(128)
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._closing:
            wait_s = max(0.0, self._later[0][0] - time.monotonic()) if self._later else None
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._wake_receive:
                    self._wake_receive.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Link) and key.data in self._links:
                    assert isinstance(key.fileobj, socket.socket)
                    self._move(key.data, key.fileobj)
            with self._lock:
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()

    def _accept(self) -> None:
        assert self._listener is not None
        client, _ = self._listener.accept()
        self.connections += 1
        self.attempts_s.append(time.monotonic())
        if self._mode == "reset":
            self.resets += 1
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            return
        try:
            server = socket.create_connection((self._server_host, self._server_port), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(5)  # a peer that reads nothing for 5 s ends its connection
        client.settimeout(5)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server)
        link.silent = self._mode == "black_hole"
        self._links.add(link)
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ, link)

    def _move(self, link: _Link, source: socket.socket) -> None:
        try:
            piece = source.recv(PIECE_BYTES)
        except OSError:
            self._close(link)
            return
        if link.silent:
            self.swallowed_bytes += len(piece)
            if not piece:  # its end is not told to the other side either
                self._selector.unregister(source)
            return
        if not piece:
            self._close(link)
            return
        if self._mode == "limit" and source is link.server:
            piece = piece[: max(0, self._limit_bytes - link.from_server)]
            link.from_server += len(piece)
        if self._mode == "delay":
            self.delayed_pieces += 1
            at = time.monotonic() + self._delay_s + self._jitter_s * self._rng.random()
            heapq.heappush(self._later, (at, next(self._order), lambda: self._send(link, source, piece)))
            return
        if self._mode == "trickle" and source is link.server:
            self._trickle(link, piece)
            return
        self._send(link, source, piece)
        if self._mode == "limit" and link.from_server >= self._limit_bytes and link in self._links:
            self.cut += 1
            self._close(link)

    def _trickle(self, link: _Link, piece: bytes) -> None:
        step = max(1, self._trickle_bytes_per_s // 10)
        link.busy_until_s = max(link.busy_until_s, time.monotonic())
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            link.busy_until_s += len(part) / self._trickle_bytes_per_s

            def pass_on(part: bytes = part) -> None:
                if link in self._links:
                    self.trickled_bytes += len(part)
                    self._send(link, link.server, part)

            heapq.heappush(self._later, (link.busy_until_s, next(self._order), pass_on))

    def _send(self, link: _Link, source: socket.socket, piece: bytes) -> None:
        if link in self._links:
            try:
                link.peer(source).sendall(piece)
            except OSError:
                self._close(link)

    def _reset(self, link: _Link) -> None:
        self.resets += 1
        with contextlib.suppress(OSError):
            link.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close(link)

    def _close(self, link: _Link) -> None:
        self._links.discard(link)
        for end in (link.client, link.server):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            end.close()

    def _finish(self) -> None:
        for link in list(self._links):
            self._close(link)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._selector.unregister(self._wake_receive)
        self._closing = True
