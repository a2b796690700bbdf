"""The tables of the experiment on priors: what they say of known rows, and that the README has them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from experiments.leaderboard import board
from experiments.leaderboard.priors import digits, digits_worth, report, tables
from experiments.leaderboard.priors.arms import Results
from experiments.leaderboard.priors.plans import EPSILONS, PLANS, Cell, key_of, same_round
from experiments.leaderboard.priors.private import CELL

from dpivon import demo
from dpivon.models import SmallCNN
from dpivon.priors import start_from

#: Arm: its plan and one of its cells.
ARMS = {
    "scratch": ("judge", Cell("scratch", 1.0, lr=3.5)),
    "plain": ("judge", Cell("p", 1.0)),
    "untuned": ("judge", Cell("p", 1.0, head_steps=100)),
    "plain dp-sgd": ("judge", Cell("p", 1.0, "dp-sgd", 0.1)),
    "dp-steady": ("final", Cell("p", 1.0, head_steps=100, features=0.5)),
    "dp-sgd": ("final", Cell("p", 1.0, "dp-sgd", 0.1, head_steps=100)),
    "dp-adam": ("final", Cell("p", 1.0, "dp-adam", 0.001, head_steps=100)),
}
FOLDER = report.HERE / "results"


def made() -> Results:
    test = dict(zip(ARMS, (0.4, 0.5, 0.55, 0.45, 0.6, 0.45, 0.56), strict=True))
    rows = []
    for seed, extra in ((3, 0.02), (1, 0.0), (2, 0.01)):  # not in the order of seeds
        for arm, accuracy in test.items():
            plan, cell = ARMS[arm]
            own = dict(zip(CELL, cell.key, strict=True)) | {"plan": plan, "split": "test", "seed": str(seed)}
            own["accuracy"] = str(accuracy + extra * (arm == "dp-steady"))
            rows += [own | {"epsilon": str(e)} for e in EPSILONS]
    return Results(rows)


def test_arms_and_baselines_are_told_apart() -> None:
    r = made()
    assert r.prior == "p"
    assert r.values("dp-steady", 3.0, "accuracy") == pytest.approx([0.6, 0.61, 0.62])
    for arm, accuracy in (("scratch", 0.4), ("plain", 0.5), ("untuned", 0.55), ("plain dp-sgd", 0.45)):
        assert r.values(arm, 3.0, "accuracy") == pytest.approx([accuracy] * 3)
    assert r.better(3.0) == "dp-adam"


def test_differences_have_students_interval() -> None:
    found = made().difference("dp-steady", "plain", 1.0, "accuracy")
    half = 4.302653 * 0.01 / 3**0.5  # t at 97.5 % with two degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((0.11, 0.11 - half, 0.11 + half), rel=1e-5)


def test_differences_need_the_same_seeds() -> None:
    r = made()
    r.runs.remove(r.arm("plain", 1.0)[0])
    with pytest.raises(SystemExit, match="seeds"):
        r.difference("dp-steady", "plain", 1.0, "accuracy")


@pytest.mark.parametrize(("name", "at_the_bar"), [("accuracy", True), ("nll", False), ("ece", True)])
def test_bars_are_kept_to_the_letter(name: str, at_the_bar: bool) -> None:
    assert report.reached(name, 0.5, 0.5) is at_the_bar
    assert report.reached(name, 0.5, 0.6) is (name == "accuracy")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    report.main()


def test_the_pages_are_what_the_tables_give(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "--check")


def test_the_command_fills_blocks_and_notices_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in report.FILES:
        shutil.copy(report.HERE / name, tmp_path)
    page = tmp_path / "README.md"
    text = page.read_text()
    page.write_text(text.replace("| recipe, prior − recipe, scratch |", "| something else |"))
    with pytest.raises(SystemExit, match="without --check"):
        command(monkeypatch, "--pages", str(tmp_path), "--check")
    command(monkeypatch, "--pages", str(tmp_path))
    assert page.read_text() == text
    assert (tmp_path / "results" / "scores.png").stat().st_size > 10_000
    page.write_text(text.replace("<!-- end paired -->", ""))
    with pytest.raises(SystemExit, match="Add the markers"):
        command(monkeypatch, "--pages", str(tmp_path))


@pytest.mark.parametrize("plan", ["judge", "settle", "final"])
def test_committed_runs_are_what_validation_chose(plan: str) -> None:
    rows = same_round(tables.read(FOLDER / "runs.csv"), plan)
    assert {cell.key for cell in PLANS[plan](rows, [])} == {key_of(row) for row in rows if row["plan"] == plan}


def test_the_leaderboard_has_every_planned_cell() -> None:
    rows = tables.read(FOLDER / "runs.csv")
    for plan, split in (("ivon", "validation"), ("board", "test"), ("fashion", "fashion-mnist")):
        planned = {cell.key for cell in PLANS[plan](same_round(rows, plan), [])}
        found = {key_of(row) for row in rows if row["split"] == split}
        assert planned <= found
        assert {key_of(row) for row in rows if row["plan"] == plan} <= planned


def test_the_leaderboard_is_what_the_tables_give() -> None:
    text = (board.HERE / "README.md").read_text()
    assert board.filled(text) == text
    with pytest.raises(SystemExit, match="Add the markers"):
        board.filled(text.replace("<!-- end gains -->", ""))


def test_a_run_of_several_maps_is_one_row_of_the_leaderboard() -> None:
    known = {"method": "dp-sgd", "epsilon": "3", "seed": "0", "accuracy": "0.5", "seconds": "1"}
    known |= dict.fromkeys(("device", "torch", "commit"), "")
    arms: board.Arms = {}
    for map_, nll in (("none", "1.5"), ("temperature", "1.1")):
        board._add_scored(arms, known | {"map": map_, "nll": nll, "ece": "0.1"})
    board._add_scored(arms, known | {"map": "none", "epsilon": "7.5", "nll": "1", "ece": "0"})  # not on the leaderboard
    (own,) = arms.values()
    assert [(row["nll"], row["tempered_nll"]) for row in own[3.0]] == [("1.5", "1.1")]
    assert list(own) == [3.0]


def test_digits_were_judged_at_what_validation_chose() -> None:
    for epsilon in digits.EPSILONS:
        for start in digits.RATES:
            used = {float(r["rate"]) for r in digits.at(start, epsilon, "test", digits.JUDGING)}
            assert used == {digits.chosen(start, epsilon)}
        assert digits.chosen("strokes-8", epsilon) == digits_worth.ALL_WEIGHTS
        alone = {float(r["rate"]) for r in digits.at(digits.LAST, epsilon, "test", digits.JUDGING)}
        assert alone == {digits.chosen(digits.LAST, epsilon)} == {3.5}
    assert not set(digits.CHOOSING) & set(digits.JUDGING)


@pytest.mark.parametrize("arm", digits_worth.ARMS)
@pytest.mark.parametrize("epsilon", digits_worth.EPSILONS)
def test_parts_of_a_prior_were_judged_at_what_was_chosen(arm: str, epsilon: float) -> None:
    runs, share = digits_worth.judged(arm, epsilon), digits_worth.chosen(arm, epsilon)
    assert [int(row["seed"]) for row in runs] == list(digits_worth.JUDGING)
    alone = [r for r in tables.read(digits_worth.TABLE) if (r["arm"], float(r["epsilon"])) == (arm, epsilon)]
    seen = {row["share"] for row in alone if int(row["seed"]) in digits_worth.JUDGING}
    assert seen == {str(share)}
    rates = {"scratch": digits.chosen("scratch", epsilon), "filters": digits.chosen("filters", 1.0)}
    rates |= {
        "head first, r = 1.25": 1.25,
        "head first, by default": digits_worth.AFTER_HEAD,
        "filters, again": rates["filters"],
    }
    assert {float(row["rate"]) for row in runs} == {rates.get(arm, digits.chosen("strokes-8", epsilon))}
    used = {*digits.CHOOSING, *digits.JUDGING}  # r was chosen with some, and the others' scores were known
    assert not used & {*digits_worth.CHOOSING, *digits_worth.JUDGING}
    assert not set(digits_worth.CHOOSING) & set(digits_worth.JUDGING)


@pytest.mark.parametrize("free", [False, True])
def test_the_last_layer_is_loose_whatever_the_share(free: bool) -> None:
    prior = start_from(SmallCNN(), "strokes-8", input_mean=0.0, input_std=1.0)
    found = digits_worth.around(prior, 0.1, free)
    for name, v in found.variance.items():
        wanted = prior.variance[name] * 0.01
        if name.startswith("head.logits"):
            wanted = torch.full_like(v, 1e4 / demo.TRAIN if free else 1 / (3 * 32))
        assert torch.allclose(v, wanted), name
        assert torch.equal(found.mean[name], prior.mean[name]), name


def test_unpaired_differences_have_welchs_interval() -> None:
    found = digits.unpaired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert (found.mean, found.low) == pytest.approx((2.0, 2.0 - 4.302653 / 3**0.5), rel=1e-5)  # one spread alone


def test_merging_is_idempotent_and_replaces_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, kept = tmp_path / "new", tmp_path / "kept"
    for folder in (new, kept):
        shutil.copytree(FOLDER, folder, ignore=lambda _, names: [n for n in names if not n.endswith(".csv")])
    monkeypatch.setattr(sys, "argv", ["tables", str(new), "--results", str(kept)])
    tables.main()
    for name in tables.KEYS:
        assert (kept / f"{name}.csv").read_bytes() == (FOLDER / f"{name}.csv").read_bytes()
    (new / "probe.csv").write_text((new / "probe.csv").read_text().replace("filters,0.4712", "filters,0.5"))
    tables.main()
    assert next(row["hidden_accuracy"] for row in tables.read(kept / "probe.csv")) == "0.5"
    (new / "probe.csv").write_text("prior,other\nx,1\n")
    with pytest.raises(SystemExit, match="columns"):
        tables.main()
