"""The kernels of convolutions in Triton's interpreter, on a CPU and in fp32: `TRITON_INTERPRET=1 python convs_interpreted.py`.

It is run by test_conv_kernels.py, in a process of its own because Triton reads that variable when it is imported.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import plain_convs
from conv_cases import CASES, KINDS, check_against_the_loop, gradients, make, use_of
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry, Tile
from dpivon.privacy.layers import bounded
from dpivon.privacy.layers.convolved import Convolved

TOLERANCE = {"plain": 3e-6, "standardised": 1e-5}  # the latter's norms are a little too large, never too small


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Using padding='same'")
    torch.library.register_kernel(
        "dpivon::conv_statistics", "cpu", lambda x, g, u, s, rows: conv_ops.statistics(x, g, u, Geometry.of(s), rows)
    )
    torch.library.register_kernel(
        "dpivon::conv_sums", "cpu", lambda x, g, c, found, s, rows: conv_ops.sums(x, g, c, found, Geometry.of(s), rows)
    )
    conv_ops.device_takes = lambda device: True
    for case in CASES:
        for kind in KINDS:
            assert isinstance(check_against_the_loop(case, kind, TOLERANCE[kind]), Convolved)
            print("ok", case, kind, flush=True)
    for kind in KINDS:
        what_is_summed_is_what_was_measured(kind)
        no_example_moves_the_sum_by_more_than_its_share(kind)
        rows_of_one_example(kind)
    tiles_change_nothing()
    strides_change_nothing()
    sums_over_positions()
    halves_of_what_is_weighted()
    forms_of_gram_matrices()
    sums_of_normalisations()


def what_is_summed_is_what_was_measured(kind: str) -> None:
    """Activations with an offset of 300 deviations, and no padding: a gradient is nearly all mean, which the pull-back takes
    away. One example at a time the sum is that example, and its norm is the one that was measured."""
    layer, x, g = make("5x5 unpadded", kind, examples=3, offset=300.0)
    use = use_of(layer, x, g)
    for i, squared in enumerate(use.squared_norm()):
        c = torch.zeros(3)
        c[i] = 0.7
        ratio = float(use.weighted_sum(c).norm() / (0.7 * squared.sqrt()))
        assert 1 - 2e-5 < ratio <= 1 + 1e-6, (kind, i, ratio)
    print("ok offset", kind, flush=True)


def no_example_moves_the_sum_by_more_than_its_share(kind: str) -> None:
    """Coherent gradients that are nearly all mean, clipped to one: a sum that rounds the mean moves by more."""
    conv_ops._PROGRAMS = 1  # as many examples as ever are added up in fp32
    layer, x, g = make("1x1 shortcut", kind, examples=65)
    x, g = x[:1] + 0.01 * x + 300.0, g[:1] + 0.01 * g
    whole = use_of(layer, x, g)
    factors = whole.squared_norm().rsqrt()
    total = whole.weighted_sum(factors)
    for gone in (0, 40):
        kept = torch.arange(65) != gone
        moved = float((total - use_of(layer, x[kept], g[kept]).weighted_sum(factors[kept])).norm())
        assert 0.99 < moved <= 1 + 1e-5, (kind, gone, moved)
    print("ok share", kind, flush=True)


def rows_of_one_example(kind: str) -> None:
    layer, x, g = make("3x3 stride 2", kind, examples=6)
    exact = gradients(layer, x, g).unflatten(0, (3, 2)).sum(1)
    use = use_of(layer, x, g).grouped(2)
    torch.testing.assert_close(use.squared_norm().sqrt(), exact.flatten(1).norm(dim=1), rtol=TOLERANCE[kind], atol=0.0)
    torch.testing.assert_close(use.weighted_sum(torch.ones(3)), exact.sum(0), rtol=1e-4, atol=1e-4)
    print("ok rows", kind, flush=True)


def tiles_change_nothing() -> None:
    """Several tiles down, across and along the positions, one program for several of them, one loop instead of two."""
    _, x, g = make("3x3", "plain")
    shape, unit, c = Geometry((3, 3), (1, 1), (1, 1), (1, 1)), torch.randn(144, 32), torch.rand(4)
    whole = conv_ops.statistics(x, g, unit, shape, 1)
    total = conv_ops.sums(x, g, c, whole, shape, 1).sum(0)
    for tile in (Tile(16, 16, 16, 4, 2, span=3), Tile(32, 64, 32, 4, 2, span=3, flatten=True)):
        found = conv_ops.statistics(x, g, unit, shape, 1, tile)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(conv_ops.sums(x, g, c, found, shape, 1, tile).sum(0), total, rtol=1e-4, atol=1e-4)
    print("ok tiles", flush=True)


def strides_change_nothing() -> None:
    """The operators read whatever they are given: channels first, last, or every second one."""
    _, x, g = make("3x3", "plain")
    shape = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    expected = conv_ops.statistics(x, g, None, shape, 1)
    every_second = torch.stack([x, x], 2).flatten(1, 2)[:, ::2]
    assert torch.equal(conv_ops.statistics(x.to(memory_format=torch.channels_last), g, None, shape, 1), expected)
    assert torch.equal(conv_ops.statistics(every_second, g, None, shape, 1), expected)
    print("ok strides", flush=True)


def sums_over_positions() -> None:
    """Fewer and more positions than a tile has, outputs that fill no line, any strides; NaN stays in its row."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 65, 48), (5, 64, 16), (5, 1, 40), (5, 130, 33))
    gs = [torch.randn(shape, generator=generator) for shape in shapes]
    gs[0] = torch.stack([gs[0], gs[0]], 2)[:, :, 0]
    gs[1] = gs[1].transpose(0, 1).contiguous().transpose(0, 1)
    gs[0][3, 2, 1] = float("nan")
    kept = torch.arange(5) != 3
    for double, tolerance in ((True, 1e-12), (False, 2e-6)):
        got, exact = (sums(gs, double) for sums in (conv_ops.add_up, plain_convs.plain_position_sums))
        assert got.dtype == exact.dtype
        assert got.isnan().nonzero().tolist() == [[3, 1]]
        torch.testing.assert_close(got[kept], exact[kept], rtol=0.0, atol=tolerance * 12)
    print("ok positions", flush=True)


