"""S13: every system call that would change something is EROFS, on names that exist and on new ones."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mounting import needs_fuse, sha256_tree
from tests.t4_mount.board import Board, Place
from tests.t4_mount.live_mount import errno_of

pytestmark = needs_fuse

Call = Callable[[Path], object]


@pytest.fixture(scope="module")
def place(board: Board) -> Iterator[Place]:
    place = board.place("folder", "read_only")
    source = place.source
    (source / "d" / "e").mkdir(parents=True)
    (source / "f").write_bytes(b"content")
    (source / "g").write_bytes(b"other")
    (source / "d" / "h").write_bytes(b"in d")
    place.warm("f", "g")
    before = sha256_tree(source)
    yield place
    assert sha256_tree(place.shown) == before
    assert sha256_tree(source) == before


CALLS: dict[str, Call] = {
    "open_write": lambda root: os.open(root / "f", os.O_WRONLY),
    "open_read_write": lambda root: os.open(root / "f", os.O_RDWR),
    "open_truncate": lambda root: os.open(root / "f", os.O_WRONLY | os.O_TRUNC),
    "open_append": lambda root: os.open(root / "f", os.O_WRONLY | os.O_APPEND),
    "open_create": lambda root: os.open(root / "new", os.O_WRONLY | os.O_CREAT, 0o644),
    "open_create_below": lambda root: os.open(root / "d" / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644),
    "open_read_create_new": lambda root: os.open(root / "new", os.O_RDONLY | os.O_CREAT, 0o644),
    "open_tmpfile": lambda root: os.open(root / "d", os.O_RDWR | os.O_TMPFILE, 0o600),
    "truncate": lambda root: os.truncate(root / "f", 0),
    "truncate_longer": lambda root: os.truncate(root / "f", 1 << 20),
    "unlink": lambda root: os.unlink(root / "f"),
    "rmdir": lambda root: os.rmdir(root / "d" / "e"),
    "rmdir_not_empty": lambda root: os.rmdir(root / "d"),
    "mkdir": lambda root: os.mkdir(root / "new"),
    "mkdir_below": lambda root: os.mkdir(root / "d" / "new"),
    "mkfifo": lambda root: os.mkfifo(root / "new"),
    "mknod": lambda root: os.mknod(root / "new", stat.S_IFREG | 0o644),
    "bind": lambda root: bind_below(root),
    "symlink": lambda root: os.symlink("f", root / "new"),
    "link": lambda root: os.link(root / "f", root / "new"),
    "rename": lambda root: os.rename(root / "f", root / "new"),
    "rename_over": lambda root: os.rename(root / "f", root / "g"),
    "rename_folder": lambda root: os.rename(root / "d", root / "new"),
    "rename_across": lambda root: os.rename(root / "f", root / "d" / "new"),
    "chmod": lambda root: os.chmod(root / "f", 0o777),
    "chmod_folder": lambda root: os.chmod(root / "d", 0o777),
    "chown": lambda root: os.chown(root / "f", os.getuid(), os.getgid()),
    "lchown": lambda root: os.lchown(root / "f", os.getuid(), os.getgid()),
    "utime": lambda root: os.utime(root / "f"),
    "utime_to": lambda root: os.utime(root / "f", (1, 1)),
    "utime_folder": lambda root: os.utime(root, (1, 1)),
    "setxattr": lambda root: os.setxattr(root / "f", "user.mine", b"v"),
    "setxattr_ours": lambda root: os.setxattr(root / "f", "user.fusecache.blocks", b"9"),
    "removexattr": lambda root: os.removexattr(root / "f", "user.fusecache.blocks"),
    "access_write": lambda root: access(root / "f", os.W_OK),
    "access_write_folder": lambda root: access(root / "d", os.W_OK),
    "temporary_file": lambda root: tempfile.mkstemp(dir=root / "d", prefix="t"),
}  # fmt: skip


def bind_below(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(root, os.O_PATH)
        try:
            made.bind(f"/proc/self/fd/{folder}/new")
        finally:
            os.close(folder)


def access(path: Path, mode: int) -> None:
    """access(2) with its errno, which os.access swallows."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.access(os.fsencode(path), mode):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.parametrize("name", CALLS)
def test_mount_read_only_call_is_erofs(place: Place, name: str) -> None:
    """S13."""
    assert errno_of(lambda: CALLS[name](place.shown)) == errno.EROFS


def test_mount_read_only_open_descriptor_can_not_be_changed_either(place: Place) -> None:
    """S13: through a descriptor that was opened for reading."""
    descriptor = os.open(place.shown / "f", os.O_RDONLY)
    try:
        assert errno_of(lambda: os.write(descriptor, b"x")) == errno.EBADF
        assert errno_of(lambda: os.ftruncate(descriptor, 0)) in (errno.EBADF, errno.EINVAL)
        assert errno_of(lambda: os.fchmod(descriptor, 0o777)) == errno.EROFS
        assert errno_of(lambda: os.fchown(descriptor, 1, 1)) == errno.EROFS
        assert errno_of(lambda: os.utime(descriptor, (1, 1))) == errno.EROFS
        assert errno_of(lambda: os.setxattr(descriptor, "user.mine", b"v")) == errno.EROFS
        assert os.fsync(descriptor) is None
    finally:
        os.close(descriptor)


def test_mount_read_only_remounting_for_writing_changes_nothing(place: Place) -> None:
    """S13 is the daemon's word too, not only the mount option's: its handlers refuse (see the handler tests)."""
    options = next(
        line.split(" - ")[0].split()[5]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == str(place.mount.root)
    )
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))
