"""The tables of the experiment on priors: what they say of known rows, and that the README has them."""

from __future__ import annotations

import sys

import pytest
from experiments.leaderboard.priors import report
from experiments.leaderboard.priors.plans import EPSILONS, Cell
from experiments.leaderboard.priors.private import CELL

ARMS = {
    "scratch": Cell("scratch", 1.0, lr=3.5),
    "prior": Cell("p", 1.0),
    "head first": Cell("p", 1.0, head_steps=100),
    "dp-sgd": Cell("p", 1.0, "dp-sgd", 0.1),
    "dp-adam": Cell("p", 1.0, "dp-adam", 0.001),
}


def row(arm: str, split: str, epsilon: float, seed: int, accuracy: float) -> dict[str, str]:
    values = dict(zip(CELL, ARMS[arm].key, strict=True))
    return values | {"split": split, "epsilon": str(epsilon), "seed": str(seed), "accuracy": str(accuracy)}


def made() -> report.Results:
    """Validation prefers DP-SGD, the test set DP-Adam."""
    validation = {"scratch": 0.4, "prior": 0.5, "head first": 0.6, "dp-sgd": 0.5, "dp-adam": 0.4}
    test = {"scratch": 0.4, "prior": 0.5, "head first": 0.6, "dp-sgd": 0.45, "dp-adam": 0.55}
    rows = [row(arm, "validation", e, 0, a) for arm, a in validation.items() for e in EPSILONS]
    for seed, extra in ((3, 0.02), (1, 0.0), (2, 0.01)):  # not in the order of seeds
        for arm, accuracy in test.items():
            rows += [row(arm, "test", e, seed, accuracy + extra * (arm == "head first")) for e in EPSILONS]
    return report.Results(rows, [], [], [])


def test_arms_and_baselines_are_told_apart() -> None:
    r = made()
    assert r.prior == "p"
    assert r.values("head first", 3.0, "accuracy") == pytest.approx([0.6, 0.61, 0.62])
    assert r.values("prior", 3.0, "accuracy") == pytest.approx([0.5] * 3)
    assert r.chosen(3.0) == "dp-sgd"
    assert r.better(3.0, "accuracy") == "dp-adam"


def test_differences_have_students_interval() -> None:
    found = made().difference("head first", "prior", 1.0, "accuracy")
    half = 4.302653 * 0.01 / 3**0.5  # t at 97.5 % with two degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((0.11, 0.11 - half, 0.11 + half), rel=1e-5)


def test_differences_need_the_same_seeds() -> None:
    r = made()
    r.runs.remove(r.arm("prior", 1.0)[0])
    with pytest.raises(SystemExit, match="seeds"):
        r.difference("head first", "prior", 1.0, "accuracy")


@pytest.mark.parametrize(("name", "at_the_bar"), [("accuracy", True), ("nll", False), ("ece", True)])
def test_bars_are_kept_to_the_letter(name: str, at_the_bar: bool) -> None:
    assert report.meets(name, 0.5, 0.5) is at_the_bar
    assert report.meets(name, 0.5, 0.6) is (name == "accuracy")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    report.main()


def test_the_readme_is_what_the_tables_give(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "--check")


def test_the_command_fills_blocks_and_notices_changes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (report.HERE / "README.md").read_text()
    readme = tmp_path / "README.md"
    readme.write_text(text.replace("| head first − prior |", "| something else |"))
    with pytest.raises(SystemExit, match="without --check"):
        command(monkeypatch, "--readme", str(readme), "--check")
    command(monkeypatch, "--readme", str(readme))
    assert readme.read_text() == text
    readme.write_text(text.replace("<!-- end paired -->", ""))
    with pytest.raises(SystemExit, match="Add the markers"):
        command(monkeypatch, "--readme", str(readme))
