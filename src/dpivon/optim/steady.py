"""The steady rule as a ``torch.optim.Optimizer`` with a posterior."""

from __future__ import annotations

from typing import Any, ClassVar

from dpivon.optim.calm import CalmOptimizer
from dpivon.optim.calm_rule import Calm
from dpivon.optim.curvature import CurvatureEstimator, matrix
from dpivon.optim.steady_rule import CURVATURE, Steady, weight_scale


class SteadyOptimizer(CalmOptimizer):
    """:class:`~dpivon.optim.steady_rule.Steady` over all parameters of a model.

    >>> optimizer = SteadyOptimizer(model.parameters(), steps=epochs * len(loader), ess=len(train_set))

    Args:
        params: parameters, named parameters, or parameter groups. w is of all of them, v̂ of each group by itself: the step
            goes in the direction of the gradient within a group, and is as long in each.
        lr: r, dimensionless.
        curvature: an estimator of a second moment, by name or as an object; by default one v̂ for all weights of a group.
        scale: w; by default that of the parameters as they are now.
        **hyper: ``ess`` (N_ess, needed), ``steps`` T, ``ramp`` R, and the other hyperparameters of the rule.
    """

    kind: ClassVar[type[Calm]] = Steady

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 3.5,
        curvature: str | CurvatureEstimator = CURVATURE,
        scale: float | None = None,
        **hyper: Any,
    ) -> None:
        super().__init__(params, lr=lr, curvature=curvature, scale=1.0 if scale is None else scale, **hyper)
        if scale is None:
            everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            own = weight_scale(everything, [matrix(p.shape) for p in everything])
            for group in self.param_groups:
                group["scale"] = own
