"""What the kernel was really told about a mount, read back from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.daemon.mountpoint import find_mount
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board, started
from tests.t4_mount.live_mount import by_label, eventually

pytestmark = needs_fuse
shared_mounts = started("folder")

MIB = 1 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a mount's read-ahead")
def test_mount_read_ahead_is_in_force_and_makes_requests_large(board: Board) -> None:
    """Set before the kernel's INIT was answered it was lost: every request of a sequential read stayed at 128 KiB."""
    place = board.place("folder", "read_ahead")
    (place.source / "big").write_bytes(os.urandom(MIB) * 64)
    info = find_mount(place.mount.root)
    assert info is not None
    setting = Path(f"/sys/class/bdi/{info.device}/read_ahead_kb")
    eventually(lambda: setting.read_text().strip() == "1024", "read-ahead of 1 MiB, set once reads work")
    before = place.mount.reads()
    # Not local yet, so that in no mode the kernel reads it by itself.
    with (place.shown / "big").open("rb", buffering=0) as file:
        while file.read(MIB):
            pass
    read = place.mount.reads() - before
    assert 64 <= read <= 64 * 2, "requests of 1 MiB, and a few smaller ones where read-ahead starts"


def test_mount_options_are_read_only_without_suid_and_devices(board: Board) -> None:
    info = find_mount(board.shared("folder").root)
    assert info is not None
    assert info.fs_type == "fuse.fusecache"
    assert {"ro", "nosuid", "nodev"} <= set(info.options.split(","))


def test_mount_close_costs_no_request(board: Board) -> None:
    """FLUSH is answered ENOSYS once. A file read again from the kernel's pages is OPEN and RELEASE in classic mode, and
    nothing for the daemon in the others: never sent, or answered by the gate."""
    place = board.place("folder", "close")
    (place.source / "f").write_bytes(b"content")
    place.warm("f")
    for _ in range(3):
        assert (place.shown / "f").read_bytes() == b"content"
    before = by_label(place.mount.metrics(), "fusecache_requests_total", "op")
    for _ in range(100):
        assert (place.shown / "f").read_bytes() == b"content"
    after = by_label(place.mount.metrics(), "fusecache_requests_total", "op")
    changed = {op: after[op] - before.get(op, 0) for op in after if after[op] != before.get(op, 0)}
    if board.mode.opens_reach_the_daemon:
        assert changed == {"open": 100, "release": pytest.approx(100, abs=2)}
    else:
        assert changed == {}
