"""How fast something goes, by the time that was spent on it and on nothing else, and how long the rest will take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pace:
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount += amount
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """So much a second; 0 where nobody knows yet."""
        return self.amount / max(self.seconds, 1e-9)

    def time(self, amount: float) -> float | None:
        """Seconds that so much more will take; None where nobody knows yet."""
        if amount <= 0:
            return 0.0
        return amount / self.rate if self.rate > 0 else None


@dataclass(frozen=True)
class Left:
    """What is left of a stack's evaluation, in forward passes and in runs, and the pace of the passes so far."""

    passes: float
    runs: int
    pace: Pace

    @property
    def seconds(self) -> float | None:
        return self.pace.time(self.passes)

    @property
    def words(self) -> str:
        seconds = self.seconds
        return "" if seconds is None else f" · {self.pace.rate:,.0f} passes/s · {clock(seconds)} for this stack"


def clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
