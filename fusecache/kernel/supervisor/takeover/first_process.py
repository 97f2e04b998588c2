"""What the supervisor of a mount becomes when a successor that it started itself has the mount. Main program.

    supervisor --SIGHUP--> starts a successor, which takes the mount over --exec--> first process (the same process id)

Whoever started the mount knows this process id: a service manager, a container whose process 1 it is, a shell, a
script. So it stays, and stands for whoever has the mount: SIGTERM and SIGINT are passed on, SIGHUP starts the next
successor (`reloading`; so there are never more than two of them, however often a mount is reloaded), and the end of
the one that has the mount is its end, with the same exit code. When it is killed, its child gets SIGTERM, and the mount
ends.

Holds nothing of the mount: no connection, no file of it, and the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from fusecache.errors import FusecacheError
from fusecache.kernel.log import Log
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.signals import Signals
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.parts import keep_only
from fusecache.kernel.supervisor.polling import due
from fusecache.kernel.supervisor.takeover.reloading import Reloading

ASKED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What may come between two programs of this process: held back until the second one listens."""


def hold_signals() -> None:
    """Until this process is another program that listens to them (`become`)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)


def become(spec: MountSpec, reloading: Reloading) -> NoReturn:
    """Go on as the first process; `reloading.successor` has the mount. After `hold_signals`."""
    assert spec.command_fd is not None
    if reloading.wanted:
        os.kill(os.getpid(), signal.SIGHUP)
    spec_fd = spec.to_memfd()
    kept = [spec_fd, spec.command_fd]
    command = [
        sys.executable,
        "-S",
        "-m",
        "fusecache.kernel.supervisor.takeover.first_process",
        "--spec-fd",
        str(spec_fd),
    ]
    command += ["--serving-pid", str(reloading.successor.pid)]
    if reloading.report_fd is not None:
        kept.append(reloading.report_fd)
        command += ["--report-fd", str(reloading.report_fd)]
    signal.set_wakeup_fd(-1)
    keep_only(kept)
    os.execve(sys.executable, [*command, "--", spec.fsname, spec.mountpoint], os.environ)


class FirstProcess:
    """See the module."""

    def __init__(self, spec: MountSpec, serving_pid: int, report_fd: int | None) -> None:
        """`serving_pid`: the child that has the mount, which reports on `report_fd` if it has not yet."""
        self._serving_pid = serving_pid
        self._last_exit_code: int | None = None
        """Of the one that had the mount before, until the next one has said that it is ready."""

        self._ends_by: signal.Signals | None = None
        """What the one that has the mount is told when the one that was about to take it over has ended."""

        log = Log("fusecache.kernel.supervisor.takeover.first_process", spec.log_level)
        self._reloading = Reloading(spec, log, self._has_next)
        self._reloading.watch(serving_pid, report_fd)
        self._signals = Signals((signal.SIGCHLD, *ASKED))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)

    def run(self) -> int:
        """Until the mount has ended; its exit code, as a shell would tell it."""
        while (exit_code := self._reap()) is None:
            for step in due(self._signals, self._reloading.sources()):
                step()
            for number in self._signals.take():
                if number == signal.SIGHUP:
                    self._reloading.start()
                elif number != signal.SIGCHLD:
                    self._pass_on(number)
        for number in ASKED:
            signal.signal(number, signal.SIG_IGN)  # the interpreter's end would give it back its default, which kills
        return exit_code

    def _has_next(self) -> None:
        """The successor has the mount; the end of the one before, wherever it is by now, is not the mount's."""
        assert self._reloading.successor.pid is not None
        self._serving_pid = self._reloading.successor.pid
        self._last_exit_code = None
        if self._reloading.wanted:
            self._reloading.start()

    def _pass_on(self, number: signal.Signals) -> None:
        """To the one that has the mount. One that is about to take it over has to end first: the mount would stay
        behind if both ended in the middle of that."""
        if self._reloading.successor.pid in (None, self._serving_pid):
            self._reloading.end(number)
            self._tell_serving(number)
        elif self._ends_by is None:
            self._ends_by = number
            self._reloading.end()
        else:
            self._reloading.end(signal.SIGKILL)

    def _tell_serving(self, number: signal.Signals) -> None:
        if self._serving_pid != self._reloading.successor.pid:  # else it was told just now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._serving_pid, number)

    def _reap(self) -> int | None:
        """The exit code of the mount when it has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0  # not before the one that has the mount was reaped, unless somebody else did that
            if pid == 0:
                return None
            successor = self._reloading.successor.pid
            if pid == successor:
                self._reloading.ended(status)
            if pid == self._serving_pid:
                code = os.waitstatus_to_exitcode(status)
                code = code if code >= 0 else 128 - code
                if successor in (None, pid):
                    # One that never was ready did not have the mount, but found it gone.
                    return code if self._last_exit_code is None else self._last_exit_code
                self._last_exit_code, self._serving_pid = code, successor
            elif pid == successor and self._ends_by is not None:
                self._tell_serving(self._ends_by)


def main(arguments: Sequence[str]) -> int:
    """Stand for the mount whose specification is in the memfd `--spec-fd`; the exit code."""
    parser = argparse.ArgumentParser(prog="fusecache.kernel.supervisor.takeover.first_process")
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--serving-pid", type=int, required=True)
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("shown", nargs="*", help="source and mount point, for whoever lists processes")
    faulthandler.register(signal.SIGUSR1)
    flags = parser.parse_args(arguments)
    try:
        spec = MountSpec.from_descriptor(flags.spec_fd)
    except FusecacheError as failure:
        print(f"fusecache: {failure}", file=sys.stderr)
        return failure.exit_code
    if flags.report_fd is not None:
        os.set_inheritable(flags.report_fd, False)
    set_process_name("first process", spec.mountpoint)
    return FirstProcess(spec, flags.serving_pid, flags.report_fd).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
