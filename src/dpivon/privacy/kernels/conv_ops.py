"""The kernels of :mod:`dpivon.privacy.kernels.convs` as torch operators, which a tracer records, a compiler leaves alone and a
CUDA graph captures.

    torch.ops.dpivon.conv_statistics   what the examples' norms are made of, [examples, parts or 3, out]
    torch.ops.dpivon.conv_sums         the weighted sum, in chunks to be added up in double, [chunks, taps · in, out]
    torch.ops.dpivon.position_sums     Σ_t of several [rows, positions, out], side by side in fp32 or double, [rows, Σ out]

Sums over positions are an operator because a compiler would join one with whatever makes its operand, and a kernel that also
writes the operand walks it in the order of the sum: GELU's backward took two to six times as long on an H200.

They are used on GPUs that have tensor cores for bf16, for shapes that they are made for. ``DPIVON_CONV_KERNELS=0`` in the
environment turns them off, and so does :func:`kernels`. Without them every convolution is unfolded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpivon.privacy.clipping import EXAMPLES_AT_ONCE

_PROGRAMS = 528  # four per processor of an H200: a sum is cut into chunks so that there are about as many programs
_LINE = 128  # bytes of a position that a program reads
_LINES = 128  # positions at a time, at most; a warp reads 16 of them
_LEAST = 8192  # bytes of a program, if there are programs enough
_FEW = 32  # positions of tensors that take less to copy side by side than a launch for each
enabled = os.environ.get("DPIVON_CONV_KERNELS", "1") != "0"  # whether kernels are wanted; :func:`kernels` changes it


class Geometry(NamedTuple):
    """Of a convolution; of its padding, what is before the first row and column."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def flat(self) -> list[int]:
        return [n for pair in self for n in pair]

    @classmethod
    def of(cls, flat: list[int]) -> Geometry:
        pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
        return cls(*pairs)


@dataclass(frozen=True)
class Tile:
    """Positions, rows and columns of a tile, and how it is run. One for both kernels: their accumulators must agree."""

    bt: int
    bd: int
    bo: int
    warps: int
    stages: int
    span: int = 1  # tiles of rows that one program of the statistics makes
    registers: int | None = None  # a thread, at most; fewer of them let more programs run side by side
    flatten: bool = False  # one loop over examples and positions, for the sums


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Inside, the kernels are used where they can be, or not at all."""
    global enabled
    before, enabled = enabled, on
    try:
        yield
    finally:
        enabled = before


@cache
def device_takes(device: torch.device) -> bool:
    """Whether the kernels run there: Triton, and tensor cores that know bf16."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def shapes_fit(x: Tensor, g: Tensor) -> bool:
    """Whether a convolution from x to g is one the kernels are made for: others are correct, but not fast."""
    into, out, positions = x.shape[1], g.shape[1], g.shape[2] * g.shape[3]
    small = max(_span(x), _span(g)) < 2**31
    return len(g) > 0 and out % 16 == 0 and (into % 16 == 0 or into <= 4) and positions >= 16 and small


def _span(t: Tensor) -> int:
    """How far apart an example's first and last element lie."""
    return sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True))


