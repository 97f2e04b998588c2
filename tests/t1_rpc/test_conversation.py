"""Calls with a stream each way, in both ways of driving them: what a reader sees must be the same."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from fusecache.rpc import conversation
from fusecache.rpc.channel import make_channel
from fusecache.rpc.conversation import Conversation, converse, is_as_expected
from tests.support.embedded import wait_until
from tests.support.log_noise import Declare

Start = Callable[..., Conversation[bytes, bytes]]
Handler = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


class Server:
    """Answers every call with `handler`, and keeps what it received."""

    def __init__(self) -> None:
        self.handler: Handler = self.echo
        self.received: list[bytes] = []
        self.half_closed = threading.Event()
        self.gone = threading.Event()

    def service(self, details: Any) -> Any:
        """grpc.GenericRpcHandler."""
        return grpc.stream_stream_rpc_method_handler(self._answer)

    def _answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not context.add_callback(self.gone.set):
            self.gone.set()
        return self.handler(requests, context)

    def echo(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Each request back; the end after the half-close."""
        for request in requests:
            self.received.append(request)
            yield request
        self.half_closed.set()

    def silent(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Not a word until the client has gone."""
        self.received.append(next(requests))
        self.gone.wait()
        yield from ()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    pool = futures.ThreadPoolExecutor(64)
    running = grpc.server(pool, handlers=[server])  # type: ignore[list-item]
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    channel = make_channel(f"127.0.0.1:{port}", tls=None)
    yield channel
    channel.close()
    running.stop(0).wait()
    pool.shutdown()


@pytest.fixture(params=["direct", "threaded"])
def start(request: pytest.FixtureRequest, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a call on `channel` with its first request."""
    if request.param == "threaded":
        monkeypatch.setattr(conversation, "_PARAMETERS", ("channel", "method", "requests"))

    def begin(
        first: bytes = b"first", *, parse: Any = bytes, timeout_s: float = 20.0, on_answer: Any = None
    ) -> Conversation[bytes, bytes]:
        stub = channel.stream_stream("/test/Converse", request_serializer=bytes, response_deserializer=parse)
        assert is_as_expected(stub) is (request.param == "direct")
        return converse(
            stub,
            first,
            serialize=bytes,
            parse=parse,
            timeout_s=timeout_s,
            metadata=(("key", "value"),),
            on_answer=on_answer,
        )

    return begin


def rest(talk: Conversation[bytes, bytes]) -> list[bytes]:
    """Every answer to come."""
    return list(iter(lambda: next(talk, b"the end"), b"the end"))


def test_requests_sent_at_once_arrive_in_order_and_each_is_answered(start: Start, server: Server) -> None:
    talk = start(b"0")
    for number in range(1, 500):
        talk.send(b"%d" % number)
    talk.end()
    assert rest(talk) == server.received == [b"%d" % number for number in range(500)]
    assert next(talk, None) is None, "the end stays the end"


def test_request_side_stays_open_until_it_is_ended(start: Start, server: Server) -> None:
    talk = start()
    assert next(talk) == b"first"
    talk.send(b"second")
    assert next(talk) == b"second"
    assert not server.half_closed.is_set()
    talk.end()
    assert rest(talk) == []
    assert server.half_closed.is_set()


def test_metadata_is_sent(start: Start, server: Server) -> None:
    def tell(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield str(dict(context.invocation_metadata())["key"]).encode()

    server.handler = tell
    assert rest(start()) == [b"value"]


def test_failure_comes_after_the_answers_before_it_and_stays(start: Start, server: Server) -> None:
    def fail(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"answer"
        context.abort(grpc.StatusCode.DATA_LOSS, "gr\u00fcn und blau")

    server.handler = fail
    talk = start()
    assert next(talk) == b"answer"
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as failure:
            next(talk)
        assert failure.value.code() is grpc.StatusCode.DATA_LOSS  # type: ignore[attr-defined]
        assert failure.value.details() == "gr\u00fcn und blau"  # type: ignore[attr-defined]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND])
def test_end_is_reported_once(start: Start, server: Server, code: grpc.StatusCode, late: bool) -> None:
    go = threading.Event()

    def end(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        go.wait()
        if code is not grpc.StatusCode.OK:
            context.abort(code, "no")
        yield from ()

    server.handler = end
    talk = start()
    reports: list[grpc.RpcError | None] = []
    if not late:
        talk.when_over(reports.append)
    go.set()
    with contextlib.suppress(grpc.RpcError):
        assert rest(talk) == []
    if late:
        talk.when_over(reports.append)
    wait_until(lambda: bool(reports))
    (report,) = reports
    assert (None if report is None else report.code()) is (None if code is grpc.StatusCode.OK else code)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("start", ["direct"], indirect=True)
def test_first_answer_or_end_is_told_once_and_then_nobody_waits(start: Start, server: Server, ends: bool) -> None:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not ends:
            yield from server.echo(requests, context)

    server.handler = answer
    told: list[str] = []
    talk = start(on_answer=lambda: told.append(threading.current_thread().name))
    wait_until(lambda: bool(told))
    assert next(talk, None) == (None if ends else b"first")
    talk.send(b"second")
    assert next(talk, None) == (None if ends else b"second")
    talk.end()
    assert rest(talk) == []
    assert len(told) == 1
    assert told != [threading.current_thread().name]


@pytest.mark.parametrize("start", ["threaded"], indirect=True)
def test_first_answer_grpcio_that_can_not_tell_makes_no_call(start: Start, server: Server) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        start(on_answer=lambda: None)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not server.received


def test_what_is_sent_after_the_end_is_dropped(start: Start, server: Server) -> None:
    def one(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)

    server.handler = one
    talk = start()
    assert rest(talk) == [b"first"]
    talk.send(b"too late")
    talk.end()
    talk.cancel()
    assert rest(talk) == []


def test_cancel_from_another_thread_ends_a_waiting_reader(start: Start, server: Server) -> None:
    server.handler = server.silent
    talk = start()
    wait_until(lambda: bool(server.received))
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(next, talk)
        talk.cancel()
        error = reader.exception(10)
    assert isinstance(error, grpc.RpcError)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert server.gone.wait(10)


def test_deadline_ends_the_call(start: Start, server: Server) -> None:
    server.handler = server.silent
    with pytest.raises(grpc.RpcError) as failure:
        next(start(timeout_s=0.3))
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_answer_that_is_not_decodable_ends_the_call(start: Start, server: Server) -> None:
    talk = start(parse=lambda data: None)
    with pytest.raises(grpc.RpcError, match="deserializing") as failure:
        next(talk)
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    talk.cancel()
    # grpcio's public classes believe that such a call is over; the server hears of it when the channel is closed.
    assert isinstance(talk, conversation._Threaded) or server.gone.wait(10)


def test_channel_that_closes_ends_its_calls_and_takes_no_more(
    start: Start, server: Server, channel: grpc.Channel
) -> None:
    server.handler = server.silent
    talk = start()
    wait_until(lambda: bool(server.received))
    channel.close()
    with pytest.raises(grpc.RpcError) as failure:
        next(talk)
    assert failure.value.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(ValueError, match="closed"):
        start()


def test_report_that_raises_spares_the_other_calls(
    start: Start, server: Server, expected_logs: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    expected_logs("report of a call's end failed|Exception in callback", count=1)

    def broken(error: grpc.RpcError | None) -> None:
        raise RuntimeError("a bug")

    other = start(b"other")
    talk = start()
    talk.when_over(broken)
    talk.end()
    assert rest(talk) == [b"first"]
    wait_until(lambda: any("failed" in r.message or "callback" in r.message for r in caplog.records))
    other.end()
    assert rest(other) == [b"other"]


def test_many_calls_at_once_do_not_mix_their_answers(start: Start, server: Server) -> None:
    def talk_about(subject: int) -> bool:
        talk = start(b"%d" % subject)
        for number in range(20):
            talk.send(b"%d %d" % (subject, number))
        talk.end()
        return rest(talk) == [b"%d" % subject, *(b"%d %d" % (subject, number) for number in range(20))]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(talk_about, range(160)))
