"""`dpivon train --unit`: privacy per person, from the column to ledger, report and published statement."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clinic import HEADER, clinic, rows
from dpivon import DpivonError
from dpivon.cli import app
from dpivon.durable.ledger import read
from dpivon.train import load, resolve, train
from dpivon.train.run import describe, people_of


def write(folder: Path, table: list[list[Any]]) -> None:
    with open(folder / "train.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)


def visits(folder: Path, unit: str = "patient") -> dict[str, Any]:
    """300 rows of 100 people: the first 50 have two, the others four."""
    options = clinic(folder)
    owners = [i % 50 if i < 100 else 50 + i % 50 for i in range(300)]
    write(folder, [[*HEADER, unit], *([*row, f"p{owner}"] for row, owner in zip(rows(300), owners, strict=True))])
    return options | {
        "unit": unit,
        "dataset_size": 100,
        "batch_size": 20,
        "epochs": 2,
        "rows_per_unit": 3,
        "delta": 1e-3,
    }


def test_a_run_is_private_per_person_and_says_so(tmp_path: Path) -> None:
    options = visits(tmp_path)
    config = resolve(options)
    assert "patient" not in describe(config).inputs.columns
    people = people_of(config, config.data)
    assert people is not None
    assert sorted(people.counts.tolist()) == [2] * 50 + [4] * 50
    summary = train(config)
    folder = Path(options["out"])
    assert (summary["unit"], summary["sampling_rate"], summary["steps"]) == ("patient", 0.2, 10)
    assert read(folder / "ledger.jsonl").unit == "patient"
    assert json.loads((folder / "model" / "privacy.json").read_text())["unit"] == "patient"
    assert load(folder).description.dataset_size == 100  # and so IVON's ess
    page = " ".join((folder / "report.html").read_text().split())
    assert "adding or removing one person with all their rows (by patient)" in page
    assert "Unit of privacy: one person of 100, with all their rows (column patient)." in page
    assert "one example" not in page
    shown = CliRunner().invoke(app, ["ledger", "show", str(folder)]).output
    assert "the unit of privacy is a person with all their rows, by patient" in shown
    for other in ({"unit": None, "rows_per_unit": None, "ignore": ["patient"]}, {"rows_per_unit": 2}):
        with pytest.raises(DpivonError, match=r"unit=.*was begun with"):
            train(resolve({**options, **other}))


def test_a_unit_that_says_not_whose_a_row_is_is_refused(tmp_path: Path) -> None:
    options = visits(tmp_path)
    for changed, problem in (
        ({"unit": "name"}, "unit='name': is not a column of the table"),
        ({"unit": None}, "rows_per_unit=3: says nothing without unit"),
        ({"unit": "ill"}, "unit='ill': is the column to predict"),
    ):
        with pytest.raises(DpivonError, match=problem):
            train(resolve({**options, **changed}))
    table = list(csv.reader((tmp_path / "train.csv").read_text().splitlines()))
    table[5][-1] = " "
    write(tmp_path, table)
    with pytest.raises(DpivonError, match=r"user_ids=.*row 4 has no id"):
        train(resolve(options))
    assert not Path(options["out"]).exists()