def tile_for(rows: int, out: int, positions: int, dtype: torch.dtype) -> Tile:
    """The tile of a shape: chosen by shape alone, so that the operators' shapes are known without a device.

    Tiles are 64×64 at most, for bf16 with four warps. A larger one reads less, but statistics of standardised weights hold four
    tiles in registers: of 64×64 two programs fit side by side, and one multiplies while the other reduces. Where an example
    takes several rounds, the sums go over examples and rounds in one loop, so that reading does not pause between two examples.
    An example is cut into three parts, so that a batch of 256 gives each of 132 processors about six programs.
    """
    bt = _positions_at_once(positions, 64 if dtype == torch.bfloat16 else 32)
    bd, bo = min(64, _power_of_two(rows)), min(64, _power_of_two(out))
    span = -(-rows // (3 * bd))  # three parts an example: programs enough, and few reductions
    flatten = dtype == torch.bfloat16 and positions > bt
    return Tile(bt, bd, bo, warps=8 if bd * bo * dtype.itemsize > 8192 else 4, stages=3, span=span, flatten=flatten)


def _positions_at_once(positions: int, most: int) -> int:
    """As many as fit, unless most of the last round would be idle: 65 (patches and a class token) are three of 32."""
    if positions <= most:
        return _power_of_two(positions)
    rounds = {bt: -(-positions // bt) * bt for bt in (16, 32, 64) if bt <= most}
    return max(bt for bt, padded in rounds.items() if 4 * padded <= 5 * rounds[16])


def _power_of_two(n: int) -> int:
    """The next one, at least 16: the smallest side of a product."""
    return max(16, 1 << (n - 1).bit_length())


def chunk_size(examples: int, tiles: int) -> int:
    """Examples that one program adds up in fp32: as in :mod:`dpivon.privacy.clipping`, too few for rounding to matter."""
    return max(1, min(EXAMPLES_AT_ONCE // 2, examples * tiles // _PROGRAMS))


# ---- launching


def statistics(
    x: Tensor, g: Tensor, unit: Tensor | None, shape: Geometry, rows: int, tile: Tile | None = None
) -> Tensor:
    """Σ g² of every example, part and output channel, or with u in ``unit`` mean, S and q; an example is ``rows`` rows of x."""
    from dpivon.privacy.kernels import convs

    tile, kinds = tile or _tile(x, g, shape), 1 if unit is None else 4
    n, d, out = len(g) // rows, _fan_in(x, shape), g.shape[1]
    parts, across = _parts(d, tile), -(-out // tile.bo)
    partial = x.new_empty((n, parts, kinds, out), dtype=torch.float32)
    unit_sums = x.new_empty((parts, out), dtype=torch.float32)
    here = partial if unit is None else unit.contiguous()
    with torch.cuda.device_of(x):
        convs.gradient_statistics[(n * parts * across,)](
            x, g, here, partial, unit_sums, *_strides(x), *_strides(g), **_constants(x, g, shape, rows, tile),
            STANDARDISED=unit is not None, SPAN=tile.span, **_options(x, tile),
        )  # fmt: skip
        if unit is None:
            return partial.squeeze(2)
        found = x.new_empty((n, 3, out), dtype=torch.float32)
        convs.combine_statistics[(n * across,)](
            partial, unit_sums, found, parts, d, tile.span * tile.bd, out, tile.bo, num_warps=1
        )
    return found


def sums(
    x: Tensor, g: Tensor, c: Tensor, found: Tensor | None, shape: Geometry, rows: int, tile: Tile | None = None
) -> Tensor:
    """Σ_n c_n g_n in chunks of examples; with what :func:`statistics` found for standardised weights, less their means."""
    from dpivon.privacy.kernels import convs

    tile = tile or _tile(x, g, shape)
    n, d, out = len(g) // rows, _fan_in(x, shape), g.shape[1]
    tiles = -(-d // tile.bd) * -(-out // tile.bo)
    each = chunk_size(n, tiles)
    chunks = -(-n // each)
    partial = x.new_empty((chunks, d, out), dtype=torch.float32)
    means = partial if found is None else found.contiguous()
    with torch.cuda.device_of(x):
        convs.gradient_sums[(chunks * tiles,)](
            x, g, c.contiguous(), means, partial, n, each, *_strides(x), *_strides(g),
            **_constants(x, g, shape, rows, tile), STANDARDISED=found is not None, FLATTEN=tile.flatten, **_options(x, tile),
        )  # fmt: skip
    return partial


def _parts(d: int, tile: Tile) -> int:
    """In how many parts an example's rows are measured."""
    return -(-d // (tile.span * tile.bd))


def _tile(x: Tensor, g: Tensor, shape: Geometry) -> Tile:
    return tile_for(_fan_in(x, shape), g.shape[1], g.shape[2] * g.shape[3], x.dtype)


def _fan_in(x: Tensor, shape: Geometry) -> int:
    return shape.kernel[0] * shape.kernel[1] * x.shape[1]


def _strides(t: Tensor) -> tuple[int, int, int, int]:
    """Of example, row, column and channel."""
    return t.stride(0), t.stride(2), t.stride(3), t.stride(1)


def _options(x: Tensor, tile: Tile) -> dict[str, int]:
    """For the compiler; fewer stages where an older chip has less shared memory."""
    large = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
    options = {"num_warps": tile.warps, "num_stages": tile.stages if large else min(2, tile.stages)}
    return options if tile.registers is None else options | {"maxnreg": tile.registers}


def _constants(x: Tensor, g: Tensor, shape: Geometry, rows: int, tile: Tile) -> dict[str, Any]:
    """Sizes are compiled in: every round of the inner loop divides positions by OW, and dividing by a number that is not known
    before is some thirty instructions. Layers of one shape share their binaries; a WRN-16-4 has 22."""
    (_, into, h, w), (_, out, oh, ow) = x.shape, g.shape
    return {
        "H": h, "W": w, "OW": ow, "T": oh * ow, "CIN": into, "COUT": out, "D": _fan_in(x, shape), "KW": shape.kernel[1],
        "SH": shape.stride[0], "SW": shape.stride[1], "PH": shape.padding[0], "PW": shape.padding[1],
        "DH": shape.dilation[0], "DW": shape.dilation[1], "ROWS": rows, "BT": tile.bt, "BD": tile.bd, "BO": tile.bo,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip


# ---- the operators: tensors and numbers only, and the shapes of what comes out


@torch.library.custom_op(
    "dpivon::conv_statistics",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor g, Tensor? unit, int[] shape, int rows) -> Tensor",
)
def conv_statistics(x: Tensor, g: Tensor, unit: Tensor | None, shape: list[int], rows: int) -> Tensor:
    return statistics(x, g, unit, Geometry.of(shape), rows)


@conv_statistics.register_fake
def _(x: Tensor, g: Tensor, unit: Tensor | None, shape: list[int], rows: int) -> Tensor:
    geometry = Geometry.of(shape)
    kinds = _parts(_fan_in(x, geometry), _tile(x, g, geometry)) if unit is None else 3
    return x.new_empty((len(g) // rows, kinds, g.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "dpivon::conv_sums",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor g, Tensor c, Tensor? found, int[] shape, int rows) -> Tensor",
)
def conv_sums(x: Tensor, g: Tensor, c: Tensor, found: Tensor | None, shape: list[int], rows: int) -> Tensor:
    return sums(x, g, c, found, Geometry.of(shape), rows)


@conv_sums.register_fake
def _(x: Tensor, g: Tensor, c: Tensor, found: Tensor | None, shape: list[int], rows: int) -> Tensor:
    n, d, out = len(g) // rows, _fan_in(x, Geometry.of(shape)), g.shape[1]
    tile = _tile(x, g, Geometry.of(shape))
    each = chunk_size(n, -(-d // tile.bd) * -(-out // tile.bo))
    return x.new_empty((-(-n // each), d, out), dtype=torch.float32)


# ---- sums over positions


def add_up(gs: Sequence[Tensor], double: bool) -> Tensor:
    """Every tensor is added up by a launch of its own, into its columns of the result; short ones that are alike by one.

    A compiler that puts those side by side computes them all for each of their columns.
    """
    import triton.language as tl

    from dpivon.privacy.kernels import convs

    if len(gs) > 1 and len({(g.shape[1], g.dtype) for g in gs}) == 1 and gs[0].shape[1] <= _FEW:
        gs = [torch.cat(list(gs), 2)]
    result = gs[0].new_empty(_side_by_side(gs), dtype=_dtype(double))
    with torch.cuda.device_of(result):
        for g, out in zip(gs, result.split([g.shape[2] for g in gs], 1), strict=True):
            n, t, p = g.shape
            lines = min(_LINES, 1 << (t - 1).bit_length())
            across = columns_at_once(g, lines)
            convs.add_positions[(n * -(-p // across),)](
                g, out, *g.stride(), out.stride(0), p, t, BT=lines, BO=across,
                ACCUMULATOR=tl.float64 if double else tl.float32,
                num_warps=max(1, lines * across * g.element_size() // (16 * _LINE)),
            )  # fmt: skip
    return result


def columns_at_once(g: Tensor, lines: int) -> int:
    """Outputs of one program: those of one line of a position, and more where there are few positions but many programs."""
    (n, _, p), across = g.shape, _LINE // g.element_size()
    while lines * across * g.element_size() < _LEAST and n * -(-p // (2 * across)) >= 4 * _PROGRAMS:
        across *= 2
    return across


def _side_by_side(gs: Sequence[Tensor]) -> tuple[int, int]:
    return gs[0].shape[0], sum(g.shape[2] for g in gs)


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


@torch.library.custom_op(
    "dpivon::position_sums", mutates_args=(), device_types="cuda", schema="(Tensor[] gs, bool double) -> Tensor"
)
def position_sums(gs: list[Tensor], double: bool) -> Tensor:
    return add_up(gs, double)


@position_sums.register_fake
def _(gs: list[Tensor], double: bool) -> Tensor:
    return gs[0].new_empty(_side_by_side(gs), dtype=_dtype(double))


# ---- what is weighted, in two halves


def weighted_halves(t: Tensor, c: Tensor) -> Tensor:
    """c_n t_n of t [rows, positions, n] in bf16 as two bf16 numbers that add up to it, [rows, positions, 2 n]."""
    from dpivon.privacy.kernels import convs

    rows, positions, n = t.shape
    result = t.new_empty(rows, positions, 2 * n)
    block = min(2048, _power_of_two(n))
    with torch.cuda.device_of(t):
        convs.weighted_halves[(rows * positions, -(-n // block))](
            t, c.contiguous(), result, *t.stride(), positions, n, BLOCK=block, enable_fp_fusion=False
        )  # fmt: skip
    return result


# ---- what norms are bounded by


def gram_forms(k: Tensor, j: Tensor) -> Tensor:
    """What ``layers.bounded._forms`` makes of two stacks of Gram matrices, each read once, of a multiple of eight positions."""
    from dpivon.privacy.kernels import convs

    n, t, _ = k.shape
    assert t % 8 == 0
    blocks = -(-t // 16)
    partial = k.new_empty((n, blocks, 6), dtype=torch.float64)
    with torch.cuda.device_of(k):
        convs.gram_forms[(n * blocks,)](k, j, partial, t // 8, blocks, R=16, C=128, num_warps=8)
    return partial.sum(1)


# ---- normalisations


def normalises(g: Tensor, n: int) -> bool:
    """Whether :func:`normalised_sums` takes output gradients like these, of rows of so many numbers."""
    return enabled and device_takes(g.device) and g.dtype == torch.float32 and n <= 8192


def normalised_sums(x: Tensor, g: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Σ_t g ẑ and Σ_t g of x and g [rows, positions, n], with ẑ every position of x normalised."""
    from dpivon.privacy.kernels import convs

    rows, positions, n = x.shape
    across = _power_of_two(n)
    at_once = max(1, 4096 // across)
    each = max(at_once, positions * rows // _PROGRAMS // at_once * at_once)
    parts = -(-positions // each)
    partial = g.new_empty(rows, parts, 2, n)
    with torch.cuda.device_of(x):
        convs.normalised_sums[(rows * parts,)](
            x.contiguous(), g.contiguous(), partial, positions, each, parts, eps, D=n, BT=at_once, BD=across,
            CENTRED=centred, num_warps=8,
        )  # fmt: skip
    weight, bias = partial.sum(1).unbind(1)
    return weight, bias
