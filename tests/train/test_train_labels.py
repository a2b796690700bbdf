"""Several columns of yes and no: the summed loss, counts within their bound, a run to its published folder, refusals."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from dpivon import DpivonError, PerExampleLoss
from dpivon.cli import app
from dpivon.decisions import Decision
from dpivon.integrations.sklearn import DPIVONClassifier
from dpivon.metrics import auroc, evaluate
from dpivon.multilabel import label_scores, macro, multilabel_loss
from dpivon.privacy.counting import class_counts, class_factors
from dpivon.train import load, resolve, train
from dpivon.train import run as running
from dpivon.train.publication import export_run

LABELS = ["stroke", "asthma"]


def write(path: Path, n: int, seed: int) -> Path:
    """Stroke follows the age, and one in eight has it; asthma follows the dose."""
    draw = np.random.default_rng(seed)
    age, dose = draw.uniform(0, 100, n), draw.uniform(0, 10, n)
    ill = (age + draw.normal(0, 8, n) > 87, dose + draw.normal(0, 1, n) > 5)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "age", "dose", *LABELS])
        for i, (a, d, *labels) in enumerate(zip(age, dose, *ill, strict=True)):
            writer.writerow([f"c{i}", f"{a:.2f}", f"{d:.2f}", *("yes" if label else "no" for label in labels)])
    return path


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": str(write(folder / "train.csv", 1000, 0)),
        "test": str(write(folder / "test.csv", 600, 1)),
        "target": LABELS,
        "classes": ["no", "yes"],
        "columns": {"age": {"min": 0, "max": 100}, "dose": {"min": 0, "max": 10}},
        "id": "case",
        "epsilon": 4.0,
        "delta": 1e-4,
        "dataset_size": 1000,
        "seed": 3,
        "out": str(folder / "run"),
        **more,
    }


def test_the_loss_of_an_example_is_the_sum_over_its_labels() -> None:
    outputs, y = torch.randn(5, 3), torch.randint(2, (5, 3))
    expected = [
        sum(float(F.binary_cross_entropy_with_logits(outputs[i, k], y[i, k].float())) for k in range(3))
        for i in range(5)
    ]
    for loss in (multilabel_loss, PerExampleLoss(multilabel_loss).per_example):
        torch.testing.assert_close(loss(outputs, y), torch.tensor(expected))


def test_scores_of_a_label_are_those_of_two_classes() -> None:
    p = torch.rand(50, 2, 1, dtype=torch.float64)
    probs, y = torch.cat([1 - p, p], -1), torch.randint(2, (50, 2))
    scores = label_scores(probs, y)
    for k in range(2):
        alone = evaluate(probs[:, k], y[:, k])
        assert {name: scores[k][name] for name in alone if name != "average_precision"} == {
            name: value for name, value in alone.items() if name != "average_precision"
        }
        hits = (probs[:, k, 1] > 0.5) & (y[:, k] == 1)
        assert scores[k]["sensitivity"] == pytest.approx(float(hits.sum() / y[:, k].sum()))
    assert macro(scores)["nll"] == pytest.approx((scores[0]["nll"] + scores[1]["nll"]) / 2)


def test_counts_and_factors_stay_within_the_bound_that_their_noise_is_for() -> None:
    bounds: list[float] = []

    def exact(rows: Tensor, bound: float) -> Tensor:
        assert float(rows.double().norm(dim=1).max()) <= bound + 1e-12
        bounds.append(bound)
        return rows.double().sum(0)

    y = torch.randint(2, (40, 3)).float()
    counts = class_counts(y, 2, exact)  # type: ignore[arg-type]
    assert counts == [float((y[:, k] == v).sum()) for k in range(3) for v in (0, 1)]
    p = torch.rand(40, 3, 1, dtype=torch.float64) / 2
    probs = torch.cat([1 - p, p], -1)
    fitted = class_factors(probs, counts, exact)  # type: ignore[arg-type]
    scaled = Decision(each=(Decision(),) * 3).with_factors(fitted).probabilities(probs)
    torch.testing.assert_close(scaled.sum(0).flatten(), torch.tensor(counts, dtype=torch.float64), rtol=0.1, atol=0.1)
    assert set(bounds) == {math.sqrt(3)}


def test_a_run_recognises_each_label_and_its_folder_predicts(tmp_path: Path) -> None:
    """Classes are counted by default, so that the rare label is recognised too; probabilities in every form agree."""
    given = options(tmp_path)
    summary = train(resolve(given))
    assert summary["epsilon"] <= 4.0
    assert summary["metrics"]["mc_decided_balanced_accuracy"] > 0.8
    assert min(scores["sensitivity"] for scores in summary["by_label"].values()) > 0.7
    assert summary["by_label"]["stroke"]["share"] < 0.2
    assert summary["findings"][0].startswith("On average over 2 labels: balanced accuracy")
    assert not summary["warnings"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "sensitivity" in page
    assert "asthma" in page

    published = load(tmp_path / "run")
    test = published.description.inputs.read(given["test"], published.description.targets)
    assert test.targets is not None
    found = published.predict(test.inputs).probs
    assert found.shape == (600, 2, 2)
    one = auroc(found[:, 1], test.targets[:, 1].long())
    assert one == pytest.approx(summary["by_label"]["asthma"]["auroc"])

    export_run(tmp_path / "run", tmp_path / "published", None, scores=True)
    card = (tmp_path / "published" / "model-card.md").read_text()
    assert "stroke, asthma: each no, yes" in card
    program = torch.export.load(tmp_path / "published" / "model.pt2").module()
    at_the_mean = published.predict(test.inputs, samples=0).probs[..., 1]
    torch.testing.assert_close(program(test.inputs), at_the_mean, rtol=1e-4, atol=1e-5)

    out = tmp_path / "p.csv"
    told = ["predict", str(tmp_path / "published"), given["test"], "--out", str(out), "--abstain", "0.6"]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 0, result.output
    with open(out, newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["case"] for line in lines[:2]] == ["c0", "c1"]
    assert {line["asthma"] for line in lines} == {"yes", "no", "abstain"}
    torch.testing.assert_close(
        torch.tensor([float(line["p(stroke)"]) for line in lines]), found[:, 0, 1], atol=1e-6, rtol=0
    )
    decision = json.loads((tmp_path / "run" / "model" / "decision.json").read_text())
    assert [own["counted"] for own in decision["each"]] == [True, True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"classes": ["a", "b", "c"]}, "^target=.*several columns are each no or yes"),
        ({"weighted_loss": True, "cost": {"stroke": 2.0}}, "weighted_loss=True: is of one column to predict"),
        ({"coverage": 0.9, "calibration": "c.csv"}, "coverage=0.9: is of one column to predict"),
        ({"network": "ordinal"}, "network='ordinal': 'ordinal' is of one column"),
        (
            {"task": "regression", "target_bounds": {"min": 0, "max": 1}, "classes": None},
            "^target=.*several columns are each no or yes",
        ),
        ({"cost": {"yes": 2.0}}, "cost='yes': is not a class or label"),
        ({"prior": {"stroke": 0.1}}, "gives no share of asthma"),
        ({"target": ["stroke", "stroke"]}, "names a column twice"),
        ({"target": ["stroke", "gout"]}, "target='gout': is not a column"),
        ({"id": "asthma"}, "id='asthma': is the target"),
    ],
)
def test_what_does_not_belong_to_several_labels_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(DpivonError, match=words):
        train(resolve(options(tmp_path) | more))
    assert not (tmp_path / "run").exists()


def test_a_missing_label_is_refused_before_step_0_by_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)
    given = options(tmp_path, prior={"stroke": 0.1, "asthma": 0.5}, cost={"stroke": 9.0})
    with open(tmp_path / "train.csv", "a") as file:
        file.write("c,3,4,no,NA\n")
    with pytest.raises(DpivonError, match=r"column asthma.*1 of 1001 labels are missing, the first in row 1001"):
        train(resolve(given))
    decision = resolve(given).decision(None)
    assert decision.each[0].threshold() == (1, pytest.approx(0.1))
    assert decision.each[1].costs == ()


@pytest.mark.slow
def test_the_estimator_takes_a_matrix_of_labels() -> None:
    draw = np.random.default_rng(0)
    X = draw.uniform(0, 1, (2000, 2))
    Y = (X + draw.normal(0, 0.05, X.shape) > [0.5, 0.7]).astype(int)
    fitted = DPIVONClassifier(epsilon=4.0, delta=1e-4, classes=[0, 1], bounds=(0.0, 1.0)).fit(X, Y)
    probs = fitted.predict_proba(X)
    assert probs.shape == (2000, 2)
    assert ((fitted.predict(X) == Y).mean(0) > 0.85).all()
    assert ((probs > 0.5) == fitted.predict(X)).all()
    with pytest.raises(DpivonError, match="are not two"):
        DPIVONClassifier(epsilon=4.0, delta=1e-4, classes=[0, 1, 2], bounds=(0.0, 1.0)).fit(X, Y)
