"""Gradients from bf16 operands: norms are never too small, what is summed is bounded by them, and both are nearly exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dpivon.privacy.clipping import weighted_sum
from dpivon.privacy.gradients.means import Widened
from dpivon.privacy.gradients.side_by_side import in_blocks, split, squared_norms
from dpivon.privacy.layers import bounded
from dpivon.privacy.layers.bounded import Bounded, BoundedTied, Unmade
from dpivon.privacy.layers.uses import Outer, Rows, merge, settled
from dpivon.privacy.precision import padded, padded_empty

B = 6


def operands(t: int, d: int, p: int, like: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(t + d + p)
    a, g = torch.randn(B, t, d), torch.randn(B, t, p)
    half = t // 2
    if like == "cancelling":  # positions cancel in pairs, but for one that is a little larger
        a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
        g[:, 0] *= 1.01
    elif like == "aligned":  # all products have one sign, and low bits that accumulators lose
        a, g = a.abs() + 1.0, g.abs() + 1.0
    elif like == "padded":
        g[:, half:] = 0.0
    elif like == "small":  # Gram matrices of G vanish in fp32
        a, g = a * 1e15, g * 1e-21
    return a.bfloat16(), g.bfloat16()


def exact(a: Tensor, g: Tensor, transposed: bool = False) -> Tensor:
    made = torch.einsum("btp,btd->bpd", g.double(), a.double())
    return made.mT if transposed else made


@pytest.fixture(params=["grams", "made"])
def form(request, monkeypatch):
    monkeypatch.setattr(Bounded, "by_grams", property(lambda use: request.param == "grams"))
    monkeypatch.setattr(bounded, "_CHUNK", 64)
    return request.param


@pytest.mark.parametrize("like", ["ordinary", "cancelling", "aligned", "padded", "small"])
@pytest.mark.parametrize(("t", "d", "p"), [(2, 9, 70), (40, 24, 131), (128, 80, 16)])
def test_what_an_example_adds_is_at_most_its_norm(form, like, t, d, p):
    for transposed in (False, True):
        a, g = operands(t, d, p, like)
        each = exact(a, g, transposed)
        use = Bounded(a, g, torch.Size((d, p) if transposed else (p, d)), transposed)
        norms, lengths = use.squared_norm().sqrt(), exact_lengths(a, g)
        assert (norms >= each.flatten(1).norm(dim=1)).all()
        if like != "small":
            slack = 1.1 * (128 + 12) * 2**-23  # of two Gram matrices over 64 columns at a time
            most = (each.flatten(1).norm(dim=1).square() + slack * lengths.square()).sqrt()
            assert (norms <= 1.0001 * most + (2 * t * 2**-23 + 2**-18) * 1.01 * lengths).all()
        alone = torch.eye(B, dtype=torch.float64) / norms  # each clipped to one, one at a time
        assert all(float(use.weighted_sum(c).norm()) <= 1 + 1e-12 for c in alone)
        c = torch.rand(B, dtype=torch.float64)
        off = use.weighted_sum(c) - torch.einsum("b,bij->ij", c, each)
        assert float(off.norm()) <= (t * 2**-23 + 2**-18) * float((c * lengths).sum())


@pytest.mark.parametrize("like", ["ordinary", "cancelling", "aligned", "padded"])
@pytest.mark.parametrize("lost", ["where it shortens", "everywhere"])
def test_norms_are_not_too_small_where_gram_matrices_lose_all_they_may(like, lost, monkeypatch):
    """Every number of both is off by what adding it up can lose, and the sum by what adding up positions can."""
    monkeypatch.setattr(bounded, "_CHUNK", 64)
    a, g = operands(40, 200, 72, like)
    g[:, 0] *= 1.125  # so that of those that cancel about as much is left as can be lost
    grams = [t.double() @ t.double().mT for t in (a, g)]

    def worst(several: list[Tensor]) -> Tensor:
        (t,) = several
        own, other = grams if t.shape[2] == 200 else reversed(grams)
        lengths = own.diagonal(dim1=1, dim2=2).sqrt()
        most = bounded._loss(t.shape[2]) * lengths.unsqueeze(1) * lengths.unsqueeze(2)
        return (own - most * (other.sign() if lost == "where it shortens" else 1.0)).float()

    monkeypatch.setattr(bounded, "_grams", worst)
    monkeypatch.setattr(Bounded, "by_grams", True)
    norms = Bounded(a, g, torch.Size((72, 200))).squared_norm().sqrt()
    assert (norms >= exact(a, g).flatten(1).norm(dim=1) + 40 * 2**-23 * exact_lengths(a, g)).all()


@pytest.mark.parametrize("layout", ["dense", "columns of a wider one", "positions first", "last in memory"])
@pytest.mark.parametrize(("t", "d"), [(13, 24), (13, 150), (3, 24), (16, 24)])
def test_a_gram_matrix_depends_on_its_own_example_alone(layout, t, d, monkeypatch):
    """Also where positions up to a multiple of eight are read from the next example, whatever that holds."""
    monkeypatch.setattr(bounded, "_missing", lambda x: -x.shape[1] % 8)
    monkeypatch.setattr(bounded, "_CHUNK", 64)
    torch.manual_seed(0)
    x = torch.randn(2 * B, t, d).bfloat16()
    if layout == "columns of a wider one":
        x = torch.randn(2 * B, t, 2 * d).bfloat16()[..., d:]
    elif layout == "positions first":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "last in memory":
        x = torch.cat([torch.full((1, t, d), torch.nan).bfloat16(), x])[1:]
    several = list(x.split(B))
    size = t + -t % 8
    grams = bounded._grams(several)
    assert grams.shape == (2 * B, size, size)
    assert not grams[:, t:].any()
    assert not grams[:, :, t:].any()
    padded = torch.nn.functional.pad(x.double(), (0, 0, 0, -t % 8))
    torch.testing.assert_close(grams.double(), padded @ padded.mT, rtol=1e-5, atol=1e-4)
    for bad in (torch.nan, torch.inf, 3e38):
        for i in (0, 3, B - 1, B, 2 * B - 1):
            kept, before = torch.arange(2 * B) != i, x[i].clone()
            x[i] = bad
            assert torch.equal(bounded._grams(several)[kept], grams[kept])
            x[i] = before
    assert bounded._grams([x[:0]]).shape == (0, size, size)


def exact_lengths(a: Tensor, g: Tensor) -> Tensor:
    return (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)


@pytest.mark.parametrize(
    ("t", "d", "offset", "cancels", "stated", "made"),
    [
        (500, 1024, 1.0, False, 0.017, 0.003),
        (500, 1024, 3.0, False, 0.029, 0.003),
        (500, 1024, 3.0, True, 0.26, 0.009),
        (1000, 2048, 1.0, False, 0.051, 0.008),
        (1000, 2048, 3.0, False, 0.086, 0.008),
        (1000, 2048, 3.0, True, 0.66, 0.025),
    ],
)
def test_how_far_bounds_of_long_texts_lie_above_the_norm(t, d, offset, cancels, stated, made, monkeypatch):
    """Inputs that share an offset, and output gradients that cancel over the text."""
    torch.manual_seed(0)
    a, g = torch.randn(1, t, d) + offset, torch.randn(1, t, d)
    a, g = a.bfloat16(), (g - g.mean(1, keepdim=True) if cancels else g).bfloat16()
    use, true = Bounded(a, g, torch.Size((d, d))), float((g[0].double().T @ a[0].double()).norm())
    assert use.by_grams
    assert float(use.squared_norm().sqrt()) / true - 1 == pytest.approx(stated, rel=0.05)
    monkeypatch.setattr(Bounded, "by_grams", False)
    assert float(use.squared_norm().sqrt()) / true - 1 == pytest.approx(made, rel=0.2)


@pytest.mark.parametrize("like", ["ordinary", "cancelling", "aligned"])
def test_one_example_moves_the_sum_by_no_more_than_its_bound(form, like, monkeypatch):
    """Clipped sums with and without an example, of several blocks."""
    monkeypatch.setattr(bounded, "EXAMPLES_AT_ONCE", 4)
    a, g = operands(32, 24, 40, like)
    use = Bounded(a, g, torch.Size((40, 24)))
    factors = use.squared_norm().sqrt().reciprocal().clamp(max=1.0)
    total = use.weighted_sum(factors)
    for gone in range(B):
        kept = torch.arange(B) != gone
        fewer = Bounded(a[kept], g[kept], use.shape)
        assert torch.equal(fewer.squared_norm(), use.squared_norm()[kept])
        moved = float((total - fewer.weighted_sum(factors[kept])).norm())
        assert moved <= 1 + 1e-5
        assert moved > 0.9 or like == "cancelling"


def test_a_tied_table_has_the_gradients_of_head_and_embedding(form):
    a, g = operands(16, 24, 40, "ordinary")
    index = torch.randint(40, (B, 16))
    index[:, 3] = index[:, 0]  # a token that occurs again
    embedded = torch.randn(B, 16, 24)
    each = exact(a, g)
    each = each.scatter_add(1, index.unsqueeze(2).expand(-1, -1, 24), embedded.double())
    use = merge([Bounded(a, g, torch.Size((40, 24))), Rows(index, embedded, torch.Size((40, 24)))])
    assert isinstance(use, BoundedTied)
    norms, true = use.squared_norm().sqrt(), each.flatten(1).norm(dim=1)
    assert (norms >= true).all()
    assert (norms <= 1.001 * true).all()
    c = torch.rand(B, dtype=torch.float64)
    torch.testing.assert_close(use.weighted_sum(c), torch.einsum("b,bij->ij", c, each), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(use.materialise().double(), each, rtol=1e-4, atol=1e-4)
    dropped = use.without(torch.arange(B) == 2).weighted_sum(torch.ones(B))
    torch.testing.assert_close(dropped, each.sum(0) - each[2], rtol=1e-4, atol=1e-4)


def test_what_cancels_between_head_and_embedding_counts_for_no_more_than_its_norm(form):
    a, g = operands(8, 16, 12, "ordinary")
    g[:, :, 8:] = 0.0
    index = torch.arange(8).expand(B, 8)
    use = merge([Bounded(a, g, torch.Size((12, 16))), Rows(index, -exact(a, g)[:, :8].float(), torch.Size((12, 16)))])
    norms = use.squared_norm().sqrt()
    lengths = exact_lengths(a, g)
    assert (norms < 0.01 * lengths).all()
    for c in torch.eye(B, dtype=torch.float64) / norms:
        assert float(use.weighted_sum(c).norm()) <= 1 + 1e-12


def test_an_example_that_is_not_finite_has_no_norm_and_can_be_dropped(form):
    for bad in (torch.nan, torch.inf, 3e38):
        a, g = operands(8, 16, 24, "ordinary")
        g[1, 3, 5] = a[4, 0, 0] = bad
        use = Bounded(a, g, torch.Size((24, 16)))
        finite = torch.isfinite(use.squared_norm())
        assert finite.tolist() == [True, False, True, True, False, True]
        total = use.without(~finite).weighted_sum(finite.double())
        torch.testing.assert_close(total, exact(a, g)[finite].sum(0), rtol=1e-4, atol=1e-4)


def test_norms_of_many_uses_are_those_of_each(form):
    some = [Bounded(*operands(8, d, p, "ordinary"), torch.Size((p, d))) for d, p in ((16, 24), (30, 8), (16, 24))]
    rest = [settled(Outer(torch.randn(B, 1, 4), torch.randn(B, 1, 3), torch.Size((3, 4))))]
    together = squared_norms([some[0], rest[0], *some[1:]])
    for found, use in zip(together, [some[0], rest[0], *some[1:]], strict=True):
        torch.testing.assert_close(found, use.squared_norm(), rtol=1e-4, atol=0.0)


def test_small_gradients_are_made_and_large_ones_are_not(monkeypatch):
    a, g = operands(4, 32, 64, "ordinary")
    outer = Outer(a, g, torch.Size((64, 32)))
    made = settled(outer)
    torch.testing.assert_close(made.materialise().double(), exact(a, g), rtol=1e-5, atol=1e-5)
    assert not isinstance(made, Bounded)
    monkeypatch.setattr(bounded, "MADE_BYTES", 0)
    assert isinstance(settled(outer), Bounded)
    long = [t.repeat(1, 50, 1) for t in (a, g)]  # what they are made of takes more
    assert not isinstance(settled(Outer(*long, outer.shape)), Bounded)
    assert not isinstance(settled(Outer(a.float(), g.float(), outer.shape)), Bounded)
    both = merge([settled(outer), settled(outer)])
    assert isinstance(both, Bounded)
    c = torch.rand(B, dtype=torch.float64)
    torch.testing.assert_close(
        both.weighted_sum(c), 2 * weighted_sum(c, exact(a, g).flatten(1)).view(64, 32), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("bad", [False, True])
def test_zeros_that_lie_behind_every_row_change_nothing(form, bad):
    """As the gradient of a head's outputs comes, whose width is not a multiple of eight."""
    a, g = operands(8, 16, 21, "ordinary")
    g[2, 1, 3] = torch.nan if bad else g[2, 1, 3]
    apart = padded_empty(g.shape, g).copy_(g)
    assert padded(apart).data_ptr() == apart.data_ptr()
    uses = [Bounded(a, t, torch.Size((21, 16))).without(torch.arange(B) == 2) for t in (g, apart)]
    dense, strided = (use.weighted_sum(torch.ones(B)) for use in uses)
    torch.testing.assert_close(strided, dense, rtol=1e-6, atol=1e-6)
    dense, strided = (replace(use, dropped=None).squared_norm() for use in uses)
    torch.testing.assert_close(strided, dense, rtol=1e-4, atol=0.0, equal_nan=True)
    assert bool(torch.isnan(strided[2])) is bad


