"""The supervisor's children: start one, know what it is, learn that it ended. One Part is one role over its restarts.

A child is forked and executed by hand: `subprocess` would double the supervisor's memory, and has nothing between fork
and exec that asks whether the parent still lives. Each child is a session of its own (Ctrl-C reaches the supervisor,
which ends them in order), gets SIGKILL when the supervisor ends in whatever way, and inherits the descriptors that it
is given and no other: one stray copy of /dev/fuse would keep a dead connection alive. Rights that it is not to have
are given up before its program starts (`kernel.privileges`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from fusecache.kernel.privileges import rights_of
from fusecache.kernel.supervisor.restart_policy import RestartPolicy, Verdict

_PR_SET_PDEATHSIG: Final = 1
_NOT_STARTED: Final = 127
"""Exit code of a child whose program can't be executed, as a shell's."""

_SIGNALS: Final = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

_libc = ctypes.CDLL(None)


class Part:
    """One role: agent, gate, worker 0 ... Running when `pid` is set."""

    def __init__(self, name: str, policy: RestartPolicy) -> None:
        self.name = name
        self.policy = policy
        self.pid: int | None = None
        self.restarts = 0
        self.started_at_s = 0.0
        self.ready_at_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self.pid is not None

    @property
    def ready(self) -> bool:
        """Whether the process said that it is ready."""
        return self.running and self.ready_at_s is not None

    def start(
        self,
        argv: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        give_up: Callable[[], None],
    ) -> None:
        """Start the process (`spawn`). OSError when the machine has no more processes."""
        self.started(spawn(argv, descriptors, environment, give_up))

    def started(self, pid: int | None) -> None:
        """A process has the role from now on: any but the first is a restart."""
        if self.started_at_s:
            self.restarts += 1
        self.pid = pid
        self.started_at_s = time.monotonic()
        self.ready_at_s = None

    def is_ready(self) -> None:
        """It said so."""
        if self.ready_at_s is None:
            self.ready_at_s = time.monotonic()

    def ended(self) -> None:
        """Its end was seen."""
        self.pid = None
        self.ready_at_s = None

    def died(self) -> Verdict:
        """Its end was seen, and was not wanted: when to start it again."""
        verdict = self.policy.died(time.monotonic(), self.ready_at_s)
        self.ended()
        return verdict

    def kill(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process. Not reaped yet, so the number can't be another's."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def describe(self) -> dict[str, Any]:
        """A row for `status`."""
        rights = rights_of(self.pid) if self.pid is not None else None
        return {
            "name": self.name,
            "pid": self.pid,
            "ready": self.ready,
            "restarts": self.restarts,
            "uptime_s": round(time.monotonic() - self.started_at_s, 1) if self.running else 0.0,
            "crash_looping": self.policy.looping,
            "rights": rights.describe() if rights is not None else None,
        }


def spawn(
    argv: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    give_up: Callable[[], None],
) -> int:
    """Fork and execute; the pid. `descriptors` keep their numbers in the child, which calls `give_up` before exec."""
    parent = os.getpid()
    # Held back until the child has its own handlers: one that came before would be the supervisor's, and lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    # The child: nothing here may return or raise into the supervisor's own code.
    try:
        signal.set_wakeup_fd(-1)  # a signal of this process is none of the supervisor's
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        keep_only(descriptors)
        os.chdir("/")
        give_up()
        # After it: a change of user or capabilities clears this.
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_NOT_STARTED)  # it ended before the line above
        os.execve(argv[0], list(argv), dict(environment))
    except BaseException as failure:  # noqa: BLE001 - a forked copy of the supervisor must not live on
        os.write(2, f"fusecache: {argv[0]!r} can't be started: {failure}\n".encode(errors="replace"))
    finally:
        os._exit(_NOT_STARTED)


def fork_call(action: Callable[[], None]) -> int:
    """Run `action`, which may hang, in a copy of this process that holds no descriptor but the standard ones; the pid.

    Its exit code is 0, or the errno of the OSError that was raised.
    """
    pid = os.fork()
    if pid:
        return pid
    number = errno.EIO
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.set_wakeup_fd(-1)
        os.closerange(3, 1 << 20)
        action()
        number = 0
    except OSError as failure:
        number = failure.errno or errno.EIO
    finally:
        os._exit(number)


def reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, each with its status as waitpid(2) tells it."""
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            yield child


def leader_is_dead(pid: int) -> bool:
    """Whether a process's first thread has ended while another one hangs in the kernel.

    waitpid(2) does not tell it. A gate gets there when it is killed while one of its threads writes a notification,
    which waits for a READ in flight; what it has open, /dev/fuse above all, stays open.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False


def keep_only(descriptors: Sequence[int]) -> None:
    """Close everything above standard error but these, and let these through exec."""
    begin = 3
    for descriptor in sorted(descriptors):
        os.closerange(begin, descriptor)
        os.set_inheritable(descriptor, True)
        begin = descriptor + 1
    os.closerange(begin, 1 << 20)


def ending(exit_code: int) -> str:
    """How a process ended, in words: `exit code 3`, or `SIGKILL` for -9."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
