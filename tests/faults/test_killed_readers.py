"""A process that is killed while it reads is gone, whatever it waits for: no pod stays Terminating because of us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mounting import needs_fuse
from tests.support.readers import Load
from tests.t4_mount.live_mount import EmbeddedProcess, eventually, live_mount
from tests.t4_mount.modes import MODES, unavailable

pytestmark = needs_fuse

READERS = 8
GONE_S = 5.0
"""Promised by S40."""


def test_readers_are_gone_5_s_after_they_were_killed_while_every_block_worker_hangs(tmp_path: Path) -> None:
    """S40, user report 40: direct, buffered and mapped reads, of which none can ever end."""
    if why := unavailable(MODES["no-open"]):
        pytest.skip(why)
    source = tmp_path / "source"
    source.mkdir()
    names = [f"f{number}" for number in range(READERS)]
    for name in names:
        (source / name).write_bytes(os.urandom(300_000))
    plan = tmp_path / "faults.yaml"
    plan.write_text("faults:\n  - {method: ReadBlock, stall: {}}\n")
    server = EmbeddedProcess(source, tmp_path / "server", "--faults", str(plan))
    with server, live_mount(server.url, tmp_path / "mount", "--open-mode", "no-open") as mount:
        ways = ("direct", "direct", "whole", "mapped")
        with Load(mount.root, source, names, processes=READERS, ways=ways) as load:
            eventually(lambda: mount.gate()["in_flight"] >= READERS, "every reader waits")
            assert load.calls() == [0] * READERS, "none of them has got anything"
            load.kill(within_s=GONE_S)
        assert mount.gate()["interrupted"] > 0, "no direct read was among them"
        assert sorted(os.listdir(mount.root)) == sorted(names), "the mount goes on"
