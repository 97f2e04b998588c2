"""Place, release or wait: every rule of the waiting room."""

from __future__ import annotations

import pytest

from fusecache.controller.inventory import Inventory, take
from fusecache.controller.model import DATASETS, GATE, MAX_WAIT, PLACEMENT, Pod
from fusecache.controller.planner import Candidate, Choice
from fusecache.controller.reports import Reports, Stream
from fusecache.controller.verdict import Moment, Place, Release, Verdict, Wait, judge, wish_of
from tests.t6_controller.objects import pod, report

FOUND = Choice(Candidate("n", 1, ""), None, (), "")
NOBODY = Choice(None, None, (), "0 of 1 nodes can take it: 1 cordoned")


def inventory(*datasets: str) -> Inventory:
    reports = Reports(5.0)
    reports.receive(Stream(), report("n", dict.fromkeys(datasets, 1)), 0.0)
    return take(reports, 0.0)


def verdict(
    wanted: Pod, choice: Choice, *, waited_s: float = 1.0, settling: bool = False, knows: Inventory | None = None
) -> Verdict:
    wish = wish_of(wanted, "prefer", 60.0)
    return judge(wanted, wish, Moment(waited_s, settling), knows or inventory("imagenet"), lambda: choice)


def require(**more: object) -> Pod:
    return pod("p", annotations={PLACEMENT: "require"}, **more)  # type: ignore[arg-type]


def test_feasible_node_places_both_kinds() -> None:
    assert verdict(pod("p"), FOUND) == Place(FOUND)
    assert verdict(require(), FOUND) == Place(FOUND)


def test_without_a_feasible_node_prefer_goes_at_once_and_require_waits_for_ever() -> None:
    assert verdict(pod("p"), NOBODY, waited_s=0.0) == Release(NOBODY.nobody, NOBODY)
    assert verdict(require(), NOBODY, waited_s=1e6) == Wait(NOBODY.nobody, True, NOBODY)


def test_other_gates_are_waited_for_until_max_wait_and_never_touched() -> None:
    for made in (pod("p", gates=("kueue.x-k8s.io/admission", GATE)), require(gates=("kueue.x-k8s.io/admission", GATE))):
        assert verdict(made, FOUND, waited_s=59.9) == Wait("other gates hold it: kueue.x-k8s.io/admission", told=False)
        assert verdict(made, FOUND, waited_s=60.0) == Release(
            "other gates hold it: kueue.x-k8s.io/admission after max-wait (60 s)"
        )


def test_settling_controller_waits_for_reports_but_not_beyond_max_wait() -> None:
    assert isinstance(verdict(pod("p"), FOUND, settling=True), Wait)
    assert verdict(pod("p"), FOUND, settling=True, waited_s=60.0) == Place(FOUND)
    assert isinstance(verdict(pod("p"), NOBODY, settling=True, waited_s=60.0), Release)


@pytest.mark.parametrize("datasets", [None, "", " , ", ",".join(f"d{number}" for number in range(33))])
def test_pod_without_readable_data_sets_is_released(datasets: str | None) -> None:
    for made in (pod("p", datasets=datasets), require(datasets=datasets)):
        answer = verdict(made, FOUND)
        assert isinstance(answer, Release)
        assert DATASETS in answer.reason or "33 data sets" in answer.reason


def test_data_set_that_nobody_knows_releases_prefer_at_once_and_require_at_max_wait() -> None:
    reason = "none of 1 nodes that report knows data set 'imagenet'"
    knows = inventory("other")
    assert verdict(pod("p"), NOBODY, knows=knows) == Release(reason, NOBODY)
    assert verdict(require(), NOBODY, knows=knows) == Wait(reason, True, NOBODY)
    assert verdict(require(), NOBODY, knows=knows, waited_s=60.0) == Release(reason, NOBODY)


def test_require_is_kept_while_no_node_reports_at_all() -> None:
    # An outage of the controller's network must not let pods go where they must not run.
    assert isinstance(verdict(require(), NOBODY, knows=Inventory({}), waited_s=1e6), Wait)


def test_pod_that_must_not_be_pinned_is_nominated_only() -> None:
    ports = {"containers": [{"ports": [{"hostPort": 1}]}]}
    assert verdict(pod("p", **ports), FOUND) == Place(FOUND)
    answer = verdict(require(**ports), FOUND)
    assert isinstance(answer, Wait)
    assert "it can't be pinned: it has host ports" in answer.reason


def test_unreadable_requests_release() -> None:
    made = pod("p", containers=[{"resources": {"requests": {"cpu": "lots"}}}])
    assert verdict(made, FOUND) == Release("cpu: 'lots' is not a resource quantity")


@pytest.mark.parametrize(
    ("text", "max_wait_s", "noted"),
    [("5m", 300, False), ("90", 90, False), ("0", 0, False), ("x", 60, True), ("-1s", 60, True), ("2d", 60, True)],
)
def test_max_wait_of_a_pod(text: str, max_wait_s: float, noted: bool) -> None:
    wish = wish_of(pod("p", annotations={MAX_WAIT: text}), "prefer", 60.0)
    assert wish.max_wait_s == max_wait_s
    assert bool(wish.note) is noted


def test_max_wait_is_at_most_a_quarter_of_the_deadline() -> None:
    assert wish_of(pod("p", activeDeadlineSeconds=100), "prefer", 60.0).max_wait_s == 25.0
    assert wish_of(pod("p", activeDeadlineSeconds=100000), "prefer", 60.0).max_wait_s == 60.0


def test_wrong_placement_takes_the_default_and_says_so() -> None:
    wish = wish_of(pod("p", annotations={PLACEMENT: "must"}), "require", 60.0)
    assert wish.placement == "require"
    assert "neither prefer nor require" in wish.note


def test_names_are_split_stripped_and_taken_once() -> None:
    assert wish_of(pod("p", datasets=" a, b ,a,,train:/x"), "prefer", 60.0).datasets == ("a", "b", "train:/x")
