"""The report's numbers against direct computation and closed forms."""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpivon import Accountant, metrics
from dpivon.decisions import Decision
from dpivon.report import privacy, testset, write
from dpivon.report.run import width_chart
from dpivon.report.run_folder import Layer, TestSet
from dpivon.report.run_folder import read as read_run
from dpivon.study.results import summary as html_report
from dpivon.study.results import table
from dpivon.study.results.summary import load as read_study

QUICK = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"
BUDGETS = [(0.1, 0.0), (0.5, 1e-3), (1.0, 1e-5), (3.0, 1e-2), (8.0, 1e-5)]


def tight_pair(epsilon: float, delta: float) -> tuple[list[float], list[float]]:
    """Two distributions on four outcomes that are (ε, δ)-indistinguishable and no better: all of the bound is used."""
    high, low = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon)), (1 - delta) / (1 + math.exp(epsilon))
    return [delta, high, low, 0.0], [0.0, low, high, delta]


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_best_guess_is_reached_by_the_best_of_all_tests(epsilon: float, delta: float) -> None:
    used, unused = tight_pair(epsilon, delta)
    best = 0.0
    for says_used in itertools.product([False, True], repeat=4):
        right = sum(p if said else q for p, q, said in zip(used, unused, says_used, strict=True)) / 2
        best = max(best, right)
    assert privacy.best_guess(epsilon, delta) == pytest.approx(best, rel=1e-12)
    assert best == pytest.approx((math.exp(epsilon) + delta) / (math.exp(epsilon) + 1), rel=1e-12)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
@pytest.mark.parametrize("false_alarms", [0.0, 0.001, 0.01, 0.2, 0.9])
def test_no_test_detects_more_and_neyman_pearsons_as_much(epsilon: float, delta: float, false_alarms: float) -> None:
    used, unused = tight_pair(epsilon, delta)
    left, power = false_alarms, 0.0  # the most likely first, the last one in part
    for p, q in sorted(zip(used, unused, strict=True), key=lambda pq: -math.inf if pq[1] == 0 else -pq[0] / pq[1]):
        share = 1.0 if q <= left else left / q
        power, left = power + share * p, left - share * q
    assert privacy.most_detected(epsilon, delta, false_alarms) == pytest.approx(power, rel=1e-9)


def test_the_gaussian_mechanism_stays_below_the_bound() -> None:
    """N(0, 1) against N(μ, 1): its own best guess is Φ(μ/2), and its δ(ε) is known exactly (Balle and Wang, 2018)."""
    normal = statistics.NormalDist()
    for mu, epsilon in itertools.product((0.3, 1.0, 2.0), (0.1, 1.0, 3.0)):
        delta = normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
        assert normal.cdf(mu / 2) <= privacy.best_guess(epsilon, delta) + 1e-12


def test_a_belief_follows_bayes() -> None:
    assert privacy.believed(math.log(3), 0.5) == pytest.approx(0.75)
    assert privacy.believed(math.log(99), 0.01) == pytest.approx(0.5)
    assert privacy.believed(1e4, 0.01) == 1.0


@given(st.floats(1e-6, 1e6))
def test_an_epsilon_is_never_rounded_down(epsilon: float) -> None:
    told = float(privacy.shown(epsilon))
    assert epsilon * (1 - 1e-8) <= told <= epsilon * 1.011


@given(st.floats(0.0, 1.0, exclude_max=True))
def test_a_share_is_never_rounded_down_nor_up_to_certainty(share: float) -> None:
    told = privacy.percent(share)
    if not told.startswith("nearly"):
        number = float(told.removesuffix("\u00a0%"))
        assert 100 * share - 1e-6 <= number < 100


def test_small_cases_in_words() -> None:
    assert privacy.percent(0.731059) == "73.2\u00a0%"
    assert privacy.percent(0.99999) == "99.999\u00a0%"
    assert privacy.percent(1.0) == "100\u00a0%"
    assert (privacy.shown(5.9991), privacy.shown(0.12341), privacy.shown(298.2), privacy.shown(math.inf)) == (
        "6.00",
        "0.124",
        "299",
        "∞",
    )
    assert privacy.Reading(1.0, 1e-5).delta_in_words == "one in 100,000"
    assert privacy.Reading(1.0, 1e-5).two_rows == "ε = 2.00, δ = 3.8e-05"  # (1 + e)·10⁻⁵ = 3.718e-5
    assert [privacy.Reading(e, 0.1).factor for e in (1.0, 6.0, 10.0, 30.0)] == [
        "2.719",
        "403.5",
        "22,030",
        "1.069e+13",
    ]


def constructed(right: list[bool], confidence: list[float]) -> TestSet:
    """Two classes, everything predicted as class 0 with the given confidence."""
    p = torch.tensor([[c, 1 - c] for c in confidence])
    labels = torch.tensor([0 if r else 1 for r in right])
    return TestSet(p, p, labels)


