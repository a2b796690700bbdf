"""What a curvature estimator is: evidence from one step in, a curvature target ĥ out.

Everything an estimator may read stands in :class:`Evidence`, and all of it is public once the step's gradient has
been released: an estimator is post-processing whatever it computes. Adding one is one small file beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        noise_variance: variance of the privacy noise in each coordinate of g; 0 without privacy. One number (one a row of a
            stack).
        hess, ess, weight_decay: h, N_ess and δ before the update.
        batch_size: the expected batch b that g is a mean over; None where nobody said.
        t: the number of this step, from 1.
        decay: ρ of the averages that an estimator keeps.
        memory: what the estimator keeps between steps, by its own names, this step included.
    """

    g: Values
    g_squared: Values
    g_perturbation: Values | None
    noise_variance: Any
    hess: Values
    ess: Any
    weight_decay: Any
    batch_size: Any = None
    t: Any = 1
    decay: Any = 0.99
    memory: Mapping[str, Values] = field(default_factory=dict)


@runtime_checkable
class CurvatureEstimator(Protocol):
    """Maps :class:`Evidence` to a curvature target ĥ, or to None to leave h as it is.

    ``name`` identifies it in reports. ``elementwise`` says that every coordinate is treated alike, so that it may be
    given all parameters at once; otherwise it is called tensor by tensor. ``needs_sample`` says that it reads
    ``g_perturbation``.

    One that pools over a tensor and is to be used in stacks also has ``pools = True``: it is then given each tensor as K
    matrices [K, rows, columns] (K = 1 outside a stack; a vector is one row), which it must not mix.

    One that pools over all parameters at once has ``whole = True`` and no ``elementwise``.

    One that keeps something between steps also has ``remembers``, the names of its tensors, which have the shape of
    the parameters and begin at zero, and ``remember(evidence)``, which returns them after this step given those
    before it, coordinate by coordinate. ``__call__`` then finds the new ones in ``evidence.memory``.
    """

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether every coordinate is treated alike."""
        ...

    @property
    def needs_sample(self) -> bool:
        """Whether it reads ``g_perturbation``."""
        ...

    def __call__(self, evidence: Evidence[Any]) -> Any: ...
