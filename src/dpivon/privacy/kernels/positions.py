"""Sums over positions, [rows, positions, out] to [rows, out]: every example's bias gradient, and the chunks of a weighted sum.

A program reads BO neighbouring outputs of one row, BT positions at a time, and nobody else's; it adds them up in ACCUMULATOR,
element by element, and reduces once at the end. There are no atomics, and the order of every sum is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def add_positions(
    G, OUT, gn, gt, go, outn, P, T, BT: tl.constexpr, BO: tl.constexpr, ACCUMULATOR: tl.constexpr
):  # fmt: skip
    """OUT is [rows, P] in the accumulator's dtype, its rows ``outn`` apart."""
    across = (P + BO - 1) // BO
    n = (tl.program_id(0) // across).to(tl.int64)  # 64 bits wide: the tensors may be larger than 2³¹
    o = tl.program_id(0) % across * BO + tl.arange(0, BO)
    total = tl.zeros((BT, BO), ACCUMULATOR)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        there = (t < T)[:, None] & (o < P)[None, :]
        g = tl.load(G + n * gn + t.to(tl.int64)[:, None] * gt + (o * go)[None, :], mask=there, other=0.0)
        total += g.to(ACCUMULATOR)
    tl.store(OUT + n * outn + o, tl.sum(total, axis=0), mask=o < P)
