"""The last steps of a mount: its connection, then its processes. Every wait has an end; a signal shortens it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from fusecache.kernel import device
from fusecache.kernel.log import Log
from fusecache.kernel.signals import Signals
from fusecache.kernel.supervisor.parts import Part, fork_call
from fusecache.kernel.supervisor.restart_policy import RestartPolicy
from fusecache.kernel.supervisor.session import MountSession

CONNECTION_S: Final = 1.0
"""From closing the device to the end of a killed gate. One that is still there hangs in a notification."""

KILLED_S: Final = 5.0
"""A killed process that is still there after this hangs in the kernel, and is left behind."""


def end_session(session: MountSession, gates: Sequence[Part], signals: Signals, log: Log) -> None:
    """Kill the gates, detach the mount if it is still there, end the connection: callers get errors.

    A mount that is another process's goes on: only what is held of it here is let go.
    """
    awaited = list(gates)
    for gate in gates:
        gate.kill(signal.SIGKILL)
    if session.is_mounted():
        awaited.append(_in_a_child("unmount", lambda: device.unmount(session.mountpoint, lazy=True)))
    session.end_connection()
    if wait_for(awaited, CONNECTION_S, signals) or not session.is_ours:
        return
    # Some thread of a gate hangs in a notification, and holds the device. The mount may be detached already, so that
    # MNT_FORCE can't reach it.
    awaited.append(_in_a_child("abort", lambda: device.abort(session.device_number)))
    if not wait_for(awaited, KILLED_S, signals):
        left = ", ".join(f"{part.name} {part.pid}" for part in awaited if part.running)
        log.error("the connection can't be ended", left=left, mountpoint=session.mountpoint)


def _in_a_child(name: str, action: Callable[[], None]) -> Part:
    """What may hang; without a process to be had it is done here all the same, because nobody comes after."""
    part = Part(name, RestartPolicy())
    try:
        part.pid = fork_call(action)
    except OSError:
        with contextlib.suppress(OSError):
            action()
    return part


def end_parts(parts: Sequence[Part], patience_s: float, signals: Signals, log: Log, *, hurry: bool) -> None:
    """SIGTERM, and after `patience_s` seconds or at a signal SIGKILL, until all have ended. `hurry`: SIGKILL alone."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, KILLED_S)):
        if number == signal.SIGTERM and hurry:
            continue
        for part in parts:
            part.kill(number)
        if wait_for(parts, wait_s, signals):
            return
    for part in parts:
        if part.running:
            log.error("does not end, not even by SIGKILL", part=part.name, pid=part.pid)


def wait_for(parts: Sequence[Part], within_s: float, signals: Signals) -> bool:
    """Reap until all of `parts` have ended; whether they have. False after `within_s` seconds or at a signal to end."""
    deadline_s = time.monotonic() + within_s
    while True:
        for part in parts:
            if part.pid is not None:
                try:
                    gone = os.waitpid(part.pid, os.WNOHANG)[0] != 0
                except ChildProcessError:
                    gone = True
                if gone:
                    part.ended()
        left_s = deadline_s - time.monotonic()
        if not any(part.running for part in parts):
            return True
        if left_s <= 0:
            return False
        signals.wait(left_s)
        if any(number != signal.SIGCHLD for number in signals.take()):
            return False
