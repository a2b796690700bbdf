"""The release boundary itself: the sole place that adds privacy noise, and it charges before it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dpivon.optim.precision import full_dtype
from dpivon.optim.tensors import TensorList
from dpivon.privacy.noise import NoiseSource
from dpivon.privacy.spec import NoiseSpec
from dpivon.release import Release


@torch.no_grad()
def release(
    clipped_sums: Mapping[Tensor, Tensor],
    spec: NoiseSpec,
    noise: NoiseSource,
    charge: Callable[[NoiseSpec], None],
) -> Release:
    """g_dp = (Σ clipped gradients + N(0, σ²C² I)) / b, charged first.

    If the process dies between the charge and the release, the budget has paid for something nobody saw; the other
    order could show something nobody paid for.

    Noise is drawn and added in double and the result is rounded to the parameter's precision (never below fp32) here, before
    anybody sees it: attacks on noise in floating point read its low bits.
    """
    charge(spec)
    sums = TensorList([total.double() for total in clipped_sums.values()])
    noises = sums.filled(lambda like: noise.normal(like, spec.noise_std), at_once=getattr(noise, "at_once", False))
    released = ((noises + sums) / spec.divisor).copied([full_dtype(p) for p in clipped_sums])
    return as_release(dict(zip(clipped_sums, released, strict=True)), spec)


def as_release(gradients: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Release:
    """Released gradients with what is public about them."""
    return Release(
        gradients=gradients,
        variance=spec.variance,
        batch_size=spec.divisor if spec.loss_reduction == "mean" else None,
    )
