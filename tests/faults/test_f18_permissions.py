"""F18: permission abuse. Another user reads what is cached, a setuid program and a device are served, the mount's own
folder is written to, and folders lie ready that somebody else has a hand in.

Elsewhere: descriptors that must not be registered (tests/t1_rpc/test_gate.py), links out of the source
(tests/t4_mount/test_mount_attributes.py), every kind of folder (tests/t0_pure/test_own_folders.py).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.daemon.control_client import socket_path
from fusecache.kernel.probe import probe
from tests.support.command import error_line, fusecache
from tests.support.mounting import needs_fuse
from tests.support.reachable import STRANGER, as_user, needs_root
from tests.support.stand_in_worker import CONTENT
from tests.support.supervised import Supervised, until
from tests.t4_mount.board import MEMORY
from tests.t4_mount.live_mount import EmbeddedProcess, errno_of, eventually, live_mount
from tests.t4_mount.modes import MODES, unavailable

OWNER = 64_003
SECRET = b"secret" * 10_000
DENIED = "Permission denied"

pytestmark = [needs_fuse, needs_root]


@pytest.mark.parametrize("mode", ["no-open", "passthrough"])
def test_f18_another_user_can_not_read_a_file_of_0600_that_is_cached(reachable: Path, mode: str) -> None:
    """S11: not while its owner has it open and mapped, not when the kernel reads its block file by itself."""
    if why := unavailable(MODES[mode]):
        pytest.skip(why)
    source, state = reachable / "source", MEMORY / reachable.name
    source.mkdir()
    for name, permissions in (("secret", 0o600), ("open", 0o644)):
        (source / name).write_bytes(SECRET)
        (source / name).chmod(permissions)
        os.chown(source / name, OWNER, OWNER)
    flags = ("--immutable", "--owner-map", f"{OWNER}={OWNER}", "--group-map", f"{OWNER}={OWNER}")
    with (
        EmbeddedProcess(source, state, "--block-size-bytes", "1MiB") as server,
        live_mount(server.url, reachable / "m", *MODES[mode].flags, *flags) as mount,
    ):
        path = mount.root / "secret"

        def read_by_root() -> None:
            assert path.read_bytes() == SECRET

        read_by_root()
        assert path.stat().st_uid == OWNER
        assert as_user(OWNER, ["cat", path]).stdout.encode() == SECRET
        if mode == "passthrough":
            eventually(lambda: (read_by_root(), mount.passthrough_opens() > 0)[1], "the kernel reads the block itself")
        with path.open("rb") as held, mmap.mmap(held.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == SECRET
            # The mount lets strangers in, or their refusal shows nothing.
            assert as_user(STRANGER, ["cat", mount.root / "open"]).stdout.encode() == SECRET
            refused = as_user(STRANGER, ["cat", path])
            assert (refused.stdout, refused.stderr.rpartition(": ")[2].strip()) == ("", DENIED)
            assert as_user(STRANGER, ["head", "-c1", path]).returncode != 0
        assert as_user(STRANGER, ["cat", path]).stdout == ""
    shutil.rmtree(state)


@pytest.fixture
def hostile(reachable: Path) -> Supervised:
    """A mount whose workers show a setuid program of root's and a device, and offer a file of the mount itself."""
    features = probe()
    if not features.usable("mount"):
        pytest.skip(features["mount"].why)
    mount = Supervised(reachable, features, worker_argv=(sys.executable, "-S", "-m", "tests.support.hostile_worker"))
    shutil.copy("/usr/bin/id", mount.orders / "program")
    return mount


def test_f18_a_setuid_program_has_no_effect(hostile: Supervised) -> None:
    """nosuid: the bit is there, and nobody becomes root by it."""
    with hostile as mount:
        mount.start()
        program = mount.mountpoint / "setuid"
        assert program.stat().st_mode & stat.S_ISUID
        assert program.stat().st_uid == 0
        assert as_user(STRANGER, [program, "-u"]).stdout == f"{STRANGER}\n"


