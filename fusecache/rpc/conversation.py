"""A call with a stream each way, whose requests are sent by whoever has one: no thread stands behind them.

grpcio's public call takes an iterator of requests and gives each call a thread that runs it. It sends headers and first
request apart, wakes the reader for every event of the call, and parses answers in the one thread that serves all calls
of a channel. For a block of 110 KiB that was most of the work. `_Direct` drives the same call by the operations below
grpcio's public classes: headers and first request in one step, a reader that wakes once per answer, and no thread of
its own. Cold blocks of 110 KiB from a 2.9.3 block worker on the same machine, one after the other, 2 cores, medians of
4 x 300: 0.63 ms of CPU a call instead of 1.11, the answer after 1.9 ms instead of 2.5. (grpc.aio in a thread of its
own: 1.32 ms and 2.8.)

grpcio does not promise what `_Direct` uses. `_Threaded` does the same with the public classes alone, and is taken when
grpcio does not look as expected.

Knows no message and no session, does not count or retry.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog

log = structlog.get_logger(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")
_RequestOnly = TypeVar("_RequestOnly", contravariant=True)
_AnswerOnly = TypeVar("_AnswerOnly", covariant=True)
Metadata = tuple[tuple[str, str], ...]

Report = Callable[[grpc.RpcError | None], None]
"""Told how a call ended; None = OK. Runs in a grpc thread that every call of the channel waits for."""

UNDECODABLE = "Exception deserializing response!"
"""grpcio's own words for an answer that its deserialiser refused."""

_PARAMETERS = (
    "flags", "method", "host", "deadline", "metadata", "credentials", "operations", "event_handler", "context",
    "_registered_call_handle",
)  # fmt: skip
"""Of the function by which grpcio's public callables start a call on a channel (1.80 to 1.85)."""

_PROPAGATE_DEFAULTS = 0xFFFF
_NO_FLAGS = 0
_CANCELLED: int = grpc.StatusCode.CANCELLED.value[0]
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

try:
    _core: Any = import_module("grpc._cython.cygrpc")
except ImportError:
    _core = None


class Conversation(Protocol[_RequestOnly, _AnswerOnly]):
    """One call. One thread reads; any thread may do the rest."""

    def __next__(self) -> _AnswerOnly:
        """The next answer; StopIteration when the server has ended the call with OK, else grpc.RpcError."""
        ...

    def send(self, request: _RequestOnly) -> None:
        """Another request; dropped when the call is over. Does not wait."""
        ...

    def end(self) -> None:
        """No more requests (half-close). Does not wait."""
        ...

    def cancel(self) -> None:
        """End the call. Idempotent."""
        ...

    def when_over(self, report: Report) -> None:
        """Have `report` called once when the call is over; at once when it is."""
        ...


