"""One mount as the supervisor holds it: the session's descriptor, the gate's clone, INIT, and the way down.

The supervisor never answers a request. It keeps the session's descriptor, so that the connection outlives the gate, and
a duplicate of the gate's clone, so that requests which a dead gate had read can be put back (FUSE_NOTIFY_RESEND) before
the clone is closed. Where the kernel can't resend, closing it answers them ECONNABORTED; requests that no gate had read
yet wait for the next gate in either case.

INIT is read through the first clone, because its answer has to be written where it was read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import select
import time
from collections.abc import Iterator
from typing import Any, Final

from fusecache.errors import MountError
from fusecache.kernel import device, init_message
from fusecache.kernel.spec import MountSpec

INIT_S: Final = 10.0
"""Seconds for the kernel's INIT after mount(2); it is there at once."""

LOCK_S: Final = 30.0
LOCK_POLL_S: Final = 0.05


class MountSession:
    """From mount(2) to the end of the connection. MountError when the kernel refuses; nothing is left mounted then."""

    def __init__(self, spec: MountSpec, open_mode: str) -> None:
        self.mountpoint = os.path.realpath(spec.mountpoint)
        self.open_mode = open_mode
        self.initialised = False
        """Whether INIT was answered; a gate that is started later drops its workers' answers."""

        self.device_number = ""
        """major:minor in mountinfo."""

        self._session: int | None = device.open_device()
        self._clone: int | None = None
        self._mounted = False
        try:
            with _claimed(spec.mount_lock):
                self._refuse_a_second_mount()
                device.mount(
                    self._session,
                    self.mountpoint,
                    spec.fsname,
                    allow_other=spec.allow_other,
                    max_read_bytes=spec.max_read_bytes,
                )
                self._mounted = True
                self.device_number = device.mounts_at(self.mountpoint)[-1].device
            self._clone = self._cloned()
            sent = device.read_init(self._clone, INIT_S)
            self.shown_init = init_message.masked_request(sent, spec.masked_features)
            """What every worker is shown."""
            self.plan = init_message.plan_for(
                self.shown_init,
                passthrough=open_mode == "passthrough",
                max_read_bytes=spec.max_read_bytes,
                read_ahead_bytes=spec.read_ahead_bytes,
                max_background=spec.max_background,
                congestion_threshold=spec.congestion_threshold,
            )
        except init_message.InitError as failure:
            self._undo()
            raise MountError(f"{self.mountpoint!r} can't be served: {failure}") from None
        except BaseException:
            self._undo()
            raise

    @property
    def gate_device(self) -> int:
        """The clone of the present gate."""
        assert self._clone is not None
        return self._clone

    def gate_settings(self) -> dict[str, Any]:
        """What the gate must know about INIT."""
        return {
            "init": self.shown_init.hex(),
            "init_plan": dataclasses.asdict(self.plan),
            "initialised": self.initialised,
        }

    def renew_gate_device(self, *, resend: bool) -> None:
        """After a gate's death: save what it had read, then a fresh clone. MountError when the kernel refuses."""
        assert self._clone is not None
        if resend and self._session is not None:
            with contextlib.suppress(OSError):  # the connection has ended meanwhile: nothing is left to save
                device.resend(self._session)
        os.close(self._clone)
        self._clone = None
        self._clone = self._cloned()

    def is_connected(self) -> bool:
        """False once the kernel has ended the connection: unmounted everywhere, or aborted."""
        if self._session is None:
            return False
        poll = select.poll()
        poll.register(self._session, 0)
        return not any(events & select.POLLERR for _, events in poll.poll(0))

    def is_mounted(self) -> bool:
        """Whether our mount is there, and the topmost on its mount point: only then may the place be unmounted."""
        mounts = device.mounts_at(self.mountpoint) if self._mounted else []
        return bool(mounts) and mounts[-1].device == self.device_number

    def end_connection(self) -> None:
        """Close every descriptor held here: whoever waits gets an error, unless somebody else still holds one."""
        for descriptor in (self._clone, self._session):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._clone = self._session = None

    def _undo(self) -> None:
        if self.is_mounted():
            with contextlib.suppress(OSError):
                device.unmount(self.mountpoint, lazy=True)
        self.end_connection()

    def _refuse_a_second_mount(self) -> None:
        """The daemon has looked before; between that look and now another mount may have come."""
        if mounts := device.mounts_at(self.mountpoint):
            raise MountError(
                f"mount point {self.mountpoint!r} has a mount of type {mounts[-1].fs_type} on it; unmount that first"
            )

    def _cloned(self) -> int:
        assert self._session is not None
        try:
            return device.clone(self._session)
        except OSError as failure:
            raise MountError(f"the ioctl FUSE_DEV_IOC_CLONE failed: {failure.strerror}") from None


@contextlib.contextmanager
def _claimed(lock_file: str | None) -> Iterator[None]:
    """Hold the lock that everybody holds who mounts there. MountError when it is not free in time."""
    if lock_file is None:
        yield
        return
    deadline = time.monotonic() + LOCK_S
    try:
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as failure:
        raise MountError(f"lock file {lock_file!r} can't be opened: {failure.strerror}") from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MountError(
                        f"another process has been mounting there for {LOCK_S:.0f} s (lock file {lock_file!r})"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
