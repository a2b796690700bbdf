"""`python -m experiments.strong_privacy compare` as a command: what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from duels import CHOSEN, final, folder, plain, row, tuning
from experiments.strong_privacy.__main__ import app as strong_privacy
from experiments.strong_privacy.compare.scopes import TITLES
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.study.results import table

QUICK = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"


def invoke(*args):
    words = [str(a) for a in args]
    if words[0] == "compare":
        return CliRunner().invoke(strong_privacy, words)
    return CliRunner().invoke(app, ["study", *words], prog_name="dpivon")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """CIFAR-10 at three ε, and one cell of Fashion-MNIST, in two folders with one tuning study."""
    path = tmp_path_factory.mktemp("compare")
    bare = [
        row("dp-steady", s, i, 3.5, plain("dp-steady", s, 3.5), options='{"trace": 0.0}')
        for s in (4.3,)
        for i in range(5)
    ]
    folder(path / "epsilon", final() + bare)
    here = {"dataset": "fashion-mnist", "network": "small", "b": 1024, "epochs": 20}
    fashion = [r for r in final(**here) if r["noise_multiplier"] == 4.3]
    folder(path / "fashion", fashion)
    folder(path / "tuning", tuning(), "tuning.csv")
    done = invoke("compare", path / "epsilon", path / "fashion", "--tuning", path / "tuning", "--to", path / "to")
    assert done.exit_code == 0, done.output
    return path, [Path(line) for line in done.stdout.split()]


def test_the_page_has_every_bar_and_every_figure(made):
    _, written = made
    assert [p.name for p in written[-3:]] == ["comparison.csv", "bars.csv", "comparison.md"]
    figures = [p.name for p in written[:-3]]
    kinds = ("accuracy", "nll", "ece", "differences")
    assert figures == [f"{scope}-{kind}.png" for scope in ("epsilon", "fashion-mnist") for kind in kinds]
    assert all(p.stat().st_size > 5000 for p in written[:-3])
    page = written[-1].read_text()
    assert [name for name in figures if f"(figures/{name})" not in page] == []
    for heading in TITLES.values():
        assert f"### {heading[0].upper()}{heading[1:]}" in page
    section = page.split("### CIFAR-10 at ε = 1, 3 and 7.5")[1].split("### ")[0]
    assert re.findall(r"^\| (\d\w) \|", section, flags=re.M) == ["1a", "1b", "1c", "1d", "2a", "2b", "2c", "2d"]
    assert "**Not measured**: 1a, 1b, 1c, 1d, 2a, 2b, 2c, 2d, 3a, 3b." in page
    for line in ("1. accuracy", "2. calibration", "3. the paper's own setting", "4. small-model leaderboard"):
        assert f"| {line} |" in page
    assert "| 5. other data: accuracy | Fashion-MNIST, the defaults unchanged | **" in page
    assert "whoever sees two runs could subtract it" in page
    assert "as shipped, at its default rate | at the rate that validation data chose" in page


def test_the_tables_hold_what_the_page_says(made):
    _, written = made
    rows = table.read(written[-3])
    assert len(rows) == 3 * 4 + 1 + 4
    names = ("method", "default", "noise_multiplier", "variant", "dataset")
    ours = next(r for r in rows if tuple(r[n] for n in names) == ("dp-steady", 1, 4.3, "", "cifar10"))
    assert (ours["lr"], ours["runs"], ours["raw_accuracy"]) == (3.5, 5, pytest.approx(0.565, abs=1e-4))
    bars = table.read(written[-2])
    assert len(bars) == 2 * (8 + 10 + 8 + 8 + 4)  # two contenders, every part of every bar
    shipped = {(b["scope"], b["number"]): b for b in bars if b["contender"] == "DP-Steady, default rate"}
    assert shipped[TITLES["epsilon"], "1b"]["verdict"] == "met"
    assert shipped[TITLES["fashion-mnist"], "1a"]["numbers"].startswith("+0.50 [")  # no validation: the better on test
    page = written[-1].read_text()
    assert "| DP-SGD | 1 | of 3 on validation data of this cell | 5 | 0.510 | 0.5500 ± 0.0027 |" in page


def test_the_same_tables_give_the_same_bytes(made):
    path, written = made
    before = {p: p.read_bytes() for p in written}
    done = invoke("compare", path / "epsilon", path / "fashion", "--tuning", path / "tuning", "--to", path / "to")
    assert done.exit_code == 0
    assert {p: p.read_bytes() for p in written} == before


def test_a_study_of_something_else_has_no_bars_of_cifar(tmp_path):
    """Real results: the paper's method on the digits, one rate each and no temperature."""
    done = invoke("compare", QUICK, "--ours", "dp-ivon-gradsq", "--to", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "comparison.md").read_text()
    assert "CIFAR" not in page
    assert "| 1. accuracy | digits | **not met" in page
    assert "the test set, for want of validation data: in its favour" in page
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {
        f"digits-{kind}.png" for kind in ("accuracy", "nll", "ece", "differences")
    }


