"""What is committed as results follows from the tables there: pages and summaries to the letter, figures by their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from experiments.paper import report as paper
from experiments.robustness import report as robustness

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = {p.parent.name: p.parent for p in EXPERIMENTS.glob("*/results/*/runs.csv")}
STUDIES = sorted(RESULTS)


def test_the_papers_experiment_is_whole():
    assert {"paper", "paper-ablations", "paper-check", "quick"} <= set(STUDIES)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", STUDIES)
def test_pages_follow_from_their_tables(name, tmp_path):
    for folder in RESULTS[name].parent.glob(f"{name}*"):
        if folder.name in (name, f"{name}-tuning", f"{name}-check"):
            shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("ledgers"))
    made = {p: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.suffix in (".md", ".csv")}
    experiment = RESULTS[name].parents[1].name
    if experiment == "robustness":
        written = robustness.write_pages(tmp_path / name)
    else:
        written = paper.write_pages(tmp_path / name, command=f"python -m experiments.{experiment}")
    assert all(p in made for p in written if p.suffix != ".png"), "a page that is not committed"
    assert set((tmp_path / name / "figures").glob("*.png")) == {p for p in written if p.suffix == ".png"}
    for path, before in made.items():
        assert path.read_bytes() == before, f"{path.name} is not what its report makes"
