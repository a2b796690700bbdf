"""Small tensor operations fused into few kernels, where that pays: on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F, device: torch.device) -> _F:
    """The same function; on a GPU compiled for the shapes it is called with.

    Every rounding is kept. Left to itself the compiler computes in fp32 what was asked for in bf16: norms would then be
    taken of other numbers than the ones that matrix products read and add up, and an example could count for more than C.
    """
    if device.type != "cuda":
        return function
    # One process may train many stacks of different sizes; past the limit torch would go back to eager without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    result: _F = torch.compile(function, dynamic=False, options={"emulate_precision_casts": True})  # type: ignore[assignment]
    return result
