"""Diagnostics against the gradients that were really released, and scores against the library's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpivon import metrics, predict
from dpivon.models import CompactCNN
from dpivon.posterior import Posterior
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack
from dpivon.study.run import evaluation as passes
from dpivon.study.run.evaluation import normalised, posterior_row, predict_row, scores
from dpivon.study.run.work import Watch, points

RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 8),
    Run("dp-ivon-gradsq", 13, 5.0, 1.0, 0.2, 8, {"ess": 500.0}),
]


@pytest.fixture
def stack():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 3, 4, 4, generator=generator), torch.randint(0, 10, (60,), generator=generator)
    return Stack(RUNS, AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10))), images, labels, block=4)


def go(stack, steps):
    for _ in stack.train(steps):
        pass


def test_the_share_is_that_of_the_released_gradient(stack):
    go(stack, 5)
    released = []
    release = stack.mechanism.release
    stack.mechanism.release = lambda *args: released.append(release(*args)) or released[-1]
    watch = Watch(stack)
    assert watch.useful
    watch.before()
    go(stack, 1)
    found = {row["run"]: row for row in watch.after()}
    assert set(found) == {0, 2}
    for i, row in found.items():
        at = stack.order.index(i)
        g, s2 = released[0][at], stack.mechanism.variance[at]
        assert row["projected_share"] == pytest.approx(float((g.square() < s2).double().mean()), abs=1.5 / len(g))
        h = next(p.state["hess"][at - p.rows.start] for p in stack.parts if p.rows.start <= at < p.rows.stop)
        for name, q in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
            assert row[f"h_{name}"] == pytest.approx(float(h.quantile(q, interpolation="nearest")))
            assert row[f"std_{name}"] == pytest.approx(float(stack.std[at].quantile(q)), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dp-steady", {"trace": 0.0}),
        ("dp-steady", {"trace": 0.25}),
        ("dp-calm", {"temperature": 0.1}),
        ("dp-ivon-gradsq", {"ema": 0.9, "trace": 1.0}),
    ],
)
def test_the_width_is_the_posteriors_wherever_it_comes_from(method, options):
    """It was 1/√(N_ess (h + δ)) for all of them: of dp-steady, which takes none of its width from h, a number about nothing."""
    x, y = torch.randn(60, 3, 4, 4), torch.randint(0, 10, (60,))
    network = AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)))
    made = Stack([Run(method, 1, 1.0, 1.0, 0.5, 8, options)], network, x, y)
    watch = Watch(made)
    watch.before()
    go(made, 6)
    (row,) = watch.after()
    std = torch.cat([v.flatten() for v in made.posterior(0).variance.values()]).sqrt()
    for name, q in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
        assert row[f"std_{name}"] == pytest.approx(float(std.quantile(q)), rel=0.02, abs=1e-9)


def test_noise_alone_is_projected_as_often_as_the_normal_law_says(stack):
    """σ = 5 on a batch of 8: the gradient is lost in the noise, and P(z² < 1) = .683."""
    watch, shares = Watch(stack), []
    for _ in range(20):
        watch.before()
        go(stack, 1)
        shares.append(next(r["projected_share"] for r in watch.after() if r["run"] == 2))
    n = 20 * 490
    p = math.erf(math.sqrt(0.5))
    assert abs(sum(shares) / 20 - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_points_are_spread_over_the_logarithm():
    for steps in (1, 7, 60, 14_700):
        found = points(steps)
        assert found[0] == 1
        assert found[-1] == steps
        assert found == sorted(set(found))
        assert len(found) <= 50
    ratios = [b / a for a, b in zip(points(14_700)[25:-1], points(14_700)[26:], strict=True)]
    assert max(ratios) / min(ratios) < 1.1


def score(stack, i, x, y, *, samples, seed):
    return scores(predict_row(stack.network, *posterior_row(stack, i), [x], samples=samples, seed=seed), y)


def test_scores_are_those_of_the_library(stack):
    go(stack, 6)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 3, 4, 4, generator=generator), torch.randint(0, 10, (40,), generator=generator)
    for i in (0, 1):
        found = score(stack, i, x, y, samples=400, seed=3)
        mean = predict(stack.model(i), Posterior.point(stack.model(i)), x, samples=1).probs
        for name in ("accuracy", "nll", "ece", "brier"):
            assert found[name] == pytest.approx(getattr(metrics, name)(mean, y), rel=1e-5)
        if i == 1:
            assert "mc_nll" not in found
            continue
        average = predict(stack.model(i), stack.posterior(i), x, samples=400).probs
        assert found["mc_nll"] == pytest.approx(metrics.nll(average, y), rel=0.02)
        assert found["mc_brier"] == pytest.approx(metrics.brier(average, y), abs=0.01)
        assert found["mc_samples"] == 400
        assert found == score(stack, i, x, y, samples=400, seed=3)


def test_images_are_scored_in_pieces_and_draws_averaged(stack, monkeypatch):
    """Against the library's own prediction from the same draws, mutual information and all; bytes are normalised first."""
    go(stack, 3)
    x, grey = torch.randn(11, 3, 4, 4), torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8)
    mean, std = stack.mean[-1], stack.std[-1]
    assert (std > 0).all()
    whole = predict_row(stack.network, mean, std, [x, grey], samples=5, seed=3)
    generator = torch.Generator().manual_seed(3)
    rows = [mean + std * torch.randn(mean.shape, generator=generator) for _ in range(5)]
    for j, images in enumerate((x, (grey / 255 - 0.5) / 0.25)):
        torch.testing.assert_close(whole["mean"][j].probs, stack.network.model(mean)(images).softmax(-1))
        each = torch.stack([stack.network.model(row)(images).softmax(-1) for row in rows])
        torch.testing.assert_close(whole["average"][j].probs, each.mean(0))
        gain = torch.special.entr(each.mean(0)).sum(-1) - torch.special.entr(each).sum(-1).mean(0)
        torch.testing.assert_close(whole["average"][j].mutual_information.float(), gain, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr(passes, "AT_ONCE", {"cpu": 4})
    pieces = predict_row(stack.network, mean, std, [x], samples=5, seed=3)
    torch.testing.assert_close(pieces["average"][0].probs, whole["average"][0].probs)


def simply(network, mean, std, images, *, samples, seed):
    """The obvious way: a model of its own for every draw, all images at once, as they come."""
    generator = torch.Generator().manual_seed(seed)
    rows = [mean + std * torch.randn(mean.shape, generator=generator) for _ in range(samples)]
    return torch.stack([network.model(row).eval()(normalised(images)).softmax(-1) for row in rows]).mean(0)


@pytest.mark.parametrize("build", [PaperNetwork, lambda: AnyNetwork(CompactCNN)])
def test_the_fast_way_to_score_is_the_obvious_one_to_rounding(build):
    """Channels last, in pieces, one model for all draws; for bytes and for images that are normalised already."""
    network, generator = build(), torch.Generator().manual_seed(0)
    grey = torch.randint(0, 256, (70, 3, 32, 32), dtype=torch.uint8, generator=generator)
    mean = network.initial(1)
    std = torch.full_like(mean, 0.02)
    before = mean.clone()
    found = predict_row(network, mean, std, [grey, normalised(grey)[:5]], samples=3, seed=4)
    with torch.no_grad():
        expected = simply(network, mean, std, grey, samples=3, seed=4)
        torch.testing.assert_close(found["average"][0].probs, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found["average"][1].probs, expected[:5], rtol=1e-4, atol=1e-6)
        at_mean = network.model(mean).eval()(normalised(grey)).softmax(-1)
    torch.testing.assert_close(found["mean"][0].probs, at_mean, rtol=1e-4, atol=1e-6)
    assert torch.equal(mean, before)
    assert not torch.allclose(expected, at_mean, rtol=1e-2)


def test_a_run_that_diverged_has_no_scores(stack):
    stack.parts[-1].state["mean"].fill_(math.nan)
    i = stack.order[-1]
    found = score(stack, i, torch.randn(5, 3, 4, 4), torch.zeros(5, dtype=torch.int64), samples=2, seed=0)
    assert all(math.isnan(found[k]) for k in ("accuracy", "nll", "ece", "brier"))
    assert math.isnan(found["mc_accuracy"])
