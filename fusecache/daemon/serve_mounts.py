"""The mounts of one `serve`: which process has which, and what follows when one is ready, fails or ends. Pure.

    begin -> Start each -> Ready ... -> the ready file, `announce`
    HangUp -> read the file again, once nothing is on its way -> Reloaded -> Start, Terminate
                                                                          -> Ready: a successor has the mount now

At each mount point one process *has* the mount, or is to mount there. While it is replaced there is a successor beside
it, which takes the mount over (S42) and has it from its first word on; the one before ends by itself and is *leaving*,
like those that are not wanted any more. The end of the one that has a mount is the end of all others, unless the mount
was unmounted or somebody else has it now. A process that only tries (a successor, or one that a reload added) harms
nobody by its failure.

Processes are numbers that are given here. What starts and ends them, tells the controller and writes the log is
`serve`, which carries out what `step` answers, in order; it finds out what the events say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fusecache.daemon.serve_plans import Changes

MOUNT_EXIT = 3
"""Of `serve`, when a process that had a mount died."""

There = Literal["nothing", "ours", "something else"]
"""What is mounted at a mount point when a process for it has ended."""


class Ready(NamedTuple):
    """A process serves reads."""

    process: int


class Failed(NamedTuple):
    """A process has ended without having been ready."""

    process: int
    error: str
    exit_code: int
    there: There


class Ended(NamedTuple):
    """A process that was ready has ended."""

    process: int
    is_in_order: bool
    """With exit code 0: it was unmounted, asked to end, or has handed the mount over."""

    how: str
    """For people: `exit code 0`, `SIGKILL`."""

    there: There


class HangUp(NamedTuple):
    """Somebody wants the configuration to be read again."""


class Reloaded(NamedTuple):
    """It was read (`ReadAgain`), and can be had."""

    changes: Changes


class AskedToEnd(NamedTuple):
    """A signal to end came."""

    signal: str


Event = Ready | Failed | Ended | HangUp | Reloaded | AskedToEnd


class Start(NamedTuple):
    """Run a process for the mount point, with what the configuration says by now."""

    process: int
    mountpoint: Path


class Terminate(NamedTuple):
    """Ask a process to end, unless it was asked before."""

    process: int


class Readiness(NamedTuple):
    """Whether all mounts serve reads: the ready file is there, or is not."""

    is_ready: bool


class Announce(NamedTuple):
    """All mounts serve reads for the first time."""


class Watch(NamedTuple):
    """The controller is told what this process says of its mount."""

    process: int


class TellEnd(NamedTuple):
    """The controller is told that nobody serves this process's mount, and why."""

    process: int
    why: str


class TellAllEnd(NamedTuple):
    """The controller is told that this node serves no longer, and why."""

    why: str


class ReadAgain(NamedTuple):
    """Read the configuration again; `Reloaded` comes of it, or nothing."""


class Log(NamedTuple):
    """A line of the log, about a process or by its text alone."""

    level: Literal["info", "warning", "error"]
    event: str
    process: int | None = None
    how: str = ""


class Fail(NamedTuple):
    """End all, with this error."""

    error: str
    exit_code: int


Action = Start | Terminate | Readiness | Announce | Watch | TellEnd | TellAllEnd | ReadAgain | Log | Fail


@dataclass
class _Mount:
    """One mount point."""

    process: int
    """Who has the mount, or is to mount there; also when it has ended by itself."""

    is_added: bool = False
    """By a reload: that it can't be started is no end for the others."""

    is_ready: bool = False
    """Reads work."""

    successor: int | None = None
    """Who is taking the mount over from `process`."""

    ended_early: Ended | None = None
    """The end of `process` while there is a successor: handed over, most likely; the successor's word says."""


class Shown(NamedTuple):
    """A mount as others see it."""

    process: int
    """Who has it, or had it last."""

    runs: bool
    is_ready: bool
    is_being_replaced: bool


