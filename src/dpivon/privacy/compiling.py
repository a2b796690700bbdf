"""Small tensor operations fused into few kernels, where that pays: on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., object])
_Options = dict[str, str | int | bool | Callable[..., object]]
_OPTIONS: _Options = {
    "emulate_precision_casts": True,
    # Of the operations that read one tensor, with how many others each is tried to be joined. All weights share clip factors:
    # with torch's own 64 it takes twice as long to find the same kernels for a wide residual network.
    "max_fusion_buffer_group_pairwise_attempts": 8,
}
# Up to how many operations and operands the compiler computes again where a result is read again, rather than to store it.
# With torch's own 30 and 4 the backward of every normalisation is stored in fp32 twice on its way to a rounded result.
_AGAIN: _Options = {
    "realize_opcount_threshold": 200,
    "realize_reads_threshold": 12,
    "realize_acc_reads_threshold": 24,
}


def options(*, again: bool) -> _Options:
    """How a program is compiled. ``again`` lets the compiler compute more a second time: less memory is moved, and a value that
    is measured and summed must then be known to be stored. `python -m benchmarks.where` counts that, with kernels for the
    convolutions; elsewhere it is neither counted nor tried."""
    return _OPTIONS | (_AGAIN if again else {})


def compiled(function: _F, device: torch.device, *, again: bool = False) -> _F:
    """The same function; on a GPU compiled for the shapes it is called with, by these :func:`options`.

    Every rounding is kept. Left to itself the compiler computes in fp32 what was asked for in bf16: norms would then be
    taken of other numbers than the ones that matrix products read and add up, and an example could count for more than C.
    """
    if device.type != "cuda":
        return function
    # One process may train many stacks of different sizes; past the limit torch would go back to eager without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return cast(_F, torch.compile(function, dynamic=False, options=options(again=again)))
