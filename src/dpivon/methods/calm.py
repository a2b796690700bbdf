"""The calm step with a posterior around it."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpivon.methods.base import Method, Setup, rule_defaults
from dpivon.optim.calm import CalmOptimizer
from dpivon.optim.calm_rule import CURVATURE, Calm


def _build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    ess = options.pop("ess")
    ess = float(setup.dataset_size) if ess is None else ess
    return model, CalmOptimizer(model.parameters(), lr=setup.lr, ess=ess, **options)


METHODS = (
    Method(
        name="dp-calm",
        title="DP-Calm",
        summary="a step scaled by signal and noise; width of its own",
        optimises="weights, and the variance of a Gaussian",
        posterior="diagonal Gaussian over all weights",
        predicts="average over weight draws",
        choose="strong privacy: one learning rate for every σ, and a posterior that the noise does not narrow",
        reference="this library",
        lr=0.01,
        build=_build,
        defaults={"curvature": CURVATURE, "ess": None, **rule_defaults(Calm())},
        samples=32,
    ),
)
