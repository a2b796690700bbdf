"""Counter-based randomness for many runs at once: what a run draws depends on its own seed, step and stream alone.

Philox-4x32-10 (Salmon et al., 2011) maps (seed; element, step, stream) to four independent words. The step is read from device
memory, so a captured graph draws anew on every replay; a run draws the same whether it trains alone or in a stack.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _words(SEED, STEP, k, element, STREAM: tl.constexpr):
    seed = tl.load(SEED + k)
    step = tl.load(STEP).to(tl.uint32)
    zero = (element * 0).to(tl.uint32)
    return tl.philox(seed, element.to(tl.uint32), zero + step, zero + STREAM, zero)


@triton.jit
def normal(OUT, SEED, STEP, P, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[k, :] ~ N(0, 1) by Box–Muller: in double two values per counter, in single precision four."""
    k = tl.program_id(1)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = _words(SEED, STEP, k, element, STREAM)
    row = OUT + k.to(tl.int64) * P
    if OUT.dtype.element_ty == tl.float64:
        n0, n1 = _box_muller_double(a, b, c, d)
        at, left = row + element.to(tl.int64) * 2, P - element * 2
        tl.store(at, n0, mask=left > 0)
        tl.store(at + 1, n1, mask=left > 1)
    else:
        n0, n1 = _box_muller(a, b)
        n2, n3 = _box_muller(c, d)
        at, left = row + element.to(tl.int64) * 4, P - element * 4
        tl.store(at, n0, mask=left > 0)
        tl.store(at + 1, n1, mask=left > 1)
        tl.store(at + 2, n2, mask=left > 2)
        tl.store(at + 3, n3, mask=left > 3)


@triton.jit
def _box_muller(a, b):
    # (word + ½) / 2³² is never 0, so the logarithm is finite; its tail reaches 6.7 standard deviations.
    u = (a.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    v = b.to(tl.float32) * 2.3283064365386963e-10
    r = tl.sqrt(-2.0 * tl.log(u))
    angle = 6.283185307179586 * v
    return r * tl.cos(angle), r * tl.sin(angle)


@triton.jit
def _box_muller_double(a, b, c, d):
    # 64 random bits in (0, 1], finest near 0 where the tail is made, and 53 for the angle. Its tail reaches 9.4.
    u = (((a.to(tl.uint64) << 32) | b.to(tl.uint64)).to(tl.float64) + 1.0) * 5.421010862427522e-20
    v = (((c.to(tl.uint64) << 32) | d.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16
    r = tl.sqrt(-2.0 * tl.log(u))
    angle = 6.283185307179586 * v
    return r * tl.cos(angle), r * tl.sin(angle)


@triton.jit
def poisson(MASK, RATE, SEED, STEP, N, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """MASK[k, n] = 1 with probability q_k, for every example n on its own. RATE is q·2³², compared with a whole word."""
    k = tl.program_id(1)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = _words(SEED, STEP, k, element, STREAM)
    rate = tl.load(RATE + k)
    base = MASK + k.to(tl.int64) * N + element.to(tl.int64) * 4
    left = N - element * 4
    tl.store(base, (a.to(tl.int64) < rate).to(tl.int8), mask=left > 0)
    tl.store(base + 1, (b.to(tl.int64) < rate).to(tl.int8), mask=left > 1)
    tl.store(base + 2, (c.to(tl.int64) < rate).to(tl.int8), mask=left > 2)
    tl.store(base + 3, (d.to(tl.int64) < rate).to(tl.int8), mask=left > 3)
