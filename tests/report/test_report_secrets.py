"""What must never be in a report: training examples, seeds, generators, and whatever a folder holds besides."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from report_run import DELTA, SEED, copy_of

from dpivon.durable.ledger import read
from dpivon.errors import PrivacyError
from dpivon.privacy.accounting.recorded import epsilons, history
from dpivon.report import build, run_folder
from dpivon.report.privacy import shown
from dpivon.report.run_folder import WITHHELD, without_seeds
from dpivon.study.results import summary as html_report

QUICK = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"
CANARY = "CANARY-4b1d"
_OPENS = """
import json, os, sys
from pathlib import Path
run, study, out = (os.path.realpath(p) for p in sys.argv[1:4])
opened = {run: set(), study: set()}
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)):
        path = os.path.realpath(os.fspath(args[0]))
        for folder in opened:
            if path.startswith(folder + os.sep):
                opened[folder].add(os.path.relpath(path, folder))
sys.addaudithook(hook)
from dpivon.report import build
build(Path(run), Path(out, "run.html"))
build(Path(study), Path(out, "study.html"))
print(json.dumps([sorted(opened[folder]) for folder in (run, study)]))
"""


def sown(run: Path, to: Path) -> Path:
    """A run in which everything that no report may show says so."""
    folder = copy_of(run, to, train_loss=[CANARY], rng_state=CANARY, extra={"seed": CANARY})
    (folder / "train.csv").write_text(CANARY)
    (folder / "release-000000000999.safetensors").write_text(CANARY)
    (folder / "model" / "notes.txt").write_text(CANARY)
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    (folder / "progress.jsonl").write_text(
        "".join(json.dumps(line | {"mean_gradient_norm": CANARY}) + "\n" for line in lines)
    )
    layers = json.loads((folder / "posterior.json").read_text())
    (folder / "posterior.json").write_text(json.dumps(layers | {"raw_gradient": CANARY}))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"seeds": [CANARY], "nested": [{"noise_seed": CANARY, "rng_state": {"a": CANARY}}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with np.load(folder / "test.npz") as file:
        arrays = dict(file)
    np.savez(folder / "test.npz", train_images=np.full(50, 77, np.uint8), **arrays)
    return folder


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Reports of a sown run and a sown study by a fresh process, and all files of theirs that it opened."""
    to = tmp_path_factory.mktemp("secrets")
    shutil.copytree(QUICK, to / "study")
    (to / "study" / "stacks").mkdir()
    (to / "study" / "stacks" / "state.safetensors").write_text(CANARY)
    words = [sys.executable, "-c", _OPENS, str(sown(run, to / "run")), str(to / "study"), str(to / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return to / "out", json.loads(done.stdout.splitlines()[-1])


def test_a_run_is_read_by_the_contract_and_nothing_else(written: tuple[Path, list[list[str]]]) -> None:
    out, (opened, _) = written
    assert opened == sorted(run_folder.READ)
    text = (out / "run.html").read_text()
    assert CANARY not in text
    assert str(SEED) not in text
    assert WITHHELD in text


def test_a_study_is_read_by_its_tables_and_its_seeds_stay_there(written: tuple[Path, list[list[str]]]) -> None:
    out, (_, opened) = written
    assert opened == sorted(html_report.READ)
    text = (out / "study.html").read_text()
    assert CANARY not in text
    assert "-seed0" not in text
    assert '"seed"' not in text


def test_the_ledgers_evidence_is_not_shown(run: Path, tmp_path: Path) -> None:
    evidence = set(read(run / "ledger.jsonl").evidence.values())
    text = build(run, tmp_path / "report.html").read_text()
    assert evidence
    assert not any(one in text for one in evidence)


def test_unset_seeds_may_be_seen_and_other_words_stay() -> None:
    assert without_seeds({"seed": None, "learning_rate": 1, "Seed": 3, "a": [{"generator": 5, "b": 6}]}) == {
        "seed": None,
        "learning_rate": 1,
        "Seed": WITHHELD,
        "a": [{"generator": WITHHELD, "b": 6}],
    }


def test_a_summary_that_flatters_is_not_believed(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "flattered", epsilon=0.5, epsilon_by_accountant={"rdp": 0.5})
    text = build(folder).read_text()
    assert "Do not rely on this run" in text
    spent = epsilons(history(read(folder / "ledger.jsonl"), 0), DELTA)
    assert f"<dt>ε</dt><dd>{shown(min(spent.values()))}</dd>" in text
    assert "<dd>0.500</dd>" not in text


def test_another_ledger_is_told(run: Path, tmp_path: Path) -> None:
    text = build(copy_of(run, tmp_path / "other", ledger_digest="0" * 64)).read_text()
    assert "their digests differ" in text


def test_a_ledger_that_was_edited_is_refused(run: Path, tmp_path: Path) -> None:
    folder = copy_of(run, tmp_path / "edited")
    (folder / "report.html").unlink(missing_ok=True)
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"to":7,', '"to":6,'))
    with pytest.raises(PrivacyError, match="changed or damaged"):
        build(folder)
    assert not (folder / "report.html").exists()


def test_a_known_seed_and_no_guarantee_are_told(run: Path, tmp_path: Path) -> None:
    told = build(copy_of(run, tmp_path / "seed", seed_is_secret=False)).read_text()
    assert "Whoever knows or guesses it can subtract the noise" in told
    assert "Whoever knows or guesses it" not in build(run, tmp_path / "plain.html").read_text()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "summary.json").write_text(json.dumps({"format": 1, "method": "sgd", "epsilon": "inf", "delta": 1e-5}))
    assert "This run has no privacy guarantee" in build(bare).read_text()
