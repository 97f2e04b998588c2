"""The pyfuse3 session of this process: mount, serve, end. pyfuse3 keeps one session per process, so this does too.

Mount options: `default_permissions` (the kernel checks mode bits), `ro` (stat after read stays in the kernel: measured
17 times faster than on a writable mount, which forgets the access time at every read), `nosuid,nodev`, fsname and
subtype (`fuse.fusecache` in mountinfo, by which everything finds our mounts), `allow_other` when asked and permitted.
`max_read` is not among them: libfuse refuses it together with pyfuse3's INIT, and 1 MiB requests come without it.

Decides nothing about requests (`operations`) and nothing about mount points (`daemon.mountpoint`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pyfuse3
import structlog

from fusecache.config.settings import Settings
from fusecache.errors import MountError
from fusecache.fs import request_wait
from fusecache.fs.invalidation import Push

log = structlog.get_logger(__name__)

FS_SUBTYPE = "fusecache"

MAX_TASKS = 100
"""Concurrent requests of one mount; the kernel sends at most 12 background ones and one per waiting thread more."""


def mount_options(settings: Settings, fsname: str, *, other_users: bool) -> set[str]:
    """Options for pyfuse3.init; `fsname` is shown in mountinfo (commas can't be passed and become `;`)."""
    shown = fsname.replace("\\", "/").replace(",", ";").encode("ascii", "replace").decode()
    options = {"default_permissions", "ro", "nosuid", "nodev", f"fsname={shown}", f"subtype={FS_SUBTYPE}"}
    if other_users:
        options.add("allow_other")
    return options


class Session:
    """The mount of this process, from `open` to `close`."""

    def __init__(self, operations: pyfuse3.Operations, mountpoint: Path, *, spin_us: int) -> None:
        self._operations = operations
        self._spin_us = spin_us
        self._mountpoint = mountpoint
        self._open = False

    def open(self, options: set[str]) -> None:
        """mount(2); from now on requests of the kernel wait for `serve`. MountError when it is refused."""
        if not os.path.exists("/dev/fuse"):
            raise MountError(
                "/dev/fuse does not exist: load the kernel's module (modprobe fuse) or give the container the device"
            )
        try:
            pyfuse3.init(self._operations, str(self._mountpoint), options)
        except RuntimeError as error:
            raise MountError(
                f"{self._mountpoint}: the kernel or fusermount3 refused the mount ({error}); "
                "its own message stands above, `fusecache doctor` checks what it needs"
            ) from None
        self._open = True

    def attach(self, descriptor: int) -> None:
        """Serve what another process has mounted: the kernel's requests come over `descriptor`.

        libfuse takes /dev/fd/N for a mount point; `default_permissions` is then an option of that mount.
        """
        pyfuse3.init(self._operations, f"/dev/fd/{descriptor}", set(pyfuse3.default_options) - {"default_permissions"})
        self._open = True

    async def serve(self) -> None:
        """Answer requests until the mount, or the gate, is gone or `stop` is called."""
        request_wait.install(self._spin_us / 1e6)
        try:
            await pyfuse3.main(min_tasks=8, max_tasks=MAX_TASKS)
        except* ConnectionAbortedError:
            # The mount ended while a request was being taken from the device: most often the RELEASE of a file that was
            # closed just before. Otherwise the kernel says ENODEV, which libfuse takes for the end by itself.
            pass

    def stop(self) -> None:
        """Let `serve` return once what is in flight is answered; on the loop's thread."""
        pyfuse3.terminate()

    def close(self, *, unmount: bool) -> None:
        """Free the session; `unmount` when its mount is still there: libfuse unmounts whatever has the mount point."""
        if self._open:
            self._open = False
            pyfuse3.close(unmount=unmount)


def notify(push: Push) -> None:
    """Make the kernel forget a name, attributes, or attributes and pages, through libfuse. OSError when it refuses."""
    kind, inode, name = push
    if kind == "entry":
        pyfuse3.invalidate_entry(pyfuse3.InodeT(inode), pyfuse3.FileNameT(name))
    else:
        pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=kind == "attributes")


def set_read_ahead(device: str, read_ahead_bytes: int) -> bool:
    """The kernel's read-ahead for device "MAJ:MIN"; False where this process may not set it.

    With the default of 128 KiB a cold sequential read takes eight times as many requests as with 1 MiB, and 0.85 s of
    this process's time a GB instead of 0.54 s (measured).
    """
    setting = Path(f"/sys/class/bdi/{device}/read_ahead_kb")
    try:
        setting.write_text(str(read_ahead_bytes >> 10))
    except OSError as error:
        log.info("read-ahead stays at the kernel's default", device=device, reason=error.strerror)
        return False
    return True