def test_risk_and_coverage_of_a_constructed_case() -> None:
    """The n − m surest are right, the m least sure wrong: the risk at k is (k − n + m)⁺/k, and AURC is its mean."""
    n, m = 50, 10
    t = constructed([True] * (n - m) + [False] * m, [0.99 - 0.009 * i for i in range(n)])
    (view,) = testset.risk(t).views
    (series,) = view.panels[0].series
    expected = [max(0, k - n + m) / k for k in range(1, n + 1)]
    assert [p.x for p in series.points] == pytest.approx([k / n for k in range(1, n + 1)])
    assert [p.y for p in series.points] == pytest.approx(expected)
    assert metrics.aurc(t.averaged, t.labels) == pytest.approx(sum(expected) / n)
    assert series.name.endswith(f"AURC {sum(expected) / n:.4f}")


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    n = 5000
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(n, 3, generator=generator).softmax(1)
    t = TestSet(p, p, torch.randint(3, (n,), generator=generator))
    points = testset.risk(t).views[0].panels[0].series[0].points
    coverage, error = metrics.risk_coverage(t.averaged, t.labels)
    assert len(points) == testset.MOST_POINTS
    assert (points[0].x, points[-1].x) == pytest.approx((1 / n, 1.0))
    for point in points:
        k = round(point.x * n) - 1
        assert (point.x, point.y) == pytest.approx((float(coverage[k]), float(error[k])))


@pytest.mark.slow
def test_reliability_is_what_numpy_counts(run: Path) -> None:
    t = read_run(run).test
    chart = testset.reliability(testset._both(t), t.labels)
    for panel, probs in zip(chart.views[0].panels, (t.averaged, t.mean), strict=True):
        confidence, right = probs.numpy().max(1), probs.numpy().argmax(1) == t.labels.numpy()
        share, bars, _ = panel.series
        place = np.clip(np.floor(confidence * testset.BINS + 1e-6), 0, testset.BINS - 1).astype(int)
        assert [round(p.x * testset.BINS - 0.5) for p in bars.points] == sorted(set(place.tolist()))
        total = 0.0
        for bar, part in zip(bars.points, share.points, strict=True):
            mine = place == round(bar.x * testset.BINS - 0.5)
            assert bar.y == pytest.approx(right[mine].mean())
            assert part.y == pytest.approx(mine.mean())
            assert dict(bar.notes)["examples"] == str(mine.sum())
            assert bar.low <= bar.y <= bar.high
            total += mine.mean() * abs(right[mine].mean() - confidence[mine].mean())
        assert total == pytest.approx(metrics.ece(probs, t.labels), abs=1e-6)
        assert panel.title.endswith(f"ECE {total:.4f}")


def test_confusion_counts_every_example_once(run: Path) -> None:
    found = read_run(run)
    classes, counts = testset.confusion_of(found)
    expected = np.zeros((10, 10), int)
    for label, guess in zip(found.test.labels.tolist(), found.test.averaged.argmax(1).tolist(), strict=True):
        expected[label, guess] += 1
    assert counts == expected.tolist()
    assert len(classes) == 10


def test_many_classes_give_the_most_frequent_mistakes() -> None:
    k = 30
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)
    guesses = torch.tensor([7] * 5 + [9] * 3 + [2] * 4)
    p = torch.nn.functional.one_hot(guesses, k).float()
    told = testset.confusion(TestSet(p, p, labels), tuple(f"c{i}" for i in range(k)), Decision())
    assert told["matrix"] == []
    assert told["mistakes"] == [("c0", "c7", 5), ("c1", "c9", 3)]


def test_two_rows_are_two_steps() -> None:
    """P ≤ e^ε Q + δ, twice: P ≤ e^ε (e^ε R + δ) + δ."""
    for epsilon, delta in ((0.5, 1e-5), (3.0, 1e-4)):
        shown = float(privacy.Reading(epsilon, delta).two_rows.split("δ = ")[1])
        assert delta + math.exp(epsilon) * delta <= shown <= 1.1 * (delta + math.exp(epsilon) * delta)


def test_the_classes_table_is_that_of_the_metrics(run: Path) -> None:
    found = read_run(run)
    table = testset.by_class(found.test, found.classes, Decision())
    scores = metrics.class_scores(found.test.averaged, found.test.labels)
    assert [row[0] for row in table] == list(found.classes)
    assert [int(row[1]) for row in table] == scores.count.tolist()
    assert [row[3] for row in table] == [f"{v:.3f}" for v in scores.recall.tolist()]
    assert [row[5] for row in table] == [f"{v:.3f}" for v in scores.auroc.tolist()]


def test_an_axis_of_equal_widths_begins_at_zero() -> None:
    """Between 0.01411 and 0.01416 there is nothing to see."""
    layers = tuple(Layer(name=n, numel=4, sd_q05=0.01411, sd_median=0.01413, sd_q95=0.01416) for n in "ab")
    assert width_chart(layers).x.low == 0.0
    wide = (*layers, Layer(name="c", numel=4, sd_q05=0.1, sd_median=0.2, sd_q95=0.3))
    assert width_chart(wide).x.log


def test_widths_are_those_of_the_file(run: Path) -> None:
    layers = read_run(run).layers
    chart = width_chart(layers)
    points = chart.views[0].panels[0].series[0].points
    assert chart.views[0].y.names == tuple(layer.name for layer in layers)
    assert [(p.low, p.x, p.high) for p in points] == [(x.sd_q05, x.sd_median, x.sd_q95) for x in layers]


