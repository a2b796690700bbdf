"""Curvature estimators: from one step's released gradient to a target ĥ for IVON's curvature recursion."""

from __future__ import annotations

from dpivon.errors import bad
from dpivon.optim.curvature.averaged import Averaged, EmpiricalBayes, SecondMoment, SquareAverage, Whole
from dpivon.optim.curvature.evidence import (
    CurvatureEstimator,
    Evidence,
    Matrices,
    estimate,
    matrix,
    memory_of,
    remembered,
)
from dpivon.optim.curvature.paper import CorrectedSquaredGradient, Reparameterised, SquaredGradient

#: Every estimator by its name. They are immutable: what one remembers is kept by the optimizer.
ESTIMATORS: dict[str, CurvatureEstimator] = {}
_UPSTREAM_NAMES = {"price": "reparam"}


def register(*estimators: CurvatureEstimator) -> None:
    """Make estimators known by their names to every optimizer, stack and study of this process.

    Raises:
        ArgumentError: not an estimator, or its name belongs to a different one.
    """
    for estimator in map(resolve, estimators):
        if ESTIMATORS.get(estimator.name, estimator) != estimator:
            fix = "Give it a name of its own"
            raise bad("curvature", estimator.name, "is the name of another estimator", fix)
        ESTIMATORS[estimator.name] = estimator


def resolve(curvature: str | CurvatureEstimator) -> CurvatureEstimator:
    """An estimator from its name (upstream's ``"price"`` included), or the object itself."""
    if isinstance(curvature, str):
        name = _UPSTREAM_NAMES.get(curvature, curvature)
        if name not in ESTIMATORS:
            known = ", ".join(map(repr, ESTIMATORS))
            fix = f"Use one of {known}, or an object; for its studies `python -m experiments.strong_privacy`"
            raise bad("curvature", curvature, "is not a known estimator", fix)
        return ESTIMATORS[name]
    if isinstance(curvature, type) or not isinstance(curvature, CurvatureEstimator):
        raise bad(
            "curvature",
            curvature,
            "is not a curvature estimator",
            "Give an object with `name`, `elementwise`, `needs_sample` and `__call__(evidence)`",
        )
    return curvature


register(Reparameterised(), SquaredGradient(), CorrectedSquaredGradient())
for _kind in (Averaged, EmpiricalBayes, Whole):
    register(_kind(), _kind(scale="batch"))

__all__ = [
    "ESTIMATORS",
    "Averaged",
    "CorrectedSquaredGradient",
    "CurvatureEstimator",
    "EmpiricalBayes",
    "Evidence",
    "Matrices",
    "Reparameterised",
    "SecondMoment",
    "SquareAverage",
    "SquaredGradient",
    "Whole",
    "estimate",
    "matrix",
    "memory_of",
    "register",
    "remembered",
    "resolve",
]
