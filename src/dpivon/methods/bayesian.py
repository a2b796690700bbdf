"""Methods with a posterior: DP-IVON, DP-Calm and DP-Steady, DP-SGLD, DP-BBP and DP-MC-Dropout."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpivon.dropout import MCDropout, dropouts, with_dropout
from dpivon.methods.base import Build, Method, Setup, options_of
from dpivon.optim.curvature import CorrectedSquaredGradient, CurvatureEstimator, Reparameterised, SquaredGradient
from dpivon.optim.ivon import IVON
from dpivon.optim.ivon_rule import IVONRule
from dpivon.optim.point import Adam
from dpivon.optim.sgld import CHAIN, PSGLD, SGLD, LangevinDynamics
from dpivon.optim.steady import Calm, CalmOptimizer, Steady, SteadyOptimizer
from dpivon.variational import BayesByBackprop, variational

_DRAWS = "average over weight draws"
_GAUSSIAN = "diagonal Gaussian over all weights"
#: IVON's own options, but for those that a method sets or that are for migration.
_IVON = {
    key: option.default
    for key, option in inspect.signature(IVON).parameters.items()
    if key not in ("params", "lr", "ess", "curvature", "hess_approx", "generator")
}


def _with_ess(kind: Any) -> Build:
    """``ess=None`` is the public N."""

    def build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
        options = dict(setup.options)
        ess = options.pop("ess")
        options |= {} if kind is not IVON else {"generator": setup.generator}
        return model, kind(model.parameters(), lr=setup.lr, ess=setup.dataset_size if ess is None else ess, **options)

    return build


def _ivon(
    name: str,
    title: str,
    estimator: CurvatureEstimator,
    summary: str,
    choose: str,
    *,
    first: str = "",
    private: bool = True,
) -> Method:
    return Method(
        name=name,
        title=title,
        summary=summary,
        choose=choose,
        reference=f"{first}Shen et al. 2024",
        lr=1.0,
        rule=IVONRule(estimator) if private else None,
        optimises="mean and variance of a Gaussian",
        posterior=_GAUSSIAN,
        predicts=_DRAWS,
        build=_with_ess(IVON),
        defaults={"curvature": estimator.name, "ess": None, **_IVON},
        samples=32,
    )


def _langevin(preconditioned: bool) -> Build:
    def build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
        facts: dict[str, Any] = {"lr": setup.lr, "ess": setup.dataset_size, "generator": setup.generator}
        return model, LangevinDynamics(model.parameters(), preconditioned=preconditioned, **facts, **setup.options)

    return build


def _bbp(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    made = variational(model, initial_std=options.pop("initial_std"))
    return made, BayesByBackprop(
        made, lr=setup.lr, dataset_size=setup.dataset_size, generator=setup.generator, **options
    )


def _dropout(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    p = options.pop("p")
    made = model if dropouts(model) else with_dropout(model, p)
    return made, MCDropout(made.parameters(), Adam(), lr=setup.lr, **options)


_CHAIN_WORDS: dict[str, Any] = {
    "optimises": "a chain of weights",
    "posterior": "up to 64 kept samples, with the temperature they were drawn at",
    "predicts": "average over kept samples",
    "samples": 64,
}

METHODS = (
    _ivon(
        "dp-ivon-gradsq",
        "DP-IVON-Gradsq",
        CorrectedSquaredGradient(),
        "variational Newton, noise-corrected squared gradients",
        "the paper's method: a posterior at the cost of DP-Adam, for weak to moderate privacy",
        first="Jamoussi et al.; ",
    ),
    _ivon(
        "dp-ivon-gradsq-plain",
        "DP-IVON-Gradsq (plain)",
        SquaredGradient(),
        "the same with the noise's variance left in",
        "ablation: the noise's variance, counted as curvature, narrows the posterior",
    ),
    _ivon(
        "dp-ivon-reparam",
        "DP-IVON (reparam)",
        Reparameterised(),
        "variational Newton, reparameterised curvature (IVON's own)",
        "ablation: the estimator that the paper argues against",
    ),
    _ivon("ivon", "IVON", Reparameterised(), "the same without privacy", "public data", private=False),
    Method(
        name="dp-calm",
        title="DP-Calm",
        summary="a step scaled by signal and noise; width of its own",
        choose="strong privacy: one learning rate for every σ, and a posterior that the noise does not narrow",
        reference="this library",
        lr=0.01,
        rule=Calm(),
        optimises="weights, and the variance of a Gaussian",
        posterior=_GAUSSIAN,
        predicts=_DRAWS,
        build=_with_ess(CalmOptimizer),
        defaults={"curvature": Calm().estimator.name, "ess": None, **options_of(Calm())},
        samples=32,
    ),
    Method(
        name="dp-steady",
        title="DP-Steady",
        summary="the calm step in units of the weights; averaged",
        choose="no tuning: one dimensionless rate for every ε and batch; made for some hundreds of steps or more",
        reference="this library; De et al. 2022; Maddox et al. 2019",
        lr=3.5,
        rule=Steady(),
        posterior="diagonal Gaussian: the spread of the averaged iterates",
        predicts=_DRAWS,
        build=_with_ess(SteadyOptimizer),
        defaults={"curvature": Steady().estimator.name, "ess": None, **options_of(Steady()), "scale": None},
        samples=32,
        averages=True,
        trace=1.0,
    ),
    Method(
        name="dp-sgld",
        title="DP-SGLD",
        summary="Langevin dynamics whose noise is the privacy noise",
        choose="a posterior that is not a Gaussian around one mode; memory for several sets of weights",
        reference="Welling and Teh 2011; Wang, Fienberg and Smola 2015",
        lr=1.0,
        rule=SGLD(),
        build=_langevin(False),
        defaults={**options_of(SGLD()), **CHAIN},
        **_CHAIN_WORDS,
    ),
    Method(
        name="dp-psgld",
        title="DP-pSGLD",
        summary="the same, preconditioned by the running average of g²",
        choose="as DP-SGLD, for badly scaled networks",
        reference="Li et al. 2016",
        lr=0.01,
        rule=PSGLD(),
        build=_langevin(True),
        defaults={**options_of(PSGLD()), **CHAIN},
        **_CHAIN_WORDS,
    ),
    Method(
        name="dp-bbp",
        title="DP-BBP",
        summary="Gaussian weights by reparameterisation, KL after release",
        choose="an explicit variational objective with a prior; twice the parameters and twice the time of DP-SGD",
        reference="Blundell et al. 2015; Zhang et al. 2023",
        lr=0.01,
        optimises="mean and standard deviation of a Gaussian, by Adam",
        posterior="diagonal Gaussian over linear and convolution layers, the rest points",
        predicts=_DRAWS,
        build=_bbp,
        defaults={"initial_std": 0.02, "prior_std": 1.0, "temperature": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        samples=32,
    ),
    Method(
        name="dp-mc-dropout",
        title="DP-MC-Dropout",
        summary="DP-Adam with dropout that stays live in prediction",
        choose="uncertainty for the price of dropout; its width is chosen by p, not learned",
        reference="Gal and Ghahramani 2016",
        lr=0.01,
        posterior="the network with units dropped at random",
        predicts="average over dropout masks",
        build=_dropout,
        defaults={"p": 0.05, **options_of(Adam())},
        samples=32,
    ),
)
