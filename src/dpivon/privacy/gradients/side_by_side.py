"""Which parameters' gradients are measured and summed as one matrix, put side by side, and their sums taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpivon.privacy.layers.bounded import Bounded, Together, Unmade, together
from dpivon.privacy.layers.convolved import Summed, one_matrix
from dpivon.privacy.layers.made import Tied
from dpivon.privacy.layers.unsummed import Biases, Unsummed, sum_normalisations
from dpivon.privacy.layers.uses import Dense, Outer, Rows, Use
from dpivon.privacy.precision import launches_cost, wide_dtype

_SMALL = 4096  # elements of a parameter that is not worth kernels of its own
_TRAY = (
    512 * 2**20
)  # bytes of gradients that are put side by side on a GPU: the copy takes less than launching for each,
_PIECE = 16 * 2**20  # of up to so many bytes


#: Parameters that are measured and summed as one, by their place, and what does it; None if they were not used.
Block = tuple[list[int], Use | None]


def in_blocks(params: Sequence[Tensor], uses: list[Use | None], *, joint: bool) -> list[Block]:
    """Which parameters, by their place, and their use. Where one factor clips all, the many small ones are put side by side.

    ``uses`` is changed: what was copied is let go.
    """
    _make_together(uses)
    kinds = {type(use) for use in uses}
    biases = Biases(uses) if Unsummed in kinds else None
    if biases is not None:
        sum_normalisations(uses, biases)
    if not joint:
        if biases is not None:
            biases.sum_rest()
        return [([i], use) for i, use in enumerate(uses)]
    blocks: list[Block] = []
    for members in together(uses) if Bounded in kinds else ():
        some: Any = Together.of([uses[i] for i in members])  # type: ignore[misc]
        blocks.append((members, some))
        if biases is not None:
            biases.sum([uses[i].g for i in members], some.whole.g)  # type: ignore[union-attr]
        for i in members:
            uses[i] = None
    if biases is not None:
        biases.sum_rest()
    for partly in (False, True) if Summed in kinds else ():
        waiting = {i: use for i, use in enumerate(uses) if isinstance(use, Summed) and use.partly == partly}
        if waiting:
            blocks.append((list(waiting), one_matrix(list(waiting.values()))))
    small = _beside(params, uses)
    if len(small) > 1:
        blocks.append((small, Dense(torch.cat([_rows(uses[i]) for i in small], 1))))
    taken = {i for members, _ in blocks for i in members}
    return [*blocks, *(([i], use) for i, use in enumerate(uses) if i not in taken)]


def _make_together(uses: list[Use | None]) -> None:
    """Small gradients that a rule left unmade on a GPU, those of one size by one product: adapters have hundreds of layers."""
    alike: dict[Any, list[int]] = {}
    for i, use in enumerate(uses):
        if type(use) is Unmade:
            alike.setdefault((use.a.shape, use.g.shape, use.shape, use.transposed), []).append(i)
    for members in alike.values():
        some: list[Outer] = [uses[i] for i in members]  # type: ignore[misc]
        first = some[0]
        if len(some) == 1:
            made = first.made().unsqueeze(0)
        else:
            whole = replace(first, a=torch.cat([u.a for u in some]), g=torch.cat([u.g for u in some]))
            made = whole.made().unflatten(0, (len(some), -1))
        for i, rows in zip(members, made.flatten(2).unbind(), strict=True):  # as they are put side by side
            uses[i] = Dense(rows)


def _beside(params: Sequence[Tensor], uses: Sequence[Use | None]) -> list[int]:
    """Which are put side by side: small ones; where launches cost, beginning with the smallest as many as a tray holds."""
    dense = [(i, use.g) for i, use in enumerate(uses) if type(use) is Dense]
    if not dense or not launches_cost(dense[0][1]):
        return [i for i, _ in dense if params[i].numel() <= _SMALL]
    room, chosen = _TRAY, []
    for size, i in sorted([(g.nbytes, i) for i, g in dense]):
        room -= size
        if room < 0 or size > _PIECE:
            break
        chosen.append(i)
    return sorted(chosen)


def _rows(use: Any) -> Tensor:
    """Per-example gradients as rows of a matrix."""
    made: Tensor = use.g if use.order is None and use.dropped is None else use.materialise()
    return made if made.ndim == 2 else made.flatten(1)


def squared_norms(uses: Sequence[Use]) -> list[Tensor]:
    """The squared norms of several uses; a kind that has ``measured`` takes all of its own at once, in fewer launches."""
    found = {i: use.squared_norm() for i, use in enumerate(uses) if not hasattr(use, "measured")}
    kinds: dict[Any, list[int]] = {}
    for i, use in enumerate(uses):
        if i not in found:
            kinds.setdefault(type(use).measured, []).append(i)  # type: ignore[attr-defined]
    for measured, members in kinds.items():
        found |= zip(members, measured([uses[i] for i in members]), strict=True)
    return [found[i] for i in range(len(uses))]


def dtype_of_sums(blocks: Sequence[Block]) -> torch.dtype:
    """What the clip factors are cast to, once for all blocks: that of every sum, or else double, and each casts its own."""
    kinds = {
        wide_dtype(use.g) if isinstance(use, Dense | Outer | Rows) else torch.float64
        for use in (use.head if isinstance(use, Tied) else use for _, use in blocks)
        if use is not None
    }
    return kinds.pop() if len(kinds) == 1 else torch.float64


def split(total: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The sum of parameters that were put side by side, each contiguous in its own shape."""
    if len(shapes) == 1:
        fits = total.shape == shapes[0] and total.is_contiguous()
        return [total if fits else total.reshape(shapes[0]).contiguous()]
    parts = total.contiguous().split_with_sizes([shape.numel() for shape in shapes])
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def neighbours(members: Sequence[int]) -> list[list[int]]:
    """Ascending places, cut wherever one is left out."""
    runs: list[list[int]] = []
    for i in members:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
