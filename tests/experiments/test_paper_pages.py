"""Pages of the paper's experiment: its claims, and variants side by side."""

from __future__ import annotations

import json
from functools import partial

import pytest
from experiments.paper.ablations import ablations_page, changes, draw_ablations
from experiments.paper.report import write_pages

from dpivon.errors import ArgumentError
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.results.table import is_ablation, variants
from study.tables import IVON, rows, tuned, two_cells

pages = partial(write_pages, command="test")


@pytest.fixture
def results(tmp_path):
    return two_cells(tmp_path / "paper")


def test_a_grid_has_figures_claims_and_the_rates_that_were_tried(results, tmp_path):
    (tmp_path / "tuning").mkdir()
    table.write(tmp_path / "tuning" / "tuning.csv", tuned(lambda m, lr, s: lr / 10))
    written = [p.name for p in pages(results, tuning=tmp_path / "tuning")]
    assert written[-3:] == ["summary.csv", "claims.md", "tuning.md"]
    assert len(written) == 9


def test_variants_are_compared_not_averaged(results):
    made = table.read(results / "runs.csv")
    ivon = [r for r in made if r["method"] == IVON]
    other = [r | {"options": '{"ess": 500.0}', "id": "x" + r["id"], "mc_nll": r["mc_nll"] - 0.25} for r in ivon]
    table.write(results / "runs.csv", ivon + other)
    written = [p.name for p in pages(results)]
    assert written == ["ablations.png", "summary.csv", "ablations.md"]
    page = (results / "ablations.md").read_text()
    lines = [x for x in page.splitlines() if x.startswith("| DP-IVON-Gradsq, ess = 500, lr 0.1 |")]
    assert len(lines) == 4  # two σ, two C
    assert all(x.split(" | ")[5].endswith("(-0.25)") and x.split(" | ")[1].endswith("(+0)") for x in lines)
    assert len(table.read(results / "summary.csv")) == 8
    figure = draw_ablations(ivon + other)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["ess = 500"]
    nll = [x for dots in figure.axes[1].containers for x in dots[0].get_xdata()]
    assert len(nll) == 4
    assert nll == pytest.approx([-0.25] * len(nll))


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (("dp-adam", '{"ema": 0.5, "beta1": 0.8}', 0.1), "beta1 = 0.8"),
        (("dp-adam", '{"beta1": 0.9}', 0.3), "beta1 = 0.9, ema as by default, lr 0.3"),
        (("dp-adam", '{"ema": 0.5}', None), "a rate for each cell"),
        (("dp-adam", '{"ema": 0.50}', 0.1), "DP-Adam, ema = 0.5, lr 0.1"),  # written in another way
        (("dp-sgd", "", 0.1), "DP-SGD, lr 0.1"),
    ],
)
def test_what_a_variant_changes(variant, words):
    assert changes(variant, ("dp-adam", '{"ema": 0.5}', 0.1)) == words


def test_variants_are_held_against_what_the_plan_names_first(results):
    """Whichever was finished first; and after a temperature, where all have one."""
    made = [r for r in table.read(results / "runs.csv") if r["method"] == "dp-adam"]
    kept = ("method", "batch_size", "noise_multiplier", "max_grad_norm", "seed", "lr")
    runs = [PlannedRun(**{k: r[k] for k in kept}, options={"ema": ema}) for ema in (0.5, 0.25) for r in made]
    plan = Plan("order", "cifar10", "paper", "final", 1, 1e-5, 1, 0, tuple(runs))
    plan.write(results / "study.json")
    scores = {"tempered_accuracy": 0.5, "tempered_ece": 0.02}
    rows = [
        r | scores | {"options": json.dumps(dict(run.options)), "id": run.id, "tempered_nll": run.options["ema"]}
        for r, run in zip(made * 2, runs, strict=True)
    ]
    table.write(results / "runs.csv", rows[::-1])
    pages(results)
    assert "difference from DP-Adam, ema = 0.5, lr 0.1." in (results / "ablations.md").read_text()
    nll = [x for dots in draw_ablations(rows).axes[1].containers for x in dots[0].get_xdata()]
    assert nll == pytest.approx([-0.25] * 4)


@pytest.mark.slow
def test_what_lies_beside_a_study_goes_with_it(results, tmp_path):
    """The tuning that chose its rates, and the same methods in the ordinary loop; unless others are given."""
    alone = [r | {"stack_methods": 1, "stack_size": 1} for r in table.read(results / "runs.csv")]
    beside = results.with_name(f"{results.name}-check")
    beside.mkdir()
    mixed = [r | {"stack_methods": 3} for r in alone]
    table.write(results / "runs.csv", mixed)
    pages(results)
    assert "| not tested | not tested |" in (results / "claims.md").read_text()
    table.write(beside / "hooks.csv", alone)
    pages(results)
    assert "one by one" in (results / "claims.md").read_text()
    with pytest.raises(ArgumentError, match="holds no tuning"):
        pages(results, tuning=beside)
    chosen = results.with_name(f"{results.name}-tuning")
    chosen.mkdir()
    table.write(chosen / "tuning.csv", tuned(lambda method, lr, sigma: lr))
    assert [p.name for p in pages(results)][-1] == "tuning.md"


def test_a_rate_for_each_cell_makes_no_variants():
    """A method tuned cell by cell is one method; only several rates in one cell set variants apart."""
    base = [r for r in rows()[0] if r["seed"] == 0]
    by_cell = [r | {"lr": r["noise_multiplier"]} if r["method"] == "dp-sgd" else r for r in base]
    assert not is_ablation(by_cell)
    assert ("dp-sgd", "", None) in variants(by_cell)
    again = [r | {"options": '{"ema": 0.9}'} for r in by_cell if r["method"] == "dp-sgd"]
    again = [r | {"accuracy": r["accuracy"] + 0.1, "tempered_nll": 1.25} for r in again]
    page = ablations_page(by_cell + again, title="mixed", plan=None, command="test")
    assert page.count("| DP-SGD, ema = 0.9, a rate for each cell |") == len({cell(r) for r in base})
    assert "NLL, tempered" in page
    assert "1.25" in page
    two = by_cell + [r | {"lr": 77.0} for r in by_cell if r["method"] == "dp-sgd" and r["noise_multiplier"] == 1.0]
    assert is_ablation(two)
    assert {lr for m, _, lr in variants(two) if m == "dp-sgd"} == {77.0, *(r["noise_multiplier"] for r in base)}


def cell(row):
    return row["batch_size"], row["noise_multiplier"], row["max_grad_norm"]