class ServedMounts:
    """See the module."""

    def __init__(self) -> None:
        self.is_stopping = False
        """Somebody asked for the end."""

        self.handed_over: list[str] = []
        """Mount points that another `serve` or `mount` serves now."""

        self._numbers = itertools.count(1)
        self._mounts: dict[Path, _Mount] = {}
        self._points: dict[int, Path] = {}
        """Mount point of every process whose end was not seen yet."""

        self._leaving: set[int] = set()
        """Replaced, or no longer wanted: about to end."""

        self._is_announced = False
        self._reload_wanted = False

    @property
    def runs(self) -> bool:
        """A process runs, as far as is known here."""
        return bool(self._points)

    @property
    def left(self) -> list[int]:
        """Every process that may run, or have left a dead mount."""
        successors = [mount.successor for mount in self._mounts.values() if mount.successor is not None]
        return [*successors, *(mount.process for mount in self._mounts.values()), *sorted(self._leaving)]

    @property
    def shown(self) -> list[Shown]:
        """Every mount that the configuration names."""
        return [
            Shown(mount.process, mount.process in self._points, mount.is_ready, mount.successor is not None)
            for mount in self._mounts.values()
        ]

    def begin(self, points: Iterable[Path]) -> list[Action]:
        """Have these mounts. First of all."""
        starts: list[Action] = []
        for point in points:
            start = self._start(point)
            self._mounts[point] = _Mount(start.process)
            starts.append(start)
        return starts

    def step(self, event: Event) -> list[Action]:
        """What follows from an event, in order. Nothing follows `Fail`."""
        actions = list(self._follows(event))
        fails = bool(actions) and isinstance(actions[-1], Fail)
        if self._reload_wanted and not (fails or self.is_stopping) and self._is_settled():
            self._reload_wanted = False
            if self.handed_over:
                points = ", ".join(self.handed_over)
                actions.append(Log("warning", f"not_reloaded: another process has mounts: {points}"))
            else:
                actions.append(ReadAgain())
        return actions

    def _follows(self, event: Event) -> Iterator[Action]:
        match event:
            case Ready(process):
                return self._is_ready(process)
            case Failed():
                return self._has_failed(event)
            case Ended():
                return self._has_ended(event)
            case HangUp():
                self._reload_wanted = True
                return iter(())
            case Reloaded(changes):
                return self._is_reloaded(changes)
            case AskedToEnd(signal):
                return self._is_to_end(signal)

    def _start(self, point: Path) -> Start:
        process = next(self._numbers)
        self._points[process] = point
        return Start(process, point)

    def _is_settled(self) -> bool:
        """No mount is on its way from one process to another, or to its first word."""
        return all(
            mount.successor is None and (mount.is_ready or mount.process not in self._points)
            for mount in self._mounts.values()
        )

    def _is_ready(self, process: int) -> Iterator[Action]:
        mount = self._mounts[self._points[process]]
        if process == mount.successor:
            if mount.ended_early is None:
                self._leaving.add(mount.process)
            mount.process, mount.successor, mount.ended_early = process, None, None
            yield Watch(process)
            yield Log("info", "mount_reloaded", process)
        else:
            yield Log("info", "mount_ready", process)
        mount.is_ready = True
        yield from self._readiness()

    def _readiness(self) -> Iterator[Action]:
        is_ready = not self.is_stopping and all(mount.is_ready for mount in self._mounts.values())
        yield Readiness(is_ready)
        if is_ready and not self._is_announced:
            self._is_announced = True
            yield Announce()

    def _has_failed(self, failed: Failed) -> Iterator[Action]:
        point = self._points.pop(failed.process)
        mount = self._mounts[point]
        if failed.process == mount.successor:
            mount.successor = None
            early, mount.ended_early = mount.ended_early, None
            if not self.is_stopping:
                yield Log("error", f"mount_not_reloaded {point}: {failed.error}")
            if early is None:
                return  # the one that has it goes on, or its end comes next
            if not early.is_in_order or failed.there == "nothing":
                yield from self._mount_ended(point, early._replace(there=failed.there))
                return
        elif mount.is_added and not self.is_stopping:
            yield Log("error", f"mount_not_started {point}: {failed.error}")
            del self._mounts[point]
            if any(mount.successor is not None or mount.process in self._points for mount in self._mounts.values()):
                yield TellEnd(failed.process, failed.error)
                yield from self._readiness()
                return
        yield TellEnd(failed.process, failed.error)
        if not self.is_stopping:
            yield Fail(f"{failed.error} (mount {point})", failed.exit_code)

    def _has_ended(self, ended: Ended) -> Iterator[Action]:
        point = self._points.pop(ended.process)
        if ended.process in self._leaving:
            self._leaving.remove(ended.process)
            yield Log("info", "mount_ended", ended.process, how=f"no longer needed: {ended.how}")
        elif self._mounts[point].successor is not None:
            self._mounts[point].ended_early = ended
        else:
            yield from self._mount_ended(point, ended)

    def _mount_ended(self, point: Path, ended: Ended) -> Iterator[Action]:
        """Nobody here has this mount any more."""
        self._mounts[point].is_ready = False
        yield Readiness(False)
        if ended.is_in_order and ended.there == "ours":
            self.handed_over.append(str(point))
            yield Log("info", "mount_ended", ended.process, how="handed over to another process")
            return
        why = "it was unmounted" if ended.is_in_order else f"its process ended with {ended.how}"
        yield TellEnd(ended.process, why)
        yield Log("info", "mount_ended", ended.process, how=ended.how)
        if not ended.is_in_order and not self.is_stopping:
            yield Fail(f"mount {str(point)!r} ended with {ended.how}; all others were stopped", MOUNT_EXIT)

    def _is_reloaded(self, changes: Changes) -> Iterator[Action]:
        for point in changes.ended:
            process = self._mounts.pop(point).process
            if process in self._points:
                self._leaving.add(process)
                yield TellEnd(process, "it is not in the configuration any more")
                yield Terminate(process)
        for point in changes.started:
            start = self._start(point)
            self._mounts[point] = _Mount(start.process, is_added=True)
            yield start
            yield Watch(start.process)
        for point in changes.replaced:
            start = self._start(point)
            self._mounts[point].successor = start.process
            yield start
        yield from self._readiness()

    def _is_to_end(self, signal: str) -> Iterator[Action]:
        self.is_stopping = True
        yield Log("info", "stopping", how=signal)
        yield Readiness(False)
        yield TellAllEnd(f"the node's daemon ends ({signal})")
        yield from (Terminate(process) for process in self._points)
