"""What (ε, δ) means for one person, in numbers: what a test for a record can reach at best."""

from __future__ import annotations

import math
from dataclasses import dataclass


def factor(epsilon: float) -> float:
    """e^ε: by how much an outcome's probability may differ with and without one record."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def best_guess(epsilon: float, delta: float) -> float:
    """The largest share of right guesses whether a record was used, at even odds, (e^ε + δ)/(e^ε + 1).

    Half of one minus the least sum of both error rates, 2(1 − δ)/(1 + e^ε): Kairouz, Oh and Viswanath, 2015, theorem 2.1.
    """
    return 1 - (1 - delta) / (1 + factor(epsilon))


def most_detected(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest share of used records that a test finds which is wrong about so many unused ones (ibid.)."""
    grown = min(1.0, factor(epsilon) * false_alarms + delta)
    return max(false_alarms, min(grown, 1 - max(0.0, 1 - delta - false_alarms) / factor(epsilon)))


def believed(epsilon: float, prior: float) -> float:
    """What a belief of ``prior`` becomes at most, outside the exception of probability δ: Bayes with odds times e^ε."""
    odds = prior / (1 - prior) * factor(epsilon)
    return odds / (1 + odds) if math.isfinite(odds) else 1.0


def percent(share: float) -> str:
    """Rounded upwards, since these are bounds, with as many digits as it takes not to say 100 % of less."""
    if share >= 1:
        return "100\u00a0%"
    for digits in range(1, 10):
        up = math.ceil(share * 100 * 10**digits - 1e-6) / 10**digits
        if up < 100:
            return f"{up:.{digits}f}\u00a0%"
    return "nearly 100\u00a0%"


def plain(probability: float) -> str:
    """A small probability as people say it."""
    if probability <= 0:
        return "never"
    one_in = round(1 / probability) if probability > 1e-15 else None
    return "practically never" if one_in is None else f"one in {one_in:,}"


@dataclass(frozen=True)
class Reading:
    """The statement's numbers at one (ε, δ)."""

    epsilon: float
    delta: float

    @property
    def private(self) -> bool:
        return math.isfinite(self.epsilon)

    @property
    def shown(self) -> str:
        return shown(self.epsilon)

    @property
    def factor(self) -> str:
        value = _up(factor(self.epsilon), 4)
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}" if value < 1e9 else f"{value:.3e}"

    @property
    def guess(self) -> str:
        return percent(best_guess(self.epsilon, self.delta))

    @property
    def from_one_percent(self) -> str:
        return percent(believed(self.epsilon, 0.01))

    @property
    def detected(self) -> str:
        return percent(most_detected(self.epsilon, self.delta, 0.01))

    @property
    def delta_in_words(self) -> str:
        return plain(self.delta)

    @property
    def two_rows(self) -> str:
        """A person with two rows: group privacy."""
        delta = _up(2 * factor(self.epsilon) * self.delta, 2)
        return f"ε = {shown(2 * self.epsilon)}, δ = {min(1.0, delta):.2g}"


def shown(epsilon: float) -> str:
    """ε to three digits, rounded up: a bound must not be rounded down."""
    if not math.isfinite(epsilon):
        return "∞"
    value = _up(epsilon, 3)
    return "0" if value == 0 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _up(value: float, digits: int) -> float:
    """The next larger number of so many digits."""
    if value <= 0 or not math.isfinite(value):
        return value
    unit = digits - 1 - math.floor(math.log10(value))
    scaled = value * 10.0**unit
    return math.ceil(scaled - 1e-9 * scaled) / 10.0**unit
