"""Dropout as a posterior: where it goes, what a draw is, and what prediction makes of it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import dpivon
from dpivon import predict
from dpivon.dropout import dropout_posterior, dropouts, with_dropout
from dpivon.errors import ArgumentError
from dpivon.models import PaperCNN
from dpivon.posterior import Posterior


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(p: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return with_dropout(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)), p)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_predictive_moments_have_their_closed_form(p):
    """f = Σ_j w_j h_j z_j/(1−p) + b has mean Σ w_j h_j + b and variance p/(1−p) Σ (w_j h_j)²."""
    torch.manual_seed(1)
    model = with_dropout(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1)), p).double()
    x, samples = torch.randn(7, 6, dtype=torch.float64), 3000
    got = predict(
        model, dropout_posterior(model), x, samples, likelihood="gaussian", noise_variance=0.1, generator=seeded()
    )
    with torch.no_grad():
        terms = model[2][1].weight * torch.tanh(model[0](x))
        mean, variance = (
            terms.sum(1, keepdim=True) + model[2][1].bias,
            p / (1 - p) * terms.square().sum(1, keepdim=True),
        )
    assert bool(((got.mean - mean).abs() < 5 * (variance / samples).sqrt()).all())
    assert bool(((got.epistemic / variance - 1).abs() < 5 * math.sqrt(2.5 / samples)).all())
    assert torch.allclose(got.aleatoric, torch.full_like(variance, 0.1))


def test_channels_are_dropped_whole_where_the_layer_says_so():
    model = nn.Sequential(nn.Conv2d(1, 30, 1), nn.Dropout2d(0.5), nn.Flatten())
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    out = predict(
        model, dropout_posterior(model), torch.ones(2, 1, 4, 4), 1, likelihood="gaussian", noise_variance=1.0
    ).mean.view(2, 30, 16)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert bool((out == out[:1, :, :1]).all())  # one mask for all positions and all examples


def test_dropout_is_live_because_the_posterior_says_so_and_off_otherwise():
    model, x = mlp(), torch.randn(9, 6)
    q = dropout_posterior(model)
    still = predict(model, Posterior.point(model), x, 16)
    assert float(still.mutual_information.max()) == 0.0
    live = predict(model, q, x, 16, generator=seeded())
    assert float(live.mutual_information.min()) > 0.0
    assert torch.equal(predict(model, q, x, 0).probs, still.probs)
    assert torch.equal(predict(model, q, x, 16, dropout=False).probs, still.probs)
    assert torch.equal(
        predict(model, Posterior.point(model), x, 16, dropout=True, generator=seeded()).probs, live.probs
    )


def test_draws_do_not_depend_on_batching_nor_disturb_the_model(tmp_path):
    model, x = mlp(), torch.randn(9, 6)
    q = dropout_posterior(model, {"method": "dp-mc-dropout"})
    q.save(tmp_path / "q")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    all_at_once = predict(model, q, x, 16, generator=seeded())
    assert torch.equal(torch.get_rng_state(), state)
    loaded = Posterior.load(tmp_path / "q")
    assert torch.allclose(predict(model, loaded, x, 16, batch_size=4, generator=seeded()).probs, all_at_once.probs)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_transformer_layers_do_not_go_around_their_dropout():
    """In eval mode torch would take a fused path for them, without dropout and without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), nn.Flatten())
    model[0].self_attn.dropout = 0.0
    fused = torch.backends.mha.get_fastpath_enabled()
    out = predict(model, dropout_posterior(model), torch.randn(3, 2, 8), 8, generator=seeded())
    assert float(out.mutual_information.min()) > 0.0
    assert torch.backends.mha.get_fastpath_enabled() == fused


def test_dropout_goes_before_every_layer_with_weights_but_the_first():
    torch.manual_seed(0)
    network = PaperCNN()
    model = with_dropout(network, 0.2)
    weights = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [m.p for m in dropouts(model)] == [0.2] * (len(weights) - 1)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), network.eval()(x))
    assert not dropouts(network)
    torch.manual_seed(0)
    first = model.train()(x)
    assert not torch.equal(first, model(x))


def test_rows_are_independent_examples_in_training():
    """One example moves the private sum by at most C, with the masks as they were: masks depend on shapes alone."""
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    sums = []
    for row in (x[2] * 1e4, torch.full((6,), float("nan"))):
        torch.manual_seed(0)
        model = mlp(0.5)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        private, optimizer, loader = dpivon.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=0.3,
        )
        next(iter(loader))
        batch = x.clone()
        batch[2] = row
        torch.manual_seed(3)
        nn.functional.cross_entropy(private(batch), y).backward()
        optimizer.step()
        sums.append(torch.cat([p.summed_grad.flatten() for p in model.parameters()]))
    assert 0.29 < float((sums[0] - sums[1]).norm()) <= 0.3 * (1 + 1e-5)


@pytest.mark.parametrize("case", ["shallow", "has some", "probability"])
def test_where_dropout_cannot_go(case):
    deep = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, p, words = {
        "shallow": (nn.Linear(2, 2), 0.1, "no place"),
        "has some": (nn.Sequential(deep, nn.Dropout(0.1)), 0.1, "of its own"),
        "probability": (deep, 1.0, "p=1.0"),
    }[case]
    with pytest.raises(ArgumentError, match=words):
        with_dropout(model, p)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "no dropout"),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), "AlphaDropout"),
        (nn.MultiheadAttention(2, 1, dropout=0.1), "MultiheadAttention"),
    ],
    ids=["none", "alpha", "attention"],
)
def test_dropout_that_cannot_be_live(model, words):
    with pytest.raises(ArgumentError, match=words):
        dropout_posterior(model)
