"""`fusecache wait` on a mount that takes for each look as long as it may: given up in time. Its other answers are
tested with real mounts, in `test_lifecycle` and `test_cli_errors`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusecache.cli import wait
from fusecache.daemon import control_client, mountpoint
from fusecache.errors import MountError


@pytest.mark.parametrize(("left_s", "looked_s"), [(300.0, wait.PROBE_S), (2.0, 2.0), (-1.0, wait.LEAST_PROBE_S)])
def test_a_look_takes_no_longer_than_what_is_left(
    left_s: float, looked_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def call(_socket: Path, _kind: str, within_s: float) -> dict[str, object]:
        looks.append(within_s)
        raise MountError("no answer")

    def probe(_point: Path, within_s: float) -> mountpoint.Health:
        looks.append(within_s)
        return "hung"

    monkeypatch.setattr(mountpoint, "find_mount", lambda _point: object())
    monkeypatch.setattr(mountpoint, "is_ours", lambda _mounted: True)
    monkeypatch.setattr(mountpoint, "probe", probe)
    monkeypatch.setattr(control_client, "find_socket", lambda _mounted, runtime_dir: runtime_dir / "socket")
    monkeypatch.setattr(control_client, "call", call)
    assert wait._why_not(tmp_path, tmp_path, left_s) == "it is hung"
    assert looks == [looked_s, looked_s]