class CallFailed(grpc.RpcError):
    """How a call failed; says it as grpcio's own errors do."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._code

    def details(self) -> str:
        """The server's text, or grpc's."""
        return self._details


def converse(
    stub: Any,
    first: Request,
    *,
    serialize: Callable[[Request], bytes],
    parse: Callable[[bytes], Answer | None],
    timeout_s: float,
    metadata: Metadata,
    on_answer: Callable[[], None] | None = None,
) -> Conversation[Request, Answer]:
    """Start a call and send its first request. ValueError on a closed channel, as grpcio has it.

    `stub`: what `channel.stream_stream` gave for the same `serialize` and `parse` (None = not decodable).
    `on_answer`: called once in a grpc thread when the first answer, or the end, is there, so that nobody has to wait in
    `next`. CallFailed(UNIMPLEMENTED), and no call, when this grpcio can't tell.
    """
    if is_as_expected(stub):
        return _Direct(stub, first, serialize, parse, timeout_s, metadata, on_answer)
    if on_answer is not None:
        raise CallFailed(grpc.StatusCode.UNIMPLEMENTED, "this grpcio does not tell when an answer has come")
    return _Threaded(stub, first, timeout_s, metadata)


def is_as_expected(stub: Any) -> bool:
    """Whether this grpcio is one that `_Direct` can drive."""
    code = getattr(getattr(stub, "_managed_call", None), "__code__", None)
    return (
        _core is not None
        and code is not None
        and code.co_varnames[: code.co_argcount] == _PARAMETERS
        and hasattr(stub, "_method")
        and hasattr(stub, "_context")
        and hasattr(stub, "_registered_call_handle")
    )


class _Direct(Generic[Request, Answer]):
    """Each batch of operations gives one event, in the thread that grpcio runs for the channel; the last one gives the
    call's place there back. `_lock` guards what that thread and ours both change."""

    __slots__ = (
        "_answers", "_call", "_due", "_failure", "_lock", "_on_answer", "_over", "_parse", "_receiving", "_reports",
        "_sending", "_serialize", "_told_end", "_unsent",
    )  # fmt: skip

    def __init__(
        self,
        stub: Any,
        first: Request,
        serialize: Callable[[Request], bytes],
        parse: Callable[[bytes], Answer | None],
        timeout_s: float,
        metadata: Metadata,
        on_answer: Callable[[], None] | None,
    ) -> None:
        self._serialize = serialize
        self._on_answer = on_answer
        self._parse = parse
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """None = the end; stays there."""
        self._unsent: deque[Any] = deque()
        """Operations that wait for the one before: gRPC takes one at a time."""
        self._sending = True
        self._receiving = True
        self._over = False
        self._told_end = False
        self._failure: CallFailed | None = None
        self._reports: list[Report] = []
        self._due = 3
        start_and_send = (
            _core.SendInitialMetadataOperation(metadata, _NO_FLAGS),
            _core.SendMessageOperation(serialize(first), _NO_FLAGS),
        )
        receive = (_core.ReceiveInitialMetadataOperation(_NO_FLAGS), _core.ReceiveMessageOperation(_NO_FLAGS))
        end = (_core.ReceiveStatusOnClientOperation(_NO_FLAGS),)
        self._call = stub._managed_call(
            _PROPAGATE_DEFAULTS,
            stub._method,
            None,
            time.time() + timeout_s,
            metadata,
            None,
            (start_and_send, receive, end),
            self._on_event,
            stub._context,
            stub._registered_call_handle,
        )

    def __next__(self) -> Answer:
        if not self._receiving:
            with self._lock:
                if not self._over:
                    self._receiving = self._start(_core.ReceiveMessageOperation(_NO_FLAGS))
        serialized = self._answers.get()
        if serialized is None:
            self._answers.put(None)
            if self._failure is None:
                raise StopIteration
            raise self._failure
        answer = self._parse(serialized)
        if answer is None:
            self.cancel()
            raise CallFailed(grpc.StatusCode.INTERNAL, UNDECODABLE)
        return answer

    def send(self, request: Request) -> None:
        self._send(_core.SendMessageOperation(self._serialize(request), _NO_FLAGS))

    def end(self) -> None:
        self._send(_core.SendCloseFromClientOperation(_NO_FLAGS))

    def cancel(self) -> None:
        self._call.cancel(_CANCELLED, "Locally cancelled by application!")

    def when_over(self, report: Report) -> None:
        with self._lock:
            if not self._over:
                self._reports.append(report)
                return
        report(self._failure)

    def _send(self, operation: Any) -> None:
        with self._lock:
            if self._over:
                return
            if self._sending:
                self._unsent.append(operation)
            else:
                self._sending = self._start(operation)

    def _start(self, operation: Any) -> bool:
        """Under the lock. False when the call has ended and its last event is on its way here."""
        self._due += 1
        if self._call.operate((operation,), self._on_event):
            return True
        self._due -= 1
        return False

    def _on_event(self, event: Any) -> bool:
        """In grpcio's thread: a batch is done. True when it was the call's last one."""
        operation = event.batch_operations[-1]
        kind = operation.type()
        reports: list[Report] = []
        on_answer: Callable[[], None] | None = None
        with self._lock:
            self._due -= 1
            if kind == _core.OperationType.receive_message:
                self._receiving = False
                serialized = operation.message()
                if serialized is not None:
                    self._answers.put(serialized)
            elif kind == _core.OperationType.receive_status_on_client:
                self._over = True
                if operation.code() != 0:
                    code = _CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
                    self._failure = CallFailed(code, _text(operation.details()))
                reports, self._reports = self._reports, reports
            else:
                self._sending = False
                if self._unsent and not self._over:
                    self._sending = self._start(self._unsent.popleft())
            if self._over and not self._receiving and not self._told_end:
                self._told_end = True
                self._answers.put(None)
            if self._on_answer is not None and not self._answers.empty():
                on_answer, self._on_answer = self._on_answer, None
            last = self._due == 0
        if on_answer is not None:
            on_answer()
        for report in reports:
            try:
                report(self._failure)
            except Exception:  # it must not end the thread of every call of this channel
                log.exception("report of a call's end failed")
        return last


class _Threaded(Generic[Request, Answer]):
    """The same by grpcio's public classes: a thread runs the requests."""

    __slots__ = ("_requests", "_stream")

    def __init__(self, stub: Any, first: Request, timeout_s: float, metadata: Metadata) -> None:
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._requests.put(first)
        self._stream = stub(_until_none(self._requests), timeout=timeout_s, metadata=metadata)
        self._stream.add_done_callback(lambda _: self._requests.put(None))

    def __next__(self) -> Answer:
        answer: Answer = next(self._stream)
        return answer

    def send(self, request: Request) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def cancel(self) -> None:
        self._stream.cancel()
        self._requests.put(None)

    def when_over(self, report: Report) -> None:
        self._stream.add_done_callback(lambda stream: report(None if stream.code() is grpc.StatusCode.OK else stream))


def _until_none(requests: queue.SimpleQueue[Request | None]) -> Iterator[Request]:
    while (request := requests.get()) is not None:
        yield request


def _text(details: str | bytes | None) -> str:
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else details or ""
