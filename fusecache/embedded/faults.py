"""A scripted plan of what goes wrong: which call, where, and how. Counts what was really injected.

Pure: no gRPC, no time, no threads of its own; `tampering` carries out what this decides. Scripted in Python,

    plan = FaultPlan()
    rule = plan.on("ReadBlock", nth=3, worker=0).cut_after(bytes=1234)
    ...
    assert rule.injected == 1

or in YAML (`fusecache embedded FOLDER --faults FILE`):

    faults:
      - method: ReadBlock
        worker: 0
        nth: 3
        cut_after: {bytes: 1234}
      - method: GetStatus
        error: {code: UNAVAILABLE, message: the master is going away}

`nth` counts the calls that a rule matches, from 1; `times` is how many of them from there on are hit (with `nth`
one, without it all). The first rule that is due wins a call. Calls are counted for every rule.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fusecache.errors import UsageError

MASTER_METHODS = (
    "GetStatus",
    "ListStatus",
    "GetFilePath",
    "Free",
    "GetFileInfo",
    "GetWorkerInfoList",
    "GetBlockInfo",
    "GetBlockMasterInfo",
    "GetConfiguration",
    "GetMasterInfo",
)
WORKER_METHODS = ("ReadBlock", "OpenLocalBlock", "Cache", "Load")
SHARED_METHODS = ("authenticate", "getServiceVersion")
"""Methods that the master and every block worker have."""
STREAMS = ("ReadBlock", "OpenLocalBlock", "ListStatus", "authenticate")
METHODS_WITH_LENGTHS = ("ReadBlock", "GetStatus", "ListStatus", "GetFileInfo")
CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
KINDS = ("delay", "error", "cut_after", "wrong_length", "stall", "drop_connection")
MASTER = -1
"""`worker` of a call that reached the master."""


@dataclass(frozen=True)
class Fault:
    """What to do to one call; fields that a kind does not use keep their defaults."""

    kind: str
    seconds: float = 0.0
    """delay: how long before the call is handled."""
    code: str = "UNAVAILABLE"
    """error, cut_after: status that ends the call; OK for a cut that says nothing."""
    message: str = "injected fault"
    bytes: int = 0
    """cut_after, stall, drop_connection: data bytes of a ReadBlock that still arrive."""
    messages: int | None = None
    """The same in whole answers, for any stream; None = bytes count."""
    by: int = 0
    """wrong_length: bytes too many (> 0) or too few (< 0)."""


class FaultRule:
    """One line of the plan. Made by `FaultPlan.on`; does nothing until one of its kinds is chosen."""

    def __init__(self, plan: FaultPlan, key: str, method: str, nth: int | None, times: int | None, worker: int | None):
        self.method = method
        self.worker = worker
        self.fault: Fault | None = None
        self.calls = 0
        """Calls that matched so far."""
        self.injected = 0
        """Times the fault really happened."""
        self._plan = plan
        self._key = key
        self._first = 1 if nth is None else nth
        self._times = times if times is not None or nth is None else 1

    def delay(self, seconds: float) -> FaultRule:
        """Handle the call only after so many seconds."""
        _at_least(f"{self._key}.delay.seconds", seconds, 0, (int, float))
        return self._set(Fault("delay", seconds=float(seconds)))

    def error(self, code: str, message: str = "injected fault") -> FaultRule:
        """Answer with a status, before the call is handled."""
        _one_of(f"{self._key}.error.code", code, CODES[1:])
        _text(f"{self._key}.error.message", message)
        return self._set(Fault("error", code=code, message=message))

    def cut_after(
        self, *, bytes: int | None = None, messages: int | None = None, code: str = "UNAVAILABLE"
    ) -> FaultRule:
        """End a stream after so many data bytes (exact to the byte) or answers; code OK = without a word."""
        _one_of(f"{self._key}.cut_after.code", code, CODES)
        position, count = self._position("cut_after", bytes, messages)
        return self._set(Fault("cut_after", bytes=position, messages=count, code=code))

    def wrong_length(self, by: int) -> FaultRule:
        """ReadBlock: so many bytes too many (> 0) or too few, with status OK; metadata: file lengths off by it."""
        key = f"{self._key}.wrong_length"
        if self.method not in METHODS_WITH_LENGTHS:
            _refuse(key, self.method, f"a method that tells lengths: {', '.join(METHODS_WITH_LENGTHS)}")
        if type(by) is not int or by == 0:
            _refuse(f"{key}.by", by, "an integer other than 0")
        return self._set(Fault("wrong_length", by=by))

    def stall(self, *, bytes: int | None = None, messages: int | None = None) -> FaultRule:
        """Send so much of the answer (by default nothing), then nothing more until the client gives up."""
        position, count = self._position("stall", bytes, messages)
        return self._set(Fault("stall", bytes=position, messages=count))

    def drop_connection(self, *, bytes: int | None = None, messages: int | None = None) -> FaultRule:
        """Send so much of the answer (by default nothing), then close the client's TCP connection."""
        position, count = self._position("drop_connection", bytes, messages)
        return self._set(Fault("drop_connection", bytes=position, messages=count))

    def _position(self, kind: str, bytes: int | None, messages: int | None) -> tuple[int, int | None]:
        key = f"{self._key}.{kind}"
        if bytes is not None and messages is not None:
            _refuse(f"{key}.messages", messages, "nothing beside bytes")
        if bytes is not None:
            _at_least(f"{key}.bytes", bytes, 0, (int,))
            if bytes and self.method != "ReadBlock":
                _refuse(f"{key}.bytes", bytes, "0 for a method other than ReadBlock (use messages)")
        if messages is not None:
            _at_least(f"{key}.messages", messages, 0, (int,))
            if messages and self.method not in STREAMS:
                _refuse(f"{key}.messages", messages, f"0 for a method without a stream of answers ({self.method})")
        if kind == "cut_after" and self.method not in STREAMS:
            _refuse(key, self.method, f"a method with a stream of answers: {', '.join(STREAMS)}")
        return bytes or 0, messages

    def _set(self, fault: Fault) -> FaultRule:
        if self.fault is not None:
            _refuse(f"{self._key}.{fault.kind}", self.fault.kind, "one kind of fault a rule")
        self.fault = fault
        return self

    def _due(self) -> bool:
        """Count a matching call; whether the fault is to happen to it."""
        self.calls += 1
        if self.fault is None or self.calls < self._first:
            return False
        return self._times is None or self.calls < self._first + self._times

    def happened(self) -> None:
        """Called by whoever injected the fault."""
        with self._plan.lock:
            self.injected += 1


