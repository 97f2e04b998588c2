"""`mount --daemon`: start the mount as a process of its own and come back when reads work.

The daemon's standard input and output are closed, its standard error goes to a log file. After its word that it is
ready, the mount is looked at once from outside, through a child that can be given up, so that 0 means what it says.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fusecache.config.mount_command import MountCommand
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.mount_process import MountProcess
from fusecache.daemon.own_folders import prepare_folders
from fusecache.errors import FusecacheError, InterruptedWait, StateError
from fusecache.private_folder import prepare_private_folder

FIRST_ANSWER_S = 30.0
"""Seconds the ready mount may take for its first stat."""


def default_log_file(plan: MountPlan) -> Path:
    """In a folder of the state folder, which is made; one per mount point. StateError when others may write there."""
    prepare_folders(plan)
    folder = plan.settings.state_dir / "logs"
    prepare_private_folder(folder)
    return folder / f"{hashlib.sha256(os.fsencode(plan.mountpoint)).hexdigest()[:16]}.log"


def start(plan: MountPlan, command: MountCommand, log_file: Path) -> int:
    """Start the mount that `command` asks for; its process id once reads work.

    Raises the daemon's own error. On every failure, Ctrl-C and the signals that end a command too, nothing is left
    running or mounted.
    """
    try:
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = log_file.open("ab", buffering=0)
    except OSError as failure:
        raise StateError(
            f"log file {str(log_file)!r} can't be written: {failure.strerror}; give another --log-file or --state-dir"
        ) from None
    with _ending_signals() as signals:
        with log:
            process = MountProcess(plan, command.source, command=command, die_with_parent=False, log=log)
        try:
            signals.are_raised()
            process.wait_ready()
            if (health := mountpoint.probe(plan.mountpoint, FIRST_ANSWER_S)) != "ok":
                raise InterruptedWait(f"{str(plan.mountpoint)!r} is mounted but {health}; see {log_file}")
        except BaseException:
            process.stop()
            raise
    process.release()
    return process.pid


class EndedBySignal(FusecacheError):
    """The command was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name} before the mount was ready")
        self.exit_code = 128 + number


class _Signals:
    """What came while there was nothing to end yet is raised later."""

    def __init__(self) -> None:
        self._came: int | None = None
        self._raises = False

    def are_raised(self) -> None:
        """From now on. EndedBySignal: one has come."""
        self._raises = True
        if self._came is not None:
            raise EndedBySignal(self._came)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self._came = number
        if self._raises:
            raise EndedBySignal(number)


@contextmanager
def _ending_signals() -> Iterator[_Signals]:
    """SIGTERM and SIGHUP, unless they are ignored (nohup), would end this process and leave the daemon behind."""
    signals = _Signals()
    before = {
        number: signal.signal(number, signals.note)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
