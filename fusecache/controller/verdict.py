"""What to do with one waiting pod now: place it, release it unplaced, or let it wait. Pure.

    cannot be planned (no data sets named, unreadable requests)     release, with the reason
    other gates hold it too                                         wait; at max-wait release ours
    the controller has just started and not every node reported     wait, at most two report intervals
    a feasible node                                                 place
    no feasible node, `prefer`                                      release at once: preemption and the
                                                                    autoscaler see only pods without gates
    no feasible node, `require`                                     wait, the reason shown on the pod
    no node that reports knows the data set                         as above; `require` too is released at max-wait,
                                                                    for a name that nobody knows is a mistake

A pod waits never longer than its max-wait, and never longer than a quarter of its activeDeadlineSeconds. Time comes in
as seconds that the pod has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from fusecache.config.units import parse_duration
from fusecache.controller.inventory import Inventory
from fusecache.controller.model import DATASETS, GATE, MAX_WAIT, PLACEMENT, Pod
from fusecache.controller.planner import Choice

Placement = Literal["prefer", "require"]

MAX_DATASETS_PER_POD = 32
LONGEST_WAIT_S = 86400.0
DEADLINE_SHARE = 0.25
"""Of a pod's activeDeadlineSeconds that it may wait here."""


class Wish(NamedTuple):
    """What a pod's annotations ask for."""

    datasets: tuple[str, ...]
    placement: Placement
    max_wait_s: float
    problem: str
    """Why it can't be planned at all; empty when it can."""
    note: str
    """An annotation that was wrong and replaced by the default; empty when all were right."""


class Place(NamedTuple):
    """Direct it to this node and let it go."""

    choice: Choice


class Release(NamedTuple):
    """Let it go unplaced."""

    reason: str
    choice: Choice | None = None


class Wait(NamedTuple):
    """Look again later."""

    reason: str
    told: bool
    """Worth writing on the pod: it may take longer."""
    choice: Choice | None = None


Verdict = Place | Release | Wait


class Moment(NamedTuple):
    """Time, as far as it matters for one pod."""

    waited_s: float
    """Since the pod was created."""
    settling: bool
    """The controller has just begun to lead, and a node that is Ready has not reported to it yet."""


def wish_of(pod: Pod, default_placement: Placement, default_max_wait_s: float) -> Wish:
    """Read the annotations. Nothing a user writes there is an error of ours: it gets a default and a note."""
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in pod.annotations.get(DATASETS, "").split(",")))))
    problem = pod.problem
    if not names:
        problem = f"it names no data set: the annotation {DATASETS} is missing or empty"
    elif len(names) > MAX_DATASETS_PER_POD:
        problem = f"it names {len(names)} data sets; at most {MAX_DATASETS_PER_POD}"
    notes = []
    placement = default_placement
    match pod.annotations.get(PLACEMENT):
        case None:
            pass
        case "prefer":
            placement = "prefer"
        case "require":
            placement = "require"
        case wrong:
            notes.append(f"annotation {PLACEMENT} {wrong[:40]!r} is neither prefer nor require: {placement} taken")
    max_wait_s = default_max_wait_s
    if (text := pod.annotations.get(MAX_WAIT)) is not None:
        try:
            given_s = parse_duration(text)
            if not 0 <= given_s <= LONGEST_WAIT_S:
                raise ValueError("not between 0 and a day")
            max_wait_s = given_s
        except ValueError:
            notes.append(f"annotation {MAX_WAIT} {text[:40]!r} is no duration up to a day: {max_wait_s:g} s taken")
    if pod.active_deadline_s is not None:
        max_wait_s = min(max_wait_s, DEADLINE_SHARE * pod.active_deadline_s)
    return Wish(names, placement, max_wait_s, problem, "; ".join(notes))


def judge(pod: Pod, wish: Wish, moment: Moment, inventory: Inventory, plan: Callable[[], Choice]) -> Verdict:
    """The verdict on one pod with our gate. `plan` looks for a node; it is asked only when the answer matters."""
    late = moment.waited_s >= wish.max_wait_s
    foreign = [gate for gate in pod.gates if gate != GATE]
    if foreign:
        others = f"other gates hold it: {', '.join(foreign)}"
        return Release(f"{others} after max-wait ({wish.max_wait_s:g} s)") if late else Wait(others, told=False)
    if wish.problem:
        return Release(wish.problem)
    if moment.settling and not late:
        return Wait("the controller has just started and waits for reports of the nodes", told=False)
    choice = plan()
    if choice.best is not None:
        if wish.placement == "require" and pod.unpinnable:
            return Wait(f"it can't be pinned: {pod.unpinnable}; `{PLACEMENT}: prefer` would place it", True, choice)
        return Place(choice)
    unknown = [name for name in wish.datasets if not inventory.knows(name)]
    reason = choice.nobody
    if unknown and inventory.nodes:
        reason = f"none of {len(inventory.nodes)} nodes that report knows data set {unknown[0]!r}"
    if wish.placement == "prefer" or (unknown and inventory.nodes and late):
        return Release(reason, choice)
    return Wait(reason, True, choice)
