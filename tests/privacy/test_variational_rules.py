"""Gaussian layers on the private side: per-example gradients against the loop, one bound for mean and spread, KL after it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from per_example_loop import book, both_precisions
from private_runs import CLASSES, EXAMPLES, FEATURES, CapturingNoise, data, images, make, mlp
from torch import nn

from dpivon import DpivonError, PrivacyError
from dpivon.errors import ArgumentError
from dpivon.optim.point import SGD, Adam
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper, has_rules
from dpivon.privacy.layers import Outer, uses
from dpivon.privacy.layers.variational import Scaled
from dpivon.release import Release
from dpivon.variational import BayesByBackprop, Variational, variational


@pytest.fixture
def same_noise(monkeypatch):
    """Every row gets the same ε, so that a loop over examples makes the same pass as the batch."""

    def noise(self, v):
        generator = torch.Generator().manual_seed(v[0].numel())
        return torch.randn(v[0].shape, dtype=torch.float64, generator=generator).to(v)

    monkeypatch.setattr(Variational, "noise", noise)


def gaussian(*layers: nn.Module, std: float = 0.3) -> nn.Module:
    model = variational(nn.Sequential(*layers), initial_std=std)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Variational):
                for r in module.spread.parameters():
                    r.normal_(0.0, std)
    return model


def bbp(module: nn.Module, **options: float) -> BayesByBackprop:
    return BayesByBackprop(module, lr=0.1, **{"dataset_size": 100, "rule": SGD(), "momentum": 0.0, **options})


# ---- per-example gradients


@given(
    leading=st.lists(st.integers(1, 4), max_size=2),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    bias=st.booleans(),
    batch=st.integers(1, 5),
    cap=st.sampled_from([0, 128 * 2**20]),
)
@settings(max_examples=20, deadline=None)
def test_linear_equals_the_loop(leading, size, bias, batch, cap):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses, "MEMORY_CAP", cap)
        patch.setattr(Variational, "noise", lambda self, v: torch.linspace(-1.3, 0.9, v[0].numel()).view_as(v[0]).to(v))
        torch.manual_seed(0)
        both_precisions(gaussian(nn.Linear(*size, bias=bias)), torch.randn(batch, *leading, size[0]))


@pytest.mark.parametrize("cap", [0, 128 * 2**20], ids=["kept as factors", "materialised"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
        (nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 5)),
        (nn.Conv2d(3, 4, 2, dilation=2, padding=2, padding_mode="reflect"), (3, 6, 5)),
        (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
        (nn.Conv3d(2, 3, 2), (2, 4, 3, 3)),
    ],
    ids=str,
)
def test_convolutions_equal_the_loop(layer, shape, cap, same_noise, monkeypatch):
    monkeypatch.setattr(uses, "MEMORY_CAP", cap)
    torch.manual_seed(0)
    both_precisions(gaussian(layer, nn.GroupNorm(1, layer.out_channels), nn.Tanh()), torch.randn(3, *shape))


def test_a_network_with_shared_gaussian_layers_equals_the_loop(same_noise):
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model = gaussian(nn.Linear(4, 6), nn.Tanh(), shared, nn.LayerNorm(6), shared, nn.Tanh(), nn.Linear(6, 3))
    assert has_rules(model)
    both_precisions(model, torch.randn(5, 4))


def test_an_input_of_zeros_without_a_bias_has_a_finite_gradient(same_noise):
    """√v has no slope at v = 0; such an example still has to count."""
    torch.manual_seed(0)
    model = gaussian(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))
    both_precisions(model, torch.zeros(2, 4))
    sums = book(model.float(), torch.zeros(1, 4), torch.ones(2), FlatClipping(1e-3))
    assert math.sqrt(sum(float(s.square().sum()) for s in sums)) == pytest.approx(1e-3, rel=1e-2)


def test_scaled_uses_are_their_materialised_gradients():
    torch.manual_seed(0)
    a, g, f = torch.randn(6, 3, 4).double(), torch.randn(6, 3, 5).double(), torch.rand(5, 4).double()
    use = Scaled(Outer(a, g, torch.Size((5, 4))), f.mul, 2, f)
    rows = torch.einsum("btp,btd,pd->bpd", g, a, f)
    c = torch.rand(6).double()
    assert torch.allclose(use.materialise(), rows)
    assert torch.allclose(use.squared_norm(), rows.square().sum((1, 2)))
    assert torch.allclose(use.weighted_sum(c), torch.einsum("b,bpd->pd", c, rows))
    assert torch.allclose(use.grouped(2).materialise(), rows.unflatten(0, (3, 2)).sum(1))
    dropped = torch.tensor([True] + [False] * 5)
    assert torch.equal(use.without(dropped).materialise()[0], torch.zeros(5, 4).double())
    one = Scaled(Outer(a[:, :1], g[:, :1], torch.Size((5, 4))), f.mul, 2, f)
    assert torch.allclose(one.squared_norm(), one.materialise().square().sum((1, 2)))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9, 4e18])
def test_examples_of_any_size_are_clipped_to_the_bound_and_no_further(size, same_noise):
    """x² spans twice the exponents of x: neither norms nor weighted sums may lose their digits over it."""
    torch.manual_seed(0)
    model = gaussian(nn.Linear(5, 4))
    params = list(model.parameters())
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    (model(torch.randn(1, 5) * size) * torch.randn(4)).sum().backward()
    sums = keeper.clipped_sums(params, FlatClipping(1e-6))
    norm = math.sqrt(sum(float(s.square().sum()) for s in sums))
    assert norm == pytest.approx(1e-6, rel=1e-5 if size > 1 else 2e-2)  # ε_num = 1e-6 is added to a norm of about 1


# ---- one bound, one release


@pytest.mark.parametrize("mode", ["bookkeeping", "alone"])
def test_mean_and_spread_are_clipped_as_one_vector(mode, same_noise):
    """One example far above the bound contributes C in all. Clipped apart, mean and spread would give √2·C."""
    torch.manual_seed(0)
    run = make(mode, module=gaussian(*mlp(), std=1.0), optimizer=bbp, max_grad_norm=0.01, data=data(1))
    total = run.release(*data(1))
    assert float(total.norm()) == pytest.approx(0.01, rel=1e-3)
    names = [name for name, _ in run.model.named_parameters()]
    parts = dict(zip(names, run.noise.sums[-len(names) :], strict=True))
    spread = math.sqrt(sum(float(s.square().sum()) for name, s in parts.items() if "spread" in name))
    assert 0.05 * 0.01 < spread < 0.95 * 0.01  # both parts matter here, so the test could fail


def test_example_by_example_gives_the_same_sums(same_noise):
    torch.manual_seed(0)
    model, (x, y) = gaussian(*mlp()), data()
    sums = [
        make(m, module=copy.deepcopy(model), optimizer=bbp, max_grad_norm=0.5).release(x, y)
        for m in ("bookkeeping", "alone")
    ]
    assert torch.allclose(*sums, atol=1e-5)


def test_several_draws_an_example_are_averaged_before_clipping(same_noise):
    """Each row K times with augmentations=K: here the K draws are equal, so the sum is that of one draw each."""
    torch.manual_seed(0)
    model, (x, y) = gaussian(*mlp()), data()
    one = make("bookkeeping", module=copy.deepcopy(model), optimizer=bbp, max_grad_norm=0.5).release(x, y)
    run = make("bookkeeping", module=copy.deepcopy(model), optimizer=bbp, max_grad_norm=0.5, augmentations=3)
    assert torch.allclose(run.release(x.repeat_interleave(3, 0), y.repeat_interleave(3)), one, atol=1e-5)


@pytest.mark.parametrize("scale", [float("nan"), 1e-6, 1e6, 1e25])
def test_one_example_moves_the_sum_by_at_most_c(scale):
    """With the same draws of ε; a record that is NaN, or overflows when squared, counts nothing."""
    torch.manual_seed(0)
    model, (x, y) = gaussian(*mlp()), data()
    other = x.clone()
    other[3] *= scale
    gone = x.clone()
    gone[3] = float("nan")
    sums = []
    for batch in (other, gone):
        run = make("bookkeeping", module=copy.deepcopy(model), optimizer=bbp, max_grad_norm=0.7)
        torch.manual_seed(1)
        next(iter(run.loader))
        torch.manual_seed(1)
        run.step(batch, y)
        sums.append(run.contributions[-1])
    assert float((sums[0] - sums[1]).norm()) <= 0.7 * (1 + 1e-5)


def test_rows_are_independent_examples():
    """Another example in row 3 changes no other row's output."""
    torch.manual_seed(0)
    model, (x, _) = gaussian(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)), images()
    other = x.clone()
    other[3] = 7.0
    outputs = []
    for batch in (x, other):
        torch.manual_seed(5)
        outputs.append(model(batch))
    same = (outputs[0] == outputs[1]).all(1)
    assert same.tolist() == [i != 3 for i in range(len(x))]


