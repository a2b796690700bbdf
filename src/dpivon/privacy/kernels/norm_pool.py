"""GroupNorm, ReLU and 2×2 max-pooling of many models at once, one program an example, forward and backward in one kernel each.

    ẑ = (z − μ_group) / √(var_group + ε),   n = γ ẑ + β,   y = maxpool(relu(n))

Tensors are NHWC and may be bf16; statistics, per-example gradients of γ and β, and everything summed are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _by_group(per_channel, C: tl.constexpr, CG: tl.constexpr):
    """Σ over a channel's group, at every channel."""
    c = tl.arange(0, C)
    same = (c[:, None] // CG) == (c[None, :] // CG)
    return tl.sum(tl.where(same, per_channel[None, :], 0.0), axis=1)


@triton.jit
def _corner(Z, p, j: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """One of the four pixels under each pooled position of an example: [positions, C]."""
    return tl.load(Z + _corner_at(p, j, W, C)).to(tl.float32)


@triton.jit
def _corner_at(p, j: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    HALF: tl.constexpr = W // 2
    pixel = (2 * (p // HALF) + j // 2) * W + 2 * (p % HALF) + j % 2
    return pixel[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def norm_pool_forward(
    Z, GAMMA, BETA, MODEL, Y, MEAN, RSTD, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One example; BP, the pooled positions handled at a time, divides H·W/4."""
    POOLED: tl.constexpr = H * W // 4
    tl.static_assert(POOLED % BP == 0)
    n = tl.program_id(0).to(tl.int64)
    k = tl.load(MODEL + n).to(tl.int64)
    c = tl.arange(0, C)
    Z += n * (H * W * C)
    Y += n * (POOLED * C)
    total = tl.zeros((C,), tl.float32)
    squares = tl.zeros((C,), tl.float32)
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        for j in tl.static_range(4):
            z = _corner(Z, p, j, W, C)
            total += tl.sum(z, axis=0)
            squares += tl.sum(z * z, axis=0)
    count: tl.constexpr = H * W * CG
    mean = _by_group(total, C, CG) / count
    var = tl.maximum(_by_group(squares, C, CG) / count - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    tl.store(MEAN + n * C + c, mean)
    tl.store(RSTD + n * C + c, rstd)
    scale = tl.load(GAMMA + k * C + c).to(tl.float32) * rstd
    shift = tl.load(BETA + k * C + c).to(tl.float32) - mean * scale
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        best = tl.zeros((BP, C), tl.float32)  # relu: nothing below zero survives
        for j in tl.static_range(4):
            v = _corner(Z, p, j, W, C) * scale[None, :] + shift[None, :]
            best = tl.where(v != v, v, tl.maximum(best, v))  # keep NaN, as torch does
        tl.store(Y + p[:, None] * C + c[None, :], best.to(Y.dtype.element_ty))


@triton.jit
def norm_pool_backward(
    Z, DY, GAMMA, BETA, MODEL, MEAN, RSTD, DZ, DGAMMA, DBETA, DBIAS, SQUARED,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dz, and this example's gradients of γ, β and of the bias that was added to z, with their squared norm."""
    POOLED: tl.constexpr = H * W // 4
    tl.static_assert(POOLED % BP == 0)
    n = tl.program_id(0).to(tl.int64)
    k = tl.load(MODEL + n).to(tl.int64)
    c = tl.arange(0, C)
    Z += n * (H * W * C)
    DZ += n * (H * W * C)
    DY += n * (POOLED * C)
    mean = tl.load(MEAN + n * C + c)
    rstd = tl.load(RSTD + n * C + c)
    gamma = tl.load(GAMMA + k * C + c).to(tl.float32)
    scale = gamma * rstd
    shift = tl.load(BETA + k * C + c).to(tl.float32) - mean * scale
    dgamma = tl.zeros((C,), tl.float32)
    dbeta = tl.zeros((C,), tl.float32)
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        dy = tl.load(DY + p[:, None] * C + c[None, :]).to(tl.float32)
        best = tl.zeros((BP, C), tl.float32)
        z_best = tl.zeros((BP, C), tl.float32)
        for j in tl.static_range(4):
            z = _corner(Z, p, j, W, C)
            v = z * scale[None, :] + shift[None, :]
            z_best = tl.where(v > best, z, z_best)
            best = tl.where(v != v, v, tl.maximum(best, v))
        dn = tl.where(best > 0.0, dy, tl.where(best != best, best, 0.0))
        dbeta += tl.sum(dn, axis=0)
        dgamma += tl.sum(dn * z_best, axis=0)
    dgamma = (dgamma - mean * dbeta) * rstd  # Σ dn ẑ from Σ dn z and Σ dn
    count: tl.constexpr = H * W * CG
    mean_dz = _by_group(gamma * dbeta, C, CG) / count
    mean_dzz = _by_group(gamma * dgamma, C, CG) / count
    # dz = rstd (γ dn − mean_dz − ẑ mean_dzz) as an affine function of z, plus scale·dn where the gradient went.
    slope = -rstd * rstd * mean_dzz
    level = -rstd * mean_dz - mean * slope
    dbias = tl.zeros((C,), tl.float32)
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        dy = tl.load(DY + p[:, None] * C + c[None, :]).to(tl.float32)
        best = tl.zeros((BP, C), tl.float32)
        which = tl.full((BP, C), -1, tl.int32)
        for j in tl.static_range(4):
            v = _corner(Z, p, j, W, C) * scale[None, :] + shift[None, :]
            which = tl.where(v > best, j, which)  # the first of the largest, as in torch; none if all are below zero
            best = tl.where(v != v, v, tl.maximum(best, v))
        for j in tl.static_range(4):
            z = _corner(Z, p, j, W, C)
            dz = z * slope[None, :] + level[None, :] + tl.where(which == j, dy * scale[None, :], 0.0)
            dz = dz.to(DZ.dtype.element_ty)
            tl.store(DZ + _corner_at(p, j, W, C), dz)
            dbias += tl.sum(dz.to(tl.float32), axis=0)  # of what was stored: that is the gradient the weights see too
    tl.store(DGAMMA + n * C + c, dgamma)
    tl.store(DBETA + n * C + c, dbeta)
    tl.store(DBIAS + n * C + c, dbias)
    tl.store(SQUARED + n, tl.sum(dgamma * dgamma + dbeta * dbeta + dbias * dbias, axis=0))
