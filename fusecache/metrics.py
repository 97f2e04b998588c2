"""Every number fusecache reports: one table, plain cells on the hot path, Prometheus text at scrape time.

Whoever counts asks `Metrics` once for a cell (`counter("fusecache_requests_total", op="read")`), keeps it and
calls `inc()` on it; a scrape (`exposition()`) reads the cells through a custom collector. A name that is not
in `METRICS`, or labels other than the table's, are programming errors and raise at once, so that the table
in the README stays the whole truth.

Cells take no lock. CPython switches threads at calls and at backward jumps only, and an `inc()` holds neither
between its load and its store, so no increment is lost (a test counts from several threads); prometheus_client's
own counters take a mutex and cost several times more per increment. prometheus_client is imported by the
functions that make or read its text, because a process that is never scraped should not pay for it.

This module does not serve HTTP (`status_http`) and decides nothing from its numbers.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric

Kind = Literal["counter", "gauge", "histogram"]


class MetricSpec(NamedTuple):
    """One row of the table."""

    name: str
    """Full name as scraped; counters end in `_total`."""
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("fusecache_requests_total", "counter", ("op",), "Requests of the kernel, by operation."),
    MetricSpec(
        "fusecache_request_duration_seconds",
        "histogram",
        ("op",),
        "From a kernel request to its reply, in seconds.",
    ),
    MetricSpec(
        "fusecache_request_errors_total", "counter", ("op", "errno"), "Requests answered with an error, by its name."
    ),
    MetricSpec("fusecache_requests_in_flight", "gauge", (), "Requests taken from the kernel and not yet answered."),
    MetricSpec(
        "fusecache_read_bytes_total",
        "counter",
        ("source",),
        "File bytes by where they came from: local_block, read_buffer, block_worker, ufs.",
    ),
    MetricSpec(
        "fusecache_metadata_lookups_total",
        "counter",
        ("result",),
        "Answers from the metadata cache: hit, miss, negative_hit, stale (served because no master answered).",
    ),
    MetricSpec("fusecache_metadata_entries", "gauge", (), "Files and folders in the metadata database."),
    MetricSpec(
        "fusecache_metadata_refreshes_total",
        "counter",
        ("result",),
        "Folders listed again: unchanged, changed, failed.",
    ),
    MetricSpec(
        "fusecache_invalidations_total",
        "counter",
        ("kind",),
        "Invalidations pushed into the kernel: entry, inode, attributes.",
    ),
    MetricSpec(
        "fusecache_rpcs_total", "counter", ("method", "code"), "Calls to Alluxio, each try counted, by gRPC status."
    ),
    MetricSpec(
        "fusecache_rpc_duration_seconds", "histogram", ("method",), "Time of one try of a call to Alluxio, in seconds."
    ),
    MetricSpec("fusecache_rpc_retries_total", "counter", ("method",), "Tries after the first of a call to Alluxio."),
    MetricSpec(
        "fusecache_upstream_rejected_total",
        "counter",
        ("what",),
        "Data from the network that can't be true (a name with a slash, a wrong length) and was not used.",
    ),
    MetricSpec(
        "fusecache_block_sources_failed_total",
        "counter",
        ("source",),
        "Sources of a block that failed before the next one was tried.",
    ),
    MetricSpec(
        "fusecache_touched_blocks_total",
        "counter",
        (),
        "Blocks read without an RPC and reported to the block worker, so that it does not evict them first.",
    ),
    MetricSpec(
        "fusecache_open_files",
        "gauge",
        (),
        "Files the kernel holds open; behind the gate, where nobody says so, files kept open for reading.",
    ),
    MetricSpec(
        "fusecache_gate_requests_total",
        "counter",
        ("op", "answered_by"),
        "Requests that the gate took from the kernel: answered by itself, or given to a worker.",
    ),
    MetricSpec(
        "fusecache_gate_opens_total",
        "counter",
        ("how",),
        "Files opened in passthrough mode: with a block file that the kernel reads itself (new, learned, known), or "
        "ordinary.",
    ),
    MetricSpec(
        "fusecache_gate_passthrough_refused_total",
        "counter",
        ("reason",),
        "Block files that were offered for passthrough and not taken.",
    ),
    MetricSpec(
        "fusecache_gate_redelivered_total", "counter", (), "Requests given to another worker because theirs died."
    ),
    MetricSpec(
        "fusecache_gate_poisoned_total",
        "counter",
        (),
        "Requests answered EIO because three workers died with them.",
    ),
    MetricSpec(
        "fusecache_gate_read_bytes_total",
        "counter",
        ("source",),
        "File bytes that the gate gave to the kernel: from a worker, or read from a block file by itself.",
    ),
    MetricSpec(
        "fusecache_gate_spin_seconds_total", "counter", (), "Processor time spent looking for the next request."
    ),
    MetricSpec("fusecache_gate_waiting_requests", "gauge", (), "Requests that wait for a worker with credits."),
    MetricSpec(
        "fusecache_part_restarts_total",
        "counter",
        ("part",),
        "Times that a part of the mount was started again: gate, agent, worker 0 ...",
    ),
    MetricSpec("fusecache_mount_ready", "gauge", (), "1 while the mount serves reads."),
    MetricSpec("fusecache_build_info", "gauge", ("version",), "Always 1; the version is in the label."),
    MetricSpec("fusecache_cluster_capacity_bytes", "gauge", (), "Cache capacity of the Alluxio cluster, in bytes."),
    MetricSpec("fusecache_cluster_used_bytes", "gauge", (), "Cache in use in the Alluxio cluster, in bytes."),
    MetricSpec(
        "fusecache_locality_dataset_bytes",
        "gauge",
        ("dataset", "what"),
        "Bytes of a data set: total (as far as listed), local (in block files of this node), when last measured.",
    ),
    MetricSpec(
        "fusecache_locality_stream_up",
        "gauge",
        ("controller",),
        "1 while the controller takes this node's reports (of `serve`, not of a mount).",
    ),
    MetricSpec(
        "fusecache_locality_reports_total",
        "counter",
        ("kind",),
        "Reports sent to the controller: full, delta (of `serve`, not of a mount).",
    ),
    MetricSpec("fusecache_controller_leader", "gauge", (), "1 while this instance of the controller leads."),
    MetricSpec("fusecache_controller_nodes_reporting", "gauge", (), "Nodes whose last report counts."),
    MetricSpec("fusecache_controller_streams", "gauge", (), "Open streams of reports."),
    MetricSpec(
        "fusecache_controller_reports_total",
        "counter",
        ("result",),
        "Reports received: taken, report_fully, invalid, gap, superseded, full.",
    ),
    MetricSpec("fusecache_controller_pods_waiting", "gauge", (), "Pods with our gate."),
    MetricSpec(
        "fusecache_controller_decisions_total",
        "counter",
        ("outcome",),
        "Pods let go: placed on a chosen node, or released without.",
    ),
    MetricSpec(
        "fusecache_controller_pod_wait_seconds",
        "histogram",
        ("outcome",),
        "From a pod's creation to the removal of our gate, in seconds (creation is known to the second).",
    ),
    MetricSpec(
        "fusecache_controller_conflicts_total",
        "counter",
        (),
        "Changes that the API server did not take because the pod had changed, or because they are invalid.",
    ),
    MetricSpec(
        "fusecache_controller_api_calls_total",
        "counter",
        ("method", "code"),
        "Calls to the Kubernetes API by HTTP status, or `timeout` or `failed`.",
    ),
    MetricSpec(
        "fusecache_controller_lists_total",
        "counter",
        ("resource",),
        "Times that all objects of a kind were listed: at the start, and when a watch could not be resumed.",
    ),
)

BUCKETS_S: tuple[float, ...] = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of histogram buckets in seconds: from a page-cache read (tens of us) to `read_budget_s`."""

