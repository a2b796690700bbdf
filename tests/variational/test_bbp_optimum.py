"""Bayes by Backprop on a problem whose mean-field optimum is known."""

from __future__ import annotations

import torch
from torch import nn

from dpivon.optim.point import SGD
from dpivon.variational import BayesByBackprop, variational

N, D, NOISE, PRIOR = 200, 4, 0.5, 0.8


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.eye(D, dtype=torch.float64) + 0.4 * torch.ones(D, D, dtype=torch.float64)  # correlated inputs
    x = torch.randn(N, D, dtype=torch.float64, generator=generator) @ mix
    w = torch.randn(D, 1, dtype=torch.float64, generator=generator)
    return x, x @ w + NOISE * torch.randn(N, 1, dtype=torch.float64, generator=generator)


def test_it_reaches_the_mean_field_optimum():
    """Linear regression: the best factorised Gaussian has the posterior's mean and σ_j² = 1/Λ_jj, Λ = XᵀX/s² + I/σ_p²."""
    x, y = regression()
    precision = x.T @ x / NOISE**2 + torch.eye(D, dtype=torch.float64) / PRIOR**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2).flatten()
    variance = 1.0 / precision.diagonal()
    assert float((torch.linalg.inv(precision).diagonal() / variance).min()) > 1.05  # and that is not the marginal one

    torch.manual_seed(0)
    model = variational(nn.Linear(D, 1, bias=False).double(), initial_std=0.05)
    optimizer = BayesByBackprop(model, lr=0.03, dataset_size=N, rule=SGD(), momentum=0.9, prior_std=PRIOR)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    averages = []
    for step in range(2000):
        optimizer.zero_grad()
        (0.5 * (model(x) - y).square() / NOISE**2).mean().backward()
        optimizer.step()
        scheduler.step()
        if step >= 1000:
            q = optimizer.posterior()
            averages.append(torch.stack([q.mean["weight"][0], q.variance["weight"][0].log()]))
    found = torch.stack(averages).mean(0)
    assert float((found[0] - mean).abs().max()) < 0.1 * float(variance.sqrt().min())
    assert float((found[1] - variance.log()).abs().max()) < 0.05
