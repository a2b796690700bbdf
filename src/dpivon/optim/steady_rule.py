"""The calm step in units of the weights: one dimensionless rate for every σ, C, b, number of steps and network.

Where there is no signal the calm step (:mod:`dpivon.optim.calm_rule`) is α times noise of known size, and T such steps are a
random walk of α √T in every coordinate. So α is given in the one unit that a walk can be compared with:

    α = r w / √T,   w the root mean square of the first weights (those of matrices and kernels)

r is how many times their own size noise alone would move the weights over the whole training. It is also the step that
the theory of noisy gradient descent asks for, distance over √T times the root mean square of what is released, with
r‖w‖ for the unknown distance. w is of the initialisation and T of the plan: both public. Where nobody knows T,
α_t = r w / (2 √t) has the same Σ α_t over T steps.

With few steps α is large, and the first of them goes one way: at T = 12 and r = 3.5 it moves the weights by their own size, and
most units of a ReLU layer never answer again. So the step climbs, by the step of a plan of ``ramp`` R steps each time:

    α_t = min(r w / √T, t r w / √R) = r w / √max(T, R/t²)

It is at its full size after √(R/T) steps. A plan of R steps or more is at once, and is what it was without a ramp, bit for bit.

``fade`` f lets the step shrink in a straight line to 1 − f of what it was, its mean square over the training unchanged:

    α_t = α (1 − f τ) / √(1 − f + f²/3),   τ = (t − ½)/T

so that noise alone still carries the weights by r w, most of it early, where there is time to come back. α is the one above,
ramp included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpivon.errors import bad
from dpivon.optim.calm_rule import Calm
from dpivon.optim.curvature import CurvatureEstimator, Matrices, resolve
from dpivon.optim.rule import REQUIRED, Hyper

#: One v̂ for all weights: the step goes where gradient descent goes, and is as long as its theory asks for.
CURVATURE = "whole-fisher"


@dataclass(frozen=True)
class Steady(Calm):
    """The rule. ``lr`` is r. Its curvature sets the step; ``temperature`` above 0 makes it the posterior's width as well."""

    estimator: CurvatureEstimator = field(default_factory=lambda: resolve(CURVATURE))

    name: ClassVar[str] = "steady"
    defaults: ClassVar[Mapping[str, float]] = {
        **Calm.defaults,
        "temperature": 0.0,
        "steps": 0.0,
        "scale": REQUIRED,
        "fade": 0.0,
        "ramp": 400.0,
    }

    def rate(self, hyper: Hyper, t: Any) -> Any:
        size, steps, fade, ramp = hyper["lr"] * hyper["scale"], hyper["steps"], hyper["fade"], hyper["ramp"]
        if isinstance(t, list):
            return [self.rate(hyper, each) for each in t]
        if isinstance(t, Tensor):
            now, planned = t.to(steps.dtype), steps.clamp(min=1.0)
            left = 1.0 - fade * ((now - 0.5) / planned).clamp(max=1.0)
            least = ramp / (now * now)
            known = torch.maximum(planned, least).rsqrt() * left * (1.0 - fade + fade * fade / 3.0).rsqrt()
            return size * torch.where(steps > 0, known, torch.maximum(4.0 * now, least).rsqrt())
        least = ramp / (t * t)
        if steps <= 0:
            return size / math.sqrt(max(4.0 * t, least))
        left = 1.0 - fade * min((t - 0.5) / steps, 1.0)
        return size / math.sqrt(max(steps, least)) * left / math.sqrt(1.0 - fade + fade * fade / 3.0)


def weight_scale(tensors: Sequence[Tensor], shapes: Matrices) -> float:
    """w of these parameters, flat or not, whose rows and columns are ``shapes``.

    Vectors (biases, gains) count only if there is nothing else: gains begin at 1 and biases often at 0, whatever the
    network. All zeros have the size of torch's own initialisation, 1/√(3 columns).
    """
    both = list(zip(tensors, shapes, strict=True))
    chosen = [(t, shape) for t, shape in both if min(shape) > 1] or both
    n = sum(t.numel() for t, _ in chosen)
    if n == 0:
        raise bad("scale", None, "no weight is trained, so there is none to take it from", "Set requires_grad on some")
    squares = sum(float(t.detach().double().square().sum()) for t, _ in chosen)
    if squares == 0.0:
        squares = sum(t.numel() / (3.0 * columns) for t, (_, columns) in chosen)
    return math.sqrt(squares / n)
