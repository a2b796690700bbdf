"""Tables that people open in a spreadsheet."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dpivon.decisions import Decision
from dpivon.terminal import cell
from dpivon.train import published as publishing

FORMULAS = ['=HYPERLINK("http://x","y")', "+1+1", "-cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1", "＝1+1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_what_a_spreadsheet_would_execute_stands_after_an_apostrophe(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["-1", "+1.5e-3", "-inf", "yes", "a=b", "", "x-ray.png", "'quoted"])
def test_numbers_stay_numbers_and_words_stay_words(text: str) -> None:
    assert cell(text) == text


def test_predictions_hold_no_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = SimpleNamespace(names=[FORMULAS[0], "b.png"], inputs=None, ids=None)
    source = SimpleNamespace(kind="image", read=lambda where, classes: examples, look=lambda where, learning: [])
    found = SimpleNamespace(
        label=torch.tensor([1, 0]),
        probs=torch.tensor([[0.25, 0.75], [0.75, 0.25]]),
        entropy=torch.tensor([-1e-9, 0.5]),
        mutual_information=torch.zeros(2),
    )
    description = SimpleNamespace(inputs=source, classes=("-1", "=1+1"), noise=None, labels=())
    monkeypatch.setattr(publishing, "kind_of", lambda where: "image")
    published = SimpleNamespace(description=description, predict=lambda *a: found, decision=Decision())
    publishing.predict_file(published, "photos", tmp_path / "p.csv")  # type: ignore[arg-type]
    with open(tmp_path / "p.csv", newline="") as file:
        header, first, second = csv.reader(file)
    assert header == ["file", "predicted", "p(-1)", "p(=1+1)", "entropy", "mutual_information"]
    assert first[:2] == [f"'{FORMULAS[0]}", "'=1+1"]
    assert float(first[4]) == pytest.approx(-1e-9)
    assert second[:3] == ["b.png", "-1", "0.75"]
