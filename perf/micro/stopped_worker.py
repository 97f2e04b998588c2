"""What others notice when one worker process is stopped (SIGSTOP): latency of reads before and while.

    python -m perf.micro.stopped_worker [--seconds 10] [--readers 4] [--workers 2]

A mount in mode no-open, over an embedded server whose block files are hard links to their source, so that every direct
read (4 KiB, O_DIRECT) is a worker's: the gate does not read files that have a second name. Prints the distribution of
each phase and the ratio of their 99th percentiles; the bar is 2. The requests that the stopped worker had taken are
given to another one after 0.25 s (`fusecache.kernel.gate.dispatch.OVERDUE_S`): they are too few to be seen there.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.t4_mount.board import warm
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, live_mount

BAR = 2.0
FILE_BYTES = 512 << 10
FILES = 32
READ_BYTES = 4096


class Reader(threading.Thread):
    """Reads at random offsets until told to stop; keeps every read's time."""

    def __init__(self, paths: Sequence[Path], seed: int, stop: threading.Event) -> None:
        super().__init__()
        self.took_s: list[float] = []
        self._paths = paths
        self._rng = random.Random(seed)
        self._stopping = stop

    def run(self) -> None:
        """One reader's loop."""
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in self._paths]
        with mmap.mmap(-1, READ_BYTES) as buffer:
            while not self._stopping.is_set():
                offset = self._rng.randrange(FILE_BYTES // READ_BYTES) * READ_BYTES
                descriptor = self._rng.choice(descriptors)
                began_s = time.perf_counter()
                got = os.preadv(descriptor, [buffer], offset)
                self.took_s.append(time.perf_counter() - began_s)
                assert got == READ_BYTES
        for descriptor in descriptors:
            os.close(descriptor)


def phase(paths: Sequence[Path], readers: int, seconds: float) -> list[float]:
    """Seconds of every read of all readers together."""
    stop = threading.Event()
    threads = [Reader(paths, seed, stop) for seed in range(readers)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return [took_s for thread in threads for took_s in thread.took_s]


def shown(name: str, took_s: Sequence[float]) -> float:
    """Print a line; the 99th percentile in seconds."""
    cuts = statistics.quantiles(took_s, n=1000, method="inclusive")
    print(
        f"{name:<12} {len(took_s):>8,} reads, median {cuts[499] * 1e6:,.0f} us, 99 % {cuts[989] * 1e6:,.0f} us, "
        f"99.9 % {cuts[998] * 1e6:,.0f} us, longest {max(took_s) * 1e3:,.1f} ms"
    )
    return cuts[989]


def measure(mount: LiveMount, readers: int, seconds: float) -> float:
    """Ratio of the 99th percentiles."""
    paths = sorted(mount.root.iterdir())
    for path in paths:
        warm(path)
    phase(paths, readers, seconds / 5)
    before_s = shown("all run", phase(paths, readers, seconds))
    pid = mount.parts()["worker 0"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        while_s = shown("one stopped", phase(paths, readers, seconds))
        assert mount.parts()["worker 0"].pid == pid, "it was replaced meanwhile"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not mount.gate()["direct_reads"]["reads"], "the gate read by itself, so no worker was measured"
    return while_s / before_s


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m perf.micro.stopped_worker")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (default 10)")
    parser.add_argument("--readers", type=int, default=4, help="threads that read (default 4)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-stopped-") as name:
        folder = Path(name)
        source = folder / "source"
        source.mkdir()
        for number in range(FILES):
            (source / f"f{number}").write_bytes(random.Random(number).randbytes(FILE_BYTES))
        server = EmbeddedProcess(source, folder / "server")
        flags = ("--open-mode", "no-open", "--workers", str(chosen.workers), "--silent-s", "3600")
        with server, live_mount(server.url, folder, *flags) as mount:
            ratio = measure(mount, chosen.readers, chosen.seconds)
    print(f"99 % while one worker is stopped: {ratio:.2f} times that of before (bar {BAR:g})")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
