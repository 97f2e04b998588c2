"""LOOKUP and GETATTR without a kernel: names, attributes, times the kernel may keep them, errno."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fusecache.errors import PermissionDenied, ProtocolError, Unavailable
from tests.support.log_noise import Declare
from tests.t3_operations.operations_rig import CONTEXT, ROOT, refused, rig

BYTE_NAMES = [
    b"\xff\xfe.jpg",
    "名前 空格.jpg".encode(),
    b"a?b",
    b"a%2Fb",
    b"a:b",
    b"a\\b",
    b"a#b",
    b"trailing ",
    b"-leading",
    b"new\nline",
    b"n" * 255,
]


async def test_operations_lookup_serves_names_byte_for_byte(tmp_path: Path) -> None:
    """S08; user reports 51 to 53: what a name looks like changes nothing, and no name is taken for another."""
    async with rig(tmp_path) as r:
        r.model.mkdir(b"/d")
        inodes = {name: r.write(b"/d/" + name, name) for name in BYTE_NAMES}
        folder = (await r.walk(b"/d")).st_ino
        for name, inode in inodes.items():
            assert (await r.operations.lookup(folder, name, CONTEXT)).st_ino == inode, name
            assert await r.read_file(inode) == name
        assert sorted(await r.list_names(folder)) == sorted(BYTE_NAMES)
        assert (await r.operations.lookup(folder, b"a/b", CONTEXT)).st_ino == 0
        assert (await r.operations.lookup(folder, b"trailing", CONTEXT)).st_ino == 0


async def test_operations_lookup_name_over_255_bytes_is_enametoolong(tmp_path: Path) -> None:
    """S09."""
    async with rig(tmp_path) as r:
        asked = r.model.calls
        with refused(errno.ENAMETOOLONG):
            await r.operations.lookup(ROOT, b"x" * 256, CONTEXT)
        assert r.model.calls == asked
        assert r.errors("lookup", "ENAMETOOLONG") == 1


async def test_operations_attributes_say_what_alluxio_says(tmp_path: Path) -> None:
    """S12."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x" * 1025, mode=0o777, mtime_ms=1_700_000_000_123)
        r.model.mkdir(b"/d")
        got = await r.walk(b"/f")
        assert got.st_ino == inode
        assert got.st_mode == stat.S_IFREG | 0o555
        assert (got.st_size, got.st_blocks, got.st_nlink) == (1025, 3, 1)
        assert got.st_mtime_ns == got.st_ctime_ns == 1_700_000_000_123_000_000
        again = await r.operations.getattr(got.st_ino, CONTEXT)
        assert (again.st_ino, again.st_size, again.st_mtime_ns) == (got.st_ino, got.st_size, got.st_mtime_ns)
        folder = await r.walk(b"/d")
        assert folder.st_mode == stat.S_IFDIR | 0o555
        assert (folder.st_size, folder.st_nlink) == (0, 2)
        root = await r.operations.getattr(ROOT, CONTEXT)
        assert (root.st_ino, stat.S_ISDIR(root.st_mode)) == (1, True)


async def test_operations_attributes_special_bits_of_the_mode_never_pass(tmp_path: Path) -> None:
    """S11: setuid, setgid and sticky are masked with the rest; a folder that may be read may be entered."""
    async with rig(tmp_path) as r:
        r.write(b"/suid", b"x", mode=0o7755)
        r.model.mkdir(b"/d").mode = 0o440
        assert stat.S_IMODE((await r.walk(b"/suid")).st_mode) == 0o555
        assert stat.S_IMODE((await r.walk(b"/d")).st_mode) == 0o550


async def test_operations_attributes_owner_comes_from_the_maps_and_is_never_root(tmp_path: Path) -> None:
    """S11."""
    async with rig(tmp_path, owner_map={"alluxio": 1234}, group_map={"staff": 4321}) as r:
        r.write(b"/f", b"x")
        got = await r.walk(b"/f")
        assert (got.st_uid, got.st_gid) == (1234, 4321)
    async with rig(tmp_path / "other") as r:
        r.write(b"/f", b"x")
        got = await r.walk(b"/f")
        assert (got.st_uid, got.st_gid) == (os.geteuid() or 65534, os.getegid() or 65534)
        assert 0 not in (got.st_uid, got.st_gid)


async def test_operations_lookup_missing_name_is_an_answer_not_an_error(tmp_path: Path) -> None:
    """S09; user report 54: the kernel gets a negative entry and makes ENOENT of it, at most until the folder is due."""
    async with rig(tmp_path) as r:
        r.write(b"/f", b"x")
        await r.list_names(ROOT)
        asked = r.model.calls
        answer = await r.operations.lookup(ROOT, b"missing", CONTEXT)
        assert answer.st_ino == 0
        assert 0 < answer.entry_timeout <= r.settings.refresh_s
        assert r.model.calls == asked, "a fresh listing says it without a call"


