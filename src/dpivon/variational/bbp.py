"""Bayes by Backprop: any update rule, made to descend the variational objective.

    min over (M, σ) of  E_q[ℓ̄(W)] + (T/N) KL(q ‖ p),   q = N(M, diag σ²),  p = N(0, σ_p² I)
    KL = Σ log(σ_p/σ) + (σ² + M²)/(2 σ_p²) − ½,   ∂KL/∂M = M/σ_p²,   ∂KL/∂σ = σ/σ_p² − 1/σ

The gradient of E_q[ℓ̄] comes from the data: by reparameterisation it is an ordinary gradient of each example's loss in M and
in r (:mod:`dpivon.variational.layers`), so mean and spread are clipped together, as one vector, and released once. The gradient
of the KL knows no data. It is added here, after the release, where it needs neither clipping nor noise; N is the public number
of training examples. T = 1 is the posterior itself, T < 1 a colder one.

Blundell et al., *Weight Uncertainty in Neural Networks*, 2015; privately in Zhang et al., *Differentially Private Bayesian
Neural Networks on Accuracy, Privacy and Reliability*, 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import bad, check_number
from dpivon.optim.parameters import dense, full_mean
from dpivon.optim.point import Adam
from dpivon.optim.rule import UpdateRule
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.posterior import Posterior, unwrap
from dpivon.release import Release
from dpivon.variational.layers import Variational, is_variational, posterior, std, std_slope


class BayesByBackprop(RuleOptimizer):
    """A rule on the variational objective of a model made by :func:`dpivon.variational.variational`.

    >>> model = variational(model)
    >>> optimizer = BayesByBackprop(model, lr=1e-2, dataset_size=len(train_set))

    Args:
        model: the variational model; all its parameters are optimised.
        lr: step size.
        dataset_size: the public N.
        rule: what makes the steps; Adam if None. Its weight decay is 0 by default: the prior is here.
        prior_std: σ_p.
        temperature: T.
        generator: source of the rule's own normals, if it draws any.
        **hyper: the rule's hyperparameters.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        dataset_size: float,
        rule: UpdateRule | None = None,
        prior_std: float = 1.0,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        **hyper: float,
    ) -> None:
        fix = "Use the number of training examples"
        self.dataset_size = check_number("dataset_size", dataset_size, fix, above=0.0)
        self.prior_std = check_number("prior_std", prior_std, "Use a width such as 1.0", above=0.0)
        self.temperature = check_number("temperature", temperature, "Use 1 for the posterior itself", at_least=0.0)
        self.model = unwrap(model)
        if not is_variational(self.model):
            fix = "Make the model with dpivon.variational.variational(model) first"
            raise bad("model", type(self.model).__name__, "has no Gaussian layers", fix)
        rule = Adam() if rule is None else rule
        own = {"weight_decay": 0.0, "ess": self.dataset_size}
        named: dict[str, Any] = {**{key: value for key, value in own.items() if key in rule.defaults}, **hyper}
        super().__init__(self.model.parameters(), rule, lr=lr, generator=generator, **named)

    def _update(self, group: dict[str, Any], params: list[Tensor], release: Release | None) -> None:
        """The rule's step on gradient + (T/N) ∇KL. ``p.grad`` stays what it was."""
        kl = self.kl_gradient()
        given = release.gradients if release is not None else {p: dense(p.grad) for p in params}
        total = {p: given[p] + kl[p].to(given[p]) if p in kl else given[p] for p in params}
        super()._update(group, params, Release(total, 0.0 if release is None else release.variance))

    @torch.no_grad()
    def kl_gradient(self) -> dict[Tensor, Tensor]:
        """(T/N) ∇KL for every mean and spread that is trained."""
        scale, precision = self.temperature / self.dataset_size, self.prior_std**-2
        out: dict[Tensor, Tensor] = {}
        for m, r, std0 in self._pairs():
            out[m] = m * (scale * precision)
            sigma = std(r, std0)
            out[r] = (sigma * precision - 1.0 / sigma) * std_slope(r, std0) * scale
        return out

    @torch.no_grad()
    def kl(self) -> float:
        """KL(q ‖ p) in nats, of all Gaussian weights."""
        total = 0.0
        for m, r, std0 in self._pairs():
            sigma, prior = std(r.double(), std0), self.prior_std
            each = (prior / sigma).log() + (sigma.square() + m.double().square()) / (2.0 * prior**2) - 0.5
            total += float(each.sum())
        return total

    def _pairs(self) -> list[tuple[Tensor, Tensor, float]]:
        layers = [module for module in self.model.modules() if isinstance(module, Variational)]
        return [
            (getattr(layer.mean, name), r, layer.spread.initial_std)
            for layer in layers
            for name, r in layer.spread.named_parameters()
        ]

    def posterior(self, model: nn.Module | None = None) -> Posterior:
        """The Gaussian posterior, under the names of the model before it was made variational."""
        metadata = {"method": "bbp", "prior_std": repr(self.prior_std), "temperature": repr(self.temperature)}
        model = self.model if model is None else model
        return posterior(model, metadata, lambda p: full_mean(p, self.state.get(p, {})))

    def __getstate__(self) -> dict[str, Any]:
        own = ("model", "dataset_size", "prior_std", "temperature")
        return super().__getstate__() | {key: self.__dict__[key] for key in own}
