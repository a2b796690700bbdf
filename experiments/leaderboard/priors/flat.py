"""Features in coordinates in which images of a random process have nearly one unit in every direction.

A linear layer under privacy learns with one step size and one size of noise in all directions, while a prior's features differ
in size by thousands. Their covariance Σ on images of the process is no one's data, so dividing by its root costs no privacy:
x ↦ A (x − μ) with A = c (Σ + λ σ̄² I)^(-1/2), where σ̄² is the mean variance. λ keeps directions that the process hardly shows
from being noise alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: λ, and the root mean square norm of an example's features.
RIDGE, NORM = 1.0, 4.0
#: Images of the process that Σ is of.
IMAGES = 8192


class Flat:
    """The map, from what features are on images of a process, [M, d]."""

    def __init__(self, seen: Tensor, ridge: float = RIDGE) -> None:
        seen = seen.double()
        mean = seen.mean(0)
        covariance = (seen - mean).T @ (seen - mean) / len(seen)
        sizes, axes = torch.linalg.eigh(covariance)
        sizes = sizes.clamp_min(0.0)
        roots = (sizes + ridge * sizes.mean().clamp_min(1e-12)).rsqrt()
        unit = NORM / float((sizes * roots.square()).sum().sqrt().clamp_min(1e-12))
        self.mean, self.matrix = mean.float(), (unit * (axes * roots) @ axes.T).float()

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) @ self.matrix

    @torch.no_grad()
    def undone(self, logits: nn.Linear) -> tuple[Tensor, Tensor]:
        """Weight and bias of the same logits on features as they are."""
        weight = logits.weight.to(self.matrix.device) @ self.matrix
        return weight, logits.bias.to(weight.device) - weight @ self.mean
