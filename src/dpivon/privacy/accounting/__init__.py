"""How much privacy a run spends: Rényi, PRV and PLD accounting of the Poisson-subsampled Gaussian mechanism.

Every ε is an upper bound. Where an accountant fails numerically, the looser Rényi bound is returned, with a
:class:`~dpivon.errors.PrivacyWarning`. Another accountant is one file and one call of :func:`register_accountant`.
"""

from dpivon.privacy.accounting import pld, prv, rdp
from dpivon.privacy.accounting.accountant import ACCOUNTANTS, DEFAULT, Accountant, epsilon, register_accountant
from dpivon.privacy.accounting.budget import Budget, Limit, budget, noise_multiplier
from dpivon.privacy.accounting.tuning import (
    RandomRuns,
    TuningCost,
    tuned_epsilon,
    tuned_noise_multiplier,
    tuning_costs,
)

register_accountant("rdp", "RDP (Rényi differential privacy)", rdp.epsilon)
register_accountant("prv", "PRV (privacy random variables)", prv.epsilon)
register_accountant("pld", "PLD (privacy loss distributions)", pld.epsilon)

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT",
    "Accountant",
    "Budget",
    "Limit",
    "RandomRuns",
    "TuningCost",
    "budget",
    "epsilon",
    "noise_multiplier",
    "register_accountant",
    "tuned_epsilon",
    "tuned_noise_multiplier",
    "tuning_costs",
]
