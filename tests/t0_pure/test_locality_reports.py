"""What a node is, from its mounts' answers; which report says it; what a directive does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.config.co_scheduling import ControllerLink
from fusecache.daemon import dataset_bytes
from fusecache.daemon.node_reports import node_name_of
from fusecache.errors import ProtocolError, UsageError
from fusecache.locality import reporter
from fusecache.locality.holdings import (
    DatasetHolding,
    Holdings,
    MountState,
    TierRoom,
    answer_of,
    merge,
    not_ready,
    silent,
)
from fusecache.locality.report_state import MAX_TEXT, ReportState, Verdict
from fusecache.pb.locality import locality_pb2 as pb
from fusecache.rpc import channel

# ---- mounts' answers ----


def dataset(name: str, local: int = 0, *, whole: bool = True, total: int = 100, listed: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "whole": whole,
        "total_bytes": total,
        "listed_whole": listed,
        "tiers": {"local_block_worker": local},
    }


def reply(
    *datasets: dict[str, Any], ready: bool = True, age_s: float | None = 1.0, workers: Any = ()
) -> dict[str, Any]:
    return {
        "ready": ready,
        "reason": "" if ready else "not yet",
        "measured_age_s": age_s,
        "datasets": list(datasets),
        "cluster_id": "cluster",
        "block_workers": list(workers),
    }


def merged(*replies: dict[str, Any]) -> Holdings:
    return merge(answer_of(f"/mnt/{number}", told, 60.0) for number, told in enumerate(replies))


def test_merge_data_set_of_several_mounts_counts_once_and_the_one_that_serves_it_speaks() -> None:
    a = dataset("a", 10)
    assert merged(reply(a), reply(a)).datasets["a"] == DatasetHolding("a", True, 100, True, {"local_block_worker": 10})
    part = dataset("a", 3, whole=False, total=30, listed=False)
    for told in ((reply(a), reply(part)), (reply(part), reply(a))):
        assert merged(*told).datasets["a"].tiers == {"local_block_worker": 10}
    # A mount that is not ready does not speak for it while another one serves it; alone it does, as not ready.
    assert merged(reply(dataset("a", 99), ready=False), reply(a)).datasets["a"].ready
    alone = merged(reply(a, ready=False)).datasets["a"]
    assert (alone.ready, alone.total_bytes) == (False, 100)
    assert merged(reply(a, ready=False)).mounts == (MountState("/mnt/0", False, "not yet"),)
    assert not merged(reply(part)).datasets["a"].ready


def test_merge_block_workers_of_one_cluster_count_once() -> None:
    worker = {"id": 5, "capacity_bytes": 100, "used_bytes": 30}
    other = {"id": 6, "capacity_bytes": 10, "used_bytes": 20}
    assert merged(reply(workers=[worker]), reply(workers=[worker, other])).rooms == {
        "local_block_worker": TierRoom(110, 70)
    }
    assert merged(reply()).rooms == {}


def test_merge_mounts_are_all_told_with_their_reasons() -> None:
    holdings = merge([answer_of("/mnt/a", reply(), 60.0), silent("/mnt/b", "it is starting")])
    assert holdings.mounts == (MountState("/mnt/a", True, ""), MountState("/mnt/b", False, "it is starting"))
    ended = not_ready(holdings, "the end")
    assert [mount.reason for mount in ended.mounts] == ["the end", "it is starting"]
    assert not any(mount.ready for mount in ended.mounts)


@pytest.mark.parametrize("age_s", [None, 60.1])
def test_answer_measured_too_long_ago_counts_no_bytes(age_s: float | None) -> None:
    answer = answer_of("/mnt/a", reply(dataset("a", 10), age_s=age_s), 60.0)
    assert answer.state.ready
    assert answer.datasets[0].tiers == {}
    assert answer.datasets[0].total_bytes == 100


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"ready": False},
        {**reply(), "datasets": 5},
        {**reply(), "datasets": [{"name": "a"}]},
        reply(dataset("a", -1)),
        reply(dataset("a", 1 << 63)),
        {**reply(), "measured_age_s": "soon"},
        reply(workers=[{"id": "x", "capacity_bytes": 1, "used_bytes": 1}]),
    ],
)
def test_answer_that_is_none_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="/mnt/a answered 'locality' with something else"):
        answer_of("/mnt/a", told, 60.0)


# ---- reports ----


def holdings(**held: int) -> Holdings:
    return Holdings(
        (MountState("/mnt/a", True, ""),),
        {name: DatasetHolding(name, True, 100, True, {"local_block_worker": n}) for name, n in held.items()},
        {"local_block_worker": TierRoom(1000, 10), "tape": TierRoom(1, 1)},
    )


def state() -> ReportState:
    return ReportState("node-1", session=7, version="1.2")


def told_names(report: pb.NodeReport) -> list[str]:
    return sorted(found.name for found in report.datasets)


def ask(epoch: int = 0, *, within_ms: int = 0) -> pb.Directive:
    return pb.Directive(lease_transitions=epoch, expires_after_ms=within_ms, report_fully=pb.ReportFully())


def test_report_first_is_full_then_what_changed() -> None:
    machine = state()
    first = machine.next_report(holdings(a=1, b=2), 0.0)
    assert (first.node_name, first.session, first.sequence, first.full, first.version) == ("node-1", 7, 1, True, "1.2")
    assert told_names(first) == ["a", "b"]
    assert [(room.tier, room.capacity_bytes, room.free_bytes) for room in first.capacities] == [
        (pb.TIER_LOCAL_BLOCK_WORKER, 1000, 10)
    ]
    second = machine.next_report(holdings(a=1, b=3, c=0), 5.0)
    assert (second.sequence, second.full, told_names(second)) == (2, False, ["b", "c"])
    assert len(second.mounts) == len(second.capacities) == 1
    third = machine.next_report(holdings(a=1, c=0), 10.0)
    assert (third.sequence, told_names(third), list(third.removed_datasets)) == (3, [], ["b"])
    machine.begin_stream()
    again = machine.next_report(holdings(a=1), 15.0)
    assert (again.sequence, again.full, again.session, list(again.removed_datasets)) == (1, True, 7, [])


def test_directive_report_fully_makes_the_next_report_full_once() -> None:
    machine = state()
    machine.next_report(holdings(a=1), 0.0)
    assert machine.receive(ask(), 1.0) is Verdict.TAKEN
    full = machine.next_report(holdings(a=1), 1.0)
    assert (full.full, full.sequence, told_names(full), list(full.removed_datasets)) == (True, 2, ["a"], [])
    assert not machine.next_report(holdings(a=1), 2.0).full


@pytest.mark.parametrize(("made_at_s", "full"), [(10.9, True), (11.0, False)])
def test_directive_expires_by_our_own_clock(made_at_s: float, full: bool) -> None:
    machine = state()
    machine.next_report(holdings(), 0.0)
    assert machine.receive(ask(within_ms=1000), 10.0) is Verdict.TAKEN
    assert machine.next_report(holdings(), made_at_s).full is full


def test_directive_of_a_lower_epoch_is_refused_also_on_a_later_stream() -> None:
    machine = state()
    machine.next_report(holdings(), 0.0)
    assert machine.receive(ask(5), 0.0) is Verdict.TAKEN
    assert machine.receive(ask(5), 0.0) is Verdict.TAKEN
    assert machine.receive(ask(4), 0.0) is Verdict.REFUSED
    machine.begin_stream()
    machine.next_report(holdings(), 0.0)
    assert machine.receive(ask(4), 0.0) is Verdict.REFUSED
    assert not machine.next_report(holdings(), 0.0).full
    # An action of a later version: not followed, and its epoch counts all the same.
    assert machine.receive(pb.Directive(lease_transitions=6), 0.0) is Verdict.UNKNOWN
    assert machine.receive(ask(5), 0.0) is Verdict.REFUSED


def test_report_carries_any_path_and_reason() -> None:
    odd = Holdings((MountState("/mnt/\udcff", False, "x" * 10 * MAX_TEXT),), {}, {})
    (mount,) = state().next_report(odd, 0.0).mounts
    assert mount.mountpoint == "/mnt/?"
    assert len(mount.reason) == MAX_TEXT


steps = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)),
        st.sampled_from(["stream", "ask"]),
    ),
    max_size=30,
)


@given(steps)
def test_reports_add_up_to_what_the_node_holds(script: list[Any]) -> None:
    """A listener that applies every report of a stream knows exactly the last holdings."""
    machine = state()
    machine.begin_stream()
    known: dict[str, pb.DatasetReport] | None = None
    sequence = 0
    for step in script:
        if step == "stream":
            machine.begin_stream()
            known, sequence = None, 0
        elif step == "ask":
            machine.receive(ask(), 0.0)
        else:
            report = machine.next_report(holdings(**step), 0.0)
            sequence += 1
            assert report.sequence == sequence
            assert report.full or known is not None
            assert not (report.full and report.removed_datasets)
            known = {} if report.full or known is None else known
            for name in report.removed_datasets:
                del known[name]
            known.update({found.name: found for found in report.datasets})
            assert {name: sum(t.bytes for t in found.tiers) for name, found in known.items()} == step


# ---- numbers of the promise ----


def test_promise_has_the_numbers_of_the_code() -> None:
    """S26."""
    text = (Path(__file__).parents[2] / "SEMANTICS.md").read_text()
    assert f"`report_interval_s` ({ControllerLink(address='c:1').report_interval_s:.0f} s)" in text
    assert f"at most {dataset_bytes.SHARE} times" in " ".join(text.split())
    assert f"noticed after {channel.CONTROLLER_KEEPALIVE_S + channel.CONTROLLER_KEEPALIVE_TIMEOUT_S} s" in text
    assert f"at least every {reporter.LONGEST_PAUSE_S + reporter.CONNECT_S:.0f} s" in text


# ---- the node's name ----


def test_node_name_is_the_configured_one_else_the_hosts() -> None:
    named = ControllerLink(address="c:1", node_name="node-7")
    assert node_name_of(named, "Whatever_") == "node-7"
    assert node_name_of(ControllerLink(address="c:1"), "GPU-17.Example.COM") == "gpu-17.example.com"


@pytest.mark.parametrize("host", ["my_host", "", "-a", "a" * 254, "h\u00f6st"])
def test_node_name_impossible_host_name_is_an_error_that_says_what_to_give(host: str) -> None:
    with pytest.raises(
        UsageError, match=r"controller: the host's name .* give node_name \(or FUSECACHE_CONTROLLER_NODE"
    ):
        node_name_of(ControllerLink(address="c:1"), host)
