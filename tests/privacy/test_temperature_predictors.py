"""A temperature chosen privately, whatever predicts: every prediction is a function of its example alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_temperature import CLASSES, Softmax, data
from torch import Tensor, nn

import dpivon
from dpivon import Accountant, ArgumentError, calibrate_temperature
from dpivon.dropout import dropout_posterior
from dpivon.predict import ClassPrediction
from dpivon.privacy.temperature import _predicted
from dpivon.release import Release
from dpivon.stacked import AnyNetwork, Ensemble, Run


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(CLASSES, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


class Of:
    """A predictor by ``dpivon.predict``."""

    def __init__(self, posterior: Any) -> None:
        self.model, self.posterior = network(), posterior(network())

    def predict(self, x: Tensor, samples: int = 3, **options: Any) -> ClassPrediction:
        return dpivon.predict(self.model, self.posterior, x, samples, **options)


def wide(model: nn.Module) -> Any:
    point = dpivon.Posterior.point(model)
    return replace(point, variance={name: torch.ones_like(v) for name, v in point.variance.items()})


def several(model: nn.Module) -> Any:
    spread = torch.linspace(-9, 9, 5)
    return dpivon.SampledPosterior(
        {name: torch.stack([p * float(k) for k in spread]) for name, p in wide(model).mean.items()}
    )


def ensemble() -> Any:
    x, y = data(20)
    net = AnyNetwork(lambda: nn.Linear(CLASSES, CLASSES))
    made = Ensemble(Run("dp-ivon-gradsq", 0, 1.0, 1.0, 0.5, 4), [1, 2], net, x, y)
    for _ in made.train(3):
        pass
    return made


PREDICTORS: dict[str, Any] = {
    "point": lambda: Of(dpivon.Posterior.point),
    "posterior": lambda: Of(wide),
    "samples": lambda: Of(several),
    "dropout": lambda: Of(dropout_posterior),
    "ensemble": ensemble,
}


def sums_of(predictor: Any, given: Any, monkeypatch: Any, **options: Any) -> list[float]:
    """What is about to be noised, all along a path that the answers do not decide."""
    found: list[float] = []

    def fixed(clipped: Any, spec: Any, noise: Any, charge: Any) -> Release:
        found.extend(float(total) for total in clipped.values())
        return Release({t: torch.tensor([1.0 if len(found) % 2 else -1.0]) for t in clipped}, spec.variance)

    monkeypatch.setattr("dpivon.privacy.temperature.release", fixed)
    calibrate_temperature(predictor, given, account=Accountant(), noise_multiplier=1.0, bound=0.5, **options)
    return found


@pytest.mark.parametrize("shape", ["tensors", "batches"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_one_example_moves_no_sum_by_more_than_the_bound_whatever_predicts(
    name: str, shape: str, monkeypatch: Any
) -> None:
    predictor, (x, y) = PREDICTORS[name](), data(40, scale=2.0)
    options: dict[str, Any] = {"samples": 3} if name == "ensemble" else {}

    def given(keep: Tensor) -> Any:
        return (x[keep], y[keep]) if shape == "tensors" else zip(x[keep].split(7), y[keep].split(7), strict=True)

    torch.manual_seed(5)
    whole = sums_of(predictor, given(torch.arange(40)), monkeypatch, **options)
    for i in (0, 6, 20, 39):
        torch.manual_seed(5)
        less = sums_of(predictor, given(torch.arange(40) != i), monkeypatch, **options)
        assert max(abs(a - b) for a, b in zip(whole, less, strict=True)) <= 0.5 * (1 + 1e-5)
    if name != "point":  # and θ is drawn: another seed is another sum
        torch.manual_seed(6)
        assert sums_of(predictor, given(torch.arange(40)), monkeypatch, **options) != whole


@pytest.mark.parametrize("name", ["posterior", "ensemble"])
def test_a_generator_that_is_given_draws_the_same_for_every_batch_too(name: str) -> None:
    predictor, (x, y) = PREDICTORS[name](), data(20)
    options: dict[str, Any] = {"samples": 3}
    found = []
    for given in ((x, y), zip(x.split(3), y.split(3), strict=True)):
        options["generator"] = torch.Generator().manual_seed(4)
        found.append(_predicted(predictor, given, options)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


class DrawsForEveryRow:
    def predict(self, x: Tensor) -> ClassPrediction:
        return Softmax().predict(nn.functional.dropout(x, 0.5))


class LooksAtTheBatch:
    def predict(self, x: Tensor) -> ClassPrediction:
        return Softmax().predict(x - x.mean(0))


class DrawsByItself:
    def __init__(self) -> None:
        self.random = random.Random(0)

    def predict(self, x: Tensor) -> ClassPrediction:
        return Softmax().predict(x * self.random.random())


@pytest.mark.parametrize("kind", [DrawsForEveryRow, LooksAtTheBatch, DrawsByItself])
def test_a_prediction_that_depends_on_other_rows_is_refused(kind: Any) -> None:
    account = Accountant()
    with pytest.raises(ArgumentError, match=f"predictor='{kind.__name__}': predicts otherwise .*dpivon.predict"):
        calibrate_temperature(kind(), data(), account=account, noise_multiplier=1.0)
    assert len(account) == 0
