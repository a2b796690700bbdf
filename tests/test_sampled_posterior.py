"""A posterior that is a list of samples: its moments, its files, and prediction from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dpivon import predict
from dpivon.errors import ArgumentError
from dpivon.posterior import Posterior, SampledPosterior


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3))


def samples(n: int = 5) -> SampledPosterior:
    torch.manual_seed(1)
    return SampledPosterior({"0.weight": torch.randn(n, 3, 4), "0.bias": torch.randn(n, 3)}, {"method": "sgld"})


def test_moments_are_those_of_the_samples():
    q = samples()
    assert len(q) == 5
    assert q.num_parameters == 15
    weights = q.samples["0.weight"]
    assert torch.allclose(q.mean["0.weight"], sum(weights) / 5)
    assert torch.allclose(q.variance["0.weight"], weights.square().mean(0) - weights.mean(0).square(), atol=1e-6)
    g = q.gaussian()
    assert torch.equal(g.mean["0.bias"], q.mean["0.bias"])
    assert torch.equal(g.variance["0.bias"], q.variance["0.bias"])


def test_every_sample_is_drawn_alike():
    q = samples(4)
    generator = torch.Generator().manual_seed(0)
    drawn = [q.sample(generator)["0.bias"] for _ in range(2000)]
    counts = torch.tensor([sum(torch.equal(d, b) for d in drawn) for b in q.samples["0.bias"]])
    assert int(counts.sum()) == 2000
    assert bool(((counts - 500).abs() < 5 * (2000 * 0.25 * 0.75) ** 0.5).all())


def test_prediction_is_the_average_over_the_samples():
    network, q, x = model(), samples(), torch.randn(6, 4)
    each = torch.stack([functional_call(network, q[s], (x,)).softmax(-1) for s in range(5)])
    for asked in (5, 32):  # more than there are: each once
        got = predict(network, q, x, asked)
        assert torch.allclose(got.probs, each.mean(0), atol=1e-6)
        assert got.samples == 5
    entropy = torch.special.entr(each).sum(-1).mean(0)
    assert torch.allclose(got.mutual_information, got.entropy - entropy, atol=1e-5)
    fewer = predict(network, q, x, 2, generator=torch.Generator().manual_seed(0)).probs
    pairs = [(each[i] + each[j]) / 2 for i in range(5) for j in range(i)]
    assert sum(torch.allclose(fewer, pair, atol=1e-6) for pair in pairs) == 1  # two different ones
    at_mean = functional_call(network, q.mean, (x,)).softmax(-1)
    assert torch.allclose(predict(network, q, x, 0).probs, at_mean, atol=1e-6)


def test_files_hold_samples_and_nothing_else(tmp_path):
    q, path = samples(), tmp_path / "q.safetensors"
    q.save(path)
    back = SampledPosterior.load(path)
    assert back.metadata == {"method": "sgld"}
    assert all(torch.equal(back.samples[name], t) for name, t in q.samples.items())
    with pytest.raises(ArgumentError, match="holds no posterior"):
        Posterior.load(path)
    Posterior.point(model()).save(path)
    with pytest.raises(ArgumentError, match="holds no sampled posterior"):
        SampledPosterior.load(path)
    torch.save({"code": 1}, path)
    with pytest.raises(ArgumentError, match="never opened"):
        SampledPosterior.load(path)


def test_names_and_positions_fit_the_model():
    q, network = samples(), model()
    assert q.matches(network)
    numbered = SampledPosterior({"0": q.samples["0.weight"], "1": q.samples["0.bias"]})
    assert set(numbered.for_model(network).samples) == {"0.weight", "0.bias"}
    with pytest.raises(ArgumentError, match="is no parameter"):
        q.matches(nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({}, "no parameters"),
        ({"a": torch.zeros(0, 2)}, "at least one"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(3, 2)}, "same number"),
        ({"a": torch.tensor([float("nan")])}, "infinite or NaN"),
        ({"a": torch.zeros(2, dtype=torch.int64)}, "float32"),
    ],
)
def test_what_is_no_list_of_samples(bad, words):
    with pytest.raises(ArgumentError, match=words):
        SampledPosterior(bad)