def test_small_gradients_of_one_size_are_made_together(monkeypatch):
    monkeypatch.setattr(bounded, "launches_cost", lambda t: True)
    outers = [Outer(*operands(8, d, 5, "ordinary"), torch.Size((5, d))) for d in (16, 16, 30)]
    outers.append(Outer(*operands(8, 5, 16, "padded"), torch.Size((5, 16)), transposed=True))
    unmade = [settled(outer) for outer in outers]
    assert all(isinstance(use, Unmade) for use in unmade)
    params = [torch.zeros(use.shape) for use in outers]
    ((members, together),) = in_blocks(params, unmade, joint=True)
    expected = torch.cat([outer.made().flatten(1) for outer in outers], 1)
    assert members == [0, 1, 2, 3]
    torch.testing.assert_close(together.materialise(), expected, rtol=1e-6, atol=1e-6)
    for use, outer in zip(unmade, outers, strict=True):
        torch.testing.assert_close(use.squared_norm(), outer.made().double().square().sum((1, 2)), rtol=1e-5, atol=0.0)


def test_a_widened_output_hands_back_its_gradient_in_bf16():
    z = torch.randn(3, 4, 5).bfloat16().requires_grad_()
    seen = []
    wide = Widened.apply(z * 1)
    assert wide.dtype == torch.float32
    g = torch.randn(3, 4, 5)
    z.register_hook(seen.append)
    wide.backward(g)
    assert torch.equal(seen[0], g.bfloat16())
    twice = torch.autograd.grad(Widened.apply(z * z).sum(), z, create_graph=True)[0]
    assert twice.requires_grad


