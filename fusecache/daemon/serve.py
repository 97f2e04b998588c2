"""`fusecache serve`: one process per mount of the configuration file, and one HTTP address for all of them.

Each mount runs in a process of its own (pyfuse3 has one session per process). This process starts them, forwards
SIGTERM and SIGINT, and ends when they have ended; what hangs is killed after STOP_S. A mount that dies takes the others
down in order and is named by the error, so that whoever runs `serve` restarts the whole; nothing is restarted here. A
mount that somebody unmounted ends with 0 and leaves the others alone. Mount points that are missing are made.

SIGHUP reads the file again (`serve_plans` says what changed): a mount with other settings gets a new process, which
takes it over from the old one; mounts that are new in the file are started, and those that are not in it any more are
ended. A new process that fails changes nothing for its mount or the others. Not where this process has a terminal: then
SIGHUP ends it as SIGTERM does.

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
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import structlog

import fusecache
from fusecache import logs, metrics
from fusecache.config.load import Configuration
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.control_client import call, mount_lock, socket_path
from fusecache.daemon.mount_process import STOP_S, MountFailed, MountProcess
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.daemon.ready_file import ReadyFile
from fusecache.daemon.serve_plans import Wanted, changes, plans
from fusecache.errors import FusecacheError, StateError, told
from fusecache.kernel.signals import has_terminal
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


def run(
    configuration: Configuration,
    ready: Callable[[], None],
    read_again: Callable[[], Configuration],
    *,
    stays: bool = False,
    ready_file: Path | None = None,
) -> None:
    """Run all mounts until they have ended or a signal came. Blocks; `ready` is called when all serve reads,
    `read_again` at SIGHUP. `stays`: wait for the signal also when all were handed over. `ready_file` is there while all
    serve reads.

    Raises the error of the mount that failed first.
    """
    wanted = plans(configuration)
    found = ReadyFile(ready_file)
    own = metrics.Metrics(show_unused=False)
    own.gauge("fusecache_build_info", version=fusecache.__version__).set(1)
    reports = _reports_of(configuration, own)
    mountpoint.check_device()
    takes_over = False
    for mount in wanted.values():
        takes_over |= _prepare(mount.plan)
    group = _Group(configuration, ready, read_again, own, reports, takes_over=takes_over, stays=stays, ready_file=found)
    group.run(wanted.values())


def _prepare(plan: MountPlan) -> bool:
    """Make and check the folders of a mount, and its mount point. Whether a mount of ours is there, which is taken over
    then. Raises FusecacheError."""
    identity_of(plan.settings)
    prepare_folders(plan)
    with mountpoint.claim(mount_lock(plan.settings.runtime_dir, plan.mountpoint)):
        mountpoint.make_missing(plan.mountpoint)
        return mountpoint.prepare(plan.mountpoint)


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
        configuration: Configuration,
        ready: Callable[[], None],
        read_again: Callable[[], Configuration],
        own: metrics.Metrics,
        reports: NodeReports | None,
        *,
        takes_over: bool,
        stays: bool,
        ready_file: ReadyFile,
    ) -> None:
        """`own`: the metrics of this process, beside those of the mounts. `takes_over`: another process has some."""
        self._configuration = configuration
        self._address = configuration.settings.metrics_address
        self._on_ready = ready
        self._read_again = read_again
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
        self._running = 0
        """Processes whose end was not seen yet."""

        self._serving: dict[Path, MountProcess] = {}
        """Who has the mount at a mount point, or is to mount there; also when it has ended by itself."""

        self._successors: dict[Path, MountProcess] = {}
        """Who is taking the mount at a mount point over from the one that has it."""

        self._ended_early: dict[Path, str] = {}
        """How the one ended that has a successor which has not said yet that it is ready."""

        self._leaving: list[MountProcess] = []
        """Replaced, or no longer wanted: about to end."""

        self._added: set[MountProcess] = set()
        """Started by a reload, and not ready yet: their failure is no end for the others."""

        self._ready: set[int] = set()
        """Process ids of mounts that serve reads."""

        self._is_started = False
        self._is_announced = False
        self._is_stopping = False
        self._reload_wanted = False
        self._hang_up_ends = has_terminal()
        """Seen now, for a terminal that was closed is none."""
        self._watchers: list[threading.Thread] = []
        self._killed_at_s: float | None = None
        """Monotonic time at which mounts that have not ended are killed; None while they may run."""

    def run(self, wanted: Iterable[Wanted]) -> None:
        """Until all have ended."""
        # SimpleQueue.put is reentrant, so a signal handler may call it. SIGHUP stays ignored where it is (nohup).
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        previous = {
            number: signal.signal(number, lambda number, frame: self._on_signal(number, frame))
            for number in (signal.SIGTERM, signal.SIGINT, *hang_up)
        }
        try:
            self._listen()
            for mount in wanted:
                self._serving[mount.plan.mountpoint] = self._start(mount)
            self._is_started = True
            if self._reports is not None:
                self._reports.start(list(self._serving.values()))
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
        log.info("handed_over", mounts=len(self._handed_over))
        self._ready_file.remove()
        self._stop_listening()
        if self._reports is not None:
            self._reports.abandon()
            self._reports = None
        while self._stays:
            event = self._events.get()
            if isinstance(event, _Signal) and (event.number != signal.SIGHUP or self._hang_up_ends):
                return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(_Signal(number))

    def _start(self, mount: Wanted) -> MountProcess:
        process = MountProcess(mount.plan, mount.source, die_with_parent=True)
        self._running += 1
        watcher = threading.Thread(target=self._watch, args=(process,), name=f"watch-{process.pid}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        return process

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
        while self._running:
            self._listen()
            try:
                event = self._events.get(timeout=ADDRESS_AGAIN_S if self._waits_for_address else self._patience_s())
            except queue.Empty:
                if self._waits_for_address and self._patience_s() != 0.0:
                    continue
                return False  # asked to end, and something hangs
            match event:
                case _Ready(process):
                    self._is_ready(process)
                case _Failed(process, failure):
                    self._running -= 1
                    self._has_failed(process, failure)
                case _Ended(process, how):
                    self._running -= 1
                    self._has_ended(process, how)
                case _Signal(signal.SIGHUP) if not self._hang_up_ends:
                    self._reload_wanted = True
                case _Signal(number):
                    log.info("stopping", signal=signal.Signals(number).name)
                    self._is_stopping = True
                    self._ready_file.remove()
                    if self._reports is not None:
                        self._reports.end(f"the node's daemon ends ({signal.Signals(number).name})")
                    self._ask_to_end()
            if self._reload_wanted and not self._is_stopping and self._is_settled():
                self._reload_wanted = False
                self._reload()
        return not self._is_stopping

    def _is_settled(self) -> bool:
        """No mount is on its way from one process to another, or to its first word."""
        started = [process for process in self._serving.values() if process.exit_code is None]
        return not self._successors and all(process.pid in self._ready for process in started)

    def _is_ready(self, process: MountProcess) -> None:
        point = process.plan.mountpoint
        self._ready.add(process.pid)
        self._added.discard(process)
        if self._successors.get(point) is process:
            del self._successors[point]
            old, self._serving[point] = self._serving[point], process
            self._ready.discard(old.pid)
            if self._ended_early.pop(point, None) is None:
                self._leaving.append(old)
            if self._reports is not None:
                self._reports.watch([process])
            log.info("mount_reloaded", mountpoint=str(point), pid=process.pid)
        else:
            log.info("mount_ready", mountpoint=str(point), pid=process.pid)
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        if self._is_stopping or self._waiting():
            self._ready_file.remove()
            return
        self._ready_file.make()
        if not self._is_announced:
            self._is_announced = True
            self._on_ready()

    def _has_failed(self, process: MountProcess, failure: FusecacheError) -> None:
        """Its start."""
        point = process.plan.mountpoint
        if self._successors.get(point) is process:
            del self._successors[point]
            if not self._is_stopping:
                # With the reason in the event, for of one kind only the first one in a while is logged.
                log.error(f"mount_not_reloaded {point}: {failure}")
            how = self._ended_early.pop(point, None)
            if how is None:
                return  # the one that has it goes on, or its end comes next
            if self._serving[point].exit_code != 0 or mountpoint.find_mount(point) is None:
                self._mount_ended(self._serving[point], how)
                return
        elif process in self._added and not self._is_stopping:
            log.error(f"mount_not_started {point}: {failure}")
            self._added.discard(process)
            del self._serving[point]
            self._report_end(process, str(failure))
            self._tell_readiness()
            return
        self._report_end(process, str(failure))
        if not self._is_stopping:
            raise MountFailed(f"{failure} (mount {point})", failure.exit_code)

    def _has_ended(self, process: MountProcess, how: str) -> None:
        """After it was ready."""
        point = process.plan.mountpoint
        if process in self._leaving:
            self._leaving.remove(process)
            log.info("mount_ended", mountpoint=str(point), how=f"no longer needed: {how}")
        elif point in self._successors:
            self._ended_early[point] = how  # handed over, most likely: the successor's word says
        else:
            self._mount_ended(process, how)

    def _mount_ended(self, process: MountProcess, how: str) -> None:
        """Nobody here has this mount any more. MountFailed unless it ended well."""
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
        if process.exit_code != 0 and not self._is_stopping:
            raise MountFailed(f"mount {str(process.plan.mountpoint)!r} ended with {how}; all others were stopped", 3)

    def _reload(self) -> None:
        """Have what the configuration asks for now. A file that is wrong changes nothing, and a mount that can't be
        replaced stays as it is."""
        if self._handed_over:
            log.warning("not_reloaded: another process has mounts", mounts=", ".join(self._handed_over))
            return
        running = {point: process.plan for point, process in self._serving.items() if process.exit_code is None}
        try:
            configuration = self._read_again()
            wanted = plans(configuration)
            started, replaced, ended = changes(running, wanted)
            for point in (*started, *replaced):
                _prepare(wanted[point].plan)
        except FusecacheError as failure:
            log.error(f"not_reloaded: {told(failure)}")
            return
        logs.configure(configuration.settings.log_level, configuration.settings.log_format)
        for what, before, now in (
            ("metrics_address", self._configuration.settings.metrics_address, configuration.settings.metrics_address),
            ("controller", self._configuration.controller, configuration.controller),
        ):
            if before != now:
                log.warning(f"not_reloaded: {what} of a serve that runs stays as it was; start it anew to change it")
        log.info("reloading", started=len(started), replaced=len(replaced), ended=len(ended))
        for point in ended:
            process = self._serving.pop(point)
            self._ready.discard(process.pid)
            self._leaving.append(process)
            self._report_end(process, "it is not in the configuration any more")
            process.terminate()
        for point in started:
            process = self._serving[point] = self._start(wanted[point])
            self._added.add(process)
            if self._reports is not None:
                self._reports.watch([process])
        for point in replaced:
            self._successors[point] = self._start(wanted[point])
        self._tell_readiness()

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
        for process in self._processes():
            process.terminate()

    def _processes(self) -> list[MountProcess]:
        """All that may run."""
        return [*self._successors.values(), *self._serving.values(), *self._leaving]

    def _patience_s(self) -> float | None:
        """What is left of STOP_S, for all mounts together; None = nobody asked them to end."""
        return None if self._killed_at_s is None else max(0.0, self._killed_at_s - time.monotonic())

    def _stop_all(self) -> None:
        self._ask_to_end()
        for process in self._processes():
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
        for process in list(self._serving.values()):
            if process.exit_code is not None:
                continue
            try:
                texts[str(process.plan.mountpoint)] = str(self._ask(process, "metrics")["text"])
            except FusecacheError as failure:
                log.warning("mount_metrics_missing", mountpoint=str(process.plan.mountpoint), error=failure)
        return metrics.merge(texts, "mount")

    def _why_unhealthy(self) -> str | None:
        for point, process in list(self._serving.items()):
            if point in self._successors:
                continue  # nobody there answers for some seconds (of S42), while reads go on
            if process.exit_code is None and process.pid in self._ready:
                try:
                    self._ask(process, "status")
                except FusecacheError as failure:
                    return f"mount {process.plan.mountpoint}: {failure}"
        return None

    def _why_not_ready(self) -> str | None:
        if self._handed_over:
            return "handed over to another process: " + ", ".join(self._handed_over)
        waiting = self._waiting()
        if not self._is_started or waiting:
            return "not ready: " + ", ".join(waiting or ["starting"])
        return self._why_unhealthy()

    def _waiting(self) -> list[str]:
        """Mount points whose mounts don't serve reads yet, or any more."""
        return [str(point) for point, process in list(self._serving.items()) if process.pid not in self._ready]
