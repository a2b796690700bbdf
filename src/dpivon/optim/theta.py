"""The θ-samples of the step under way: how they are drawn, which comes next, and the gradients taken at them.

A step may use several samples θ_k = m + ε_k. Without privacy their gradients are averaged here as they come; under
privacy the boundary averages them before clipping, and only the perturbations ε_k are kept on this side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

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

    def shift(self, params: Sequence[Tensor]) -> TensorList | None:
        """Σ ε_k of these parameters; None where not all of them were perturbed."""
        known = [perturbation.by_parameter for perturbation in self.perturbations]
        if not known or any(p not in epsilon for epsilon in known for p in params):
            return None
        return TensorList([sum((epsilon[p] for epsilon in known[1:]), start=known[0][p]) for p in params])

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

    def means(self, params: Sequence[Tensor]) -> list[TensorList]:
        """Of g_k, g_k² and g_k ⊙ ε_k over the samples."""
        totals = (self.g, self.g_squared, self.g_perturbation)
        return [TensorList([total[p] for p in params]) / self.count for total in totals]