def test_small_ones_that_are_alike_are_measured_and_summed_together(form, monkeypatch):
    monkeypatch.setattr(bounded, "launches_cost", lambda t: True)
    for transposed in (False, True):
        shape = torch.Size((9, 21) if transposed else (21, 9))
        uses = [Bounded(*(torch.randn(B, 5, n).bfloat16() for n in (9, 21)), shape, transposed) for _ in range(3)]
        other = Bounded(*(torch.randn(B, 5, n).bfloat16() for n in (9, 8)), torch.Size((8, 9)))
        params = [torch.zeros(use.shape) for use in (uses[0], other, *uses[1:])]
        ((members, found), (alone, _)) = in_blocks(params, [uses[0], other, *uses[1:]], joint=True)
        assert (members, alone) == ([0, 2, 3], [1])
        torch.testing.assert_close(found.squared_norm(), sum(use.squared_norm() for use in uses), rtol=1e-12, atol=0.0)
        dropped, c = torch.arange(B) == 2, torch.rand(B, dtype=torch.float64)
        found.whole.a[[2, B + 2]] = torch.nan
        sums = split(found.without(dropped).weighted_sum(c), [shape] * 3)
        for total, use in zip(sums, uses, strict=True):
            torch.testing.assert_close(total, use.without(dropped).weighted_sum(c), rtol=1e-6, atol=1e-6)
        assert len(in_blocks(params, [uses[0], other, *uses[1:]], joint=False)) == 4
