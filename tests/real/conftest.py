"""Real clusters for this folder: started once for all its tests, skipped with a reason where they can't run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import alluxio_jars
from tests.support.real_alluxio import MEBIBYTE, RealAlluxio


@pytest.fixture(scope="session", autouse=True)
def wanted_and_possible() -> None:
    """`make test-real` sets the variable; a plain `pytest` does not start JVMs."""
    if os.environ.get("FUSECACHE_TEST_CLUSTER") != "real":
        pytest.skip("real Alluxio servers are started only with FUSECACHE_TEST_CLUSTER=real (make test-real)")
    if reason := alluxio_jars.skip_reason():
        pytest.fail(f"real Alluxio servers were asked for, but {reason}")


@pytest.fixture(scope="session")
def cluster(wanted_and_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAlluxio]:
    """A master and two block workers; blocks of 1 MiB, so that small test files have several."""
    with RealAlluxio(tmp_path_factory.mktemp("alluxio"), block_size_bytes=MEBIBYTE) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """State and control sockets of one test only."""
    return {"FUSECACHE_STATE_DIR": str(tmp_path / "state"), "FUSECACHE_RUNTIME_DIR": str(tmp_path / "run")}
