"""Mountinfo and paths, from a table of mounts that is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.daemon import mountpoint
from fusecache.daemon.mountpoint import MountInfo
from fusecache.errors import MountError

MOUNTINFO = rb"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/with\040space rw,nosuid - fuse.fusecache alluxio://m1:19998/a rw,user_id=1000,group_id=1000
31 22 0:41 / /mnt/twice ro shared:7 - tmpfs tmpfs rw
32 31 0:42 / /mnt/twice ro master:1 propagate_from:2 - fuse.fusecache /data rw,user_id=0
33 22 0:43 / /mnt/other ro - fuse.sshfs host:/x rw,user_id=0
34 22 0:44 / /mnt/caf\351 ro - fuse.fusecache /b\134c rw,user_id=0
35 22 0:45 / /mnt/a@return ro - fuse.fusecache /d rw,user_id=0
not a line
""".replace(b"@", b"\r")


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> list[MountInfo]:
    real = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: MOUNTINFO if str(self) == "/proc/self/mountinfo" else real(self)
    )
    return mountpoint.all_mounts()


def test_all_mounts_reads_every_field(mounts: list[MountInfo]) -> None:
    assert mounts[1] == MountInfo(
        30, "0:40", "fuse.fusecache", "alluxio://m1:19998/a", b"/mnt/with space",
        "rw,nosuid,rw,user_id=1000,group_id=1000",
    )  # fmt: skip
    assert mounts[5].mountpoint == b"/mnt/caf\xe9"
    assert mounts[5].source == "/b\\c"
    assert mounts[6].mountpoint == b"/mnt/a\rreturn"
    assert len(mounts) == 7


def test_owner_is_the_user_who_mounted(mounts: list[MountInfo]) -> None:
    assert [mount.owner for mount in mounts] == [None, 1000, None, 0, 0, 0, 0]


def test_find_mount_several_on_one_point_is_the_topmost(mounts: list[MountInfo]) -> None:
    found = mountpoint.find_mount(Path("/mnt/twice"))
    assert found == mounts[3]
    assert mountpoint.is_ours(mounts[3])
    assert not mountpoint.is_ours(mounts[4])


def test_find_mount_below_a_mount_is_none(mounts: list[MountInfo]) -> None:
    assert mountpoint.find_mount(Path("/mnt/twice/folder")) is None


def test_our_mounts_are_the_visible_ones(mounts: list[MountInfo]) -> None:
    assert [mount.mount_id for mount in mountpoint.our_mounts()] == [30, 32, 34, 35]


@pytest.mark.parametrize(
    ("path", "mount_id", "rest"),
    [
        ("/mnt/twice/a/b", 32, b"a/b"),
        ("/mnt/twice", 32, b""),
        ("/mnt/twice/./a//b/../c", 32, b"a/c"),
        ("/mnt/twicemore", 22, b"mnt/twicemore"),
        ("/mnt/with space/x", 30, b"x"),
    ],
)
def test_containing_mount_is_the_deepest(mounts: list[MountInfo], path: str, mount_id: int, rest: bytes) -> None:
    found = mountpoint.containing_mount(Path(path))
    assert found is not None
    assert (found[0].mount_id, found[1]) == (mount_id, rest)


def test_resolve_follows_links_before_a_mount_and_not_in_it(
    mounts: list[MountInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").symlink_to("/mnt/twice/inside")
    (tmp_path / "again").symlink_to("data")
    looked_at: list[bytes] = []
    real = os.readlink

    def readlink(path: bytes) -> bytes:
        looked_at.append(path)
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert mountpoint.resolve(tmp_path / "again" / "x") == b"/mnt/twice/inside/x"
    assert looked_at
    assert not [path for path in looked_at if path.startswith(b"/mnt/twice")]


def test_resolve_missing_components_are_kept(tmp_path: Path) -> None:
    assert mountpoint.resolve(tmp_path / "no" / "where") == os.fsencode(tmp_path.resolve() / "no" / "where")


def test_resolve_relative_path_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mountpoint.resolve(Path("x/../y")) == os.fsencode(tmp_path.resolve() / "y")


def test_resolve_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(MountError, match="symbolic links"):
        mountpoint.resolve(tmp_path / "a")


def test_a_process_that_stays_at_the_mount_point_keeps_nobody_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, for example."""
    monkeypatch.setattr(mountpoint, "CLAIM_S", 0.05)
    claimed = mountpoint.claim(tmp_path / "lock")
    with mountpoint.claim(tmp_path / "lock"), pytest.raises(MountError, match="another process has been at that place"):
        claimed.__enter__()
    with mountpoint.claim(tmp_path / "lock"):
        pass
