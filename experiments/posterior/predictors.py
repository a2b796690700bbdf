"""Predictors that one trained run allows without another look at the data: post-processing, so they cost no privacy.

Every predictor is a list of parameter rows whose probabilities are averaged. All are centred at the same point, the average of
the run's iterates, so that what differs is the spread around it and nothing else:

- ``mean``: that point alone;
- ``own``: the posterior that the method itself keeps (DP-IVON-Gradsq, DP-Steady), times a scale;
- ``swag``: a low-rank plus diagonal Gaussian of the iterates of the second half (Maddox et al., 2019), times a scale.
  Small scales are what noise-aware inference of the average would give (DPVIm, NA-DPVI):
  the average is known better than one iterate;
- ``iterates``: those iterates themselves;
- ``one``: the same width for every weight, in shares of the weights' root mean square;
- ``last``: ``swag`` in the last layer alone, as a Laplace approximation there would have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

DRAWS = 16
SCALES = {
    "own": (0.5, 1.0, 2.0),
    "swag": (0.25, 0.5, 1.0, 2.0),
    "one": (0.05, 0.1, 0.2, 0.4),
    "last": (1.0, 4.0, 16.0),
}


@dataclass(frozen=True, eq=False)
class Trained:
    """What a run leaves: the average of its iterates, its own posterior's deviation, and iterates [M, P]."""

    average: Tensor
    std: Tensor
    iterates: Tensor
    last: int  # weights of the last layer, which stand at the end of a row

    @property
    def wanted(self) -> list[tuple[str, float]]:
        """Every predictor with its scale."""
        found = [("mean", 0.0), ("iterates", 1.0)]
        kinds = [kind for kind in SCALES if kind != "own" or bool((self.std > 0).any())]
        return found + [(kind, scale) for kind in kinds for scale in SCALES[kind]]

    def rows(self, kind: str, scale: float, draws: int, g: Generator) -> list[Tensor]:
        """The rows of parameters of a predictor."""
        if kind == "mean":
            return [self.average]
        if kind == "iterates":
            places = torch.linspace(0, len(self.iterates) - 1, min(draws, len(self.iterates))).round().long()
            return [self.iterates[i] for i in places.tolist()]
        return [self.average + scale * self._noise(kind, g) for _ in range(draws)]

    def _noise(self, kind: str, g: Generator) -> Tensor:
        one = torch.randn(self.average.shape, generator=g, device=self.average.device)
        if kind == "own":
            return self.std * one
        if kind == "one":
            return self.average.square().mean().sqrt() * one
        deviations = self.iterates - self.iterates.mean(0)
        m = len(deviations)
        each = torch.randn(m, generator=g, device=self.average.device)
        noise = deviations.square().mean(0).sqrt() * one / math.sqrt(2) + each @ deviations / math.sqrt(2 * (m - 1))
        if kind == "last":
            noise[: len(noise) - self.last] = 0.0
        return noise