def test_the_ledger_bears_the_summary_out(run: Path) -> None:
    found = read_run(run)
    checked = privacy.check(found)
    assert checked.holds
    assert checked.epsilon == min(checked.by_accountant.values()) < found.summary.epsilon <= 6.0
    assert checked.by in ("pld", "prv")
    assert checked.releases == found.summary.steps
    assert set(checked.by_accountant) == {"rdp", "prv", "pld"}


def test_curves_are_means_and_deviations_of_the_table() -> None:
    with (QUICK / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    chart = html_report.privacy_curves(read_study(QUICK).rows)
    assert chart.x.log
    assert chart.x.reverse
    assert [view.name for view in chart.views] == ["test accuracy", "test NLL (nats)", "test ECE (15 bins)"]
    seen = 0
    for view, measure in zip(chart.views, ("accuracy", "nll", "ece"), strict=True):
        assert [panel.title for panel in view.panels] == ["batch size 64", "batch size 128"]
        for panel in view.panels:
            for series in panel.series:
                averaged = ", averaged" in series.name
                method = {"DP-SGD": "dp-sgd", "DP-Adam": "dp-adam"}.get(series.name.split(",")[0], "dp-ivon-gradsq")
                for point in series.points:
                    sigma, c, b = dict(point.notes)["σ, C, b"].split(", ")
                    mine = [
                        row
                        for row in lines
                        if (row["method"], row["batch_size"]) == (method, b)
                        and (float(row["noise_multiplier"]), float(row["max_grad_norm"])) == (float(sigma), float(c))
                    ]
                    values = [float(row[f"mc_{measure}" if averaged else measure]) for row in mine]
                    mean, spread = statistics.mean(values), statistics.stdev(values)
                    assert point.x == pytest.approx(float(mine[0]["epsilon"]))
                    assert (point.y, point.low, point.high) == pytest.approx((mean, mean - spread, mean + spread))
                    seen += 1
    assert seen == 3 * (12 + 12 + 2 * 12)  # methods × cells, IVON twice


def test_a_method_with_a_rate_for_each_cell_is_drawn_and_listed() -> None:
    """It was in the list of methods and nowhere else: the report showed the others alone."""
    study = read_study(QUICK)
    rates = [
        row | {"lr": row["lr"] * row["noise_multiplier"]} if row["method"] == "dp-sgd" else row for row in study.rows
    ]
    tuned = replace(study, rows=rates)
    plain, by_cell = (html_report.privacy_curves(each.rows) for each in (study, tuned))
    for view, other in zip(plain.views, by_cell.views, strict=True):
        assert [panel.series for panel in view.panels] == [panel.series for panel in other.panels]
    lines, told = (html_report.cells(each).values["body"] for each in (study, tuned))
    assert [line[1:] for line in told] == [line[1:] for line in lines]
    assert {line[0] for line in told if line[0].startswith("DP-SGD")} == {"DP-SGD, a rate for each cell"}


def test_all_runs_together_cost_their_composition() -> None:
    study = read_study(QUICK)
    joint = Accountant("rdp")
    for row in study.rows:
        joint.charge(
            noise_multiplier=row["noise_multiplier"],
            sample_rate=row["batch_size"] / row["train_size"],
            steps=row["releases"],
        )
    told = html_report.privacy(study).values["together"]
    assert told.epsilon == pytest.approx(joint.get_epsilon(study.rows[0]["delta"]))
    assert told.epsilon > max(row["epsilon"] for row in study.rows)


def test_variants_and_unusual_runs_are_kept_apart(tmp_path: Path) -> None:
    """Two variants of a method are two series; a run that diverged or is not private is told and not drawn."""
    rows = [row for row in read_study(QUICK).rows if row["method"] == "dp-sgd"]
    changed = [row | {"options": '{"momentum": 0.5}', "id": row["id"] + "-m", "accuracy": 0.25} for row in rows]
    odd = rows[0] | {"noise_multiplier": 0.0, "epsilon": math.inf, "epsilon_pld": math.inf, "id": "open"}
    lost = rows[-1] | {"noise_multiplier": 9.0, "epsilon": 0.1, "accuracy": math.nan, "nll": math.nan, "id": "lost"}
    table.write(tmp_path / "runs.csv", [*rows, *changed, odd, lost])
    study = read_study(tmp_path)
    chart = html_report.privacy_curves(study.rows)
    series = [s for panel in chart.views[0].panels for s in panel.series]
    names = {s.groups[0] for s in series}
    assert len(names) == 2
    assert all(p.y == pytest.approx(0.25) for s in series if "momentum" in s.name for p in s.points)
    assert all(math.isfinite(p.x) and math.isfinite(p.y) and p.x > 0.2 for s in series for p in s.points)
    assert "1 of 50 runs diverged" in chart.caption
    built = write(tmp_path)
    text = built.report.read_text()
    assert "<td>∞</td>" in text
    assert "momentum = 0.5" in text
    assert built.left_out["Posterior width"].startswith("No run of this study has a posterior")
