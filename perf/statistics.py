"""Paired comparison of rates: pure, no clock, no files, no random numbers.

A round measures every system once, in random order, so that what disturbs the machine disturbs a round and not
one system. Only ratios within a round are compared; their median is given with its bootstrap interval.

The bootstrap asks which medians come out when as many values are drawn again from the ones found, with replacement.
For a median that distribution is known exactly (order statistics of draws from n values), so nothing is drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from math import comb
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A median and the interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float


def bootstrap_median(values: Sequence[float]) -> Interval:
    """Percentile bootstrap of the median. With five values it comes close to their range, as it should."""
    if not values:
        raise ValueError("no values to take a median of")
    ranked = sorted(values)
    medians = sorted(((ranked[low] + ranked[high]) / 2, chance) for low, high, chance in _middles(len(values)))
    tail = (1 - CONFIDENCE) / 2
    return Interval(statistics.median(values), _quantile(medians, tail), _quantile(medians, 1 - tail))


def _quantile(outcomes: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest of the sorted (value, chance) up to which the chances exceed `share`."""
    total = 0.0
    for value, chance in outcomes:
        total += chance
        if total > share:
            return value
    return outcomes[-1][0]


@cache
def _middles(count: int) -> list[tuple[int, int, float]]:
    """Of `count` draws from `count` ranked values: (rank of the lower middle one, of the upper middle one, chance)."""
    half = count // 2
    if count % 2:
        # The median is at most rank r when more than half of the draws are.
        at_most = [
            sum(_binomial(count, drawn, (rank + 1) / count) for drawn in range(half + 1, count + 1))
            for rank in range(-1, count)
        ]
        return [(rank, rank, at_most[rank + 1] - at_most[rank]) for rank in range(count)]
    found = []
    for low in range(count):
        below, here = low / count, 1 / count
        # Both middle ones have this rank: fewer than half of the draws lie below it and fewer than half above.
        both = sum(
            _binomial(count, smaller, below) * _binomial(count - smaller, same, here / (1 - below))
            for smaller in range(half)
            for same in range(half + 1 - smaller, count - smaller + 1)
        )
        found.append((low, low, both))
        for high in range(low + 1, count):
            # Half of the draws at most `low`, one of them it; the other half at least `high`, one of them it.
            lower = ((low + 1) / count) ** half - below**half
            upper = ((count - high) / count) ** half - ((count - high - 1) / count) ** half
            found.append((low, high, comb(count, half) * lower * upper))
    return found


def _binomial(count: int, hits: int, chance: float) -> float:
    return float(comb(count, hits) * chance**hits * (1 - chance) ** (count - hits))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Median of ours[i] / theirs[i] over rounds i; above 1 = ours is faster."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours, {len(theirs)} of theirs: not paired")
    return bootstrap_median([a / b for a, b in zip(ours, theirs, strict=True)])


def agree(earlier: float, later: float, tolerance: float = 0.10) -> bool:
    """Whether two rates differ by at most `tolerance` of the larger: the sign that a JVM is warm."""
    return abs(earlier - later) <= tolerance * max(earlier, later)
