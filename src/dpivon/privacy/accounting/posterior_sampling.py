"""Privacy for free: what one exact posterior sample costs, where the likelihood is bounded.

    |log p(x | θ)| ≤ B for all x, θ   ⟹   a draw from p(θ | D) ∝ p(θ) Π p(x_i | θ)^{1/T} is ε-DP,
    ε = 4B/T if one example is replaced,  ε = 2B/T if one is added or removed

It is the exponential mechanism, whose score is the log-likelihood (Wang, Fienberg and Smola 2015, theorem 1). A constant in
log p cancels, so B may be half the range of log p. n draws cost n ε.

The bound must hold for all x and θ, so :class:`BoundedLikelihood` makes it true by construction. The sample must be exact: an
SGLD iterate is not, so this ε never replaces the ledger's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.errors import check_choice, check_number, check_whole


def exact_posterior_epsilon(
    bound: float, *, samples: int = 1, temperature: float = 1.0, neighbours: str = "replace"
) -> float:
    """ε of ``samples`` exact draws from the posterior at ``temperature``, for log-likelihoods within ±``bound``.

    ``neighbours`` is ``"replace"`` (the theorem's) or ``"add-remove"`` (that of the engine's accountants).
    """
    fix = "Use a bound that holds for all x and θ, such as BoundedLikelihood(...).bound"
    bound = check_number("bound", bound, fix, at_least=0.0)
    temperature = check_number("temperature", temperature, "Use 1 for the posterior itself", above=0.0)
    samples = check_whole("samples", samples, "Use the number of draws", at_least=1)
    check_choice("neighbours", neighbours, ("replace", "add-remove"), "Name one of them")
    return (4.0 if neighbours == "replace" else 2.0) * bound * samples / temperature


@dataclass(frozen=True)
class BoundedLikelihood:
    """A classifier that answers at random with probability κ: p̃(y | x, θ) = (1 − κ) p(y | x, θ) + κ/K.

    Then p̃, which is a proper likelihood, lies between κ/K and 1 − κ + κ/K whatever the network says.
    """

    classes: int
    floor: float

    def __post_init__(self) -> None:
        check_whole("classes", self.classes, "Use the number of classes", at_least=2)
        check_number("floor", self.floor, "Use a probability such as 0.1", above=0.0, at_most=1.0)

    @property
    def bound(self) -> float:
        """B, half the range of log p̃: ½ log(1 + K (1 − κ)/κ)."""
        return 0.5 * math.log1p(self.classes * (1.0 - self.floor) / self.floor)

    def log_likelihood(self, logits: Tensor, y: Tensor) -> Tensor:
        """log p̃(y | x, θ) for every row of logits; also where they are infinite or NaN."""
        p = F.softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        p = torch.where(torch.isfinite(p), p, torch.zeros_like(p))
        return torch.log((1.0 - self.floor) * p + self.floor / self.classes)
