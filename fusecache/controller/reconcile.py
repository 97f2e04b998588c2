"""The loop: look at the waiting pods, decide, write. One round does all pods that wait now.

A round is decided as a whole before anything is written: pods by priority, then age; each placed pod takes its
resources from the books, so that the next one does not count on them. Then the writes go out, a bounded number at a
time, each pod on its own. Nothing is remembered that could not be rebuilt: a pod's state is its gate and its
annotation, and a controller that starts anew goes on from there.

Wakes when pods, nodes, reports or the lead change, and at least every TICK_S while pods wait. Touches only pods with
our gate, and of these only: our annotation, our gate, nominatedNodeName, and the node affinity of pods that require it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import NamedTuple

import structlog

from fusecache.clock import Clock
from fusecache.config.co_scheduling import PlacementConfig
from fusecache.controller import inventory as inventories
from fusecache.controller.decision import (
    Decision,
    annotation_patch,
    decide,
    event_of,
    holds_on,
    nomination_patch,
    read_annotation,
    ungate_patch,
)
from fusecache.controller.feasibility import Ledger
from fusecache.controller.inventory import Inventory
from fusecache.controller.kube import KubeApi
from fusecache.controller.mirror import Mirror
from fusecache.controller.model import DECISION, Node, Pod, pod_from_json
from fusecache.controller.planner import Candidate, choose, look_at_all
from fusecache.controller.reports import Reports
from fusecache.controller.verdict import Moment, Place, Release, Verdict, Wait, Wish, judge, wish_of
from fusecache.errors import CoSchedulingError, ObjectMissing, PatchConflict
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

TICK_S = 0.5
"""Seconds between rounds while pods wait and nothing changes."""

SHORTEST_PAUSE_S = 0.02
"""Seconds between two rounds; changes that come meanwhile are one round's."""

SETTLING_INTERVALS = 2
"""Report intervals that a controller which has begun to lead gives the nodes to report."""

LONGEST_PLANNING_S = 0.5
"""Seconds that one round may plan: reports, the Lease and questions wait meanwhile."""

WRITES_AT_A_TIME = 16
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 5.0
REFUSED_S = 60.0
"""A change that the API server calls invalid (a policy may) is tried again after this time; meanwhile `prefer` goes on
unplaced and `require` waits."""

TOLD_EVERY_S = 10.0
"""The reason shown on a pod that goes on waiting is rewritten at most this often."""


class _Attempt:
    """What is remembered of one pod while it waits."""

    __slots__ = ("failures", "first_seen_s", "not_before_s", "refused", "refused_until_s", "told", "told_s", "trouble")

    def __init__(self, first_seen_s: float) -> None:
        self.first_seen_s = first_seen_s
        self.failures = 0
        self.not_before_s = 0.0
        self.refused = ""
        """What the API server said against our last change, when the pod itself had not changed."""
        self.refused_until_s = 0.0
        self.trouble = ""
        """Why the last write did not get through; empty when it did."""
        self.told = ""
        self.told_s = 0.0


class Explanation(NamedTuple):
    """All about one pod, for people."""

    pod: Pod
    state: str
    reason: str
    wish: Wish
    node_name: str
    candidates: list[Candidate]
    report_age_s: dict[str, float]


