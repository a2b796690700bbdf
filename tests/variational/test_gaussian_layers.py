"""Gaussian layers: what their outputs are distributed like, what conversion keeps, and the coordinate of the spread."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dpivon
from dpivon import predict
from dpivon.errors import ArgumentError
from dpivon.posterior import Posterior
from dpivon.variational import Variational, plain, posterior, variational
from dpivon.variational.layers import RATE, std, std_slope, variance_slope


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 25, 3)
    )


@pytest.mark.parametrize("std0", [1e-3, 0.02, 0.5])
def test_a_step_in_the_spread_changes_the_width_by_the_same_fraction_whatever_it_is(std0):
    d = torch.tensor([-1e-4, 1e-4, 10.0], dtype=torch.float64)
    change = std(d, std0) / std0
    assert change[:2].tolist() == pytest.approx([1 - RATE * 1e-4, 1 + RATE * 1e-4], rel=1e-6)
    assert float(change[2]) < 1 + 2 * RATE * 10  # and no more than linearly when it is large


def test_the_joint_bound_is_spent_on_the_mean():
    """The spread's share of an example's gradient is about c σ₀ times the mean's."""
    torch.manual_seed(0)
    layer, std0 = Variational(nn.Linear(30, 20), initial_std=0.02), 0.02
    (layer(torch.randn(1, 30)).tanh() * torch.randn(20)).sum().backward()
    norms = [
        math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters())) for part in (layer.mean, layer.spread)
    ]
    assert 0.2 * RATE * std0 < norms[1] / norms[0] < 2 * RATE * std0


def test_slopes_are_derivatives():
    r = torch.linspace(-0.3, 0.4, 15, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(std(r, 0.05).sum(), r, create_graph=True)
    assert torch.allclose(slope, std_slope(r, 0.05), rtol=1e-12)
    (slope,) = torch.autograd.grad(std(r, 0.05).square().sum(), r)
    assert torch.allclose(slope, variance_slope(r, 0.05), rtol=1e-12)
    assert float(std(torch.zeros(1), 0.05)) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (5,)),
        (nn.Linear(5, 3, bias=False), (2, 5)),
        (nn.Conv1d(2, 3, 3, stride=2), (2, 9)),
        (nn.Conv2d(4, 6, 2, groups=2, padding=1, padding_mode="circular"), (4, 4, 3)),
        (nn.Conv3d(1, 2, 2, dilation=2), (1, 4, 4, 3)),
    ],
    ids=str,
)
def test_outputs_have_the_mean_and_variance_that_gaussian_weights_give_them(layer, shape):
    """Against weights drawn whole: every output's first two moments, each within 5 standard errors."""
    torch.manual_seed(0)
    gaussian = Variational(layer.double(), initial_std=0.3)
    with torch.no_grad():
        for r in gaussian.spread.parameters():
            r.normal_(0.0, 0.1)
    x, n = torch.randn(1, *shape, dtype=torch.float64), 20000
    local = gaussian(x.expand(n, *shape)).detach()
    mean = gaussian.eval()(x).detach()
    q = posterior(gaussian)
    draws = [torch.func.functional_call(layer, q.sample(), (x,)).detach() for _ in range(2000)]
    whole = torch.cat(draws)
    v = local.var(0)
    assert bool(((local.mean(0) - mean[0]).abs() < 5 * (v / n).sqrt()).all())
    assert bool(((whole.mean(0) - mean[0]).abs() < 5 * (v / len(whole)).sqrt()).all())
    assert bool(((whole.var(0) / v - 1).abs() < 5 * math.sqrt(2 / 2000 + 2 / n)).all())


def test_every_row_and_output_has_its_own_noise():
    torch.manual_seed(0)
    gaussian = Variational(nn.Linear(4, 2), initial_std=1.0)
    with torch.no_grad():
        z = gaussian(torch.ones(20000, 4)) - gaussian.mean(torch.ones(1, 4))
    noise = torch.cat([z[:-1], z[1:]], 1)  # a row and the next one
    assert float((torch.corrcoef(noise.T) - torch.eye(4)).abs().max()) < 5 / math.sqrt(20000)


def test_conversion_keeps_the_function_and_the_names():
    model = small()
    x = torch.randn(3, 2, 5, 5)
    converted = variational(model, initial_std=0.01)
    assert torch.equal(converted.eval()(x), model(x))
    assert not any(isinstance(m, Variational) for m in model.modules())
    q = posterior(converted)
    assert set(q.mean) == set(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        assert torch.equal(q.mean[name], p)
        expected = 0.0 if name.startswith("1.") else 1e-4  # norm layers are points
        assert torch.allclose(q.variance[name], torch.full_like(p, expected), rtol=1e-5)
    back = plain(converted)
    assert torch.equal(back(x), model(x))
    assert {n: p.shape for n, p in back.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    with torch.no_grad():
        next(back.parameters()).zero_()  # a copy of its own
    assert torch.equal(converted(x), model(x))


def test_plain_leaves_the_private_hooks_behind():
    model = variational(nn.Sequential(nn.Linear(3, 2)))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4)
    wrapped, _, _ = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    back = plain(wrapped)
    back(torch.randn(4, 3)).sum().backward()
    assert back[0].weight.grad is not None  # an ordinary gradient: nobody detaches its weights
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in back.modules())


def test_prediction_draws_whole_weights_from_a_variational_model_or_the_plain_one():
    model = small()
    converted = variational(model, initial_std=0.3)
    q = posterior(converted)
    x = torch.randn(5, 2, 5, 5)
    a = predict(converted, q, x, 8, generator=torch.Generator().manual_seed(1))
    b = predict(model, q, x, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(a.probs, b.probs)
    assert float(a.mutual_information.min()) > 0


def test_the_state_carries_the_unit_of_the_spread():
    one, two = (variational(nn.Sequential(nn.Linear(3, 2)), initial_std=s) for s in (0.01, 0.5))
    two.load_state_dict(one.state_dict())
    assert torch.equal(posterior(two).variance["0.weight"], posterior(one).variance["0.weight"])


def test_shared_layers_and_frozen_ones():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2), nn.Linear(2, 2))
    model[3].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    converted = variational(model)
    assert converted[0] is converted[2]
    assert type(converted[3]) is nn.Linear
    assert converted[4].spread.bias is None
    q = posterior(converted)
    assert sorted(q.mean) == ["0.bias", "0.weight", "3.bias", "4.weight"]
    assert isinstance(q.for_model(model), Posterior)


@pytest.mark.parametrize("case", ["twice", "nothing", "tied", "width"])
def test_what_cannot_be_converted(case):
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    model, std0, words = {
        "twice": (variational(small()), 0.1, "already"),
        "nothing": (nn.Sequential(nn.LayerNorm(3)), 0.1, "no layer"),
        "tied": (tied, 0.1, "shared"),
        "width": (small(), 0.0, "initial_std"),
    }[case]
    with pytest.raises(ArgumentError, match=words):
        variational(model, initial_std=std0)
