"""Bad arguments of everything besides the engine: one sentence that names the argument, its value and the fix.

The engine's are in privacy/test_bad_input.py, accounting's in privacy/accounting/test_accounting_bad_input.py, losses' in
privacy/test_losses.py, damaged files' in fuzz/. ``make bad-input`` counts them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import dpivon
from dpivon import DpivonError
from dpivon.cli import app
from dpivon.posterior import SampledPosterior
from dpivon.stacked import AnyNetwork, Ensemble, Run, Stack, ensemble_noise
from dpivon.study.plan import config
from dpivon.study.plan.plan import Plan, PlannedRun

NAN, INF = math.nan, math.inf
X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(DpivonError) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 500


def ivon(**options: Any) -> dpivon.IVON:
    return dpivon.IVON(mlp().parameters(), **{"lr": 0.1, "ess": 10.0} | options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1), ("lr", NAN), ("lr", INF), ("lr", "fast"), ("ess", 0.0), ("ess", -1.0), ("ess", NAN),
        ("hess_init", 0.0), ("hess_init", -1.0), ("hess_init", INF), ("beta1", -0.1), ("beta1", 1.1), ("beta1", NAN),
        ("beta2", 1.5), ("beta2", -1e-9), ("weight_decay", -1.0), ("weight_decay", NAN), ("mc_samples", 0),
        ("mc_samples", 1.5), ("mc_samples", -2), ("curvature", "newton"), ("clip_radius", 0.0), ("clip_radius", NAN),
    ],
)  # fmt: skip
def test_ivon(name: str, value: Any) -> None:
    refused(lambda: ivon(**{name: value}), name, repr(value))


def test_ivon_given_two_curvatures() -> None:
    refused(lambda: ivon(curvature="gradsq", hess_approx="price"), "hess_approx", "'price'", "curvature='gradsq'")


METHODS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unknown": ("dp-magic", {}, "name", "'dp-magic'"),
    "no name": (None, {}, "name", "None"),  # type: ignore[dict-item]
    "N zero": ("dp-sgd", {"dataset_size": 0}, "dataset_size", "0"),
    "N fractional": ("dp-sgd", {"dataset_size": 2.5}, "dataset_size", "2.5"),
    "lr negative": ("dp-sgd", {"lr": -1.0}, "lr", "-1.0"),
    "lr NaN": ("dp-adam", {"lr": NAN}, "lr", "nan"),
    "option unknown": ("dp-sgd", {"beta7": 0.5}, "beta7", "0.5"),
    "momentum negative": ("dp-sgd", {"momentum": -0.5}, "momentum", "-0.5"),
    "beta1 above one": ("dp-adam", {"beta1": 1.5}, "beta1", "1.5"),
    "beta2 NaN": ("dp-adam", {"beta2": NAN}, "beta2", "nan"),
    "ema one": ("dp-sgd", {"ema": 1.0}, "ema", "1.0"),
    "ema negative": ("dp-adambc", {"ema": -0.1}, "ema", "-0.1"),
    "hess_init zero": ("dp-ivon-gradsq", {"hess_init": 0.0}, "hess_init", "0.0"),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods(case: str) -> None:
    name, options, argument, value = METHODS[case]
    refused(lambda: dpivon.method(name, mlp(), **{"dataset_size": 12} | options), argument, value)


RUN: dict[str, Any] = {
    "method": "dp-sgd", "seed": 1, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "lr": 0.1, "batch_size": 4,
}  # fmt: skip
RUNS: list[tuple[str, Any]] = [
    ("method", "dp-magic"), ("seed", -1), ("seed", 1.5), ("seed", NAN), ("seed", "s"), ("lr", 0.0), ("lr", -1.0), ("lr", NAN),
    ("batch_size", 0), ("batch_size", 2.5), ("batch_size", 13), ("noise_multiplier", -1.0), ("noise_multiplier", NAN),
    ("noise_multiplier", INF), ("noise_multiplier", 1e300), ("max_grad_norm", 0.0), ("max_grad_norm", INF),
    ("max_grad_norm", 1e-300), ("max_grad_norm", NAN),
]  # fmt: skip


def stack(run: dict[str, Any] | None = None, **options: Any) -> Stack:
    inputs, labels = options.pop("inputs", X), options.pop("labels", Y)
    return Stack([Run(**RUN | (run or {}))], AnyNetwork(mlp), inputs, labels, **options)


@pytest.mark.parametrize(("name", "value"), RUNS)
def test_runs_of_a_stack(name: str, value: Any) -> None:
    shown = "sample_rate" if (name, value) == ("batch_size", 13) else name
    refused(lambda: stack({name: value}), shown, "1.08" if shown == "sample_rate" else repr(value))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stack({"options": {"beta1": 0.5}}), ("options", "beta1", "'dp-sgd'")),
        (lambda: stack({"method": "dp-adam", "options": {"beta1": 2.0}}), ("beta1", "2.0")),
        (lambda: stack({"options": {"ema": 1.0}}), ("ema", "1.0")),
        (lambda: Stack([], AnyNetwork(mlp), X, Y), ("runs", "[]")),
        (
            lambda: Stack([Run(**RUN), Run(**RUN | {"lr": 0.2})], AnyNetwork(mlp), X, Y),
            ("seed", "1", "share their noise"),
        ),
        (lambda: stack(labels=Y[:5]), ("labels", "5")),
        (lambda: stack(dataset_size=0), ("dataset_size", "0")),
        (lambda: stack(dataset_size=2.5), ("dataset_size", "2.5")),
        (lambda: stack(block=0), ("block", "0")),
        (lambda: stack(block=10**9), ("block", "1000000000")),
        (lambda: next(stack().train(-1)), ("steps", "-1")),
        (lambda: next(stack().train(1.5)), ("steps", "1.5")),  # type: ignore[arg-type]
        (lambda: stack().epsilon(0, 1.0), ("delta", "1.0")),
        (lambda: stack().posterior(0, averaged=True), ("averaged", "True")),
        (lambda: AnyNetwork(lambda: nn.BatchNorm1d(5)), ("BatchNorm1d", "GroupNorm")),
        (lambda: AnyNetwork(lambda: mlp().requires_grad_(False)), ("module", "no trainable parameters")),
        (lambda: Ensemble(Run(**RUN), [1, 1], AnyNetwork(mlp), X, Y), ("seeds", "[1, 1]")),
        (
            lambda: ensemble_noise(0, target_epsilon=1, delta=1e-5, dataset_size=9, batch_size=3, steps=1),
            ("members", "0"),
        ),
    ],
)
def test_stacks(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    refused(call, *words)


FIT: dict[str, Any] = {"method": "dp-ivon-gradsq", "lr": 0.1, "batch_size": 4, "epochs": 1}
FIT |= {"delta": 1e-3, "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, ("lr", "0.0")),
        ({"batch_size": 13}, ("batch_size", "13")),
        ({"batch_size": 0}, ("batch_size", "0")),
        ({"epochs": 0}, ("epochs", "0")),
        ({"epochs": 1.5}, ("epochs", "1.5")),
        ({"delta": 0.0}, ("delta", "0.0")),
        ({"delta": NAN}, ("delta", "nan")),
        ({"noise_multiplier": None}, ("noise_multiplier", "neither was given")),
        ({"target_epsilon": 3.0}, ("target_epsilon", "3.0", "both were given")),
        ({"noise_multiplier": None, "target_epsilon": -1.0}, ("target_epsilon", "-1.0")),
        ({"max_grad_norm": 0.0}, ("max_grad_norm", "0.0")),
        ({"method": "adam"}, ("method", "'adam'")),
        ({"options": {"speed": 1.0}}, ("options", "speed")),
    ],
)
def test_fit(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    refused(lambda: dpivon.fit(model, X, Y, **FIT | options), *words)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


MEAN = {"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}


def posterior(**changes: Any) -> dpivon.Posterior:
    return dpivon.Posterior(**{"mean": MEAN, "variance": {k: v + 1 for k, v in MEAN.items()}} | changes)


def predict(**changes: Any) -> Any:
    given = {"model": nn.Linear(5, 3), "posterior": posterior(), "x": X, "samples": 2} | changes
    return dpivon.predict(**given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: posterior(mean={}), ("mean", "{}")),
        (lambda: posterior(variance={"weight": torch.ones(3, 5)}), ("variance", "'bias'")),
        (lambda: posterior(variance={k: -torch.ones_like(v) for k, v in MEAN.items()}), ("variance['weight']", "-1.0")),
        (
            lambda: posterior(variance={k: torch.full_like(v, NAN) for k, v in MEAN.items()}),
            ("variance['weight']", "NaN"),
        ),
        (lambda: posterior(mean={k: v.long() for k, v in MEAN.items()}), ("mean['weight']", "int64")),
        (lambda: posterior(metadata={"a": 1}), ("metadata", "'a': 1")),
        (lambda: SampledPosterior({}), ("samples", "{}")),
        (lambda: SampledPosterior({"a": torch.ones(2), "b": torch.ones(3)}), ("samples", "'a': 2", "'b': 3")),
        (lambda: dpivon.Posterior.load("/nowhere/at.all"), ("path", "'/nowhere/at.all'")),
        (lambda: posterior().save("/nowhere/at.all"), ("path", "'/nowhere/at.all'")),
        (lambda: posterior().for_model(nn.Linear(4, 3)), ("posterior", "'weight'", "(3, 5)", "(3, 4)")),
        (lambda: predict(posterior=None), ("posterior", "NoneType")),
        (lambda: predict(posterior=MEAN), ("posterior", "dict")),
        (lambda: predict(samples=-1), ("samples", "-1")),
        (lambda: predict(samples=1.5), ("samples", "1.5")),
        (lambda: predict(batch_size=0), ("batch_size", "0")),
        (lambda: predict(likelihood="poisson"), ("likelihood", "'poisson'")),
        (lambda: predict(noise_variance=1.0), ("noise_variance", "1.0")),
        (lambda: predict(likelihood="gaussian", noise_variance=0.0), ("noise_variance", "0.0")),
        (lambda: predict(likelihood="bernoulli"), ("model output shape", "(12, 3)")),
        (lambda: predict(x=X[:0]), ("x.shape", "(0, 5)")),
        (lambda: predict(x=[]), ("x", "list")),
        (lambda: predict(x=3), ("x", "int")),
        (lambda: predict(x=torch.full((2, 5), NAN)), ("predictions", "2 of 2")),
    ],
)
def test_posteriors_and_predictions(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    refused(call, *words)


def with_bad(values: Tensor, at: int, value: float) -> Tensor:
    values = values.clone()
    values[at] = value
    return values


@pytest.mark.parametrize(
    ("data", "classes", "words"),
    [
        ((with_bad(X, 3, NAN), Y), 3, ("inputs", "record 3")),
        ((with_bad(X, 0, INF), Y), None, ("inputs", "record 0")),
        ((X, with_bad(Y, 5, 3)), 3, ("labels", "3", "record 5")),
        ((X, with_bad(Y, 2, -100)), 3, ("labels", "-100", "record 2", "PerExampleLoss")),
        ((X, Y.float()), 3, ("labels", "float32")),
        ((X, Y[:4]), 3, ("labels", "4")),
        ((X[:0], Y[:0]), 3, ("dataset", "empty")),
        (TensorDataset(with_bad(X, 7, NAN), Y), 3, ("inputs", "record 7")),
        (TensorDataset(X), 3, ("dataset", "record 0")),
        (iter(()), 3, ("dataset", "tuple_iterator")),
        ((X, Y), 1, ("classes", "1")),
        ((X, Y), 2.5, ("classes", "2.5")),
    ],
)
def test_preflight(data: Any, classes: Any, words: tuple[str, ...]) -> None:
    refused(lambda: dpivon.preflight(data, classes), *words)


def test_preflight_passes_good_data() -> None:
    assert dpivon.preflight((X, Y), 3) == dpivon.preflight(TensorDataset(X, Y), 3) == 12


PLAN: dict[str, Any] = {
    "name": "p", "dataset": "digits", "network": "small", "split": "final", "epochs": 1, "delta": 1e-5, "mc_samples": 2,
    "seed": 0, "runs": (PlannedRun("dp-sgd", 8, 1.0, 1.0, 0, 0.1),),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", "imagenet"), ("network", "huge"), ("split", "test"), ("epochs", 0), ("epochs", 1.5), ("delta", 0.0),
        ("delta", 1.0), ("delta", NAN), ("mc_samples", 0), ("seed", -1), ("runs", ()),
    ],
)  # fmt: skip
def test_plans(name: str, value: Any) -> None:
    refused(lambda: Plan(**PLAN | {name: value}), name)


def test_a_plan_that_repeats_a_run() -> None:
    refused(lambda: Plan(**PLAN | {"runs": PLAN["runs"] * 2}), "runs", "planned twice")


STUDY = """
name: s
dataset: digits
network: small
epochs: 1
delta: 1.0e-5
grid: {batch_size: [8], noise_multiplier: [1.0], max_grad_norm: [1.0]}
methods: [{method: dp-sgd, lr: 0.1}]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("name: s", "name: S!", ("name", "'S!'")),
        ("dataset: digits", "dataset: mnist", ("dataset", "'mnist'")),
        ("epochs: 1", "epochs: 0", ("epochs", "0")),
        ("epochs: 1", "epochs: many", ("epochs", "'many'")),
        ("delta: 1.0e-5", "delta: 1.5", ("delta", "1.5")),
        ("epochs: 1", "epochs: 1\nseeds: 900000000", ("seeds", "900000000")),
        ("epochs: 1", "epochs: 1\nspeed: 3", ("speed", "3")),
        ("batch_size: [8]", "batch_size: []", ("grid.batch_size", "[]")),
        ("batch_size: [8]", "batch_size: [0]", ("grid.batch_size.0", "0")),
        ("noise_multiplier: [1.0]", "noise_multiplier: [.nan]", ("grid.noise_multiplier.0", "nan")),
        ("noise_multiplier: [1.0]", "noise_multiplier: [-1]", ("grid.noise_multiplier.0", "-1")),
        ("max_grad_norm: [1.0]", "max_grad_norm: [0]", ("grid.max_grad_norm.0", "0")),
        ("method: dp-sgd", "method: dp-magic", ("method", "'dp-magic'")),
        ("lr: 0.1", "lr: -1", ("methods.0.lr", "-1")),
        ("lr: 0.1", "lr: 0.1, options: {speed: 1}", ("options", "speed")),
        ("methods: [{method: dp-sgd, lr: 0.1}]", "methods: []", ("methods", "[]")),
        ("name: s", "name: [", ("study", "YAML")),
        ("name: s", "name: !!python/object/apply:os.getcwd []", ("study", "YAML")),
    ],
)
def test_studies(old: str, new: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    assert old in STUDY
    path.write_text(STUDY.replace(old, new))
    refused(lambda: config.resolve(path), *words)


BUDGET = ("budget", "--dataset-size", "100", "--batch-size", "10", "--delta", "1e-5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*BUDGET, "--steps", "-1", "--noise-multiplier", "1"), ("steps=-1",)),
        ((*BUDGET, "--steps", "1", "--noise-multiplier", "nan"), ("noise_multiplier=nan",)),
        ((*BUDGET, "--steps", "1", "--target-epsilon", "0"), ("target_epsilon=0.0",)),
        (
            (*BUDGET, "--steps", "1", "--noise-multiplier", "1", "--accountant", "gdp"),
            ("accountant='gdp'", "guarantees nothing"),
        ),
        ((*BUDGET, "--noise-multiplier", "1"), ("epochs=None",)),
        ((*BUDGET, "--steps", "1", "--noise-multiplier", "1", "--tuning", "0"), ("mean=0.0",)),
        (("study", "run", "nowhere.yaml", "--out", "o"), ("study='nowhere.yaml'",)),
        (("study", "run", "nowhere.json", "--out", "o"), ("study='nowhere.json'",)),
        (("study", "status", "nowhere"), ("out='nowhere'",)),
        (("study", "merge", "o", "nowhere"), ("others='nowhere'",)),
        (("demo", "--epsilon", "-1", "--output", "o"), ("epsilon", "-1")),
        (("demo", "--method", "dp-magic", "--output", "o"), ("dp-magic",)),
    ],
)
def test_the_command_line(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
