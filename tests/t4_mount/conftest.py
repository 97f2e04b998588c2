"""Every test of this level runs in every open mode; the mounts of a mode are shared by its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.t4_mount import modes
from tests.t4_mount.board import Board


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run of each test per mode, all tests of a mode one after the other."""
    if "open_mode" in metafunc.fixturenames:
        try:
            chosen = modes.chosen(metafunc.config.getoption("--open-modes"))
        except KeyError as unknown:
            raise pytest.UsageError(f"--open-modes: {unknown} is none of {', '.join(modes.MODES)}") from None
        metafunc.parametrize("open_mode", chosen, ids=lambda mode: mode.name, scope="package", indirect=True)


@pytest.fixture(scope="package")
def open_mode(request: pytest.FixtureRequest) -> modes.OpenMode:
    """The way mounts are served."""
    mode: modes.OpenMode = request.param
    if why := modes.unavailable(mode):
        pytest.skip(why)
    return mode


@pytest.fixture(scope="package")
def board(open_mode: modes.OpenMode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """The mode's mounts."""
    with Board(open_mode, tmp_path_factory.mktemp(open_mode.name)) as mounts:
        yield mounts


@pytest.fixture(autouse=True)
def logs_of_shared_mounts(board: Board) -> Iterator[None]:
    """What shared mounts write belongs to the test during which they wrote it."""
    yield
    board.copy_logs()
