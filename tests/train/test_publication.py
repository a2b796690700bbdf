"""`dpivon export` of a trained run: a folder that predicts by itself, with the run's own δ and nothing that is a secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from clinic import clinic
from dpivon.cli import app
from dpivon.durable.ledger import read as read_ledger
from dpivon.privacy.accounting.recorded import epsilons, history
from dpivon.report import build
from dpivon.train import load, resolve, train
from dpivon.train import run as running

THREE_LINES = """
import torch
model = torch.export.load("published/model.pt2").module()
probabilities = model(x)
"""


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="dpivon")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With run/, and published/ made of it on the command line."""
    where = tmp_path_factory.mktemp("publication")
    options = clinic(where) | {
        "test": str(where / "test.csv"), "prior": {"yes": 0.4}, "delta": 1e-3, "title": "Who is ill | now", "seed": 3,
        "purpose": "to see `what` <b>it</b> does", "responsible": "Dr. A. Example", "dataset": "clinic 7",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_report", lambda folder, watcher: None)
        train(resolve(options))
    result = invoke("export", where / "run", "--out", where / "published")
    assert result.exit_code == 0, result.output
    assert "at δ = 0.001 by pld" in result.stdout
    return where


def test_it_predicts_as_the_run_does(folder: Path, tmp_path: Path) -> None:
    for name in ("run", "published"):
        assert invoke("predict", folder / name, folder / "test.csv", "--out", tmp_path / name).exit_code == 0
    assert (tmp_path / "run").read_bytes() == (tmp_path / "published").read_bytes()
    answers = (tmp_path / "run").read_text()
    result = invoke("predict", folder / "published", folder / "test.csv", "--out", tmp_path / "a", "--abstain", "0.9")
    assert result.exit_code == 0
    assert (tmp_path / "a").read_text().count("abstain") > answers.count("abstain") == 0


@pytest.mark.slow
def test_three_lines_of_plain_pytorch_predict(folder: Path, tmp_path: Path) -> None:
    """In a process that cannot import dpivon; the lines are those of the model card."""
    assert all(line.replace("published", "FOLDER") in (folder / "published" / "model-card.md").read_text()
               for line in THREE_LINES.strip().splitlines())  # fmt: skip
    published = load(folder / "published")
    x = published.description.inputs.read(str(folder / "test.csv"), None).inputs
    torch.save(x, tmp_path / "x.pt")
    before = f"import sys, torch; sys.modules['dpivon'] = None; x = torch.load({str(tmp_path / 'x.pt')!r})"
    after = f"torch.save(probabilities, {str(tmp_path / 'p.pt')!r})"
    program = f"{before}\n{THREE_LINES}\n{after}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=folder, check=True)
    expected = published.predict(x, samples=0).probs
    assert torch.allclose(torch.load(tmp_path / "p.pt"), expected, atol=1e-5)
    assert len(set(published.decision.factors)) == 2  # which the program has too


def test_epsilon_is_at_the_runs_own_delta_everywhere(folder: Path) -> None:
    spent = epsilons(history(read_ledger(folder / "run" / "ledger.jsonl"), 0), 1e-3)
    privacy = json.loads((folder / "published" / "privacy.json").read_text())
    card = json.loads((folder / "published" / "model-card.json").read_text())
    assert privacy["delta"] == card["delta"] == 1e-3
    assert privacy["epsilon"] == card["epsilon_by_accountant"] == pytest.approx(spent)
    assert card["epsilon"] == pytest.approx(min(spent.values()))
    shown = invoke("ledger", "show", folder / "run").stdout
    least = min(spent, key=lambda name: spent[name])
    assert f"ε at δ = 0.001: {least} {spent[least]:.6g}, " in shown


def test_the_card_says_what_it_is_and_no_score_unless_asked(folder: Path) -> None:
    text = (folder / "published" / "model-card.md").read_text()
    card = json.loads((folder / "published" / "model-card.json").read_text())
    assert text.startswith("# Who is ill \\| now\n\nUnit of privacy: one row of the data.\n")
    for words in (
        "Dr. A. Example",
        "clinic 7",
        "&lt;b>it",
        "yes, no",
        "The seed was set",
        "scores on test data are not private",
    ):
        assert words in text
    assert (card["scores"], card["findings"], card["purpose"]) == (None, [], "to see `what` <b>it</b> does")
    result = invoke("export", folder / "run", "--out", folder / "scored", "--scores")
    assert result.exit_code == 0
    scored = json.loads((folder / "scored" / "model-card.json").read_text())
    assert scored["scores"]["not_private"] is True
    assert 0 < scored["scores"]["mc_auroc"] <= 1
    assert "Balanced accuracy" in (folder / "scored" / "model-card.md").read_text()


def test_the_folder_is_whole_or_not_there_and_names_no_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("export", folder / "run", "--out", folder / "published")
    assert result.exit_code == 2
    assert "exists" in result.stderr
    monkeypatch.setattr("dpivon.train.publication.markdown", lambda facts: 1 / 0)
    invoke("export", folder / "run", "--out", folder / "halfway")
    assert {p.name for p in folder.iterdir()} >= {"run", "published"}
    assert not any("halfway" in p.name for p in folder.iterdir())
    for path in (folder / "published").iterdir():
        assert str(Path(running.__file__).parents[2]).encode() not in path.read_bytes(), path


def test_the_report_opens_with_unit_title_and_findings(folder: Path, tmp_path: Path) -> None:
    text = build(folder / "run", tmp_path / "r.html").read_text()
    head = text[text.index("<header>") : text.index("</header>")]
    first = head.index("Unit of privacy: one row of 300 of the data.")
    assert first < head.index("<h1>Who is ill | now</h1>") < head.index("It recognises: ")
    for words in ("Dr. A. Example", "clinic 7", "to see `what` &lt;b&gt;it&lt;/b&gt; does", "always answering"):
        assert words in head
    assert "`dpivon budget --tuning`" not in text
    assert "<code>dpivon budget --tuning</code>" in text
