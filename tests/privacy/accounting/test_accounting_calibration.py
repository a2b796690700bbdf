"""Noise for a budget: inside it, and not by much; and the plan of a whole run."""

from __future__ import annotations

import math

import pytest

from dpivon import PrivacyEngine
from dpivon.errors import ArgumentError, BudgetSpent, PrivacyWarning
from dpivon.privacy.accounting import Accountant, Budget, Limit, budget, epsilon, noise_multiplier, pld


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("target", [0.01, 0.1, 1.0, 8.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize(("q", "steps"), [(256 / 60000, 14062), (1.0, 1), (1.0, 10**6), (0.5, 100), (1e-4, 10)])
def test_both_sides_of_the_target(target: float, q: float, steps: int) -> None:
    sigma = noise_multiplier(target, 1e-5, q, steps, "rdp")
    assert epsilon([(sigma, q, steps)], 1e-5, "rdp") <= target < epsilon([(0.99 * sigma, q, steps)], 1e-5, "rdp")


def test_the_tightest_is_the_default() -> None:
    plan = budget(dataset_size=1000, batch_size=100, steps=40, delta=1e-5, target_epsilon=1.0)
    sigma, row = plan.noise_multiplier, (plan.noise_multiplier, 0.1, 40)
    assert plan.accountant == Accountant().mechanism() == PrivacyEngine().accountant.mechanism() == "pld"
    assert sigma == noise_multiplier(1.0, 1e-5, 0.1, 40) < 0.97 * noise_multiplier(1.0, 1e-5, 0.1, 40, "rdp")
    assert plan.epsilon == epsilon([row], 1e-5, "pld") <= 1.0 < epsilon([row], 1e-5, "rdp")
    assert epsilon([(0.999 * sigma, 0.1, 40)], 1e-5) > 1.0


def test_a_limit_is_held_by_rdp_beside_the_plan() -> None:
    """PLD composes a schedule that is fixed beforehand; another σ may have been chosen by looking at releases."""
    sigma = noise_multiplier(1.0, 1e-5, 0.1, 40)
    limit, account = Limit(1.0, 1e-5, sigma, 0.1, 40), Accountant()
    account.charge(noise_multiplier=sigma, sample_rate=0.1, steps=39)
    limit.check(account, sigma, 0.1)
    assert epsilon([(sigma, 0.1, 39), (1e6, 0.1, 1)], 1e-5) < 1.0 < epsilon([(sigma, 0.1, 39)], 1e-5, "rdp")
    with pytest.raises(BudgetSpent, match=r"target_epsilon=1\.0"):
        limit.check(account, 1e6, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accountant", "target"),
    [("pld", 0.5), pytest.param("pld", 3.0, marks=pytest.mark.slow), ("prv", 0.5), ("prv", 3.0)],
)
def test_both_sides_with_tight_accountants(accountant: str, target: float) -> None:
    sigma = noise_multiplier(target, 1e-5, 0.01, 500, accountant)
    assert sigma < noise_multiplier(target, 1e-5, 0.01, 500, "rdp")
    below = epsilon([(0.99 * sigma, 0.01, 500)], 1e-5, accountant)
    assert epsilon([(sigma, 0.01, 500)], 1e-5, accountant) <= target < below


def test_opacus_orders() -> None:
    sigma = noise_multiplier(0.5, 1e-5, 0.01, 500, "rdp", orders="opacus")
    assert epsilon([(sigma, 0.01, 500)], 1e-5, "rdp", orders="opacus") <= 0.5


def test_an_unreachable_target_names_the_smallest_one() -> None:
    with pytest.raises(ArgumentError, match=r"target_epsilon=0.05.*smallest ε that can be shown being 0\.1"):
        noise_multiplier(0.05, 1e-5, 0.01, 500, "rdp", orders="opacus")
    with pytest.raises(ArgumentError, match=r"target_epsilon=1e-05"):
        noise_multiplier(1e-5, 1e-5, 0.01, 500)


def test_releases_besides_that_pld_alone_has_room_for() -> None:
    """Calibrated by PLD, they cost more than the target by RDP, where the search usually begins."""
    also = [(1.7547, 1 / 6, 24)]
    target = 1.01 * epsilon(also, 1e-4)
    assert epsilon(also, 1e-4, "rdp") > target
    sigma = noise_multiplier(target, 1e-4, 1 / 6, 24, also=also)
    assert 0.999 * target < epsilon([*also, (sigma, 1 / 6, 24)], 1e-4) <= target


def test_only_the_result_warns_of_a_fallback() -> None:
    with pytest.warns(PrivacyWarning, match="PRV") as caught:
        sigma = noise_multiplier(5000.0, 1e-5, 0.01, 500, "prv")
    assert len(caught) == 1
    assert sigma == pytest.approx(noise_multiplier(5000.0, 1e-5, 0.01, 500, "rdp"), rel=1e-3)


def test_where_delta_covers_everything_any_noise_will_do() -> None:
    assert noise_multiplier(1.0, 1e-5, 1e-7, 10, "pld") <= 5e-4


def test_budget_of_a_noise_multiplier() -> None:
    facts = {"dataset_size": 50000, "batch_size": 128, "epochs": 150, "delta": 1e-5, "noise_multiplier": 1.0}
    plan = budget(**facts, accountant="rdp", orders="opacus")  # type: ignore[arg-type]
    assert plan == Budget(plan.epsilon, 1e-5, 1.0, 128 / 50000, 58650, 50000, 128, "rdp")
    assert plan.epsilon == pytest.approx(3.797, abs=6e-4)
    for part in ("3.797", "1e-05", "58650", "128", "50000", "rdp"):
        assert part in str(plan)
    with pytest.raises(AttributeError):
        plan.epsilon = 0.0  # type: ignore[misc]


@pytest.mark.slow
def test_budget_of_a_target() -> None:
    plan = budget(dataset_size=1000, batch_size=64, steps=225, delta=1e-5, target_epsilon=3.0, accountant="pld")
    assert plan.steps == 225
    assert 2.9 < plan.epsilon <= 3.0
    assert plan.epsilon == epsilon([(plan.noise_multiplier, 0.064, 225)], 1e-5, "pld")


def test_a_partial_batch_is_a_step() -> None:
    assert budget(dataset_size=1000, batch_size=300, epochs=2, delta=1e-5, noise_multiplier=1.0).steps == 8


def test_budget_without_noise_or_without_steps() -> None:
    assert budget(dataset_size=100, batch_size=10, steps=5, delta=1e-5, noise_multiplier=0).epsilon == math.inf
    assert budget(dataset_size=100, batch_size=10, steps=0, delta=1e-5, noise_multiplier=1).epsilon == 0


def test_a_delta_of_a_record_warns() -> None:
    with pytest.warns(PrivacyWarning, match="delta=0.01"):
        budget(dataset_size=100, batch_size=10, steps=5, delta=0.01, noise_multiplier=1.0)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    "row", [(1.1, 1 / 6, 24), (3.9, 0.1, 100), (1.0, 0.01, 1000), (20.0, 1.0, 50), (0.6, 0.01, 3000)]
)
def test_what_a_search_asks_is_never_less_than_what_is_stated(row: tuple[float, float, int]) -> None:
    stated = pld.epsilon([row], 1e-5)
    with pld.searching():
        asked = pld.epsilon([row], 1e-5)
    assert stated <= asked <= stated * (1 + 5e-4)
