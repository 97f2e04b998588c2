"""What the kernel was really told about a mount, read back from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.daemon.mountpoint import find_mount
from tests.support.mounting import needs_fuse
from tests.t4_mount.live_mount import by_label, eventually, live_mount

pytestmark = needs_fuse

MIB = 1 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a mount's read-ahead")
def test_mount_read_ahead_is_in_force_and_makes_requests_large(tmp_path: Path) -> None:
    """Set before the kernel's INIT was answered it was lost: every request of a sequential read stayed at 128 KiB."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(MIB) * 64)
    with live_mount(source, tmp_path, "--read-ahead-bytes", "1MiB") as mount:
        info = find_mount(mount.root)
        assert info is not None
        setting = Path(f"/sys/class/bdi/{info.device}/read_ahead_kb")
        eventually(lambda: setting.read_text().strip() == "1024", "read-ahead of 1 MiB, set once reads work")
        with (mount.root / "big").open("rb", buffering=0) as file:
            while file.read(MIB):
                pass
        reads = by_label(mount.metrics(), "fusecache_requests_total", "op")["read"]
        assert reads <= 64 * 2, "64 MiB in requests of 1 MiB, and a few smaller ones where read-ahead starts"


def test_mount_options_are_read_only_without_suid_and_devices(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with live_mount(source, tmp_path) as mount:
        info = find_mount(mount.root)
        assert info is not None
        assert info.fs_type == "fuse.fusecache"
        assert {"ro", "nosuid", "nodev"} <= set(info.options.split(","))


def test_mount_close_costs_no_request(tmp_path: Path) -> None:
    """FLUSH is answered ENOSYS once; a file read again from the kernel's pages is OPEN and RELEASE, nothing else."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_bytes(b"content")
    with live_mount(source, tmp_path) as mount:
        for _ in range(3):
            assert (mount.root / "f").read_bytes() == b"content"
        before = by_label(mount.metrics(), "fusecache_requests_total", "op")
        for _ in range(100):
            assert (mount.root / "f").read_bytes() == b"content"
        after = by_label(mount.metrics(), "fusecache_requests_total", "op")
    changed = {op: after[op] - before.get(op, 0) for op in after if after[op] != before.get(op, 0)}
    assert changed.keys() <= {"open", "release"}, changed
    assert changed["open"] == 100
