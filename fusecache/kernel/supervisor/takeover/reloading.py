"""SIGHUP: the next process of a mount, which reads the configuration again and takes the mount over.

    SIGHUP -> start it -> it takes the mount over as any other process would -> `ready`, or `error` and why

It is a `daemon.mount_child`, given the command that mounted. One is under way at a time: a signal that comes meanwhile
starts another one afterwards, for the configuration may have changed since that one read it. Whoever fails says so in
one line, and changes nothing: the mount stays with the process that has it.

Two processes do this for a mount: its supervisor, and what that becomes when it has handed the mount over to such a
child (`first_process`). What is handed over, and when, is `old_side`'s business.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

from fusecache.kernel.log import Log
from fusecache.kernel.ready_pipe import MAX_LINE, parse_report
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.parts import Part, ending
from fusecache.kernel.supervisor.restart_policy import RestartPolicy

MOST_REPORT_BYTES: Final = MAX_LINE


class Reloading:
    """See the module. `successor` is the last one that was started, for as long as it runs."""

    def __init__(self, spec: MountSpec, log: Log, on_ready: Callable[[], None]) -> None:
        """`on_ready`: the successor has the mount. Whoever is called then sees to another one that is `wanted`."""
        self.successor = Part("successor", RestartPolicy())
        self.wanted = False
        """Another one is to be started when it is known what became of the one that is under way."""

        self.report_fd: int | None = None
        """Its ready pipe, until it has reported."""

        self._spec = spec
        self._log = log
        self._on_ready = on_ready
        self._report = b""
        self._is_ending = False

    def watch(self, pid: int, report_fd: int | None) -> None:
        """Go on with a successor that another program of this process started."""
        self.successor.started(pid)
        self.report_fd = report_fd

    @property
    def is_under_way(self) -> bool:
        """A successor has not said yet what became of it."""
        return self.successor.running and self.report_fd is not None

    def start(self) -> None:
        """Start a successor now, or after the one that is under way."""
        if self._is_ending:
            return
        if self.is_under_way:
            self.wanted = True
            return
        self.wanted = False
        self.successor.ended()  # one that was ready is whoever has the mount, and no successor any more
        assert self._spec.command_fd is not None
        try:
            read_end, write_end = os.pipe()
            try:
                self.successor.start(
                    [
                        *(*self._spec.successor_argv, "--command-fd", str(self._spec.command_fd)),
                        *("--ready-fd", str(write_end), "--die-with-parent"),
                        *("--", self._spec.fsname, self._spec.mountpoint),
                    ],
                    (self._spec.command_fd, write_end),
                    os.environ,
                    lambda: None,
                )
            except OSError:
                os.close(read_end)
                raise
            finally:
                os.close(write_end)
        except OSError as failure:
            self._log.error("not reloaded: the next process can't be started", why=failure.strerror)
            return
        os.set_blocking(read_end, False)
        self.report_fd, self._report = read_end, b""
        self._log.info("reloading: the next process reads the configuration", pid=self.successor.pid)

    def sources(self) -> dict[int, Callable[[], None]]:
        """Descriptors to wait on for reading, and what to do then."""
        return {} if self.report_fd is None else {self.report_fd: self._read}

    def ended(self, status: int) -> None:
        """The successor has ended, with this status of waitpid(2)."""
        if self.report_fd is not None:
            self._read()
        if self.report_fd is not None:
            self._is_over(f"it ended with {ending(os.waitstatus_to_exitcode(status))}")
        self.successor.ended()
        if self.wanted:
            self.start()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """The mount ends, and so does the successor: it gets this signal."""
        self.wanted = False
        self._is_ending = True
        self.successor.kill(number)

    def _read(self) -> None:
        assert self.report_fd is not None
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.report_fd, MOST_REPORT_BYTES)
            self._report += piece
            if piece and not self._report.endswith(b"\n"):
                return
            if not piece:
                return self._is_over("it ended without a word")
            report = parse_report(self._report)
            if report is not None and report.ready:
                self._log.info("reloaded", mountpoint=self._spec.mountpoint, pid=self.successor.pid)
                self._is_over(None)
                self._on_ready()
            else:
                self._is_over("it did not say why" if report is None else report.error)

    def _is_over(self, failure: str | None) -> None:
        """`failure`: why it did not take the mount over, or is not ready all the same; None: it is."""
        assert self.report_fd is not None
        os.close(self.report_fd)
        self.report_fd = None
        if failure is not None and not self._is_ending:
            # With the reason in the event, for of one kind only the first one in a while is logged.
            self._log.error(f"not reloaded: {failure}")
