"""F17: a process of a mount has no descriptors left. Callers get exact bytes, or an error, and soon; nothing ends for
good, and once there are descriptors again everything is as before.

The status over HTTP is tested alone in tests/t1_rpc/test_status_http.py, who comes to take over in
tests/t5_daemon/test_takeover.py.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.errors import FusecacheError
from tests.support.kills import runs
from tests.support.limits import no_more_descriptors
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import MEMORY
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, errno_of, eventually, live_mount
from tests.t4_mount.modes import MODES, unavailable

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(unavailable(MODES["no-open"]) is not None, reason=str(unavailable(MODES["no-open"]))),
]

FILES = 12
SIZE = 200_000


class Scene(NamedTuple):
    """A mount with one worker, and its files."""

    mount: LiveMount
    contents: dict[str, bytes]
    blocks: Path
    """Where the block worker keeps its blocks."""

    def assert_right(self, *names: str) -> None:
        """Every byte comes, past the kernel's pages."""
        for name in names or self.contents:
            assert read_anew(self.mount.root / name) == self.contents[name], name

    def pid(self, part: str) -> int:
        found = self.mount.parts()[part].pid
        assert found is not None
        return found

    def said(self, text: str) -> bool:
        return re.search(text, self.mount.mount.stderr()) is not None


def read_anew(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Block files lie on another file system than their sources, so that they are no hard links."""
    folder = tmp_path_factory.mktemp("f17")
    source = MEMORY / f"f17-{os.getpid()}"
    source.mkdir()
    rng = random.Random(17)
    contents = {f"f{number}": rng.randbytes(SIZE) for number in range(FILES)}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    try:
        with (
            EmbeddedProcess(source, folder / "server", "--block-size-bytes", "1MiB") as server,
            live_mount(server.url, folder / "m", "--open-mode", "no-open", "--workers", "1", "--immutable") as mount,
        ):
            yield Scene(mount, contents, folder / "server")
    finally:
        shutil.rmtree(source)


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    """What the shared mount writes belongs to the test during which it wrote it."""
    yield shared
    eventually(lambda: all(part.ready for part in shared.mount.parts().values()), "every part is there")
    shared.mount.mount.copy_stderr()


def test_f17_worker_without_descriptors_reads_through_the_block_worker(
    scene: Scene, expected_logs: Callable[..., None]
) -> None:
    """S22: it can't open a block file, and can still ask: every byte comes. With descriptors it opens them again."""
    expected_logs("block file not opened, reading elsewhere")
    scene.assert_right()  # cold: from the under storage, through the block worker, which stores them

    def stored() -> bool:
        return sum(path.stat().st_size == SIZE for path in scene.blocks.rglob("alluxioworker/*")) == FILES

    eventually(stored, "the block worker has stored every block")
    local_bytes = scene.mount.sources().get("local_block", 0)
    with no_more_descriptors(scene.pid("worker 0")):
        scene.assert_right()
        assert scene.mount.sources().get("local_block", 0) == local_bytes, "it opened block files all the same"
    scene.assert_right()

    def opened() -> bool:
        scene.assert_right("f0")
        return scene.mount.sources().get("local_block", 0) > local_bytes

    eventually(opened, "block files are opened again")
    assert scene.mount.parts()["worker 0"].restarts == 0


def test_f17_gate_without_descriptors_asks_workers_and_takes_a_new_one_later(
    scene: Scene, expected_logs: Callable[..., None]
) -> None:
    """What it would read itself goes to the worker, and is not forgotten. When that one dies, the new one can't be
    taken yet, and what is asked waits: with descriptors it is answered."""
    expected_logs("a worker ended", count=1)
    expected_logs("order of the supervisor can't be followed now")

    def read_by_the_gate() -> bool:
        before = scene.mount.gate()["direct_reads"]["reads"]
        scene.assert_right("f1")
        return bool(scene.mount.gate()["direct_reads"]["reads"] > before)

    eventually(read_by_the_gate, "the gate reads the file itself")
    gate, worker = scene.pid("gate"), scene.pid("worker 0")
    learned = scene.mount.gate()["learned"]
    assert learned
    with ThreadPoolExecutor(1) as pool:
        with no_more_descriptors(gate):
            scene.assert_right()
            assert scene.mount.gate()["refusals"]["learned_emfile"] > 0
            assert scene.mount.gate()["learned"] >= learned
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not runs(worker), "the worker is gone")
            waiting = pool.submit(scene.assert_right)
            eventually(lambda: scene.said("order of the supervisor can't be followed now"), "the new one is refused")
            assert not scene.mount.parts()["worker 0"].ready
        waiting.result()
    eventually(read_by_the_gate, "the gate reads the file itself")
    assert scene.pid("gate") == gate


def test_f17_agent_without_descriptors_lets_questions_wait_and_reads_go_on(
    scene: Scene, expected_logs: Callable[..., None]
) -> None:
    """Nobody can connect to it any more; who has come is answered once somebody can. It does not look all the time."""
    expected_logs("control_accept_failed")
    agent = scene.pid("agent")
    with ThreadPoolExecutor(1) as pool:
        with no_more_descriptors(agent):
            asked = pool.submit(scene.mount.status)
            eventually(lambda: scene.said("control_accept_failed"), "the question can't be taken")
            scene.assert_right()
            assert not asked.done()
        assert asked.result()["ready"] is True
    assert scene.pid("agent") == agent


def test_f17_supervisor_without_descriptors_can_start_nobody_and_says_so(
    scene: Scene, expected_logs: Callable[..., None]
) -> None:
    """A worker that dies then is not replaced. What only a worker can answer is EIO after a moment, no wait without an
    end; the gate answers what it knows. With descriptors there is a worker again."""
    expected_logs("a worker ended", optional=True)  # the same within 10 s is left out
    expected_logs("worker 0 can't be started yet")
    expected_logs("every worker dies at its start", count=1)
    expected_logs("workers die as fast as they start", count=1)
    worker = scene.pid("worker 0")
    with no_more_descriptors(scene.mount.pid):
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not runs(worker), "the worker is gone")
        assert errno_of((scene.mount.root / "nobody knows this").stat) == errno.EIO
        assert scene.said("worker 0 can't be started yet")

    def back() -> bool:
        try:
            return scene.mount.parts()["worker 0"].ready
        except FusecacheError:
            return False

    eventually(back, "there is a worker again")
    assert errno_of((scene.mount.root / "nobody knows this").stat) == errno.ENOENT
    scene.assert_right()
