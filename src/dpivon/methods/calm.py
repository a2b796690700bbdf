"""The calm step with a posterior around it, and the recipe made of it."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpivon.methods.base import Build, Method, Setup, rule_defaults
from dpivon.optim import calm_rule, steady_rule
from dpivon.optim.calm import CalmOptimizer
from dpivon.optim.calm_rule import Calm
from dpivon.optim.steady import SteadyOptimizer
from dpivon.optim.steady_rule import Steady


def _build(kind: type[CalmOptimizer]) -> Build:
    def build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
        options = dict(setup.options)
        ess = options.pop("ess")
        ess = float(setup.dataset_size) if ess is None else ess
        return model, kind(model.parameters(), lr=setup.lr, ess=ess, **options)

    return build


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
        build=_build(CalmOptimizer),
        defaults={"curvature": calm_rule.CURVATURE, "ess": None, **rule_defaults(Calm())},
        samples=32,
    ),
    Method(
        name="dp-steady",
        title="DP-Steady",
        summary="the calm step in units of the weights; averaged",
        optimises="weights",
        posterior="diagonal Gaussian: the spread of the averaged iterates",
        predicts="average over weight draws",
        choose="no tuning: one dimensionless rate for every ε, batch and number of steps",
        reference="this library; De et al. 2022; Maddox et al. 2019",
        lr=3.5,
        build=_build(SteadyOptimizer),
        defaults={"curvature": steady_rule.CURVATURE, "ess": None, **rule_defaults(Steady()), "scale": None},
        samples=32,
        averages=True,
        trace=1.0,
    ),
)
