"""From robustness.csv to figures, verdicts and a page: what they show is what the tables hold."""

from __future__ import annotations

import math

import pytest
from experiments.robustness.__main__ import app
from experiments.robustness.cells import AVERAGE, MEAN, Predictor, RobustnessCells
from experiments.robustness.claims import RobustnessClaims
from experiments.robustness.evaluate import COLUMNS, COVERAGES
from experiments.robustness.figures import coverage_figure, draw_robustness, foreign_figure, severity_figure
from experiments.robustness.page import robustness_page
from typer.testing import CliRunner

from dpivon.study.plan.plan import PlannedRun
from dpivon.study.results import table

IVON = "dp-ivon-gradsq"
SIGMAS = {2.0: 1.0, 1.0: 8.0}  # σ to ε
CORRUPTIONS, SEVERITIES = ("fog", "contrast"), (1, 5)


def made(bend=lambda row: row, seeds=2):
    """As one would like it: averaging helps, IVON leads, less privacy is better, mutual information sees most."""
    rows, beyond = [], []
    for method in ("dp-adam", "dp-sgd", IVON):
        for sigma, epsilon in SIGMAS.items():
            for seed in range(seeds):
                run = PlannedRun(method, 64, sigma, 1.0, seed, 0.1)
                row = dict.fromkeys(table.COLUMNS) | {"id": run.id, "method": method, "batch_size": 64, "seed": seed}
                row |= {"noise_multiplier": sigma, "max_grad_norm": 1.0, "epsilon": epsilon, "delta": 1e-5, "lr": 0.1}
                row |= {
                    "options": "",
                    "releases": 100,
                    "train_size": 1000,
                    "seconds": 6.0,
                    "hardware": "h",
                    "torch": "t",
                }
                rows.append(row | {"dataset": "digits", "accuracy": 0.9, "nll": 0.5, "ece": 0.05})
                for way in (MEAN, AVERAGE) if method == IVON else (MEAN,):
                    good = 0.02 * (way == AVERAGE) + 0.03 * (method == IVON) + 0.05 * (epsilon > 1)
                    base = dict.fromkeys(COLUMNS) | {"id": run.id, "predicts": way, "images": 100}
                    base |= {"method": method, "epsilon": epsilon, "severity": 0}
                    states = [("clean", "clean", 0)] + [("shift", c, k) for c in CORRUPTIONS for k in SEVERITIES]
                    for kind, name, k in states:
                        worse = 0.02 * k * (2 - (epsilon > 1))
                        found = {"accuracy": 0.7 + good - worse + 0.001 * seed, "nll": 1 - good + worse, "brier": 0.5}
                        found |= {"ece": 0.2 - good + worse, "aurc": 0.1 - good}
                        found |= {f"accuracy_at_{c}": 1 - (0.3 - good) * c / 100 for c in COVERAGES}
                        beyond.append(bend(base | found | {"kind": kind, "condition": name, "severity": k}))
                    for name, shift in (("held-out", 0.0), ("fashion-mnist", 0.1)):
                        scores = {"auroc_entropy": 0.6 + good + shift, "auroc_confidence": 0.5, "fpr95_entropy": 0.6}
                        scores |= {"auroc_information": 0.65 + good + shift} if way == AVERAGE else {}
                        beyond.append(bend(base | scores | {"kind": "ood", "condition": name}))
    return rows, beyond


def verdicts(bend=lambda row: row):
    return {c.number: (c.verdict, len(c.comparisons)) for c in RobustnessClaims(RobustnessCells(*made(bend))).all()}


def test_a_table_as_one_would_like_it_supports_everything():
    counts = {
        "B1": 2,
        "B2": 2,
        "B3": 2,
        "B4": 2,
        "B5": 8,
        "B6": 4,
        "B7": 4,
        "B8": 8,
        "B9": 4,
        "B10": 4,
        "B11": 2,
        "B12": 8,
    }
    assert verdicts() == {number: ("supported", n) for number, n in counts.items()}


def changed(where, **new):
    return lambda row: row | {k: v(row) for k, v in new.items() if row[k] is not None} if where(row) else row


@pytest.mark.parametrize(
    ("bend", "failing"),
    [
        (changed(lambda r: r["predicts"] == AVERAGE and r["kind"] == "shift", ece=lambda r: r["ece"] + 0.025), {"B1"}),
        (changed(lambda r: r["predicts"] == AVERAGE and r["kind"] == "shift", nll=lambda r: r["nll"] + 0.025), {"B2"}),
        (changed(lambda r: r["method"] == "dp-adam", ece=lambda r: r["ece"] - 0.06), {"B3"}),
        (changed(lambda r: r["method"] == "dp-sgd", nll=lambda r: r["nll"] - 0.06), {"B4"}),
        (changed(lambda r: r["kind"] == "clean", ece=lambda r: 0.9), {"B5"}),
        (changed(lambda r: r["epsilon"] == 1, ece=lambda r: r["ece"] - 0.3), {"B6"}),
        (changed(lambda r: r["epsilon"] == 1 and r["severity"] == 5, accuracy=lambda r: 0.7), {"B7"}),
        (changed(lambda r: r["epsilon"] == 8, auroc_entropy=lambda r: r["auroc_entropy"] - 0.2), {"B8"}),
        (changed(lambda r: True, auroc_information=lambda r: 0.5), {"B9"}),
        (changed(lambda r: r["method"] == "dp-sgd", auroc_entropy=lambda r: r["auroc_entropy"] + 0.06), {"B10"}),
        (changed(lambda r: r["predicts"] == AVERAGE, aurc=lambda r: r["aurc"] + 0.03), {"B11"}),
        (changed(lambda r: True, accuracy_at_80=lambda r: r["accuracy"] + 0.019), {"B12"}),
        (changed(lambda r: r["method"] == IVON, ece=lambda r: math.nan), {"B1", "B3"}),
    ],
)
def test_each_statement_falls_to_what_contradicts_it(bend, failing):
    found = verdicts(bend)
    assert {number for number, (verdict, _) in found.items() if verdict == "not supported"} == failing


