"""What `serve` answers over HTTP, for all of its mounts together, and where it listens.

    /metrics   every mount's metrics, each sample with mount="<mount point>", and this process's own without
    /healthz   every mount that runs answers its control socket
    /readyz    every mount of the file serves reads: it did once, runs, and answers

Threads of the server (`status_http`) ask; what they see of the mounts is what `serve` has shown last. An address that
another `serve` still has, because it has not handed its last mount over yet, is waited for; one that a reload brings
is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import structlog

from fusecache import metrics
from fusecache.daemon.control_client import call, socket_path
from fusecache.daemon.mount_process import MountProcess
from fusecache.errors import FusecacheError, StateError
from fusecache.status_http import StatusServer

log = structlog.get_logger(__name__)

ASK_S = 5.0
"""Seconds a mount may take to answer its control socket before it counts as stuck."""


class Served(NamedTuple):
    """One mount of the file."""

    process: MountProcess
    """That has it, or had it last."""

    is_ready: bool
    is_being_replaced: bool
    """Nobody there answers for some seconds (of S42), while reads go on."""


class ServeHttp:
    """See the module. Everything but the answers is for one thread."""

    def __init__(self, address: str | None, own: metrics.Metrics, *, may_wait: bool) -> None:
        """`own`: the metrics of this process. `may_wait`: another process may have the address and will give it up."""
        self.address = address
        """As configured; None: nobody is answered."""

        self.waits = False
        """For the other process; call `listen` again."""

        self.mounts: Sequence[Served] = ()
        """Replaced as a whole, for the threads that read it."""

        self.handed_over: Sequence[str] = ()
        """Mount points that another process serves now."""

        self._own = own
        self._may_wait = may_wait
        self._server: StatusServer | None = None

    def listen(self) -> None:
        """Answer, unless that is done already. StateError when the address can't be had and is not waited for."""
        if self.address is None or self._server is not None:
            return
        try:
            self._server = self._started(self.address)
        except StateError as failure:
            if not self._may_wait:
                raise
            if not self.waits:
                log.info("status_http_waits", why=str(failure))
            self.waits = True
            return
        self.waits = False

    def move(self, address: str | None) -> None:
        """Answer at this address from now on; None: nowhere. StateError: it can't be had, and all stays as it was (also
        for one that is part of the present one, as 127.0.0.1 is of 0.0.0.0 with the same port)."""
        if address == self.address:
            return
        server = None if address is None else self._started(address)
        self.stop()
        self.address, self._server, self.waits = address, server, False

    def stop(self) -> None:
        """Answer no more. May be called twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _started(self, address: str) -> StatusServer:
        server = StatusServer(
            address, exposition=self._exposition, health=self._why_unhealthy, ready=self._why_not_ready
        )
        server.start()
        log.info("status_http_listening", address=server.address)
        return server

    def _exposition(self) -> str:
        texts = {"": self._own.exposition()}
        for mount in self.mounts:
            if mount.process.exit_code is not None:
                continue
            point = str(mount.process.plan.mountpoint)
            try:
                texts[point] = str(_ask(mount, "metrics")["text"])
            except FusecacheError as failure:
                log.warning("mount_metrics_missing", mountpoint=point, error=failure)
        return metrics.merge(texts, "mount")

    def _why_unhealthy(self) -> str | None:
        for mount in self.mounts:
            if mount.is_ready and not mount.is_being_replaced and mount.process.exit_code is None:
                try:
                    _ask(mount, "status")
                except FusecacheError as failure:
                    return f"mount {mount.process.plan.mountpoint}: {failure}"
        return None

    def _why_not_ready(self) -> str | None:
        if self.handed_over:
            return "handed over to another process: " + ", ".join(self.handed_over)
        waiting = [str(mount.process.plan.mountpoint) for mount in self.mounts if not mount.is_ready]
        if waiting or not self.mounts:
            return "not ready: " + ", ".join(waiting or ["starting"])
        return self._why_unhealthy()


def _ask(mount: Served, kind: str) -> dict[str, object]:
    plan = mount.process.plan
    return call(socket_path(plan.settings.runtime_dir, plan.mountpoint), kind, ASK_S)