async def test_operations_unknown_inode_is_estale(tmp_path: Path) -> None:
    """S09."""
    async with rig(tmp_path) as r:
        for call in (r.operations.getattr, r.operations.opendir):
            with refused(errno.ESTALE):
                await call(12345, CONTEXT)
        with refused(errno.ESTALE):
            await r.operations.open(12345, os.O_RDONLY, CONTEXT)
        with refused(errno.ESTALE):
            await r.operations.lookup(12345, b"x", CONTEXT)


async def test_operations_kernel_may_keep_nothing_past_refresh_s(tmp_path: Path) -> None:
    """S05: names, attributes and negative answers end with the listing they come from."""
    async with rig(tmp_path, refresh_s=100) as r:
        r.write(b"/f", b"x")
        await r.list_names(ROOT)
        for age_s in (0.0, 30.0, 79.0):
            r.clock.time_s = 1_000.0 + age_s
            got = await r.walk(b"/f")
            assert 0 < got.entry_timeout <= 100 - age_s
            assert got.attr_timeout == got.entry_timeout
            missing = await r.operations.lookup(ROOT, b"missing", CONTEXT)
            assert missing.entry_timeout <= 100 - age_s


async def test_operations_change_by_another_client_is_seen_after_refresh_s(tmp_path: Path) -> None:
    """S05; user reports 15, 17, 22: look-up, attributes and listing agree before and after."""
    async with rig(tmp_path, refresh_s=100) as r:
        r.write(b"/a", b"")
        await r.list_names(ROOT)
        old = await r.walk(b"/a")
        new = r.write(b"/a", b"zz\n")
        r.write(b"/b", b"new")
        assert (await r.walk(b"/a")).st_size == 0, "not yet due"
        r.clock.time_s += 101
        assert (await r.walk(b"/a")).st_ino == new
        assert (await r.walk(b"/a")).st_size == 3
        assert await r.read_file(new) == b"zz\n"
        assert sorted(await r.list_names(ROOT)) == [b"a", b"b"]
        with refused(errno.ESTALE):
            await r.operations.getattr(old.st_ino, CONTEXT)


async def test_operations_immutable_is_asked_once_and_kept(tmp_path: Path) -> None:
    """S07."""
    async with rig(tmp_path, refresh_s=100, immutable=True) as r:
        r.write(b"/a", b"old")
        await r.list_names(ROOT)
        asked = r.model.calls
        r.write(b"/b", b"new")
        r.clock.time_s += 10 * 365 * 86400
        assert await r.list_names(ROOT) == [b"a"]
        assert (await r.operations.lookup(ROOT, b"b", CONTEXT)).st_ino == 0
        assert (await r.walk(b"/a")).entry_timeout == r.settings.immutable_kernel_timeout_s
        assert r.model.calls == asked
        await r.tree.refresh(ROOT, force_sync=True)
        assert sorted(await r.list_names(ROOT)) == [b"a", b"b"]


async def test_operations_nobody_answers_known_names_go_on(tmp_path: Path) -> None:
    """S21: served past their time, counted, kept by the kernel for a second only, and then EIO."""
    async with rig(tmp_path, refresh_s=100, stale_if_error_s=1000) as r:
        inode = r.write(b"/a", b"x")
        await r.list_names(ROOT)
        r.model.error = Unavailable("no master answers")
        r.clock.time_s += 500
        got = await r.walk(b"/a")
        assert got.st_ino == inode
        assert got.entry_timeout <= 1.0
        assert await r.list_names(ROOT) == [b"a"]
        assert r.metrics.snapshot()["fusecache_metadata_lookups_total{result=stale}"] >= 2
        assert await r.read_file(inode) == b"x", "data needs no master"


async def test_operations_nobody_answers_for_too_long_is_eio(tmp_path: Path, expected_logs: Declare) -> None:
    """S21: past `stale_if_error_s` nothing old is served."""
    expected_logs(r"request failed")
    async with rig(tmp_path, refresh_s=100, stale_if_error_s=1000) as r:
        r.write(b"/a", b"x")
        await r.list_names(ROOT)
        r.model.error = Unavailable("no master answers")
        r.clock.time_s += 1101
        with refused(errno.EIO):
            await r.operations.lookup(ROOT, b"a", CONTEXT)
        r.model.error = None
        r.clock.time_s += 10
        assert (await r.walk(b"/a")).st_size == 1


@pytest.mark.parametrize(
    ("error", "number", "noisy"),
    [
        (PermissionDenied("not yours"), errno.EACCES, False),
        (ProtocolError("a length of -1"), errno.EIO, True),
        (Unavailable("nobody"), errno.EIO, True),
    ],
)
async def test_operations_upstream_error_becomes_its_errno(
    tmp_path: Path, error: Exception, number: int, noisy: bool, expected_logs: Declare
) -> None:
    if noisy:
        expected_logs(r"request failed.*op='?lookup", count=1)
    async with rig(tmp_path) as r:
        r.model.error = error
        with refused(number):
            await r.operations.lookup(ROOT, b"x", CONTEXT)
        r.model.error = None
        r.clock.time_s += 10
        r.write(b"/x", b"1")
        assert (await r.walk(b"/x")).st_size == 1
