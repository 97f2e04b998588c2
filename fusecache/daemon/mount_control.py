"""What a mount answers on its control socket: status, metrics, config, locality, refresh, log level.

Reading is for everybody who can reach the socket; changing is for root and the daemon's own user (`control` checks the
peer). Paths are relative to the mount's root and travel as text with surrogate escapes, so that any file name fits.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

import trio

import fusecache
from fusecache import logs
from fusecache.alluxio.model import ClusterIdentity
from fusecache.cache.known import ROOT
from fusecache.cache.tree import MetadataTree
from fusecache.config.settings import LogLevel, MountPlan
from fusecache.daemon.control import ControlServer, Handler, socket_path
from fusecache.daemon.dataset_bytes import DatasetBytes
from fusecache.errors import UsageError
from fusecache.fs.invalidation import Invalidator
from fusecache.metrics import Metrics
from fusecache.threads import in_thread

PUSH_WAIT_S = 5.0
"""A refresh answers once its invalidations are sent, or after this time (one may wait for a READ in flight)."""


class ControlledMount(Protocol):
    """What the socket tells of a mount and does to it."""

    plan: MountPlan
    identity: ClusterIdentity
    metrics: Metrics
    tree: MetadataTree
    invalidator: Invalidator
    dataset_bytes: DatasetBytes
    source: str

    @property
    def ready(self) -> bool:
        """True while reads work."""
        ...

    def uptime_s(self) -> float:
        """Seconds since its start."""
        ...

    def is_mounted(self) -> bool:
        """False when it was taken away from its mount point, though open files may still be served. Reads mountinfo."""
        ...

    async def describe(self) -> dict[str, Any]:
        """How the kernel is served."""
        ...

    async def measure(self) -> Metrics:
        """All metrics of the mount."""
        ...

    async def set_log_level(self, level: LogLevel) -> None:
        """From now on, in every process of the mount."""
        ...

    async def find(self, parent: int, name: bytes, *, last: bool) -> int | None:
        """Inode of a folder in `parent`; None when `last` and it is a file or missing."""
        ...


class MountControl:
    """The control socket of one mount."""

    def __init__(self, mount: ControlledMount) -> None:
        self._mount = mount
        self.path = socket_path(mount.plan.settings.runtime_dir, mount.plan.mountpoint)

    async def run(self, listener: socket.socket, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer on `listener`, which is taken over, until cancelled."""
        handlers = (
            Handler("status", self._status, privileged=False),
            Handler("metrics", self._metrics, privileged=False),
            Handler("config", self._config, privileged=False),
            Handler("locality", self._locality, privileged=False),
            Handler("refresh", self._refresh, privileged=True),
            Handler("log_level", self._log_level, privileged=True),
        )
        await ControlServer(listener, {handler.name: handler for handler in handlers}).run(task_status=task_status)

    def describe_config(self) -> dict[str, Any]:
        """Effective settings, cluster and control socket; no secret is among them."""
        plan = self._mount.plan
        return {
            "mountpoint": str(plan.mountpoint),
            "source": self._mount.source,
            "cluster": plan.cluster.model_dump(mode="json") if plan.cluster and not plan.folder else None,
            "cluster_id": self._mount.identity.cluster_id,
            "control_socket": str(self.path),
            "settings": plan.settings.model_dump(mode="json"),
        }

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        mount = self._mount
        return {
            "ready": mount.ready,
            "version": fusecache.__version__,
            "pid": os.getpid(),
            "mountpoint": str(mount.plan.mountpoint),
            "source": mount.source,
            **await mount.describe(),
            "cluster_id": mount.identity.cluster_id,
            "primary": mount.identity.primary,
            "alluxio_version": mount.identity.version,
            "uptime_s": round(mount.uptime_s(), 1),
            "log_level": logs.level(),
            "metrics": (await mount.measure()).snapshot(),
        }

    async def _metrics(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"text": (await self._mount.measure()).exposition()}

    async def _config(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"config": self.describe_config()}

    async def _locality(self, request: dict[str, Any]) -> dict[str, Any]:
        mount = self._mount
        reason = ""
        if not mount.ready:
            reason = "it does not serve reads yet"
        elif not await in_thread(mount.is_mounted):
            # Detached while files are open: whoever comes now finds an empty folder, or another mount.
            reason = "it is no longer what is mounted there"
        return {
            "reason": reason,
            "cluster_id": mount.identity.cluster_id,
            **await mount.dataset_bytes.describe(ready=not reason),
        }

    async def _refresh(self, request: dict[str, Any]) -> dict[str, Any]:
        paths = request.get("paths")
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError("refresh: `paths` must be a list of paths relative to the mount")
        folders = changed = 0
        for path in paths:
            diff = await self._mount.tree.refresh(await self._folder_of(os.fsencode(path)), force_sync=True)
            folders += 1
            changed += diff.total
        with trio.move_on_after(PUSH_WAIT_S):
            while not self._mount.invalidator.idle():
                await trio.sleep(0.005)
        return {"folders": folders, "changed": changed}

    async def _folder_of(self, path: bytes) -> int:
        """Inode of the folder at `path`, or of the folder that holds it (a file; a name that is not there yet)."""
        inode = ROOT
        names = [name for name in path.split(b"/") if name not in (b"", b".")]
        for depth, name in enumerate(names):
            if name == b"..":
                raise UsageError(f"refresh: {os.fsdecode(path)!r} must not leave the mount")
            found = await self._mount.find(inode, name, last=depth == len(names) - 1)
            if found is None:
                return inode
            inode = found
        return inode

    async def _log_level(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted = request.get("level")
        if wanted not in logs.LEVELS:
            raise UsageError(f"log level {wanted!r}: allowed are {', '.join(logs.LEVELS)}")
        level: LogLevel = wanted
        await self._mount.set_log_level(level)
        return {"level": logs.level()}