def test_f18_a_device_node_can_not_be_opened(hostile: Supervised) -> None:
    """nodev: by nobody, root included."""
    with hostile as mount:
        mount.start()
        device = mount.mountpoint / "device"
        assert stat.S_ISCHR(device.stat().st_mode)
        assert device.stat().st_rdev == os.makedev(1, 5)
        assert errno_of(lambda: os.open(device, os.O_RDONLY)) == errno.EACCES
        assert DENIED in as_user(STRANGER, ["head", "-c1", device]).stderr


def test_f18_a_file_of_the_mount_itself_is_not_looked_at(hostile: Supervised) -> None:
    """The gate would wait for its own answer: nobody could read any more."""
    with hostile as mount:
        mount.start()
        until(lambda: all(part["ready"] for name, part in mount.parts().items() if "worker" in name), "two workers")
        assert mount.read("mirror").stdout == CONTENT
        assert mount.read("file").stdout == CONTENT
        assert mount.parts()["gate"]["restarts"] == 0


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda folder: (folder / "new").touch(),
    "write": lambda folder: (folder / "version").write_bytes(b"9"),
    "truncate": lambda folder: os.truncate(folder / "stats", 0),
    "remove": lambda folder: (folder / "config").unlink(),
    "rename": lambda folder: (folder / "config").rename(folder / "old"),
    "chmod": lambda folder: (folder / "config").chmod(0o777),
    "chown": lambda folder: os.chown(folder / "config", 5, 5),
    "mkdir": lambda folder: (folder / "sub").mkdir(),
    "symlink": lambda folder: (folder / "link").symlink_to("/etc/passwd"),
    "rmdir": lambda folder: folder.rmdir(),
    "setxattr": lambda folder: os.setxattr(folder / "config", "user.a", b"b"),
}


def test_f18_the_mounts_own_folder_can_not_be_changed(reachable: Path) -> None:
    """S13, S17: by root neither."""
    source = reachable / "source"
    source.mkdir()
    with live_mount(source, reachable / "m") as mount:
        folder = mount.root / ".fusecache"
        before = (folder / "version").read_bytes()
        answers = {what: errno_of(lambda change=change: change(folder)) for what, change in CHANGES.items()}
        assert answers == dict.fromkeys(CHANGES, errno.EROFS)
        assert (folder / "version").read_bytes() == before
        as_stranger = as_user(STRANGER, ["touch", folder / "new"])
        assert "Read-only file system" in as_stranger.stderr or DENIED in as_stranger.stderr


def link_to_ours(folder: Path) -> None:
    folder.with_name("target").mkdir()
    folder.symlink_to("target")


def strangers(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize(
    ("folder", "make", "why", "flags"),
    [
        ("state", link_to_ours, "is a symbolic link", ()),
        ("state", link_to_ours, "is a symbolic link", ("--daemon",)),
        ("state", strangers, f"belongs to uid {STRANGER}", ()),
        ("state", open_to_all, "has mode 0777", ("--open-mode", "classic")),
        ("state/metadata", strangers, f"belongs to uid {STRANGER}", ()),
        ("run", link_to_ours, "is a symbolic link", ()),
        ("run", strangers, f"belongs to uid {STRANGER}", ()),
        ("{sockets}", link_to_ours, "is a symbolic link", ()),
        ("{sockets}", strangers, f"belongs to uid {STRANGER}", ()),
        ("{sockets}/takeover", link_to_ours, "is a symbolic link", ()),
        ("{sockets}/takeover", strangers, f"belongs to uid {STRANGER}", ()),
        ("{sockets}/takeover", open_to_all, "has mode 0777", ()),
    ],
)
def test_f18_folders_that_lie_ready_stop_the_start_with_one_line(
    tmp_path: Path, folder: str, make: Callable[[Path], None], why: str, flags: tuple[str, ...]
) -> None:
    """S39: exit code 4, nothing mounted, nothing put into the folder; a daemon does not even write its log there."""
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    place = tmp_path / folder.format(sockets=socket_path(tmp_path / "run", tmp_path / "mnt").parent)
    place.parent.mkdir(parents=True, exist_ok=True)
    make(place)
    done = fusecache("mount", *flags, tmp_path / "source", tmp_path / "mnt", state=tmp_path)
    line = error_line(done, 4)
    assert f"{place} {why}" in line
    assert list(place.iterdir()) == []
    assert subprocess.run(["mountpoint", "-q", str(tmp_path / "mnt")], check=False).returncode != 0
