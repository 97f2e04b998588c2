"""SASL over real sockets: detection, sessions that end, refusals, handshakes that never end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from fusecache.alluxio.client import AlluxioClient
from fusecache.clock import SystemClock
from fusecache.errors import AuthenticationFailed, Unavailable, UsageError
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, SUCCESS, SaslMessage
from fusecache.rpc.budget import Budget
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio, file_info
from tests.t1_rpc.conftest import MakeClient


@pytest.fixture
def served(master: ScriptedAlluxio) -> ScriptedAlluxio:
    master.files[b"/f"] = file_info(b"/f", container=1, length=5)
    return master


def stat(client: AlluxioClient, budget: Budget) -> int:
    return client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length


def test_login_simple_every_call_carries_the_channel_id(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    assert stat(client, budget) == 5
    assert stat(client, budget) == 5
    (hello,) = served.calls("authenticate")
    assert hello.request.message == b"\0alice\0noPassword"
    assert {call.channel_id for call in served.calls("GetStatus")} == {hello.request.clientId.decode()}
    assert served.done["unauthenticated"] == 0


def test_login_stream_stays_open_while_the_client_lives(
    served: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(served)
    stat(client, budget)
    assert len(served.sessions) == 1
    stat(client, budget)
    assert len(served.sessions) == 1
    client.close()
    wait_for(lambda: not served.sessions)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("condition did not come true")


def test_login_impersonation_is_sent_as_authorization_id(
    served: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    stat(make_client(served, impersonate="bob"), budget)
    assert served.calls("authenticate")[0].request.message == b"bob\0alice\0noPassword"


def test_login_server_without_sasl_is_detected(
    servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    server = ScriptedAlluxio(auth=False).start()
    servers.append(server)
    server.files[b"/f"] = file_info(b"/f", container=1, length=5)
    assert stat(make_client(server), budget) == 5
    assert [call.channel_id for call in server.calls("GetStatus")] == [None]


def test_login_simple_demanded_but_server_runs_without_is_one_clear_error(
    servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    server = ScriptedAlluxio(auth=False).start()
    servers.append(server)
    with pytest.raises(AuthenticationFailed, match=r"auth is set to simple"):
        stat(make_client(server, auth="simple"), budget)


def test_login_nosasl_against_simple_is_refused_and_ends(
    served: ScriptedAlluxio, make_client: MakeClient, budget: Budget
) -> None:
    with pytest.raises(AuthenticationFailed, match="not authenticated"):
        stat(make_client(served, auth="nosasl"), budget)
    assert served.done["unauthenticated"] == 3
    assert not served.calls("authenticate")


def test_login_session_ended_by_the_server_is_renewed_with_a_fresh_id(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stat(client, budget)
    served.end_sessions()
    wait_for(lambda: not served.sessions)
    assert stat(client, budget) == 5
    assert len(set(served.session_ids)) == len(served.session_ids) == 2


def test_login_session_forgotten_by_the_server_is_renewed_and_the_call_repeated(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stat(client, budget)
    served.forget_sessions()
    assert stat(client, budget) == 5
    assert served.done["unauthenticated"] == 1
    assert len(set(served.session_ids)) == len(served.session_ids) == 2


def test_login_server_that_forgets_every_session_ends_with_an_error(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such channel")

    served.on("GetStatus", refuse)
    with pytest.raises(AuthenticationFailed, match="no such channel"):
        stat(client, budget)
    assert len(served.calls("GetStatus")) == 3
    assert len(set(served.session_ids)) == 3


def test_login_restarted_server_is_logged_in_to_again(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    stat(client, budget)
    served.stop()
    served.start()
    assert stat(client, budget) == 5
    assert len(served.session_ids) == 2


def test_login_refused_user_is_not_retried(served: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        served.receive_first("authenticate", requests, context)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "alice may not\nimpersonate")
        yield SaslMessage()

    served.on("authenticate", refuse)
    with pytest.raises(AuthenticationFailed, match="alice may not impersonate"):
        stat(client, budget)
    assert len(served.calls("authenticate")) == 1


def test_login_server_that_wants_another_step_is_refused(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    def challenge(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        while True:
            yield SaslMessage(messageType=CHALLENGE, message=b"and your ticket?")

    served.on("authenticate", challenge)
    with pytest.raises(AuthenticationFailed, match="SIMPLE and NOSASL"):
        stat(client, budget)


def test_f15_handshake_that_never_ends_is_given_up(
    served: ScriptedAlluxio, make_client: MakeClient, clock: SystemClock, expected_logs: Declare
) -> None:
    expected_logs("master does not answer")
    gone = threading.Event()

    def silent(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        served.receive_first("authenticate", requests, context)
        end = threading.Event()
        if not context.add_callback(end.set):
            end.set()  # the client has gone already
        end.wait()
        gone.set()
        yield from ()

    served.on("authenticate", silent)
    client = make_client(served, settings={"connect_s": 1.0})
    with pytest.raises(Unavailable, match="no answer to the login"):
        stat(client, Budget(clock, 3.5))
    assert served.calls("authenticate")
    assert gone.wait(5), "the abandoned handshake was not cancelled"


def test_f15_garbage_after_success_costs_the_session_and_nothing_else(
    served: ScriptedAlluxio, client: AlluxioClient, budget: Budget
) -> None:
    dropped = threading.Event()

    def chatty(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        first = served.receive_first("authenticate", requests, context)
        served.sessions.add(first.clientId.decode())
        if not context.add_callback(dropped.set):
            dropped.set()  # the client has gone already
        yield SaslMessage(messageType=SUCCESS)
        served.done["garbage"] += 1
        yield SaslMessage(messageType=SUCCESS, message=b"x" * 1000)
        dropped.wait()

    served.on("authenticate", chatty)
    stat(client, budget)
    assert dropped.wait(5), "the stream of a chatty server was kept"
    assert served.done["garbage"] >= 1
    assert stat(client, budget) == 5


def test_login_many_threads_share_one_handshake(served: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: stat(client, budget), range(64))) == {5}
    assert len(served.calls("authenticate")) == 1


@pytest.mark.parametrize("user", ["a\0b", "\0"])
def test_login_user_with_nul_is_a_usage_error(make_client: MakeClient, user: str) -> None:
    with pytest.raises(UsageError, match="NUL"):
        make_client("127.0.0.1:1", user=user)


def test_configuration_needs_no_login(served: ScriptedAlluxio, client: AlluxioClient, budget: Budget) -> None:
    served.configuration[b"alluxio.user.block.size.bytes.default"] = b"64MB"
    assert client.configuration(budget) == {"alluxio.user.block.size.bytes.default": "64MB"}
    assert not served.calls("authenticate")
    assert [call.channel_id for call in served.calls("GetConfiguration")] == [None]


def test_login_unanswered_master_is_reported_once_in_a_while(
    make_client: MakeClient, short: Callable[[], Budget], expected_logs: Declare
) -> None:
    expected_logs("master does not answer")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        stat(make_client("127.0.0.1:1"), short())
