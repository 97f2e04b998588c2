"""/dev/fuse and mount(2): open, mount, read INIT, clone, tell the kernel to resend; look at mounts, take them down.

The mount is made without fusermount3, which needs CAP_SYS_ADMIN in the mount namespace. Descriptors of the device are
O_CLOEXEC: whoever inherits one keeps a dead connection alive, and its callers waiting unkillably.

A connection ends when its last descriptor is closed, or when the last mount of it is gone. A request belongs to the
clone that read it: closing that clone answers it ECONNABORTED, and its answer must be written there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import select
import struct
from typing import Final, NamedTuple

from fusecache.errors import MountError

FUSE_DEVICE: Final = "/dev/fuse"
FS_TYPE: Final = "fuse.fusecache"

DEV_IOC_CLONE: Final = 0x8004E500
"""FUSE_DEV_IOC_CLONE = _IOR(229, 0, uint32_t)."""

BACKING_OPEN: Final = 0x4010E501
"""FUSE_DEV_IOC_BACKING_OPEN = _IOW(229, 1, struct fuse_backing_map)."""

BACKING_MAP: Final = struct.Struct("<iIQ")
"""struct fuse_backing_map: descriptor, flags, padding."""

BACKING_CLOSE: Final = 0x4004E502
"""FUSE_DEV_IOC_BACKING_CLOSE = _IOW(229, 2, uint32_t)."""

NOTIFY_STORE: Final = 4
NOTIFY_RESEND: Final = 7
OUT_HEADER: Final = struct.Struct("<IiQ")
"""struct fuse_out_header; a notification has its code as error and 0 as unique."""

MAX_REQUEST_BYTES: Final = 1 << 17
"""Room for the first request: the kernel refuses reads into less than 8 KiB (FUSE_MIN_READ_BUFFER)."""

CONTROL_FOLDER: Final = "/sys/fs/fuse/connections"

_CLONE_NEWNS: Final = 0x00020000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000
_MS_RDONLY: Final = 1
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8

_libc = ctypes.CDLL(None, use_errno=True)


class Mounted(NamedTuple):
    """One mount in mountinfo."""

    device: str
    """major:minor."""

    fs_type: str
    mountpoint: bytes


def open_device() -> int:
    """A descriptor of /dev/fuse of its own session. MountError says what is missing."""
    try:
        return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        raise MountError(
            f"{FUSE_DEVICE} can't be opened: {failure.strerror}; load the module (modprobe fuse), in a container allow "
            "the device"
        ) from None


def mount(device: int, mountpoint: str, fsname: str, *, allow_other: bool, max_read_bytes: int) -> None:
    """mount(2), read-only. MountError names mount point and reason. The kernel then waits for INIT's answer.

    `ro` because a stat after a read then stays in the kernel (a writable mount forgets the access time at every read).
    """
    options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    options += f",max_read={max_read_bytes}"
    if allow_other:
        options += ",allow_other"
    flags = _MS_NOSUID | _MS_NODEV | _MS_RDONLY
    # A NUL would end the text for the kernel; mountinfo escapes everything else.
    source = os.fsencode(fsname).replace(b"\0", b"?")
    if _libc.mount(source, os.fsencode(mountpoint), FS_TYPE.encode(), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        advice = "; mount(2) needs CAP_SYS_ADMIN" if number == errno.EPERM else ""
        raise MountError(f"{mountpoint!r} can't be mounted on: {os.strerror(number)}{advice}")


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """umount2(2). OSError with the kernel's errno: EBUSY while files are open and it is not lazy, EINVAL = no mount."""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    _check(_libc.umount2(os.fsencode(mountpoint), flags))


def abort(device_number: str) -> None:
    """End a connection whose descriptors somebody still holds: its callers get errors. OSError.

    Through the control file system, which is mounted for it: only in a process of its own, which gets its own mounts.
    """
    major, _, minor = device_number.partition(":")
    connection = int(major) << 20 | int(minor)  # struct fuse_conn's dev, the kernel's own dev_t
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    _check(_libc.mount(b"none", CONTROL_FOLDER.encode(), b"fusectl", ctypes.c_ulong(0), None))
    with open(f"{CONTROL_FOLDER}/{connection}/abort", "w") as file:
        file.write("1")


def read_init(device: int, timeout_s: float) -> bytes:
    """The kernel's first request on a fresh mount. MountError when it does not come in time."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        raise MountError(f"the kernel sent no INIT within {timeout_s:.0f} s of mount(2)")
    try:
        return os.read(device, MAX_REQUEST_BYTES)
    except OSError as failure:
        raise MountError(f"the kernel's INIT can't be read: {failure.strerror}") from None


def clone(session: int) -> int:
    """Another descriptor of the same connection with its own list of requests being answered. OSError."""
    descriptor = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, DEV_IOC_CLONE, struct.pack("<I", session))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def resend(session: int) -> None:
    """FUSE_NOTIFY_RESEND: put every request that was read and not answered, on any clone, back into the queue.

    They come again with bit 63 of the unique set. OSError (EINVAL) on a kernel before 6.9.
    """
    os.write(session, OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0))


class MountTable:
    """/proc/self/mountinfo, kept open: who has no descriptor left must still be able to take a mount down."""

    def __init__(self) -> None:
        """MountError when it can't be opened."""
        try:
            self._file = open("/proc/self/mountinfo", "rb", buffering=0)  # noqa: SIM115 - until `close`
        except OSError as failure:
            raise MountError(f"what is mounted can't be looked at: {failure.strerror}") from None

    def at(self, mountpoint: str) -> list[Mounted]:
        """What is mounted exactly there (absolute, no symbolic links), the topmost last. Touches no mount."""
        wanted = os.fsencode(mountpoint)
        self._file.seek(0)
        mounts = map(_parsed, self._file.readall().split(b"\n"))
        return [mount for mount in mounts if mount is not None and mount.mountpoint == wanted]

    def close(self) -> None:
        """Once nothing is mounted here any more."""
        self._file.close()


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _parsed(line: bytes) -> Mounted | None:
    """One line of mountinfo (man 5 proc); None when it is none."""
    left, separator, right = line.partition(b" - ")
    fields, kind = left.split(b" "), right.split(b" ")
    if not separator or len(fields) < 6:
        return None
    place = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8) & 0xFF,)), fields[4])
    return Mounted(fields[2].decode("ascii", "replace"), kind[0].decode("ascii", "replace"), place)
