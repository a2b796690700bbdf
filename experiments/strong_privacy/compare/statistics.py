"""Of paired differences: intervals, tests, Holm's correction; and the area under a curve over log ε."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of n repetitions with Student's 95 % interval; one repetition says nothing about chance."""

    mean: float
    low: float
    high: float
    n: int


def interval(values: Sequence[float]) -> Interval:
    """Of the mean of independent repetitions."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * _error(values, mean)
    return Interval(mean, mean - half, mean + half, n)


def p_value(differences: Sequence[float]) -> float:
    """Of the paired t-test, two-sided. Three differences or more that are all alike are no accident, unless all are zero."""
    n = len(differences)
    mean = math.fsum(differences) / n
    if n < 2 or mean == 0:
        return 1.0
    error = _error(differences, mean)
    return float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p: the kth smallest of m times m − k + 1, never falling. At most one in twenty families has a false win."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out, largest = [0.0] * len(p_values), 0.0
    for k, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - k) * p_values[i]))
        out[i] = largest
    return out


def log_area(epsilons: Sequence[float], values: Sequence[float]) -> float:
    """The trapezoid's area under values against log ε, divided by the range of log ε: a mean value over it."""
    points = sorted(zip((math.log(e) for e in epsilons), values, strict=True))
    width = points[-1][0] - points[0][0]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))
    return area / width


def _error(values: Sequence[float], mean: float) -> float:
    """Of the mean. Two values that are alike do not say how far apart they could be: counted images often are."""
    n = len(values)
    if n == 2 and math.isclose(*values, rel_tol=1e-9, abs_tol=1e-12):
        return math.inf
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n)
