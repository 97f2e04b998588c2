"""One whole cluster for all stories: a real node, simulated nodes, the manifests of deploy/ with the image of this
checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.stories import Stories, install
from tests.cluster.world import World

SIMULATED = 50
"""Node objects besides the real node."""


@pytest.fixture(scope="session", autouse=True)
def wanted() -> None:
    """`make test-cluster` sets the variable; a plain `pytest` does not build Kubernetes."""
    if os.environ.get("FUSECACHE_TEST_CLUSTER") != "kubernetes":
        pytest.skip("a cluster is started only with FUSECACHE_TEST_CLUSTER=kubernetes (make test-cluster)")


@pytest.fixture(scope="session")
def world(wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The cluster, with nothing of fusecache in it yet. An error, not a skip, where the machine can't carry one."""
    # Short: sockets below it must fit into 108 bytes.
    folder = Path(tmp_path_factory.getbasetemp().parent) / f"cluster-{os.getpid()}"
    with World(folder, simulated=SIMULATED) as running:
        yield running


@pytest.fixture(scope="session")
def stories(world: World) -> Stories:
    """fusecache installed: the data is served, the DaemonSet has it mounted on the real node, the controller leads."""
    return install(world)
