"""One step of IVON over the parameters of a group: what their gradients are evidence of, and what becomes of the posterior.

The formulas are elsewhere: the update in :mod:`dpivon.optim.ivon_rule`, the curvature target in an estimator of
:mod:`dpivon.optim.curvature`. This gathers what they read and hands on what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dpivon.optim import curvature as curvatures
from dpivon.optim import ivon_state
from dpivon.optim.curvature import CurvatureEstimator, Evidence
from dpivon.optim.ivon_rule import IVONState, ivon_update
from dpivon.optim.ivon_state import State
from dpivon.optim.precision import dense, full_means
from dpivon.optim.rule import debias
from dpivon.optim.tensors import TensorList
from dpivon.optim.theta import GradientAverage, Perturbation
from dpivon.shards import local


def evidence_of_average(
    average: GradientAverage, params: Sequence[Tensor], hess: TensorList, group: dict[str, Any]
) -> Evidence[TensorList]:
    """Of several θ-samples, whose gradients were averaged as they came; without privacy."""
    g, g_squared, g_perturbation = (
        TensorList([total[p] for p in params]) / average.count
        for total in (average.g, average.g_squared, average.g_perturbation)
    )
    return _evidence(group, hess, g, g_squared, g_perturbation, 0.0, None)


def evidence_of_gradients(
    gradients: Mapping[Tensor, Tensor | None],
    params: Sequence[Tensor],
    hess: TensorList,
    group: dict[str, Any],
    *,
    epsilons: Sequence[Perturbation],
    noise_variance: float,
    batch_size: float | None,
) -> Evidence[TensorList]:
    """Of one gradient: that of ``p.grad``, or a released one. ``epsilons`` are the perturbations at which it was taken, if the
    estimator reads them."""
    g = TensorList([_as(h, dense(gradients[p])) for p, h in zip(params, hess, strict=True)])
    # K·g ⊙ mean(ε_k) = g ⊙ Σ ε_k: exact for one sample, unbiased for several of which only the average was released.
    known = [epsilon.by_parameter for epsilon in epsilons]
    sampled = bool(known) and all(p in epsilon for epsilon in known for p in params)
    shift = [sum((epsilon[p] for epsilon in known[1:]), start=known[0][p]) for p in params] if sampled else None
    g_perturbation = None if shift is None else g * TensorList(shift)
    return _evidence(group, hess, g, g.square(), g_perturbation, noise_variance, batch_size)


def _as(h: Tensor, g: Tensor) -> Tensor:
    return g if g.dtype is h.dtype else g.to(h.dtype)


def _evidence(
    group: dict[str, Any],
    hess: TensorList,
    g: TensorList,
    g_squared: TensorList,
    g_perturbation: TensorList | None,
    noise_variance: Any,
    batch_size: float | None,
) -> Evidence[TensorList]:
    return Evidence(
        g=g,
        g_squared=g_squared,
        g_perturbation=g_perturbation,
        noise_variance=noise_variance,
        hess=hess,
        ess=group["ess"],
        weight_decay=group["weight_decay"],
        batch_size=batch_size,
        decay=group["curvature_decay"],
    )


def update(
    params: Sequence[Tensor],
    states: Sequence[State],
    group: dict[str, Any],
    evidence: Evidence[TensorList],
    estimator: CurvatureEstimator,
) -> None:
    """The next posterior, in the parameters and their states; their ``step`` counts this one already."""
    t = [state["step"] for state in states]
    evidence = curvatures.remembered(estimator, replace(evidence, t=t, memory=ivon_state.memory(states, estimator)))
    lr, beta1, weight_decay = group["lr"], group["beta1"], group["weight_decay"]
    new = ivon_update(
        IVONState(
            mean=TensorList(full_means([local(p) for p in params], states)),
            momentum=TensorList([state["momentum"] for state in states]),
            hess=evidence.hess,
        ),
        evidence.g,
        # With β₂ = 1 the curvature stays as it is, even where a target N_ess·g² would overflow.
        None if group["beta2"] == 1.0 else curvatures.estimate(estimator, evidence),
        lr=lr * (group["hess_init"] + weight_decay) if group["rescale_lr"] else lr,
        beta1=beta1,
        beta2=group["beta2"],
        weight_decay=weight_decay,
        debias=debias(beta1, t) if group["debias"] else 1.0,
        clip_radius=group["clip_radius"],
    )
    ivon_state.keep(params, states, new, evidence.memory)
