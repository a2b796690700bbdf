"""A bar's line: what it asks, the verdict, and its numbers in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.strong_privacy.compare.statistics import Interval

MET, NOT_MET, NOT_MEASURED, COUNTED, NOT_COUNTED = "met", "not met", "not measured", "counted", "not counted"


@dataclass(frozen=True)
class Bar:
    """One line of the verdict."""

    number: str
    scope: str
    text: str
    verdict: str = NOT_MEASURED
    numbers: str = ""

    @property
    def holds(self) -> bool:
        return self.verdict.startswith(MET)

    @property
    def fails(self) -> bool:
        return self.verdict.startswith(NOT_MET)

    def uncounted(self) -> Bar:
        """Calibration does not count where accuracy was given up for it; what it would have been is kept."""
        if self.verdict == NOT_MEASURED:
            return self
        return replace(self, verdict=f"{NOT_COUNTED} (by itself {self.verdict})")


def verdict(i: Interval, threshold: float, *, above: bool, strict: bool = False) -> str:
    """By the mean; ``above`` says on which side the bar is met, ``strict`` that the threshold itself does not meet it."""
    gap = i.mean - threshold if above else threshold - i.mean
    met = gap > 0 if strict else gap >= 0
    chance = i.low < threshold < i.high
    return (MET if met else NOT_MET) + (", within chance" if chance else "")


def points(i: Interval) -> str:
    """A difference of accuracies, in points."""
    return f"{i.mean:+.2f} {between(i, 2, '+')} points"


def nats(i: Interval, sign: str = "") -> str:
    """An NLL or an ECE."""
    return f"{i.mean:{sign}.4f} {between(i, 4, sign)}"


def between(i: Interval, digits: int, sign: str = "") -> str:
    return f"[{i.low:{sign}.{digits}f}, {i.high:{sign}.{digits}f}]" if i.n > 1 else "[one repetition]"
