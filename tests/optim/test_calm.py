"""The calm step's limits, each in closed form, and the posterior that stands beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import dpivon
from dpivon import Release
from dpivon.optim.curvature import ESTIMATORS, SecondMoment, resolve
from dpivon.optim.ivon_rule import curvature_update
from dpivon.optim.steady import Calm, CalmOptimizer

NAMES = [name for name, e in ESTIMATORS.items() if isinstance(e, SecondMoment)]


@dataclass(frozen=True)
class Signed(SecondMoment):
    """v̂ = g² − s², of this step alone."""

    base: ClassVar[str] = "signed"

    def moment(self, evidence: Any) -> Any:
        return evidence.g_squared - evidence.noise_variance


def run(gradients: Tensor, variance: float, name: Any = "empirical-bayes-fisher", **hyper: Any) -> dict[str, Tensor]:
    """The state after gradients [steps, K, P] of one matrix, from weights of one."""
    rule = Calm(resolve(name), ((4, gradients.shape[-1] // 4),))
    defaults = {**Calm.defaults, "ess": 1000.0, "batch_size": 16.0, "lr": 0.01} | hyper
    columns = {key: torch.full((gradients.shape[1], 1), float(v), dtype=torch.float64) for key, v in defaults.items()}
    state = rule.start(torch.ones_like(gradients[0]), columns)
    s2 = torch.full((gradients.shape[1], 1), variance, dtype=torch.float64)
    for t, g in enumerate(gradients, 1):
        state = rule.step(state, g, t=torch.tensor(t), noise_variance=s2, normal=None, hyper=columns)
    return state


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("s", [1e-3, 1.0, 30.0])
def test_without_a_signal_a_step_has_one_size_whatever_the_noise(s: float) -> None:
    """α times noise of standard deviation √((1 − β₁)/(1 + β₁)), to the estimator's own error: here a tenth of a step."""
    steps = 60
    moved = [run(s * noise(n, 1, 4000, seed=1), s * s, weight_decay=0.0)["mean"] for n in (steps - 1, steps)]
    beta1 = 0.9
    # Debiased momentum after t steps: Σ w_k² = (1 − β)(1 + βᵗ)/((1 + β)(1 − βᵗ)).
    std = math.sqrt((1 - beta1) / (1 + beta1) * (1 + beta1**steps) / (1 - beta1**steps))
    assert float((moved[1] - moved[0]).std()) == pytest.approx(0.01 * std, rel=0.03)


def test_without_noise_the_step_is_adams() -> None:
    """As s → 0, with the average of g² for v̂: ψ = a debiased average with decay ρ, φ = momentum."""
    gradients = noise(5, 1, 8, seed=2)
    p = torch.ones(8, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([p], lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for g in gradients:
        p.grad = g[0].clone()
        adam.step()
    for variance in (0.0, 1e-12):
        ours = run(gradients, variance, "averaged-fisher", weight_decay=0.0)["mean"]
        torch.testing.assert_close(ours[0], p.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_step_does_not_know_the_unit_of_the_loss(name: str) -> None:
    gradients = 0.3 + noise(7, 2, 12, seed=3)
    free = {"weight_decay": 0.0, "nu": 0.0}
    first, other = run(gradients, 1.0, name, **free), run(1e4 * gradients, 1e8, name, **free)
    torch.testing.assert_close(first["mean"], other["mean"])


def test_the_denominator_is_never_below_the_noise() -> None:
    """So no weight moves by more than α |s̄|/s, also where the estimate is negative."""
    gradients = noise(1, 1, 400, seed=4) * 0.1  # far smaller than the noise that is said to be in them
    moved = run(gradients, 1.0, "whole", weight_decay=0.0)["mean"] - 1.0
    torch.testing.assert_close(moved, -0.01 * gradients[0] / (1.0 + 1e-8))


def test_width_and_step_do_not_touch_each_other() -> None:
    gradients = 0.2 + noise(6, 1, 12, seed=5)
    plain = run(gradients, 1.0)
    for change in ({"hess_init": 7.0}, {"beta2": 0.5}, {"ess": 3.0}, {"temperature": 0.1}):
        assert torch.equal(run(gradients, 1.0, **change)["mean"], plain["mean"])
    assert torch.equal(run(gradients, 1.0, lr=1.0)["hess"], plain["hess"])  # the gradients are given


def test_the_curvature_is_ivons_recursion_on_the_estimate() -> None:
    g = noise(1, 1, 12, seed=6)
    state = run(g, 0.5, Signed(scale="batch"), beta2=0.9)
    one = torch.ones(1, 12, dtype=torch.float64)
    expected = curvature_update(one, 16.0 * (g[0].square() - 0.5), beta2=0.9, weight_decay=1e-4)
    torch.testing.assert_close(state["hess"], expected)
    assert bool((state["hess"] > 0).all())


def test_the_optimizer_takes_the_batch_from_the_release_and_gives_the_posterior() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = CalmOptimizer(
        model.parameters(), lr=0.1, curvature=Signed(scale="batch"), ess=50.0, temperature=0.25, beta2=0.5
    )
    g = torch.full((2, 3), 2.0)
    optimizer.step(release=Release({model.weight: g}, variance=1.0, batch_size=8.0))
    h = curvature_update(torch.ones(2, 3), 8.0 * (g.square() - 1.0), beta2=0.5, weight_decay=1e-4)
    q = optimizer.posterior(model)
    torch.testing.assert_close(q.variance["weight"], 0.25 / (50.0 * (h + 1e-4)))
    assert torch.equal(q.mean["weight"], model.weight.detach())


def test_an_average_of_iterates_carries_the_width_along() -> None:
    learner = dpivon.method("dp-calm", nn.Linear(2, 2), dataset_size=9, ema=0.5)
    optimizer: Any = learner.optimizer
    params = list(learner.model.parameters())
    iterates = []
    for k in range(2):
        optimizer.step(release=Release({p: torch.full_like(p, 1.0 + k) for p in params}, 0.1, 4.0))
        iterates.append(params[0].detach().clone())
    q = learner.posterior()
    torch.testing.assert_close(q.mean["weight"], (0.5 * iterates[0] + iterates[1]) / 1.5)
    torch.testing.assert_close(q.variance["weight"], optimizer.posterior(learner.model).variance["weight"])


def test_n_is_needed() -> None:
    with pytest.raises(ValueError, match="ess=nan"):
        CalmOptimizer(nn.Linear(2, 2).parameters(), lr=0.1)
