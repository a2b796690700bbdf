"""The ways to get clipped sums, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.privacy.gradients.base import GradientSource
from dpivon.privacy.gradients.bookkeeping import BookKeeper, has_rules
from dpivon.privacy.gradients.collect import collect
from dpivon.privacy.gradients.ghost import GhostGradients
from dpivon.privacy.gradients.per_example import PerExampleGradients
from dpivon.privacy.gradients.wrapping import BookKeepingHooks, BookKeepingModule

MODES = ("bookkeeping", "hooks", "functorch", "ew", "ghost")


def choose(module: nn.Module, grad_sample_mode: str | None) -> str:
    """The mode asked for; by default book-keeping if every trainable layer has a rule, otherwise Opacus's hooks."""
    if grad_sample_mode is None:
        return "bookkeeping" if has_rules(module) else "hooks"
    if grad_sample_mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise bad("grad_sample_mode", grad_sample_mode, f"is not one of {known}", "Leave it out for the best one")
    return grad_sample_mode


def attach(
    module: nn.Module,
    mode: str,
    *,
    batch_first: bool,
    loss_reduction: str,
    wrap_model: bool,
    samples: int,
    augmentations: int,
    scatter: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Any, GradientSource]:
    """What the caller goes on using as the model, and where the optimizer gets its clipped sums.

    ``scatter`` keeps a part of each sum, where the model is sharded; book-keeping only.
    """
    if mode == "bookkeeping":
        keeper = BookKeeper(
            module,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            samples=samples,
            augmentations=augmentations,
            scatter=scatter,
        )
        collector: Any = BookKeepingModule(module, keeper) if wrap_model else BookKeepingHooks(module, keeper)
        source: GradientSource = keeper
    else:
        collector = collect(module, mode, batch_first=batch_first, loss_reduction=loss_reduction, wrap_model=wrap_model)
        source = GhostGradients(module) if mode == "ghost" else PerExampleGradients(module, augmentations)
    collector.dummy_rows = augmentations
    return collector, source
