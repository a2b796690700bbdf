"""GroupNorm, ReLU and 2×2 max-pooling of many models at once, one program an example, forward and backward in one kernel each.

    ẑ = (z − μ_group) / √(var_group + ε),   n = γ ẑ + β,   y = maxpool(relu(n))

Tensors are NHWC and may be bf16; statistics, per-example gradients of γ and β, and everything summed are fp32. Forward leaves
behind which of the four pixels won and its z, so that backward needs to go through all of z only once; unless nobody will ask.
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
def _corner_at(p, j: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Where one of the four pixels under each pooled position of an example lies: [positions, C]."""
    HALF: tl.constexpr = W // 2
    pixel = (2 * (p // HALF) + j // 2) * W + 2 * (p % HALF) + j % 2
    return pixel[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def _contest(best, which, z_best, z, j: tl.constexpr, scale, shift):
    """Pixel j against the best so far: the first of the largest wins, as in torch, and NaN stays NaN."""
    v = z.to(tl.float32) * scale[None, :] + shift[None, :]
    wins = v > best
    return tl.where(v != v, v, tl.maximum(best, v)), tl.where(wins, j, which), tl.where(wins, z, z_best)


@triton.jit
def norm_pool_forward(
    Z, GAMMA, BETA, MODEL, Y, WHICH, ZBEST, MEAN, RSTD, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One example; BP, the pooled positions handled at a time, divides H·W/4. Without KEEP it writes Y alone."""
    POOLED: tl.constexpr = H * W // 4
    tl.static_assert(POOLED % BP == 0)
    n = tl.program_id(0).to(tl.int64)
    k = tl.load(MODEL + n).to(tl.int64)
    c = tl.arange(0, C)
    Z += n * (H * W * C)
    # Tiles are added up as tiles and reduced once at the end: a reduction makes the warps wait for each other.
    total = tl.zeros((BP, C), tl.float32)
    squares = tl.zeros((BP, C), tl.float32)
    for start in range(0, H * W, BP):
        at = (start + tl.arange(0, BP))[:, None] * C + c[None, :]
        z = tl.load(Z + at).to(tl.float32)
        total += z
        squares += z * z
    count: tl.constexpr = H * W * CG
    mean = _by_group(tl.sum(total, axis=0), C, CG) / count
    var = tl.maximum(_by_group(tl.sum(squares, axis=0), C, CG) / count - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    if KEEP:
        tl.store(MEAN + n * C + c, mean)
        tl.store(RSTD + n * C + c, rstd)
    scale = tl.load(GAMMA + k * C + c).to(tl.float32) * rstd
    shift = tl.load(BETA + k * C + c).to(tl.float32) - mean * scale
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        best = tl.zeros((BP, C), tl.float32)  # relu: nothing below zero survives
        which = tl.full((BP, C), -1, tl.int32)
        z_best = tl.zeros((BP, C), Z.dtype.element_ty)
        for j in tl.static_range(4):
            z = tl.load(Z + _corner_at(p, j, W, C))
            best, which, z_best = _contest(best, which, z_best, z, j, scale, shift)
        at = n * (POOLED * C) + p[:, None] * C + c[None, :]
        tl.store(Y + at, best.to(Y.dtype.element_ty))
        if KEEP:
            tl.store(WHICH + at, which.to(tl.int8))
            tl.store(ZBEST + at, z_best)


@triton.jit
def norm_pool_backward(
    Z, DY, WHICH, ZBEST, GAMMA, MODEL, MEAN, RSTD, DZ, SMALL, SQUARED,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dz, and this example's gradients of γ, β and of the bias that was added to z, with their squared norm.

    BP, the pooled positions handled at a time, divides H·W/4. An example whose z is not finite has no finite loss either,
    and is struck for that.
    """
    POOLED: tl.constexpr = H * W // 4
    tl.static_assert(POOLED % BP == 0)
    n = tl.program_id(0).to(tl.int64)
    k = tl.load(MODEL + n).to(tl.int64)
    c = tl.arange(0, C)
    Z += n * (H * W * C)
    DZ += n * (H * W * C)
    DY += n * (POOLED * C)
    WHICH += n * (POOLED * C)
    ZBEST += n * (POOLED * C)
    dn_tile = tl.zeros((BP, C), tl.float32)
    dnz_tile = tl.zeros((BP, C), tl.float32)
    for start in range(0, POOLED, BP):
        at = (start + tl.arange(0, BP))[:, None] * C + c[None, :]
        dn = tl.where(tl.load(WHICH + at) >= 0, tl.load(DY + at).to(tl.float32), 0.0)
        dn_tile += dn
        dnz_tile += dn * tl.load(ZBEST + at).to(tl.float32)
    dbeta = tl.sum(dn_tile, axis=0)
    mean = tl.load(MEAN + n * C + c)
    rstd = tl.load(RSTD + n * C + c)
    gamma = tl.load(GAMMA + k * C + c).to(tl.float32)
    dgamma = (tl.sum(dnz_tile, axis=0) - mean * dbeta) * rstd  # Σ dn ẑ from Σ dn z and Σ dn
    count: tl.constexpr = H * W * CG
    mean_dz = _by_group(gamma * dbeta, C, CG) / count
    mean_dzz = _by_group(gamma * dgamma, C, CG) / count
    # dz = rstd (γ dn − mean_dz − ẑ mean_dzz) as an affine function of z, plus scale·dn where the gradient went.
    slope = -rstd * rstd * mean_dzz
    level = -rstd * mean_dz - mean * slope
    scale = gamma * rstd
    dz_tile = tl.zeros((BP, C), tl.float32)
    for start in range(0, POOLED, BP):
        p = start + tl.arange(0, BP)
        at = p[:, None] * C + c[None, :]
        which = tl.load(WHICH + at)
        down = tl.load(DY + at).to(tl.float32) * scale[None, :]
        for j in tl.static_range(4):
            place = _corner_at(p, j, W, C)
            dz = tl.load(Z + place).to(tl.float32) * slope[None, :] + level[None, :]
            dz = (dz + tl.where(which == j, down, 0.0)).to(DZ.dtype.element_ty)
            tl.store(DZ + place, dz)
            dz_tile += dz.to(tl.float32)  # of what was stored: that is the gradient the weights see too
    dbias = tl.sum(dz_tile, axis=0)
    SMALL += n * (3 * C)
    tl.store(SMALL + c, dgamma)
    tl.store(SMALL + C + c, dbeta)
    tl.store(SMALL + 2 * C + c, dbias)
    tl.store(SQUARED + n, tl.sum(dgamma * dgamma + dbeta * dbeta + dbias * dbias, axis=0))
