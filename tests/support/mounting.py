"""A real mount by the real command: `Mount` starts it, waits for it, and takes it down in one of two ways.

`umount()` is strict: the command must succeed, the daemon must exit with 0, nothing may stay mounted.
`cleanup()` is for the way out of a failure: it takes down what it can and never raises. Used as a context
manager, a Mount does the first after success and the second after an exception.

What the daemon wrote to standard error is copied to the test's own, where the log-noise check reads it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

START_S = 60.0
"""Six processes on a machine that has other work to do."""
STOP_S = 15.0
LAST_WORDS_S = 1.0
"""After a failure: time for the daemon to write why."""
POLL_S = 0.05


_SYSTEM_UMOUNT = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]


def skip_reason() -> str | None:
    """Why nothing can be mounted here, in words; None when it can."""
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (Debian package fuse3)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/fuse can't be opened: {error.strerror}"
    return None


needs_fuse = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")
"""Marker for tests that mount."""


PYTHON_VARIABLE = "FUSECACHE_TEST_PYTHON"
"""Names another Python to run `fusecache` with (`tests.support.reachable`)."""


def command() -> list[str]:
    """The installed `fusecache`, or the module where only the sources are on the path."""
    if other := os.environ.get(PYTHON_VARIABLE):
        return [other, "-m", "fusecache"]
    installed = Path(sys.executable).with_name("fusecache")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "fusecache"]


def is_mounted(mountpoint: Path) -> bool:
    """Whether mountinfo lists it; a stat of a dead or stuck mount could hang."""
    escaped = str(mountpoint).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == escaped for line in lines)


class Mount:
    """One `fusecache mount SOURCE MOUNTPOINT` process and its mount."""

    def __init__(
        self,
        source: str,
        mountpoint: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.mountpoint = mountpoint
        self.flags: Sequence[str] = flags
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.by_command = True
        """Whether `umount()` is `fusecache umount`, or the system's own umount, which takes a fifth of the time."""
        self._stderr_path = mountpoint.parent / f".{mountpoint.name}.stderr"
        self._copied_bytes = 0

    def __enter__(self) -> Mount:
        try:
            self.start()
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.umount()
            except BaseException:
                self.cleanup()
                raise
        else:
            time.sleep(LAST_WORDS_S)
            self.cleanup()

    def start(self) -> None:
        """Run the command and wait until reads work."""
        self.mountpoint.mkdir(exist_ok=True)
        self._copied_bytes = 0
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command(), "mount", self.source, str(self.mountpoint), *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self.environment,
            )
        deadline = time.monotonic() + START_S
        while not is_mounted(self.mountpoint):
            code = self.process.poll()
            assert code is None, f"the mount command ended with {code} before it mounted: {self.stderr()}"
            assert time.monotonic() < deadline, f"not mounted after {START_S} s: {self.stderr()}"
            time.sleep(POLL_S)
        # Mounted is not yet served: the root must answer. In a child, because a stuck mount can't be interrupted.
        subprocess.run(["stat", str(self.mountpoint)], check=True, timeout=START_S, stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self.process is not None
        return self.process.pid

    def stderr(self) -> str:
        """Everything the daemon has written so far."""
        if not self._stderr_path.exists():
            return ""
        return self._stderr_path.read_text(errors="replace")

    def umount(self) -> None:
        """Strict: the command exits 0, the daemon exits 0 in time, nothing stays mounted."""
        assert self.process is not None
        unmount = [*command(), "umount"] if self.by_command else _SYSTEM_UMOUNT
        deadline = time.monotonic() + STOP_S
        while True:
            done = subprocess.run(
                [*unmount, str(self.mountpoint)], capture_output=True, timeout=STOP_S, env=self.environment, check=False
            )
            # The files of a process that was killed a moment ago may still be open.
            if b"busy" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        assert done.returncode == 0, f"umount exited with {done.returncode}: {done.stderr.decode(errors='replace')}"
        code = self.process.wait(timeout=STOP_S)
        self.copy_stderr()
        assert code == 0, f"the daemon exited with {code}: {self.stderr()}"
        assert not is_mounted(self.mountpoint), "still mounted after umount"

    def kill(self) -> None:
        """SIGKILL the daemon: a dead mount stays."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=STOP_S)

    def cleanup(self) -> None:
        """Forgiving: take down what is there; never raises."""
        if is_mounted(self.mountpoint):
            subprocess.run(["fusermount3", "-u", "-z", str(self.mountpoint)], capture_output=True, check=False)
        if self.process is not None and self.process.poll() is None:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                self.process.send_signal(sent)
                try:
                    self.process.wait(timeout=LAST_WORDS_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        self.copy_stderr()

    def copy_stderr(self) -> None:
        """What the daemon has written since the last call, to the test's own standard error."""
        text = self.stderr()
        sys.stderr.write(text[self._copied_bytes :])
        self._copied_bytes = len(text)


def tree_digests(folder: Path | str) -> dict[bytes, str]:
    """Path below `folder` -> "folder", or a file's length and sha256. For comparisons that say what differs."""
    found: dict[bytes, str] = {}
    top = os.fsencode(folder)

    def add(relative: bytes) -> None:
        with os.scandir(os.path.join(top, relative)) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            path = os.path.join(relative, entry.name)
            if entry.is_dir(follow_symlinks=False):
                found[path] = "folder"
                add(path)
            else:
                with open(entry.path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256")
                    found[path] = f"{os.fstat(file.fileno()).st_size} {content.hexdigest()}"

    add(b"")
    return found


def sha256_tree(folder: Path | str) -> str:
    """One digest over every name, kind, length and byte below `folder`, in byte order of names."""
    return hashlib.sha256(repr(list(tree_digests(folder).items())).encode()).hexdigest()
