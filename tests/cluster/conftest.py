"""One whole cluster for all stories: a real node, simulated nodes, the manifests of deploy/ with the image of this
checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import image
from tests.cluster.installation import Installation
from tests.cluster.stories import Stories
from tests.cluster.world import World

SIMULATED = 49
"""With the real one that makes 50 nodes."""


DATASETS = {"imagenet": (40, 100_000), **{f"set-{number}": (3, 50_000 + number) for number in range(5)}}
"""Name -> (files, size of each in bytes). Made under the data set's name below the folder that is served."""


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
    assert world.node is not None
    world.node.load_image(image.build(world.folder / "fusecache.tar"))
    installation = Installation(world, {name: name for name in DATASETS})
    for name, (files, size_bytes) in DATASETS.items():
        folder = installation.served / name
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number:03d}.bin").write_bytes(os.urandom(size_bytes))
    installation.start()
    ready = Stories(world, installation)
    ready.wait_installed()
    return ready