class FaultPlan:
    """All rules of one server. Thread-safe; rules may be added while it runs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rules: list[FaultRule] = []

    def on(
        self, method: str, *, nth: int | None = None, times: int | None = None, worker: int | None = None
    ) -> FaultRule:
        """A rule for calls of a method (of block worker number `worker`, from 0); choose its kind next."""
        return self._add(f"on({method!r})", method, nth, times, worker)

    def injected(self, kind: str | None = None, method: str | None = None) -> int:
        """Faults that really happened, all or of one kind or method."""
        with self.lock:
            return sum(
                rule.injected
                for rule in self.rules
                if rule.fault is not None
                and (kind is None or rule.fault.kind == kind)
                and (method is None or rule.method == method)
            )

    def take(self, method: str, worker: int) -> FaultRule | None:
        """The rule that is due for this call, if any; counts the call for every rule that matches it."""
        chosen: FaultRule | None = None
        with self.lock:
            for rule in self.rules:
                if rule.method == method and rule.worker in (None, worker) and rule._due() and chosen is None:
                    chosen = rule
        return chosen

    def clear(self) -> None:
        """Drop all rules: the server is healthy again."""
        with self.lock:
            self.rules.clear()

    @classmethod
    def from_yaml(cls, text: str) -> FaultPlan:
        """A plan from its YAML text. UsageError names key, value and what is allowed."""
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise UsageError(f"fault plan is no YAML: {' '.join(str(exc).split())}") from exc
        if not isinstance(document, dict) or set(document) != {"faults"} or not isinstance(document["faults"], list):
            raise UsageError("fault plan: one key is allowed, `faults`, with a list of rules")
        plan = cls()
        for index, entry in enumerate(document["faults"]):
            plan._add_entry(f"faults[{index}]", entry)
        return plan

    @classmethod
    def from_file(cls, path: Path) -> FaultPlan:
        """A plan from a file. UsageError also names the file."""
        try:
            return cls.from_yaml(path.read_text())
        except (OSError, UnicodeDecodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
            raise UsageError(f"fault plan {str(path)!r} can't be read: {why}") from exc
        except UsageError as exc:
            raise UsageError(f"{path}: {exc}") from exc

    def _add(self, key: str, method: str, nth: Any, times: Any, worker: Any) -> FaultRule:
        _one_of(f"{key}.method", method, MASTER_METHODS + WORKER_METHODS + SHARED_METHODS)
        for name, value in (("nth", nth), ("times", times)):
            if value is not None:
                _at_least(f"{key}.{name}", value, 1, (int,))
        if worker is not None:
            _at_least(f"{key}.worker", worker, 0, (int,))
            if method in MASTER_METHODS:
                _refuse(f"{key}.worker", worker, f"nothing: {method} is a call to the master")
        rule = FaultRule(self, key, method, nth, times, worker)
        with self.lock:
            self.rules.append(rule)
        return rule

    def _add_entry(self, key: str, entry: Any) -> None:
        if not isinstance(entry, Mapping):
            _refuse(key, entry, "a mapping with the key `method` and one kind of fault")
        for name in entry:
            _one_of(f"{key} key", name, ("method", "nth", "times", "worker", *KINDS))
        kinds = [name for name in KINDS if name in entry]
        if len(kinds) != 1:
            _refuse(key, kinds, f"exactly one of {', '.join(KINDS)}")
        kind = kinds[0]
        rule = self._add(key, entry.get("method", ""), entry.get("nth"), entry.get("times"), entry.get("worker"))
        arguments = {} if entry[kind] is None else entry[kind]
        if not isinstance(arguments, Mapping):
            _refuse(f"{key}.{kind}", arguments, f"a mapping with keys of {', '.join(_ARGUMENTS[kind])}")
        for name in arguments:
            _one_of(f"{key}.{kind} key", name, _ARGUMENTS[kind])
        for name in _REQUIRED[kind]:
            if name not in arguments:
                _refuse(f"{key}.{kind}", dict(arguments), f"a mapping with the key {name}")
        getattr(rule, kind)(**arguments)


_ARGUMENTS = {
    "delay": ("seconds",),
    "error": ("code", "message"),
    "cut_after": ("bytes", "messages", "code"),
    "wrong_length": ("by",),
    "stall": ("bytes", "messages"),
    "drop_connection": ("bytes", "messages"),
}
_REQUIRED = {
    "delay": ("seconds",),
    "error": ("code",),
    "cut_after": (),
    "wrong_length": ("by",),
    "stall": (),
    "drop_connection": (),
}


def _refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise UsageError(f"{key}: {value!r} is not allowed; allowed: {allowed}")


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(key, value, ", ".join(allowed))


def _text(key: str, value: object) -> None:
    if not isinstance(value, str):
        _refuse(key, value, "text")


def _at_least(key: str, value: object, least: int, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds or value < least:  # type: ignore[operator]  # its type was checked just before
        what = "an integer" if kinds == (int,) else "a number"
        _refuse(key, value, f"{what} of at least {least}")
