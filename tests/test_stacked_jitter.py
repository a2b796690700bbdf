"""Gradients at draws around the mean: where they are taken, and how wide that leaves the posterior."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpivon import DpivonError
from dpivon.optim.steady_rule import weight_scale
from dpivon.stacked import AnyNetwork, Run, Stack

N, WIDTH = 400, 3


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDTH, generator=generator)
    return x, torch.randint(0, 4, (N,), generator=generator)


def linear():
    return AnyNetwork(lambda: nn.Linear(WIDTH, 4))


def stack_of(data, *runs, **options):
    return Stack(list(runs), linear(), *data, **options)


def run(method="dp-sgd", seed=1, lr=0.1, **options):
    return Run(method, seed, 1.0, 1.0, lr, 64, options)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-calm", "dp-steady"])
def test_theta_is_a_draw_of_the_stated_width_around_the_mean(data, method):
    runs = [run(method, seed, jitter=0.5, ema=0.9) for seed in range(400)]
    stack = stack_of(data, *runs)
    for _ in stack.train(3):
        pass
    mean = stack.mean
    units = torch.stack([linear().initial(seed) for seed in range(400)])[stack.order]
    scale = torch.tensor([[weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])] for row in units])
    drawn = (stack._theta() - mean) / (0.5 * scale)
    assert drawn.std() == pytest.approx(1.0, abs=4 / (2 * drawn.numel()) ** 0.5)
    assert abs(float(drawn.mean())) < 4 / drawn.numel() ** 0.5


def test_another_step_has_another_draw_and_another_run_too(data):
    stack = stack_of(data, run(seed=1, jitter=0.5), run(seed=2, jitter=0.5))
    first = stack._theta() - stack.mean
    for _ in stack.train(1):
        pass
    second = stack._theta() - stack.mean
    assert not torch.allclose(first, second)
    assert not torch.allclose(first[0], first[1])


def test_without_noise_it_descends_the_expected_loss(data):
    """Where it settles, the loss expected under q is smaller than where training at the mean does, and the mean's is larger."""
    x, y = data
    quiet = {"weight_decay": 0.0, "ema": 0.995, "scale": 1.0}

    def expected_loss(mean, width):
        draws = mean + width * torch.randn(4000, len(mean), generator=torch.Generator().manual_seed(5))
        logits = torch.einsum("nw,dcw->dnc", x, draws[:, :12].view(-1, 4, 3)) + draws[:, None, 12:]
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), y.repeat(4000)))

    widths = (0.0, 3.0)
    stack = stack_of(
        data, *(Run("dp-sgd", 3 + i, 0.01, 50.0, 0.5, 200, {**quiet, "jitter": j}) for i, j in enumerate(widths))
    )
    for _ in stack.train(600):
        pass
    plain, jittered = stack.average[stack.order.index(0)], stack.average[stack.order.index(1)]
    assert expected_loss(jittered, 3.0) < expected_loss(plain, 3.0)
    assert expected_loss(jittered, 0.0) > expected_loss(plain, 0.0)


def test_the_posterior_is_as_wide_as_the_draws_besides_the_spread(data):
    runs = [run("dp-steady", seed=i, lr=5.0, jitter=j, trace=t) for i, (j, t) in enumerate([(0.5, 0.0), (0.5, 1.0)])]
    stack = stack_of(data, *runs, steps=20)
    for _ in stack.train(20):
        pass
    row = linear().initial(0)
    width = 0.5 * weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])
    for v in stack.posterior(0, averaged=True).variance.values():
        torch.testing.assert_close(v, torch.full_like(v, width**2))
    both = torch.cat([v.flatten() for v in stack.posterior(1, averaged=True).variance.values()])
    part = stack.parts[[p.rows.start for p in stack.parts].index(stack.order.index(1))]
    row = linear().initial(1)
    width = 0.5 * weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])
    torch.testing.assert_close(both, part.state["spread"][0] + width**2)


def test_none_is_what_it_was(data):
    def trained(**options):
        stack = stack_of(data, run("dp-steady", lr=5.0, trace=1.0, **options), steps=8)
        for _ in stack.train(8):
            pass
        return stack.mean, stack.std

    assert all(torch.equal(a, b) for a, b in zip(trained(jitter=0.0), trained(), strict=True))


@pytest.mark.parametrize("method", ["dp-ivon-gradsq", "dp-sgld"])
def test_a_method_that_draws_by_itself_is_refused(method):
    with pytest.raises(DpivonError, match=rf"jitter=0.5: '{method}' draws by itself\. Leave it out"):
        run(method, jitter=0.5)


def test_a_width_below_nothing_is_refused():
    with pytest.raises(DpivonError, match="jitter=-1"):
        run(jitter=-1.0)