class Reconciler:
    """The loop of a controller. Runs only while `leads()`."""

    def __init__(
        self,
        api: KubeApi,
        pods: Mirror[Pod],
        nodes: Mirror[Node],
        reports: Reports,
        settings: PlacementConfig,
        leads: Callable[[], bool],
        clock: Clock,
        metrics: Metrics,
        instance: str,
    ) -> None:
        self._api = api
        self._pods = pods
        self._nodes = nodes
        self._reports = reports
        self._settings = settings
        self._leads = leads
        self._clock = clock
        self._metrics = metrics
        self._instance = instance
        self._pods_waiting = metrics.gauge("fusecache_controller_pods_waiting")
        self._conflicts = metrics.counter("fusecache_controller_conflicts_total")
        self._changed = asyncio.Event()
        self._attempts: dict[str, _Attempt] = {}
        self._reached: set[str] = set()
        """uids of pods decided on since all of them were."""
        self._leading_since_s: float | None = None
        self._writes = asyncio.Semaphore(WRITES_AT_A_TIME)

    def wake(self) -> None:
        """Something changed that a round should see."""
        self._changed.set()

    def lead_changed(self, leading: bool) -> None:
        """The lead began or ended: what is remembered belongs to one time of leading."""
        self._leading_since_s = self._clock.now() if leading else None
        self._attempts.clear()
        self._reached.clear()
        self.wake()

    async def run(self) -> None:
        """Rounds until cancelled."""
        while True:
            waiting = list(self._pods.selected.values())
            self._pods_waiting.set(len(waiting))
            if waiting and self._leads():
                began_s = self._clock.now()
                work = self._plan(waiting)
                planned_s = self._clock.now() - began_s
                await asyncio.gather(*work)
                # Reports of thousands of nodes wake us all the time: half of it is left to receiving them.
                await asyncio.sleep(max(SHORTEST_PAUSE_S, planned_s))
            # Without a waiting pod only a change can make work; a change of the lead wakes too.
            try:
                async with asyncio.timeout(TICK_S if waiting else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    # ---- one round ----

    def _plan(self, waiting: list[Pod]) -> list[Coroutine[None, None, None]]:
        """Decide on all, or on as many as the time of a round allows; the writes that follow from it.

        Who was not reached comes first in the next rounds, before anybody is looked at again: old pods that wait for
        room must not keep new ones from being seen.
        """
        now_s = self._clock.now()
        inventory = inventories.take(self._reports, now_s)
        ledger = self._ledger()
        self._attempts = {pod.uid: self._attempts.get(pod.uid) or _Attempt(now_s) for pod in waiting}
        not_reached = [pod for pod in waiting if pod.uid not in self._reached]
        if not not_reached:
            self._reached.clear()
        work: list[Coroutine[None, None, None]] = []
        for pod in sorted(not_reached or waiting, key=lambda pod: (-pod.priority, pod.created, pod.key)):
            if self._clock.now() - now_s > LONGEST_PLANNING_S:
                self.wake()
                return work
            self._reached.add(pod.uid)
            attempt = self._attempts[pod.uid]
            wish = self._wish(pod)
            verdict = self._judge(pod, wish, inventory, ledger, now_s, attempt)
            # A pod that can't be written (a namespace that did not opt in) must not keep room from those that can.
            if isinstance(verdict, Place) and verdict.choice.best is not None and not attempt.trouble:
                ledger.promise(verdict.choice.best.node_name, pod.requests)
            if now_s >= attempt.not_before_s:
                work.append(self._act(pod, wish, verdict, attempt))
        self._reached.clear()
        return work

    def _ledger(self) -> Ledger:
        pods = self._pods.values.values()
        nodes = self._nodes.values
        return Ledger(nodes, ((node_name, pod) for pod in pods if (node_name := holds_on(pod)) in nodes))

    def _wish(self, pod: Pod) -> Wish:
        return wish_of(pod, self._settings.default_placement, self._settings.max_wait_s)

    def _judge(
        self, pod: Pod, wish: Wish, inventory: Inventory, ledger: Ledger, now_s: float, attempt: _Attempt
    ) -> Verdict:
        moment = self._moment(pod, inventory, now_s, attempt)
        verdict = judge(
            pod, wish, moment, inventory, lambda: choose(pod, wish.datasets, self._nodes.values, inventory, ledger)
        )
        if isinstance(verdict, Place) and now_s < attempt.refused_until_s:
            reason = f"the API server refuses the change: {attempt.refused}"
            return Release(reason, verdict.choice) if wish.placement == "prefer" else Wait(reason, True, verdict.choice)
        return verdict

    def _moment(self, pod: Pod, inventory: Inventory, now_s: float, attempt: _Attempt) -> Moment:
        settle_s = SETTLING_INTERVALS * self._settings.report_interval_s
        since_s = now_s - (self._leading_since_s if self._leading_since_s is not None else now_s)
        missing = (
            node.name not in inventory.nodes
            for node in self._nodes.values.values()
            if node.ready and not node.unschedulable
        )
        settling = since_s < settle_s and any(missing)
        # The age comes from wall clocks, the only ones that outlive a process. A controller that was away does not
        # release all that waited meanwhile at once: while it settles, only its own time counts.
        seen_s = now_s - attempt.first_seen_s
        waited_s = seen_s if settling else max(seen_s, _age_s(pod.created, datetime.now(UTC)))
        return Moment(waited_s, settling)

    # ---- writing ----

    async def _act(self, pod: Pod, wish: Wish, verdict: Verdict, attempt: _Attempt) -> None:
        async with self._writes:
            if not self._leads():
                return
            try:
                match verdict:
                    case Place(choice):
                        await self._place(pod, decide("placed", wish, "", choice))
                    case Release(reason, choice):
                        await self._release(pod, decide("released", wish, reason, choice))
                    case Wait(reason, told, choice):
                        if told:
                            await self._tell(pod, decide("waiting", wish, reason, choice), attempt)
            except ObjectMissing:
                log.info("pod_gone", pod=pod.key)
            except PatchConflict as failure:
                await self._read_again(pod, failure, attempt)
            except CoSchedulingError as failure:
                self._later(attempt)
                attempt.trouble = str(failure)
                log.warning("pod_not_written", pod=pod.key, error=failure)
            else:
                attempt.trouble = ""

    async def _place(self, pod: Pod, decision: Decision) -> None:
        if decision.placement == "prefer":
            raw = await self._api.patch_pod_status(pod.namespace, pod.name, nomination_patch(pod, decision.node_name))
            pod = pod_from_json(raw)
        await self._ungate(pod, decision, pin=decision.placement == "require")

    async def _release(self, pod: Pod, decision: Decision) -> None:
        if pod.nominated_node:
            # Left by an attempt that did not come to its end: it would hold a node for nothing.
            pod = pod_from_json(await self._api.patch_pod_status(pod.namespace, pod.name, nomination_patch(pod, None)))
        await self._ungate(pod, decision, pin=False)

    async def _ungate(self, pod: Pod, decision: Decision, *, pin: bool) -> None:
        raw = await self._api.patch_pod(pod.namespace, pod.name, ungate_patch(pod, decision, pin=pin))
        self._pods.put(raw)
        self._metrics.counter("fusecache_controller_decisions_total", outcome=decision.state).inc()
        waited_s = _age_s(pod.created, datetime.now(UTC))
        self._metrics.histogram("fusecache_controller_pod_wait_seconds", outcome=decision.state).observe(waited_s)
        log.info(
            "pod_" + decision.state,
            pod=pod.key,
            node=decision.node_name,
            placement=decision.placement,
            reason=decision.reason,
        )
        await self._event(pod, decision)

    async def _tell(self, pod: Pod, decision: Decision, attempt: _Attempt) -> None:
        """Show why the pod waits, when that is news."""
        now_s = self._clock.now()
        written = read_annotation(pod.annotations.get(DECISION))
        if written is not None and (written.state, written.reason) == ("waiting", decision.reason):
            return
        if attempt.told and now_s - attempt.told_s < TOLD_EVERY_S:
            return
        self._pods.put(await self._api.patch_pod(pod.namespace, pod.name, annotation_patch(pod, decision)))
        first = not attempt.told
        attempt.told, attempt.told_s = decision.reason, now_s
        if first:
            log.info("pod_waiting", pod=pod.key, reason=decision.reason)
            await self._event(pod, decision)

    async def _event(self, pod: Pod, decision: Decision) -> None:
        """Best effort: the annotation says the same."""
        name = f"{pod.name[:200]}.{secrets.token_hex(8)}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            await self._api.create_event(pod.namespace, event_of(pod, decision, name, now, self._instance))
        except CoSchedulingError as failure:
            log.warning("event_not_written", pod=pod.key, error=failure)

    async def _read_again(self, pod: Pod, failure: PatchConflict, attempt: _Attempt) -> None:
        """Whether the pod changed, or the change is one that the API server will never take, shows by reading it."""
        self._conflicts.inc()
        try:
            raw = await self._api.read_pod(pod.namespace, pod.name)
        except CoSchedulingError:
            self._later(attempt)
            return
        now = pod_from_json(raw)
        if now.uid == pod.uid and now.resource_version == pod.resource_version:
            attempt.refused = str(failure)
            attempt.refused_until_s = self._clock.now() + REFUSED_S
            log.warning("change_refused", pod=pod.key, error=failure)
        self._pods.put(raw)
        self._later(attempt)
        self.wake()

    def _later(self, attempt: _Attempt) -> None:
        attempt.failures += 1
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** (attempt.failures - 1)) if attempt.failures > 1 else 0.0
        attempt.not_before_s = self._clock.now() + pause_s

    # ---- for people ----

    def explain(self, namespace: str, name: str) -> Explanation | None:
        """Why a pod was, or would be, placed where; None when there is no such pod."""
        pod = self._pods.values.get(f"{namespace}/{name}")
        if pod is None:
            return None
        now_s = self._clock.now()
        inventory = inventories.take(self._reports, now_s)
        ledger = self._ledger()
        wish = self._wish(pod)
        written = read_annotation(pod.annotations.get(DECISION))
        node_name = written.node_name if written else ""
        reason = written.reason if written else ""
        if pod.gated:
            state = "waiting"
            attempt = self._attempts.get(pod.uid) or _Attempt(now_s)
            verdict = self._judge(pod, wish, inventory, ledger, now_s, attempt)
            match verdict:
                case Place(choice) if choice.best is not None:
                    decision = decide("placed", wish, "", choice)
                    node_name, reason = decision.node_name, f"about to be placed: {decision.reason}"
                case Release(why, _):
                    reason = f"about to be released unplaced: {why}"
                case Wait(why, _, _):
                    reason = why
            if attempt.trouble:
                reason += f"; the last write failed: {attempt.trouble}"
        elif written is None:
            state, reason = "foreign", "fusecache never held it"
        elif pod.node_name:
            state = "bound"
            if written.state == "placed" and written.node_name != pod.node_name:
                reason = f"the scheduler chose {pod.node_name} instead of {written.node_name}: {reason}"
        else:
            state = written.state
        candidates = written.candidates() if written is not None else []
        if pod.gated:
            candidates = look_at_all(pod, wish.datasets, self._nodes.values, inventory, ledger) if wish.datasets else []
        ages = {node: now_s - state.received_s for node, state in self._reports.all()}
        return Explanation(pod, state, reason, wish, node_name, candidates, ages)


def _age_s(created: str, now: datetime) -> float:
    """Seconds since a creationTimestamp, never negative."""
    try:
        return max(0.0, (now - datetime.fromisoformat(created)).total_seconds())
    except ValueError:
        return 0.0
