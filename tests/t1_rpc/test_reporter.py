"""The reporter against a scripted controller: full and delta reports, directives, every way to fail."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from fusecache.clock import SystemClock
from fusecache.locality.holdings import Holdings
from fusecache.locality.report_state import ReportState
from fusecache.locality.reporter import Reporter, ReportingThread
from fusecache.metrics import Metrics
from fusecache.pb.locality.locality_pb2 import Directive
from tests.support.faulty_proxy import FaultyProxy
from tests.support.log_noise import Declare
from tests.support.scripted_controller import ScriptedController, report_fully
from tests.support.simulated_reporter import SimulatedNodes

INTERVAL_S = 0.1


@pytest.fixture
def controller() -> Iterator[ScriptedController]:
    with ScriptedController() as running:
        yield running


@pytest.fixture
def nodes(controller: ScriptedController) -> Iterator[SimulatedNodes]:
    """One node that holds 10 of 100 bytes of data set `a`."""
    simulated = SimulatedNodes(controller.address, ["node-1"], interval_s=INTERVAL_S)
    simulated.set_bytes("node-1", "a", 10, total_bytes=100)
    with simulated:
        yield simulated


def test_first_report_is_full_and_later_ones_carry_what_changed(
    nodes: SimulatedNodes, controller: ScriptedController
) -> None:
    stream = controller.stream(reports=3)
    first, second = stream.reports[:2]
    assert (first.node_name, first.full, first.sequence, [d.name for d in first.datasets]) == ("node-1", True, 1, ["a"])
    assert first.session != 0
    assert (second.full, second.sequence, list(second.datasets), second.session) == (False, 2, [], first.session)
    assert second.mounts[0].ready
    assert second.capacities

    nodes.set_bytes("node-1", "b", 7)
    controller.wait(lambda: stream.local_bytes("b") == 7, "the new data set")
    nodes.set_bytes("node-1", "a", 11)
    controller.wait(lambda: stream.local_bytes("a") == 11, "the change")
    nodes.drop_dataset("node-1", "b")
    controller.wait(lambda: "b" not in stream.known(), "the removal")
    nodes.set_ready("node-1", False, "its disk is gone")
    controller.wait(lambda: stream.not_ready(), "the mount that is not ready")
    assert set(stream.not_ready().values()) == {"its disk is gone"}
    assert not stream.known()["a"].ready
    reports = list(stream.reports)
    assert [report.sequence for report in reports] == list(range(1, len(reports) + 1))
    assert [report.full for report in reports[1:]] == [False] * (len(reports) - 1)
    assert len(controller.streams) == 1


def test_report_fully_is_obeyed_and_unknown_or_outdated_directives_are_not(
    nodes: SimulatedNodes, controller: ScriptedController, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stream = controller.stream(reports=2)

    def fulls() -> int:
        return sum(report.full for report in list(stream.reports))

    controller.order(stream, report_fully(epoch=5))
    controller.wait(lambda: fulls() == 2, "the full report that was asked for")
    assert [d.name for d in next(r for r in stream.reports[1:] if r.full).datasets] == ["a"]
    controller.order(stream, report_fully(epoch=4, directive_id="old"))
    controller.order(stream, Directive(lease_transitions=6, id="odd"))
    controller.order(stream, report_fully(epoch=5, directive_id="older"))
    controller.wait(lambda: caplog.text.count("directive_not_followed") == 3, "three lines in the log")
    sent = len(stream.reports)
    controller.wait(lambda: len(stream.reports) > sent + 2, "the next reports")
    assert fulls() == 2
    refused = [line for line in caplog.text.splitlines() if "directive_not_followed" in line]
    assert ["refused" in line for line in refused] == [True, False, True]
    assert "does not know the action" in refused[1]
    assert len(controller.streams) == 1


@pytest.mark.parametrize(
    "status",
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "sequence 3 after 1"),
        (grpc.StatusCode.UNAVAILABLE, "not the leader any longer"),
        (grpc.StatusCode.OK, ""),
    ],
)
def test_stream_that_is_ended_is_begun_again_with_a_full_report(
    status: tuple[grpc.StatusCode, str],
    nodes: SimulatedNodes,
    controller: ScriptedController,
    expected_logs: Declare,
) -> None:
    expected_logs(r"controller_stream_failed", count=1)
    first = controller.stream(reports=2)
    controller.order(first, status)
    second = controller.stream(1, reports=2)
    assert first.ended
    assert (second.reports[0].full, second.reports[0].sequence) == (True, 1)
    assert second.reports[0].session == first.reports[0].session
    assert second.local_bytes("a") == 10


def test_instance_that_is_not_the_leader_is_asked_again_on_a_new_connection(
    nodes: SimulatedNodes, controller: ScriptedController, expected_logs: Declare
) -> None:
    expected_logs(r"controller_stream_failed.*not the leader", count=1)
    controller.stream(reports=2)
    controller.refuse_with = (grpc.StatusCode.UNAVAILABLE, "not the leader")
    controller.order(controller.streams[0], controller.refuse_with)
    controller.wait(lambda: len(controller.streams) >= 4, "several attempts")
    assert len({stream.peer for stream in controller.streams}) == len(controller.streams)
    assert nodes.metrics.snapshot()[f"fusecache_locality_stream_up{{controller={controller.address}}}"] == 0
    controller.refuse_with = None
    before = len(controller.streams)
    assert controller.stream(before, reports=2).reports[0].full


def test_controller_that_is_gone_and_back_is_found(
    nodes: SimulatedNodes, controller: ScriptedController, expected_logs: Declare
) -> None:
    expected_logs(r"controller_stream_failed", count=1)
    up = f"fusecache_locality_stream_up{{controller={controller.address}}}"
    controller.stream(reports=3)
    controller.wait(lambda: nodes.metrics.snapshot()[up] == 1, "the stream is up")
    controller.stop()
    controller.wait(lambda: nodes.metrics.snapshot()[up] == 0, "the loss is noticed")
    nodes.set_bytes("node-1", "a", 42)
    controller.start()
    assert controller.stream(1).local_bytes("a") == 42
    controller.wait(lambda: nodes.metrics.snapshot()[up] == 1, "the stream is up again")
    counts = nodes.metrics.snapshot()
    assert counts["fusecache_locality_reports_total{kind=full}"] == 2
    assert counts["fusecache_locality_reports_total{kind=delta}"] >= 2


def test_controller_that_falls_silent_is_noticed_and_left(
    controller: ScriptedController, expected_logs: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_logs(r"controller_stream_failed", count=1)
    monkeypatch.setattr("fusecache.rpc.channel.CONTROLLER_KEEPALIVE_S", 1)
    monkeypatch.setattr("fusecache.rpc.channel.CONTROLLER_KEEPALIVE_TIMEOUT_S", 1)
    with (
        FaultyProxy(controller.address) as proxy,
        SimulatedNodes(proxy.target, ["node-1"], interval_s=INTERVAL_S) as nodes,
    ):
        up = f"fusecache_locality_stream_up{{controller={proxy.target}}}"
        controller.stream(reports=3)
        proxy.black_hole()
        controller.wait(lambda: nodes.metrics.snapshot()[up] == 0, "the silence is noticed")
        assert proxy.swallowed_bytes > 0
        proxy.heal()
        assert controller.stream(1, reports=2).reports[0].full


def test_error_of_our_own_is_logged_and_reporting_begins_anew(
    nodes: SimulatedNodes,
    controller: ScriptedController,
    expected_logs: Declare,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected_logs("report_failed", count=1)
    expected_logs("controller_stream_failed.*an unexpected error", count=1)
    first = controller.stream(reports=2)

    def broken(state: ReportState, directive: Directive, now_s: float) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(ReportState, "receive", broken)
        controller.order(first, report_fully())
        controller.wait(lambda: first.ended, "the end of the stream")
    assert controller.stream(1, reports=2).local_bytes("a") == 10
    caplog.clear()  # a record that is kept keeps the traceback, its frames, and so the old connection


def test_thread_ends_in_time_though_the_controller_never_answers(expected_logs: Declare) -> None:
    metrics = Metrics()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"

        def make() -> Reporter:
            state = ReportState("node-1", session=1, version="test")
            return Reporter(
                address,
                state,
                lambda: Holdings((), {}, {}),
                interval_s=1.0,
                metrics=metrics,
                clock=SystemClock(),
                rng=random.Random(0),
            )

        thread = ReportingThread(make)
        thread.start()
        connection, _ = deaf.accept()  # it is connected, and waits for an HTTP/2 answer
        with connection:
            thread.report_now()
            thread.end("the test ends")
            thread.stop()
    assert not any(other.name == "locality-reports" for other in threading.enumerate())
    assert metrics.snapshot().get("fusecache_locality_reports_total{kind=full}", 0) == 0


def test_node_that_ends_says_so_and_one_that_dies_does_not(
    nodes: SimulatedNodes, controller: ScriptedController
) -> None:
    first = controller.stream(reports=2)
    nodes.end("node-1", "the node's daemon ends (SIGTERM)")
    controller.wait(lambda: first.ended, "the end of the stream")
    assert set(first.not_ready().values()) == {"the node's daemon ends (SIGTERM)"}
    assert not first.known()["a"].ready
    nodes.start("node-1")
    second = controller.stream(1, reports=2)
    assert second.reports[0].session != first.reports[0].session
    nodes.stop("node-1")
    controller.wait(lambda: second.ended, "the end of the stream")
    assert second.not_ready() == {}


def test_many_nodes_report_from_one_process(controller: ScriptedController) -> None:
    names = [f"node-{number}" for number in range(49)]
    with SimulatedNodes(controller.address, names, interval_s=1.0) as nodes:
        for number, name in enumerate(names):
            nodes.set_bytes(name, "a", number, total_bytes=100)

        def told() -> bool:
            by_name = {s.reports[0].node_name: s for s in list(controller.streams) if s.reports}
            return len(by_name) == 49 and all(by_name[n].local_bytes("a") == i for i, n in enumerate(names))

        controller.wait(told, "every node with its number")
        assert len(controller.streams) == 49
