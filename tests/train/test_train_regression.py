"""A number to predict: the likelihood's closed forms, a run that learns within its budget, and honest intervals."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal
from typer.testing import CliRunner

from dpivon import DpivonError
from dpivon.cli import app
from dpivon.gaussian import GaussianNoise, interval, regression_scores
from dpivon.predict import RegressionPrediction
from dpivon.train import load, resolve, train
from dpivon.train import run as running
from dpivon.train.publication import export_run

SCHEMA = """\
task: regression
target: cost
target_bounds: {min: 0, max: 40}
id: case
delimiter: ';'
decimal: ','
columns:
  age: {min: 0, max: 100}
  days: {min: 0, max: 10}
"""


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)


def write(path: Path, n: int, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    age, days = draw.uniform(0, 100, n), draw.uniform(0, 10, n)
    cost = 5 + 0.1 * age + 2 * days + draw.normal(0, 2, n)
    rows = zip(age, days, cost, strict=True)
    lines = [
        "case;age;days;cost",
        *(f"c{i};" + ";".join(f"{v:.3f}".replace(".", ",") for v in r) for i, r in enumerate(rows)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "schema.yaml").write_text(SCHEMA)
    return {
        "data": str(write(folder / "train.csv", 600, 0)),
        "test": str(write(folder / "test.csv", 400, 1)),
        "schema": str(folder / "schema.yaml"),
        "epsilon": 8.0,
        "delta": 1e-4,
        "dataset_size": 600,
        "epochs": 10,
        "accountant": "rdp",
        "hidden": [16],
        "seed": 3,
        "out": str(folder / "run"),
        **more,
    }


def test_the_loss_is_the_gaussians_and_its_factor_moves_no_minimum() -> None:
    outputs, y = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    declared = GaussianNoise(0.25)
    expected = -Normal(outputs[:, 0], 0.25).log_prob(y) - math.log(2 * math.pi) / 2
    torch.testing.assert_close(declared(outputs[:, :1], y), expected)
    learned = GaussianNoise.given("learned")
    mean, variance = learned.moments(outputs)
    assert bool(((variance > 0.02**2) & (variance < 1)).all())
    (plain,) = torch.autograd.grad(-Normal(mean, variance.sqrt()).log_prob(y).sum(), outputs, retain_graph=True)
    (ours,) = torch.autograd.grad(learned(outputs, y).sum(), outputs)
    torch.testing.assert_close(ours, plain * variance.detach().unsqueeze(1))
    with pytest.raises(DpivonError, match="noise_std=-1"):
        GaussianNoise.given(-1)
    with pytest.raises(DpivonError, match="is not"):
        learned.moments(outputs[:, :1])


def test_scores_by_hand() -> None:
    four = torch.full((4,), 4.0, dtype=torch.float64)
    found = RegressionPrediction(torch.tensor([0.0, 2.0, 4.0, 6.0], dtype=torch.float64), four, four / 4, 3 * four / 4)
    y = torch.tensor([1.0, 1.0, 4.0, 16.0], dtype=torch.float64)
    scores = regression_scores(found, y)
    assert scores["rmse"] == pytest.approx(math.sqrt(102 / 4))
    assert scores["r2"] == pytest.approx(1 - 102 / float((y - y.mean()).square().sum()))
    assert scores["coverage_95"] == 0.75
    assert scores["nll"] == pytest.approx(float(-Normal(found.mean, 2.0).log_prob(y).mean()))
    low, high = interval(found)
    assert float(Normal(0.0, 1.0).cdf((high - low)[0] / 4)) == pytest.approx(0.975)


def test_it_learns_within_the_budget_and_its_intervals_hold(tmp_path: Path) -> None:
    """A noise of 2 in a spread of 6.8: the best R² is 0.91. Predictions carry the id and read decimal commas."""
    summary = train(resolve(options(tmp_path)))
    metrics = summary["metrics"]
    assert summary["epsilon"] <= 8.0
    assert 0.75 < metrics["mc_r2"] < 0.93
    assert 0.9 <= metrics["mc_coverage_95"] <= 1
    assert any("0 to 40" in sentence for sentence in summary["public_inputs"])
    assert summary["findings"][0].startswith("R² = 0.")
    out = tmp_path / "p.csv"
    result = CliRunner().invoke(
        app, ["predict", str(tmp_path / "run" / "model"), str(tmp_path / "test.csv"), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "400 predictions" in result.stdout
    with open(out, newline="") as file:
        lines = list(csv.DictReader(file))
    published = load(tmp_path / "run")
    test = published.description.inputs.read(str(tmp_path / "test.csv"), published.description.targets)
    scores = regression_scores(published.regress(test.inputs), published.description.target_values(test))
    assert scores["r2"] == pytest.approx(metrics["mc_r2"])
    error = [
        float(line["predicted"]) - y
        for line, y in zip(lines, published.description.target_values(test).tolist(), strict=True)
    ]
    assert math.sqrt(sum(e * e for e in error) / 400) == pytest.approx(metrics["mc_rmse"], rel=1e-4)
    assert [line["case"] for line in lines[:3]] == ["c0", "c1", "c2"]
    for line in lines:
        assert float(line["low_95"]) < float(line["predicted"]) < float(line["high_95"])
        assert float(line["epistemic_std"]) < float(line["std"])
    export_run(tmp_path / "run", tmp_path / "published", None)
    mean, std = torch.export.load(tmp_path / "published" / "model.pt2").module()(test.inputs)
    at_the_mean = published.regress(test.inputs, samples=0)
    torch.testing.assert_close(mean.double(), at_the_mean.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(std.double(), at_the_mean.variance.sqrt(), rtol=1e-4, atol=1e-4)
    assert "cost: a number from 0 to 40" in (tmp_path / "published" / "model-card.md").read_text()
    model = json.loads((tmp_path / "run" / "model" / "model.json").read_text())
    assert (model["noise_std"], model["network"]["classes"], model["classes"]) == (None, 2, [])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target_bounds": None}, "^target_bounds=None: is needed"),
        ({"classes": ["a", "b"]}, "^classes=.*is of classes"),
        ({"coverage": 0.9, "calibration": "c.csv"}, "^coverage=0.9: is of classes"),
        ({"noise_std": 0}, "noise_std"),
        ({"network": "ordinal"}, "^network=.*is of ordered classes"),
        ({"task": "ordinal"}, "task='ordinal': is not one of"),
        ({"task": "classification", "classes": ["a", "b"]}, "^target_bounds: .*needs --task regression"),
    ],
)
def test_what_does_not_belong_to_a_number_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    given = options(tmp_path)
    if "target_bounds" in more:
        (tmp_path / "schema.yaml").write_text(SCHEMA.replace("target_bounds: {min: 0, max: 40}\n", ""))
    with pytest.raises(DpivonError, match=words):
        resolve(given | more)


def test_a_target_that_is_missing_is_refused_before_step_0(tmp_path: Path) -> None:
    given = options(tmp_path, noise_std=0.25)
    with open(tmp_path / "train.csv", "a") as file:
        file.write("c600;3,0;4,0;NA\n")
    with pytest.raises(DpivonError, match="1 of 601 targets are missing or no numbers, the first in row 601"):
        train(resolve(given))
    assert not (tmp_path / "run").exists()
