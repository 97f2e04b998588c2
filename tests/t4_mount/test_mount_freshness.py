"""Another client changes the tree: when the mount shows it, through names, attributes, listings and bytes alike.

The other client writes into the embedded server's folder. That is behind Alluxio's back; where a promise is about
changes made *through* Alluxio, a second client makes the server look (`WireClient`), and the mount itself never asks
it to (`sync_interval_s` -1).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import subprocess
from pathlib import Path

from tests.support.embedded import WireClient, replace
from tests.support.mounting import command, needs_fuse
from tests.t4_mount.board import Board, started
from tests.t4_mount.live_mount import errno_of, eventually

pytestmark = needs_fuse
shared_mounts = started("folder", "quick")

QUICK = ("--refresh-s", "1", "--sync-interval-s", "0")


def shows(folder: Path, expected: dict[str, bytes]) -> bool:
    """Names, sizes and bytes are exactly these (a file replaced between two of our calls is not there yet)."""
    try:
        names = os.listdir(folder)
        return sorted(names) == sorted(expected) and all(
            os.stat(folder / name).st_size == len(data) and (folder / name).read_bytes() == data
            for name, data in expected.items()
        )
    except OSError as failure:
        if failure.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise


def test_mount_freshness_changes_come_by_themselves_within_refresh_s(board: Board) -> None:
    """S06; user reports 15, 16, 18, 22, 23: added, overwritten with another length, appended, removed, renamed."""
    place = board.place("quick", "changes")
    source, shown = place.source, place.shown
    state: dict[str, bytes] = {"a.txt": b"", "b": b"x" * 110, "c": b"c"}
    for name, data in state.items():
        (source / name).write_bytes(data)
    eventually(lambda: shows(shown, state), "first content")

    state["a.txt"] = b"zz\n"
    (source / "a.txt").write_bytes(b"zz\n")
    eventually(lambda: shows(shown, state), "overwritten in place")

    state["b"] = os.urandom(4100)
    replace(source / "b", state["b"])
    eventually(lambda: shows(shown, state), "replaced: 110 bytes -> 4100 bytes")

    with open(source / "a.txt", "ab") as file:
        file.write(b"more\n")
    state["a.txt"] += b"more\n"
    eventually(lambda: shows(shown, state), "appended")

    os.unlink(source / "c")
    del state["c"]
    (source / "new").write_bytes(b"new")
    state["new"] = b"new"
    eventually(lambda: shows(shown, state), "removed and added")

    os.rename(source / "new", source / "renamed")
    state["renamed"] = state.pop("new")
    eventually(lambda: shows(shown, state), "renamed")

    os.chmod(source / "renamed", 0o400)
    eventually(lambda: os.stat(shown / "renamed").st_mode & 0o777 == 0o400, "mode")


def test_mount_freshness_listing_that_the_kernel_keeps_is_made_again(board: Board) -> None:
    """S05, S37: nothing is asked for but the listing, which the kernel answers itself where it keeps listings.

    The daemon heard nothing of such a folder but a look at its attributes now and then, took it for unused, and never
    listed it again.
    """
    place = board.place("quick", "kept")
    for name in ("a", "b"):
        (place.source / name).write_bytes(b"1")
    for gone, added in (("a", "c"), ("b", "d")):
        names = sorted(os.listdir(place.source))
        eventually(lambda names=names: sorted(os.listdir(place.shown)) == names, "what there is")
        os.unlink(place.source / gone)
        (place.source / added).write_bytes(b"2")
    eventually(lambda: sorted(os.listdir(place.shown)) == ["c", "d"], "the last change")


def test_mount_freshness_kinds_change_by_themselves(board: Board) -> None:
    """S06: a file becomes a folder and the other way round."""
    place = board.place("quick", "kinds")
    source, shown = place.source, place.shown
    (source / "x").write_bytes(b"file")
    (source / "y").mkdir()
    (source / "y" / "inside").write_bytes(b"i")
    eventually(lambda: (shown / "x").is_file() and os.listdir(shown / "y") == ["inside"], "first kinds")
    os.unlink(source / "x")
    (source / "x").mkdir()
    (source / "x" / "now").write_bytes(b"n")
    os.unlink(source / "y" / "inside")
    os.rmdir(source / "y")
    (source / "y").write_bytes(b"file")

    def changed() -> bool:
        try:
            return os.listdir(shown / "x") == ["now"] and (shown / "y").read_bytes() == b"file"
        except OSError as failure:
            if failure.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR):
                return False
            raise

    eventually(changed, "kinds changed")


def test_mount_freshness_nothing_shows_before_and_everything_after_refresh(board: Board) -> None:
    """S05, S06; user reports 15, 16, 17, 18, 19, 22: at once after `fusecache refresh`, by the command itself."""
    place = board.place("folder", "refreshed")
    source, shown = place.source, place.shown
    old = {"grow": b"x" * 110, "gone": b"gone", "same": b"same"}
    for name, data in old.items():
        (source / name).write_bytes(data)
    place.refresh()
    assert shows(shown, old)

    new = {"grow": os.urandom(4100), "same": b"same", "added": b"added"}
    (source / "grow").write_bytes(new["grow"])
    os.unlink(source / "gone")
    (source / "added").write_bytes(b"added")
    assert sorted(os.listdir(shown)) == sorted(old)
    assert os.stat(shown / "grow").st_size == 110
    assert errno_of(lambda: os.stat(shown / "added")) == errno.ENOENT

    done = subprocess.run(
        [*command(), "refresh", str(shown), "--runtime-dir", str(place.mount.runtime_dir)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "1 folder(s)" in done.stdout
    assert shows(shown, new), "no wait is allowed here"
    assert errno_of(lambda: os.stat(shown / "gone")) == errno.ENOENT


def test_mount_freshness_pages_of_the_old_version_are_not_the_new_ones(board: Board) -> None:
    """User report 19: attributes, page cache and handles change together; old pages were warm."""
    place = board.place("folder", "pages")
    source, shown = place.source, place.shown
    (source / "f").write_bytes(b"o" * 110)
    place.refresh()
    assert (shown / "f").read_bytes() == b"o" * 110
    new = os.urandom(4100)
    replace(source / "f", new)
    place.refresh()
    assert os.stat(shown / "f").st_size == 4100
    assert (shown / "f").read_bytes() == new


def test_mount_freshness_negative_answers_end_with_a_refresh(board: Board) -> None:
    """User report 17: a name that was asked for before it existed."""
    place = board.place("folder", "negative")
    source, shown = place.source, place.shown
    for _ in range(3):
        assert errno_of(lambda: os.stat(shown / "later")) == errno.ENOENT
    (source / "later").write_bytes(b"now")
    place.refresh()
    assert (shown / "later").read_bytes() == b"now"
    assert os.listdir(shown) == ["later"]


def test_mount_freshness_unchanged_files_keep_inode_and_pages(board: Board) -> None:
    """A refresh that finds nothing costs the kernel nothing: the next read reaches no source."""
    place = board.place("folder", "unchanged")
    source, shown = place.source, place.shown
    (source / "f").write_bytes(os.urandom(200_000))
    place.refresh()
    inode = os.stat(shown / "f").st_ino
    data = (shown / "f").read_bytes()
    before = place.mount.sources()
    assert place.mount.refresh(place.path)["changed"] == 0
    assert os.stat(shown / "f").st_ino == inode
    assert (shown / "f").read_bytes() == data
    assert place.mount.sources() == before


def test_mount_freshness_immutable_shows_changes_after_refresh_only(board: Board, tmp_path: Path) -> None:
    """S07; user report 21: rewritten 10 -> 100 bytes under infinite times; reopening heals after a refresh."""
    source, url = board.cluster_folder("immutable")
    (source / "f").write_bytes(b"x" * 10)
    with board.own(url, tmp_path, "--immutable", *QUICK) as mount:
        assert shows(mount.root, {"f": b"x" * 10})
        listed = mount.rpcs()["ListStatus"]
        replace(source / "f", b"y" * 100)
        (source / "g").write_bytes(b"new")
        started_s = mount.uptime_s()
        eventually(lambda: mount.uptime_s() > started_s + 2.5, "twice the time after which others are listed again")
        assert os.stat(mount.root / "f").st_size == 10
        assert os.listdir(mount.root) == ["f"]
        assert errno_of(lambda: os.stat(mount.root / "g")) == errno.ENOENT
        assert mount.rpcs()["ListStatus"] == listed
        mount.refresh()
        assert shows(mount.root, {"f": b"y" * 100, "g": b"new"})


def test_mount_freshness_change_through_alluxio_needs_no_sync(board: Board, tmp_path: Path) -> None:
    """S05: the mount never makes Alluxio look; another client did, so Alluxio knows, so the mount sees it."""
    cluster = board.cluster("one")
    source, url = board.cluster_folder("noticed")
    (source / "f").write_bytes(b"old")
    with (
        board.own(url, tmp_path, "--refresh-s", "1", "--sync-interval-s", "-1") as mount,
        WireClient(cluster.master) as client,
    ):
        assert shows(mount.root, {"f": b"old"})
        replace(source / "f", b"new content")
        listed = mount.rpcs()["ListStatus"]

        def listed_again() -> bool:
            os.stat(mount.root / "f")
            return mount.rpcs()["ListStatus"] >= listed + 2

        eventually(listed_again, "listed twice while Alluxio has not noticed")
        assert os.stat(mount.root / "f").st_size == 3, "what Alluxio has not noticed, nobody can see"
        client.entries(b"/" + os.fsencode(source.name), sync_interval_ms=0)
        eventually(lambda: shows(mount.root, {"f": b"new content"}), "after Alluxio noticed")


def test_mount_freshness_two_mounts_agree(board: Board, tmp_path: Path) -> None:
    """User report 23: two nodes see the same sizes, times and bytes after their time, round after round."""
    place = board.place("quick", "agree")
    url = board.cluster("one").url + place.path
    with board.own(url, tmp_path, *QUICK) as other:
        for turn in range(4):
            data = os.urandom(10 + turn * 1000)
            (place.source / "f").write_bytes(data)
            for root in (place.shown, other.root):
                eventually(lambda root=root, data=data: shows(root, {"f": data}), f"turn {turn}")
            first, second = os.stat(place.shown / "f"), os.stat(other.root / "f")
            assert (first.st_ino, first.st_size, first.st_mtime_ns) == (
                second.st_ino,
                second.st_size,
                second.st_mtime_ns,
            )


IN_CHANGES = 0x00000002 | 0x00000004 | 0x00000040 | 0x00000080 | 0x00000100 | 0x00000200
"""IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE."""


def test_mount_freshness_inotify_does_not_see_changes_made_elsewhere(board: Board) -> None:
    """S15; user report 60: documented, so that nobody waits for it."""
    place = board.place("folder", "watched")
    source, shown = place.source, place.shown
    (source / "f").write_bytes(b"old")
    place.refresh()
    assert (shown / "f").read_bytes() == b"old"
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        assert libc.inotify_add_watch(watcher, os.fsencode(shown), IN_CHANGES) >= 0
        (source / "g").write_bytes(b"new")
        replace(source / "f", b"changed")
        place.refresh()
        assert shows(shown, {"f": b"changed", "g": b"new"})
        assert select.select([watcher], [], [], 0)[0] == []
    finally:
        os.close(watcher)
