"""Which node a pod gets (S28): most bytes of all its data sets together, then the fullest, then by name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusecache.controller.feasibility import Ledger
from fusecache.controller.inventory import take
from fusecache.controller.model import Node
from fusecache.controller.planner import Choice, choose, look_at_all
from fusecache.controller.reports import Reports, Stream
from tests.t6_controller.objects import node, pod, report


class Cluster:
    """Nodes, what they report, and what is taken."""

    def __init__(self, held: dict[str, dict[str, int]], **nodes: Node) -> None:
        self.nodes = {name: nodes.get(name) or node(name) for name in held}
        self.reports = Reports(5.0)
        for name, datasets in held.items():
            self.reports.receive(Stream(), report(name, datasets), 0.0)
        self.ledger = Ledger(self.nodes, [])

    def choose(self, *datasets: str, gpus: int = 1) -> Choice:
        return choose(pod("p", gpus=gpus), datasets, self.nodes, take(self.reports, 0.0), self.ledger)


def test_most_bytes_win_and_the_next_is_told() -> None:
    choice = Cluster({"a": {"x": 1}, "b": {"x": 3}, "c": {"x": 2}}).choose("x")
    assert choice.best is not None
    assert choice.runner_up is not None
    assert (choice.best.node_name, choice.best.held_bytes) == ("b", 3)
    assert (choice.runner_up.node_name, choice.runner_up.held_bytes) == ("c", 2)


def test_several_data_sets_add_up_and_all_are_needed() -> None:
    cluster = Cluster({"a": {"x": 5, "y": 5}, "b": {"x": 9, "y": 0}, "only-x": {"x": 100}})
    choice = cluster.choose("x", "y")
    assert choice.best is not None
    assert choice.best.node_name == "a"
    assert [(one.node_name, one.refused_because) for one in choice.refused] == [
        ("only-x", "it does not mount data set 'y'")
    ]


def test_tie_goes_to_the_fullest_then_to_the_first_name() -> None:
    cluster = Cluster({"c": {"x": 1}, "b": {"x": 1}, "a": {"x": 1}})
    best = cluster.choose("x").best
    assert best is not None
    assert best.node_name == "a"
    cluster.ledger.promise("b", {"nvidia.com/gpu": 2})
    best = cluster.choose("x").best
    assert best is not None
    assert best.node_name == "b"
    cluster.ledger.promise("c", {"nvidia.com/gpu": 2, "cpu": 1000})
    best = cluster.choose("x").best
    assert best is not None
    assert best.node_name == "c"


def test_full_node_is_passed_over_with_the_reason() -> None:
    cluster = Cluster({"a": {"x": 9}, "b": {"x": 1}})
    cluster.ledger.promise("a", {"nvidia.com/gpu": 8})
    choice = cluster.choose("x")
    assert choice.best is not None
    assert choice.best.node_name == "b"
    assert [(one.node_name, one.refused_because) for one in choice.refused] == [
        ("a", "not enough nvidia.com/gpu: 1 wanted, 0 left")
    ]


def test_nobody_is_explained_by_count() -> None:
    cluster = Cluster(
        {"a": {"x": 9}, "b": {"x": 1}, "c": {"y": 1}, "d": {}}, b=node("b", ready=False), d=node("d", gpus=0)
    )
    choice = cluster.choose("x", gpus=9)
    assert choice.best is None
    assert choice.nobody == (
        "0 of 4 nodes can take it: 2 no report that names data set 'x', 1 not enough nvidia.com/gpu, 1 not Ready"
    )


def test_node_that_only_reports_and_does_not_exist_is_not_chosen() -> None:
    cluster = Cluster({"a": {"x": 1}, "ghost": {"x": 5}})
    del cluster.nodes["ghost"]
    best = cluster.choose("x").best
    assert best is not None
    assert best.node_name == "a"


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1),
    st.integers(0, 2),
)
def test_choice_is_the_first_of_looking_at_all(held_and_gpus: dict[str, tuple[int, int]], wanted: int) -> None:
    cluster = Cluster(
        {name: {"x": held} for name, (held, _) in held_and_gpus.items()},
        **{name: node(name, gpus=gpus) for name, (_, gpus) in held_and_gpus.items()},
    )
    wanted_pod = pod("p", gpus=wanted)
    choice = cluster.choose("x", gpus=wanted)
    every = look_at_all(wanted_pod, ("x",), cluster.nodes, take(cluster.reports, 0.0), cluster.ledger)
    feasible = [one for one in every if one.feasible]
    assert choice.best == (feasible[0] if feasible else None)
    assert choice.runner_up == (feasible[1] if len(feasible) > 1 else None)
    assert bool(choice.nobody) is (not feasible)
