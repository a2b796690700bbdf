"""The simulation's own gradients against the library's, so that its private runs are the ones the library would make."""

from __future__ import annotations

import torch
from experiments.strong_privacy.mlp import BatchedMLP, build
from experiments.strong_privacy.simulation.truth import Regression, spearman
from torch import nn

from dpivon.stacked import AnyNetwork, Run, Stack


def test_the_batched_network_trains_as_the_ordinary_loop_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(50, 1, 8, 8, generator=generator), torch.randint(10, (50,), generator=generator)
    runs = [Run("dp-calm", 1, 1.0, 0.5, 0.1, 10), Run("dp-sgd", 2, 0.5, 3.0, 0.1, 20)]
    means = []
    for network in (BatchedMLP(), AnyNetwork(build)):
        stack = Stack(runs, network, x, y)
        for _ in stack.train(4):
            pass
        means.append(stack.mean)
    torch.testing.assert_close(means[0], means[1], rtol=1e-4, atol=1e-5)


def test_the_regressions_clipped_gradients_are_autograds_scaled_to_the_bound() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(6, 1, 8, 8, generator=generator), torch.randint(10, (6,), generator=generator)
    weights = torch.randn(1, 10, 65, generator=generator)
    total = torch.zeros(10, 65)
    for image, label in zip(x, y, strict=True):
        w = weights[0].clone().requires_grad_()
        logits = w[:, :64] @ image.flatten() + w[:, 64]
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(logits, label), w)
        total += g * min(1.0, 1.0 / float(g.norm()))
    model = Regression(x, y)
    ours = model.gradient(model.residuals(weights), torch.ones(1, 6))[0] * 256
    torch.testing.assert_close(ours, total, rtol=1e-4, atol=1e-5)


def test_rank_correlation_of_a_reversed_list_is_minus_one_and_ties_share_a_rank() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert spearman(a, -a) == -1.0
    assert spearman(torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([5.0, 5.0, 6.0, 9.0])) > 0.999
