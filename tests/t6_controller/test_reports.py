"""Reports are hostile until checked, in order or refused, and old after three intervals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.controller import inventory
from fusecache.controller.reports import MAX_BYTES, MAX_DATASETS, Outcome, Reports, Stream
from fusecache.pb.locality import locality_pb2 as pb
from tests.t6_controller.objects import report


def held(reports: Reports, now_s: float, name: str = "n") -> dict[str, int]:
    for node_name, state in reports.counting(now_s):
        if node_name == name:
            return {dataset: holding.served_bytes for dataset, holding in state.holdings.items()}
    return {}


def test_full_then_deltas() -> None:
    reports, stream = Reports(5.0), Stream()
    assert reports.receive(stream, report("n", {"a": 1, "b": 2}), 0.0).outcome is Outcome.TAKEN
    assert reports.receive(stream, report("n", {"a": 5, "c": 3}, sequence=2, full=False), 1.0).outcome is Outcome.TAKEN
    assert held(reports, 1.0) == {"a": 5, "b": 2, "c": 3}
    removal = report("n", {}, sequence=3, full=False)
    removal.removed_datasets.append("b")
    assert reports.receive(stream, removal, 2.0).outcome is Outcome.TAKEN
    assert held(reports, 2.0) == {"a": 5, "c": 3}
    assert reports.receive(stream, report("n", {"z": 1}, sequence=4), 3.0).outcome is Outcome.TAKEN
    assert held(reports, 3.0) == {"z": 1}


def test_gap_is_refused_and_changes_nothing() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {"a": 1}), 0.0)
    for sequence in (1, 3, 100):
        late = reports.receive(stream, report("n", {"a": 9}, sequence=sequence, full=False), 1.0)
        assert late.outcome is Outcome.GAP
    assert reports.receive(Stream(), report("n", {"a": 9}, sequence=2), 1.0).outcome is Outcome.GAP
    assert held(reports, 1.0) == {"a": 1}


def test_report_counts_for_three_intervals_and_is_remembered_longer() -> None:
    reports = Reports(5.0)
    reports.receive(Stream(), report("n", {"a": 1}), 100.0)
    assert held(reports, 115.0) == {"a": 1}
    assert held(reports, 115.1) == {}
    (row,) = inventory.rows(reports, 115.1)
    assert (row.counts, round(row.age_s, 1)) == (False, 15.1)
    reports.forget_silent(701.0)
    assert list(reports.all()) == []


def test_another_session_needs_a_full_report() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {"a": 1}), 0.0)
    restarted = reports.receive(stream, report("n", {"b": 1}, sequence=2, full=False, session=8), 1.0)
    assert restarted.outcome is Outcome.REPORT_FULLY
    assert held(reports, 1.0) == {}  # nothing reported before still holds
    assert reports.receive(stream, report("n", {"b": 1}, sequence=3, session=8), 2.0).outcome is Outcome.TAKEN
    assert held(reports, 2.0) == {"b": 1}


def test_forgotten_node_is_asked_to_report_fully() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {"a": 1}), 0.0)
    reports.forget_silent(1000.0)
    assert reports.receive(stream, report("n", sequence=2, full=False), 1000.0).outcome is Outcome.REPORT_FULLY


def test_newer_stream_is_the_node() -> None:
    reports, old, new = Reports(5.0), Stream(), Stream()
    reports.receive(old, report("n", {"a": 1}), 0.0)
    assert reports.receive(new, report("n", {"a": 2}), 1.0).outcome is Outcome.TAKEN
    assert reports.receive(old, report("n", {"a": 3}, sequence=2, full=False), 2.0).outcome is Outcome.SUPERSEDED
    reports.close(old)
    assert reports.receive(new, report("n", {"a": 4}, sequence=2, full=False), 3.0).outcome is Outcome.TAKEN
    assert held(reports, 3.0) == {"a": 4}


def test_ended_stream_still_counts_until_it_is_old() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {"a": 1}), 0.0)
    reports.close(stream)
    assert held(reports, 15.0) == {"a": 1}


def test_bytes_are_never_more_than_there_are_and_tiers_add_up() -> None:
    message = report("n", {"a": 70}, total_bytes=100)
    message.datasets[0].tiers.append(pb.TierBytes(tier=pb.TIER_NODE_CACHE, bytes=60))
    reports = Reports(5.0)
    reports.receive(Stream(), message, 0.0)
    assert held(reports, 0.0) == {"a": 100}
    message.datasets[0].listed_whole = False
    reports.receive(Stream(), message, 0.0)
    assert held(reports, 0.0) == {"a": 130}


def test_tier_of_a_newer_version_is_left_out() -> None:
    message = report("n", {"a": 70})
    message.datasets[0].tiers.append(pb.TierBytes(tier=99, bytes=5))  # type: ignore[arg-type]
    reports = Reports(5.0)
    assert reports.receive(Stream(), message, 0.0).outcome is Outcome.TAKEN
    assert held(reports, 0.0) == {"a": 70}


def changed(**fields: Any) -> pb.NodeReport:
    message = report("n", {"a": 1})
    message.MergeFrom(pb.NodeReport(**fields))
    return message


HOSTILE = {
    "node_name empty": report(""),
    "node_name with slash": report("a/b"),
    "node_name upper case": report("N"),
    "node_name too long": report("a" * 254),
    "session 0": report("n", session=0),
    "sequence 0": report("n", sequence=0),
    "first not full": report("n", full=False),
    "full with removals": changed(removed_datasets=["b"]),
    "many mounts": changed(mounts=[pb.Mount(mountpoint=f"/m{number}") for number in range(300)]),
    "mount without a name": changed(mounts=[pb.Mount()]),
    "long mount point": changed(mounts=[pb.Mount(mountpoint="/" * 5000)]),
    "many data sets": changed(datasets=[pb.DatasetReport(name=f"d{n}") for n in range(MAX_DATASETS)]),
    "data set without a name": changed(datasets=[pb.DatasetReport()]),
    "data set with a long name": changed(datasets=[pb.DatasetReport(name="d" * 513)]),
    "data set with a line break": changed(datasets=[pb.DatasetReport(name="d\n")]),
    "data set with a comma": changed(datasets=[pb.DatasetReport(name="d,e")]),
    "data set with blanks around": changed(datasets=[pb.DatasetReport(name=" d")]),
    "data set twice": changed(datasets=[pb.DatasetReport(name="a")]),
    "total too large": changed(datasets=[pb.DatasetReport(name="d", total_bytes=MAX_BYTES + 1)]),
    "tier too large": changed(
        datasets=[pb.DatasetReport(name="d", tiers=[pb.TierBytes(tier=pb.TIER_NODE_CACHE, bytes=MAX_BYTES + 1)])]
    ),
    "tier unspecified": changed(datasets=[pb.DatasetReport(name="d", tiers=[pb.TierBytes(bytes=1)])]),
    "tier twice": changed(datasets=[pb.DatasetReport(name="d", tiers=[pb.TierBytes(tier=pb.TIER_NODE_CACHE)] * 2)]),
    "more free than there is": changed(capacities=[pb.TierCapacity(tier=1, capacity_bytes=1, free_bytes=2)]),
    "many capacities": changed(capacities=[pb.TierCapacity()] * 50),
    "rate not a number": changed(rates=pb.Rates(local_bytes_per_s=float("nan"))),
    "rate infinite": changed(rates=pb.Rates(ufs_bytes_per_s=float("inf"))),
    "rate negative": changed(rates=pb.Rates(peer_bytes_per_s=-1)),
    "many directives": changed(live_directives=[pb.LiveDirective()] * 1001),
    "long directive": changed(live_directives=[pb.LiveDirective(id="x" * 513)]),
    "long version": changed(version="v" * 600),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_report_that_can_not_be_true_is_refused_and_changes_nothing(what: str) -> None:
    reports = Reports(5.0)
    reports.receive(Stream(), report("n", {"kept": 1}), 0.0)
    receipt = reports.receive(Stream(), HOSTILE[what], 1.0)
    assert receipt.outcome is Outcome.INVALID
    assert receipt.reason
    assert receipt.reason.isprintable()
    assert held(reports, 1.0) == {"kept": 1}


def test_reasons_of_a_node_are_bounded_and_printable() -> None:
    message = report("n", {"a": 1}, ready=False)
    message.mounts.extend(pb.Mount(mountpoint=f"/m{number}\n" * 50, reason="x\x1b[31m" * 1000) for number in range(200))
    reports = Reports(5.0)
    assert reports.receive(Stream(), message, 0.0).outcome is Outcome.TAKEN
    why = inventory.take(reports, 0.0).why_not_ready("n", ["a"])
    assert "not ready (/mnt/x: starting; " in why
    assert len(why) < 2000
    assert why.isprintable()


def test_node_name_may_not_change_within_a_stream() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {"a": 1}), 0.0)
    assert reports.receive(stream, report("m", {"a": 1}, sequence=2), 1.0).outcome is Outcome.INVALID


def test_deltas_can_not_grow_a_node_without_end() -> None:
    reports, stream = Reports(5.0), Stream()
    reports.receive(stream, report("n", {f"a{number}": 1 for number in range(MAX_DATASETS)}), 0.0)
    grown = report("n", {"one-more": 1}, sequence=2, full=False)
    assert reports.receive(stream, grown, 1.0).outcome is Outcome.INVALID
    assert len(held(reports, 1.0)) == MAX_DATASETS


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_that_are_a_message_are_answered(data: bytes) -> None:
    message = pb.NodeReport()
    try:
        message.ParseFromString(data)
    except Exception:  # noqa: BLE001 - the protobuf library's own refusal; the server never sees these
        return
    assert isinstance(Reports(5.0).receive(Stream(), message, 0.0).outcome, Outcome)


NAMES = st.sampled_from(["a", "b", "", "x\n"])
MESSAGES = st.builds(
    pb.NodeReport,
    node_name=st.sampled_from(["n", "m", "N"]),
    session=st.integers(0, 2),
    sequence=st.integers(0, 4),
    full=st.booleans(),
    datasets=st.lists(st.builds(pb.DatasetReport, name=NAMES, total_bytes=st.integers(0, 1 << 64 - 1)), max_size=2),
    removed_datasets=st.lists(NAMES, max_size=1),
)


@given(st.lists(st.tuples(st.integers(0, 2), MESSAGES), max_size=12))
def test_any_sequence_of_reports_leaves_a_table_that_can_be_asked(calls: list[tuple[int, pb.NodeReport]]) -> None:
    reports, streams = Reports(5.0), [Stream(), Stream(), Stream()]
    for now_s, (index, message) in enumerate(calls):
        reports.receive(streams[index], message, float(now_s))
    for row in inventory.rows(reports, 20.0):
        assert row.dataset in ("a", "b")
        assert row.counts is (row.age_s <= 15.0)
    for stream in streams:
        reports.close(stream)
