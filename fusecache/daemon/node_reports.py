"""Reporting of `serve`: joins what the mounts say (`node_holdings`) and the stream to the controller.

    mounts' control sockets -> NodeHoldings -> ReportState -> Reporter -> controller

Imported only when the configuration has `controller:`, because it brings gRPC into a process that has no use for it
otherwise.
"""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Sequence

import fusecache
from fusecache.clock import SystemClock
from fusecache.config.co_scheduling import ControllerLink, is_node_name
from fusecache.daemon.mount_process import MountProcess
from fusecache.daemon.node_holdings import NodeHoldings
from fusecache.errors import UsageError
from fusecache.locality.report_state import ReportState
from fusecache.locality.reporter import Reporter, ReportingThread
from fusecache.metrics import Metrics


class NodeReports:
    """The reports of this node; made, started and stopped by one thread."""

    def __init__(self, link: ControllerLink, metrics: Metrics) -> None:
        """No I/O. UsageError when the node has no name that a Kubernetes node can have."""
        state = ReportState(
            node_name_of(link, socket.gethostname()),
            session=secrets.randbits(64) or 1,
            version=fusecache.__version__,
        )
        self._holdings = NodeHoldings(link.report_interval_s, on_change=lambda: self._thread.report_now())
        self._thread = ReportingThread(
            lambda: Reporter(
                link.address,
                state,
                self._holdings.holdings,
                interval_s=link.report_interval_s,
                metrics=metrics,
                clock=SystemClock(),
                rng=random.Random(),
            )
        )
        self._started = False

    def start(self, processes: Sequence[MountProcess]) -> None:
        """Ask these mounts and report."""
        self._holdings.watch(processes)
        self._thread.start()
        self._started = True

    def watch(self, processes: Sequence[MountProcess]) -> None:
        """Ask these mounts too: new ones, or those that have taken over from one that was asked."""
        self._holdings.watch(processes)

    def ended(self, process: MountProcess, reason: str) -> None:
        """A mount's process has ended."""
        self._holdings.ended(process, reason)

    def end(self, reason: str) -> None:
        """Tell that this node serves no longer, because of `reason`: before the mounts end, which is no news then. Does
        not wait."""
        self._holdings.freeze()
        if self._started:
            self._thread.end(reason)

    def stop(self, reason: str) -> None:
        """`end`, unless that was called before, and wait until it was told, about a second at most. May be called
        again, and before `start`."""
        self.end(reason)
        if self._started:
            self._started = False
            self._thread.stop()
        self._holdings.close()

    def abandon(self) -> None:
        """Report no more, without a word: another process reports for this node."""
        self._holdings.freeze()
        if self._started:
            self._started = False
            self._thread.stop()
        self._holdings.close()


def node_name_of(link: ControllerLink, host_name: str) -> str:
    """What this node is called in Kubernetes: as configured, else as the kubelet would call it.

    UsageError when `host_name` can't be a node's name.
    """
    if link.node_name is not None:
        return link.node_name
    name = host_name.lower()
    if not is_node_name(name):
        raise UsageError(
            f"controller: the host's name {host_name!r} can't be a Kubernetes node's; give node_name (or "
            "FUSECACHE_CONTROLLER_NODE_NAME)"
        )
    return name
