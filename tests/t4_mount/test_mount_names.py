"""Names through the kernel: bytes, as they are, and none hides another (user reports 51 to 53)."""

from __future__ import annotations

import errno
import os

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board, Place, started
from tests.t4_mount.live_mount import errno_of

pytestmark = needs_fuse
shared_mounts = started("folder")

NAMES = [
    b"plain",
    b"\xff\xfe.jpg",
    b"\x80",
    "名前 空格.jpg".encode(),
    "コーヒー".encode(),
    b"a?b",
    b"a%2Fb",
    b"a%00b",
    b"a:b",
    b"a\\b",
    b"a#b",
    b"a&b=c;d",
    b"trailing ",
    b" leading",
    b"-leading-dash",
    b"new\nline",
    b"tab\ttab",
    b"\x01\x7f",
    b"~",
    b"*",
    b"[x]{y}",
    b"'\"`$",
    b"..hidden",
    b"...",
    b".hidden",
    b"x" * 255,
    ("長" * 85).encode(),
]


@pytest.fixture(scope="module")
def place(board: Board) -> Place:
    place = board.place("folder", "names")
    source = os.fsencode(place.source)
    for parent in (source, source + b"/d"):
        os.makedirs(parent, exist_ok=True)
        for name in NAMES:
            with open(parent + b"/" + name, "wb") as file:
                file.write(b"content of " + name)
    for name in NAMES:
        os.makedirs(source + b"/folders/" + name)
        with open(source + b"/folders/" + name + b"/" + name, "wb") as file:
            file.write(name)
    return place


def test_mount_names_are_listed_byte_for_byte(place: Place) -> None:
    """S08."""
    root = os.fsencode(place.shown)
    assert sorted(os.listdir(root + b"/d")) == sorted(NAMES)
    assert sorted(os.listdir(root)) == sorted([*NAMES, b"d", b"folders"])
    assert sorted(os.listdir(root + b"/folders")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_mount_names_are_opened_byte_for_byte(place: Place, name: bytes) -> None:
    """S08: by look-up, in folders and as folders."""
    root = os.fsencode(place.shown)
    for path in (root + b"/" + name, root + b"/d/" + name):
        assert os.stat(path).st_size == len(b"content of " + name)
        with open(path, "rb") as file:
            assert file.read() == b"content of " + name
    assert os.listdir(root + b"/folders/" + name) == [name]
    with open(root + b"/folders/" + name + b"/" + name, "rb") as file:
        assert file.read() == name


def test_mount_names_that_are_alike_are_not_taken_for_each_other(place: Place) -> None:
    """S09; user report 54: nothing is trimmed, decoded, cut at a question mark or matched without case."""
    root = os.fsencode(place.shown)
    for name in (b"trailing", b"leading", b"a", b"a/b", b"PLAIN", b"plain ", b"\xfe\xff.jpg", b"x" * 254, b"missing"):
        assert errno_of(lambda name=name: os.stat(root + b"/d/" + name)) == errno.ENOENT, name
        assert errno_of(lambda name=name: os.open(root + b"/d/" + name, os.O_RDONLY)) == errno.ENOENT, name


def test_mount_names_over_255_bytes_are_enametoolong(place: Place) -> None:
    """S09."""
    root = os.fsencode(place.shown)
    assert errno_of(lambda: os.stat(root + b"/" + b"x" * 256)) == errno.ENAMETOOLONG
    assert errno_of(lambda: os.stat(root + b"/d/" + ("長" * 86).encode())) == errno.ENAMETOOLONG
    assert os.stat(root + b"/" + b"x" * 255).st_size > 0


def test_mount_names_dot_and_dotdot_are_the_kernels(place: Place) -> None:
    root = os.fsencode(place.shown)
    assert os.stat(root + b"/d/.").st_ino == os.stat(root + b"/d").st_ino
    assert os.stat(root + b"/d/..").st_ino == os.stat(root).st_ino
    assert os.stat(root + b"/folders/plain/../..").st_ino == os.stat(root).st_ino
    assert os.stat(root + b"/..").st_ino == 1


def test_mount_names_a_file_is_no_folder(place: Place) -> None:
    root = os.fsencode(place.shown)
    assert errno_of(lambda: os.stat(root + b"/plain/x")) == errno.ENOTDIR
    assert errno_of(lambda: os.listdir(root + b"/plain")) == errno.ENOTDIR
    assert errno_of(lambda: os.open(root + b"/plain", os.O_RDONLY | os.O_DIRECTORY)) == errno.ENOTDIR
    descriptor = os.open(root + b"/d", os.O_RDONLY)
    try:
        assert errno_of(lambda: os.read(descriptor, 1)) == errno.EISDIR
    finally:
        os.close(descriptor)


def test_mount_names_paths_up_to_the_kernels_limit_work(board: Board) -> None:
    """User report 53: the longest path that can be given to a system call, 4095 bytes."""
    place = board.place("folder", "deep")
    source, shown = os.fsencode(place.source), os.fsencode(place.shown)
    names = []
    room = 4095 - max(len(source), len(shown))
    while room:
        length = min(200, room - 1) if room - 201 != 1 else 199
        names.append(b"n" * length)
        room -= length + 1
    below = b"/".join(names)
    for depth in range(1, len(names)):
        os.makedirs(source + b"/" + b"/".join(names[:depth]), exist_ok=True)
    with open(source + b"/" + below, "wb") as file:
        file.write(b"deep")
    # From the longer one's place the path is as long as a path can be.
    longest = shown + b"/" + below
    if len(longest) < 4095:
        longest = shown + b"/" * (4095 - len(longest) + 1) + below
    assert len(longest) == 4095
    with open(longest, "rb") as file:
        assert file.read() == b"deep"
    walked = shown
    for name in names:
        assert os.listdir(walked) == [name]
        walked += b"/" + name
    assert errno_of(lambda: os.stat(longest + b"/" + b"x" * 100)) == errno.ENAMETOOLONG
