"""The θ-samples of the step under way, and the gradients taken at them.

A step may use several samples θ_k = m + ε_k. Without privacy their gradients are averaged here as they come; under
privacy the boundary averages them before clipping, and only the perturbations ε_k are kept on this side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

Perturbation = dict[Tensor, Tensor]


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

    def add(self, gradients: Iterable[tuple[Tensor, Tensor]], perturbation: Perturbation) -> None:
        self.count += 1
        for p, g in gradients:
            for total, value in (
                (self.g, g),
                (self.g_squared, g.square()),
                (self.g_perturbation, g * perturbation[p]),
            ):
                total[p] = total[p] + value if p in total else value.clone()
