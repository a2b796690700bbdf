"""How a model answers: shares, costs, weights, abstaining and prediction sets, and what each costs in ε."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from clinic import clinic, rows, write_csv
from dpivon.decisions import Decision, complete_prior
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import ArgumentError, DpivonError
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.counting import ROUNDS, sets_cost, shares_cost
from dpivon.report.testset import findings
from dpivon.train import load, resolve, train
from dpivon.train import loop as looping
from dpivon.train import run as running
from dpivon.train.published import predict_file

P = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.52, 0.48], [0.2, 0.8]])


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that counts, weighs, abstains and predicts sets."""
    folder = tmp_path_factory.mktemp("decided")
    write_csv(folder / "held.csv", rows(400, seed=2))
    options = clinic(folder) | {
        "prior": "count", "cost": "balanced", "weighted_loss": True, "abstain": 0.6, "coverage": 0.8,
        "calibration": str(folder / "held.csv"), "test": str(folder / "test.csv"), "epsilon": 8.0, "seed": 1,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_report", lambda folder, watcher: None)
        return folder, train(resolve(options))


def test_a_temperature_comes_after_the_weights_and_before_the_factors() -> None:
    decision = Decision(weights=(2.0, 1.0), temperature=2.0, factors=(1.0, 0.5))
    expected = (P.double() / torch.tensor([2.0, 1.0])).sqrt() * torch.tensor([1.0, 0.5])
    torch.testing.assert_close(decision.probabilities(P).double(), expected / expected.sum(1, keepdim=True))
    assert torch.equal(Decision(temperature=0.5).labels(P), Decision().labels(P))
    (said,) = Decision(temperature=1.5).sentences(("no", "yes"))
    assert said == "Probabilities have the temperature 1.5, chosen by sums with noise over private rows, and charged."
    with pytest.raises(ValueError, match="greater than 0"):
        Decision(temperature=0.0)


def test_every_release_was_planned_and_all_together_stay_within_epsilon(decided: Any) -> None:
    folder, summary = decided
    shares, sets = shares_cost(8.0, 1e-4, counted=True), sets_cost(8.0, 1e-4)
    charged = history(read_ledger(folder / "run" / "ledger.jsonl"), 0)
    assert charged[0] == (shares[0], 1.0, 1)  # the count comes first
    assert charged[2:] == [(shares[0], 1.0, ROUNDS), sets]
    assert charged[1][2] == summary["steps"] == 24
    assert 7.9 < summary["epsilon"] <= 8.0
    named = {terms[0]["mechanism"]: n for terms, n in read_ledger(folder / "run" / "ledger.jsonl").rows}
    assert named == {"gaussian, sums by class": sets[2], "gaussian, Poisson-sampled": 24}


def test_a_count_is_made_once_whatever_dies(decided: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the third step and again after the factors were released: the same model, and nothing is charged twice."""
    folder, summary = decided
    monkeypatch.setattr(running, "_report", lambda folder, watcher: None)
    options = yaml.safe_load((folder / "run" / "config.yaml").read_text()) | {"out": str(tmp_path / "run")}

    class Dies(running.Watcher):
        def begin(self, config: Any, description: Any, loop: Any) -> Any:
            def show(line: Any, step: int) -> None:
                if step == 3:
                    raise MemoryError("killed")

            return show

    with pytest.raises(MemoryError):
        train(resolve(options), Dies())
    with monkeypatch.context() as patch:
        patch.setattr(looping, "class_thresholds", lambda *a: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            train(resolve(options))
    again = train(resolve(options))
    assert again["decision"] == summary["decision"]
    one, other = (history(read_ledger(f / "run" / "ledger.jsonl"), 0) for f in (folder, tmp_path))
    assert one == other


def test_shares_are_counted_and_the_model_agrees_with_them(decided: Any) -> None:
    folder, summary = decided
    true = np.mean([row[4] == "yes" for row in rows(300)])
    decision = Decision.model_validate(summary["decision"])
    assert decision.counted
    assert decision.prior[0] == pytest.approx(true, abs=0.1)  # the noise of a count is 10 rows here
    assert decision.costs[0] * decision.prior[0] == pytest.approx(decision.costs[1] * decision.prior[1])
    assert sum(w * s for w, s in zip(decision.weights, decision.prior, strict=True)) == pytest.approx(1)
    published = load(folder / "run")
    assert published.decision == decision
    inputs = published.description.inputs.read(str(folder / "train.csv"), None).inputs
    assert float(published.predict(inputs).probs[:, 0].mean()) == pytest.approx(decision.prior[0], abs=0.1)
    assert any("counted with noise" in sentence for sentence in summary["public_inputs"])
    assert any("clipped" in sentence for sentence in summary["public_inputs"])  # why weights leave ε as it is


def test_answers_sets_and_abstentions_are_in_the_predictions(decided: Any, tmp_path: Path) -> None:
    folder, summary = decided
    published = load(folder / "run" / "model")
    found = predict_file(published, str(folder / "test.csv"), tmp_path / "p.csv")
    with open(tmp_path / "p.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    p, costs = found.probs.double(), torch.tensor(published.decision.costs)
    certain = (p * costs / (p * costs).sum(1, keepdim=True)).max(1)
    expected = ["abstain" if c < 0.6 else ["yes", "no"][k] for c, k in zip(*certain, strict=True)]
    assert [line["predicted"] for line in lines] == expected
    assert 0 < expected.count("abstain") < 200
    assert {line["set"] for line in lines} <= {"yes", "no", "yes no", ""}
    truly = [row[4] for row in rows(200, seed=1)]
    held = np.mean([t in line["set"].split() for t, line in zip(truly, lines, strict=True)])
    assert held == pytest.approx(summary["metrics"]["set_coverage"])
    assert summary["metrics"]["answered"] == pytest.approx(1 - expected.count("abstain") / 200)
    predict_file(published, str(folder / "test.csv"), tmp_path / "all.csv", abstain=0.0)
    assert "abstain" not in (tmp_path / "all.csv").read_text()


def test_a_declared_share_is_not_counted() -> None:
    counted, declared = shares_cost(3.0, 1e-5, counted=True), shares_cost(3.0, 1e-5, counted=False)
    assert counted[2] - declared[2] == 1
    assert complete_prior({"yes": 0.1}, ("no", "yes")) == pytest.approx((0.9, 0.1))


def test_costs_are_thresholds() -> None:
    """Two classes: yes from a probability of cost_no/(cost_no + cost_yes) on, and 1/prior decides at the prior."""
    classes = ("no", "yes")
    assert Decision().labels(P).tolist() == [0, 0, 0, 1]
    assert Decision().with_prior((), {"yes": 3.0}, classes).labels(P).tolist() == [0, 1, 1, 1]  # from 0.25 on
    balanced = Decision().with_prior((0.92, 0.08), "balanced", classes)
    assert balanced.labels(P).tolist() == [1, 1, 1, 1]  # from 0.08 on
    assert "from a probability of 8.0% on" in " ".join(balanced.sentences(classes))
    assert Decision(abstain=0.6).labels(P).tolist() == [0, 0, -1, 1]
    assert Decision(thresholds=(0.31, 0.5)).sets(P).tolist() == [
        [True, False],
        [True, False],
        [False, False],
        [False, True],
    ]


def test_weights_and_factors_are_taken_out_of_the_probabilities() -> None:
    """A model of rows that weigh 4 : 1 has odds four times as large."""
    odds = P[:, 1] / P[:, 0] * 4
    learned = torch.stack([1 / (1 + odds), odds / (1 + odds)], 1)
    assert torch.allclose(Decision(weights=(0.5, 2.0)).probabilities(learned), P)
    assert torch.allclose(Decision(factors=(1.0, 0.25)).probabilities(learned), P)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cost": "balanced"}, "prior"),
        ({"cost": {"maybe": 2.0}}, "maybe"),
        ({"prior": {"yes": 1.5}}, "prior"),
        ({"prior": {"yes": 0.5, "no": 0.6}}, "add up to 1"),
        ({"coverage": 0.9}, "calibration"),
        ({"weighted_loss": True}, "cost"),
        ({"abstain": 1.0}, "abstain"),
    ],
)
def test_what_cannot_be_decided_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(DpivonError, match=word):
        resolve(clinic(tmp_path) | changes)


def test_findings_say_what_a_constant_answer_is_worth() -> None:
    y = torch.tensor([0] * 170 + [1] * 30)
    p1 = torch.cat([torch.linspace(0.01, 0.2, 170), torch.linspace(0.1, 0.4, 30)])
    said = findings(torch.stack([1 - p1, p1], 1), y, Decision(), ("no", "yes"))
    assert said["findings"][0] == "It recognises: 0 of 30 “yes” (0.0 %), 170 of 170 “no” (100.0 %)."
    assert "Balanced accuracy 50.0 %, where a constant answer has 50.0 %." in said["findings"][1]
    assert "Accuracy 85.0 %, where always answering “no” has 85.0 %." in said["findings"][1]
    assert said["warnings"][0].startswith("The model never answers “yes”. Its probabilities do tell “yes” apart")
    useful = findings(torch.stack([1 - p1, p1], 1), y, Decision(costs=(1.0, 6.0)), ("no", "yes"))
    assert useful["warnings"] == []
    assert useful["findings"][0].endswith("It answers “yes” from a probability of 14.3 % on.")
    with pytest.raises(ArgumentError, match="labels"):
        findings(P, torch.tensor([0, 1, 2, 0]), Decision(), ("no", "yes"))


def test_the_summary_holds_no_number_that_json_lacks(decided: Any) -> None:
    folder, summary = decided
    assert json.loads((folder / "run" / "summary.json").read_text()) == summary
