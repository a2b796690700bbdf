"""A training that comes after another on the same people: one account, one ledger, and noise of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
import dpivon.recipe
from dpivon import ArgumentError
from dpivon.durable.ledger import read
from dpivon.privacy.accounting.recorded import LEDGER, started_from

N = 300


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, generator=generator), torch.randint(3, (N,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_training_after_another_has_the_account_of_both_and_noise_of_its_own(tmp_path: Path) -> None:
    x, y = data()
    plan: dict[str, Any] = {"batch_size": 50, "epochs": 2, "delta": 1e-3, "seed": 5, "method": "dp-sgd"}
    # No gradient and no decay: what moves the weights is noise.
    plan |= {"options": {"weight_decay": 0.0}, "loss": lambda outputs, labels: 0.0 * outputs.sum(-1)}

    def moved(fitted: dpivon.Fitted) -> Tensor:
        ours = dict(network().named_parameters())
        return torch.cat([(p - ours[n]).detach().flatten() for n, p in fitted.model.named_parameters()])

    for i, inputs in enumerate(((x, y), (TensorDataset(x, y),), (x, y))):
        outs = [{"out": tmp_path / name} if i == 2 else {} for name in ("a", "b")]
        first = dpivon.fit(network(), *inputs, **plan, **outs[0], target_epsilon=1.0)
        second = dpivon.fit(network(), *inputs, **plan, **outs[1], target_epsilon=2.0, after=first)
        assert second.history[0] == first.history[0]
        assert second.account.get_epsilon(1e-3) == pytest.approx(second.epsilon, rel=1e-9)
        assert second.epsilon == pytest.approx(2.0, rel=5e-3)
        assert second.epsilon <= 2.0
        a, b = moved(first), moved(second)
        assert abs(float(torch.nn.functional.cosine_similarity(a, b, dim=0))) < 0.6
    assert started_from(read(tmp_path / "b" / LEDGER), 0) == {read(tmp_path / "a" / LEDGER).id: 12}
    with pytest.raises(ArgumentError, match="after='Posterior': is not an earlier training"):
        dpivon.fit(network(), x, y, **plan, target_epsilon=2.0, after=first.posterior)  # type: ignore[arg-type]
    gone = dpivon.fit(network(), x, y, **plan, target_epsilon=1.0)
    with pytest.raises(ArgumentError, match="was not kept in a folder"):
        dpivon.fit(network(), x, y, **plan, target_epsilon=2.0, out=tmp_path / "c", after=gone)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ArgumentError, match="unit of privacy 'the example'"):
        dpivon.fit(network(), x, y, **plan, target_epsilon=2.0, after=first, user_ids=list(range(N)))


def test_after_one_training_every_seed_draws_noise_of_its_own() -> None:
    x, y = data()
    plan: dict[str, Any] = {"batch_size": 50, "epochs": 1, "delta": 1e-3, "noise_multiplier": 1.0}
    first = dpivon.fit(network(), x, y, **plan, seed=0)
    made = [dpivon.fit(first.model, x, y, **plan, after=first, seed=seed).posterior.digest for seed in range(5)]
    assert len(set(made)) == 5
    for seed in (1.5, -5):
        with pytest.raises(ArgumentError, match=f"seed={seed}"):
            dpivon.fit(first.model, x, y, **plan, after=first, seed=seed)  # type: ignore[arg-type]


def test_a_temperature_after_another_training_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    chosen = dpivon.recipe.calibrate_temperature
    monkeypatch.setattr(
        dpivon.recipe, "calibrate_temperature",
        lambda *a, **k: (seeds.append(k["generator"].initial_seed()), chosen(*a, **k))[1],
    )  # fmt: skip
    plan: dict[str, Any] = {"target_epsilon": 8.0, "delta": 1e-5, "batch_size": 1000, "epochs": 2, "seed": 7}
    plan |= {"dataset_size": 10_000}
    first = dpivon.steady(network(), *data(), **plan)
    dpivon.steady(first.predictor.model, *data(), **plan | {"target_epsilon": 16.0}, after=first.predictor)
    assert len(set(seeds)) == 2
