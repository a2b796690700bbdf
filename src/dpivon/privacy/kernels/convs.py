"""Any 2-d convolution's per-example weight gradients, measured and added up without unfolding or storing them.

    g_n[tap, i, o] = Σ_t X[n, i, t·stride + tap·dilation − padding] · G[n, o, t]

is a product of an example's patches with its output gradients. A program makes one tile of it, BD of the D = taps · channels-in
rows and BO of the channels out, BT positions at a time: the patches are indexed where they lie, never written out. Operands are
bf16 or fp32, accumulators fp32. X and G may have any strides; channels that lie side by side are read fastest.

What is summed is what was measured: both kernels run the same loop (:func:`_gradient`) with the same tiles, so that their
accumulators agree to the bit, and the clip factor multiplies those, never a rounded operand. There are no atomics: every
program writes its own place, and the order of every sum is fixed.

Standardised weights, ŵ = c/‖c‖ with c = w − mean(w), pull a gradient back to (g − mean(g) − u⟨u, g⟩) / ‖c‖ for every output
channel, u being ŵ (or 0 where ‖c‖ is at its floor). As u has norm one and mean zero, both terms are projections, and

    ‖pulled back‖² = (Σ (g − mean(g))² − ⟨u, g − mean(g)⟩²) / ‖c‖²

needs three numbers per output channel: mean(g), S = Σ (g − mean(g))² and q = ⟨u, g − mean(g)⟩. Taken from Σ g² and (Σ g)² the
first term would cancel: where activations have an offset of 30 deviations, a gradient is nearly all mean. So a part of the rows
is first shifted by the mean m of its first tile, and keeps ρ = Σ (g − m), S_m = Σ (g − m)² and q_m = ⟨u, g − m⟩; parts are
combined in double (:func:`combine_statistics`):

    mean = Σ_parts (rows · m + ρ) / D,   S = Σ_parts S_m + 2 (m − mean) ρ + rows (m − mean)²,   q = Σ_parts q_m + (m − mean) Σ u

The sum subtracts its mean from every example's gradient before it is weighted: otherwise what the pull-back takes away
afterwards would long have rounded off what it leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _patches(XN, t, positions, d, xh, xw, xc,
    H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, CIN: tl.constexpr, D: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """What rows d of the weights meet at positions t of the example at XN: [BT, BD]."""
    tap = d // CIN
    kh = (tap // KW) * DH - PH
    kw = (tap % KW) * DW - PW
    x_at = kh * xh + kw * xw + (d % CIN) * xc
    oh = t // OW
    ow = t % OW
    h = (oh * SH)[:, None] + kh[None, :]
    w = (ow * SW)[:, None] + kw[None, :]
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (d < D)[None, :] & (t < positions)[:, None]
    return tl.load(XN + (oh * SH * xh + ow * SW * xw)[:, None] + x_at[None, :], mask=inside, other=0.0)


@triton.jit
def _outputs(GN, t, positions, o, gh, gw, gc, OW: tl.constexpr, COUT: tl.constexpr):
    """The output gradients of the example at GN at positions t: [BT, BO]."""
    there = (t < positions)[:, None] & (o < COUT)[None, :]
    return tl.load(GN + (t // OW * gh + t % OW * gw)[:, None] + (o * gc)[None, :], mask=there, other=0.0)


@triton.jit
def _gradient(
    X, G, held, n, positions, d, o, xn, xh, xw, xc, gn, gh, gw, gc,
    H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, T: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    D: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BO: tl.constexpr,
    PRECISION: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows d and columns o of the gradient of example n, which is ROWS rows of the batch: [BD, BO]. Of every row ``positions``
    are read: all T, or none of an example that was dropped and may hold NaN. With HELD, ``held`` is all of its output gradients
    in columns o: one tile of positions."""
    acc = tl.zeros((BD, BO), tl.float32)
    for row in range(ROWS):
        XN = X + (n * ROWS + row) * xn  # n is 64 bits wide: the tensors may be larger than 2³¹
        GN = G + (n * ROWS + row) * gn
        for start in range(0, T, BT):
            t = start + tl.arange(0, BT)
            a = _patches(XN, t, positions, d, xh, xw, xc, H, W, OW, CIN, D, KW, SH, SW, PH, PW, DH, DW)
            g = held if HELD else _outputs(GN, t, positions, o, gh, gw, gc, OW, COUT)
            acc = tl.dot(tl.trans(a), g, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _less(g, shift, d, D: tl.constexpr, BD: tl.constexpr):
    """g − shift, and nothing in the rows after the last."""
    g = g - shift[None, :]
    if D % BD != 0:
        g = tl.where((d < D)[:, None], g, 0.0)
    return g


@triton.jit
def _tile_of(UNIT, d, o, D: tl.constexpr, COUT: tl.constexpr):
    there = (d < D)[:, None] & (o < COUT)[None, :]
    return tl.load(UNIT + d[:, None] * COUT + o[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def gradient_statistics(
    X, G, UNIT, PARTIAL, UNIT_SUMS, xn, xh, xw, xc, gn, gh, gw, gc,
    H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, T: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    D: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BO: tl.constexpr,
    PRECISION: tl.constexpr, STANDARDISED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A part of one example: SPAN tiles, one below the other, added up element by element and reduced at the end, because a
    reduction costs more than a product. PARTIAL is [example, part, 1 or 4, COUT]: Σ g², or m, ρ, S_m and q_m. UNIT is u,
    [D, COUT]; its sums over every part's rows are left in UNIT_SUMS, [part, COUT]. What is read again for every tile, output
    gradients of few positions and directions, is held or as short as it may be: these programs wait for the cache."""
    HELD: tl.constexpr = ROWS == 1 and T <= BT
    ACROSS: tl.constexpr = (COUT + BO - 1) // BO
    DOWN: tl.constexpr = (D + BD - 1) // BD
    PARTS: tl.constexpr = (DOWN + SPAN - 1) // SPAN
    n = (tl.program_id(0) // (PARTS * ACROSS)).to(tl.int64)
    part = tl.program_id(0) % (PARTS * ACROSS) // ACROSS
    o = tl.program_id(0) % ACROSS * BO + tl.arange(0, BO)
    first = part * SPAN
    last = tl.minimum(first + SPAN, DOWN)
    d = first * BD + tl.arange(0, BD)
    held = _outputs(G + n * gn, tl.arange(0, BT), T, o, gh, gw, gc, OW, COUT) if HELD else 0.0
    g = _gradient(
        X, G, held, n, T, d, o, xn, xh, xw, xc, gn, gh, gw, gc,
        H, W, OW, T, CIN, COUT, D, KW, SH, SW, PH, PW, DH, DW, ROWS, BT, BD, BO, PRECISION, HELD,
    )  # fmt: skip
    if STANDARDISED:
        m = tl.sum(g, axis=0) / tl.minimum(BD, D - first * BD)
        g = _less(g, m, d, D, BD)
        rest = g
        along = g * _tile_of(UNIT, d, o, D, COUT)
    squares = g * g
    if SPAN > 1:
        for down in range(first + 1, last):
            d = down * BD + tl.arange(0, BD)
            g = _gradient(
                X, G, held, n, T, d, o, xn, xh, xw, xc, gn, gh, gw, gc,
                H, W, OW, T, CIN, COUT, D, KW, SH, SW, PH, PW, DH, DW, ROWS, BT, BD, BO, PRECISION, HELD,
            )  # fmt: skip
            if STANDARDISED:
                g = _less(g, m, d, D, BD)
                rest += g
                along += g * _tile_of(UNIT, d, o, D, COUT)
            squares += g * g
    if STANDARDISED:
        at = PARTIAL + (n * PARTS + part) * (4 * COUT) + o
        tl.store(at, m, mask=o < COUT)
        tl.store(at + COUT, tl.sum(rest, axis=0), mask=o < COUT)
        tl.store(at + 2 * COUT, tl.sum(squares, axis=0), mask=o < COUT)
        tl.store(at + 3 * COUT, tl.sum(along, axis=0), mask=o < COUT)
        if n == 0:
            units = tl.zeros((BD, BO), tl.float32)
            for down in range(first, last):
                units += _tile_of(UNIT, down * BD + tl.arange(0, BD), o, D, COUT)
            tl.store(UNIT_SUMS + part * COUT + o, tl.sum(units, axis=0), mask=o < COUT)
    else:
        tl.store(PARTIAL + (n * PARTS + part) * COUT + o, tl.sum(squares, axis=0), mask=o < COUT)


@triton.jit(do_not_specialize=["PARTS", "D", "EACH"])
def combine_statistics(PARTIAL, UNIT_SUMS, OUT, PARTS, D, EACH, COUT, BO: tl.constexpr):
    """All parts of an example, of EACH rows, in double, for standardised weights. OUT is [example, 3, COUT]: mean, S and q."""
    ACROSS = (COUT + BO - 1) // BO
    n = (tl.program_id(0) // ACROSS).to(tl.int64)
    o = tl.program_id(0) % ACROSS * BO + tl.arange(0, BO)
    here = o < COUT
    PARTIAL += n * (PARTS * 4 * COUT)
    mean = tl.zeros((BO,), tl.float64)
    for part in range(PARTS):
        rows = tl.minimum(EACH, D - part * EACH)
        m = tl.load(PARTIAL + part * (4 * COUT) + o, mask=here, other=0.0).to(tl.float64)
        mean += m * rows + tl.load(PARTIAL + part * (4 * COUT) + COUT + o, mask=here, other=0.0).to(tl.float64)
    mean /= D
    spread = tl.zeros((BO,), tl.float64)
    along = tl.zeros((BO,), tl.float64)
    for part in range(PARTS):
        rows = tl.minimum(EACH, D - part * EACH)
        at = PARTIAL + part * (4 * COUT) + o
        off = tl.load(at, mask=here, other=0.0).to(tl.float64) - mean
        rest = tl.load(at + COUT, mask=here, other=0.0).to(tl.float64)
        spread += tl.load(at + 2 * COUT, mask=here, other=0.0).to(tl.float64) + off * (2 * rest + off * rows)
        along += tl.load(at + 3 * COUT, mask=here, other=0.0).to(tl.float64)
        along += off * tl.load(UNIT_SUMS + part * COUT + o, mask=here, other=0.0).to(tl.float64)
    tl.store(OUT + n * (3 * COUT) + o, mean.to(tl.float32), mask=here)
    tl.store(OUT + n * (3 * COUT) + COUT + o, spread.to(tl.float32), mask=here)
    tl.store(OUT + n * (3 * COUT) + 2 * COUT + o, along.to(tl.float32), mask=here)


@triton.jit(do_not_specialize=["N", "EACH"])
def gradient_sums(
    X, G, FACTOR, STATISTICS, OUT, N, EACH, xn, xh, xw, xc, gn, gh, gw, gc,
    H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, T: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    D: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BO: tl.constexpr,
    PRECISION: tl.constexpr, STANDARDISED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_n c_n g_n over EACH examples. OUT is [chunk, D, COUT]; an example with c = 0 is not even read."""
    ACROSS: tl.constexpr = (COUT + BO - 1) // BO
    TILES: tl.constexpr = (D + BD - 1) // BD * ACROSS
    chunk = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.program_id(0) % TILES // ACROSS * BD + tl.arange(0, BD)
    o = tl.program_id(0) % ACROSS * BO + tl.arange(0, BO)
    whole = (d < D)[:, None] & (o < COUT)[None, :]
    place = d[:, None] * COUT + o[None, :]
    total = tl.zeros((BD, BO), tl.float32)
    for n in tl.range(chunk * EACH, tl.minimum(N, chunk * EACH + EACH), flatten=FLATTEN):
        c = tl.load(FACTOR + n)
        kept = tl.where(c > 0.0, 1, 0)
        g = _gradient(
            X, G, 0.0, n, kept * T, d, o, xn, xh, xw, xc, gn, gh, gw, gc,
            H, W, OW, T, CIN, COUT, D, KW, SH, SW, PH, PW, DH, DW, ROWS, BT, BD, BO, PRECISION, False,
        )  # fmt: skip
        if STANDARDISED:
            g -= tl.load(STATISTICS + n * (3 * COUT) + o, mask=o < kept * COUT, other=0.0)[None, :]
        total += g * c
    tl.store(OUT + chunk * (D * COUT) + place, total, mask=whole)


# ---- sums over positions: bias gradients, and the chunks of a weighted sum


@triton.jit(do_not_specialize=["T"])
def add_positions(
    G, OUT, gn, gt, go, outn, P, T, BT: tl.constexpr, BO: tl.constexpr, ACCUMULATOR: tl.constexpr
):  # fmt: skip
    """Σ over positions of G [rows, T, P]. OUT is [rows, P] in the accumulator's dtype, its rows ``outn`` apart.

    A program reads BO neighbouring outputs of one row, BT positions at a time, adds them up element by element and reduces
    once at the end. There are no atomics, and the order of every sum is fixed.
    """
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


@triton.jit(do_not_specialize=["T", "P"])
def weighted_halves(X, C, OUT, xn, xt, xp, T, P, BLOCK: tl.constexpr):
    """C[n] X[n, t, :] as two bf16 numbers that add up to it, side by side. X is [rows, T, P], OUT [rows, T, 2 P].

    Where a weight is zero so are both, whatever X holds.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.load(C + row // T)
    x = tl.load(X + row // T * xn + row % T * xt + p.to(tl.int64) * xp, mask=p < P, other=0.0)
    weighted = tl.where(c == 0.0, 0.0, x.to(tl.float32) * c)
    high = weighted.to(tl.bfloat16)
    low = (weighted - high.to(tl.float32)).to(tl.bfloat16)
    tl.store(OUT + row * (2 * P) + p, high, mask=p < P)
    tl.store(OUT + row * (2 * P) + P + p, low, mask=p < P)


# ---- what norms are bounded by


@triton.jit(do_not_specialize=["EIGHTS", "BLOCKS"])
def gram_forms(K, J, OUT, EIGHTS, BLOCKS, R: tl.constexpr, C: tl.constexpr):
    """Of R rows of one example's K = AAᵀ and J = GGᵀ, [rows, T, T] each, in double:
    Σ KJ, Σ ‖A_s‖‖A_t‖|J_st|, Σ ‖G_s‖‖G_t‖|K_st|, Σ ‖A_s‖‖G_s‖, Σ ‖A_s‖² and Σ ‖G_s‖². OUT is [rows, BLOCKS, 6].

    T is eight times EIGHTS: rows are then known to begin where several numbers are read at once.
    """
    T = EIGHTS * 8
    n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    r = tl.program_id(0) % BLOCKS * R + tl.arange(0, R)
    K += n * T * T
    J += n * T * T
    kr = tl.load(K + r * (T + 1), mask=r < T, other=0.0)
    jr = tl.load(J + r * (T + 1), mask=r < T, other=0.0)
    ar = tl.sqrt_rn(kr)
    gr = tl.sqrt_rn(jr)
    inner = tl.zeros((R, C), tl.float64)
    by_j = tl.zeros((R, C), tl.float64)
    by_k = tl.zeros((R, C), tl.float64)
    for start in range(0, T, C):
        c = start + tl.arange(0, C)
        there = (r < T)[:, None] & (c < T)[None, :]
        k = tl.load(K + r[:, None] * T + c[None, :], mask=there, other=0.0)
        j = tl.load(J + r[:, None] * T + c[None, :], mask=there, other=0.0)
        ac = tl.sqrt_rn(tl.load(K + c * (T + 1), mask=c < T, other=0.0))
        gc = tl.sqrt_rn(tl.load(J + c * (T + 1), mask=c < T, other=0.0))
        inner += k.to(tl.float64) * j.to(tl.float64)
        by_j += (tl.abs(j) * (ar[:, None] * ac[None, :])).to(tl.float64)
        by_k += (tl.abs(k) * (gr[:, None] * gc[None, :])).to(tl.float64)
    OUT += tl.program_id(0).to(tl.int64) * 6
    tl.store(OUT, tl.sum(inner))
    tl.store(OUT + 1, tl.sum(by_j))
    tl.store(OUT + 2, tl.sum(by_k))
    tl.store(OUT + 3, tl.sum(ar.to(tl.float64) * gr.to(tl.float64)))
    tl.store(OUT + 4, tl.sum(kr.to(tl.float64)))
    tl.store(OUT + 5, tl.sum(jr.to(tl.float64)))


# ---- normalisations


@triton.jit(do_not_specialize=["T", "EACH", "PARTS"])
def normalised_sums(X, G, OUT, T, EACH, PARTS, EPS, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Σ G ẑ and Σ G over EACH positions of one example, with ẑ the rows of X less their means (if CENTRED) and over their
    deviations. X and G are [rows, T, D], OUT is [rows, PARTS, 2, D]. A program reads BT whole rows at a time."""
    n = (tl.program_id(0) // PARTS).to(tl.int64)
    first = tl.program_id(0) % PARTS * EACH
    last = tl.minimum(T, first + EACH)
    d = tl.arange(0, BD)
    weight = tl.zeros((BT, BD), tl.float32)
    bias = tl.zeros((BT, BD), tl.float32)
    for start in range(first, last, BT):
        t = start + tl.arange(0, BT)
        there = (t < last)[:, None] & (d < D)[None, :]
        place = (n * T + t)[:, None] * D + d[None, :]
        z = tl.load(X + place, mask=there, other=0.0).to(tl.float32)
        g = tl.load(G + place, mask=there, other=0.0)
        if CENTRED:
            z = tl.where(there, z - (tl.sum(z, axis=1) / D)[:, None], 0.0)
        inverse = tl.where(t < last, tl.rsqrt(tl.sum(z * z, axis=1) / D + EPS), 0.0)
        weight += g * (z * inverse[:, None])
        bias += g
    OUT += tl.program_id(0).to(tl.int64) * (2 * D)
    tl.store(OUT + d, tl.sum(weight, axis=0), mask=d < D)
    tl.store(OUT + D + d, tl.sum(bias, axis=0), mask=d < D)
