"""Who leads: a state machine over one Lease. Pure.

A candidate reads the Lease, and `Election.next_lease` says what to write, if anything: create it, renew it, or take it
over when its holder gave it back or has not renewed it for as long as the Lease says. That is measured by the
candidate's own monotonic clock from the moment it saw the last change, so that clocks of two machines need not agree.

A holder leads only while its last successful renewal is younger than two thirds of the lease's duration: it stops
before anybody else may begin. A former leader may still finish one call; safety comes from patches that test what they
change, not from the Lease.

Giving back also sets renewTime to 1970. The policy that puts our gate onto new pods does so only while renewTime is
fresh: with nobody left to remove gates, none are added.

The client's own leader election (kubernetes 37.0.2, leaderelection/) is not used: it can't give a Lease back, does not
count transitions, and compares wall clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOLD_SHARE = 2 / 3
"""Of the lease's duration that a holder trusts its last renewal."""

RENEWALS = 5
"""Renewals attempted within one lease duration."""

LONG_AGO = "1970-01-01T00:00:00.000000Z"


class Election:
    """What one candidate knows."""

    def __init__(self, namespace: str, name: str, identity: str, duration_s: float) -> None:
        self.identity = identity
        self._namespace = namespace
        self._name = name
        self._duration_s = duration_s
        self._seen: tuple[str, str] | None = None
        """(holder, renewTime) of the Lease when it last changed."""
        self._seen_s = 0.0
        self._renewed_s: float | None = None
        self.transitions = 0
        """Epoch of this leader: how often the Lease changed hands."""

    @property
    def renew_every_s(self) -> float:
        """Seconds between attempts."""
        return self._duration_s / RENEWALS

    def leads(self, now_s: float) -> bool:
        """Whether this candidate may act as the leader."""
        return self._renewed_s is not None and now_s - self._renewed_s < self._duration_s * HOLD_SHARE

    def next_lease(self, lease: Mapping[str, Any] | None, now_s: float, now_rfc3339: str) -> dict[str, Any] | None:
        """The Lease to write now, given the one that is there; None = somebody else holds it."""
        if lease is None:
            return self._made({"metadata": {"name": self._name, "namespace": self._namespace}}, {}, 0, now_rfc3339)
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        transitions = int(spec.get("leaseTransitions") or 0)
        if holder == self.identity:
            return self._made(lease, spec, transitions, now_rfc3339)
        self._renewed_s = None
        seen = (holder, str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_s = seen, now_s
        held_for_s = float(spec.get("leaseDurationSeconds") or self._duration_s)
        if holder and now_s - self._seen_s < held_for_s:
            return None
        return self._made(lease, {**spec, "acquireTime": now_rfc3339}, transitions + 1, now_rfc3339)

    def written(self, lease: Mapping[str, Any], asked_s: float) -> None:
        """The Lease was written; `asked_s` is when the call began, the only time at which it surely held."""
        self._renewed_s = asked_s
        self.transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0)

    def given_back(self, lease: Mapping[str, Any]) -> dict[str, Any] | None:
        """The Lease to write when stopping; None when it is not ours."""
        self._renewed_s = None
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") != self.identity:
            return None
        return {**lease, "spec": {**spec, "holderIdentity": "", "renewTime": LONG_AGO}}

    def _made(
        self, lease: Mapping[str, Any], spec: Mapping[str, Any], transitions: int, now_rfc3339: str
    ) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            **lease,
            "spec": {
                "acquireTime": now_rfc3339,
                **spec,
                "holderIdentity": self.identity,
                "leaseDurationSeconds": max(1, round(self._duration_s)),
                "renewTime": now_rfc3339,
                "leaseTransitions": transitions,
            },
        }