CONTROLLER_ROWS = "fusecache_controller_"
"""Names of the controller's rows begin so; all others are of a node."""

GATE_ROWS = "fusecache_gate_"
"""Names of the gate's rows begin so; a mount in `classic` mode has none."""

SUMMED_GAUGES = frozenset({"fusecache_requests_in_flight", "fusecache_open_files"})
"""Gauges of which each process of a mount has its part; of the others all have the same, or one has it."""

_SPECS: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, n: float = 1) -> None:
        """Add `n`, which must not be negative (not checked: this is the hot path)."""
        self.value += n


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, v: float) -> None:
        """Replace the value."""
        self.value = v


class Histogram:
    """Durations in the buckets of `BUCKETS_S`, with their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BUCKETS_S) + 1)
        """Observations per bucket, not cumulative; the last one is above every bound."""
        self.sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        index = bisect_left(BUCKETS_S, seconds)  # a bound is inclusive ("le"), as Prometheus has it
        self.counts[index] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


Labels = tuple[str, ...]
"""Label values in the order of the table."""


class Metrics:
    """All cells of one process; made once by whoever starts it and handed down."""

    def __init__(self, *, show_unused: bool = True) -> None:
        """`show_unused`: a row without labels is there, as 0, before anybody counted. Not so for a process that has
        only a few of the rows, such as `serve` beside its mounts."""
        self._show_unused = show_unused
        self._lock = threading.Lock()  # making and listing cells; never taken by inc/set/observe
        self._counters: dict[str, dict[Labels, Counter]] = {}
        self._gauges: dict[str, dict[Labels, Gauge]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        """The cell of a counter; the same one for the same labels. ValueError when not in the table."""
        key = _checked(name, "counter", labels)
        with self._lock:
            return self._counters.setdefault(name, {}).setdefault(key, Counter())

    def gauge(self, name: str, **labels: str) -> Gauge:
        """The cell of a gauge; the same one for the same labels. ValueError when not in the table."""
        key = _checked(name, "gauge", labels)
        with self._lock:
            return self._gauges.setdefault(name, {}).setdefault(key, Gauge())

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The cell of a histogram; the same one for the same labels. ValueError when not in the table."""
        key = _checked(name, "histogram", labels)
        with self._lock:
            return self._histograms.setdefault(name, {}).setdefault(key, Histogram())

    def snapshot(self) -> dict[str, float]:
        """Every cell as `name{label=value,...}` (no braces without labels) -> value.

        A histogram gives two entries, `name_count...` and `name_sum...` (seconds).
        """
        values: dict[str, float] = {}
        for spec in METRICS:
            for labels, number in self._numbers(spec):
                values[spec.name + _label_text(spec, labels)] = number
            for labels, histogram in self._histogram_cells(spec):
                values[f"{spec.name}_count" + _label_text(spec, labels)] = histogram.count
                values[f"{spec.name}_sum" + _label_text(spec, labels)] = histogram.sum_s
        return values

    def exposition(self) -> str:
        """All cells and the process's own metrics (CPU, memory, descriptors) as Prometheus text, version 0.0.4."""
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_CellCollector(self))
        ProcessCollector(registry=registry)
        return generate_latest(registry).decode()

    def dump(self) -> list[list[Any]]:
        """Every cell as JSON can carry it to another process, whose `add` takes it."""
        rows: list[list[Any]] = []
        with self._lock:
            for name, counters in self._counters.items():
                rows.extend([name, list(labels), counter.value] for labels, counter in counters.items())
            for name, gauges in self._gauges.items():
                rows.extend([name, list(labels), gauge.value] for labels, gauge in gauges.items())
            for name, histograms in self._histograms.items():
                rows.extend([name, list(labels), [*cell.counts, cell.sum_s]] for labels, cell in histograms.items())
        return rows

    def add(self, dump: object, *, gauges: bool = True) -> None:
        """Add what another process counted. Of a gauge that says how many there are now the sum counts, of others the
        larger value; without `gauges` (the process is gone) none. ValueError when it is no dump; part of it may be in
        by then."""
        if not isinstance(dump, list):
            raise ValueError("a dump of metrics is a list")
        for row in dump:
            name, labels, value = _checked_row(row)
            kind = _SPECS[name].kind
            if kind == "histogram":
                histogram = self.histogram(name, **labels)
                histogram.counts = [mine + int(more) for mine, more in zip(histogram.counts, value[:-1], strict=True)]
                histogram.sum_s += value[-1]
            elif kind == "counter":
                self.counter(name, **labels).value += value[0]
            elif gauges:
                gauge = self.gauge(name, **labels)
                gauge.value = gauge.value + value[0] if name in SUMMED_GAUGES else max(gauge.value, value[0])

    def _numbers(self, spec: MetricSpec) -> list[tuple[Labels, float]]:
        """Counters and gauges of one row; rows of the controller and the gate, which not all have, only when used."""
        with self._lock:
            cells: list[tuple[Labels, float]] = [
                *((labels, counter.value) for labels, counter in self._counters.get(spec.name, {}).items()),
                *((labels, gauge.value) for labels, gauge in self._gauges.get(spec.name, {}).items()),
            ]
        shown = self._show_unused and not spec.name.startswith((CONTROLLER_ROWS, GATE_ROWS))
        if shown and not cells and not spec.labels and spec.kind != "histogram":
            cells.append(((), 0))
        return cells

    def _histogram_cells(self, spec: MetricSpec) -> list[tuple[Labels, Histogram]]:
        with self._lock:
            return list(self._histograms.get(spec.name, {}).items())

    def _families(self) -> Iterator[PrometheusMetric]:
        """The table's rows as prometheus_client's values, for one scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for spec in METRICS:
            if spec.kind == "histogram":
                histogram_family = HistogramMetricFamily(spec.name, spec.meaning, labels=spec.labels)
                for labels, histogram in self._histogram_cells(spec):
                    counts = list(histogram.counts)  # one copy, so that buckets and count agree with each other
                    histogram_family.add_metric(labels, _cumulative(counts), sum_value=histogram.sum_s)
                yield histogram_family
                continue
            family: CounterMetricFamily | GaugeMetricFamily
            if spec.kind == "counter":
                family = CounterMetricFamily(spec.name, spec.meaning, labels=spec.labels)
            else:
                family = GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels)
            for labels, number in self._numbers(spec):
                family.add_metric(labels, number)
            yield family


class _CellCollector:
    """What prometheus_client's registry calls at a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[PrometheusMetric]:
        return self._metrics._families()


