"""Mount points from outside: what is mounted where, is it alive, take it down. Standard library only.

The rule here: never touch a mount to learn about it. A `stat` on a mount whose daemon hangs puts the caller
into uninterruptible sleep, and no timeout helps. What is mounted is read from /proc/self/mountinfo; whether
it answers is found out by a child process that can be given up (`probe`); paths are resolved component by
component and never past a mount point of FUSE (`resolve`).

Who serves a mount is not known here (`daemon.control` asks it).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from fusecache.config.source import folder_here
from fusecache.errors import MountError, StateError
from fusecache.kernel.lock_file import lock_within, open_lock

OUR_TYPE = "fuse.fusecache"
PROBE_S = 5.0
"""Seconds after which a mount that does not answer counts as hung, before it is replaced."""

COMMAND_S = 10.0
"""Seconds one unmounting command may take."""

CLAIM_S = 60.0
"""Longer than looking at a mount that hangs, detaching it and mounting take."""

POLL_S = 0.1
FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
FUSE_DEVICE_NUMBER = (10, 229)
"""Major and minor number, fixed by the kernel (Documentation/admin-guide/devices.txt)."""

_MNT_FORCE = 1
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_MAX_LINKS = 40
"""Symbolic links followed in one path, as the kernel's limit."""

_MAX_STACKED = 16
"""Dead mounts of ours taken off one mount point before giving up."""