def test_what_cannot_be_compared_is_refused(made, tmp_path):
    path, _ = made
    out, to = path / "epsilon", ("--to", tmp_path / "to")
    for words, arguments in (
        ("ours='dp-sgd': is among the baselines", (out, "--ours", "dp-sgd", *to)),
        ("ours='dp-calm': has no run", (out, "--ours", "dp-calm", "--tuning", path / "tuning", *to)),
        ("baseline='dp-calm': has no run", (out, "--baseline", "dp-calm", "--tuning", path / "tuning", *to)),
        ("holds no tuning.csv", (out, "--tuning", out, *to)),
        ("holds no runs.csv", (path / "tuning", *to)),
    ):
        refused = invoke("compare", *arguments)
        assert refused.exit_code == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "to").exists()


def test_rates_for_each_cell_by_command(tmp_path):
    def accuracy(method, sigma, lr):
        return {11.5: -lr, 4.3: lr, 2.05: -abs(lr - CHOSEN[method])}[sigma]

    folder(tmp_path, tuning(accuracy), "tuning.csv")
    done = invoke("pick", tmp_path, "--by-cell", "--to", tmp_path / "lr.json")
    assert done.exit_code == 0, done.output
    assert "dp-sgd b=4096 σ=11.5 C=1: 0.3, of 0.3 (-0.300), 1 (-1.000), 3 (-3.000)" in done.stdout
    cells = json.loads((tmp_path / "lr.json").read_text())["cells"]
    found = {(c["method"], c["noise_multiplier"]): c["lr"] for c in cells}
    assert [found["dp-sgd", s] for s in (11.5, 4.3, 2.05)] == [0.3, 3.0, 1.0]
    assert [found["dp-steady", s] for s in (11.5, 4.3, 2.05)] == [2.5, 10.0, 10.0]
    nan = [
        r | ({"accuracy": float("nan")} if (r["method"], r["noise_multiplier"]) == ("dp-adam", 4.3) else {})
        for r in tuning()
    ]
    folder(tmp_path, nan, "tuning.csv")
    refused = invoke("pick", tmp_path, "--by-cell", "--to", tmp_path / "lr.json")
    assert refused.exit_code == 2
    assert "every candidate of dp-adam b=4096 σ=4.3 C=1 diverged" in refused.stderr


STUDY = """
{name: NAME, dataset: digits, network: small, split: SPLIT, epochs: 1, seeds: SEEDS, delta: 1e-4, mc_samples: 2,
 temperature_noise: 20, grid: {batch_size: [512], epsilon: [2, 8], max_grad_norm: [1]},
 methods: [{method: dp-sgd, lr: SGD}, {method: dp-steady, lr: STEADY} MORE]}
"""


@pytest.mark.slow
def test_from_two_studies_to_a_verdict(tmp_path):
    """Really run: tuned, picked for each cell, run with what was picked and the default, compared."""

    def study(name, **words):
        text = STUDY.replace("NAME", name)
        for key, value in words.items():
            text = text.replace(key, value)
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{name}.yaml"

    first = study("first", SPLIT="tuning", SEEDS="1", SGD="[0.3, 1.0]", STEADY="[2.5, 3.5]", MORE="")
    more = ", {method: dp-steady, lr: 3.5, tuned: false}"
    second = study("second", SPLIT="final", SEEDS="2", SGD="1.0", STEADY="3.5", MORE=more)
    tuned, out = tmp_path / "tuned", tmp_path / "out"
    assert invoke("run", first, "--out", tuned, "-q").exit_code == 0
    assert invoke("pick", tuned, "--by-cell", "--to", tmp_path / "lr.json").exit_code == 0
    assert invoke("run", second, "--lr", tmp_path / "lr.json", "--out", out, "-q").exit_code == 0
    done = invoke("compare", out, "--tuning", tuned, "--baseline", "dp-sgd", "--to", tmp_path / "to")
    assert done.exit_code == 0, done.output
    rows = table.read(tmp_path / "to" / "comparison.csv")
    picked = {
        (c["method"], round(c["noise_multiplier"])): c["lr"]
        for c in json.loads((tmp_path / "lr.json").read_text())["cells"]
    }
    for r in rows:
        expected = 3.5 if r["default"] else picked[r["method"], round(r["noise_multiplier"])]
        assert r["lr"] == expected
        assert (r["runs"], r["missing"]) == (2, 0)
        assert r["epsilon_tempered"] > r["epsilon"]
        assert r["tempered_nll"] > 0
    assert {r["default"] for r in rows} == {0, 1}
    assert "Equal numbers of candidates, checked: 2 learning rates" in (tmp_path / "to" / "comparison.md").read_text()
