"""Iterate averaging (EMA), for any optimizer: post-processing of released iterates, so it costs no privacy.

    ā_t = Σ_{k≤t} γᵗ⁻ᵏ m_k / Σ_{k≤t} γᵗ⁻ᵏ,   that is   ā ← ā + w_t (m_t − ā),   w_t = (1 − γ) / (1 − γᵗ)

Normalised, so that neither the initial weights nor zero weigh on it: ā_1 = m_1, and γ → 1 is the plain mean of all
iterates. Privacy noise moves every iterate by about α s a step; the average over the last 1/(1 − γ) of them loses most of
that. De et al., *Unlocking High-Accuracy Differentially Private Image Classification through Scale*, 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import DpivonError, bad
from dpivon.optim.hyper import check_hyper
from dpivon.optim.precision import full_dtype, full_mean
from dpivon.optim.releases import HasPosterior
from dpivon.optim.rule import debias
from dpivon.optim.tensors import Values
from dpivon.posterior import Posterior

_KEY = "dpivon_average"


def average_update(average: Values, mean: Values, *, decay: Any, t: Any) -> Values:
    """ā + (m − ā)(1 − γ)/(1 − γᵗ); at t = 1 this is m, whatever ā was, as long as it is finite."""
    factor = debias(decay, t)
    weight: Any = [(1.0 - decay) / f for f in factor] if isinstance(factor, list) else (1.0 - decay) / factor
    return average + (mean - average) * weight


class EMA:
    """Follows an optimizer and averages its iterates.

    >>> average = EMA(optimizer, decay=0.99)      # plain, or what make_private returned
    >>> ...                                       # train as usual
    >>> with average.applied(): evaluate(model)
    >>> predict(model, average.posterior(model), x)

    It sees what stands in the parameters after each step of the (inner) optimizer: the mean of an IVON posterior, the
    weights of anything else. The averages travel in the optimizer's ``state_dict()``. A deep copy of the optimizer is
    not followed: torch copies no hooks.

    Args:
        optimizer: what makes the steps, private or not.
        decay: γ in [0, 1); the average is worth about 1/(1 − γ) steps.
    """

    def __init__(self, optimizer: Optimizer, decay: float = 0.99) -> None:
        self.decay = check_hyper("ema", decay)
        self.optimizer: Optimizer = getattr(optimizer, "original_optimizer", optimizer)
        if any(
            isinstance(getattr(h, "__self__", None), EMA) for h in self.optimizer._optimizer_step_post_hooks.values()
        ):
            raise bad("optimizer", type(self.optimizer).__name__, "is being averaged already", "Keep the first EMA")
        self._average: dict[Tensor, Tensor] = {}
        self._count: dict[Tensor, int] = {}
        self.optimizer.register_step_post_hook(self._after_step)
        self.optimizer.register_state_dict_post_hook(self._save)
        self.optimizer.register_load_state_dict_pre_hook(self._load)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that are followed."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in self.params:
            if p.requires_grad:
                mean = full_mean(p, self.optimizer.state[p]) if p in self.optimizer.state else p.detach()
                mean = mean.to(full_dtype(p))
                t = self._count[p] = self._count.get(p, 0) + 1
                before = self._average.get(p, mean).to(mean)
                self._average[p] = average_update(before, mean, decay=self.decay, t=t)

    def average(self, p: Tensor) -> Tensor:
        """ā of one parameter; the parameter itself before the first step."""
        return self._average.get(p, p.detach())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model's parameters are their averages; afterwards they are the iterates again."""
        params = [p for p in self.params if p in self._average]
        saved = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p in params:
                p.copy_(self._average[p])
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(params, saved, strict=True):
                    p.copy_(value)

    def posterior(self, model: nn.Module) -> Any:
        """The optimizer's posterior around the average; a point where the posterior is not around anything (samples)."""
        with self.applied():
            q = self.optimizer.posterior(model) if isinstance(self.optimizer, HasPosterior) else None
            if not isinstance(q, Posterior):
                q = Posterior.point(model)
        return replace(q, metadata={**q.metadata, "ema": f"{self.decay:g}"})

    # ---- in the optimizer's state_dict

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        average = {i: self._average[p] for i, p in enumerate(self.params) if p in self._average}
        count = {i: self._count[p] for i, p in enumerate(self.params) if p in self._count}
        state_dict[_KEY] = {"decay": self.decay, "average": average, "count": count}

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict.get(_KEY)
        if saved is None:
            raise DpivonError(
                "load_state_dict: the state has no average, but this optimizer is followed by an EMA. Load the state before "
                "attaching it, to start averaging from here."
            )
        params = self.params
        self.decay = check_hyper("ema", saved["decay"])
        self._count = {params[i]: int(n) for i, n in saved["count"].items()}
        self._average = {params[i]: a.detach().to(params[i].device, copy=True) for i, a in saved["average"].items()}
        return {key: value for key, value in state_dict.items() if key != _KEY}
