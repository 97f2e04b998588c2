"""What the node holds, in `serve`: every mount is asked again and again, and its last word is kept.

One thread a mount, because one that is stuck must not hold up the word of the others: it asks the control socket for
`locality` twice in a report interval. A mount that does not answer in time, or can't be asked, is not ready from then
on, with the reason; so is one whose process has ended, at once. `on_change` is called when a mount's readiness is
another one, so that it is reported without waiting for the interval.

What the answers mean together is decided in `locality.holdings`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from fusecache.daemon.control_client import call, socket_path
from fusecache.daemon.mount_process import MountProcess
from fusecache.errors import FusecacheError
from fusecache.locality.holdings import Holdings, MountAnswer, answer_of, merge, silent

log = structlog.get_logger(__name__)

SHORTEST_ANSWER_S = 1.0
"""A mount may take half a report interval to answer, and at least this: a busy machine is no dead mount."""

LONGEST_ANSWER_S = 5.0
CLOSE_S = 0.25

STARTING = "it is starting"

MEASURED_S = 120.0
"""Bytes measured longer ago than this (or than three report intervals) count as nothing. With 1.3 million blocks that
come and go, a measurement takes 4 s of work and comes each 45 s."""


class NodeHoldings:
    """See the module. `holdings` may be called by any thread."""

    def __init__(self, interval_s: float, *, on_change: Callable[[], None]) -> None:
        """`interval_s`: between two reports."""
        self._pause_s = interval_s / 2
        self._answer_s = min(LONGEST_ANSWER_S, max(SHORTEST_ANSWER_S, self._pause_s))
        self._max_age_s = max(MEASURED_S, 3 * interval_s)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._answers: dict[str, MountAnswer] = {}
        self._ended: set[str] = set()
        self._closed = threading.Event()
        self._askers: list[threading.Thread] = []

    def watch(self, processes: Sequence[MountProcess]) -> None:
        """Begin to ask these mounts. One whose mount point was asked for before takes that one's place."""
        for process in processes:
            mountpoint = str(process.plan.mountpoint)
            with self._lock:
                if mountpoint in self._ended:
                    self._ended.discard(mountpoint)
                    self._answers[mountpoint] = silent(mountpoint, STARTING)
                self._answers.setdefault(mountpoint, silent(mountpoint, STARTING))
            asker = threading.Thread(target=self._ask, args=(process,), name=f"ask-{process.pid}", daemon=True)
            self._askers.append(asker)
            asker.start()

    def ended(self, process: MountProcess, reason: str) -> None:
        """A mount's process has ended: it is not ready, whatever it said last."""
        mountpoint = str(process.plan.mountpoint)
        with self._lock:
            if self._closed.is_set():
                return
            self._ended.add(mountpoint)
            self._answers[mountpoint] = self._gone(mountpoint, reason)
        self._on_change()

    def holdings(self) -> Holdings:
        """The node as its mounts said last."""
        with self._lock:
            answers = list(self._answers.values())
        return merge(answers)

    def freeze(self) -> None:
        """Ask no more: what is known now is what was known last, whatever becomes of the mounts."""
        with self._lock:
            self._closed.set()

    def close(self) -> None:
        """Freeze, and wait for the threads. Takes CLOSE_S at most: one that waits for a stuck mount ends by itself,
        within LONGEST_ANSWER_S."""
        self.freeze()
        until_s = time.monotonic() + CLOSE_S
        for asker in self._askers:
            asker.join(max(0.0, until_s - time.monotonic()))

    def _ask(self, process: MountProcess) -> None:
        mountpoint = str(process.plan.mountpoint)
        path = socket_path(process.plan.settings.runtime_dir, process.plan.mountpoint)
        while not self._closed.is_set() and process.exit_code is None:
            try:
                answer = answer_of(mountpoint, call(path, "locality", self._answer_s), self._max_age_s)
            except FusecacheError as failure:
                answer = None
                reason = str(failure)
            with self._lock:
                if mountpoint in self._ended or self._closed.is_set():
                    return
                before = self._answers[mountpoint]
                if answer is None:
                    answer = self._gone(mountpoint, before.state.reason if _starting(before) else reason)
                self._answers[mountpoint] = answer
            if answer.state.ready != before.state.ready:
                if before.state.ready:
                    log.warning("mount_not_ready", mountpoint=mountpoint, reason=answer.state.reason)
                self._on_change()
            self._closed.wait(self._pause_s)

    def _gone(self, mountpoint: str, reason: str) -> MountAnswer:
        """What it said last, with its data sets not ready: they did not vanish, they can't be read here."""
        return self._answers[mountpoint]._replace(state=silent(mountpoint, reason).state)


def _starting(answer: MountAnswer) -> bool:
    """It has not said anything yet: its socket is made a moment before it is ready."""
    return not answer.datasets and answer.state.reason == STARTING
