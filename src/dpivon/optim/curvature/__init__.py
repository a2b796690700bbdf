"""Curvature estimators: from one step's released gradient to a target ĥ for IVON's curvature recursion."""

from __future__ import annotations

from torch import Tensor

from dpivon.errors import bad
from dpivon.optim.curvature.base import CurvatureEstimator, Evidence
from dpivon.optim.curvature.gradsq import CorrectedSquaredGradient, SquaredGradient
from dpivon.optim.curvature.reparam import Reparameterised
from dpivon.optim.tensors import TensorList

ESTIMATORS: dict[str, type[CurvatureEstimator]] = {
    "reparam": Reparameterised,
    "gradsq": SquaredGradient,
    "gradsq-corrected": CorrectedSquaredGradient,
}
_UPSTREAM_NAMES = {"price": "reparam"}


def resolve(curvature: str | CurvatureEstimator) -> CurvatureEstimator:
    """An estimator from its name (upstream's ``"price"`` included), or the object itself."""
    if isinstance(curvature, str):
        name = _UPSTREAM_NAMES.get(curvature, curvature)
        if name not in ESTIMATORS:
            known = ", ".join(map(repr, ESTIMATORS))
            raise bad("curvature", curvature, "is not a known estimator", f"Use one of {known}, or an object")
        return ESTIMATORS[name]()
    if isinstance(curvature, type) or not isinstance(curvature, CurvatureEstimator):
        raise bad(
            "curvature",
            curvature,
            "is not a curvature estimator",
            "Give an object with `name`, `elementwise`, `needs_sample` and `__call__(evidence)`",
        )
    return curvature


def estimate(estimator: CurvatureEstimator, evidence: Evidence[TensorList]) -> TensorList | None:
    """ĥ for all parameters of a model: at once where the estimator allows it, tensor by tensor otherwise."""
    if estimator.needs_sample and evidence.g_perturbation is None:
        return None
    if estimator.elementwise:
        everywhere: TensorList | None = estimator(evidence)
        return everywhere
    return TensorList([estimator(_tensor(evidence, i)) for i in range(len(evidence.g))])


def _tensor(evidence: Evidence[TensorList], i: int) -> Evidence[Tensor]:
    perturbation = evidence.g_perturbation
    return Evidence(
        g=evidence.g[i],
        g_squared=evidence.g_squared[i],
        g_perturbation=None if perturbation is None else perturbation[i],
        noise_variance=evidence.noise_variance,
        hess=evidence.hess[i],
        ess=evidence.ess,
        weight_decay=evidence.weight_decay,
    )


__all__ = [
    "ESTIMATORS",
    "CorrectedSquaredGradient",
    "CurvatureEstimator",
    "Evidence",
    "Reparameterised",
    "SquaredGradient",
    "estimate",
    "resolve",
]
