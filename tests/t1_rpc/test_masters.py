"""Several masters: who is primary, what a fail-over costs, versions that do not fit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from fusecache.clock import SystemClock
from fusecache.errors import Unavailable, UpstreamError, VersionMismatch
from fusecache.metrics import Metrics
from fusecache.pb.alluxio import version_pb2
from fusecache.rpc.budget import Budget
from fusecache.rpc.channel import FIRST_RECONNECT_S
from tests.support.embedded import wait_until
from tests.support.log_noise import Declare
from tests.support.scripted_alluxio import ScriptedAlluxio, file_info
from tests.t1_rpc.conftest import MakeClient, total


@pytest.fixture
def masters(servers: list[ScriptedAlluxio]) -> list[ScriptedAlluxio]:
    """Three running masters that all have /f; each test makes some of them standbys."""
    for _ in range(3):
        server = ScriptedAlluxio().start()
        server.files[b"/f"] = file_info(b"/f", container=1, length=5)
        servers.append(server)
    return servers


def stand_by(server: ScriptedAlluxio) -> None:
    """As a standby with its gRPC server on answers."""

    def refuse(request: Any, context: grpc.ServicerContext) -> Any:
        server.done["standby"] += 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "GetServiceVersion is not supported on standby master")

    server.on("getServiceVersion", refuse)


def lead(server: ScriptedAlluxio) -> None:
    server.on("getServiceVersion", server._get_service_version)


class Rejecting:
    """A standby without gRPC: accepts TCP and closes at once."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.accepted = 0

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # the test is over
            self.accepted += 1
            connection.close()


