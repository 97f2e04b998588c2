"""Status over HTTP of one mount: a `metrics_address` that is taken is an error of the start, and of nothing later."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.support import log_noise
from tests.support.command import environment, error_line, fusecache
from tests.support.http_get import http_get
from tests.support.mounting import Mount, needs_fuse
from tests.support.supervised import until

pytestmark = needs_fuse

STATE = 4


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("mode", ["auto", "classic"])
def test_mount_metrics_address_that_is_taken_is_named(tmp_path: Path, source: Path, point: Path, mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--metrics-address", address, "--open-mode", mode, "--log-level", "error")
        line = error_line(fusecache("mount", source, point, *flags, state=tmp_path), STATE)
    assert f"metrics_address '{address}' can't be used: Address already in use; give another host:port" in line


@pytest.mark.long
def test_agent_that_comes_again_goes_on_without_an_address_that_is_taken(
    source: Path, point: Path, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    """Nothing but HTTP waits until whoever took it gives it back."""
    expected_logs("an? agent ended|the agent")
    expected_logs("status is not served over HTTP now")
    address = free_address()
    host, port = address.split(":")

    def status() -> dict[str, Any]:
        done = fusecache("status", point, "--json", state=tmp_path)
        shown: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return shown

    def agent() -> int | None:
        found = next((part for part in status().get("parts", ()) if part["name"] == "agent"), None)
        return int(found["pid"]) if found is not None and found["ready"] else None

    def is_ready() -> bool:
        try:
            return http_get(address, "/readyz") == (200, "ok\n")
        except urllib.error.URLError:
            return False

    def take() -> socket.socket | None:
        try:
            return socket.create_server((host, int(port)))
        except OSError:
            return None

    with Mount(str(source), point, "--metrics-address", address, environment=environment(tmp_path)) as mount:
        until(is_ready, "the first agent serves it")
        first = agent()
        if first is None:
            pytest.skip("one process alone serves in classic mode")
        assert mount.pid is not None
        os.kill(mount.pid, signal.SIGSTOP)  # until the address is taken nobody starts the next one
        try:
            os.kill(first, signal.SIGKILL)
            taken = until(take, "the agent has let it go")
        finally:
            os.kill(mount.pid, signal.SIGCONT)
        with taken:
            until(lambda: agent() not in (None, first), "the next agent answers", 60)
            assert (point / "photo.jpg").read_bytes() == b"bytes"
        until(is_ready, "the address is served again", 60)
