"""The calm rule as a ``torch.optim.Optimizer`` with a posterior."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpivon.optim.calm_rule import CURVATURE, Calm
from dpivon.optim.curvature import CurvatureEstimator, resolve
from dpivon.optim.ivon_rule import variance
from dpivon.optim.names import parameter_names
from dpivon.optim.precision import full_mean
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.posterior import Posterior
from dpivon.release import Release


class CalmOptimizer(RuleOptimizer):
    """:class:`~dpivon.optim.calm_rule.Calm` over all parameters of a model, and the Gaussian around where they are.

    >>> optimizer = CalmOptimizer(model.parameters(), lr=0.003, ess=len(train_set))

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: step size α.
        curvature: an estimator of a second moment, by name or as an object.
        **hyper: ``ess`` (N_ess, needed), ``temperature`` T, and the other hyperparameters of the rule.
    """

    rule: Calm
    kind: ClassVar[type[Calm]] = Calm

    def __init__(
        self, params: Any, *, lr: float, curvature: str | CurvatureEstimator = CURVATURE, **hyper: Any
    ) -> None:
        super().__init__(params, self.kind(resolve(curvature)), lr=lr, **hyper)

    def _update(self, group: dict[str, Any], params: list[Tensor], release: Release | None) -> None:
        if release is not None and release.batch_size is not None:
            group = {**group, "batch_size": release.batch_size}
        super()._update(group, params, release)

    @torch.no_grad()
    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """N(m, diag T/(N_ess (h + δ))), named as by :meth:`dpivon.IVON.posterior`."""
        names = parameter_names(self, model)
        mean, var = {}, {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    state = self._state(p, group)
                    mean[names[p]] = full_mean(p, state).detach().clone()
                    v = variance(state["hess"], ess=group["ess"], weight_decay=group["weight_decay"])
                    var[names[p]] = v * group["temperature"]
        return Posterior(
            mean=mean, variance=var, metadata={"method": self.rule.name, "curvature": self.rule.estimator.name}
        )
