"""Sums by class: bounded per person, charged before noise, and prediction sets that cover what they state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpivon.errors import BudgetSpent
from dpivon.privacy import counting
from dpivon.privacy.accounting import Accountant, Limit, epsilon, noise_multiplier
from dpivon.privacy.counting import HALVINGS, NoisySums, class_counts, class_factors, class_thresholds, sets_cost
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.people import People
from dpivon.privacy.temperature import temperature_cost, temperature_noise


def noisy(sigma: float, seed: int = 0, charge=lambda spec: None, people: People | None = None) -> NoisySums:
    return NoisySums(sigma, TorchNoise(torch.Generator().manual_seed(seed)), charge, people)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """Sums before noise, with the bound that each was charged at."""
    seen: list[tuple[Tensor, float]] = []
    real = counting.release

    def watched(sums, spec, noise, charge):
        seen.append((next(iter(sums)).clone(), spec.max_grad_norm))
        return real(sums, spec, noise, charge)

    monkeypatch.setattr(counting, "release", watched)
    return seen


@pytest.mark.parametrize("gone", [0, 1, 5])
def test_one_person_moves_a_sum_by_at_most_its_bound(gone: int, released: list[tuple[Tensor, float]]) -> None:
    """A person with any number of rows; the noise is the same in both worlds, so the adaptive questions are too."""
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(60, 3, generator=generator, dtype=torch.float64).softmax(1)
    labels = torch.randint(3, (60,), generator=generator)
    people = torch.cat([torch.zeros(20, dtype=torch.int64), torch.arange(1, 41)])  # the first has 20 rows
    stays = people != gone
    renumbered = people[stays].unique(return_inverse=True)[1]
    for world in ((probs, labels, people), (probs[stays], labels[stays], renumbered)):
        p, y, who = world[0], world[1], People(world[2])
        class_counts(y, 3, noisy(1e-9, people=who))
        class_factors(
            p, [20, 20, 20], NoisySums(1e9, TorchNoise(torch.Generator().manual_seed(1)), lambda s: None, who)
        )
        class_thresholds(p, y, 0.9, NoisySums(1e9, TorchNoise(torch.Generator().manual_seed(2)), lambda s: None, who))
    half = len(released) // 2
    moved = [float((a - b).norm()) / bound for (a, bound), (b, _) in zip(released[:half], released[half:], strict=True)]
    assert len(moved) == 1 + counting.ROUNDS + HALVINGS
    assert max(moved) <= 1 + 1e-9
    assert moved[0] == pytest.approx(1.0, abs=1e-6) if gone else moved[0] > 0.5


def test_rows_that_are_too_long_or_not_finite_are_cut_or_left_out(released: list[tuple[Tensor, float]]) -> None:
    noisy(1.0)(torch.tensor([[3.0, 4.0], [math.nan, 1.0], [0.3, 0.0]]), 1.0)
    assert torch.allclose(released[0][0], torch.tensor([0.6 + 0.3, 0.8], dtype=torch.float64))


def test_it_is_charged_before_the_noise_and_as_its_own_kind() -> None:
    drawn, charged = [], []

    class Watched(TorchNoise):
        def normal(self, like, std):
            drawn.append((len(charged), std))
            return super().normal(like, std)

    sums = NoisySums(2.5, Watched(torch.Generator().manual_seed(0)), charged.append)
    class_counts(torch.tensor([0, 1, 1]), 2, sums)
    assert drawn == [(1, 2.5)]
    assert charged[0].terms["mechanism"] == "gaussian, sums by class"
    assert charged[0].cost == (2.5, 1.0)

    def refuse(spec):
        raise BudgetSpent("enough")

    with pytest.raises(BudgetSpent):
        class_counts(torch.tensor([0, 1, 1]), 2, NoisySums(2.5, Watched(torch.Generator()), refuse))
    assert len(drawn) == 1


def test_a_plan_with_other_releases_holds_and_ends_where_it_says() -> None:
    also = (sets_cost(2.0, 1e-5), counting.shares_cost(2.0, 1e-5, counted=True))
    sigma = noise_multiplier(2.0, 1e-5, 0.1, 50, also=list(also))
    assert epsilon([(sigma, 0.1, 50), *also], 1e-5) <= 2.0 < epsilon([(0.99 * sigma, 0.1, 50), *also], 1e-5)
    limit, account = Limit(2.0, 1e-5, sigma, 0.1, 50, also), Accountant()
    for terms, n in [((sigma, 0.1), 50), *((row[:2], row[2]) for row in also)]:
        for _ in range(n):
            limit.check(account, *terms)
            account.charge(noise_multiplier=terms[0], sample_rate=terms[1], steps=1)
    with pytest.raises(BudgetSpent):
        limit.check(account, sigma, 0.1)
    with pytest.raises(BudgetSpent):
        limit.check(account, also[0][0], 1.0)


def test_steps_that_a_crash_lost_are_paid_by_training_and_not_by_what_comes_after_it() -> None:
    also = (temperature_cost(temperature_noise(0.2, 1e-5)), sets_cost(2.0, 1e-5))
    sigma = noise_multiplier(2.0, 1e-5, 0.02, 1000, also=list(also))
    limit, account = Limit(2.0, 1e-5, sigma, 0.02, 1000, also), Accountant()
    account.charge(noise_multiplier=sigma, sample_rate=0.02, steps=1000)  # some of them lost

    def spend(noise: float, rate: float, n: int) -> None:
        for _ in range(n):
            limit.check(account, noise, rate)
            account.charge(noise_multiplier=noise, sample_rate=rate, steps=1)

    with pytest.raises(BudgetSpent, match="and what is planned besides"):
        spend(sigma, 0.02, 5)  # σ is rounded up, which may be worth some steps
    for row in also:
        spend(*row)
    assert 1.99 < account.get_epsilon(1e-5) <= 2.0


def test_factors_undo_a_prior_that_clipping_bent() -> None:
    """Log-odds that are too small by 1.6: the factor is e^1.6, up to the noise."""
    generator = torch.Generator().manual_seed(1)
    z = 1.2 * torch.randn(5000, generator=generator, dtype=torch.float64) - 1.9
    labels = (torch.rand(5000, generator=generator, dtype=torch.float64) < z.sigmoid()).long()
    bent = (z - 1.6).sigmoid()
    sums = noisy(20.0, 4)
    factors = class_factors(torch.stack([1 - bent, bent], 1), class_counts(labels, 2, sums), sums)
    assert math.log(factors[1] / factors[0]) == pytest.approx(1.6, abs=0.15)


def simulate(coverage: float, n: int, epsilon: float, trials: int, seed: int) -> tuple[Tensor, Tensor]:
    """Coverage of each class in fresh rows, [trials, 2]; and the thresholds."""
    generator = torch.Generator().manual_seed(seed)
    sums = NoisySums(sets_cost(epsilon, 1e-5)[0], TorchNoise(generator), lambda spec: None)
    covered, thresholds = [], []
    for _ in range(trials):
        z = 1.5 * torch.randn(n + 2000, generator=generator, dtype=torch.float64) - 1.0
        y = (torch.rand(n + 2000, generator=generator, dtype=torch.float64) < z.sigmoid()).long()
        probs = torch.stack([(-z).sigmoid(), z.sigmoid()], 1)
        t = torch.tensor(class_thresholds(probs[:n], y[:n], coverage, sums), dtype=torch.float64)
        inside = (probs >= 1 - t).gather(1, y.unsqueeze(1)).squeeze(1)[n:].double()
        covered.append([float(inside[y[n:] == k].mean()) for k in range(2)])
        thresholds.append(t)
    return torch.tensor(covered), torch.stack(thresholds)


@pytest.mark.parametrize(("coverage", "n", "budget"), [(0.9, 2000, 8.0), (0.8, 600, 8.0), (0.95, 20_000, 2.0)])
def test_sets_cover_each_class_as_stated(coverage: float, n: int, budget: float) -> None:
    """At least 1 − α in each class, within Monte-Carlo error; and not everything, which would be no statement."""
    covered, thresholds = simulate(coverage, n, budget, 60, seed=int(n))
    error = covered.std(0) / math.sqrt(len(covered))
    assert bool((covered.mean(0) >= coverage - 3 * error).all()), covered.mean(0)
    assert bool((covered.mean(0) < 0.99).all()), covered.mean(0)
    assert bool((thresholds < 1).any())


def test_too_few_rows_leave_a_class_in_every_set() -> None:
    probs = torch.full((5, 2), 0.5)
    assert class_thresholds(probs, torch.zeros(5, dtype=torch.int64), 0.9, noisy(8.0)) == (1.0, 1.0)
