"""The θ-samples of the step under way: how they are drawn, which comes next, and what gradients at them are evidence of.

A step may use several samples θ_k = m + ε_k. Without privacy their gradients are averaged here as they come; under
privacy the boundary averages them before clipping, and only the perturbations ε_k are kept on this side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpivon.optim.curvature import Evidence
from dpivon.optim.ivon_rule import std
from dpivon.optim.parameters import dense, full_dtype
from dpivon.optim.tensors import TensorList, room_for


class Perturbation:
    """ε of a θ-sample, in parts as it was drawn: the parameters of a group, and what is added to them."""

    def __init__(self, parts: Sequence[tuple[list[Tensor], TensorList]]) -> None:
        self.parts = parts

    @property
    def params(self) -> list[Tensor]:
        return [p for params, _ in self.parts for p in params]

    @cached_property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """For those who ask parameter by parameter."""
        return {p: e for params, epsilon in self.parts for p, e in zip(params, epsilon, strict=True)}


def draw(
    states: Sequence[dict[str, Any]], group: dict[str, Any], normal: Callable[[TensorList], TensorList]
) -> TensorList:
    """ε = σ ⊙ N(0, I) for the parameters of a group, with σ² = 1 / (N_ess (h + δ))."""
    hess = TensorList([state["hess"] for state in states])
    return normal(hess) * std(hess, ess=group["ess"], weight_decay=group["weight_decay"])


@torch.no_grad()
def set_aside(tensors: list[Tensor], room: list[Tensor]) -> list[Tensor]:
    """Copies of these tensors, in ``room`` if they fit there, as they do from the second time on."""
    fits = len(room) == len(tensors) and all(
        kept.shape == t.shape and kept.dtype == t.dtype and kept.device == t.device
        for kept, t in zip(room, tensors, strict=True)
    )
    if not fits:
        with torch.inference_mode(False):  # a prediction may make what training will write to
            room = room_for(tensors, [t.dtype for t in tensors])
    torch._foreach_copy_(room, tensors)
    return room


@dataclass
class ThetaSamples:
    """Perturbations of the current logical step, in the order in which they are used.

    ``rewind`` starts over with the same samples: every micro-batch of one logical batch must see the same θ, or the
    released sum would be a gradient of no single objective.
    """

    perturbations: list[Perturbation] = field(default_factory=list)
    used: int = 0

    def next(self, draw: Callable[[], Perturbation]) -> Perturbation:
        if self.used == len(self.perturbations):
            self.perturbations.append(draw())
        self.used += 1
        return self.perturbations[self.used - 1]

    def rewind(self) -> None:
        self.used = 0

    def withdraw(self) -> None:
        """Forget the use just made, after it failed; the sample itself stays for the retry."""
        self.used = max(self.used - 1, 0)  # a new batch inside the block may have rewound already

    def clear(self) -> None:
        self.perturbations.clear()
        self.used = 0


@dataclass
class GradientAverage:
    """Running sums over θ-samples of g_k, g_k² and g_k ⊙ ε_k, for training without privacy."""

    count: int = 0
    g: dict[Tensor, Tensor] = field(default_factory=dict)
    g_squared: dict[Tensor, Tensor] = field(default_factory=dict)
    g_perturbation: dict[Tensor, Tensor] = field(default_factory=dict)

    def take(self, params: Sequence[Tensor], perturbation: Perturbation) -> None:
        """Add what ``p.grad`` holds for one sample, and empty it for the next."""
        gradients = [dense(p.grad).to(full_dtype(p)) for p in params]
        self.count += 1
        for p, g in zip(params, gradients, strict=True):
            for total, value in (
                (self.g, g),
                (self.g_squared, g.square()),
                (self.g_perturbation, g * perturbation.by_parameter[p]),
            ):
                total[p] = total[p] + value if p in total else value.clone()
            p.grad = None


def evidence_of_average(
    average: GradientAverage, params: Sequence[Tensor], hess: TensorList, group: dict[str, Any]
) -> Evidence[TensorList]:
    """Of several θ-samples, whose gradients were averaged as they came; without privacy."""
    g, g_squared, g_perturbation = (
        TensorList([total[p] for p in params]) / average.count
        for total in (average.g, average.g_squared, average.g_perturbation)
    )
    return _evidence(group, hess, g, g_squared, g_perturbation, 0.0, None)


def evidence_of_gradients(
    gradients: Mapping[Tensor, Tensor | None],
    params: Sequence[Tensor],
    hess: TensorList,
    group: dict[str, Any],
    *,
    epsilons: Sequence[Perturbation],
    noise_variance: float,
    batch_size: float | None,
) -> Evidence[TensorList]:
    """Of one gradient: that of ``p.grad``, or a released one. ``epsilons`` are the perturbations at which it was taken, if the
    estimator reads them."""
    g = TensorList([_as(h, dense(gradients[p])) for p, h in zip(params, hess, strict=True)])
    # K·g ⊙ mean(ε_k) = g ⊙ Σ ε_k: exact for one sample, unbiased for several of which only the average was released.
    known = [epsilon.by_parameter for epsilon in epsilons]
    sampled = bool(known) and all(p in epsilon for epsilon in known for p in params)
    shift = [sum((epsilon[p] for epsilon in known[1:]), start=known[0][p]) for p in params] if sampled else None
    g_perturbation = None if shift is None else g * TensorList(shift)
    return _evidence(group, hess, g, g.square(), g_perturbation, noise_variance, batch_size)


def _as(h: Tensor, g: Tensor) -> Tensor:
    return g if g.dtype is h.dtype else g.to(h.dtype)


def _evidence(
    group: dict[str, Any],
    hess: TensorList,
    g: TensorList,
    g_squared: TensorList,
    g_perturbation: TensorList | None,
    noise_variance: Any,
    batch_size: float | None,
) -> Evidence[TensorList]:
    return Evidence(
        g=g,
        g_squared=g_squared,
        g_perturbation=g_perturbation,
        noise_variance=noise_variance,
        hess=hess,
        ess=group["ess"],
        weight_decay=group["weight_decay"],
        batch_size=batch_size,
        decay=group["curvature_decay"],
    )
