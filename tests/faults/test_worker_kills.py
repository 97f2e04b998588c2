"""F01 and user report 1, in a mount behind the gate: a part is killed while eight processes read.

Nobody notices a worker's end but by a pause, and nobody an agent's, in any open mode; features of the kernel that could
help are masked. A gate's end is told apart: with the kernel's help nobody notices that either.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.support.kills import distribution, kill, kill_workers, pauses
from tests.support.mounting import needs_fuse
from tests.support.readers import Load
from tests.t4_mount.board import Board, Place
from tests.t4_mount.live_mount import LiveMount, eventually
from tests.t4_mount.modes import MODES, unavailable

pytestmark = [needs_fuse, pytest.mark.timeout(300)]

KILLS = 6
"""Of workers, in each mode; `make soak` has hundreds, of all parts."""

READERS = 8
SIZES = (0, 1, 4095, 4096, 4097, 20_000, 70_000, 300_000, 3_000_000)

BLOCK_BYTES = 1 << 30
"""The server's default."""

DEATHS = r"a worker ended|the agent ended|the gate ended"
"""What is said of a part that died."""


class Scene(NamedTuple):
    """A mount, and the files that are read in it."""

    board: Board
    mount: LiveMount
    place: Place
    names: list[str]

    def load(self, seed: int) -> Load:
        return Load(self.place.shown, self.place.source, self.names, processes=READERS, seed=seed)


def scene(board: Board, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[Scene]:
    """Some files are local and some are not, one block or several."""
    source = board.new_source("kills")
    rng = random.Random(1)
    with board.own(source, tmp_path_factory.mktemp("kills"), *flags) as mount:
        folder = source / "d"
        folder.mkdir()
        names = [f"f{number}-{size}" for number in range(3) for size in SIZES]
        for name in names:
            (folder / name).write_bytes(rng.randbytes(int(name.partition("-")[2])))
        place = Place(mount, folder, mount.root / "d", BLOCK_BYTES if board.mode.passthrough else 0)
        place.warm(*names[: len(SIZES)])
        yield Scene(board, mount, place, names)


@pytest.fixture(scope="module", params=["no-open", pytest.param("passthrough", marks=pytest.mark.long)])
def board(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    if why := unavailable(MODES[request.param]):
        pytest.skip(why)
    with Board(MODES[request.param], tmp_path_factory.mktemp(f"kills-{request.param}")) as mounts:
        yield mounts


@pytest.fixture(scope="module")
def unaided(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Without the kernel's help (before Linux 6.9 it has none to give)."""
    yield from scene(board, tmp_path_factory, "--kernel-features=-resend")


@pytest.fixture(autouse=True)
def deaths(request: pytest.FixtureRequest, expected_logs: Callable[..., None]) -> Iterator[None]:
    """What a mount that tests share says of a death belongs to the test that brought it about."""
    expected_logs(DEATHS, optional=True)
    yield
    for name in {"unaided", "aided"} & set(request.fixturenames):
        request.getfixturevalue(name).mount.mount.copy_stderr()


def test_workers_are_killed_and_nobody_sees_an_error(unaided: Scene) -> None:
    """S35; F01, user reports 1 and 13: no error, no other byte; each kill is proven, and each is one restart."""
    mount = unaided.mount
    restarts = sum(part.restarts for part in mount.parts().values())
    opens = mount.passthrough_opens()
    with unaided.load(seed=1) as load:
        kills = kill_workers(mount, load, KILLS, random.Random(2))
        report = load.stop()
    print(report.describe(), "; pauses:", distribution(pauses(report, kills)))
    assert report.errors == []
    assert report.wrong == []
    assert all(report.calls)
    assert len({killed.pid for killed in kills}) == KILLS
    assert sum(part.restarts for part in mount.parts().values()) == restarts + KILLS
    assert mount.gate()["worker_deaths"] >= KILLS
    assert mount.gate()["poisoned"] == 0
    if unaided.board.mode.passthrough:
        assert mount.passthrough_opens() > opens


def test_agent_is_killed_and_nobody_sees_an_error(unaided: Scene) -> None:
    """S35: reads go on without it; what needs it waits until another one is there."""
    mount = unaided.mount
    with unaided.load(seed=3) as load:
        for _ in range(2):
            load.wait_for_calls(100)
            kill(mount, "agent")
        load.wait_for_calls(100)
        report = load.stop()
    assert report.errors == []
    assert report.wrong == []
    (unaided.place.source / "later").write_bytes(b"later")
    mount.refresh("d")
    assert (unaided.place.shown / "later").read_bytes() == b"later", "the new agent refreshes, and pushes"


ABORTED = re.compile(rf"\[Errno ({errno.ECONNABORTED}|{errno.ENOTCONN})\]")


def test_gate_is_killed_without_the_kernels_help(unaided: Scene) -> None:
    """S36: calls that the gate had in its hands end with ECONNABORTED, at once; everything after it is served."""
    mount = unaided.mount
    with unaided.load(seed=4) as load:
        load.wait_for_calls(200)
        kill(mount, "gate")
        load.wait_for_calls(400)
        report = load.stop()
    assert [text for text in report.errors if not ABORTED.search(text)] == []
    assert len(report.errors) <= 8 * READERS
    assert report.wrong == []


@pytest.fixture(scope="module")
def aided(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """With all that this kernel has."""
    yield from scene(board, tmp_path_factory)


def test_gate_is_killed_and_the_kernel_sends_its_requests_again(aided: Scene) -> None:
    """S36; RESEND (Linux 6.9): nobody sees an error when the gate dies either, but for a direct read whose answer the
    kernel was copying from it (fuse_dev_do_write ends the request with EIO when the copy is cut off)."""
    resend = next(feature for feature in aided.mount.status()["features"] if feature["name"] == "resend")
    if not resend["present"]:
        pytest.skip("this kernel can't send requests again")
    mount = aided.mount
    with aided.load(seed=5) as load:
        for _ in range(2):
            load.wait_for_calls(200)
            kill(mount, "gate")
        load.wait_for_calls(400)
        report = load.stop()
    cut_off = [error for error in report.errors if error.startswith("direct ") and "[Errno 5]" in error]
    assert report.errors == cut_off
    assert len(cut_off) <= 2, "one a kill at most"
    assert report.wrong == []
    eventually(lambda: all(part.ready for part in mount.parts().values()), "all parts are there")
