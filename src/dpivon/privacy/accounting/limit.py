"""A budget that stops the step which would pass it, not the one after."""

from __future__ import annotations

from dataclasses import dataclass

from dpivon.errors import BudgetSpent
from dpivon.privacy.accounting.accountant import Accountant, epsilon
from dpivon.privacy.accounting.history import append


@dataclass(frozen=True)
class Limit:
    """(ε, δ) for a plan of ``steps`` releases with noise σ at rate q, calibrated beforehand.

    Inside the plan nothing need be computed; outside it (more steps, another σ) ε is computed before every release.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int

    def check(self, accountant: Accountant, noise_multiplier: float, sample_rate: float) -> None:
        """Raise :class:`BudgetSpent` if one more release would spend more than ε."""
        planned = noise_multiplier == self.noise_multiplier and sample_rate == self.sample_rate
        uniform = all(row[:2] == (self.noise_multiplier, self.sample_rate) for row in accountant.history)
        if planned and uniform and len(accountant) < self.steps:
            return
        history = list(accountant.history)
        append(history, (noise_multiplier, sample_rate, 1))
        after = epsilon(history, self.delta, accountant.mechanism(), accountant.orders)
        if after > self.epsilon:
            raise BudgetSpent(
                f"target_epsilon={self.epsilon!r}: this step would spend ε = {after:.4g} at δ = {self.delta:g}, so nothing was "
                "released. Stop here, or plan more epochs or more noise from the start."
            )
