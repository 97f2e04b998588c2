"""Ages: never later than promised, the nearest data set's rules, and the kernel no longer than we."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.cache.freshness import JITTER, DatasetRule, FolderRule, FreshnessPolicy, jitter_of

POLICY = FreshnessPolicy(
    refresh_s=600,
    datasets=(
        DatasetRule(b"/data", refresh_s=60),
        DatasetRule(b"/data/fixed", immutable=True),
        DatasetRule(b"/data/fixed/new/", immutable=False, refresh_s=5),
    ),
)


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (b"/", FolderRule(600, False)),
        (b"/database", FolderRule(600, False)),
        (b"/data", FolderRule(60, False)),
        (b"/data/x/y", FolderRule(60, False)),
        # What a data set leaves open is the mount's, not that of a data set around it.
        (b"/data/fixed", FolderRule(600, True)),
        (b"/data/fixed/a", FolderRule(600, True)),
        (b"/data/fixed/new", FolderRule(5, False)),
        (b"/data/fixed/new/a", FolderRule(5, False)),
    ],
)
def test_rule_of_a_folder_is_that_of_the_longest_path_above_it(path: bytes, rule: FolderRule) -> None:
    assert POLICY.rule_for(path) == rule


def test_rule_for_the_whole_cluster_covers_everything() -> None:
    policy = FreshnessPolicy(datasets=(DatasetRule(b"/", immutable=True),))
    assert policy.rule_for(b"/").immutable
    assert policy.rule_for(b"/a/b").immutable


@given(st.floats(0, 1e6), st.floats(0.1, 1e5), st.floats(0, 1, exclude_max=True))
def test_folder_comes_due_within_its_promise_and_not_much_before(
    asked_at: float, refresh_s: float, jitter: float
) -> None:
    due = POLICY.fresh_until(FolderRule(refresh_s, False), asked_at, jitter)
    assert asked_at + refresh_s * (1 - JITTER) <= due <= asked_at + refresh_s


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_kernel_keeps_nothing_longer_than_the_folder_is_fresh(fresh_until: float, now: float) -> None:
    timeout_s = POLICY.kernel_timeout_s(FolderRule(600, False), fresh_until, now)
    assert timeout_s >= 0
    assert timeout_s == 0 or now + timeout_s <= fresh_until + 1e-6


def test_immutable_folder_never_comes_due() -> None:
    rule = FolderRule(600, True)
    assert POLICY.fresh_until(rule, 5.0, 0.5) == math.inf
    assert POLICY.kernel_timeout_s(rule, math.inf, 1e9) == POLICY.immutable_kernel_timeout_s


def test_refresh_ahead_lies_before_the_due_time() -> None:
    rule = FolderRule(600, False)
    assert 900.0 < POLICY.refresh_at(rule, 1000.0) < 1000.0


def test_stale_time_begins_where_freshness_ends() -> None:
    policy = FreshnessPolicy(stale_if_error_s=100)
    assert policy.stale_until(FolderRule(600, False), 10.0) == 710.0
    assert FreshnessPolicy(stale_if_error_s=0).stale_until(FolderRule(600, False), 10.0) == 610.0


@pytest.mark.parametrize(("sync_interval_s", "sync_ms"), [(300.0, 300_000), (0.0, 0), (-1.0, -1), (0.5, 500)])
def test_sync_interval_is_given_as_alluxio_takes_it(sync_interval_s: float, sync_ms: int) -> None:
    assert FreshnessPolicy(sync_interval_s=sync_interval_s).sync_interval_ms == sync_ms


@given(st.integers(1, 2**64 - 1), st.floats(0, 1e9))
def test_jitter_is_the_same_for_all_who_know_the_listing(folder: int, asked_at: float) -> None:
    jitter = jitter_of(folder, asked_at)
    assert 0.0 <= jitter < 1.0
    assert jitter_of(folder, asked_at) == jitter


def test_jitter_spreads_over_folders_and_over_listings() -> None:
    for jitters in (
        [jitter_of(folder << 24, 1000.5) for folder in range(1, 1001)],
        [jitter_of(1, 1000.0 + 0.001 * listing) for listing in range(1000)],
    ):
        tenths = [sum(tenth / 10 <= jitter < (tenth + 1) / 10 for jitter in jitters) for tenth in range(10)]
        assert min(tenths) > 50, tenths
