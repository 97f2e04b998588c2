"""An authenticated channel to one server (a master or a block worker).

The first call shakes hands; every later one takes the session's metadata without a lock. When the server ends
the session, or answers UNAUTHENTICATED, the session is dropped and the next call makes a new one with a new
id. With scheme `auto`, a server without the SASL service is spoken to without a session.

Raises grpc.RpcError for failed calls (this package's other modules translate with `alluxio.status`), and our
errors for failed handshakes. Does not retry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import structlog

from fusecache.alluxio.methods import Answer, Method, Request
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.sasl import AuthenticationOff, Login, SaslSession
from fusecache.alluxio.status import code_of, text_of
from fusecache.clock import Clock
from fusecache.errors import AuthenticationFailed, Unavailable, UpstreamError
from fusecache.rpc.channel import lost_its_thread, make_channel, start_its_thread
from fusecache.rpc.conversation import Conversation, Metadata, converse
from fusecache.rpc.tls import TlsFiles
from fusecache.threads import is_refused

log = structlog.get_logger(__name__)

MAX_REFUSALS = 3
"""UNAUTHENTICATED answers in a row, each on a fresh session, after which the server means it."""

_AnswerOnly = TypeVar("_AnswerOnly", covariant=True)


class AnswerStream(Protocol[_AnswerOnly]):
    """What this package uses of a streaming call."""

    def __next__(self) -> _AnswerOnly: ...
    def __iter__(self) -> Iterator[_AnswerOnly]: ...
    def cancel(self) -> object:
        """End the call; thread-safe and idempotent."""
        ...


class _Session:
    """What calls need to know: metadata to send, and the SASL stream behind it (None = authentication is off)."""

    __slots__ = ("metadata", "sasl")

    def __init__(self, sasl: SaslSession | None) -> None:
        self.sasl = sasl
        self.metadata: Metadata = sasl.metadata if sasl is not None else ()


class Connection:
    """One server. Thread-safe; made without I/O."""

    def __init__(
        self,
        target: str,
        *,
        login: Login,
        tls: TlsFiles | None,
        connect_s: float,
        max_receive_bytes: int,
        meter: RpcMeter,
        clock: Clock,
        session_ended: Callable[[Connection], None],
    ) -> None:
        """`session_ended(self)` is called, in any thread, when the server has ended or forgotten our session: it may be
        another process than before."""
        self.target = target
        self._session_ended = session_ended
        self._login = login
        self._connect_s = connect_s
        self._meter = meter
        self._clock = clock
        self._channel = make_channel(target, tls=tls, max_receive_bytes=max_receive_bytes)
        self._mending = threading.Lock()
        self._is_threadless = False
        self._session: _Session | None = None
        self._handshake = threading.Lock()
        self._refusals = 0
        self._closed = False
        self._callables: dict[str, Any] = {}

    def unary(self, method: Method[Request, Answer], request: Request, timeout_s: float) -> Answer:
        """One call, one answer."""
        started = self._clock.now()
        session = self._session_for(method, timeout_s)
        call = self._callable(method, self._channel.unary_unary)
        left_s = max(0.001, timeout_s - (self._clock.now() - started))
        try:
            with self._unless_closed():
                answer = call(request, timeout=left_s, metadata=session.metadata if session else None)
        except grpc.RpcError as error:
            self.failed(method, session, error, self._clock.now() - started)
            raise
        self.succeeded(method, self._clock.now() - started)
        return cast("Answer", answer)

    def future(self, method: Method[Request, Answer], request: Request, timeout_s: float) -> PendingCall[Answer]:
        """Start a unary call; the answer, or the error, comes from `PendingCall.result`."""
        started = self._clock.now()
        session = self._session_for(method, timeout_s)
        call = self._callable(method, self._channel.unary_unary)
        left_s = max(0.001, timeout_s - (self._clock.now() - started))
        with self._unless_closed():
            future = call.future(request, timeout=left_s, metadata=session.metadata if session else None)
        return PendingCall(future, OpenCall(self, method, session, started))

    def answers(
        self, method: Method[Request, Answer], request: Request, timeout_s: float
    ) -> tuple[AnswerStream[Answer], OpenCall]:
        """One request, a stream of answers. The caller reports the end to the OpenCall."""
        started = self._clock.now()
        session = self._session_for(method, timeout_s)
        call = self._callable(method, self._channel.unary_stream)
        left_s = max(0.001, timeout_s - (self._clock.now() - started))
        with self._unless_closed():
            stream = call(request, timeout=left_s, metadata=session.metadata if session else None)
        return cast("AnswerStream[Answer]", stream), OpenCall(self, method, session, started)

    def converse(
        self,
        method: Method[Request, Answer],
        first: Request,
        *,
        login_s: float,
        timeout_s: float,
        on_answer: Callable[[], None] | None = None,
    ) -> tuple[Conversation[Request, Answer], OpenCall]:
        """A stream each way; `first` is sent at once. `login_s` bounds a handshake that may be needed (0 = none: this
        does not wait, and raises Unavailable without a session), `timeout_s` the call itself; `on_answer` as
        `rpc.conversation.converse` has it."""
        started = self._clock.now()
        session = self._session_for(method, login_s)
        stub = self._callable(method, self._channel.stream_stream)
        with self._unless_closed():
            conversation = converse(
                stub,
                first,
                serialize=method.serialize,
                parse=method.parse,
                timeout_s=timeout_s,
                metadata=session.metadata if session else (),
                on_answer=on_answer,
            )
        return conversation, OpenCall(self, method, session, started)

    @property
    def notices_restarts(self) -> bool:
        """True while a restarted server is noticed by itself, because it ends our session."""
        session = self._session
        return session is not None and session.sasl is not None

    def close(self) -> None:
        """End the session and the channel; calls in flight, a handshake among them, are cancelled, not waited for."""
        self._closed = True
        try:
            self._mend()
        except RuntimeError:
            log.warning("not closed, for want of a thread", target=self.target)  # it would wait for ever
            return
        self._channel.close()
        session, self._session = self._session, None
        if session is not None and session.sasl is not None:
            session.sasl.close()

    def succeeded(self, method: Method[Any, Any], seconds: float) -> None:
        """Account for a call that ended well."""
        if self._refusals and method.authenticated:
            self._refusals = 0
        self._meter.ended(method.name, grpc.StatusCode.OK, seconds)

    def failed(self, method: Method[Any, Any], session: _Session | None, error: grpc.RpcError, seconds: float) -> None:
        """Account for a failed call; drops the session when the server does not know it any more.

        Raises AuthenticationFailed when MAX_REFUSALS fresh sessions in a row were refused.
        """
        code = code_of(error)
        self._meter.ended(method.name, code, seconds)
        if code is not grpc.StatusCode.UNAUTHENTICATED or session is None:
            return
        self._drop(session)
        self._refusals += 1
        if self._refusals >= MAX_REFUSALS:
            self._refusals = 0
            raise AuthenticationFailed(f"{self.target}: {method.name} refused: {text_of(error)}") from error

    def count(self, method: Method[Any, Any], code: grpc.StatusCode, seconds: float) -> None:
        """Account for a call without drawing conclusions about the session."""
        self._meter.ended(method.name, code, seconds)

    def seconds_since(self, started: float) -> float:
        """Seconds of this connection's clock since `started`."""
        return self._clock.now() - started

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """grpc refuses a call on a closed channel with ValueError: ours is final, so that nobody tries again. Where it
        gets no thread for a call, that one is Unavailable."""
        try:
            self._mend()
            yield
        except ValueError as error:
            if not self._closed:
                raise
            raise UpstreamError(f"{self.target}: the connection is closed") from error
        except RuntimeError as refusal:
            if not is_refused(refusal):
                raise
            if lost_its_thread(refusal):
                self._is_threadless = True
            raise Unavailable(f"{self.target}: no thread can be started for a call") from None

    def _mend(self) -> None:
        """Give a channel the thread that it could not start; the call that lacked it is over then as well."""
        if self._is_threadless:
            with self._mending:
                if self._is_threadless:
                    start_its_thread(self._channel)
                    self._is_threadless = False

    def _callable(self, method: Method[Any, Any], make: Any) -> Any:
        found = self._callables.get(method.path)
        if found is None:
            found = make(method.path, request_serializer=method.serialize, response_deserializer=method.parse)
            self._callables[method.path] = found
        return found

    def _session_for(self, method: Method[Any, Any], timeout_s: float) -> _Session | None:
        if not method.authenticated:
            return None
        session = self._session
        if session is not None:
            return session
        if timeout_s <= 0:
            raise Unavailable(f"{self.target}: not logged in")
        if not self._handshake.acquire(timeout=timeout_s):
            raise Unavailable(f"{self.target}: another thread's login did not end within {timeout_s:.1f} s")
        try:
            session = self._session
            if session is None:
                session = self._session = self._shake_hands(min(timeout_s, self._connect_s))
            return session
        finally:
            self._handshake.release()

    def _shake_hands(self, timeout_s: float) -> _Session:
        if self._login.scheme == "nosasl":
            return _Session(None)
        started = self._clock.now()
        with self._unless_closed():
            sasl = SaslSession(self._channel, self._login, self._ended)
        code = grpc.StatusCode.OK
        try:
            sasl.wait(timeout_s, self.target)
        except AuthenticationOff:
            code = grpc.StatusCode.UNIMPLEMENTED
            if self._login.scheme == "simple":
                raise AuthenticationFailed(
                    f"{self.target}: server runs without authentication, but auth is set to simple (use auto or nosasl)"
                ) from None
            return _Session(None)
        except AuthenticationFailed:
            code = grpc.StatusCode.UNAUTHENTICATED
            raise
        except Unavailable:
            code = grpc.StatusCode.UNAVAILABLE
            raise
        finally:
            self._meter.ended("authenticate", code, self._clock.now() - started)
        return _Session(sasl)

    def _ended(self, sasl: SaslSession) -> None:
        """The SASL stream is over: whoever still uses its id would be refused."""
        session = self._session
        if session is not None and session.sasl is sasl:
            self._session = None
            self._session_ended(self)

    def _drop(self, session: _Session) -> None:
        if self._session is session:
            self._session = None
            self._session_ended(self)
        if session.sasl is not None:
            session.sasl.close()


