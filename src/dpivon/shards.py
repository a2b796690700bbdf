"""Parameters of which this process holds a part (FSDP2's ``DTensor``): rules compute with the part, and gather to hand out.

Every rule and curvature estimator that treats coordinates alike gives the same on parts as on the whole. Anything that
is gathered is gathered by all ranks at once: every rank must ask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WHOLE = (Tensor, nn.Parameter)  # asked first: most are, and looking for a name that is not there is slow


def is_sharded(t: Tensor) -> bool:
    return type(t) not in _WHOLE and hasattr(t, "to_local")


def local(t: Tensor) -> Tensor:
    """The part of a tensor that is here, sharing its memory; the tensor itself if it is whole."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        part: Tensor = t.to_local()  # type: ignore[attr-defined]
        return part


def like_parameter(part: Tensor, p: Tensor) -> Tensor:
    """This process's part, laid out as p is."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = p
    laid_out: Tensor = DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return laid_out


def whole(part: Tensor, p: Tensor) -> Tensor:
    """All of something of which this process holds the part that it holds of p. All ranks must ask."""
    if not is_sharded(p):
        return part
    gathered: Tensor = like_parameter(part, p).full_tensor()  # type: ignore[attr-defined]
    return gathered


def part_of(full: Tensor, p: Tensor) -> Tensor:
    """The rows of ``full``, which is as large as the whole of p, that this process holds of p."""
    if not is_sharded(p):
        return full
    mesh: Any = p.device_mesh  # type: ignore[attr-defined]
    rows = -(-full.shape[0] // mesh.size())  # of every rank but the last ones
    first = min(full.shape[0], mesh.get_local_rank() * rows)
    return full[first : first + rows]
