"""Which block worker is asked first."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from fusecache.alluxio.model import Block, BlockWorkerAddress, BlockWorkerInfo
from fusecache.alluxio.node_names import own_hosts
from fusecache.alluxio.placement import Source, of_this_node, sources, ufs_order

GIB = 1 << 30


def worker(worker_id: int, *, host: str = "", free: int = 100 * GIB, capacity: int = 100 * GIB) -> BlockWorkerInfo:
    address = BlockWorkerAddress(host or f"node{worker_id}", "", 29999, 29999, "", "")
    return BlockWorkerInfo(worker_id, address, capacity, capacity - free, "LIVE")


def block(*locations: int, ufs: bool = True, length: int = GIB, in_ufs_tier: bool = False) -> Block:
    return Block(1 << 24, length, locations, b"/ufs/f" if ufs else None, 0, 1, in_ufs_tier)


def order(
    wanted: Block,
    workers: list[BlockWorkerInfo],
    *,
    node: Collection[int] = (),
    suspects: Collection[int] = (),
    reserved_bytes: int = 0,
    seed: int = 0,
) -> list[tuple[int, bool]]:
    found = sources(
        wanted, workers, node_ids=node, suspects=suspects, reserved_bytes=reserved_bytes, rng=random.Random(seed)
    )
    return [(source.worker.worker_id, source.ufs) for source in found]


def test_sources_holder_on_this_node_comes_first() -> None:
    workers = [worker(i) for i in range(5)]
    for seed in range(20):
        found = order(block(1, 2, 3), workers, node={2}, seed=seed)
        assert found[0] == (2, False)
        assert {i for i, ufs in found if not ufs} == {1, 2, 3}
        assert found[3:] == [(i, True) for i, _ in found[3:]]


def test_sources_holders_elsewhere_are_spread() -> None:
    workers = [worker(i) for i in range(4)]
    first = {order(block(0, 1, 2, 3), workers, seed=seed)[0][0] for seed in range(50)}
    assert first == {0, 1, 2, 3}


def test_sources_block_that_is_not_in_the_ufs_has_only_its_holders() -> None:
    assert order(block(1, ufs=False), [worker(0), worker(1)]) == [(1, False)]


def test_sources_block_of_the_ufs_tier_may_be_read_by_anybody() -> None:
    assert order(block(ufs=False, in_ufs_tier=True), [worker(0)]) == [(0, True)]


def test_sources_nobody_is_an_empty_answer() -> None:
    assert order(block(7, ufs=False), [worker(0)]) == []
    assert order(block(), []) == []


def test_sources_suspects_come_last_but_come() -> None:
    found = order(block(1, 2), [worker(1), worker(2), worker(3)], node={1}, suspects={1, 3})
    assert found == [(2, False), (1, False), (3, True)]


def test_sources_unknown_location_is_skipped() -> None:
    assert order(block(99, 0), [worker(0)])[0] == (0, False)


def test_sources_kind_is_named_as_metrics_do() -> None:
    assert Source(worker(0), ufs=False).kind == "block_worker"
    assert Source(worker(0), ufs=True).kind == "ufs"


def by_policy(
    workers: list[BlockWorkerInfo], length: int, *, node: Collection[int] = (), reserved: int = 0
) -> list[int]:
    found = ufs_order(workers, length, node_ids=node, reserved_bytes=reserved, rng=random.Random(3))
    return [w.worker_id for w in found]


def test_policy_this_node_is_taken_while_it_has_room() -> None:
    assert by_policy([worker(i) for i in range(9)], GIB, node={4})[0] == 4


def test_policy_this_node_without_room_loses_to_one_with_room() -> None:
    workers = [worker(0, free=0), worker(1), worker(2, free=0)]
    assert by_policy(workers, GIB, node={0}) == [1, 0, 2]


def test_policy_reserved_bytes_count_as_used() -> None:
    workers = [worker(0, free=2 * GIB), worker(1, free=10 * GIB)]
    assert by_policy(workers, GIB, node={0}, reserved=GIB)[0] == 0
    assert by_policy(workers, GIB, node={0}, reserved=GIB + 1)[0] == 1


def test_policy_when_all_are_full_this_node_evicts() -> None:
    assert by_policy([worker(0, free=0), worker(1, free=0)], GIB, node={1})[0] == 1


def test_policy_worker_too_small_for_the_block_is_last() -> None:
    small = worker(0, capacity=GIB // 2, free=GIB // 2)
    assert by_policy([small, worker(1, free=0)], GIB, node={0}) == [1, 0]


@pytest.mark.parametrize("field", ["host", "container_host", "node"])
def test_node_is_recognised_by_any_of_its_names(field: str) -> None:
    address = BlockWorkerAddress("pod-ip", "", 1, 1, "", "")._replace(**{field: "Node7"})
    mine = BlockWorkerInfo(5, address, 1, 0, "LIVE")
    assert of_this_node([mine, worker(6)], ["node7", "10.0.0.7"]) == {5}


def test_node_empty_names_match_nothing() -> None:
    assert of_this_node([worker(1, host="a")], [""]) == frozenset()


def test_own_hosts_loopback_is_ours_and_documentation_addresses_are_not() -> None:
    assert own_hosts(["127.0.0.1", "localhost", "192.0.2.1", "0.0.0.0", "2001:db8::1", ""]) == {
        "127.0.0.1",
        "localhost",
    }


def test_own_hosts_short_and_full_names_meet_but_two_domains_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7.rack1.example")
    candidates = ["node7", "NODE7.rack1.example.", "node7.rack2.example", "node8"]
    assert own_hosts(candidates) == {"node7", "NODE7.rack1.example."}
