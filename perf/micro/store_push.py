"""Pushing bytes into the kernel's page cache (FUSE_NOTIFY_STORE): how fast, and what the first read gains by it.

    python -m perf.micro.store_push [--files 2000] [--file-bytes 112640] [--rounds 5] [--output perf/results]

The real supervisor and the real gate, in mode no-open; the worker and the agent are stand-ins in this module: the
worker makes bytes up at once (so the read without a push is as fast as it can be), the agent pushes the same bytes
through `kernel.gate_link` with one thread and with four, as prefetching would. No cluster, no local files.

For each round: forget everything, stat every file (the kernel takes bytes only for inodes that it knows), push, read
every file once in random order and check every byte. A round without a push is the comparison.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import select
import signal
import socket
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fusecache.kernel import probe
from fusecache.kernel.gate_link import GateLink
from perf.statistics import bootstrap_median
from tests.support import stand_in_worker
from tests.support.supervised import Supervised, until

SHAPE = "FUSECACHE_STORE_PUSH"
"""Environment of the parts: the shape as "files,bytes"."""
FOLDER = "FUSECACHE_STAND_IN"
FIRST_INODE = 2
THREADS = (1, 4)
PUSH_S = 300.0
POLL_S = 0.01


def shape() -> tuple[int, int]:
    """(files, bytes of each), as the parts are told."""
    files, _, size = os.environ[SHAPE].partition(",")
    return int(files), int(size)


def content(inode: int, size_bytes: int) -> bytes:
    """A file's bytes: a function of its inode."""
    word = struct.pack("<Q", inode * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    return (word * -(-size_bytes // len(word)))[:size_bytes]


class MadeUpFiles(stand_in_worker.StandIn):
    """Serves one folder of files named by their number."""

    def __init__(self, requests: int, slots: int, offers: int, folder: Path) -> None:
        super().__init__(requests, slots, offers, folder)
        self.files, self.size_bytes = shape()

    def _attributes(self, inode: int) -> bytes:
        if inode == stand_in_worker.ROOT:
            return stand_in_worker.attributes(inode)
        times = (0,) * 6
        fields = (inode, self.size_bytes, self.size_bytes // 512, *times, stat.S_IFREG | 0o644, 1, 0, 0, 0, 4096, 0)
        return stand_in_worker.ATTRIBUTES.pack(*fields)

    def _handle(self, message: bytes) -> None:
        _, opcode, unique, inode, *_ = stand_in_worker.IN_HEADER.unpack_from(message)
        body = message[stand_in_worker.IN_HEADER.size :]
        valid_s = stand_in_worker.VALID_S
        if opcode == stand_in_worker.GETATTR:
            self._answer(unique, struct.pack("<QII", valid_s, 0, 0) + self._attributes(inode))
        elif opcode == stand_in_worker.LOOKUP:
            name = body.rstrip(b"\0")
            if not name.isdigit() or int(name) >= self.files:
                self._answer(unique, error=errno.ENOENT)
                return
            found = FIRST_INODE + int(name)
            entry = struct.pack("<QQQQII", found, 0, valid_s, valid_s, 0, 0)
            self._answer(unique, entry + self._attributes(found))
        elif opcode == stand_in_worker.READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            slot = self._slots.take(size)
            assert slot is not None, "the gate sent more READs than there are slots"
            piece = content(inode, self.size_bytes)[offset : offset + size]
            slot.view[: len(piece)] = piece
            self._answer(unique, self._slots.token(slot, len(piece)))
        else:
            super()._handle(message)


def serve_worker(arguments: list[str]) -> None:
    """The worker's process."""
    parser = argparse.ArgumentParser()
    for flag in ("requests-fd", "slots-fd", "offers-fd"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    flags, _ = parser.parse_known_args(arguments)
    MadeUpFiles(flags.requests_fd, flags.slots_fd, flags.offers_fd, Path(os.environ[FOLDER])).serve()


def push_all(link: GateLink, threads: int) -> dict[str, Any]:
    """Every file, from so many threads."""
    files, size_bytes = shape()
    refused: list[int] = []

    def push(start: int) -> None:
        for inode in range(FIRST_INODE + start, FIRST_INODE + files, threads):
            try:
                link.store(inode, 0, content(inode, size_bytes))
            except OSError as refusal:
                refused.append(refusal.errno or 0)

    pushers = [threading.Thread(target=push, args=(start,)) for start in range(threads)]
    begin = time.perf_counter()
    for pusher in pushers:
        pusher.start()
    for pusher in pushers:
        pusher.join()
    return {"seconds": time.perf_counter() - begin, "refused": len(refused)}


def serve_agent(arguments: list[str]) -> None:
    """The agent's process: orders are files in the folder, `order-N.json`, answered by `answer-N.json`."""
    parser = argparse.ArgumentParser()
    for flag in ("gate-fd", "control-fd", "ready-fd"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    flags, _ = parser.parse_known_args(arguments)
    folder = Path(os.environ[FOLDER])
    control = socket.socket(fileno=flags.control_fd)
    link = GateLink(flags.gate_fd)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def say(**message: Any) -> None:
        control.send(json.dumps(message).encode())

    say(kind="prepared", open_mode="no-open", why="the benchmark says so")
    done = 0
    while True:
        if select.select([control], [], [], POLL_S)[0]:
            data = control.recv(1 << 16)
            if not data:
                return
            kind = json.loads(data)["kind"]
            if kind == "ping":
                say(kind="pong")
            elif kind == "serving":
                os.write(flags.ready_fd, b"ready\n")
                say(kind="ready")
        order = folder / f"order-{done}.json"
        if order.exists():
            threads = json.loads(order.read_text())["threads"]
            answer = push_all(link, threads) if threads else {}
            answer["reads"] = link.status()["dispatched"].get("READ", 0)
            part = folder / "answer.part"
            part.write_text(json.dumps(answer))
            part.rename(folder / f"answer-{done}.json")
            done += 1


class Pusher:
    """Gives the agent orders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = 0

    def order(self, threads: int) -> dict[str, Any]:
        """Push with so many threads (0: only tell how many READs workers were sent so far)."""
        part = self._folder / "order.part"
        part.write_text(json.dumps({"threads": threads}))
        part.rename(self._folder / f"order-{self._orders}.json")
        answer = self._folder / f"answer-{self._orders}.json"
        self._orders += 1
        until(answer.exists, "the agent has pushed", PUSH_S)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def read_all(mountpoint: Path, files: int, size_bytes: int, seed: int) -> float:
    """Files a second, every byte compared."""
    numbers = list(range(files))
    random.Random(seed).shuffle(numbers)
    found = []
    begin = time.perf_counter()
    for number in numbers:
        descriptor = os.open(mountpoint / str(number), os.O_RDONLY)
        found.append(os.read(descriptor, size_bytes))
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    for number, data in zip(numbers, found, strict=True):
        if data != content(FIRST_INODE + number, size_bytes):
            raise RuntimeError(f"file {number} has other bytes than were pushed")
    return files / seconds


def measure(mount: Supervised, options: argparse.Namespace) -> list[dict[str, float]]:
    """One entry for each push and read."""
    pusher = Pusher(mount.orders)
    results = []
    for seed in range(options.rounds):
        for threads in (0, *THREADS):
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
            for number in range(options.files):
                os.stat(mount.mountpoint / str(number))
            pushed = pusher.order(threads)
            rate = read_all(mount.mountpoint, options.files, options.file_bytes, seed)
            reads = pusher.order(0)["reads"] - pushed["reads"]
            results.append({**pushed, "threads": threads, "first_read": rate, "reads": reads})
    return results


def report(results: list[dict[str, float]], options: argparse.Namespace) -> str:
    """The table as text."""
    lines = [
        f"FUSE_NOTIFY_STORE through the gate: {options.files:,} files of {options.file_bytes / 1024:.0f} KiB, "
        f"{options.rounds} rounds, medians with 95 % intervals",
        "",
        f"{'':24}{'pushed files/s':>26}{'MB/s':>8}{'first read, files/s':>26}{'READs left':>12}{'refused':>9}",
    ]
    for threads in (0, *THREADS):
        rows = [row for row in results if row["threads"] == threads]
        name = f"push, {threads} thread{'s' if threads > 1 else ''}" if threads else "no push"
        pushed, megabytes = "", ""
        if threads:
            rate = bootstrap_median([options.files / row["seconds"] for row in rows])
            pushed = f"{rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}]"
            megabytes = f"{rate.median * options.file_bytes / 1e6:,.0f}"
        read = bootstrap_median([row["first_read"] for row in rows])
        left = statistics.median(row["reads"] for row in rows)
        refused = sum(row.get("refused", 0) for row in rows)
        text = f"{read.median:,.0f} [{read.low:,.0f}, {read.high:,.0f}]"
        lines.append(f"{name:24}{pushed:>26}{megabytes:>8}{text:>26}{left:>12,.0f}{refused:>9,.0f}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Mount, measure, print."""
    roles = {"worker": serve_worker, "agent": serve_agent}
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        roles[sys.argv[1]](sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--file-bytes", type=int, default=110 << 10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for store-push.json and .txt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusecache-push-") as folder:
        mount = Supervised(
            Path(folder),
            probe.probe(),
            worker_argv=(sys.executable, "-m", "perf.micro.store_push", "worker"),
            agent_argv=(sys.executable, "-m", "perf.micro.store_push", "agent"),
            environment={FOLDER: f"{folder}/orders", SHAPE: f"{options.files},{options.file_bytes}"},
        )
        with mount:
            mount.start()
            results = measure(mount, options)
            subprocess.run(["umount", str(mount.mountpoint)], check=True)
            mount.ended()
    text = report(results, options)
    print(text, end="")
    if options.output:
        (options.output / "store-push.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "store-push.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
