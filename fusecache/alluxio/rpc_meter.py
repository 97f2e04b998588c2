"""Counts calls: how many, how they ended, how long they took, what was rejected.

Cells are looked up once per (method, code) and kept; a race between two threads that look up the same cell is
harmless, because `Metrics` gives both the same one.
"""

from __future__ import annotations

import grpc
import structlog

from fusecache.metrics import Counter, Histogram, Metrics

log = structlog.get_logger(__name__)


class RpcMeter:
    """The client's view of the table in `fusecache.metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._outcomes: dict[tuple[str, grpc.StatusCode], Counter] = {}
        self._durations: dict[str, Histogram] = {}
        self._rejected: dict[str, Counter] = {}

    def ended(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """One try of a call ended."""
        key = (method, code)
        counter = self._outcomes.get(key)
        if counter is None:
            counter = self._metrics.counter("fusecache_rpcs_total", method=method, code=code.name)
            self._outcomes[key] = counter
        counter.inc()
        histogram = self._durations.get(method)
        if histogram is None:
            histogram = self._metrics.histogram("fusecache_rpc_duration_seconds", method=method)
            self._durations[method] = histogram
        histogram.observe(seconds)

    def retried(self, method: str) -> None:
        """A further try is about to be made."""
        self._metrics.counter("fusecache_rpc_retries_total", method=method).inc()

    def rejected(self, what: str) -> None:
        """Something from the network can't be true and is not used. Logged once per kind: a hostile server could
        otherwise fill the log."""
        counter = self._rejected.get(what)
        if counter is None:
            counter = self._metrics.counter("fusecache_upstream_rejected_total", what=what)
            self._rejected[what] = counter
            log.warning("upstream data rejected", what=what, hint="counted in fusecache_upstream_rejected_total")
        counter.inc()

    def source_failed(self, source: str) -> None:
        """A source of a block failed and the next one is tried."""
        self._metrics.counter("fusecache_block_sources_failed_total", source=source).inc()

    def touched(self, blocks: int) -> None:
        """Blocks whose use was reported to their block worker."""
        self._metrics.counter("fusecache_touched_blocks_total").inc(blocks)
