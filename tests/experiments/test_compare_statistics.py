"""Intervals, tests, Holm's correction and areas: by hand, and against scipy."""

from __future__ import annotations

import math

import pytest
from experiments.strong_privacy.compare.pooled import pooled
from experiments.strong_privacy.compare.statistics import holm, interval, log_area, p_value
from scipy import stats

A, B = [0.61, 0.64, 0.60, 0.66, 0.63], [0.60, 0.61, 0.61, 0.63, 0.60]
D = [a - b for a, b in zip(A, B, strict=True)]


def test_the_paired_test_is_scipys():
    theirs = stats.ttest_rel(A, B)
    found, between = interval(D), theirs.confidence_interval(0.95)
    assert p_value(D) == pytest.approx(theirs.pvalue, rel=1e-12)
    assert (found.mean, found.n) == (pytest.approx(0.018), 5)
    assert (found.low, found.high) == (pytest.approx(between.low), pytest.approx(between.high))


def test_one_repetition_and_equal_ones():
    assert interval([0.3]).low == -math.inf
    assert interval([0.3]).high == math.inf
    assert p_value([0.3]) == 1.0
    assert p_value([0.0, 0.0]) == 1.0
    assert p_value([0.25, 0.25, 0.25]) == 0.0


def test_two_repetitions_that_are_alike_by_a_count_of_images_win_nothing():
    """Of 360 images two methods often differ by the same number twice: without a difference that is no win."""
    assert p_value([0.25, 0.25]) == 1.0
    assert p_value([0.61 - 0.60, 0.62 - 0.61]) == 1.0  # alike up to rounding
    assert (interval([0.25, 0.25]).low, interval([0.25, 0.25]).high) == (-math.inf, math.inf)
    assert p_value([0.25, 0.26]) == pytest.approx(stats.ttest_1samp([0.25, 0.26], 0.0).pvalue)
    counts = stats.randint(-4, 5).rvs(size=(2000, 2), random_state=0) / 360
    assert sum(p_value(list(cell)) <= 0.05 for cell in counts.tolist()) / 2000 < 0.07


def test_holm_by_hand():
    """.01·4, .015·3, then max(.045, .02·2), then .5·1; the order of the input is kept."""
    assert holm([0.5, 0.01, 0.02, 0.015]) == pytest.approx([0.5, 0.04, 0.045, 0.045])
    assert holm([0.6, 0.9]) == [1.0, 1.0]  # never above 1
    assert holm([]) == []


def test_holm_lets_in_a_false_win_in_one_family_of_twenty():
    """Twenty cells without a difference, five repetitions: without a correction two families in three would have a win."""
    rng = stats.norm(0, 1)
    draws = rng.rvs(size=(400, 20, 5), random_state=0).tolist()
    wrong = sum(min(holm([p_value(cell) for cell in family])) <= 0.05 for family in draws)
    plain = sum(min(p_value(cell) for cell in family) <= 0.05 for family in draws)
    assert wrong / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert plain / 400 > 0.5


def test_the_area_by_hand():
    """Accuracy 0 at ε = 1, 1 at e, 1 at e³: (1·½ + 2·1)/3. Order does not matter, and a constant is its own area."""
    e = math.e
    assert log_area([1, e, e**3], [0, 1, 1]) == pytest.approx(2.5 / 3)
    assert log_area([e**3, 1, e], [1, 0, 1]) == pytest.approx(2.5 / 3)
    assert log_area([0.3, 2, 9], [0.7, 0.7, 0.7]) == pytest.approx(0.7)


def test_repetitions_are_averaged_over_cells_and_kept_apart():
    assert pooled([{0: 1.0, 1: 3.0, 2: 9.0}, {0: 3.0, 1: 5.0}]) == [2.0, 4.0]  # only what every cell has
    assert pooled([{0: 1.0}, {1: 1.0}]) == []
    assert pooled([]) == []
