"""The reparameterised estimator, pooled over a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dpivon.optim.curvature.base import Evidence
from dpivon.optim.curvature.reparam import Reparameterised


@dataclass(frozen=True)
class PooledReparameterised:
    """ĥ = mean over the tensor's n weights of g ⊙ (θ − m)/σ², σ² = 1/(N_ess (h + δ)), the same for all of them.

    Bias: none for the tensor's mean of the expected diagonal Hessian, with privacy noise as without (Price's theorem; the
    noise is independent of θ − m). As an estimate of one weight's it has the bias of pooling. Unlike a square of gradients it
    sees the Hessian itself, negative or not.
    Variance due to the privacy noise: s² N_ess (h + δ) for one weight, where it makes the estimator useless, and

        Var ĥ = s² N_ess · mean(h + δ) / n

    for the mean, since the θ_i − m_i are independent; a smaller N_ess improves it, as a wider sample feels more curvature.
    Where each weight has its own s_i² it is N_ess · mean(s² (h + δ)) / n.
    """

    name: ClassVar[str] = "reparam-pooled"
    elementwise: ClassVar[bool] = False
    pools: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = True

    def __call__(self, evidence: Evidence[Tensor]) -> Tensor | None:
        each: Tensor | None = Reparameterised()(evidence)
        return None if each is None else each.mean((1, 2), keepdim=True).expand_as(each)
