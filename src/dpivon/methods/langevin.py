"""DP-SGLD and its preconditioned form."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpivon.methods.base import Build, Method, Setup, rule_defaults
from dpivon.optim.sgld import LangevinDynamics
from dpivon.optim.sgld_rule import PSGLD, SGLD

_CHAIN = {"burn_in": 0.5, "thinning": 1, "max_samples": 64, "max_bytes": 2**28}


def _build(preconditioned: bool) -> Build:
    def build(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
        return model, LangevinDynamics(
            model.parameters(),
            lr=setup.lr,
            ess=setup.dataset_size,
            preconditioned=preconditioned,
            generator=setup.generator,
            **setup.options,
        )

    return build


METHODS = (
    Method(
        name="dp-sgld",
        title="DP-SGLD",
        summary="Langevin dynamics whose noise is the privacy noise",
        optimises="a chain of weights",
        posterior="up to 64 kept samples, with the temperature they were drawn at",
        predicts="average over kept samples",
        choose="a posterior that is not a Gaussian around one mode; memory for several sets of weights",
        reference="Welling and Teh 2011; Wang, Fienberg and Smola 2015",
        lr=1.0,
        build=_build(False),
        defaults={**rule_defaults(SGLD()), **_CHAIN},
        samples=64,
    ),
    Method(
        name="dp-psgld",
        title="DP-pSGLD",
        summary="the same, preconditioned by the running average of g²",
        optimises="a chain of weights",
        posterior="up to 64 kept samples, with the temperature they were drawn at",
        predicts="average over kept samples",
        choose="as DP-SGLD, for badly scaled networks",
        reference="Li et al. 2016",
        lr=0.01,
        build=_build(True),
        defaults={**rule_defaults(PSGLD()), **_CHAIN},
        samples=64,
    ),
)
