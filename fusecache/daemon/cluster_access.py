"""A client for a SOURCE, for commands that look at a cluster without mounting it.

For a folder the embedded server of a mount that serves it is asked when there is one (its state folder takes one
server at a time); otherwise one is started for the time of the command.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import ClusterIdentity
from fusecache.clock import SystemClock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.daemon.control_client import ask
from fusecache.daemon.embedded_child import EmbeddedChild
from fusecache.daemon.mountpoint import our_mounts
from fusecache.errors import FusecacheError
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget

COMMAND_BUDGET_S = 30.0
"""Seconds a command may spend on the network before it says that it did not work."""

ASK_S = 5.0


class ClusterAccess(NamedTuple):
    """A connected client and what was learned on the way."""

    client: AlluxioClient
    identity: ClusterIdentity
    cluster: ClusterConfig
    clock: SystemClock

    def budget(self) -> Budget:
        """A fresh one for the next call."""
        return Budget(self.clock, COMMAND_BUDGET_S)


@contextmanager
def open_cluster(cluster: ClusterConfig | None, folder: Path | None, settings: Settings) -> Iterator[ClusterAccess]:
    """Connect to `cluster`, or to the embedded server of `folder`. UpstreamError when nobody answers in time."""
    with ExitStack() as stack:
        if cluster is None:
            assert folder is not None
            cluster = _embedded(folder, settings, stack)
        clock = SystemClock()
        client = AlluxioClient(cluster, settings, metrics=Metrics(), clock=clock, rng=random.Random())
        stack.callback(client.close)
        identity = client.connect(Budget(clock, min(COMMAND_BUDGET_S, settings.metadata_budget_s)))
        yield ClusterAccess(client, identity, cluster, clock)


def _embedded(folder: Path, settings: Settings, stack: ExitStack) -> ClusterConfig:
    running = _serving(folder, settings.runtime_dir)
    if running is not None:
        return ClusterConfig(name="embedded", masters=(running,))
    child = EmbeddedChild(folder, settings.state_dir / "embedded")
    stack.callback(child.stop)
    address = child.start()
    return ClusterConfig(name="embedded", masters=(address.master,), tier_folders=tuple(address.tier_folders))


def _serving(folder: Path, runtime_dir: Path) -> str | None:
    """host:port of the embedded server of a mount of `folder`."""
    for mount in our_mounts():
        if mount.source != str(folder):
            continue
        try:
            return str(ask(mount, runtime_dir, "status", ASK_S)["primary"])
        except FusecacheError:
            continue  # another user's, or ending: the folder may still be free
    return None
