"""What is kept until a gradient is used must not have changed by then."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpivon.errors import PrivacyError


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