class OpenCall:
    """A streaming call that is under way; whoever reads it reports how it ended, once."""

    __slots__ = ("_connection", "_method", "_session", "_started")

    def __init__(
        self, connection: Connection, method: Method[Any, Any], session: _Session | None, started: float
    ) -> None:
        self._connection = connection
        self._method = method
        self._session = session
        self._started = started

    def succeeded(self) -> None:
        """The stream ended with OK, or was ended by us when all had arrived."""
        self._connection.succeeded(self._method, self._seconds())

    def failed(self, error: grpc.RpcError) -> None:
        """The stream ended with an error; may raise AuthenticationFailed (`Connection.failed`)."""
        self._connection.failed(self._method, self._session, error, self._seconds())

    def cancelled(self) -> None:
        """We ended it ourselves before its end."""
        self._connection.count(self._method, grpc.StatusCode.CANCELLED, self._seconds())

    @property
    def target(self) -> str:
        """host:port of the server."""
        return self._connection.target

    def _seconds(self) -> float:
        return self._connection.seconds_since(self._started)


class PendingCall(Generic[Answer]):
    """A unary call under way, started without waiting."""

    __slots__ = ("_future", "_open")

    def __init__(self, future: Any, open_call: OpenCall) -> None:
        self._future = future
        self._open = open_call

    def result(self) -> Answer:
        """Wait for the answer (no longer than the call's own deadline) or raise its error."""
        try:
            answer = self._future.result()
        except grpc.FutureCancelledError as error:
            self._open.cancelled()
            raise Unavailable(f"{self._open.target}: call was cancelled") from error
        except grpc.RpcError as error:
            self._open.failed(error)
            raise
        self._open.succeeded()
        return cast("Answer", answer)

    def when_done(self, report: Callable[[PendingCall[Answer]], None]) -> None:
        """Have `report(self)` called in a grpc thread when the call has ended; `result` then does not wait."""
        self._future.add_done_callback(lambda _: report(self))

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._future.cancel()