# ---- the prior, on the other side


def test_kl_gradient_is_the_gradient_of_the_kl():
    torch.manual_seed(0)
    model = gaussian(*mlp()).double()
    optimizer = bbp(model, dataset_size=50, prior_std=0.7, temperature=0.5)
    total, prior = 0.0, torch.distributions.Normal(*torch.tensor([0.0, 0.7], dtype=torch.float64))
    for layer in (m for m in model.modules() if isinstance(m, Variational)):
        for name, sigma in layer.spread.std().items():
            q = torch.distributions.Normal(getattr(layer.mean, name), sigma)
            total = total + torch.distributions.kl_divergence(q, prior).sum()
    assert optimizer.kl() == pytest.approx(float(total.detach()), rel=1e-10)
    params = list(model.parameters())
    expected = torch.autograd.grad(total * 0.5 / 50, params)
    got = optimizer.kl_gradient()
    for p, g in zip(params, expected, strict=True):
        assert torch.allclose(got[p], g, rtol=1e-10)


@pytest.mark.parametrize(
    ("rule", "reference"), [(SGD(), torch.optim.SGD), (Adam(), torch.optim.Adam)], ids=["sgd", "adam"]
)
def test_the_prior_is_added_after_the_release(rule, reference):
    """What is clipped and noised is the data's gradient alone; the step is the rule's on release + (T/N)∇KL."""
    torch.manual_seed(0)
    module = gaussian(*mlp())
    twin = copy.deepcopy(module)
    hyper = {"momentum": 0.0} if isinstance(rule, SGD) else {}
    optimizer = BayesByBackprop(module, lr=0.1, dataset_size=10, rule=rule, **hyper)
    run = make("bookkeeping", module=module, optimizer=optimizer, max_grad_norm=1e-3)
    run.noise = run.optimizer.noise = CapturingNoise(lambda like: torch.full_like(like, 0.3))
    reference = reference(twin.parameters(), lr=0.1)
    (x, y) = data()
    for _ in range(3):
        prior = run.inner.kl_gradient()
        kl = {t: prior.get(p, 0.0) for p, t in zip(module.parameters(), twin.parameters(), strict=True)}
        total = run.release(x, y)
        assert float(total.norm()) <= EXAMPLES * 1e-3  # ‖∇KL‖·b would be far above
        released = run.optimizer.last_release.gradients
        for p, t in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, released[p].to(p.dtype))  # p.grad stays what was released
            t.grad = (released[p] + kl[t]).to(t.dtype)
        reference.step()
        for p, t in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p, t, atol=1e-6)


