"""Layers without a rule of ours: Opacus's per-example gradients for that layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from torch import Tensor, nn

from dpivon.privacy.layers.registry import Rule
from dpivon.privacy.layers.uses import Dense, Use


def opacus_rule(layer: nn.Module) -> Rule:
    """Opacus's grad sampler for this layer type, or a vectorised map of its backward (functorch)."""
    sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(layer))
    if sampler is None:
        prepare_layer(layer, batch_first=True)
        sampler = ft_compute_per_sample_gradient

    def rule(layer: nn.Module, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
        tensors = [t.contiguous() for t in inputs if isinstance(t, Tensor)]
        return {p: Dense(gs) for p, gs in sampler(layer, tensors, g.contiguous()).items()}

    return rule
