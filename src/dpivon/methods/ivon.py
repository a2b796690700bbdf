"""DP-IVON with each curvature estimator, and IVON without privacy."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpivon.methods.base import Method, Setup
from dpivon.optim.ivon import IVON

_REFERENCE = "Shen et al. 2024"
_DEFAULTS: dict[str, Any] = {
    "ess": None,  # N
    "hess_init": 1.0,
    "beta1": 0.9,
    "beta2": 0.99999,
    "weight_decay": 1e-4,
    "mc_samples": 1,
    "clip_radius": math.inf,
    "debias": True,
    "rescale_lr": True,
    "curvature_decay": 0.99,
}


def _build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    options = dict(setup.options)
    ess = options.pop("ess")
    ess = setup.dataset_size if ess is None else ess
    return model, IVON(model.parameters(), lr=setup.lr, ess=ess, generator=setup.generator, **options)


def _method(name: str, title: str, curvature: str, summary: str, choose: str, reference: str) -> Method:
    return Method(
        name=name,
        title=title,
        summary=summary,
        optimises="mean and variance of a Gaussian",
        posterior="diagonal Gaussian over all weights",
        predicts="average over weight draws",
        choose=choose,
        reference=reference,
        lr=1.0,
        build=_build,
        defaults={"curvature": curvature, **_DEFAULTS},
        samples=32,
    )


METHODS = (
    _method(
        "dp-ivon-gradsq",
        "DP-IVON-Gradsq",
        "gradsq-corrected",
        "variational Newton, noise-corrected squared gradients",
        "the paper's method: a posterior at the cost of DP-Adam, for weak to moderate privacy",
        "Jamoussi et al.; " + _REFERENCE,
    ),
    _method(
        "dp-ivon-gradsq-plain",
        "DP-IVON-Gradsq (plain)",
        "gradsq",
        "the same with the noise's variance left in",
        "ablation: the noise's variance, counted as curvature, narrows the posterior",
        _REFERENCE,
    ),
    _method(
        "dp-ivon-reparam",
        "DP-IVON (reparam)",
        "reparam",
        "variational Newton, reparameterised curvature (IVON's own)",
        "ablation: the estimator that the paper argues against",
        _REFERENCE,
    ),
    _method(
        "ivon",
        "IVON",
        "reparam",
        "the same without privacy",
        "public data",
        _REFERENCE,
    ),
)