# Both scripts run isolated (-I) and without site packages (-S): 15 ms instead of 40.
_STATFS_SCRIPT = """
import os, sys
try: os.stat(sys.argv[1]); os.statvfs(sys.argv[1])
except OSError as failure: sys.exit(failure.errno)
"""
_READ_SCRIPT = """
import sys
with open(sys.argv[1], "rb") as file: sys.stdout.buffer.write(file.read(1 << 20))
"""
_UMOUNT_SCRIPT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.umount2(os.fsencode(sys.argv[1]), int(sys.argv[2])): sys.exit(os.strerror(ctypes.get_errno()))
"""

Health = Literal["ok", "dead", "hung"]


class MountInfo(NamedTuple):
    """One line of /proc/self/mountinfo (man 5 proc)."""

    mount_id: int
    device: str
    """major:minor."""
    fs_type: str
    source: str
    mountpoint: bytes
    options: str
    """Mount and superblock options, separated by commas."""

    @property
    def owner(self) -> int | None:
        """The user who mounted it (FUSE's user_id option), None for other file systems."""
        match = re.search(r"(?:^|,)user_id=(\d+)", self.options)
        return int(match[1]) if match else None


def all_mounts() -> list[MountInfo]:
    """Everything mounted in this namespace, in order: a later one on the same mount point hides the earlier."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n"):  # a name may have other ends of lines in it
        before, separator, after = line.partition(b" - ")
        left, right = before.split(b" "), after.split(b" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        mounts.append(
            MountInfo(
                mount_id=int(left[0]),
                device=left[2].decode("ascii"),
                fs_type=right[0].decode("ascii", "replace"),
                source=os.fsdecode(_unescaped(right[1])),
                mountpoint=_unescaped(left[4]),
                options=os.fsdecode(left[5] + b"," + right[2]),
            )
        )
    return mounts


def our_mounts() -> list[MountInfo]:
    """All mounts of fusecache, visible ones only."""
    visible = {mount.mountpoint: mount for mount in all_mounts()}
    return [mount for mount in visible.values() if is_ours(mount)]


def find_mount(path: Path) -> MountInfo | None:
    """What is mounted exactly at `path` (the topmost), None when nothing is."""
    wanted = resolve(path)
    found = None
    for mount in all_mounts():
        if mount.mountpoint == wanted:
            found = mount
    return found


def containing_mount(path: Path) -> tuple[MountInfo, bytes] | None:
    """The mount that `path` lies in, and the rest of the path below it (b"" for the mount point itself)."""
    wanted = resolve(path)
    best: MountInfo | None = None
    for mount in all_mounts():
        inside = wanted == mount.mountpoint or wanted.startswith(mount.mountpoint.rstrip(b"/") + b"/")
        if inside and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    if best is None:
        return None
    return best, wanted[len(best.mountpoint.rstrip(b"/")) :].lstrip(b"/")


def is_ours(info: MountInfo) -> bool:
    """True for a mount of fusecache."""
    return info.fs_type == OUR_TYPE


def resolve(path: Path) -> bytes:
    """Absolute path without symbolic links up to the first FUSE mount point on the way; the rest as given.

    No system call goes into a FUSE mount. Components that don't exist are kept.
    """
    fuse_points = {mount.mountpoint for mount in all_mounts() if mount.fs_type.startswith("fuse")}
    base = "/" if path.is_absolute() else folder_here(path)
    rest = [part for part in os.fsencode(os.path.join(base, path)).split(b"/") if part]
    done: list[bytes] = []
    links = 0
    while rest:
        part = rest.pop(0)
        if part == b".":
            continue
        if part == b"..":
            done = done[:-1]
            continue
        candidate = b"/" + b"/".join([*done, part])
        if candidate in fuse_points:
            return os.path.normpath(b"/".join([candidate, *rest]))
        try:
            target = os.readlink(candidate)
        except OSError:
            done.append(part)  # not a link, or not there
            continue
        links += 1
        if links > _MAX_LINKS:
            raise MountError(f"{str(path)!r} leads through more than {_MAX_LINKS} symbolic links")
        rest = [*(step for step in target.split(b"/") if step), *rest]
        if target.startswith(b"/"):
            done = []
    return b"/" + b"/".join(done)


def probe(path: Path, timeout_s: float) -> Health:
    """Does the mount at `path` answer? `dead` = its daemon is gone, `hung` = no answer in time.

    Asked by stat and statvfs: the kernel answers a stat from its cache for as long as the daemon once allowed, also
    after the daemon's death, but it never keeps statvfs.
    An error other than ENOTCONN is an answer (EACCES: a private mount of another user).
    """
    code, _, _ = _run_child([sys.executable, "-I", "-S", "-c", _STATFS_SCRIPT, str(path)], timeout_s)
    if code is None:
        return "hung"
    return "dead" if code in (errno.ENOTCONN, errno.ECONNABORTED) else "ok"


def remedy(health: Health, path: Path) -> str:
    """What to do about a mount at `path` that does not answer: `prepare` replaces a dead one, and no other."""
    if health == "ok":
        return ""
    return ("mount again to replace it, or " if health == "dead" else "") + f"run `fusecache umount {path}`"


def read_inside(path: Path, timeout_s: float) -> bytes | None:
    """Content of a small file inside a mount, read by a child that can be given up; None when it can't be had."""
    code, _, content = _run_child([sys.executable, "-I", "-S", "-c", _READ_SCRIPT, str(path)], timeout_s)
    return content if code == 0 else None


def detach(path: Path) -> None:
    """Lazy unmount: the name is free at once, open files keep what they have. MountError says why not."""
    _unmount_once(path, lazy=True, timeout_s=COMMAND_S)


def check_device() -> None:
    """Check that this process can use FUSE at all. MountError says what is missing and what to do."""
    try:
        status = FUSE_DEVICE.stat()
    except OSError:
        raise MountError(
            f"{FUSE_DEVICE} is missing; load the module (modprobe fuse), in a container add the device {FUSE_DEVICE}"
        ) from None
    if not stat.S_ISCHR(status.st_mode) or (os.major(status.st_rdev), os.minor(status.st_rdev)) != FUSE_DEVICE_NUMBER:
        raise MountError(
            f"{FUSE_DEVICE} is not the FUSE device (character device 10:229); in a container add the device"
        )
    try:
        os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as failure:
        raise MountError(
            f"{FUSE_DEVICE} can't be opened: {failure.strerror}; in a container allow the device, elsewhere chmod 0666"
        ) from None
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise MountError("fusermount3 is not in PATH; install the package fuse3, or run as root")


def may_allow_other(fuse_conf: Path = FUSE_CONF) -> bool:
    """Whether fusermount3 lets this user pass `allow_other`."""
    if os.geteuid() == 0:
        return True
    try:
        lines = fuse_conf.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


@contextmanager
def claim(lock_file: Path) -> Iterator[None]:
    """Wait until no other process is within `claim` of the same file. StateError when it can't be made, MountError when
    another one stays there for CLAIM_S: one that is stopped would keep everybody waiting for ever.

    Looking at a mount point and mounting there are two steps; without this, two starts at once mount on top of each
    other, and one may detach the other's fresh mount for a dead one.
    """
    try:
        lock_file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = open_lock(lock_file)
    except OSError as failure:
        raise StateError(
            f"lock file {str(lock_file)!r} can't be made: {failure.strerror}; give another --runtime-dir"
        ) from None
    try:
        if not lock_within(descriptor, CLAIM_S):
            raise MountError(
                f"another process has been at that place for {CLAIM_S:.0f} s (lock file {str(lock_file)!r})"
            )
        yield
    finally:
        os.close(descriptor)


def make_missing(path: Path) -> None:
    """Make a mount point that is not there, with the folders above it. MountError when it can't be made.

    Made by root it has no permissions (mode 0000): whoever looks while nothing is mounted on it is refused, instead of
    being shown an empty folder that looks like an empty data set. Root's own CAP_DAC_OVERRIDE still gets in.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # mkdir(2) does not cross the last component, so a dead or hung mount there is not touched.
        path.mkdir(mode=0o000 if os.geteuid() == 0 else 0o755)
    except FileExistsError:
        pass
    except OSError as failure:
        raise MountError(f"mount point {str(path)!r} can't be made: {failure.strerror}") from None


def occupied(path: Path) -> MountError:
    """For a live mount of ours that is in the way."""
    return MountError(f"mount point {str(path)!r} has a fusecache mount already; run `fusecache umount {path}` first")


def prepare(path: Path) -> bool:
    """Make sure that `path` can be mounted on; a dead mount of ours there is detached first.

    True: a mount of ours is on it, and answers. It can be taken over, or is in the way.
    MountError names the path: missing, no folder, not empty, something else mounted there, no rights.
    """
    for _ in range(_MAX_STACKED):
        mounted = find_mount(path)
        if mounted is None:
            break
        if not is_ours(mounted):
            raise MountError(
                f"mount point {str(path)!r} has {mounted.source!r} ({mounted.fs_type}) mounted on it; "
                "unmount that or give another folder"
            )
        health = probe(path, PROBE_S)
        if health == "ok":
            return True
        if health == "hung":
            raise MountError(
                f"mount point {str(path)!r} has a fusecache mount that does not answer; "
                f"run `fusecache umount {path}` first"
            )
        detach(path)
    else:
        raise MountError(
            f"mount point {str(path)!r} has more than {_MAX_STACKED} dead mounts on it; unmount them first"
        )
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise MountError(f"mount point {str(path)!r} is not a folder; give an empty folder")
        with os.scandir(path) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise MountError(f"mount point {str(path)!r} does not exist; create it (mkdir -p) and try again") from None
    except OSError as failure:
        raise MountError(f"mount point {str(path)!r} can't be used: {failure.strerror}") from None
    if first is not None:
        raise MountError(f"mount point {str(path)!r} is not empty (it holds {first.name!r}); give an empty folder")
    if os.geteuid() != 0 and not os.access(path, os.W_OK):
        raise MountError(
            f"mount point {str(path)!r} is not writable, which fusermount3 asks for; give a folder you own"
        )
    return False


def unmount(path: Path, timeout_s: float) -> Literal["unmounted", "detached", "not mounted"]:
    """Take a mount of ours down: politely until `timeout_s` is over (files may be open), then lazily.

    Dead and hung mounts too. MountError when something else is mounted there, or it can't be unmounted.
    """
    deadline = time.monotonic() + timeout_s
    path = Path(os.fsdecode(resolve(path)))  # once: `.` may be in the mount, and means nothing when that is gone
    result: Literal["unmounted", "detached", "not mounted"] = "not mounted"
    for _ in range(_MAX_STACKED):
        mounted = find_mount(path)
        if mounted is None or (result != "not mounted" and not is_ours(mounted)):
            return result
        if not is_ours(mounted):
            raise MountError(
                f"{str(path)!r} has {mounted.source!r} ({mounted.fs_type}) mounted on it, which is not ours; use umount"
            )
        step = _unmount_within(Path(os.fsdecode(mounted.mountpoint)), deadline)
        result = step if result != "detached" else result
    return result


def _unmount_within(path: Path, deadline: float) -> Literal["unmounted", "detached"]:
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            # Who waits for an answer that never comes is stuck until the connection is aborted, which MNT_FORCE
            # does; who has files open on a mount that answers keeps them.
            hung = os.geteuid() == 0 and probe(path, PROBE_S) == "hung"
            _unmount_once(path, lazy=True, force=hung, timeout_s=COMMAND_S)
            return "detached"
        try:
            _unmount_once(path, timeout_s=min(left_s, COMMAND_S))
        except _Busy:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        else:
            return "unmounted"


class _Busy(MountError):
    """Files are open below the mount, or it did not answer in time."""


def _unmount_once(path: Path, *, timeout_s: float, lazy: bool = False, force: bool = False) -> None:
    """One unmounting command in a child process. _Busy or MountError on failure."""
    if os.geteuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if force else 0)
        command = [sys.executable, "-I", "-S", "-c", _UMOUNT_SCRIPT, str(path), str(flags)]
    else:
        command = ["fusermount3", "-uz" if lazy else "-u", "--", str(path)]
    try:
        code, text, _ = _run_child(command, timeout_s)
    except FileNotFoundError:
        raise MountError("fusermount3 is not in PATH; install the package fuse3, or run as root") from None
    if code is None or (code and "busy" in text.lower()):
        raise _Busy(f"{str(path)!r} is busy: programs have files open below it")
    # Somebody else may have unmounted it between the look and the command: that is what was wanted.
    if code and find_mount(path) is not None:
        raise MountError(f"{str(path)!r} can't be unmounted: {text or f'{command[0]} ended with {code}'}")


def _run_child(command: Sequence[str], timeout_s: float) -> tuple[int | None, str, bytes]:
    """(exit code, standard error, output) of a child; the code is None when it did not end in time (it is killed)."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, text = child.communicate(timeout=timeout_s)
        return child.returncode, " ".join(text.decode(errors="replace").split()), output
    except subprocess.TimeoutExpired:
        child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(1.0)
    except subprocess.TimeoutExpired:
        # In uninterruptible sleep: it dies when the kernel answers it; somebody has to collect it then.
        threading.Thread(target=child.wait, name="give-up-probe", daemon=True).start()
    return None, "", b""


def _unescaped(field: bytes) -> bytes:
    r"""Mountinfo writes space, tab, newline and backslash as \ooo."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)
