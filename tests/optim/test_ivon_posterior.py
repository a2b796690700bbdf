"""IVON finds the posterior where it is known: linear regression with Gaussian noise and a Gaussian prior.

With loss ‖y − Xw‖²/(2 N v), N_ess = N and δ = λ/N the exact posterior has precision XᵀX/v + λ I and mean
(XᵀX/v + λ I)⁻¹ Xᵀy/v. The best mean-field Gaussian has the same mean and the *diagonal* of that precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dpivon import IVON

N, D, NOISE_VARIANCE, PRIOR_PRECISION = 40, 4, 0.5, 6.0


@dataclass
class Problem:
    x: Tensor
    y: Tensor

    @property
    def precision(self) -> Tensor:
        return self.x.T @ self.x / NOISE_VARIANCE + PRIOR_PRECISION * torch.eye(D, dtype=torch.float64)

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.x.T @ self.y / NOISE_VARIANCE)

    def loss(self, w: Tensor) -> Tensor:
        return (self.x @ w - self.y).square().mean() / (2 * NOISE_VARIANCE)


def problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64) * scales
    x[:, 1] += 0.5 * x[:, 0]  # correlated columns: the exact precision is not diagonal
    w = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    y = x @ w + math.sqrt(NOISE_VARIANCE) * torch.randn(N, generator=generator, dtype=torch.float64)
    return Problem(x, y)


def step(optimizer: IVON, task: Problem, w: Tensor) -> None:
    optimizer.zero_grad()
    for _ in range(optimizer.mc_samples):
        with optimizer.sampled_params(train=True):
            task.loss(w).backward()
    optimizer.step()


class MatchedNoise(IVON):
    """Eight "samples" whose mean is exactly 0 and whose covariance is exactly I: ± the rows of a Hadamard matrix.

    For a quadratic loss Price's theorem needs no more than these moments, so that the fixed point is exact.
    """

    rows: Tensor
    drawn = 0

    def _standard_normal(self, like: Tensor) -> Tensor:
        self.drawn += 1
        return self.rows[self.drawn % len(self.rows)].reshape(like.shape).to(like.dtype)


def test_the_fixed_point_is_the_exact_mean_field_posterior() -> None:
    task = problem()
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    hadamard = torch.kron(two, two)
    w = nn.Parameter(torch.zeros(D, dtype=torch.float64))
    optimizer = MatchedNoise(
        [w], lr=0.2, ess=N, weight_decay=PRIOR_PRECISION / N, beta2=0.9, mc_samples=8, rescale_lr=False
    )
    optimizer.rows = torch.cat([hadamard, -hadamard])
    for _ in range(400):
        step(optimizer, task, w)
    posterior = optimizer.posterior()
    torch.testing.assert_close(posterior.mean["0"], task.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(1 / posterior.variance["0"], task.precision.diagonal(), rtol=1e-9, atol=0)
    assert (task.precision.inverse().diagonal() > 1.05 * posterior.variance["0"])[:2].all()  # not the marginals


@pytest.mark.slow
def test_with_random_samples_the_averages_converge_to_the_exact_mean_field_posterior() -> None:
    """Bounds: ĥ is unbiased with a variance known in closed form, and averages over T steps of K samples.

    At the mean, ĥ_j has variance V_j = A_jj² + Σ_k A_jk² σ_k²/σ_j² + (δ m_j)²/σ_j², where A = XᵀX/(N v); the retraction
    adds the bias (1 − β₂) V_j / (2 K (h_j + δ)); the mean's average wanders by at most σ_j/√(K T).
    """
    task = problem()
    k, burn_in, t, beta2, decay = 2, 600, 2500, 0.99, PRIOR_PRECISION / N
    w = nn.Parameter(torch.zeros(D, dtype=torch.float64))
    optimizer = IVON(
        [w],
        lr=0.2,
        ess=N,
        weight_decay=decay,
        beta2=beta2,
        mc_samples=k,
        rescale_lr=False,
        generator=torch.Generator().manual_seed(4),
    )
    means, hessians = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    for i in range(burn_in + t):
        step(optimizer, task, w)
        if i >= burn_in:
            means += w.detach() / t
            hessians += optimizer.state[w]["hess"] / t
    a = task.x.T @ task.x / (N * NOISE_VARIANCE)
    h = a.diagonal()
    var = 1 / task.precision.diagonal()
    spread = h.square() + (a.square() * (var[None, :] / var[:, None])).sum(1) + (decay * task.mean).square() / var
    bias = (1 - beta2) * spread / (2 * k * (h + decay))
    assert ((hessians - h).abs() <= 5 * (spread / (k * t)).sqrt() + 2 * bias).all()
    assert ((means - task.mean).abs() <= 5 * 2 * (var / (k * t)).sqrt()).all()
    assert (5 * (spread / (k * t)).sqrt() + 2 * bias < 0.25 * h).all()  # the bound says something


def test_samples_have_the_stated_mean_and_variance() -> None:
    """Standardised samples are N(0, 1): their squares sum to a χ², coordinate by coordinate and in all."""
    n, d = 4000, 30
    w = nn.Parameter(torch.linspace(-1, 1, d, dtype=torch.float64))
    optimizer = IVON([w], lr=0.1, ess=25.0, weight_decay=0.3, beta2=0.5, curvature="gradsq")
    optimizer.generator = torch.Generator().manual_seed(8)
    w.grad = torch.linspace(0, 2, d, dtype=torch.float64)  # a different curvature for every coordinate
    optimizer.step()
    posterior = optimizer.posterior()
    mean, variance = posterior.mean["0"], posterior.variance["0"]
    hess = optimizer.state[w]["hess"]
    torch.testing.assert_close(variance, 1 / (25.0 * (hess + 0.3)), rtol=1e-12, atol=0)
    assert hess.max() > 10 * hess.min()
    samples = torch.empty(n, d, dtype=torch.float64)
    for i in range(n):
        with optimizer.sampled_params(train=i % 2 == 0):
            samples[i] = w.detach()
        optimizer.discard_samples()
    z = (samples - mean) / variance.sqrt()
    chi2 = z.square().sum(0)
    assert ((chi2 - n).abs() <= 5 * math.sqrt(2 * n)).all()
    assert abs(float(chi2.sum()) - n * d) <= 5 * math.sqrt(2 * n * d)
    assert (z.mean(0).abs() <= 5 / math.sqrt(n)).all()
    correlation = (z.T @ z / n) - torch.diag(chi2 / n)
    assert (correlation.abs() <= 5.5 / math.sqrt(n)).all()  # 435 pairs
