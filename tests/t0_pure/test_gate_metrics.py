"""Gate and supervisor's numbers in the table of metrics."""

from __future__ import annotations

from fusecache.daemon.gate_metrics import record
from fusecache.metrics import Metrics

GATE = {
    "answered": {"OPEN": 7},
    "dispatched": {"READ": 3, "OPEN": 2},
    "opens": {"passthrough_new": 4},
    "refusals": {"not exactly one name": 1},
    "redelivered": 5,
    "poisoned": 1,
    "bytes_by_slots": 4096,
    "direct_reads": {"reads": 2, "bytes": 8192},
    "spin_seconds": 0.5,
    "waiting": 2,
}


def test_gate_metrics_every_number_has_its_row() -> None:
    metrics = Metrics()
    record(metrics, GATE, [{"name": "worker 0", "restarts": 3}])
    found = {key: value for key, value in metrics.snapshot().items() if "gate" in key or "part" in key}
    assert found == {
        "fusecache_gate_requests_total{op=open,answered_by=gate}": 7,
        "fusecache_gate_requests_total{op=read,answered_by=worker}": 3,
        "fusecache_gate_requests_total{op=open,answered_by=worker}": 2,
        "fusecache_gate_opens_total{how=passthrough_new}": 4,
        "fusecache_gate_passthrough_refused_total{reason=not exactly one name}": 1,
        "fusecache_gate_redelivered_total": 5,
        "fusecache_gate_poisoned_total": 1,
        "fusecache_gate_read_bytes_total{source=worker}": 4096,
        "fusecache_gate_read_bytes_total{source=block_file}": 8192,
        "fusecache_gate_spin_seconds_total": 0.5,
        "fusecache_gate_waiting_requests": 2,
        "fusecache_part_restarts_total{part=worker 0}": 3,
    }
    assert "fusecache_gate_poisoned_total 1.0" in metrics.exposition()


def test_gate_metrics_of_a_gate_that_did_not_answer_are_left_out() -> None:
    metrics = Metrics()
    record(metrics, {"error": "Connection timed out"}, [])
    assert not [key for key in metrics.snapshot() if "gate" in key]
