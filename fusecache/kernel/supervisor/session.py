"""One mount as the supervisor holds it: the session's descriptor, the gate's clone, INIT, and the way down.

The supervisor never answers a request. It keeps the session's descriptor, so that the connection outlives the gate, and
a duplicate of the gate's clone, so that requests which a dead gate had read can be put back (FUSE_NOTIFY_RESEND) before
the clone is closed. Where the kernel can't resend, closing it answers them ECONNABORTED; requests that no gate had read
yet wait for the next gate in either case.

INIT is read through the first clone, because its answer has to be written where it was read.

A connection can come from another process and go to the next one (`takeover`): it is the same then, with its INIT, its
mode and its clone, and only one of the two ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
from collections.abc import Iterator
from typing import Any, Final, Self

from fusecache.errors import MountError
from fusecache.kernel import device, init_message
from fusecache.kernel.lock_file import lock_within, open_lock
from fusecache.kernel.log import Log
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.takeover.facts import Facts
from fusecache.kernel.supervisor.tuning import set_read_ahead

INIT_S: Final = 10.0
"""Seconds for the kernel's INIT after mount(2); it is there at once."""

LOCK_S: Final = 30.0


class MountSession:
    """From mount(2), or from a take-over, to the end of the connection. Made by `mounted` or `adopted`."""

    def __init__(
        self,
        mountpoint: str,
        open_mode: str,
        *,
        mode_reason: str,
        session: int,
        clone: int,
        table: device.MountTable,
        device_number: str,
        shown_init: bytes,
        plan: init_message.InitPlan,
        allow_other: bool,
        max_read_bytes: int,
        is_ours: bool,
    ) -> None:
        """Takes over the descriptors, and the table."""
        self.mountpoint = mountpoint
        self.open_mode = open_mode
        self.mode_reason = mode_reason
        self.device_number = device_number
        """major:minor in mountinfo."""

        self.shown_init = shown_init
        """What every worker is shown."""

        self.plan = plan
        self.allow_other = allow_other
        self.max_read_bytes = max_read_bytes
        self.is_ours = is_ours
        """Whether the mount ends with this process; false before it is taken over, and after it was handed over."""

        self.initialised = not is_ours
        """Whether INIT was answered; a gate that is started later drops its workers' answers."""

        self.read_ahead_error: str | None = None
        """Why the read-ahead is the kernel's default; None: it is not."""

        self._session: int | None = session
        self._clone: int | None = clone
        self._table = table

    @classmethod
    def mounted(cls, spec: MountSpec, open_mode: str, mode_reason: str) -> Self:
        """A new mount. MountError when the kernel refuses; nothing is left mounted then."""
        mountpoint = os.path.realpath(spec.mountpoint)
        session = device.open_device()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, session)
            table = device.MountTable()
            undo.callback(table.close)
            with _claimed(spec.mount_lock):
                _refuse_a_second_mount(table, mountpoint)
                device.mount(
                    session,
                    mountpoint,
                    spec.fsname,
                    allow_other=spec.allow_other,
                    max_read_bytes=spec.max_read_bytes,
                )
                device_number = table.at(mountpoint)[-1].device
                undo.callback(_detach, table, mountpoint, device_number)
            clone = _cloned(session)
            undo.callback(os.close, clone)
            sent = device.read_init(clone, INIT_S)
            try:
                shown_init = init_message.masked_request(sent, spec.masked_features)
                plan = init_message.plan_for(
                    shown_init,
                    passthrough=open_mode == "passthrough",
                    max_read_bytes=spec.max_read_bytes,
                    read_ahead_bytes=spec.read_ahead_bytes,
                    max_background=spec.max_background,
                    congestion_threshold=spec.congestion_threshold,
                )
            except init_message.InitError as failure:
                raise MountError(f"{mountpoint!r} can't be served: {failure}") from None
            undo.pop_all()
        return cls(
            mountpoint,
            open_mode,
            mode_reason=mode_reason,
            session=session,
            clone=clone,
            table=table,
            device_number=device_number,
            shown_init=shown_init,
            plan=plan,
            allow_other=spec.allow_other,
            max_read_bytes=spec.max_read_bytes,
            is_ours=True,
        )

    @classmethod
    def adopted(cls, spec: MountSpec, facts: Facts, *, session: int, gate_device: int) -> Self:
        """One that another process has mounted, and still has until `is_ours` is set. Takes over the descriptors.

        MountError when it is not what is mounted there.
        """
        # Its folder's path: to look at the mount point itself would be a request of the mount.
        folder, name = os.path.split(spec.mountpoint.rstrip("/"))
        mountpoint = os.path.join(os.path.realpath(folder), name)
        table = device.MountTable()
        mounts = table.at(mountpoint)
        if not mounts or mounts[-1].device != facts.device:
            table.close()
            raise MountError(f"{mountpoint!r} does not have the mount on it that was to be taken over")
        return cls(
            mountpoint,
            facts.open_mode,
            mode_reason=f"as before: taken over from version {facts.version}",
            session=session,
            clone=gate_device,
            table=table,
            device_number=facts.device,
            shown_init=facts.shown_init(),
            plan=facts.plan(),
            allow_other=facts.allow_other,
            max_read_bytes=facts.max_read_bytes,
            is_ours=False,
        )

    def facts(self, version: str, cluster_id: str) -> Facts:
        """What the next process must know of it."""
        return Facts(
            version=version,
            device=self.device_number,
            open_mode=self.open_mode,
            allow_other=self.allow_other,
            max_read_bytes=self.max_read_bytes,
            init=self.shown_init.hex(),
            init_plan=dataclasses.asdict(self.plan),
            cluster_id=cluster_id,
        )

    def descriptors(self) -> tuple[int, int]:
        """Of the connection, and the gate's: for the next process."""
        assert self._session is not None
        return self._session, self.gate_device

    @property
    def gate_device(self) -> int:
        """The clone of the present gate."""
        assert self._clone is not None
        return self._clone

    def gate_settings(self) -> dict[str, Any]:
        """What the gate must know about INIT and the mount."""
        return {
            "device": self.device_number,
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
        assert self._session is not None
        self._clone = _cloned(self._session)

    def set_read_ahead(self, size_bytes: int, log: Log) -> None:
        """Of the mount. Where it can't be set, that is said, and the mount serves all the same."""
        self.read_ahead_error = set_read_ahead(self.device_number, size_bytes)
        if self.read_ahead_error:
            log.warning("the read-ahead stays at the kernel's default", reason=self.read_ahead_error)

    def is_connected(self) -> bool:
        """False once the kernel has ended the connection: unmounted everywhere, or aborted."""
        if self._session is None:
            return False
        poll = select.poll()
        poll.register(self._session, 0)
        return not any(events & select.POLLERR for _, events in poll.poll(0))

    def is_mounted(self) -> bool:
        """Whether our mount is there, and the topmost on its mount point: only then may the place be unmounted."""
        mounts = self._table.at(self.mountpoint) if self.is_ours else []
        return bool(mounts) and mounts[-1].device == self.device_number

    def end_connection(self) -> None:
        """Close every descriptor held here: whoever waits gets an error, unless somebody else still holds one."""
        for descriptor in (self._clone, self._session):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._clone = self._session = None
        self._table.close()


def _detach(table: device.MountTable, mountpoint: str, device_number: str) -> None:
    """Undo a mount that can't be served, if it is still the topmost there."""
    mounts = table.at(mountpoint)
    if mounts and mounts[-1].device == device_number:
        with contextlib.suppress(OSError):
            device.unmount(mountpoint, lazy=True)


def _refuse_a_second_mount(table: device.MountTable, mountpoint: str) -> None:
    """The daemon has looked before; between that look and now another mount may have come."""
    if mounts := table.at(mountpoint):
        raise MountError(
            f"mount point {mountpoint!r} has a mount of type {mounts[-1].fs_type} on it; unmount that first"
        )


def _cloned(session: int) -> int:
    try:
        return device.clone(session)
    except OSError as failure:
        raise MountError(f"the ioctl FUSE_DEV_IOC_CLONE failed: {failure.strerror}") from None


@contextlib.contextmanager
def _claimed(lock_file: str | None) -> Iterator[None]:
    """Hold the lock that everybody holds who mounts there. MountError when it is not free in time."""
    if lock_file is None:
        yield
        return
    try:
        descriptor = open_lock(lock_file)
    except OSError as failure:
        raise MountError(f"lock file {lock_file!r} can't be opened: {failure.strerror}") from None
    try:
        if not lock_within(descriptor, LOCK_S):
            raise MountError(f"another process has been mounting there for {LOCK_S:.0f} s (lock file {lock_file!r})")
        yield
    finally:
        os.close(descriptor)