def test_frozen_releases_and_changed_data_leave_the_state_bit_equal():
    states = []
    for seed in (0, 1):
        torch.manual_seed(0)
        module = gaussian(*mlp())
        run = make("bookkeeping", module=module, optimizer=bbp, data=data(seed=seed))
        fixed = {p: torch.full_like(p, 0.01) for p in module.parameters()}
        for _ in range(3):
            next(iter(run.loader))
            run.optimizer.zero_grad()
            run.backward(*data(seed=seed))
            run.optimizer.pre_step()
            run.inner.step(release=Release(fixed, 1.0))
        states.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*states)


def test_it_does_not_step_on_raw_gradients():
    run = make("bookkeeping", module=gaussian(*mlp()), optimizer=bbp)
    run.backward(*data())
    for optimizer in (run.inner, copy.deepcopy(run.inner)):
        with pytest.raises(PrivacyError, match="raw gradients"):
            optimizer.step()


def test_bad_input():
    model = gaussian(*mlp())
    with pytest.raises(ArgumentError, match="no Gaussian layers"):
        bbp(mlp())
    for name in ("dataset_size", "prior_std", "temperature"):
        with pytest.raises(ArgumentError, match=name):
            bbp(model, **{name: -1.0})
    with pytest.raises(DpivonError, match="without a gradient"):
        bbp(model).step()


def test_resume_is_exact():
    """Model and optimizer state, saved and loaded half-way, go on as if nothing had happened."""

    def train(module, optimizer, steps):
        for i in range(*steps):
            torch.manual_seed(i)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data()[0]), data()[1]).backward()
            optimizer.step()

    def start():
        torch.manual_seed(0)
        module = gaussian(nn.Linear(FEATURES, CLASSES))
        return module, BayesByBackprop(module, lr=0.1, dataset_size=10)

    whole, optimizer = start()
    train(whole, optimizer, (0, 6))
    half, optimizer = start()
    train(half, optimizer, (0, 3))
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict()))
    resumed, optimizer = start()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(resumed, optimizer, (3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
