"""A temperature chosen privately: the bound on one example, the law of the choice, and what the account says of it."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import Accountant, ArgumentError, PrivacyError, StorageError, calibrate_temperature
from dpivon.durable.ledger import read
from dpivon.predict import ClassPrediction
from dpivon.privacy.accounting.recorded import epsilons, history
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.temperature import (
    LARGEST,
    charge_to,
    choose,
    clipped_sum,
    parallel_epsilon,
    temperature_cost,
    temperature_noise,
)
from dpivon.release import Release
from dpivon.temperature import log_probabilities, surprise_less_entropy, temper

CLASSES = 4


class Softmax:
    """A predictor whose inputs are its logits."""

    def predict(self, x: Tensor, **options: Any) -> ClassPrediction:
        p = x.softmax(-1)
        return ClassPrediction(p, torch.special.entr(p).sum(-1), torch.zeros(len(p)), 0)


def data(n: int = 12, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, CLASSES, generator=generator)
    return logits, torch.randint(CLASSES, (n,), generator=generator)


def test_surprise_less_entropy_is_the_gradient_of_the_nll() -> None:
    x, y = data()
    log_probs = log_probabilities(x.softmax(-1))
    log_beta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    nll = nn.functional.cross_entropy(log_probs * log_beta.exp(), y, reduction="sum")
    (expected,) = torch.autograd.grad(nll, log_beta)
    torch.testing.assert_close(surprise_less_entropy(log_probs, y, math.exp(-0.3)).sum(), expected)


def test_tempering_averages_is_tempering_logits_and_keeps_the_order_of_classes() -> None:
    x, _ = data()
    torch.testing.assert_close(temper(x.softmax(-1), 2.5), (x / 2.5).softmax(-1))
    mixed = (x.softmax(-1) + x.flip(0).softmax(-1)) / 2
    assert torch.equal(temper(mixed, 0.2).argmax(-1), mixed.argmax(-1))
    certain = temper(torch.tensor([[1.0, 0.0]]), 3.0)
    assert bool(torch.isfinite(certain).all())


# ---- one example moves the sum by at most B


def extremes() -> tuple[Tensor, Tensor]:
    """Ordinary examples, ones that are certain and wrong, ones that are certain and right, and one that is not finite."""
    x, y = data(8)
    sure = torch.eye(CLASSES) * 1e4
    odd = torch.full((1, CLASSES), float("nan"))
    return torch.cat([x, sure, sure, odd]), torch.cat([y, torch.arange(4), torch.arange(4).roll(1), torch.tensor([0])])


@pytest.mark.parametrize("bound", [0.1, 1.0, math.log(CLASSES)])
def test_removing_any_example_moves_any_sum_by_at_most_the_bound(bound: float) -> None:
    x, y = extremes()
    log_probs, moved, unclipped = log_probabilities(x.softmax(-1)), [], []
    for temperature in (1 / LARGEST, 0.5, 1.0, 2.7, LARGEST):
        whole = clipped_sum(log_probs, y, temperature, bound)
        for i in range(len(y)):
            keep = torch.arange(len(y)) != i
            moved.append(abs(float(whole - clipped_sum(log_probs[keep], y[keep], temperature, bound))))
        unclipped.append(surprise_less_entropy(log_probs, y, temperature).nan_to_num().abs().max())
    assert max(moved) <= bound * (1 + 1e-12)
    assert max(moved) > 0.99 * bound  # and somebody is clipped: the test would see a bound that is not kept
    assert max(unclipped) > 10 * bound
    assert moved[len(y) - 1] == 0.0  # what is not finite counts for nothing


# ---- the law of the choice


def leaves(log_probs: Tensor, y: Tensor, sigma: float, bound: float, k: int) -> dict[float, float]:
    """P(T) of every temperature that k halvings can end in, in closed form: a product of normal tails along its path."""
    found: dict[float, float] = {}

    def go(low: float, high: float, depth: int, p: float) -> None:
        middle = (low + high) / 2
        if depth == k:
            found[round(math.exp(middle), 9)] = p
            return
        total = float(clipped_sum(log_probs, y, math.exp(middle), bound))
        up = NormalDist().cdf(total / (sigma * math.sqrt(k) * bound))
        go(middle, high, depth + 1, p * up)
        go(low, middle, depth + 1, p * (1 - up))

    go(-math.log(LARGEST), math.log(LARGEST), 0, 1.0)
    return found


def test_the_choice_has_its_closed_form_law() -> None:
    x, y = data(30, scale=1.0)
    log_probs, sigma, k, draws = log_probabilities(x.softmax(-1)), 10.0, 3, 4000
    expected = leaves(log_probs, y, sigma, 1.0, k)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert min(expected.values()) * draws > 5  # all of them happen
    noise, counts = TorchNoise(torch.Generator().manual_seed(3)), dict.fromkeys(expected, 0)
    for _ in range(draws):
        ((found, _),) = choose([log_probs], y, sigma, 1.0, k, [noise], lambda spec: None)
        counts[round(found, 9)] += 1
    assert chisquare(list(counts.values()), [draws * p for p in expected.values()]).pvalue > 1e-3
    # the same test sees noise that is a third too small
    wrong = leaves(log_probs, y, sigma * 1.5, 1.0, k)
    assert chisquare(list(counts.values()), [draws * p for p in wrong.values()]).pvalue < 1e-3


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_the_exact_law_of_neighbours_keeps_the_stated_guarantee(sigma: float) -> None:
    """No sampling: Σ max(P − e^ε P', 0) over all outcomes, for every removal, both ways, is at most δ at the account's ε."""
    x, y = extremes()
    log_probs, bound, worst = log_probabilities(x.softmax(-1)), 1.0, 0.0
    account = Accountant()
    row = temperature_cost(sigma)
    account.charge(noise_multiplier=row[0], sample_rate=row[1], steps=row[2])
    whole = leaves(log_probs, y, sigma, bound, row[2])
    for delta in (1e-1, 1e-3):
        epsilon = account.get_epsilon(delta)
        for i in range(len(y)):
            keep = torch.arange(len(y)) != i
            less = leaves(log_probs[keep], y[keep], sigma, bound, row[2])
            for p, q in ((whole, less), (less, whole)):
                spent = sum(max(p[t] - math.exp(epsilon) * q[t], 0.0) for t in p)
                worst = max(worst, spent / delta)
    assert worst <= 1.0


def test_the_cost_is_that_of_one_gaussian() -> None:
    sigma, rate, k = temperature_cost(20.0)
    one = dpivon.budget(dataset_size=1, batch_size=1, steps=1, delta=1e-5, noise_multiplier=20.0)
    many = dpivon.budget(dataset_size=1, batch_size=1, steps=k, delta=1e-5, noise_multiplier=sigma)
    assert rate == 1.0
    assert many.epsilon == pytest.approx(one.epsilon, rel=1e-9)
    at = temperature_noise(0.5, 1e-5)
    account = Accountant()
    calibrate_temperature(Softmax(), data(), account=account, epsilon=0.5, delta=1e-5)
    assert account.get_epsilon(1e-5) <= 0.5
    assert account.history == [temperature_cost(at)]


def test_it_finds_the_temperature_at_which_labels_were_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(20_000, CLASSES, generator=generator)
    for true in (0.5, 1.0, 3.0):
        y = torch.multinomial((x / true).softmax(-1), 1, generator=generator).squeeze(1)
        found = calibrate_temperature(Softmax(), (x, y), account=Accountant(), noise_multiplier=20.0)
        assert found.temperature == pytest.approx(true, rel=0.12)
        torch.testing.assert_close(found.predict(x[:5]).probs, (x[:5] / found.temperature).softmax(-1))
        batches = zip(x.split(7000), y.split(7000), strict=True)
        again = calibrate_temperature(Softmax(), batches, account=Accountant(), noise_multiplier=20.0)
        assert again.temperature == pytest.approx(true, rel=0.12)


# ---- the account


def trained(tmp_path: Path | None = None, **options: Any) -> tuple[Any, Any]:
    model = nn.Linear(CLASSES, CLASSES)
    x, y = data(24)
    engine = dpivon.PrivacyEngine(**({} if tmp_path is None else {"ledger": tmp_path / "ledger.jsonl"}))
    learner = dpivon.method("dp-sgd", model, dataset_size=24)
    make = learner.make_private_with_epsilon if "target_epsilon" in options else learner.make_private
    settings = {"max_grad_norm": 1.0, **({} if "target_epsilon" in options else {"noise_multiplier": 1.0}), **options}
    made, optimizer, loader = make(engine, DataLoader(TensorDataset(x, y), batch_size=8), **settings)
    for a, b in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(made(a), b).backward()
        optimizer.step()
    return learner, engine


def test_the_ledger_has_it_under_its_own_name_and_composes_it(tmp_path: Path) -> None:
    learner, engine = trained(tmp_path)
    before = engine.get_epsilon(1e-3)
    calibrate_temperature(learner, data(24), noise_multiplier=2.0, account=engine)
    record = read(tmp_path / "ledger.jsonl")
    training, temperature = record.rows
    assert temperature[0][0]["mechanism"] == "gaussian, temperature"
    assert training[0][0]["mechanism"] == "gaussian, Poisson-sampled"
    assert temperature[1] == 6
    assert history(record, 0) == [(1.0, 8 / 24, 3), temperature_cost(2.0)]
    assert engine.get_epsilon(1e-3) == pytest.approx(epsilons(history(record, 0), 1e-3)["pld"])
    assert engine.get_epsilon(1e-3) > before


def test_a_release_that_fails_was_charged_and_a_charge_that_fails_releases_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    learner, engine = trained(tmp_path)
    spent, on_disk = len(engine.accountant), engine.ledger.record.releases

    class Broken:
        origin = "cryptographic"

        def normal(self, like: Tensor, std: float) -> Tensor:
            assert len(engine.accountant) == spent + 1  # charged, and nothing is released yet
            assert read(tmp_path / "ledger.jsonl").releases == on_disk + 1
            raise RuntimeError("no entropy")

    monkeypatch.setattr("dpivon.privacy.temperature.SecureNoise", Broken)
    with pytest.raises(RuntimeError, match="no entropy"):
        calibrate_temperature(learner, data(), noise_multiplier=2.0, account=engine)
    monkeypatch.undo()
    spent = len(engine.accountant)

    def full(*given: Any) -> None:
        assert len(engine.accountant) == spent  # the disk comes first
        raise StorageError("disk: full. Make room.")

    monkeypatch.setattr(engine.ledger, "charge", full)
    with pytest.raises(StorageError, match="full"):
        calibrate_temperature(learner, data(), noise_multiplier=2.0, account=engine)
    assert len(engine.accountant) == spent


def test_an_engine_with_a_budget_refuses_what_passes_it() -> None:
    learner, engine = trained(target_epsilon=2.0, target_delta=1e-3, epochs=1)
    with pytest.raises(PrivacyError, match=r"target_epsilon=2\.0"):
        calibrate_temperature(learner, data(), noise_multiplier=0.5, account=engine)


def test_data_reach_the_temperature_through_the_release_alone(monkeypatch: Any) -> None:
    """Answers frozen, other data leave everything bit-equal; the sums did differ, and reached the boundary."""
    results, sums = [], []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(5)

        def frozen(clipped: Any, spec: Any, noise: Any, charge: Any, generator: Any = generator) -> Release:
            charge(spec)
            sums.append([float(total) for total in clipped.values()])
            return Release({t: torch.randn(1, generator=generator) for t in clipped}, spec.variance)

        monkeypatch.setattr("dpivon.privacy.temperature.release", frozen)
        found = calibrate_temperature(Softmax(), data(9 + seed, seed), account=Accountant(), noise_multiplier=1.0)
        results.append((found.temperature, found.answers, found.bound, found.noise_multiplier))
    assert results[0] == results[1]
    assert sums[:6] != sums[6:]


def test_no_noise_is_no_guarantee() -> None:
    account = Accountant()
    calibrate_temperature(Softmax(), data(), account=account, noise_multiplier=0.0)
    with pytest.warns(dpivon.PrivacyWarning, match="infinite"):
        assert account.get_epsilon(1e-5) == math.inf


def test_apart_the_larger_epsilon_holds_and_only_where_data_are_apart() -> None:
    ours, theirs = Accountant(), Accountant()
    ours.charge(noise_multiplier=1.0, sample_rate=0.1, steps=10)
    charge_to(theirs)(dpivon.NoiseSpec(5.0, 1.0, 1.0, 1.0))
    x, _ = data(10)
    held_out, _ = data(4, seed=9)
    expected = max(ours.get_epsilon(1e-5), theirs.get_epsilon(1e-5))
    assert parallel_epsilon([(ours, x), (theirs, held_out)], 1e-5) == expected
    with pytest.raises(PrivacyError, match="share a record"):
        parallel_epsilon([(ours, x), (theirs, torch.cat([held_out, x[3:4]]))], 1e-5)
    with pytest.raises(ArgumentError, match="parts=1"):
        parallel_epsilon([(ours, x)], 1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "neither was given"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "both were given"),
        ({"epsilon": 1.0}, "delta=None"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
        ({"noise_multiplier": 1.0, "bound": 0.0}, "bound=0.0"),
        ({"noise_multiplier": 1.0, "halvings": 0}, "halvings=0"),
        ({"noise_multiplier": 1.0, "account": None}, "account='NoneType'"),
    ],
)
def test_what_cannot_be_used_is_named_and_charges_nothing(options: dict[str, Any], match: str) -> None:
    account = Accountant()
    with pytest.raises(ArgumentError, match=match):
        calibrate_temperature(Softmax(), data(), **{"account": account, **options})
    assert len(account) == 0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (torch.zeros(3, CLASSES), "calibration_data='Tensor'"),
        ((torch.zeros(3, CLASSES), torch.zeros(2, dtype=torch.long)), "labels.shape"),
        ((torch.zeros(3, CLASSES), torch.zeros(3)), "labels.shape"),
        ((torch.zeros(3, CLASSES), torch.full((3,), CLASSES)), "outside 0"),
        ([], "is empty"),
    ],
)
def test_data_that_are_not_labelled_are_refused(given: Any, match: str) -> None:
    account = Accountant()
    with pytest.raises(ArgumentError, match=match):
        calibrate_temperature(Softmax(), given, account=account, noise_multiplier=1.0)
    assert len(account) == 0


def test_no_rows_at_all_are_charged_and_answered_like_any() -> None:
    """How many rows there are is private: an error would tell that there is none."""

    class Strict(Softmax):
        def predict(self, x: Tensor, **options: Any) -> ClassPrediction:
            if not len(x):
                raise ArgumentError("no rows")
            return super().predict(x, **options)

    account, given = Accountant(), (torch.zeros(0, CLASSES), torch.zeros(0, dtype=torch.long))
    found = calibrate_temperature(Strict(), given, account=account, noise_multiplier=20.0)
    assert len(found.answers) == 6
    spent = account.get_epsilon(1e-5)
    calibrate_temperature(Strict(), data(), account=(other := Accountant()), noise_multiplier=20.0)
    assert spent == other.get_epsilon(1e-5) > 0
