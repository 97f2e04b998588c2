"""Reader processes under load: every byte held against the content, every system call timed, every error kept.

`Load(shown, source, names)` starts processes that read the named files of `shown` in several ways by chance (whole,
pieces, past the page cache, mapped, attributes and listings) and compare with the same piece of `source`, which is no
part of what is tested. What they found comes back from `stop()`; `calls()` tells meanwhile that they get on.

    with Load(mount.root, source, names) as load:
        ...
        report = load.stop()
    assert report.errors == [] and report.wrong == []

Run as a program this file is one reader. It uses the standard library only, so that eight of them start quickly.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

STOP_S = 60.0
"""A reader may be inside a call that waits for its budget."""

_T = TypeVar("_T")

SLOW_S = 0.02
"""System calls that took longer are kept one by one, with the time of their start."""

KEPT = 50
"""Errors and differences that are kept; all are counted."""

_CELL = struct.Struct("<QQ")
"""What a reader tells while it runs: calls, bytes."""

WAYS = ("whole", "piece", "piece", "direct", "mapped", "stat", "listing")
"""By chance; pieces are the most common."""


class Slow(NamedTuple):
    """A system call that took long."""

    started_s: float
    """Monotonic clock of the machine."""
    took_s: float


class Report(NamedTuple):
    """What all readers found."""

    calls: list[int]
    """By reader: a file read whole or in some pieces, a stat, a listing."""
    read_bytes: int
    errors: list[str]
    wrong: list[str]
    longest_s: list[float]
    """By reader, of one system call."""
    slow: list[Slow]

    def describe(self) -> str:
        """In a line."""
        return (
            f"{sum(self.calls)} calls, {self.read_bytes / 1e6:.0f} MB, {len(self.errors)} errors, "
            f"{len(self.wrong)} wrong, longest call {max(self.longest_s):.2f} s"
        )


class Load:
    """Readers that run until `stop`."""

    def __init__(
        self, shown: Path, source: Path, names: Sequence[str], *, processes: int = 8, ways: Sequence[str] = WAYS,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self._specs = [
            {
                "shown": str(shown),
                "source": str(source),
                "names": list(names),
                "ways": list(ways),
                "seed": seed * 1000 + n,
            }
            for n in range(processes)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def __enter__(self) -> Load:
        with tempfile.TemporaryFile() as board:
            board.truncate(mmap.PAGESIZE)
            self._board = mmap.mmap(board.fileno(), mmap.PAGESIZE)
            for number, spec in enumerate(self._specs):
                arguments = [sys.executable, "-S", "-E", __file__, str(board.fileno()), str(number), json.dumps(spec)]
                self._processes.append(
                    subprocess.Popen(
                        arguments,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        pass_fds=[board.fileno()],
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._board.close()

    @property
    def pids(self) -> list[int]:
        """The readers."""
        return [process.pid for process in self._processes]

    def calls(self) -> list[int]:
        """Calls that each reader has ended so far."""
        return [_CELL.unpack_from(self._board, (n + 1) * _CELL.size)[0] for n in range(len(self._processes))]

    def wait_for_calls(self, more: int, within_s: float = STOP_S) -> None:
        """Until all readers together have ended so many more calls, and each at least one (some start late);
        AssertionError when they don't in time."""
        deadline = time.monotonic() + within_s
        wanted = sum(self.calls()) + more
        while sum(calls := self.calls()) < wanted or not all(calls):
            ended = [process.pid for process in self._processes if process.poll() is not None]
            assert not ended, f"readers {ended} have ended: {self.stop()}"
            assert time.monotonic() < deadline, f"no progress within {within_s} s: {self.calls()}"
            time.sleep(0.002)

    def kill(self, within_s: float) -> None:
        """SIGKILL all readers in whatever they do; TimeoutExpired when one is not gone in time."""
        for process in self._processes:
            process.kill()
        deadline = time.monotonic() + within_s
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))

    def stop(self) -> Report:
        """Let each reader end its call; what all of them found. A reader that died is an error."""
        self._board[0] = 1
        calls, longest_s = [], []
        read_bytes = 0
        errors: list[str] = []
        wrong: list[str] = []
        slow: list[Slow] = []
        for process in self._processes:
            out, text = process.communicate(timeout=STOP_S)
            if process.returncode != 0:
                errors.append(f"a reader ended with {process.returncode}: {text.decode(errors='replace')}")
                continue
            told: dict[str, Any] = json.loads(out)
            calls.append(told["calls"])
            longest_s.append(told["longest_s"])
            read_bytes += told["bytes"]
            errors += told["errors"]
            wrong += told["wrong"]
            slow += [Slow(*pair) for pair in told["slow"]]
        return Report(calls, read_bytes, errors, wrong, longest_s, sorted(slow))


