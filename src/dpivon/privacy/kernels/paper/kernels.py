"""Triton kernels of the paper's CNN for many models at once, on NHWC tensors.

Examples of all models lie one after the other; ``MODEL[n]`` says whose example n is, so every tile of rows reads its
own model's weights and nothing is padded. Operands may be bf16; products accumulate in fp32, and statistics, per-example
gradients and everything summed are fp32.

3×3 convolutions as implicit matrix products:

    forward     Z[n, t, :]  = Σ_tap X[n, t + shift(tap), :] · W[tap] + bias
    gradients   g_n[tap]    = Σ_t X[n, t + shift(tap), :]ᵀ G[n, t, :]

The weight gradient of an example is never stored: ``weight_norms`` keeps only its squared norm, ``weight_sums`` adds
it up times the example's clip factor. The factor multiplies the fp32 accumulator, never a rounded operand, so what is
summed is exactly what was measured.

GroupNorm, ReLU and 2×2 max-pooling, one program per example, forward and backward in one kernel each:

    ẑ = (z − μ_group) / √(var_group + ε),   n = γ ẑ + β,   y = maxpool(relu(n))

Forward leaves behind which of the four pixels won and its z, so that backward goes through all of z only once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _patch(X, pixels, h, w, tap, H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, SIGN: tl.constexpr):
    """Pixels of one example shifted by a tap, zero outside the image: [pixels, CIN]."""
    dh = (tap // 3 - 1) * SIGN
    dw = (tap % 3 - 1) * SIGN
    ok = (h + dh >= 0) & (h + dh < H) & (w + dw >= 0) & (w + dw < W)
    c = tl.arange(0, CIN)
    return tl.load(X + (pixels + dh * W + dw)[:, None] * CIN + c[None, :], mask=ok[:, None], other=0.0)


@triton.jit
def _pixels3(X, pixels, h, w, H: tl.constexpr, W: tl.constexpr):
    """All 27 values under the kernel for a 3-channel image, padded to 32: [pixels, 32]."""
    k = tl.arange(0, 32)
    tap = k // 3
    dh = tap // 3 - 1
    dw = tap % 3 - 1
    hh = h[:, None] + dh[None, :]
    ww = w[:, None] + dw[None, :]
    ok = (k < 27)[None, :] & (hh >= 0) & (hh < H) & (ww >= 0) & (ww < W)
    at = pixels[:, None] * 3 + ((dh * W + dw) * 3 + k % 3)[None, :]
    return tl.load(X + at, mask=ok, other=0.0)


@triton.jit
def conv_forward(
    X, WEIGHT, BIAS, MODEL, Z,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    BM: tl.constexpr, SIGN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of BM positions of one example; BM divides H·W. SIGN = −1 with transposed weights gives the input's gradient."""
    tl.static_assert(H * W % BM == 0)
    tiles: tl.constexpr = H * W // BM
    n = (tl.program_id(0) // tiles).to(tl.int64)
    k = tl.load(MODEL + n).to(tl.int64)
    pixels = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    h = pixels // W
    w = pixels % W
    cols = tl.arange(0, COUT)
    X += n * (H * W * CIN)
    if CIN == 3:
        kk = tl.arange(0, 32)
        a = _pixels3(X, pixels, h, w, H, W)
        WEIGHT += k * (27 * COUT)
        b = tl.load(WEIGHT + kk[:, None] * COUT + cols[None, :], mask=(kk < 27)[:, None], other=0.0)
        acc = tl.dot(a, b)
    else:
        ci = tl.arange(0, CIN)
        WEIGHT += k * (9 * CIN * COUT)
        acc = tl.zeros((BM, COUT), tl.float32)
        for tap in tl.static_range(9):
            a = _patch(X, pixels, h, w, tap, H, W, CIN, SIGN)
            b = tl.load(WEIGHT + tap * CIN * COUT + ci[:, None] * COUT + cols[None, :])
            acc = tl.dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(BIAS + k * COUT + cols).to(tl.float32)[None, :]
    tl.store(Z + n * (H * W * COUT) + pixels[:, None] * COUT + cols[None, :], acc.to(Z.dtype.element_ty))


@triton.jit
def _image_gradient(X, G, n, H: tl.constexpr, W: tl.constexpr, COUT: tl.constexpr, BT: tl.constexpr):
    """One example's gradient of a 3-channel kernel, whole: [32, COUT]."""
    tl.static_assert(H * W % BT == 0)
    cols = tl.arange(0, COUT)
    X += n * (H * W * 3)  # n is 64 bits wide: the tensors are larger than 2³¹
    G += n * (H * W * COUT)
    acc = tl.zeros((32, COUT), tl.float32)
    for start in range(0, H * W, BT):
        pixels = start + tl.arange(0, BT)
        a = _pixels3(X, pixels, pixels // W, pixels % W, H, W)
        g = tl.load(G + pixels[:, None] * COUT + cols[None, :])
        acc = tl.dot(tl.trans(a), g, acc)
    return acc


@triton.jit
def _tap_gradient(
    X, G, n, tap, H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BT: tl.constexpr
):
    """One example's gradient of one tap: [CIN, COUT]."""
    tl.static_assert(H * W % BT == 0)
    cols = tl.arange(0, COUT)
    X += n * (H * W * CIN)
    G += n * (H * W * COUT)
    acc = tl.zeros((CIN, COUT), tl.float32)
    for start in range(0, H * W, BT):
        pixels = start + tl.arange(0, BT)
        g = tl.load(G + pixels[:, None] * COUT + cols[None, :])
        acc = tl.dot(tl.trans(_patch(X, pixels, pixels // W, pixels % W, tap, H, W, CIN, 1)), g, acc)
    return acc


@triton.jit
def _row_gradient(
    X, G, n, row, H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BT: tl.constexpr
):
    """One example's gradients of the three taps of a row of the kernel, which share every read of G."""
    tl.static_assert(H * W % BT == 0)
    cols = tl.arange(0, COUT)
    X += n * (H * W * CIN)
    G += n * (H * W * COUT)
    left = tl.zeros((CIN, COUT), tl.float32)
    middle = tl.zeros((CIN, COUT), tl.float32)
    right = tl.zeros((CIN, COUT), tl.float32)
    for start in range(0, H * W, BT):
        pixels = start + tl.arange(0, BT)
        h = pixels // W
        w = pixels % W
        g = tl.load(G + pixels[:, None] * COUT + cols[None, :])
        left = tl.dot(tl.trans(_patch(X, pixels, h, w, 3 * row, H, W, CIN, 1)), g, left)
        middle = tl.dot(tl.trans(_patch(X, pixels, h, w, 3 * row + 1, H, W, CIN, 1)), g, middle)
        right = tl.dot(tl.trans(_patch(X, pixels, h, w, 3 * row + 2, H, W, CIN, 1)), g, right)
    return left, middle, right


@triton.jit
def _square(g):
    return tl.sum(tl.sum(g * g, axis=1), axis=0)


@triton.jit
def weight_norms(
    X, G, SQUARED,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """‖g_n‖² of every example, from TAPS taps of the kernel at a time: 1, or 3 that share their reads."""
    n = tl.program_id(0).to(tl.int64)
    total = 0.0
    if CIN == 3:
        total += _square(_image_gradient(X, G, n, H, W, COUT, BT))
    elif TAPS == 3:
        for row in tl.static_range(3):
            left, middle, right = _row_gradient(X, G, n, row, H, W, CIN, COUT, BT)
            total += _square(left) + _square(middle) + _square(right)
    else:
        for tap in tl.static_range(9):
            total += _square(_tap_gradient(X, G, n, tap, H, W, CIN, COUT, BT))
    tl.store(SQUARED + n, total)


@triton.jit
def _weighted(g, c):
    return tl.where(c > 0.0, g * c, 0.0)  # a dropped example may hold NaN


@triton.jit
def weight_sums(
    X, G, FACTOR, START, OUT,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BT: tl.constexpr, TAPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Σ_n c_n g_n over one of CHUNKS parts of a model's examples, for TAPS taps. OUT is [model, chunk, tap, K, COUT]."""
    K: tl.constexpr = 32 if CIN == 3 else CIN
    ALL: tl.constexpr = 1 if CIN == 3 else 9
    k = tl.program_id(0)
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    begin = tl.load(START + k).to(tl.int64)
    end = tl.load(START + k + 1).to(tl.int64)
    each = (end - begin + CHUNKS - 1) // CHUNKS
    low = begin + chunk * each
    high = tl.minimum(low + each, end)
    place = tl.arange(0, K)[:, None] * COUT + tl.arange(0, COUT)[None, :]
    OUT += ((k * CHUNKS + chunk) * ALL + part * TAPS).to(tl.int64) * (K * COUT)
    total = tl.zeros((K, COUT), tl.float32)
    if CIN == 3:
        for n in range(low, high):
            total += _weighted(_image_gradient(X, G, n, H, W, COUT, BT), tl.load(FACTOR + n))
    elif TAPS == 1:
        for n in range(low, high):
            total += _weighted(_tap_gradient(X, G, n, part, H, W, CIN, COUT, BT), tl.load(FACTOR + n))
    else:
        second = tl.zeros((K, COUT), tl.float32)
        third = tl.zeros((K, COUT), tl.float32)
        for n in range(low, high):
            c = tl.load(FACTOR + n)
            left, middle, right = _row_gradient(X, G, n, part, H, W, CIN, COUT, BT)
            total += _weighted(left, c)
            second += _weighted(middle, c)
            third += _weighted(right, c)
        tl.store(OUT + K * COUT + place, second)
        tl.store(OUT + 2 * K * COUT + place, third)
    tl.store(OUT + place, total)


# ---- normalisation and pooling


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
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One example; BP, the pooled positions handled at a time, divides H·W/4."""
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
        tl.store(WHICH + at, which.to(tl.int8))
        tl.store(ZBEST + at, z_best)


@triton.jit
def norm_pool_backward(
    Z, DY, WHICH, ZBEST, GAMMA, MODEL, MEAN, RSTD, DZ, SMALL, SQUARED,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CG: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dz, and this example's gradients of γ, β and of the bias that was added to z, with their squared norm.

    BP, the pooled positions handled at a time, divides H·W/4. An example whose z is not finite has no finite loss either,
    and is dropped for that.
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
