"""Everything else the kernel may ask: writing, access, statfs, links, extended attributes, the hidden folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pyfuse3
import pytest

from fusecache.alluxio.model import Capacity
from fusecache.fs.hidden_folder import FOLDER_INODE, HiddenFolder
from fusecache.fs.operations import Operations
from tests.t3_operations.operations_rig import CONTEXT, ROOT, Rig, refused, rig

WRITES: dict[str, tuple[Any, ...]] = {
    "setattr": (ROOT, None, None, None, CONTEXT),
    "mknod": (ROOT, b"n", 0o644, 0, CONTEXT),
    "mkdir": (ROOT, b"n", 0o755, CONTEXT),
    "unlink": (ROOT, b"f", CONTEXT),
    "rmdir": (ROOT, b"d", CONTEXT),
    "symlink": (ROOT, b"n", b"target", CONTEXT),
    "rename": (ROOT, b"f", ROOT, b"g", 0, CONTEXT),
    "link": (ROOT, ROOT, b"n", CONTEXT),
    "create": (ROOT, b"n", 0o644, os.O_WRONLY, CONTEXT),
    "write": (ROOT, 0, b"data"),
    "setxattr": (ROOT, b"user.x", b"v", CONTEXT),
    "removexattr": (ROOT, b"user.x", CONTEXT),
}


@pytest.mark.parametrize("request_name", WRITES)
async def test_operations_every_write_request_is_erofs(tmp_path: Path, request_name: str) -> None:
    """S13."""
    async with rig(tmp_path) as r:
        with refused(errno.EROFS):
            await getattr(r.operations, request_name)(*WRITES[request_name])
        assert r.errors(request_name, "EROFS") == 1


def test_operations_no_request_of_pyfuse3_is_forgotten() -> None:
    """A handler that pyfuse3 has and Operations does not would answer ENOSYS where EROFS or an answer belongs."""
    inherited = {
        name
        for name, handler in vars(pyfuse3.Operations).items()
        if callable(handler) and not name.startswith("_") and getattr(Operations, name) is handler
    }
    # init and stacktrace are no requests; poll and syncfs answer ENOSYS, which the kernel takes for "the default".
    assert inherited <= {"init", "stacktrace", "poll", "syncfs"}


async def test_operations_access_refuses_writing_only(tmp_path: Path) -> None:
    """S13; reading and entering are the kernel's to check (default_permissions)."""
    async with rig(tmp_path) as r:
        for mode in (os.F_OK, os.R_OK, os.X_OK, os.R_OK | os.X_OK):
            assert await r.operations.access(ROOT, mode, CONTEXT) is True
        with refused(errno.EROFS):
            await r.operations.access(ROOT, os.R_OK | os.W_OK, CONTEXT)


async def test_operations_readlink_is_einval(tmp_path: Path) -> None:
    """S14; user report 59."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        with refused(errno.EINVAL):
            await r.operations.readlink(inode, CONTEXT)


async def test_operations_statfs_is_the_clusters_cache(tmp_path: Path) -> None:
    """S16; user report 57."""
    async with rig(tmp_path) as r:
        for n in range(7):
            r.write(b"/f%d" % n, b"x")
        await r.list_names(ROOT)
        got = await r.operations.statfs(CONTEXT)
        assert got.f_frsize * got.f_blocks == r.cluster.capacity_bytes
        assert got.f_frsize * got.f_bavail == got.f_frsize * got.f_bfree == 75 << 30
        assert got.f_files >= 7
        assert got.f_namemax == 255
        r.cluster = Capacity(10, 20)
        assert (await r.operations.statfs(CONTEXT)).f_bavail == 0, "more used than there is"


async def test_operations_extended_attributes_of_a_file(tmp_path: Path) -> None:
    """S18."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        r.model.mkdir(b"/d")
        await r.walk(b"/f")
        folder = (await r.walk(b"/d")).st_ino
        assert set(await r.operations.listxattr(inode, CONTEXT)) == {
            b"user.fusecache.file_id",
            b"user.fusecache.blocks",
            b"user.fusecache.local_bytes",
        }
        assert await r.operations.getxattr(inode, b"user.fusecache.file_id", CONTEXT) == b"%d" % (inode - 1)
        assert await r.operations.getxattr(inode, b"user.fusecache.blocks", CONTEXT) == b"1"
        assert await r.operations.getxattr(inode, b"user.fusecache.local_bytes", CONTEXT) == b"0"
        assert await r.operations.listxattr(folder, CONTEXT) == [b"user.fusecache.file_id"]
        assert await r.operations.listxattr(ROOT, CONTEXT) == []
        for where, name in [
            (inode, b"security.capability"),
            (inode, b"system.posix_acl_access"),
            (inode, b"user.other"),
            (inode, b"user.fusecache.other"),
            (folder, b"user.fusecache.blocks"),
            (ROOT, b"user.fusecache.file_id"),
        ]:
            with refused(errno.ENODATA):
                await r.operations.getxattr(where, name, CONTEXT)
        assert r.metrics.snapshot()["fusecache_open_files"] == 0


