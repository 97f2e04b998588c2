"""`fusecache serve`: one process per mount of the configuration file, and one HTTP address for all of them.

    children, signals -> one queue -> `serve_mounts` says what follows -> done here

Each mount runs in a process of its own (pyfuse3 has one session per process). This process starts them, forwards
SIGTERM and SIGINT, and ends when they have ended; what hangs is killed after STOP_S. A mount that dies takes the others
down in order and is named by the error, so that whoever runs `serve` restarts the whole; nothing is restarted here. A
mount that somebody unmounted ends with 0 and leaves the others alone. Mount points that are missing are made.

SIGHUP reads the file again (`serve_plans` says what changed): a mount with other settings gets a new process, which
takes it over from the old one; mounts that are new in the file are started, and those that are not in it any more are
ended; the HTTP address and the controller are those of the file by then. A new process that fails changes nothing for
its mount or the others. Not where this process has a terminal: then SIGHUP ends it as SIGTERM does.

A mount that another process serves is taken over (`daemon.takeover`), each by itself. Where that other process is a
`serve` too, it has the HTTP address (`serve_http`) until its last mount is handed over: this one gets it then. A
`serve` whose mounts were all taken over ends with 0, or stays until a signal comes (`stays`): whoever restarts what has
ended, as Kubernetes does, would have it take them back.

With `controller:` in the file, what the mounts hold is reported to it (`daemon.node_reports`); mounts never notice.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import structlog

import fusecache
from fusecache import logs, metrics
from fusecache.config.load import Configuration
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.control_client import mount_lock
from fusecache.daemon.mount_process import STOP_S, MountFailed, MountProcess
from fusecache.daemon.own_folders import identity_of, prepare_folders
from fusecache.daemon.ready_file import ReadyFile
from fusecache.daemon.serve_http import Served, ServeHttp
from fusecache.daemon.serve_mounts import (
    Action,
    Announce,
    AskedToEnd,
    Ended,
    Event,
    Fail,
    Failed,
    HangUp,
    Log,
    ReadAgain,
    Readiness,
    Ready,
    Reloaded,
    ServedMounts,
    Start,
    TellAllEnd,
    TellEnd,
    Terminate,
    There,
    Watch,
)
from fusecache.daemon.serve_plans import Wanted, changes, plans
from fusecache.errors import FusecacheError, told
from fusecache.kernel.signals import has_terminal

if TYPE_CHECKING:
    from fusecache.daemon.node_reports import NodeReports

log = structlog.get_logger(__name__)

PROBE_S = 5.0
"""Seconds a mount that was left behind may take to answer before it counts as hung."""

ADDRESS_AGAIN_S = 0.5
"""Between two tries to get the HTTP address that another `serve` still has."""


class _Gone(NamedTuple):
    """A process has ended."""

    number: int
    how: FusecacheError | str
    """The error of its start, or how it ended after it was ready."""


class _Signal(NamedTuple):
    number: int


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
    http = ServeHttp(configuration.settings.metrics_address, own, may_wait=takes_over)
    _Serve(configuration, ready, read_again, own, http, reports, stays=stays, ready_file=found).run(wanted)


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


class _Serve:
    """The children and what happens to them, as events of one queue."""

    def __init__(
        self,
        configuration: Configuration,
        ready: Callable[[], None],
        read_again: Callable[[], Configuration],
        own: metrics.Metrics,
        http: ServeHttp,
        reports: NodeReports | None,
        *,
        stays: bool,
        ready_file: ReadyFile,
    ) -> None:
        self._controller = configuration.controller
        self._on_ready = ready
        self._read_again = read_again
        self._own = own
        self._http = http
        self._reports = reports
        self._stays = stays
        self._ready_file = ready_file
        self._wanted: Mapping[Path, Wanted] = {}
        self._mounts = ServedMounts()
        self._processes: dict[int, MountProcess] = {}
        """By the numbers that `_mounts` gave them."""

        self._events: queue.SimpleQueue[Ready | _Gone | _Signal] = queue.SimpleQueue()
        self._hang_up_ends = has_terminal()
        """Seen now, for a terminal that was closed is none."""

        self._watchers: list[threading.Thread] = []
        self._killed_at_s: float | None = None
        """Monotonic time at which mounts that have not ended are killed; None while they may run."""

    def run(self, wanted: Mapping[Path, Wanted]) -> None:
        """Until all have ended."""
        # SimpleQueue.put is reentrant, so a signal handler may call it. SIGHUP stays ignored where it is (nohup).
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        previous = {
            number: signal.signal(number, lambda number, frame: self._on_signal(number, frame))
            for number in (signal.SIGTERM, signal.SIGINT, *hang_up)
        }
        try:
            self._http.listen()
            self._wanted = wanted
            self._do(self._mounts.begin(wanted))
            if self._reports is not None:
                self._reports.start(list(self._processes.values()))
            if self._attend() and self._mounts.handed_over:
                self._make_way()
        finally:
            self._ready_file.remove()
            if self._reports is not None:
                # Before the mounts are waited for: no pod is to be sent here from now on.
                self._reports.stop("the node's daemon ends")
            self._stop_all()
            self._http.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(_Signal(number))

    def _attend(self) -> bool:
        """Until all have ended; False: because that was asked for."""
        while self._mounts.runs:
            self._http.listen()
            try:
                event = self._events.get(timeout=ADDRESS_AGAIN_S if self._http.waits else self._patience_s())
            except queue.Empty:
                if self._http.waits and self._patience_s() != 0.0:
                    continue
                return False  # asked to end, and something hangs
            self._do(self._mounts.step(self._meaning(event)))
        return not self._mounts.is_stopping

    def _meaning(self, event: Ready | _Gone | _Signal) -> Event:
        match event:
            case Ready():
                return event
            case _Gone(number, FusecacheError() as failure):
                return Failed(number, str(failure), failure.exit_code, self._what_is_left_of(number))
            case _Gone(number, str(how)):
                return Ended(number, self._processes[number].exit_code == 0, how, self._what_is_left_of(number))
            case _Signal(signal.SIGHUP) if not self._hang_up_ends:
                return HangUp()
            case _Signal(number):
                self._limit_the_end()
                return AskedToEnd(signal.Signals(number).name)
        raise AssertionError("unreachable: the cases are all there are")

    def _what_is_left_of(self, number: int) -> There:
        mounted = mountpoint.find_mount(self._processes[number].plan.mountpoint)
        if mounted is None:
            return "nothing"
        return "ours" if mountpoint.is_ours(mounted) else "something else"

    def _make_way(self) -> None:
        """All mounts have ended, and other processes have them: what this one still holds is theirs too."""
        log.info("handed_over", mounts=len(self._mounts.handed_over))
        self._ready_file.remove()
        self._http.stop()
        if self._reports is not None:
            self._reports.abandon()
            self._reports = None
        while self._stays:
            event = self._events.get()
            if isinstance(event, _Signal) and isinstance(self._meaning(event), AskedToEnd):
                return

    # What is to be done.

    def _do(self, actions: Iterable[Action]) -> None:
        """MountFailed where that is what follows."""
        try:
            for action in actions:
                self._do_one(action)
        finally:
            self._http.handed_over = tuple(self._mounts.handed_over)
            self._http.mounts = [
                Served(self._processes[mount.process], mount.is_ready, mount.is_being_replaced)
                for mount in self._mounts.shown
                if mount.process in self._processes
            ]

    def _do_one(self, action: Action) -> None:
        match action:
            case Start(number, point):
                self._start(number, self._wanted[point])
            case Terminate(number):
                self._processes[number].terminate()
            case Readiness(is_ready):
                (self._ready_file.make if is_ready else self._ready_file.remove)()
            case Announce():
                self._on_ready()
            case Watch() | TellEnd() | TellAllEnd():
                self._report(action)
            case Log():
                self._log(action)
            case ReadAgain():
                self._reload()
            case Fail(error, exit_code):
                raise MountFailed(error, exit_code)

    def _start(self, number: int, mount: Wanted) -> None:
        process = self._processes[number] = MountProcess(mount.plan, mount.source, die_with_parent=True)
        watcher = threading.Thread(target=self._watch, args=(number, process), name=f"watch-{process.pid}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, number: int, process: MountProcess) -> None:
        try:
            process.wait_ready()
        except FusecacheError as failure:
            self._events.put(_Gone(number, failure))
            return
        self._events.put(Ready(number))
        self._events.put(_Gone(number, process.wait_end()))

    def _report(self, action: Watch | TellEnd | TellAllEnd) -> None:
        if self._reports is None:
            return
        match action:
            case Watch(number):
                self._reports.watch([self._processes[number]])
            case TellEnd(number, why):
                self._reports.ended(self._processes[number], why)
            case TellAllEnd(why):
                self._reports.end(why)

    def _log(self, line: Log) -> None:
        about: dict[str, object] = {}
        if line.process is not None:
            process = self._processes[line.process]
            about = {"mountpoint": str(process.plan.mountpoint), "pid": process.pid}
        if line.how:
            about["how"] = line.how
        getattr(log, line.level)(line.event, **about)

    def _reload(self) -> None:
        """Have what the configuration asks for now. A file that is wrong changes nothing, and a mount that can't be
        replaced stays as it is."""
        try:
            configuration = self._read_again()
            wanted = plans(configuration)
            found = changes(self._plans(), wanted)
            for point in (*found.started, *found.replaced):
                _prepare(wanted[point].plan)
            same = configuration.controller == self._controller
            reports = self._reports if same else _reports_of(configuration, self._own)
            self._http.move(configuration.settings.metrics_address)  # last: after it nothing is refused
        except FusecacheError as failure:
            log.error(f"not_reloaded: {told(failure)}")
            return
        logs.configure(configuration.settings.log_level, configuration.settings.log_format)
        log.info("reloading", started=len(found.started), replaced=len(found.replaced), ended=len(found.ended))
        self._wanted = wanted
        self._controller = configuration.controller
        if reports is not self._reports:
            self._report_by(reports)
        self._forget_the_past()
        self._do(self._mounts.step(Reloaded(found)))

    def _report_by(self, reports: NodeReports | None) -> None:
        """From now on, with all mounts that run; None: to nobody."""
        if self._reports is not None:
            self._reports.stop("the node's daemon has another configuration of the controller")
        self._reports = reports
        if reports is not None:
            reports.start([self._processes[mount.process] for mount in self._mounts.shown if mount.runs])

    def _forget_the_past(self) -> None:
        left = self._mounts.left
        self._processes = {number: process for number, process in self._processes.items() if number in left}
        self._watchers = [watcher for watcher in self._watchers if watcher.is_alive()]

    def _plans(self) -> dict[Path, MountPlan | None]:
        """What the mounts here are; None for one that has ended."""
        found: dict[Path, MountPlan | None] = {}
        for mount in self._mounts.shown:
            plan = self._processes[mount.process].plan
            found[plan.mountpoint] = plan if mount.runs else None
        return found

    # The end.

    def _limit_the_end(self) -> None:
        if self._killed_at_s is None:
            self._killed_at_s = time.monotonic() + STOP_S

    def _patience_s(self) -> float | None:
        """What is left of STOP_S, for all mounts together; None = nobody asked them to end."""
        return None if self._killed_at_s is None else max(0.0, self._killed_at_s - time.monotonic())

    def _stop_all(self) -> None:
        self._limit_the_end()
        left = [self._processes[number] for number in self._mounts.left if number in self._processes]
        for process in left:
            process.terminate()
        for process in left:
            process.stop(self._patience_s() or 0.0)
            self._take_down(process)
        for watcher in self._watchers:
            watcher.join()

    def _take_down(self, process: MountProcess) -> None:
        """A mount whose process was killed stays behind, dead: free its name."""
        path = process.plan.mountpoint
        try:
            mounted = mountpoint.find_mount(path)
            if mounted is not None and mountpoint.is_ours(mounted) and mountpoint.probe(path, PROBE_S) == "dead":
                mountpoint.detach(path)
        except FusecacheError as failure:
            log.warning("dead_mount_left", mountpoint=str(path), error=failure)
