"""`mount --daemon`: start the mount as a process of its own and come back when reads work.

The daemon's standard input and output are closed, its standard error goes to a log file. After its word that it is
ready, the mount is looked at once from outside, through a child that can be given up, so that 0 means what it says.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fusecache.config.mount_command import MountCommand
from fusecache.config.settings import MountPlan
from fusecache.daemon import mountpoint
from fusecache.daemon.mount_process import MountProcess
from fusecache.daemon.own_folders import prepare_folders
from fusecache.errors import InterruptedWait, StateError
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

    Raises the daemon's own error. On every failure, Ctrl-C too, nothing is left running or mounted.
    """
    try:
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = log_file.open("ab", buffering=0)
    except OSError as failure:
        raise StateError(
            f"log file {str(log_file)!r} can't be written: {failure.strerror}; give another --log-file or --state-dir"
        ) from None
    with log:
        process = MountProcess(plan, command.source, command=command, die_with_parent=False, log=log)
    try:
        process.wait_ready()
        if (health := mountpoint.probe(plan.mountpoint, FIRST_ANSWER_S)) != "ok":
            raise InterruptedWait(f"{str(plan.mountpoint)!r} is mounted but {health}; see {log_file}")
    except BaseException:
        process.stop()
        raise
    process.release()
    return process.pid