@pytest.fixture
def rejecting() -> Iterator[Rejecting]:
    server = Rejecting()
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    listener = server.listener
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A host that swallows everything: connections are made and nothing is ever answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_discovery_only_the_primary_is_spoken_to(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    standbys = (masters[0], masters[2])
    for standby in standbys:
        stand_by(standby)

    def lead_when_the_others_have_refused(request: Any, context: grpc.ServicerContext) -> Any:
        """A primary that answers first ends the discovery, and a standby may then never have been asked."""
        wait_until(lambda: all(standby.done["standby"] for standby in standbys))
        return masters[1]._get_service_version(request, context)

    masters[1].on("getServiceVersion", lead_when_the_others_have_refused)
    client = make_client(*masters, settings={"connect_s": 20.0})
    assert client.connect(budget).primary == masters[1].target
    assert client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length == 5
    assert masters[1].calls("GetStatus")
    for standby in standbys:
        assert standby.done["standby"] == 1
        assert [call.method for call in standby.received] == ["getServiceVersion"]


def test_discovery_asks_for_the_meta_master_service_and_not_standbys(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    make_client(masters[0]).connect(budget)
    first = masters[0].calls("getServiceVersion")[0].request
    assert first.serviceType == version_pb2.META_MASTER_CLIENT_SERVICE
    assert not first.allowedOnStandbyMasters


def test_discovery_rejecting_and_silent_hosts_do_not_delay_the_primary(
    masters: list[ScriptedAlluxio],
    make_client: MakeClient,
    rejecting: Rejecting,
    silent_port: int,
    clock: SystemClock,
) -> None:
    client = make_client(rejecting.target, f"127.0.0.1:{silent_port}", masters[0], settings={"connect_s": 30.0})
    assert client.connect(Budget(clock, 10.0)).primary == masters[0].target


def test_discovery_no_primary_names_every_master(
    masters: list[ScriptedAlluxio], make_client: MakeClient, short: Callable[[], Budget], expected_logs: Declare
) -> None:
    expected_logs("master does not answer")
    for server in masters:
        stand_by(server)
    with pytest.raises(Unavailable) as failure:
        make_client(*masters).connect(short())
    for server in masters:
        assert server.target in str(failure.value)
        assert server.done["standby"] >= 1


def test_failover_primary_stops_and_another_takes_over(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    for standby in masters[1:]:
        stand_by(standby)
    client = make_client(*masters)
    client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    masters[0].stop()
    lead(masters[2])
    assert client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length == 5
    assert masters[2].calls("GetStatus")
    assert not masters[1].calls("GetStatus")


def test_failover_primary_that_says_it_is_none_any_more_is_left(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    for standby in masters[1:]:
        stand_by(standby)
    client = make_client(*masters)
    client.get_status(b"/f", sync_interval_ms=-1, budget=budget)

    def step_down(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAVAILABLE, "not the primary")

    masters[0].on("GetStatus", step_down)
    stand_by(masters[0])
    lead(masters[1])
    assert client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length == 5
    assert len(masters[0].calls("GetStatus")) == 2, "the answer of a former primary was followed once"


def test_failover_one_master_that_restarts_is_waited_for(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget, expected_logs: Declare
) -> None:
    expected_logs("master does not answer")
    client = make_client(masters[0])
    client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    masters[0].stop()
    back = threading.Timer(0.7, masters[0].start)
    back.start()
    assert client.get_status(b"/f", sync_interval_ms=-1, budget=budget).length == 5
    back.join()


@pytest.mark.parametrize(
    ("service", "name"),
    [
        (version_pb2.META_MASTER_CLIENT_SERVICE, "meta master"),
        (version_pb2.FILE_SYSTEM_MASTER_CLIENT_SERVICE, "file system master"),
    ],
)
def test_version_of_a_master_that_does_not_fit_is_final(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget, service: Any, name: str
) -> None:
    masters[0].versions[service] = 3
    with pytest.raises(VersionMismatch, match=f"{name} service has version 3"):
        make_client(masters[0]).connect(budget)
    assert not masters[0].calls("GetMasterInfo")


def test_version_service_not_yet_registered_is_waited_for(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    version = masters[0].versions.pop(version_pb2.META_MASTER_CLIENT_SERVICE)
    refused = threading.Event()

    def not_yet(request: Any, context: grpc.ServicerContext) -> Any:
        if request.serviceType == version_pb2.META_MASTER_CLIENT_SERVICE and not refused.is_set():
            refused.set()
            masters[0].versions[version_pb2.META_MASTER_CLIENT_SERVICE] = version
            context.abort(grpc.StatusCode.NOT_FOUND, "Service 7 is not found.")
        return masters[0]._get_service_version(request, context)

    masters[0].on("getServiceVersion", not_yet)
    make_client(masters[0]).connect(budget)
    assert refused.is_set()


def test_not_alluxio_is_told_at_once(servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget) -> None:
    server = ScriptedAlluxio().start()
    servers.append(server)

    def unknown(request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    server.on("getServiceVersion", unknown)
    with pytest.raises(VersionMismatch, match=server.target):
        make_client(server).connect(budget)
    assert len(server.calls("getServiceVersion")) == 1


def test_f06_unreachable_master_one_connection_attempt_a_second_at_most(
    make_client: MakeClient, rejecting: Rejecting, metrics: Metrics, clock: SystemClock, expected_logs: Declare
) -> None:
    expected_logs("master does not answer")
    budget = Budget(clock, 2.5)
    with pytest.raises(Unavailable):
        make_client(rejecting.target).connect(budget)
    assert total(metrics, "fusecache_rpcs_total{method=getServiceVersion") > rejecting.accepted
    assert 1 <= rejecting.accepted <= 1 + budget.total_s / FIRST_RECONNECT_S


def test_failover_to_a_master_of_another_cluster_is_refused(
    servers: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    """Ids repeat across clusters: the other one would answer with its own files under ours."""
    first = ScriptedAlluxio().start()
    other = ScriptedAlluxio(cluster_id=b"another-cluster").start()
    servers += [first, other]
    for server in servers:
        server.files[b"/f"] = file_info(b"/f", container=1, length=5)
    stand_by(other)
    client = make_client(first, other)
    client.connect(budget)
    first.stop()
    lead(other)
    with pytest.raises(UpstreamError, match="cluster another-cluster"):
        client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    assert not other.calls("GetStatus")


def test_failover_cluster_formatted_anew_behind_the_same_address_is_refused(
    masters: list[ScriptedAlluxio], make_client: MakeClient, budget: Budget
) -> None:
    client = make_client(masters[0])
    client.connect(budget)
    masters[0].stop()
    masters[0].cluster_id = b"formatted-anew"
    masters[0].start()
    with pytest.raises(UpstreamError, match="cluster formatted-anew"):
        client.get_status(b"/f", sync_interval_ms=-1, budget=budget)
    assert not masters[0].calls("GetStatus")
