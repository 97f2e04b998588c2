"""Attributes, permissions, df, extended attributes, links and the hidden folder through the kernel."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board, Place
from tests.t4_mount.live_mount import errno_of

pytestmark = needs_fuse

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners and becomes other users: needs root")

MTIME_NS = 1_600_000_000_123_000_000


@pytest.fixture(scope="module")
def place(board: Board) -> Place:
    """A folder with files of every mode and two owners; alice is uid 1234, everybody else 4321."""
    place = board.place("folder", "attributes")
    source = place.source
    for name, size in (("empty", 0), ("one", 1), ("k", 1024), ("odd", 1025)):
        (source / name).write_bytes(b"x" * size)
        os.utime(source / name, ns=(MTIME_NS, MTIME_NS))
    for mode in (0o600, 0o640, 0o444, 0o755, 0o4755, 0o2711):
        (source / f"mode{mode:04o}").write_bytes(b"secret")
        (source / f"mode{mode:04o}").chmod(mode)
    (source / "d").mkdir()
    (source / "d" / "inside").write_bytes(b"inside")
    (source / "closed").mkdir(mode=0o700)
    (source / "closed" / "f").write_bytes(b"closed")
    (source / "link").symlink_to("one")
    (source / "folder-link").symlink_to("d")
    (source / "broken").symlink_to("nowhere")
    (source / "outside").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    if os.geteuid() == 0:
        os.chown(source / "one", 7001, 7002)
    return place


def test_mount_attributes_sizes_blocks_links_and_times(place: Place) -> None:
    """S12."""
    for name, size in (("empty", 0), ("one", 1), ("k", 1024), ("odd", 1025)):
        got = os.stat(place.shown / name)
        assert (got.st_size, got.st_blocks) == (size, -(-size // 512))
        assert got.st_mtime_ns == got.st_ctime_ns == MTIME_NS
        assert got.st_nlink == 1
        assert got.st_ino == int(os.getxattr(place.shown / name, "user.fusecache.file_id")) + 1
    assert os.stat(place.shown / "d").st_nlink == 2
    assert os.stat(place.mount.root).st_ino == 1


def test_mount_attributes_modes_are_masked(place: Place) -> None:
    """S11: no write bits, no setuid, no setgid."""
    for mode in (0o600, 0o640, 0o444, 0o755, 0o4755, 0o2711):
        got = os.stat(place.shown / f"mode{mode:04o}").st_mode
        assert stat.S_IMODE(got) == mode & 0o555
        assert stat.S_ISREG(got)
    assert stat.S_IMODE(os.stat(place.shown / "closed").st_mode) == 0o500


@needs_root
def test_mount_attributes_owners_are_mapped_and_never_root(place: Place) -> None:
    """S11: by the maps; who is in none of them is nobody."""
    got = os.stat(place.shown / "one")
    assert (got.st_uid, got.st_gid) == (1234, 1235)
    for name in ("k", "d", "."):
        got = os.stat(place.shown / name)
        assert (got.st_uid, got.st_gid) == (65534, 65534)


def refusal(uid: int, gid: int, *arguments: str | Path) -> str:
    """What a program says that runs as another user, "" when it succeeds."""
    done = subprocess.run(
        arguments,
        user=uid,
        group=gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode == 0) == (done.stderr == ""), done
    return done.stderr.rpartition(": ")[2].strip()


@needs_root
def test_mount_attributes_other_users_are_held_to_the_mode(place: Place) -> None:
    """S11: the kernel checks (default_permissions); a file cached by root is no more open than before."""
    root = place.shown
    # Other users have to reach it; another test run that starts closes pytest's folder again.
    for above in place.mount.root.parents:
        if above.stat().st_uid == os.geteuid():
            above.chmod(above.stat().st_mode | 0o011)
    assert (root / "mode0600").read_bytes() == b"secret"
    if refusal(1234, 1235, "stat", root):
        pytest.skip("a folder above the temporary folder can't be entered by other users")
    assert refusal(1234, 1235, "ls", root) == ""
    assert refusal(1234, 1235, "cat", root / "mode0444") == ""
    assert refusal(1234, 1235, "cat", root / "d" / "inside") == ""
    denied = "Permission denied"
    assert refusal(1234, 1235, "cat", root / "mode0600") == denied
    assert refusal(1234, 1235, "ls", root / "closed") == denied
    assert refusal(1234, 1235, "stat", root / "closed" / "f") == denied
    assert refusal(1234, 1235, "touch", root / "mode0444") == "Read-only file system"
    # Files that no map gives an owner are nobody's, and nobody may read its own.
    assert refusal(65534, 65534, "cat", root / "mode0600") == ""


def test_mount_attributes_du_and_ls_agree_with_the_source(place: Place) -> None:
    shown = subprocess.run(["du", "--apparent-size", "-b", place.shown / "odd"], capture_output=True, check=True).stdout
    assert shown.split()[0] == b"1025"
    listed = subprocess.run(["ls", "-la", place.shown], capture_output=True, check=True, text=True).stdout
    assert "?" not in listed


def test_mount_links_inside_are_followed_and_all_others_left_out(place: Place) -> None:
    """S14; user report 59."""
    names = set(os.listdir(place.shown))
    assert {"link", "folder-link", "one"} <= names
    assert not names & {"broken", "outside", "pipe"}
    assert not [name for name in names if name.startswith(".fuse_hidden")]
    assert not os.path.islink(place.shown / "link")
    assert (place.shown / "link").read_bytes() == b"x"
    assert (place.shown / "folder-link" / "inside").read_bytes() == b"inside"
    assert errno_of(lambda: os.readlink(place.shown / "link")) == errno.EINVAL
    for name in ("broken", "outside", "pipe"):
        assert errno_of(lambda name=name: os.stat(place.shown / name)) == errno.ENOENT


def test_mount_df_shows_the_cache(place: Place) -> None:
    """S16; user report 57: df, df -i, disk_usage and what programs check before they start."""
    (place.shown / "one").read_bytes()
    shown = os.statvfs(place.shown)
    metrics = place.mount.metrics()
    capacity = metrics["fusecache_cluster_capacity_bytes"]
    assert capacity > 0
    assert abs(shown.f_frsize * shown.f_blocks - capacity) < 4096
    assert 0 < shown.f_bavail <= shown.f_blocks
    assert shown.f_files > 0
    assert shown.f_flag & os.ST_RDONLY
    usage = shutil.disk_usage(place.shown)
    assert 0 < usage.free <= usage.total
    for flag in ("-k", "-i"):
        line = subprocess.run(["df", flag, place.shown], capture_output=True, check=True, text=True).stdout.splitlines()
        assert int(line[-1].split()[1]) > 0
    again = os.statvfs(place.shown)
    assert again.f_blocks == shown.f_blocks, "stable"


def test_mount_extended_attributes_of_files_and_folders(place: Place) -> None:
    """S18."""
    path = place.shown / "k"
    path.read_bytes()
    assert set(os.listxattr(path)) == {
        "user.fusecache.file_id",
        "user.fusecache.blocks",
        "user.fusecache.local_bytes",
    }
    assert os.getxattr(path, "user.fusecache.blocks") == b"1"
    assert os.getxattr(path, "user.fusecache.local_bytes") == b"1024", "read once, so its block is local"
    assert os.getxattr(place.shown / "empty", "user.fusecache.blocks") == b"0"
    assert os.listxattr(place.shown / "d") == ["user.fusecache.file_id"]
    for name in ("user.other", "user.fusecache.other", "security.selinux", "trusted.x", "system.posix_acl_access"):
        number = errno_of(lambda name=name: os.getxattr(path, name))
        assert number in (errno.ENODATA, errno.EOPNOTSUPP), name
    assert errno_of(lambda: os.getxattr(path, "user.other")) == errno.ENODATA


def test_mount_hidden_folder_answers_by_name_and_is_never_listed(place: Place) -> None:
    """S17."""
    root = place.mount.root
    hidden = root / ".fusecache"
    assert ".fusecache" not in os.listdir(root)
    found = subprocess.run(["find", place.shown], capture_output=True, check=True, text=True).stdout
    assert ".fusecache" not in found
    assert sorted(os.listdir(hidden)) == ["config", "stats", "version"]
    assert "fusecache_requests_total" in (hidden / "stats").read_text()
    config = json.loads((hidden / "config").read_text())
    assert config["mountpoint"] == str(root)
    assert Path(config["control_socket"]).is_socket()
    assert (hidden / "version").read_text().startswith("fusecache ")
    assert subprocess.run(["cat", hidden / "version"], capture_output=True, check=True).stdout
    assert errno_of(lambda: os.stat(hidden / "missing")) == errno.ENOENT
    assert errno_of(lambda: os.stat(place.shown / "d" / ".fusecache")) == errno.ENOENT
    assert errno_of(lambda: os.open(hidden / "stats", os.O_RDWR)) == errno.EROFS
    assert errno_of(lambda: os.unlink(hidden / "stats")) == errno.EROFS
    assert errno_of(lambda: os.mkdir(hidden / "new")) == errno.EROFS
