"""Cells, the table, Prometheus text."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from fusecache.metrics import BUCKETS_S, METRICS, Metrics, merge


def test_counter_same_labels_is_the_same_cell() -> None:
    metrics = Metrics()
    cell = metrics.counter("fusecache_requests_total", op="read")
    assert metrics.counter("fusecache_requests_total", op="read") is cell
    assert metrics.counter("fusecache_requests_total", op="open") is not cell
    cell.inc()
    cell.inc(4)
    assert metrics.snapshot()["fusecache_requests_total{op=read}"] == 5


def test_cells_several_threads_lose_no_increment() -> None:
    metrics = Metrics()
    cell = metrics.counter("fusecache_touched_blocks_total")
    histogram = metrics.histogram("fusecache_request_duration_seconds", op="read")

    def count() -> None:
        for _ in range(50_000):
            cell.inc()
            histogram.observe(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert cell.value == 200_000
    assert histogram.count == 200_000


def test_gauge_set_replaces() -> None:
    metrics = Metrics()
    metrics.gauge("fusecache_open_files").set(3)
    metrics.gauge("fusecache_open_files").set(2)
    assert metrics.snapshot()["fusecache_open_files"] == 2


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("counter", "fusecache_nonsense_total", {}),
        ("gauge", "fusecache_requests_total", {"op": "read"}),
        ("counter", "fusecache_requests_total", {}),
        ("counter", "fusecache_requests_total", {"op": "read", "errno": "EIO"}),
        ("histogram", "fusecache_rpc_duration_seconds", {"op": "read"}),
    ],
)
def test_cell_that_is_not_in_the_table_is_refused(kind: str, name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=name):
        getattr(Metrics(), kind)(name, **labels)


@pytest.mark.parametrize(("seconds", "bound"), [(0.00005, 0.00005), (0.00006, 0.0001), (0.3, 0.5), (300.0, 300.0)])
def test_histogram_value_counts_at_and_above_its_bound(seconds: float, bound: float) -> None:
    metrics = Metrics()
    metrics.histogram("fusecache_rpc_duration_seconds", method="GetStatus").observe(seconds)
    text = metrics.exposition()
    counted = {
        le: f'fusecache_rpc_duration_seconds_bucket{{le="{le}",method="GetStatus"}} 1.0' in text
        for le in map(str, BUCKETS_S)
    }
    assert [float(le) for le, seen in counted.items() if seen] == [limit for limit in BUCKETS_S if limit >= bound]


def test_histogram_value_above_every_bound_counts_as_infinite() -> None:
    metrics = Metrics()
    metrics.histogram("fusecache_rpc_duration_seconds", method="X").observe(1e6)
    text = metrics.exposition()
    assert 'fusecache_rpc_duration_seconds_bucket{le="300.0",method="X"} 0.0' in text
    assert 'fusecache_rpc_duration_seconds_bucket{le="+Inf",method="X"} 1.0' in text
    assert 'fusecache_rpc_duration_seconds_count{method="X"} 1.0' in text


def test_exposition_has_every_row_with_type_and_meaning() -> None:
    text = Metrics().exposition()
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind}\n" in text
        assert f"# HELP {spec.name} {spec.meaning}\n" in text
    assert "process_cpu_seconds_total" in text
    assert "process_open_fds" in text


def test_exposition_label_value_is_escaped() -> None:
    metrics = Metrics()
    metrics.counter("fusecache_upstream_rejected_total", what='a"b\\c\nd').inc()
    assert 'what="a\\"b\\\\c\\nd"' in metrics.exposition()


def test_table_names_follow_prometheus_conventions() -> None:
    for spec in METRICS:
        assert spec.name.startswith("fusecache_")
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert spec.meaning.endswith(".")


def test_merge_tells_mounts_apart_and_keeps_types() -> None:
    texts = {}
    for number, mount in enumerate(("/mnt/a", '/mnt/"b"'), 1):
        metrics = Metrics()
        metrics.counter("fusecache_requests_total", op="read").inc(number)
        metrics.histogram("fusecache_request_duration_seconds", op="read").observe(0.001)
        texts[mount] = metrics.exposition()
    merged = merge(texts, "mount")
    assert 'fusecache_requests_total{mount="/mnt/a",op="read"} 1.0' in merged
    assert 'fusecache_requests_total{mount="/mnt/\\"b\\"",op="read"} 2.0' in merged
    assert merged.count("# TYPE fusecache_requests_total counter\n") == 1
    assert merged.count("# TYPE fusecache_request_duration_seconds histogram\n") == 1
    assert merge({"x": merged}, "node").count('node="x"') == merged.count('mount="')


def counted(number: int) -> Metrics:
    """A process that counted something of each kind."""
    metrics = Metrics()
    metrics.counter("fusecache_requests_total", op="read").inc(number)
    metrics.gauge("fusecache_open_files").set(number)
    metrics.gauge("fusecache_metadata_entries").set(number)
    for _ in range(number):
        metrics.histogram("fusecache_request_duration_seconds", op="read").observe(0.5)
    return metrics


def test_dumps_of_several_processes_add_up() -> None:
    metrics = counted(1)
    for number in (2, 3):
        metrics.add(json.loads(json.dumps(counted(number).dump())))
    values = metrics.snapshot()
    assert values["fusecache_requests_total{op=read}"] == 6
    assert values["fusecache_open_files"] == 6
    assert values["fusecache_metadata_entries"] == 3  # all see the same ones
    assert values["fusecache_request_duration_seconds_count{op=read}"] == 6
    assert values["fusecache_request_duration_seconds_sum{op=read}"] == 3.0


def test_dump_of_a_process_that_is_gone_adds_no_gauges() -> None:
    metrics = counted(1)
    metrics.add(counted(2).dump(), gauges=False)
    assert metrics.snapshot()["fusecache_requests_total{op=read}"] == 3
    assert metrics.snapshot()["fusecache_open_files"] == 1


@pytest.mark.parametrize(
    "dump",
    [
        None,
        {},
        [1],
        [["fusecache_open_files", []]],
        [["no_such_metric", [], 1]],
        [[["fusecache_open_files"], [], 1]],
        [["fusecache_open_files", {}, 1]],
        [["fusecache_open_files", ["label"], 1]],
        [["fusecache_requests_total", [1], 1]],
        [["fusecache_open_files", [], "1"]],
        [["fusecache_open_files", [], True]],
        [["fusecache_open_files", [], [1, 2]]],
        [["fusecache_open_files", [], float("nan")]],
        [["fusecache_open_files", [], float("inf")]],
        [["fusecache_request_duration_seconds", ["read"], [1, 2]]],
    ],
)
def test_what_is_no_dump_is_refused(dump: object) -> None:
    with pytest.raises(ValueError, match="metric"):
        Metrics().add(dump)


def test_merge_nothing_is_empty() -> None:
    assert merge({}, "mount") == ""


def test_import_does_not_load_prometheus_client() -> None:
    script = "import sys, fusecache.metrics; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
