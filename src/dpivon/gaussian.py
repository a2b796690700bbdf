"""Regression: a Gaussian likelihood on a target of declared range, its loss per example, and scores of its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.bounds import Bounds
from dpivon.errors import bad, check_number
from dpivon.predict import RegressionPrediction

LEARNED = "learned"
COVERAGE, WIDTH = 0.95, 1.959963984540054  # of an interval, and its half width in standard deviations
_LEAST, _START = math.log(0.02), 1.5  # the smallest learned log s, of half the target's range; it begins at s = 0.5


@dataclass(frozen=True)
class GaussianNoise:
    """y ~ N(f(x), s²) on the target's declared range, mapped to [−1, 1]. Called, it returns one loss per example.

    ``std`` is a declared s. With None it is learned: the network has a second output, and s between 0.02 and 1 follows from
    it, row by row. It needs no release of its own: its gradient is a part of the example's gradient, which is clipped whole.
    """

    std: float | None = None

    @classmethod
    def given(cls, std: Any) -> GaussianNoise:
        """Of a number, or of "learned"."""
        if isinstance(std, str) and std == LEARNED:
            return cls()
        return cls(check_number("noise_std", std, "Pass a width such as 0.25, or 'learned'", above=0.0))

    @property
    def outputs(self) -> int:
        return 1 if self.std is not None else 2

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each row, [B] each, from the network's output [B, 1] or [B, 2]."""
        if outputs.ndim != 2 or outputs.shape[1] != self.outputs:
            problem = f"is not [B, {self.outputs}]"
            raise bad("model output shape", tuple(outputs.shape), problem, "Return the mean, and what gives the noise")
        mean = outputs[:, 0]
        if self.std is not None:
            return mean, torch.full_like(mean, self.std**2)
        return mean, (2 * _LEAST * (1 - torch.sigmoid(outputs[:, 1] + _START))).exp()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """−log N(y; f(x), s²) up to a constant; times s² where s is learned.

        Where s is small most gradients are larger than C, and clipping them would bias s downwards. The factor s², itself
        not differentiated, keeps the minimum and makes gradients of the size of the residuals: β = 1 of Seitzer et al., 2022
        (arXiv:2203.09168).
        """
        mean, variance = self.moments(outputs)
        losses = ((targets - mean).square() / variance + variance.log()) / 2
        return losses if self.std is not None else losses * variance.detach()


def unscaled(found: RegressionPrediction, bounds: Bounds) -> RegressionPrediction:
    """A prediction on [−1, 1] in the units of the target."""
    unit = float(bounds.unit[0])
    mean = float(bounds.low[0]) + (found.mean.double() + 1) * unit
    return RegressionPrediction(
        mean, *(v.double() * unit**2 for v in (found.variance, found.epistemic, found.aleatoric))
    )


def interval(found: RegressionPrediction) -> tuple[Tensor, Tensor]:
    """Low and high of the 95 % interval of a Gaussian with the predictive mean and variance."""
    half = WIDTH * found.variance.sqrt()
    return found.mean - half, found.mean + half


def regression_scores(found: RegressionPrediction, targets: Tensor) -> dict[str, float]:
    """R², RMSE, MAE, NLL in nats, and the share and mean width of 95 % intervals. R² is NaN if all targets are the same."""
    error = targets.double() - found.mean
    low, high = interval(found)
    inside = (targets >= low) & (targets <= high)
    spread = (targets.double() - targets.double().mean()).square().mean()
    nll = (error.square() / found.variance + (2 * math.pi * found.variance).log()) / 2
    return {
        "r2": float(1 - error.square().mean() / spread) if spread > 0 else math.nan,
        "rmse": float(error.square().mean().sqrt()),
        "mae": float(error.abs().mean()),
        "nll": float(nll.mean()),
        "coverage_95": float(inside.double().mean()),
        "interval_width": float((high - low).mean()),
    }
