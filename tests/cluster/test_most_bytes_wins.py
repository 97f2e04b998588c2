"""Twenty pods, fifty nodes that report and one that never does: each pod goes to the node that holds most of its data,
another one each time.
"""

from __future__ import annotations

import statistics
import time

import pytest

from tests.cluster import node, simulated_nodes
from tests.cluster.conftest import SIMULATED
from tests.cluster.installation import REPORT_INTERVAL_S, training_pod
from tests.cluster.stories import Stories
from tests.support.simulated_reporter import SimulatedNodes

pytestmark = pytest.mark.timeout(600)

PODS = 20
ON_THE_REAL_NODE = 5
REPORTERS = 49
"""Simulated nodes that report, beside the real one."""
TOO_LONG_S = 30
"""The bar is 2 s; the times are printed. A test asserts only that nothing waited for a time limit (60 s)."""


def test_twenty_pods_are_bound_to_the_node_with_the_most_bytes(
    stories: Stories, capsys: pytest.CaptureFixture[str]
) -> None:
    names = simulated_nodes.names(SIMULATED)[:REPORTERS]
    sizes = {f"set-{number}": stories.make_warm(f"set-{number}", node.NAME) for number in range(ON_THE_REAL_NODE)}
    expected: dict[str, str] = dict.fromkeys(sizes, node.NAME)
    with SimulatedNodes(stories.installation.controller_address, names, interval_s=REPORT_INTERVAL_S) as reporters:
        for dataset, size_bytes in sizes.items():
            for number, name in enumerate(names):
                reporters.set_bytes(name, dataset, size_bytes - 1 - number, total_bytes=size_bytes)
        for number in range(PODS - ON_THE_REAL_NODE):
            dataset = f"far-{number}"
            best = names[(7 * number + 3) % len(names)]
            for held, name in enumerate(names):
                reporters.set_bytes(name, dataset, 2000 if name == best else 1000 + held, total_bytes=4000)
            expected[dataset] = best
        assert len(expected) == PODS
        stories.wait(lambda: stories.counted(set(expected)) == everything(expected), "every report has arrived")

        # Real and simulated nodes take turns; one pod after the other, so that each time is that of one pod alone.
        order = sorted(expected, key=lambda dataset: dataset.partition("-")[2])
        bound: dict[str, str] = {}
        times_s = []
        for dataset in order:
            started_s = time.monotonic()
            stories.create(training_pod(f"takes-{dataset}", dataset, ["true"]))
            bound[dataset] = stories.wait_bound(f"takes-{dataset}")
            times_s.append(time.monotonic() - started_s)

    right = [dataset for dataset in order if bound[dataset] == expected[dataset]]
    figures = (
        f"{len(right)} of {PODS} pods bound to the node with the most bytes of {REPORTERS + 1}; created to bound: "
        f"p50 {statistics.median(times_s):.2f} s, max {max(times_s):.2f} s"
    )
    with capsys.disabled():
        print(f"\n{figures}")
    assert bound == expected
    assert list(bound.values()).count(node.NAME) == ON_THE_REAL_NODE
    assert max(times_s) < TOO_LONG_S
    for dataset in order:
        stories.delete(f"takes-{dataset}")


def everything(expected: dict[str, str]) -> set[tuple[str, str]]:
    """(data set, node) of every row there should be: all simulated nodes know all, the real one its own."""
    rows = {(dataset, name) for dataset in expected for name in simulated_nodes.names(SIMULATED)[:REPORTERS]}
    return rows | {(dataset, name) for dataset, name in expected.items() if name == node.NAME}