def merge(expositions: Mapping[str, str], label: str) -> str:
    """Join texts of several processes into one, each sample with `label` = its key in `expositions`; with the key "" it
    stays as it is.

    For `serve`, which answers one scrape for all its mounts. ValueError when a text is not Prometheus text.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    merged: dict[str, Metric] = {}
    for key, text in expositions.items():
        own = {label: key} if key else {}
        for family in text_string_to_metric_families(text):
            target = merged.get(family.name)
            if target is None:
                target = merged[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                target.add_sample(sample.name, {**own, **sample.labels}, sample.value)

    class Merged:
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged())
    return generate_latest(registry).decode()


def _checked_row(row: object) -> tuple[str, dict[str, str], list[float]]:
    """A row of a dump: name, labels, numbers (one, or a histogram's). ValueError."""
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str) or row[0] not in _SPECS:
        raise ValueError(f"no row of metrics: {str(row)[:80]}")
    name, values, numbers = row
    spec = _SPECS[name]
    if not isinstance(values, list) or len(values) != len(spec.labels) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"metric {name!r} has the labels {spec.labels}")
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if len(numbers) != (len(BUCKETS_S) + 2 if spec.kind == "histogram" else 1):
        raise ValueError(f"metric {name!r} with {len(numbers)} numbers")
    if not all(type(number) in (int, float) and -LARGEST < number < LARGEST for number in numbers):
        raise ValueError(f"metric {name!r} has a value that is no number")
    return name, dict(zip(spec.labels, values, strict=True)), numbers


LARGEST = 1e300
"""Values of another process beyond this are refused."""


def _checked(name: str, kind: Kind, labels: Mapping[str, str]) -> Labels:
    spec = _SPECS.get(name)
    if spec is None:
        raise ValueError(f"no metric {name!r} in the METRICS table")
    if spec.kind != kind:
        raise ValueError(f"metric {name!r} is a {spec.kind}, not a {kind}")
    if labels.keys() != set(spec.labels):
        raise ValueError(f"metric {name!r} has the labels {spec.labels}, not {tuple(labels)}")
    return tuple(labels[label] for label in spec.labels)


def _label_text(spec: MetricSpec, labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f"{name}={value}" for name, value in zip(spec.labels, labels, strict=True)) + "}"


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    """Prometheus buckets: (upper bound, observations at or below it), ending with +Inf."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
