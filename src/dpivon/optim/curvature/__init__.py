"""Curvature estimators: from one step's released gradient to a target ĥ for IVON's curvature recursion."""

from __future__ import annotations

from dpivon.errors import bad
from dpivon.optim.curvature.apply import Matrices, by_tensor, estimate, matrix, memory_of, remembered
from dpivon.optim.curvature.averaged import Averaged
from dpivon.optim.curvature.base import CurvatureEstimator, Evidence
from dpivon.optim.curvature.cross import CrossMoment
from dpivon.optim.curvature.empirical_bayes import EmpiricalBayes
from dpivon.optim.curvature.floored import Floored
from dpivon.optim.curvature.gradsq import CorrectedSquaredGradient, SquaredGradient
from dpivon.optim.curvature.pooled_reparam import PooledReparameterised
from dpivon.optim.curvature.rank_one import RankOne
from dpivon.optim.curvature.rank_one_shrunk import ShrunkRankOne
from dpivon.optim.curvature.reparam import Reparameterised
from dpivon.optim.curvature.scale import SecondMoment
from dpivon.optim.curvature.signed import Signed
from dpivon.optim.curvature.whole import Whole

_SECOND_MOMENTS: tuple[type[SecondMoment], ...] = (
    Signed,
    Averaged,
    Floored,
    EmpiricalBayes,
    RankOne,
    ShrunkRankOne,
    Whole,
)
_MADE: tuple[CurvatureEstimator, ...] = (
    Reparameterised(),
    SquaredGradient(),
    CorrectedSquaredGradient(),
    *(kind() for kind in _SECOND_MOMENTS),
    *(kind(scale="batch") for kind in _SECOND_MOMENTS),
    CrossMoment(),
    PooledReparameterised(),
)
#: Every estimator by its name. They are immutable: what one remembers is kept by the optimizer.
ESTIMATORS: dict[str, CurvatureEstimator] = {estimator.name: estimator for estimator in _MADE}
_UPSTREAM_NAMES = {"price": "reparam"}


def resolve(curvature: str | CurvatureEstimator) -> CurvatureEstimator:
    """An estimator from its name (upstream's ``"price"`` included), or the object itself."""
    if isinstance(curvature, str):
        name = _UPSTREAM_NAMES.get(curvature, curvature)
        if name not in ESTIMATORS:
            known = ", ".join(map(repr, ESTIMATORS))
            raise bad("curvature", curvature, "is not a known estimator", f"Use one of {known}, or an object")
        return ESTIMATORS[name]
    if isinstance(curvature, type) or not isinstance(curvature, CurvatureEstimator):
        raise bad(
            "curvature",
            curvature,
            "is not a curvature estimator",
            "Give an object with `name`, `elementwise`, `needs_sample` and `__call__(evidence)`",
        )
    return curvature


__all__ = [
    "ESTIMATORS",
    "Averaged",
    "CorrectedSquaredGradient",
    "CrossMoment",
    "CurvatureEstimator",
    "EmpiricalBayes",
    "Evidence",
    "Floored",
    "Matrices",
    "PooledReparameterised",
    "RankOne",
    "Reparameterised",
    "SecondMoment",
    "ShrunkRankOne",
    "Signed",
    "SquaredGradient",
    "Whole",
    "by_tensor",
    "estimate",
    "matrix",
    "memory_of",
    "remembered",
    "resolve",
]
