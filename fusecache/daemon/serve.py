"""`fusecache serve`: one process per mount of the configuration file, and one HTTP address for all of them.

Each mount runs in a process of its own (pyfuse3 has one session per process). This process starts them, forwards
SIGTERM and SIGINT, and ends when they have ended; what hangs is killed after STOP_S. A mount that dies takes the others
down in order and is named by the error, so that whoever runs `serve` restarts the whole; nothing is restarted here. A
mount that somebody unmounted ends with 0 and leaves the others alone. Mount points that are missing are made.

A mount that another process serves is taken over (`daemon.takeover`), each by itself. Where that other process is a
`serve` too, it has the HTTP address until its last mount is handed over: this one gets it then. A `serve` whose mounts
were all taken over ends with 0, or stays until a signal comes (`stays`): whoever restarts what has ended, as Kubernetes
does, would have it take them back.

With `controller:` in the file, what the mounts hold is reported to it (`daemon.node_reports`); mounts never notice.

    /metrics   every mount's metrics, each sample with mount="<mount point>", and this process's own without
    /healthz   every mount that runs answers its control socket
    /readyz    every mount of the file serves reads: it did once, runs, and answers
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import structlog

import fusecache
from fusecache import metrics
from fusecache.config.load import Configuration
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.control_client import call, mount_lock, socket_path
from fusecache.daemon.mount_process import STOP_S, MountFailed, MountProcess
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.daemon.ready_file import ReadyFile
from fusecache.errors import FusecacheError, StateError, UsageError
from fusecache.status_http import StatusServer

if TYPE_CHECKING:
    from fusecache.daemon.node_reports import NodeReports

log = structlog.get_logger(__name__)

ASK_S = 5.0
"""Seconds a mount may take to answer its control socket before it counts as stuck."""

ADDRESS_AGAIN_S = 0.5
"""Between two tries to get the HTTP address that another `serve` still has."""


class _Ready(NamedTuple):
    process: MountProcess


class _Failed(NamedTuple):
    process: MountProcess
    failure: FusecacheError


class _Ended(NamedTuple):
    process: MountProcess
    how: str


class _Signal(NamedTuple):
    number: int


_Event = _Ready | _Failed | _Ended | _Signal


def plans(configuration: Configuration) -> list[tuple[str, MountPlan]]:
    """(source, plan) of every mount of the file, checked before any is started. UsageError for a wrong one."""
    if configuration.file is None:
        raise UsageError("serve needs a configuration file; give --config FILE")
    if not configuration.mounts:
        raise UsageError(f"{configuration.file} has no mounts; add `mounts:` with source and mountpoint")
    found = []
    link = configuration.controller
    for mount in configuration.mounts:
        plan = configuration.plan_of(mount)
        # One address for all: the children answer through their control sockets.
        settings = plan.settings.model_copy(update={"metrics_address": None})
        report_interval_s = link.report_interval_s if link is not None else None
        found.append(
            (mount.source, plan.model_copy(update={"settings": settings, "report_interval_s": report_interval_s}))
        )
    return found


def run(
    configuration: Configuration, ready: Callable[[], None], *, stays: bool = False, ready_file: Path | None = None
) -> None:
    """Run all mounts until they have ended or a signal came. Blocks; `ready` is called when all serve reads.
    `stays`: wait for the signal also when all were handed over. `ready_file` is there while all serve reads.

    Raises the error of the mount that failed first.
    """
    chosen = plans(configuration)
    found = ReadyFile(ready_file)
    own = metrics.Metrics(show_unused=False)
    own.gauge("fusecache_build_info", version=fusecache.__version__).set(1)
    reports = _reports_of(configuration, own)
    mountpoint.check_device()
    takes_over = False
    for _, plan in chosen:
        identity_of(plan.settings)
        prepare_folders(plan)
        with mountpoint.claim(mount_lock(plan.settings.runtime_dir, plan.mountpoint)):
            mountpoint.make_missing(plan.mountpoint)
            takes_over |= mountpoint.prepare(plan.mountpoint)
    address = configuration.settings.metrics_address
    _Group(chosen, address, ready, own, reports, takes_over=takes_over, stays=stays, ready_file=found).run()


def _reports_of(configuration: Configuration, own: metrics.Metrics) -> NodeReports | None:
    """None when nobody is to be told. UsageError when this node has no name."""
    if configuration.controller is None:
        return None
    from fusecache.daemon.node_reports import NodeReports

    return NodeReports(configuration.controller, own)


class _Group:
    """The children and what happens to them, as events of one queue."""

    def __init__(
        self,
        chosen: list[tuple[str, MountPlan]],
        address: str | None,
        ready: Callable[[], None],
        own: metrics.Metrics,
        reports: NodeReports | None,
        *,
        takes_over: bool,
        stays: bool,
        ready_file: ReadyFile,
    ) -> None:
        """`own`: the metrics of this process, beside those of the mounts. `takes_over`: another process has some."""
        self._chosen = chosen
        self._address = address
        self._on_ready = ready
        self._own = own
        self._reports = reports
        self._takes_over = takes_over
        self._stays = stays
        self._ready_file = ready_file
        self._server: StatusServer | None = None
        self._waits_for_address = False
        self._handed_over: list[str] = []
        """Mount points that another process serves now."""

        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._processes: list[MountProcess] = []
        self._ready: set[int] = set()
        """Process ids of mounts that serve reads."""
        self._watchers: list[threading.Thread] = []
        self._killed_at_s: float | None = None
        """Monotonic time at which mounts that have not ended are killed; None while they may run."""

    def run(self) -> None:
        """Until all have ended."""
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        previous = {
            number: signal.signal(number, lambda number, frame: self._on_signal(number, frame))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._listen()
            for source, plan in self._chosen:
                self._start(source, plan)
            if self._reports is not None:
                self._reports.start(self._processes)
            if self._attend() and self._handed_over:
                self._make_way()
        finally:
            self._ready_file.remove()
            if self._reports is not None:
                # Before the mounts are waited for: no pod is to be sent here from now on.
                self._reports.stop("the node's daemon ends")
            self._stop_all()
            self._stop_listening()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _listen(self) -> None:
        """StateError when the address can't be had, unless another process has it that will give it up."""
        if self._address is None or self._server is not None:
            return
        server = StatusServer(
            self._address, exposition=self._exposition, health=self._why_unhealthy, ready=self._why_not_ready
        )
        try:
            server.start()
        except StateError as failure:
            if not self._takes_over:
                raise
            if not self._waits_for_address:
                log.info("status_http_waits", why=str(failure))
            self._waits_for_address = True
            return
        self._waits_for_address = False
        self._server = server
        log.info("status_http_listening", address=server.address)

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _make_way(self) -> None:
        """All mounts have ended, and other processes have them: what this one still holds is theirs too."""
        log.info("handed_over", mounts=len(self._processes))
        self._ready_file.remove()
        self._stop_listening()
        if self._reports is not None:
            self._reports.abandon()
            self._reports = None
        while self._stays:
            if isinstance(self._events.get(), _Signal):
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(_Signal(number))

    def _start(self, source: str, plan: MountPlan) -> None:
        process = MountProcess(plan, source, die_with_parent=True)
        self._processes.append(process)
        watcher = threading.Thread(target=self._watch, args=(process,), name=f"watch-{process.pid}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, process: MountProcess) -> None:
        try:
            process.wait_ready()
        except FusecacheError as failure:
            self._events.put(_Failed(process, failure))
            return
        self._events.put(_Ready(process))
        self._events.put(_Ended(process, process.wait_end()))

    def _attend(self) -> bool:
        """Until all have ended; False: because that was asked for."""
        running = len(self._processes)
        stopping = False
        while running:
            self._listen()
            try:
                event = self._events.get(timeout=ADDRESS_AGAIN_S if self._waits_for_address else self._patience_s())
            except queue.Empty:
                if self._waits_for_address and self._patience_s() != 0.0:
                    continue
                return False  # asked to end, and something hangs
            match event:
                case _Ready(process):
                    self._ready.add(process.pid)
                    log.info("mount_ready", mountpoint=str(process.plan.mountpoint), pid=process.pid)
                    if len(self._ready) == len(self._processes):
                        self._ready_file.make()
                        self._on_ready()
                case _Failed(process, failure):
                    running -= 1
                    self._report_end(process, str(failure))
                    if not stopping:
                        raise MountFailed(f"{failure} (mount {process.plan.mountpoint})", failure.exit_code)
                case _Ended(process, how):
                    running -= 1
                    self._ready_file.remove()
                    self._ready.discard(process.pid)
                    handed_over = process.exit_code == 0 and self._is_served_by_another(process)
                    if handed_over:
                        self._handed_over.append(str(process.plan.mountpoint))
                    unmounted = process.exit_code == 0
                    if not handed_over:
                        self._report_end(process, "it was unmounted" if unmounted else f"its process ended with {how}")
                    how = "handed over to another process" if handed_over else how
                    log.info("mount_ended", mountpoint=str(process.plan.mountpoint), how=how)
                    if process.exit_code != 0 and not stopping:
                        raise MountFailed(
                            f"mount {str(process.plan.mountpoint)!r} ended with {how}; all others were stopped", 3
                        )
                case _Signal(number):
                    log.info("stopping", signal=signal.Signals(number).name)
                    stopping = True
                    self._ready_file.remove()
                    if self._reports is not None:
                        self._reports.end(f"the node's daemon ends ({signal.Signals(number).name})")
                    self._ask_to_end()
        return not stopping

    def _is_served_by_another(self, process: MountProcess) -> bool:
        """Whether there is a mount of ours although its process here has ended well."""
        mounted = mountpoint.find_mount(process.plan.mountpoint)
        return mounted is not None and mountpoint.is_ours(mounted)

    def _report_end(self, process: MountProcess, how: str) -> None:
        if self._reports is not None:
            self._reports.ended(process, how)

    def _ask_to_end(self) -> None:
        if self._killed_at_s is None:
            self._killed_at_s = time.monotonic() + STOP_S
        for process in self._processes:
            process.terminate()

    def _patience_s(self) -> float | None:
        """What is left of STOP_S, for all mounts together; None = nobody asked them to end."""
        return None if self._killed_at_s is None else max(0.0, self._killed_at_s - time.monotonic())

    def _stop_all(self) -> None:
        self._ask_to_end()
        for process in self._processes:
            process.stop(self._patience_s() or 0.0)
            self._take_down(process)
        for watcher in self._watchers:
            watcher.join()

    def _take_down(self, process: MountProcess) -> None:
        """A mount whose process was killed stays behind, dead: free its name."""
        path = process.plan.mountpoint
        try:
            mounted = mountpoint.find_mount(path)
            if mounted is not None and mountpoint.is_ours(mounted) and mountpoint.probe(path, ASK_S) == "dead":
                mountpoint.detach(path)
        except FusecacheError as failure:
            log.warning("dead_mount_left", mountpoint=str(path), error=failure)

    def _ask(self, process: MountProcess, kind: str) -> dict[str, object]:
        return call(socket_path(process.plan.settings.runtime_dir, process.plan.mountpoint), kind, ASK_S)

    def _exposition(self) -> str:
        texts = {"": self._own.exposition()}
        for process in self._processes:
            if process.exit_code is not None:
                continue
            try:
                texts[str(process.plan.mountpoint)] = str(self._ask(process, "metrics")["text"])
            except FusecacheError as failure:
                log.warning("mount_metrics_missing", mountpoint=str(process.plan.mountpoint), error=failure)
        return metrics.merge(texts, "mount")

    def _why_unhealthy(self) -> str | None:
        for process in self._processes:
            if process.exit_code is None and process.pid in self._ready:
                try:
                    self._ask(process, "status")
                except FusecacheError as failure:
                    return f"mount {process.plan.mountpoint}: {failure}"
        return None

    def _why_not_ready(self) -> str | None:
        if self._handed_over:
            return "handed over to another process: " + ", ".join(self._handed_over)
        waiting = [str(process.plan.mountpoint) for process in self._processes if process.pid not in self._ready]
        if len(self._processes) < len(self._chosen) or waiting:
            return "not ready: " + ", ".join(waiting or ["starting"])
        return self._why_unhealthy()
