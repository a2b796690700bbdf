"""Iterate averaging (EMA), for any optimizer: post-processing of released iterates, so it costs no privacy.

    ā_t = Σ_{k≤t} γᵗ⁻ᵏ m_k / Σ_{k≤t} γᵗ⁻ᵏ,   that is   ā ← ā + w_t (m_t − ā),   w_t = (1 − γ) / (1 − γᵗ)

Normalised, so that neither the initial weights nor zero weigh on it: ā_1 = m_1, and γ → 1 is the plain mean of all
iterates. Privacy noise moves every iterate by about α s a step; the average over the last 1/(1 − γ) of them loses most of
that. De et al., *Unlocking High-Accuracy Differentially Private Image Classification through Scale*, 2022.

Their spread around the average, with the same weights,

    V_t = Σ_{k≤t} γᵗ⁻ᵏ (m_k − ā_t)² / Σ_{k≤t} γᵗ⁻ᵏ,   that is   V ← (1 − w_t) (V + w_t (m_t − ā)²)  with ā from before,

is how far privacy noise and sampling move the weights within the window: the width of a Gaussian for any method, and
post-processing as well (Maddox et al., *A Simple Baseline for Bayesian Uncertainty in Deep Learning*, 2019, diagonal SWAG;
Mandt et al., 2017, on when it is the posterior's).
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
from dpivon.optim.parameters import full_dtype, full_mean, parameter_names
from dpivon.optim.rule import check_hyper, debias
from dpivon.optim.tensors import TensorList, Values, in_parts
from dpivon.posterior import Posterior
from dpivon.release import HasPosterior

_KEY = "dpivon_average"


def average_update(average: Values, mean: Values, *, decay: Any, t: Any) -> Values:
    """ā + (m − ā)(1 − γ)/(1 − γᵗ); at t = 1 this is m, whatever ā was, as long as it is finite."""
    return average + (mean - average) * _weight(decay, t)


def spread_update(spread: Values, average: Values, mean: Values, *, decay: Any, t: Any) -> Values:
    """V after the iterate ``mean``; ``average`` is the one before it. 0 at t = 1."""
    w = _weight(decay, t)
    rest = [1.0 - each for each in w] if isinstance(w, list) else 1.0 - w
    return (spread + (mean - average).square() * w) * rest


def _weight(decay: Any, t: Any) -> Any:
    factor = debias(decay, t)
    return [(1.0 - decay) / f for f in factor] if isinstance(factor, list) else (1.0 - decay) / factor


def window_decay(steps: float) -> float:
    """γ whose window 1/(1 − γ) is a tenth of a training of so many steps; .99 where their number is not known."""
    return 1.0 - 10.0 / (steps + 10.0) if steps else 0.99


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
        trace: above 0 keeps their spread too, and adds so many times V to the posterior's variance.
    """

    def __init__(self, optimizer: Optimizer, decay: float = 0.99, trace: float = 0.0) -> None:
        self.decay, self.trace = check_hyper("ema", decay), check_hyper("trace", trace)
        self.optimizer: Optimizer = getattr(optimizer, "original_optimizer", optimizer)
        if any(
            isinstance(getattr(h, "__self__", None), EMA) for h in self.optimizer._optimizer_step_post_hooks.values()
        ):
            raise bad("optimizer", type(self.optimizer).__name__, "is being averaged already", "Keep the first EMA")
        self._average: dict[Tensor, Tensor] = {}
        self._spread: dict[Tensor, Tensor] = {}
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
        alike: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        for p in self.params:
            if p.requires_grad:
                t = self._count[p] = self._count.get(p, 0) + 1
                alike.setdefault((t, full_dtype(p), p.device), []).append(p)
        for (t, *_), params in alike.items():
            for part in in_parts(params):
                self._follow(part, t)

    def _follow(self, params: list[Tensor], t: int) -> None:
        """The t-th iterate of these, in a few operations for all of them."""
        means = TensorList([self._mean(p) for p in params])
        before = TensorList([self._average.get(p, m).to(m) for p, m in zip(params, means, strict=True)])
        if self.trace:
            known = (self._spread.get(p, torch.zeros_like(m)).to(m) for p, m in zip(params, means, strict=True))
            spread = spread_update(TensorList(list(known)), before, means, decay=self.decay, t=t)
            self._spread.update(zip(params, spread, strict=True))
        self._average.update(zip(params, average_update(before, means, decay=self.decay, t=t), strict=True))

    def _mean(self, p: Tensor) -> Tensor:
        mean = full_mean(p, self.optimizer.state[p]) if p in self.optimizer.state else p.detach()
        return mean.to(full_dtype(p))

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
        if not self.trace:
            return replace(q, metadata={**q.metadata, "ema": f"{self.decay:g}"})
        names = parameter_names(self.optimizer, model)
        wider = {names[p]: self.trace * v for p, v in self._spread.items()}
        variance = {name: v + wider[name].to(v) if name in wider else v for name, v in q.variance.items()}
        own = {"ema": f"{self.decay:g}", "trace": f"{self.trace:g}"}
        return replace(q, variance=variance, metadata={**q.metadata, **own})

    # ---- in the optimizer's state_dict

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        average = {i: self._average[p] for i, p in enumerate(self.params) if p in self._average}
        count = {i: self._count[p] for i, p in enumerate(self.params) if p in self._count}
        state_dict[_KEY] = {"decay": self.decay, "average": average, "count": count}
        if self.trace:
            spread = {i: self._spread[p] for i, p in enumerate(self.params) if p in self._spread}
            state_dict[_KEY] |= {"trace": self.trace, "spread": spread}

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict.get(_KEY)
        if saved is None:
            raise DpivonError(
                "load_state_dict: the state has no average, but this optimizer is followed by an EMA. Load the state before "
                "attaching it, to start averaging from here."
            )
        params = self.params
        self.decay, self.trace = check_hyper("ema", saved["decay"]), check_hyper("trace", saved.get("trace", 0.0))
        spread = saved.get("spread", {})
        self._spread = {params[i]: v.detach().to(params[i].device, copy=True) for i, v in spread.items()}
        self._count = {params[i]: int(n) for i, n in saved["count"].items()}
        self._average = {params[i]: a.detach().to(params[i].device, copy=True) for i, a in saved["average"].items()}
        return {key: value for key, value in state_dict.items() if key != _KEY}
