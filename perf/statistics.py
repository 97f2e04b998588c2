"""Paired comparison of rates: pure, no clock, no files.

A round measures every system once, in random order, so that what disturbs the machine disturbs a round and not
one system. Only ratios within a round are compared; their median is given with a bootstrap interval.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

RESAMPLES = 10_000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A median and the interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float


def bootstrap_median(values: Sequence[float], rng: random.Random, resamples: int = RESAMPLES) -> Interval:
    """Percentile bootstrap of the median. With five values it comes close to their range, as it should."""
    if not values:
        raise ValueError("no values to take a median of")
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - CONFIDENCE) / 2
    low = medians[int(tail * resamples)]
    high = medians[min(resamples - 1, int((1 - tail) * resamples))]
    return Interval(statistics.median(values), low, high)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], rng: random.Random) -> Interval:
    """Median of ours[i] / theirs[i] over rounds i; above 1 = ours is faster."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours, {len(theirs)} of theirs: not paired")
    return bootstrap_median([a / b for a, b in zip(ours, theirs, strict=True)], rng)


def agree(earlier: float, later: float, tolerance: float = 0.10) -> bool:
    """Whether two rates differ by at most `tolerance` of the larger: the sign that a JVM is warm."""
    return abs(earlier - later) <= tolerance * max(earlier, later)