def test_a_score_is_the_mean_over_conditions_then_seeds():
    cells = RobustnessCells(*made())
    strong, weak = cells.settings
    assert (strong.epsilon, weak.epsilon) == (1.0, 8.0)
    assert [cells.label(s) for s in cells.settings] == ["ε = 1", "ε = 8"]
    assert cells.methods == ["dp-sgd", "dp-adam", IVON]  # the registry's order
    assert cells.best_way(IVON).way == AVERAGE
    found = cells.shift(Predictor("dp-sgd", MEAN), weak, "accuracy")
    assert found.mean == pytest.approx(0.75 - 0.02 * 3 + 0.0005)
    assert found.n == 2
    assert found.std == pytest.approx(0.001 / math.sqrt(2))  # of seeds, not of severities
    assert cells.shift(Predictor("dp-sgd", MEAN), weak, "ece", 5).mean == pytest.approx(0.15 + 0.1)
    assert cells.shift(Predictor("dp-sgd", MEAN), weak, "ece", 0) == cells.clean(Predictor("dp-sgd", MEAN), weak, "ece")
    assert cells.ood(Predictor("dp-sgd", MEAN), weak, "held-out", "auroc_information") is None


def test_figures_hold_the_tables():
    cells = RobustnessCells(*made())
    figure = severity_figure(cells, "ece")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["DP-SGD", "DP-Adam", "DP-IVON-Gradsq"]
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 4]
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [0, 1, 5]
    assert list(line.get_ydata()) == pytest.approx([0.2, 0.24, 0.4])
    assert "fog, contrast" in figure._suptitle.get_text()
    risk = coverage_figure(cells).axes[0].lines[1]
    assert list(risk.get_xdata()) == [*COVERAGES, 100]
    assert risk.get_ydata()[7] == pytest.approx((0.3 - 0.05) * 0.8)
    foreign = foreign_figure(cells)
    assert [axis.get_title() for axis in foreign.axes] == ["held-out", "fashion-mnist"]
    dots = foreign.axes[1].containers
    assert len(dots) == 2 * 4
    assert max(c.lines[0].get_xdata()[0] for c in dots) == pytest.approx(0.6 + 0.1 + 0.1)


@pytest.mark.slow
def test_report_and_figures_by_command(tmp_path):
    rows, beyond = made()
    table.write(tmp_path / "runs.csv", rows)
    kept = [{k: v for k, v in r.items() if k in COLUMNS} for r in beyond]
    table.write(tmp_path / "robustness.csv", kept, COLUMNS)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    names = [line.rsplit("/", 1)[1] for line in done.stdout.split()]
    assert names == [
        "shift-accuracy.png", "shift-nll.png", "shift-ece.png", "ood-auroc.png", "risk-coverage.png",
        "summary.csv", "robustness.md",
    ]  # fmt: skip
    page = (tmp_path / "robustness.md").read_text()
    assert "12 runs, 2 seeds a cell" in page
    assert "1.2 minutes by the clock on h, torch t" in page
    assert "**This is digits: it shows the machinery" in page
    assert (
        "| B3 | DP-IVON-Gradsq, averaged, has a lower ECE under shift than DP-SGD and DP-Adam | supported (2 of 2) |"
        in page
    )
    assert "accuracy under shift: DP-IVON-Gradsq, averaged 0.74 ± 0.0007" in page
    assert "not the published files" in page
    for name in names[:5]:
        assert f"(figures/{name})" in page
    assert "| fog | 0.5" in page.split("## Corruption by corruption")[1]
    before = {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).stdout == done.stdout
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}


def test_a_study_without_foreign_images_or_selection_draws_what_it_has(tmp_path):
    rows, beyond = made(changed(lambda r: True, aurc=lambda r: None), seeds=1)
    some = [r for r in beyond if r["kind"] != "ood"]
    assert [p.name for p in draw_robustness(rows, some, tmp_path)] == [
        "shift-accuracy.png",
        "shift-nll.png",
        "shift-ece.png",
    ]
    found = {c.number: c.verdict for c in RobustnessClaims(RobustnessCells(rows, some)).all()}
    assert {n for n, v in found.items() if v == "not tested"} == {"B8", "B9", "B10", "B11"}


def test_a_study_without_shift_says_nothing_of_it():
    rows, beyond = made()
    some = [r for r in beyond if r["kind"] != "shift"]
    found = {c.number: c.verdict for c in RobustnessClaims(RobustnessCells(rows, some)).all()}
    assert {n for n, v in found.items() if v == "not tested"} == {"B1", "B2", "B3", "B4", "B5", "B6", "B7"}
    page = robustness_page(rows, some, title="t", plan=None, figures=[])
    assert "severity 0" not in page
    assert page.count("| | accuracy | NLL | ECE | AUROC") == 2
