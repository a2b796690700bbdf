"""The recipe from a prior: a private linear layer on what the prior's network sees, in flat coordinates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
from dpivon import Accountant, ArgumentError, Augmentation, recipe
from dpivon.data.images import load_digits
from dpivon.durable.ledger import read
from dpivon.metrics import accuracy
from dpivon.priors import Features
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import LEDGER, history
from dpivon.privacy.temperature import calibrate_temperature, temperature_cost, temperature_noise
from prior_cases import network, plain, public, small

N = 300
PLAN: dict[str, Any] = {"target_epsilon": 4.0, "delta": 1e-5, "batch_size": 1000, "dataset_size": 10_000}
PLAN |= {"epochs": 3, "accountant": "rdp", "seed": 3}
TEMPERATURE = temperature_cost(temperature_noise(0.4, 1e-5, accountant="rdp"))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (N,), generator=generator)
    return torch.eye(3)[y] * 2 + torch.randn(N, 3, generator=generator), y


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x[n], y[n]) for x, y in ((a.mean, b.mean), (a.variance, b.variance)) for n in {*x, *y})


def test_it_is_the_recipe_on_features_and_predicts_from_inputs() -> None:
    x, y = data()
    features = Features(network(7), public())
    trained: Any = dpivon.steady(network(), x, y, start_from=features, **PLAN)
    zero = nn.Linear(8, 3)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    by_hand: Any = dpivon.steady(zero, features(x), y, **PLAN)
    assert same(trained.predictor.posterior, by_hand.predictor.posterior)
    assert trained.temperature == by_hand.temperature != 1.0
    assert trained.predictor.history == [(trained.predictor.budget.noise_multiplier, 0.1, 30), TEMPERATURE]
    assert 3.98 < trained.predictor.account.get_epsilon(1e-5) <= 4.0
    ours, theirs = trained.predict(x, samples=0), by_hand.predict(features(x), samples=0)
    torch.testing.assert_close(ours.probs, theirs.probs)
    assert accuracy(ours.probs, y) > 0.6
    batches = trained.predict([(x[:100], y[:100]), (x[100:], y[100:])], samples=0)
    torch.testing.assert_close(batches.probs, ours.probs)


def test_the_temperature_is_chosen_on_held_out_examples_where_few_can_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    features = Features(network(7), public())
    plan = {**PLAN, "batch_size": 30}
    del plan["dataset_size"]
    noise = temperature_noise(0.4, 1e-5, accountant="rdp")
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(noise, 15))  # which 15 of the 300 are blurred by
    trained: Any = dpivon.steady(network(), x, y, start_from=features, **plan)
    held = recipe.left_out(x, y, 15 / N)
    assert 5 <= held.sum() <= 30
    assert trained.predictor.budget.dataset_size == N - 15  # public: not how many there are
    layer, seen = features.last_layer(3), features(x)
    kept: Any = dpivon.steady(layer, seen[~held], y[~held], **plan, dataset_size=N - 15)
    assert same(kept.predictor.posterior, trained.predictor.posterior)  # they are not trained on
    chosen: dict[str, Any] = {"noise_multiplier": noise, "samples": 32, "account": Accountant()}
    chosen["generator"] = torch.Generator().manual_seed(PLAN["seed"] ^ 0x7E3F)
    assert trained.temperature == calibrate_temperature(trained.predictor, (x[held], y[held]), **chosen).temperature
    # Charged in full, as if they were trained on too.
    assert trained.predictor.history[-1] == TEMPERATURE
    assert 3.9 < trained.predictor.account.get_epsilon(1e-5) <= 4.0
    # More than a twentieth would be needed: none.
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(noise, 16))
    every: Any = dpivon.steady(network(), x, y, start_from=features, **plan)
    assert every.predictor.budget.dataset_size == N
    assert every.temperature != 1.0
    # A layer that is trained from scratch holds none out, unless it is to.
    alone: Any = dpivon.steady(layer, seen, y, **plan)
    assert same(alone.predictor.posterior, every.predictor.posterior)
    asked: Any = dpivon.steady(layer, seen, y, held_out=0.2, **plan)
    assert asked.predictor.budget.dataset_size == N - 16
    for wrong, given in ((-1, {}), (1.0, {}), (0.1, {"dataset_size": N})):
        with pytest.raises(ArgumentError, match=f"held_out={wrong}"):
            dpivon.steady(layer, seen, y, held_out=wrong, **plan, **given)
    with pytest.raises(ArgumentError, match=r"held_out=0\.1"):
        dpivon.steady(layer, TensorDataset(seen, y), held_out=0.1, **plan)


def test_an_example_that_is_removed_moves_no_other_into_or_out_of_the_training() -> None:
    x, y = data()
    x[50:90], y[50:90] = x[0], y[0]  # alike, and with another label too
    y[80:90] = (y[0] + 1) % 3
    rows = [(*row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]

    def held_out(kept: list[int]) -> Counter[Any]:
        held = recipe.left_out(x[kept], y[kept], 0.05).tolist()
        return Counter((rows[i], out) for i, out in zip(kept, held, strict=True))

    whole = held_out(list(range(N)))
    assert {out for (row, out), _ in whole.items() if row == rows[0]} == {False, True}
    for gone in (0, 1, 20, 70, 85, N - 1):
        without = held_out([i for i in range(N) if i != gone])
        assert sum((whole - without).values()) == 1
        assert not without - whole


def test_a_full_batch_stays_one_and_other_labels_are_named_where_examples_are_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = data()
    monkeypatch.setattr(recipe, "WORTH", recipe.blur(temperature_noise(0.4, 1e-5, accountant="rdp"), 15))
    given: dict[str, Any] = {**PLAN, "start_from": Features(network(7), public()), "batch_size": N}
    del given["dataset_size"]
    assert dpivon.steady(network(), x, y, **given).predictor.budget.sample_rate == 1.0  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="batch_size=301: is larger than"):
        dpivon.steady(network(), x, y, **{**given, "batch_size": N + 1})
    with pytest.raises(ArgumentError, match="batch_size='many': is not a number"):
        dpivon.steady(network(), x, y, **{**given, "batch_size": "many"})
    with pytest.raises(ArgumentError, match="labels=295: does not match 300 inputs"):
        dpivon.steady(network(), x, y[:-5], **given)
    with pytest.raises(ArgumentError, match="labels=None: is missing"):
        dpivon.steady(nn.Linear(3, 3), x, held_out=0.05, **{**given, "start_from": None})


def test_a_prior_by_name_learns_digits_where_scratch_does_not() -> None:
    digits = load_digits()
    x, held = digits.train.x * 4 - 2, digits.validation.x * 4 - 2  # (p − 0.5)/0.25
    plan: dict[str, Any] = {"target_epsilon": 1.0, "delta": 1e-4, "batch_size": 256, "epochs": 40, "accountant": "rdp"}
    found = []
    for start in (None, "strokes-8"):
        trained = dpivon.steady(small(), x, digits.train.y, start_from=start, seed=0, **plan)
        found.append(accuracy(trained.predict(held, samples=0).probs, digits.validation.y))
    assert found[1] > 0.93
    assert found[1] > found[0] + 0.05


def test_a_kept_run_and_a_data_set_are_the_same_recipe(tmp_path: Path) -> None:
    x, y = data()
    given = {**PLAN, "start_from": Features(network(7), public())}
    free: Any = dpivon.steady(network(), x, y, **given)
    dataset: Any = dpivon.steady(network(), TensorDataset(x, y), **given)
    assert same(free.predictor.posterior, dataset.predictor.posterior)
    out = tmp_path / "run"

    def stop(done: int, steps: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dpivon.steady(network(), x, y, **given, out=out, on_progress=stop)
    spent = epsilon(history(read(out / LEDGER), 0), 1e-5, "rdp")
    whole: Any = dpivon.steady(network(), x, y, **given, out=tmp_path / "whole")
    for _ in range(2):  # the second finds it finished
        kept: Any = dpivon.steady(network(), x, y, **given, out=out)
        assert same(kept.predictor.posterior, whole.predictor.posterior)
        record = read(out / LEDGER)
        assert record.releases == 30 + TEMPERATURE[2]
        assert kept.predictor.history == history(record, 0) == free.predictor.history
        assert spent < kept.predictor.account.get_epsilon(1e-5) <= 4.0
        assert torch.equal(kept.predictor.predict(x, 0).label, whole.predict(x, samples=0).label)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (lambda: nn.Conv1d(3, 3, 1), {}, "model='Conv1d': has no linear layer"),
        (network, {"start_from": network()}, "start_from='Sequential': is no prior"),
        (network, {"start_from": "images-64"}, "neither a prior by name nor a file"),
        (network, {"start_from": "images-32"}, "is not of this network"),
        (network, {"start_from": plain(network())}, "names no random process"),
        (network, {"start_from": plain(network(), method="dp-steady")}, "was trained by dp-steady, and what that cost"),
        (network, {"augment": Augmentation(2, flip=True)}, "augment=.*was given with start_from"),
        (network, {"labels": None}, "labels=None: is missing"),
        (network, {"inputs": TensorDataset(*data())}, "labels='Tensor': was given with a Dataset"),
        (network, {"inputs": TensorDataset(data()[0]), "labels": None}, "is not a Dataset of pairs"),
        (network, {"evaluate": lambda learner: {}}, "evaluate=.*was given with start_from"),
        (network, {"lr": -1.0}, "lr=-1.0"),
        (network, {"options": {"raise": 1.0}}, "are not options of 'dp-steady'"),
        (network, {"noise_multiplier": 1.0}, "both were given"),
        (network, {"target_epsilon": 0.0}, "target_epsilon=0"),
    ],
)  # fmt: skip
def test_what_cannot_begin_so_is_named_and_nothing_is_released(model: Any, given: dict[str, Any], said: str) -> None:
    x, y = data()
    options = {**PLAN, "start_from": Features(network(7), public()), "inputs": x, "labels": y, **given}
    with pytest.raises(ArgumentError, match=said):
        dpivon.steady(model(), **options)
