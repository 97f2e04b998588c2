"""`fusecache embedded FOLDER`: an embedded server as a process of its own, for people and for mounts.

When every port answers, one JSON line goes to standard output:

    {"master": "127.0.0.1:19998", "tier_folders": ["..."], "block_workers": ["127.0.0.1:29999"], "cluster_id": "..."}

It ends at SIGINT or SIGTERM. As a child of a mount (`end_with_stdin`) it also ends when standard input does, and
when its parent dies in any other way (PR_SET_PDEATHSIG), so that it never outlives what it serves.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
from pathlib import Path
from typing import BinaryIO, TextIO

import structlog

from fusecache.embedded.faults import FaultPlan
from fusecache.embedded.server import DEFAULT_BLOCK_SIZE, EmbeddedServer

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


def run(
    folder: Path,
    *,
    state: Path,
    port: int = 0,
    faults: Path | None = None,
    block_workers: int = 1,
    block_size: int = DEFAULT_BLOCK_SIZE,
    auth: str = "simple",
    sync_interval_ms: int = -1,
    end_with_stdin: bool = False,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
) -> None:
    """Serve `folder` until told to end.

    UsageError names a wrong folder, port, fault plan or value; StateError a state folder that can't be used.
    """
    plan = FaultPlan.from_file(faults) if faults is not None else None
    parent = os.getppid()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if end_with_stdin:
        numbers.append(signal.SIGHUP)
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous_wakeup = signal.set_wakeup_fd(wake_write)
    previous = {number: signal.signal(number, _noted) for number in numbers}
    try:
        if end_with_stdin:
            _hear_of_parents_death()
        server = EmbeddedServer(
            folder,
            state,
            port=port,
            block_workers=block_workers,
            block_size=block_size,
            auth=auth,
            sync_interval_ms=sync_interval_ms,
            faults=plan,
        )
        with server:
            ready = {
                "master": server.master_target,
                "tier_folders": [str(tier) for tier in server.tier_folders],
                "block_workers": list(server.worker_targets),
                "cluster_id": server.cluster_id,
            }
            print(json.dumps(ready), file=stdout or sys.stdout, flush=True)
            log.info("embedded server is ready", folder=str(folder), **ready)
            reason = _wait(wake_read, stdin or sys.stdin.buffer if end_with_stdin else None, parent)
            log.info("embedded server ends", reason=reason)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(wake_read)
        os.close(wake_write)


def _wait(wake: int, stdin: BinaryIO | None, parent: int) -> str:
    """Sleep until a signal or, as a child, the end of standard input or of the parent; why it ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        if stdin is not None:
            selector.register(stdin, selectors.EVENT_READ)
        while stdin is None or os.getppid() == parent:
            for key, _ in selector.select():
                if key.fileobj != wake:
                    if not os.read(key.fd, 4096):
                        return "end of standard input"
                elif signals := set(os.read(wake, 4096)) - {signal.SIGHUP}:
                    return signal.Signals(min(signals)).name
        return "end of the parent"


def _noted(_number: int, _frame: object) -> None:
    """Signals are read from the wake-up descriptor; this only keeps Python from their defaults."""


def _hear_of_parents_death() -> None:
    """Let the kernel send SIGHUP when the thread that started this process ends.

    Thread, not process: one of a thread pool may end long before its process, so the signal is only a reason
    to look whether the parent is still there.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0) != 0:
        log.warning("PR_SET_PDEATHSIG failed", errno=ctypes.get_errno())
