"""What is committed as results follows from the tables there: pages and summaries to the letter, figures by their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import experiments.strong_privacy  # noqa: F401  registers the estimators that its studies name
import pytest
from experiments.leaderboard import __main__ as leaderboard
from experiments.paper import report as paper
from experiments.robustness import report as robustness
from experiments.strong_privacy import __main__ as strong_privacy
from experiments.strong_privacy import few_steps, recipe_page, simulation, spread
from experiments.strong_privacy.compare.command import compare

from dpivon.errors import ArgumentError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = {p.parent.name: p.parent for p in EXPERIMENTS.glob("*/results/*/runs.csv")}
STUDIES = sorted(RESULTS, key=lambda name: (name != "quick", name))  # `make test` rebuilds the first


def test_the_papers_experiment_is_whole():
    assert {"paper", "paper-ablations", "paper-check", "quick"} <= set(STUDIES)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", STUDIES)
def test_pages_follow_from_their_tables(name, tmp_path):
    for beside in {name, f"{name}-tuning", f"{name}-check", name.removesuffix(paper.STATED)}:
        if (folder := RESULTS[name].with_name(beside)).is_dir():
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


def test_rows_of_different_code_are_compared_only_where_that_is_allowed(tmp_path):
    with pytest.raises(ArgumentError, match="different code"):
        compare([RESULTS["strong-epsilon"]], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert (
        "**Rows of different code are compared here**"
        in (strong_privacy.RESULTS / "comparison/comparison.md").read_text()
    )


@pytest.mark.slow
def test_comparisons_follow_from_their_tables(tmp_path):
    given = {"tunings": strong_privacy.TUNED, "command": strong_privacy.COMMAND, "mixed_code": True}
    compare(strong_privacy.COMPARED, tmp_path / "strong", **given)
    compare([leaderboard.RESULTS / "leaderboard"], tmp_path / "small", command=leaderboard.COMMAND)
    for made, committed in (("strong", strong_privacy.RESULTS), ("small", leaderboard.RESULTS)):
        for name in ("comparison.md", "comparison.csv", "bars.csv"):
            assert (tmp_path / made / name).read_bytes() == (committed / "comparison" / name).read_bytes(), name


@pytest.mark.slow
def test_pages_of_the_recipe_follow_from_their_runs(tmp_path):
    for path in strong_privacy.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path / path.name)
    for part in (recipe_page, few_steps, simulation, spread):
        for path in part.report(tmp_path):
            if path.suffix == ".md":
                assert path.read_bytes() == (strong_privacy.RESULTS / path.name).read_bytes(), path.name
