"""The cross moment: the gradient times the momentum of earlier ones, whose noise is independent of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.rule import debias


@dataclass(frozen=True)
class CrossMoment:
    """v̂ = max(p, M/10), with p the average of g_t ⊙ m_{t−1}, m the momentum of the gradients before t, and M = max(mean p, 0)
    over the tensor; ĥ = N_ess v̂.

    Batches and noises of different steps are independent, so for a gradient that changes slowly E[g_t m_{t−1}] = ḡ²: no noise
    to subtract and none left. But nothing of the sampling covariance either: at an optimum E g² − s² is F/b and this is 0. It
    estimates ḡ², not the Fisher, and there is no version of it scaled by b. On directions that oscillate it is negative,
    hence the floor at a tenth of the tensor's mean.

    Bias of p for ḡ²: none (the floor: as of any projection). Variance of one product, with S = s² + F/b and w = Σ w_k² of the
    momentum, (1 − β)/(1 + β) = .053 at β = .9 in the end:

        Var g_t m_{t−1} = (ḡ² + S)(ḡ² + w S) − ḡ⁴ = w S² + (1 + w) ḡ² S,

    a variance 38 times smaller than that of g² − s², 2 S², without a signal. There the products are uncorrelated, and their
    average over steps divides it by n.
    """

    momentum: float = 0.9

    name: ClassVar[str] = "cross"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = False
    remembers: ClassVar[tuple[str, ...]] = ("earlier", "product")

    def remember(self, evidence: Evidence[Any]) -> dict[str, Any]:
        rho, beta, earlier = evidence.decay, self.momentum, evidence.memory["earlier"]
        before = _before(evidence.t)
        total = debias(torch.full_like(rho, beta) if isinstance(rho, Tensor) else beta, before)
        product = evidence.g * (earlier / total)  # zero in the first step, which has no gradients before it
        return {
            "earlier": earlier * beta + evidence.g * (1.0 - beta),
            "product": evidence.memory["product"] * rho + product * (1.0 - rho),
        }

    def product(self, evidence: Evidence[Any]) -> Any:
        """p."""
        return evidence.memory["product"] / debias(evidence.decay, _before(evidence.t))

    def moment(self, evidence: Evidence[Any]) -> Any:
        p = self.product(evidence)
        return p.clamp(min=p.mean((1, 2), keepdim=True).clamp(min=0.0) * 0.1)

    def kappa(self, evidence: Evidence[Any]) -> Any:
        return evidence.ess

    def __call__(self, evidence: Evidence[Any]) -> Any:
        return self.moment(evidence) * self.kappa(evidence)


def _before(t: Any) -> Any:
    """How many steps came before t, and 1 where none did."""
    if isinstance(t, list):
        return [_before(one) for one in t]
    return (t - 1).clamp(min=1) if isinstance(t, Tensor) else max(t - 1, 1)
