"""F17: a process of a mount gets no thread any more, as where a pod has used up its pids. Callers get exact bytes or
EIO, nothing ends for good, and with threads everything is as before."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.limits import no_more_threads, without_threads_reason
from tests.support.mounting import needs_fuse
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, live_mount
from tests.t4_mount.modes import MODES, unavailable

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(unavailable(MODES["no-open"]) is not None, reason=str(unavailable(MODES["no-open"]))),
    pytest.mark.skipif(without_threads_reason() is not None, reason=str(without_threads_reason())),
]

FILES = 24
SIZE = 100_000
HOLD_S = 1.0


class Scene(NamedTuple):
    """A mount whose block worker takes HOLD_S for each read."""

    mount: LiveMount
    contents: dict[str, bytes]

    def read(self, name: str) -> int:
        """The errno; 0: every byte was right."""
        try:
            content = (self.mount.root / name).read_bytes()
        except OSError as failure:
            return failure.errno or -1
        assert content == self.contents[name], name
        return 0

    def pids(self) -> dict[str, int | None]:
        """Of who is there from the start; the spare gate comes later."""
        return {name: part.pid for name, part in self.mount.parts().items() if name != "spare gate"}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Nothing is in the block worker yet, and is not kept there."""
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(17)
    contents = {f"f{number}": rng.randbytes(SIZE) for number in range(FILES)}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    plan = tmp_path / "faults.yaml"
    plan.write_text(f"faults:\n  - {{method: ReadBlock, delay: {{seconds: {HOLD_S}}}}}\n")
    flags = ("--open-mode", "no-open", "--workers", "1", "--no-zero-rpc-reads")
    with (
        EmbeddedProcess(source, tmp_path / "server", "--faults", str(plan)) as server,
        live_mount(server.url, tmp_path / "m", *flags) as mount,
    ):
        assert len(os.listdir(mount.root)) == FILES
        yield Scene(mount, contents)


@pytest.mark.long
def test_f17_worker_without_threads_answers_eio_and_goes_on(scene: Scene, expected_logs: Callable[..., None]) -> None:
    """S22: reads that a thread was to wait for."""
    expected_logs("no thread can be started")
    expected_logs("request failed")
    before = scene.pids()
    worker = before["worker 0"]
    assert worker is not None
    with ThreadPoolExecutor(FILES) as pool:
        with no_more_threads(worker):
            threads = len(os.listdir(f"/proc/{worker}/task"))
            answers = Counter(pool.map(scene.read, scene.contents))
            assert len(os.listdir(f"/proc/{worker}/task")) <= threads
        assert set(answers) <= {0, errno.EIO}
        assert answers[errno.EIO], "nobody was refused, so nothing was tested"
        assert set(pool.map(scene.read, scene.contents)) == {0}
    assert scene.pids() == before


def test_f17_agent_without_threads_answers_what_it_knows_and_goes_on(
    scene: Scene, expected_logs: Callable[..., None]
) -> None:
    """Names that are known are served; what takes a listing is an error; then it is listed, and pushed."""
    expected_logs("no thread can be started", optional=True)
    expected_logs("request failed", optional=True)
    before = scene.pids()
    agent = before["agent"]
    assert agent is not None
    with no_more_threads(agent):
        assert scene.read("f0") == 0
        assert len(os.listdir(scene.mount.root)) == FILES
    scene.mount.refresh()
    assert scene.read("f1") == 0
    assert scene.pids() == before
