"""perf.statistics: paired ratios and their intervals."""

import random
import statistics

import pytest

from perf.statistics import agree, bootstrap_median, paired_ratio


def test_bootstrap_median_of_equal_values_has_no_width() -> None:
    assert bootstrap_median([7.0] * 5) == (7.0, 7.0, 7.0)


def test_bootstrap_median_of_five_values_spans_almost_their_range() -> None:
    found = bootstrap_median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median == 3.0
    assert found.low == 1.0
    assert found.high == 100.0


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_claims() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(1000):
        sample = [rng.gauss(10, 2) for _ in range(15)]
        found = bootstrap_median(sample)
        covered += found.low <= 10 <= found.high
    assert 920 <= covered <= 985


def test_paired_ratio_cancels_what_slows_a_whole_round() -> None:
    slow_rounds = [1.0, 0.3, 1.0, 0.5, 0.9]
    ours = [200 * factor for factor in slow_rounds]
    theirs = [100 * factor for factor in slow_rounds]
    assert paired_ratio(ours, theirs) == pytest.approx((2.0, 2.0, 2.0))
    assert statistics.pstdev(ours) > 0


def test_paired_ratio_of_unequal_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="not paired"):
        paired_ratio([1.0], [1.0, 2.0])


def test_agree_is_ten_percent_of_the_larger() -> None:
    assert agree(90.0, 100.0)
    assert not agree(89.0, 100.0)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 10, 15])
def test_the_exact_bootstrap_is_the_limit_of_drawing_again(count: int) -> None:
    rng = random.Random(count)
    sample = [rng.lognormvariate(0, 1) for _ in range(count)]
    medians = sorted(statistics.median(rng.choices(sample, k=count)) for _ in range(4000))
    found = bootstrap_median(sample)
    # Ranks of the ends among the drawn medians; ties and the draw itself leave room on both sides.
    for end, share in ((found.low, 0.025), (found.high, 0.975)):
        below, up_to = sum(each < end for each in medians) / 4000, sum(each <= end for each in medians) / 4000
        assert below - 0.015 <= share <= up_to + 0.015
