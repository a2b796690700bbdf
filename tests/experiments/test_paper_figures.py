"""Figures hold the numbers of the table, on the paper's axes."""

from __future__ import annotations

import math

import pytest
from experiments.paper.figures import NOISE_ONLY, draw_figures, over_training, privacy_figure, width_figure

from dpivon.study.results.table import Cells
from study.tables import IVON, rows


@pytest.fixture(scope="module")
def made():
    return rows()


def test_the_papers_layout(made):
    figure = privacy_figure(Cells(made[0]), "accuracy")
    assert [a.get_title() for a in figure.axes] == ["batch size 128", "batch size 256", "batch size 512"]
    for axis in figure.axes:
        assert axis.get_xscale() == "log"
        left, right = axis.get_xlim()
        assert left > right  # weak privacy on the left
        assert {line.get_linestyle() for line in axis.lines} == {"-", "--"}
        assert len(axis.lines) == 2 * (1 + 1 + 2)  # DP-SGD, DP-Adam, IVON's mean and average; C = 10 and 20
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert names == [
        "DP-SGD", "DP-Adam", "DP-IVON-Gradsq, posterior mean", "DP-IVON-Gradsq, averaged", "C = 10", "C = 20",
    ]  # fmt: skip


def test_a_line_holds_the_mean_over_seeds_and_its_band_the_spread(made):
    table = made[0]
    figure = privacy_figure(Cells(table), "nll")
    line = next(x for x in figure.axes[2].lines if x.get_label() == "DP-SGD" and x.get_linestyle() == "--")
    mine = [r for r in table if (r["method"], r["batch_size"], r["max_grad_norm"]) == ("dp-sgd", 512, 20.0)]
    for x, y in zip(*line.get_data(), strict=True):
        members = [r["nll"] for r in mine if r["epsilon"] == pytest.approx(x)]
        assert len(members) == 3
        assert y == pytest.approx(sum(members) / 3)
    assert figure.axes[2].get_yscale() == "log"


def test_what_diverged_is_said_not_drawn(made):
    table = [dict(row) for row in made[0]]
    for row in table:
        if (row["method"], row["batch_size"], row["noise_multiplier"], row["seed"]) == ("dp-sgd", 128, 15.0, 1):
            row["accuracy"] = math.nan
    figure = privacy_figure(Cells(table), "accuracy")
    assert "diverged, not drawn: DP-SGD at b=128, C=10, DP-SGD at b=128, C=20" in figure._suptitle.get_text()
    line = next(x for x in figure.axes[0].lines if x.get_label() == "DP-SGD")
    assert len(line.get_xdata()) == 4


def test_diagnostics_are_of_one_method_and_say_of_which(made):
    """Another that keeps an h too was averaged into IVON's; alone, it stood under IVON's name."""
    table, diagnostics = (
        [r for r in part if r["id"] in {x["id"] for x in made[0] if x["method"] == IVON}] for part in made
    )
    other = [r | {"method": "dp-steady", "id": f"steady {r['id']}"} for r in table]
    theirs = [d | {"id": f"steady {d['id']}", "h_median": 7 * d["h_median"]} for d in diagnostics]
    own, mixed, alone = (
        over_training(*both, "h_median")
        for both in ((table, diagnostics), (other + table, theirs + diagnostics), (other, theirs))
    )
    drawn = [[list(line.get_ydata()) for axis in figure.axes for line in axis.lines] for figure in (own, mixed, alone)]
    assert drawn[0] == drawn[1]
    assert [[7 * y for y in line] for line in drawn[0]] == [pytest.approx(line) for line in drawn[2]]
    names = [figure.get_suptitle() for figure in (own, mixed, alone)]
    assert names == [names[0], names[0], names[0].replace("DP-IVON-Gradsq", "DP-Steady")]
    assert "DP-IVON-Gradsq" in names[0]


def test_diagnostics_over_training(made):
    figure = over_training(*made, "projected_share")
    drawn = [line for line in figure.axes[0].lines if line.get_label().startswith("σ")]
    assert len(drawn) == 10
    assert drawn[0].get_ydata().tolist() == pytest.approx([0.4, 0.545, 0.69])
    assert any(line.get_label() == f"pure noise, {NOISE_ONLY:.3f}" for line in figure.axes[0].lines)
    assert pytest.approx(0.6827, abs=1e-4) == NOISE_ONLY
    h = over_training(*made, "h_median")
    assert h.axes[0].lines[0].get_ydata().tolist() == pytest.approx([1, 0.75, 0.5])
    assert h.axes[0].get_yscale() == "linear"
    assert over_training(*rows(h_end=61.0), "h_median").axes[0].get_yscale() == "log"
    width = width_figure(Cells(made[0]))
    assert all(y == pytest.approx(0.005) for line in width.axes[0].lines for y in line.get_ydata())


@pytest.mark.slow
def test_all_files_are_written_and_the_same_twice(made, tmp_path):
    made = [row for row in made[0] if row["batch_size"] == 128], made[1]
    first = draw_figures(*made, tmp_path / "a")
    second = draw_figures(*made, tmp_path / "b")
    names = [p.name for p in first]
    assert names == [
        "privacy-accuracy.png", "privacy-nll.png", "privacy-ece.png",
        "projected-share.png", "curvature.png", "posterior-width.png",
    ]  # fmt: skip
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert len(draw_figures([r for r in made[0] if r["method"] != IVON], [], tmp_path / "c")) == 3
