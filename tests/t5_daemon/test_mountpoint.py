"""Real mounts from outside: alive, dead, hung, busy; replaced and taken down in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.daemon import mountpoint
from fusecache.errors import MountError
from tests.support.command import environment, error_line, fusecache
from tests.support.mounting import Mount, is_mounted, needs_fuse
from tests.support.process_tree import signal_all

pytestmark = needs_fuse

HUNG_S = 1.0
"""How long a stopped daemon is given before it counts as hung."""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A running mount; whatever a test leaves of it is taken away."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "photo.jpg").write_bytes(b"bytes")
    running = Mount(str(source), tmp_path / "mnt", environment=environment(tmp_path))
    try:
        running.start()
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            signal_all(running.process.pid, signal.SIGCONT)
        running.cleanup()


def test_live_mount_is_found_answers_and_is_not_mounted_over(mount: Mount, tmp_path: Path) -> None:
    found = mountpoint.find_mount(mount.mountpoint)
    assert found is not None
    assert mountpoint.is_ours(found)
    assert found.owner == os.geteuid()
    assert mountpoint.probe(mount.mountpoint, 10) == "ok"
    assert mountpoint.prepare(mount.mountpoint) is True
    other = tmp_path / "other"
    other.mkdir()
    line = error_line(fusecache("mount", other, mount.mountpoint, state=tmp_path), 3)
    assert f"run `fusecache umount {mount.mountpoint}` first" in line
    assert mountpoint.unmount(mount.mountpoint, 10) == "unmounted"
    assert mountpoint.unmount(mount.mountpoint, 10) == "not mounted"


def test_missing_mountpoint_is_made_and_an_existing_one_left_alone(mount: Mount, tmp_path: Path) -> None:
    deep = tmp_path / "deep" / "er" / "mnt"
    mountpoint.make_missing(deep)
    assert deep.stat().st_mode & 0o777 == (0 if os.geteuid() == 0 else 0o755)
    deep.chmod(0o711)
    mountpoint.make_missing(deep)
    assert deep.stat().st_mode & 0o777 == 0o711
    mount.kill()
    mountpoint.make_missing(mount.mountpoint)  # a dead mount lies on it: neither touched nor an error
    assert mountpoint.probe(mount.mountpoint, 10) == "dead"
    (tmp_path / "file").touch()
    with pytest.raises(MountError, match=r"mnt' can't be made: Not a directory"):
        mountpoint.make_missing(tmp_path / "file" / "deep" / "mnt")


def test_dead_mount_is_known_and_replaced(mount: Mount, tmp_path: Path) -> None:
    mount.kill()
    assert is_mounted(mount.mountpoint)
    assert mountpoint.probe(mount.mountpoint, 10) == "dead"
    assert "is dead; mount again" in fusecache("status", mount.mountpoint, state=tmp_path).stderr
    assert fusecache("mount", "--daemon", mount.source, mount.mountpoint, state=tmp_path).returncode == 0
    assert (mount.mountpoint / "photo.jpg").read_bytes() == b"bytes"
    assert fusecache("umount", mount.mountpoint, state=tmp_path).stdout == f"{mount.mountpoint}: unmounted\n"
    assert not is_mounted(mount.mountpoint)


def test_dead_mount_is_unmounted(mount: Mount, tmp_path: Path) -> None:
    mount.kill()
    done = fusecache("umount", mount.mountpoint, state=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{mount.mountpoint}: unmounted\n")
    assert not is_mounted(mount.mountpoint)


@pytest.mark.long
def test_hung_mount_hangs_nobody_and_is_taken_down(mount: Mount, tmp_path: Path) -> None:
    assert mount.process is not None
    signal_all(mount.process.pid, signal.SIGSTOP)
    assert mountpoint.probe(mount.mountpoint, HUNG_S) == "hung"
    shown = fusecache("status", mount.mountpoint, state=tmp_path)
    told = f"'{mount.mountpoint}' is hung; run `fusecache umount {mount.mountpoint}`"
    assert (shown.returncode, shown.stderr) == (3, f"fusecache: {told}\n")
    line = error_line(fusecache("mount", mount.source, mount.mountpoint, state=tmp_path), 3)
    assert f"run `fusecache umount {mount.mountpoint}` first" in line, "so it is no advice to mount again"
    done = fusecache("umount", "--timeout-s", "0", mount.mountpoint, state=tmp_path)
    assert done.returncode == 0
    assert not is_mounted(mount.mountpoint)


def test_busy_mount_is_detached_and_open_files_are_still_read(mount: Mount, tmp_path: Path) -> None:
    with (mount.mountpoint / "photo.jpg").open("rb") as file:
        done = fusecache("umount", "--timeout-s", "0.2", mount.mountpoint, state=tmp_path)
        assert done.returncode == 0
        assert "detached" in done.stdout
        assert not is_mounted(mount.mountpoint)
        assert file.read() == b"bytes"
    assert mount.process is not None
    assert mount.process.wait(20) == 0


def test_busy_mount_is_unmounted_once_the_file_is_closed(mount: Mount, tmp_path: Path) -> None:
    script = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(1)"
    reader = subprocess.Popen(
        [sys.executable, "-c", script, str(mount.mountpoint / "photo.jpg")], stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"\n"
    done = fusecache("umount", "--timeout-s", "60", mount.mountpoint, state=tmp_path)
    assert done.stdout == f"{mount.mountpoint}: unmounted\n"
    assert reader.wait() == 0
    reader.stdout.close()


def test_mount_through_a_link_is_found_by_both_names(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mount.mountpoint)
    assert mountpoint.find_mount(tmp_path / "link") == mountpoint.find_mount(mount.mountpoint)
    inside = mountpoint.containing_mount(tmp_path / "link" / "a" / "b")
    assert inside is not None
    assert inside[1] == b"a/b"
    assert fusecache("umount", tmp_path / "link", state=tmp_path).returncode == 0
    assert not is_mounted(mount.mountpoint)