def halves_of_what_is_weighted() -> None:
    """Any strides, more columns than a program has, and nothing of a weight of zero. The interpreter cuts, a GPU rounds."""
    t = torch.randn(3, 5, 2100, generator=torch.Generator().manual_seed(0)).bfloat16()
    c = torch.tensor([0.37, 0.0, 1.0])
    for given in (t, t.transpose(1, 2), t[:, ::2, 1:40]):
        exact = given.double() * c.double().view(-1, 1, 1)
        spoiled = given.clone()
        spoiled[1, 2, 3] = float("inf")
        high, low = conv_ops.weighted_halves(spoiled, c).double().tensor_split(2, 2)
        assert ((high + low - exact).abs() <= 2**-14 * exact.abs()).all()
        assert ((high - exact).abs() <= 2**-7 * exact.abs()).all()
    print("ok halves", flush=True)


def forms_of_gram_matrices() -> None:
    """More positions than a program reads at a time, and rows of zeros; NaN stays in its example."""
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(4, 152, n, generator=generator) for n in (6, 9))
    a[1, 70:], g[2, 3, 4] = 0.0, float("nan")
    k, j = a @ a.mT, g @ g.mT
    made = conv_ops.gram_forms(k, j)
    with conv_ops.kernels(on=False):
        torch.testing.assert_close(made, bounded._forms(k, j), rtol=2e-6, atol=0.0, equal_nan=True)
    assert made.isnan().any(1).tolist() == [False, False, True, False]
    exact = (k.double() * j.double()).sum((1, 2))
    torch.testing.assert_close(made[:, 0], exact, rtol=1e-12, atol=0.0, equal_nan=True)
    print("ok forms", flush=True)


def sums_of_normalisations() -> None:
    """Few and many positions, rows that fill no tile, also without centring or ε; NaN stays in its example."""
    conv_ops._PROGRAMS = 20
    generator = torch.Generator().manual_seed(0)
    for t, n in ((1, 40), (50, 600), (7, 5000)):
        x, g = (torch.randn(4, t, n, generator=generator) for _ in range(2))
        x, g[2, 0, 3] = x.bfloat16() + 3, float("nan")
        for function, eps in ((F.layer_norm, 1e-5), (F.layer_norm, 0.0), (F.rms_norm, 1e-6)):
            made = conv_ops.normalised_sums(x, g, eps, centred=function is F.layer_norm)
            expected = (g * function(x.float(), (n,), eps=eps)).sum(1), g.sum(1)
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    print("ok normalisations", flush=True)


if __name__ == "__main__":
    with conv_ops.kernels(on=True):
        main()