class _Reader:
    """One reader process."""

    def __init__(self, board: mmap.mmap, number: int, spec: dict[str, Any]) -> None:
        self._board = board
        self._cell = (number + 1) * _CELL.size
        self._shown, self._source = spec["shown"], spec["source"]
        self._names: list[str] = spec["names"]
        self._ways: list[str] = spec["ways"]
        self._rng = random.Random(spec["seed"])
        self._sizes = {name: os.stat(os.path.join(self._source, name)).st_size for name in self._names}
        self._content = {name: os.open(os.path.join(self._source, name), os.O_RDONLY) for name in self._names}
        self._buffer = mmap.mmap(-1, 1 << 20)
        self.found: dict[str, Any] = {
            "calls": 0, "bytes": 0, "errors": [], "wrong": [], "longest_s": 0.0, "slow": [],
        }  # fmt: skip

    def run(self) -> None:
        """Until told to stop."""
        actions: dict[str, Callable[[str], None]] = {
            "whole": self._whole,
            "piece": self._piece,
            "direct": self._direct,
            "mapped": self._mapped,
            "stat": self._stat,
            "listing": self._listing,
        }
        found = self.found
        while not self._board[0]:
            way, name = self._rng.choice(self._ways), self._rng.choice(self._names)
            try:
                actions[way](name)
            except OSError as failure:
                self._keep("errors", f"{way} of {name}: {failure}")
            found["calls"] += 1
            _CELL.pack_into(self._board, self._cell, found["calls"], found["bytes"])

    def _timed(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """One system call (of a mapping: one access)."""
        started_s = time.monotonic()
        try:
            return call(*arguments)
        finally:
            took_s = time.monotonic() - started_s
            self.found["longest_s"] = max(self.found["longest_s"], took_s)
            if took_s > SLOW_S:
                self.found["slow"].append((started_s, took_s))

    def _keep(self, kind: str, text: str) -> None:
        kept = self.found[kind]
        kept.append(text if len(kept) < KEPT else "and more")

    def _check(self, name: str, offset: int, size: int, got: bytes, way: str) -> None:
        expected = os.pread(self._content[name], size, offset)
        self.found["bytes"] += len(got)
        if got != expected:
            what = "other bytes" if len(got) == len(expected) else f"{len(got)} bytes instead of {len(expected)}"
            self._keep("wrong", f"{way} of {name} at {offset}, {size} bytes: {what}")

    def _open(self, name: str, *, flags: int = 0, forget: bool = False) -> int:
        descriptor = self._timed(os.open, os.path.join(self._shown, name), os.O_RDONLY | flags)
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor

    def _whole(self, name: str) -> None:
        descriptor = self._open(name, forget=self._rng.random() < 0.5)
        try:
            size = self._sizes[name]
            pieces = []
            while piece := self._timed(os.read, descriptor, 1 << 20):
                pieces.append(piece)
            self._check(name, 0, size + 1, b"".join(pieces), "whole")
        finally:
            os.close(descriptor)

    def _piece(self, name: str) -> None:
        descriptor = self._open(name, forget=self._rng.random() < 0.7)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(4):
                offset = self._rng.randrange(self._sizes[name] + 1)
                size = self._rng.choice((1, 4096, 16384, 131072))
                self._check(name, offset, size, self._timed(os.pread, descriptor, size, offset), "piece")
        finally:
            os.close(descriptor)

    def _direct(self, name: str) -> None:
        descriptor = self._open(name, flags=os.O_DIRECT)
        try:
            offset = self._rng.randrange(self._sizes[name] + 1) // 4096 * 4096
            got = self._timed(os.preadv, descriptor, [self._buffer], offset)
            self._check(name, offset, len(self._buffer), self._buffer[:got], "direct")
        finally:
            os.close(descriptor)

    def _mapped(self, name: str) -> None:
        size = self._sizes[name]
        if not size:
            return
        descriptor = self._open(name, forget=self._rng.random() < 0.5)
        try:
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
                for _ in range(4):
                    offset = self._rng.randrange(size)
                    got = self._timed(mapped.__getitem__, slice(offset, offset + 5000))
                    self._check(name, offset, 5000, got, "mapped")
        finally:
            os.close(descriptor)

    def _stat(self, name: str) -> None:
        if self._timed(os.stat, os.path.join(self._shown, name)).st_size != self._sizes[name]:
            self._keep("wrong", f"size of {name}")

    def _listing(self, name: str) -> None:
        folder = os.path.dirname(name)
        expected = sorted(os.listdir(os.path.join(self._source, folder)))
        if sorted(self._timed(os.listdir, os.path.join(self._shown, folder))) != expected:
            self._keep("wrong", f"listing of {folder!r}")


def main(arguments: Sequence[str]) -> None:
    """One reader: descriptor of the board, its number, what it reads."""
    board = mmap.mmap(int(arguments[0]), mmap.PAGESIZE)
    reader = _Reader(board, int(arguments[1]), json.loads(arguments[2]))
    reader.run()
    json.dump(reader.found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
