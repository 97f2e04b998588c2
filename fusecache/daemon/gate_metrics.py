"""What gate and supervisor count, as rows of the table of metrics.

Neither of them imports a library, so they tell plain numbers (`kernel.gate.main` lists them), and the agent puts these
into the metrics that it gathers for one scrape.

Asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusecache.metrics import Metrics


def record(metrics: Metrics, gate: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> None:
    """Put the gate's status and the supervisor's table into `metrics`; rows of a gate that did not answer stay out."""
    for answered_by, key in (("gate", "answered"), ("worker", "dispatched")):
        for opcode, count in gate.get(key, {}).items():
            cell = metrics.counter("fusecache_gate_requests_total", op=opcode.lower(), answered_by=answered_by)
            cell.value = count
    for how, count in gate.get("opens", {}).items():
        metrics.counter("fusecache_gate_opens_total", how=how).value = count
    for reason, count in gate.get("refusals", {}).items():
        metrics.counter("fusecache_gate_passthrough_refused_total", reason=reason).value = count
    if "bytes_by_slots" in gate:
        read = metrics.counter("fusecache_gate_read_bytes_total", source="worker")
        read.value = gate["bytes_by_slots"]
        direct = metrics.counter("fusecache_gate_read_bytes_total", source="block_file")
        direct.value = gate.get("direct_reads", {}).get("bytes", 0)
    for row, key in (
        ("fusecache_gate_redelivered_total", "redelivered"),
        ("fusecache_gate_poisoned_total", "poisoned"),
        ("fusecache_gate_spin_seconds_total", "spin_seconds"),
    ):
        if key in gate:
            metrics.counter(row).value = gate[key]
    if "waiting" in gate:
        metrics.gauge("fusecache_gate_waiting_requests").set(gate["waiting"])
    for part in parts:
        metrics.counter("fusecache_part_restarts_total", part=str(part["name"])).value = part["restarts"]
