"""What a curvature estimator is: evidence from one step in, a curvature target ĥ out.

Everything an estimator may read stands in :class:`Evidence`, and all of it is public once the step's gradient has
been released: an estimator is post-processing whatever it computes. Adding one is one small file beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, runtime_checkable

from dpivon.optim.tensors import Values


@dataclass(frozen=True)
class Evidence(Generic[Values]):
    """What one step knows about the curvature.

    Attributes:
        g: the gradient of the step: released g_dp under privacy, otherwise the average over θ-samples.
        g_squared: average over θ-samples of g_k²; equal to g² when only the average was released.
        g_perturbation: average over θ-samples of g_k ⊙ (θ_k − m); K·g ⊙ mean(θ_k − m) when only the average was
            released (unbiased, since E[g_j ⊙ (θ_k − m)] = 0 for j ≠ k).
            None when the step took no θ-sample, or the estimator did not ask for one.
        noise_variance: variance of the privacy noise in each coordinate of g; 0 without privacy.
        hess, ess, weight_decay: h, N_ess and δ before the update.
    """

    g: Values
    g_squared: Values
    g_perturbation: Values | None
    noise_variance: Any
    hess: Values
    ess: Any
    weight_decay: Any


@runtime_checkable
class CurvatureEstimator(Protocol):
    """Maps :class:`Evidence` to a curvature target ĥ, or to None to leave h as it is.

    ``name`` identifies it in reports. ``elementwise`` says that every coordinate is treated alike, so that it may be
    given all parameters at once; otherwise it is called tensor by tensor. ``needs_sample`` says that it reads
    ``g_perturbation``.
    """

    name: str
    elementwise: bool
    needs_sample: bool

    def __call__(self, evidence: Evidence[Any]) -> Any: ...