async def test_operations_capability_of_an_unlisted_name_costs_no_call(tmp_path: Path) -> None:
    """The kernel asks for security.capability at every execve and write; nothing must go to a master for it."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        asked = r.model.calls
        with refused(errno.ENODATA):
            await r.operations.getxattr(inode, b"security.capability", CONTEXT)
        assert r.model.calls == asked


async def hidden_file(r: Rig, name: bytes) -> int:
    folder = await r.operations.lookup(ROOT, b".fusecache", CONTEXT)
    return (await r.operations.lookup(folder.st_ino, name, CONTEXT)).st_ino


async def test_operations_hidden_folder_answers_by_name_and_is_never_listed(tmp_path: Path) -> None:
    """S17."""
    async with rig(tmp_path) as r:
        r.write(b"/f", b"x")
        folder = await r.operations.lookup(ROOT, b".fusecache", CONTEXT)
        assert (folder.st_ino, stat.S_ISDIR(folder.st_mode)) == (FOLDER_INODE, True)
        assert await r.list_names(ROOT) == [b"f"]
        assert await r.list_names(folder.st_ino, room=1) == [b"stats", b"version"]
        inode = await hidden_file(r, b"stats")
        got = await r.operations.getattr(inode, CONTEXT)
        assert stat.S_IMODE(got.st_mode) == 0o444
        info = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        assert info.direct_io, "its size is not known before"
        content = b"one 1\ntwo 2\n"
        assert bytes(await r.operations.read(info.fh, 0, 4096)) == content
        assert bytes(await r.operations.read(info.fh, 4, 3)) == content[4:7]
        assert bytes(await r.operations.read(info.fh, 4096, 4096)) == b""
        await r.operations.release(info.fh)
        assert (await r.operations.lookup(folder.st_ino, b"missing", CONTEXT)).st_ino == 0
        assert (await r.operations.lookup(ROOT, b"sub", CONTEXT)).st_ino == 0


async def test_operations_hidden_folder_exists_in_the_root_only(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.model.mkdir(b"/d")
        folder = (await r.walk(b"/d")).st_ino
        assert (await r.operations.lookup(folder, b".fusecache", CONTEXT)).st_ino == 0


async def test_operations_hidden_folder_refuses_what_folders_and_files_refuse(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inode = await hidden_file(r, b"stats")
        with refused(errno.EISDIR):
            await r.operations.open(FOLDER_INODE, os.O_RDONLY, CONTEXT)
        with refused(errno.ENOTDIR):
            await r.operations.opendir(inode, CONTEXT)
        with refused(errno.ESTALE):
            await r.operations.getattr(FOLDER_INODE + 99, CONTEXT)
        with refused(errno.ESTALE):
            await r.operations.open(FOLDER_INODE + 99, os.O_RDONLY, CONTEXT)
        with refused(errno.EROFS):
            await r.operations.open(inode, os.O_RDWR, CONTEXT)
        with refused(errno.ENODATA):
            await r.operations.getxattr(inode, b"user.fusecache.file_id", CONTEXT)
        assert list(await r.operations.listxattr(inode, CONTEXT)) == []


async def test_operations_hidden_folder_open_files_are_limited(tmp_path: Path) -> None:
    """Each open file holds its content: a program that forgets to close them must not fill the memory."""
    async with rig(tmp_path) as r:
        inode = await hidden_file(r, b"version")
        opened = [await r.operations.open(inode, os.O_RDONLY, CONTEXT) for _ in range(HiddenFolder.MAX_OPEN)]
        with refused(errno.EMFILE):
            await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        await r.operations.release(opened.pop().fh)
        await r.operations.open(inode, os.O_RDONLY, CONTEXT)


async def test_operations_flush_is_enosys_once_and_forget_is_harmless(tmp_path: Path) -> None:
    """ENOSYS tells the kernel to send no FLUSH any more; close(2) succeeds all the same."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        info = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        with refused(errno.ENOSYS):
            await r.operations.flush(info.fh)
        await r.operations.fsync(info.fh, True)
        await r.operations.release(info.fh)
        await r.operations.forget([(inode, 3), (pyfuse3.InodeT(999), 1)])
        assert (await r.operations.getattr(inode, CONTEXT)).st_size == 1
