"""Holds the Lease: tries at every renewal interval, says when leading begins and ends, gives it back at the end.

`leads()` is asked before every write of ours; it turns false by itself when renewals fail, without waiting for this
loop. Who may lead, and what is written, is decided in `election`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog

from fusecache.clock import Clock
from fusecache.controller.election import Election
from fusecache.controller.kube import KubeApi
from fusecache.errors import CoSchedulingError, ObjectMissing, PatchConflict
from fusecache.metrics import Metrics

log = structlog.get_logger(__name__)

GIVE_BACK_S = 3.0
"""Seconds the API server may take when we give the Lease back; after that it runs out by itself."""


class LeaseHolder:
    """One candidate for one Lease."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float,
        clock: Clock,
        metrics: Metrics,
        on_change: Callable[[bool], None],
    ) -> None:
        """`on_change` is called on the event loop with whether this instance leads."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._election = Election(namespace, name, identity, duration_s)
        self._clock = clock
        self._gauge = metrics.gauge("fusecache_controller_leader")
        self._on_change = on_change
        self._leading = False

    @property
    def epoch(self) -> int:
        """leaseTransitions while leading."""
        return self._election.transitions

    def leads(self) -> bool:
        """Whether this instance may act now."""
        return self._election.leads(self._clock.now())

    async def run(self) -> None:
        """Try to get and keep the Lease until cancelled."""
        while True:
            try:
                # A call that hangs must not use up the time in which a second one could still renew.
                async with asyncio.timeout(self._election.renew_every_s):
                    await self._try()
            except PatchConflict:
                log.info("lease_taken_by_another", lease=f"{self._namespace}/{self._name}")
            except TimeoutError:
                seconds = self._election.renew_every_s
                log.warning(
                    "lease_not_renewed",
                    lease=f"{self._namespace}/{self._name}",
                    error=f"no answer within {seconds:g} s",
                )
            except CoSchedulingError as failure:
                log.warning("lease_not_renewed", lease=f"{self._namespace}/{self._name}", error=failure)
            self._tell()
            # Half an interval away at most, so that the end of leading is told soon after it came.
            for _ in range(2):
                await asyncio.sleep(self._election.renew_every_s / 2)
                self._tell()

    async def give_back(self) -> None:
        """Let go of the Lease, so that another instance need not wait for it to run out."""
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                lease = await self._api.read_lease(self._namespace, self._name)
                given_back = self._election.given_back(lease)
                if given_back is not None:
                    await self._api.replace_lease(self._namespace, self._name, given_back)
                    log.info("lease_given_back", lease=f"{self._namespace}/{self._name}")
        except (TimeoutError, CoSchedulingError) as failure:
            log.warning("lease_not_given_back", lease=f"{self._namespace}/{self._name}", error=failure)
        self._tell()

    async def _try(self) -> None:
        asked_s = self._clock.now()
        lease: Mapping[str, Any] | None
        try:
            lease = await self._api.read_lease(self._namespace, self._name)
        except ObjectMissing:
            lease = None
        wanted = self._election.next_lease(lease, asked_s, rfc3339_micro())
        if wanted is None:
            return
        if lease is None:
            written = await self._api.create_lease(self._namespace, wanted)
        else:
            written = await self._api.replace_lease(self._namespace, self._name, wanted)
        self._election.written(written, asked_s)

    def _tell(self) -> None:
        leading = self.leads()
        if leading != self._leading:
            self._leading = leading
            self._gauge.set(1 if leading else 0)
            log.info("leading" if leading else "not_leading", identity=self._election.identity, epoch=self.epoch)
            self._on_change(leading)


def rfc3339_micro() -> str:
    """The wall clock as a Lease has it. The policy that adds our gate compares it with the API server's."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
