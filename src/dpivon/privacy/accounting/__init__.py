"""How much privacy a run spends: Rényi, PRV and PLD accounting of the Poisson-subsampled Gaussian mechanism.

Every ε is an upper bound. Where an accountant is numerically out of its depth, the looser Rényi bound is
returned, with a :class:`~dpivon.errors.PrivacyWarning`.
"""

from dpivon.privacy.accounting.accountant import Accountant, epsilon
from dpivon.privacy.accounting.budget import Budget, budget
from dpivon.privacy.accounting.calibrate import noise_multiplier
from dpivon.privacy.accounting.limit import Limit
from dpivon.privacy.accounting.tuning import (
    RandomRuns,
    TuningCost,
    tuned_epsilon,
    tuned_noise_multiplier,
    tuning_costs,
)

__all__ = [
    "Accountant",
    "Budget",
    "Limit",
    "RandomRuns",
    "TuningCost",
    "budget",
    "epsilon",
    "noise_multiplier",
    "tuned_epsilon",
    "tuned_noise_multiplier",
    "tuning_costs",
]
