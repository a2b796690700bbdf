"""What is kept until a gradient is used must not have changed by then, nor be computed a second time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon.errors import PrivacyError


@torch.library.custom_op("dpivon::stored", mutates_args=(), schema="(Tensor t) -> Tensor")
def stored(t: Tensor) -> Tensor:
    """The same numbers, in memory. What no product reads a compiler may compute anew for everyone who does: rounded once more,
    what is added up would no longer be what was measured."""
    return t.clone()


@stored.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


def version_of(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def check_unchanged(kept: Sequence[tuple[Tensor, int | None]]) -> None:
    """Autograd would notice a saved input that was overwritten; it does not save what only detached weights need."""
    for t, version in kept:
        if version_of(t) != version:
            raise PrivacyError(
                f"A layer's input of shape {tuple(t.shape)} was changed in place before its gradient was used: its per-example "
                "gradients would be wrong. Use the operation that returns a new tensor (such as inplace=False)."
            )
