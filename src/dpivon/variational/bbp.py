"""Bayes by Backprop: any optimizer, made to descend the variational objective.

    min over (M, σ) of  E_q[ℓ̄(W)] + (T/N) KL(q ‖ p),   q = N(M, diag σ²),  p = N(0, σ_p² I)
    KL = Σ log(σ_p/σ) + (σ² + M²)/(2 σ_p²) − ½,   ∂KL/∂M = M/σ_p²,   ∂KL/∂σ = σ/σ_p² − 1/σ

The gradient of E_q[ℓ̄] comes from the data: by reparameterisation it is an ordinary gradient of each example's loss in M and
in r (:mod:`dpivon.variational.spread`), so mean and spread are clipped together, as one vector, and released once. The gradient
of the KL knows no data. It is added here, after the release, where it needs neither clipping nor noise; N is the public number
of training examples. T = 1 is the posterior itself, T < 1 a colder one.

Blundell et al., *Weight Uncertainty in Neural Networks*, 2015; privately in Zhang et al., *Differentially Private Bayesian
Neural Networks on Accuracy, Privacy and Reliability*, 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import DpivonError, PrivacyError, bad, check_number
from dpivon.posterior import Posterior, unwrap
from dpivon.release import Release
from dpivon.variational.convert import posterior
from dpivon.variational.layers import Variational
from dpivon.variational.spread import std, std_slope


class BayesByBackprop(Optimizer):
    """``inner`` on the variational objective of a model made by :func:`dpivon.variational.variational`.

    >>> model = variational(model)
    >>> optimizer = BayesByBackprop(Adam(model.parameters(), lr=1e-2), model, dataset_size=len(train_set))

    State, parameter groups and ``state_dict`` are the inner optimizer's. ``p.grad`` is left as it was given.

    Args:
        inner: the optimizer that makes the steps. Its weight decay should be 0: the prior is here.
        model: the variational model that it optimises.
        dataset_size: the public N.
        prior_std: σ_p.
        temperature: T.
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        *,
        dataset_size: float,
        prior_std: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        fix = "Use the number of training examples"
        self.dataset_size = check_number("dataset_size", dataset_size, fix, above=0.0)
        self.prior_std = check_number("prior_std", prior_std, "Use a width such as 1.0", above=0.0)
        self.temperature = check_number("temperature", temperature, "Use 1 for the posterior itself", at_least=0.0)
        self.model = unwrap(model)
        if not any(isinstance(module, Variational) for module in self.model.modules()):
            fix = "Make the model with dpivon.variational.variational(model) first"
            raise bad("model", type(self.model).__name__, "has no Gaussian layers", fix)
        optimised = {p for group in inner.param_groups for p in group["params"]}
        if not any(p in optimised for p in self.model.parameters()):
            fix = "Make it from the variational model's parameters()"
            raise bad("inner", type(inner).__name__, "does not optimise this model", fix)
        self.inner = inner
        self._private = self._stepping = False
        self._init_optimizer_protocol()

    def _init_optimizer_protocol(self) -> None:
        """What ``Optimizer.__init__`` sets up besides state and groups, which are the inner optimizer's."""
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, release: Release | None = None) -> Any:
        """Add (T/N) ∇KL to the gradient in ``p.grad``, or in a private ``release``, and let the inner optimizer step."""
        if self._private and release is None:
            raise PrivacyError(
                "step() without a release: this BayesByBackprop belongs to a dpivon.DPOptimizer, and p.grad may hold raw "
                "gradients. Call step() on the optimizer that make_private returned."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        given = {p: p.grad for p in params if p.grad is not None} if release is None else dict(release.gradients)
        if not given:
            raise DpivonError("step() without a gradient: no parameter has p.grad; call loss.backward() before step().")
        kl = self.kl_gradient()
        total = {p: g + kl[p].to(g) if p in kl else g for p, g in given.items()}
        self._stepping = True
        try:
            if hasattr(self.inner, "bind_to_releases") and release is not None:
                cast(Any, self.inner).step(release=Release(total, release.variance))
            else:
                self._step_on(total)
        finally:
            self._stepping = False
        return loss

    def _step_on(self, total: dict[Tensor, Tensor]) -> None:
        before = {p: p.grad for p in total}
        try:
            for p, g in total.items():
                p.grad = g.view_as(p).to(p.dtype)
            self.inner.step()
        finally:
            for p in total:
                p.grad = before[p]

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
        return posterior(self.model if model is None else model, metadata)

    # ---- what the release boundary calls

    def bind_to_releases(self) -> None:
        """From now on learn from releases only. Called by ``dpivon.DPOptimizer``."""
        self._private = True
        if hasattr(self.inner, "bind_to_releases"):
            self.inner.bind_to_releases()
        else:
            self.inner.register_step_pre_hook(self._refuse_others)

    def _refuse_others(self, inner: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise PrivacyError(
                f"step() on the inner {type(inner).__name__}: p.grad may hold raw gradients. Call step() on the optimizer "
                "that make_private returned."
            )

    # ---- the optimizer protocol

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = ("inner", "model", "dataset_size", "prior_std", "temperature", "_private")
        return {key: self.__dict__[key] for key in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stepping = False
        self._init_optimizer_protocol()
        if self._private:
            self.bind_to_releases()

    def __repr__(self) -> str:
        return f"BayesByBackprop(prior_std={self.prior_std}, temperature={self.temperature}, {self.inner!r})"
