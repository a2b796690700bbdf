"""Studies as files: what they stand for, and what is wrong with them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import experiments.strong_privacy  # noqa: F401  registers the estimators that its studies name
import pytest
from study_files import GOOD, STUDIES

from dpivon import Augmentation, budget, temperature_cost
from dpivon.errors import ArgumentError
from dpivon.methods import METHODS
from dpivon.recipe import WIDTH
from dpivon.stacked.run import stackable
from dpivon.study.plan.config import resolve, rounded_up
from dpivon.study.plan.plan import (
    PlannedRun,
    changed,
    noise_seed,
    read_plan,
    steps_of,
)
from dpivon.study.results import table
from dpivon.study.results import tuning as tuned

RATE = 3.5  # the recipe's


def test_the_papers_grid_is_270_runs():
    plan = resolve(STUDIES["paper.yaml"])
    assert len(plan.runs) == 270
    assert (plan.epochs, plan.delta, plan.split, plan.dataset) == (150, 1e-5, "final", "cifar10")
    assert Counter(r.method for r in plan.runs) == {"dp-sgd": 90, "dp-adam": 90, "dp-ivon-gradsq": 90}
    assert {r.batch_size for r in plan.runs} == {128, 256, 512}
    assert {r.noise_multiplier for r in plan.runs} == {0.1, 1, 5, 10, 15}
    assert {r.max_grad_norm for r in plan.runs} == {10, 20}
    assert {(r.method, r.lr) for r in plan.runs} == {("dp-sgd", 0.01), ("dp-adam", 1e-4), ("dp-ivon-gradsq", 0.1)}
    assert {r.options["weight_decay"] for r in plan.runs} == {1e-4}
    assert len({noise_seed(plan, r) for r in plan.runs}) == 270  # nobody shares noise
    assert steps_of(plan.runs[0], 150, 50_000) == 150 * 391


def test_the_other_studies():
    tuning = resolve(STUDIES["paper-tuning.yaml"])
    assert (len(tuning.runs), tuning.split, tuning.table) == (45, "tuning", "tuning.csv")
    for method in ("dp-sgd", "dp-adam", "dp-ivon-gradsq"):
        assert len({r.lr for r in tuning.runs if r.method == method}) == 3
    paper = {(r.method, r.lr) for r in resolve(STUDIES["paper.yaml"]).runs}
    assert paper <= {(r.method, r.lr) for r in tuning.runs}  # the paper's rates are among the candidates
    ablations = resolve(STUDIES["paper-ablations.yaml"])
    assert {r.method for r in ablations.runs} == {"dp-ivon-gradsq", "dp-ivon-gradsq-plain", "dp-ivon-reparam"}
    assert {k for r in ablations.runs for k in r.options} == {"ess", "hess_init", "beta2"}
    assert all(len(r.options) <= 1 for r in ablations.runs)  # one thing at a time
    assert resolve(STUDIES["quick.yaml"]).dataset == "digits"


ROBUSTNESS = (
    GOOD.replace("noise_multiplier: [1]", "epsilon: [1, 8]")
    + """
classes: [0, 2, 4]
"""
)


@pytest.mark.slow
def test_noise_is_calibrated_to_epsilon(resolved):
    """As little as keeps within ε, at every batch size, for the eight classes' number of digits; in digits a table holds."""
    plan = resolved(ROBUSTNESS)
    assert len(plan.runs) == 2 * 2 * 2 * 2 + 2 * 2 * 2 * 2
    found = {(r.batch_size, r.noise_multiplier) for r in plan.runs}
    assert len(found) == 4
    for b in (32, 64):
        for sigma, target in zip(sorted((s for c, s in found if c == b), reverse=True), (1, 8), strict=True):
            settings = {
                "dataset_size": 459,
                "batch_size": b,
                "epochs": 2,
                "delta": 1e-4,
                "accountant": "rdp",
            }  # 0, 2, 4
            assert budget(**settings, noise_multiplier=sigma).epsilon <= target
            assert budget(**settings, noise_multiplier=0.99 * sigma).epsilon > target
            assert float(f"{sigma:.7g}") == sigma
    assert plan.classes == (0, 2, 4)


def test_rounding_is_never_down():
    for sigma, expected in (
        (1.23401, 1.235),
        (1.234, 1.234),
        (0.0099995, 0.01),
        (123456.0, 123500.0),
        (0.61131, 0.6114),
    ):
        assert rounded_up(sigma) == expected


@pytest.mark.slow
def test_a_plan_of_some_classes_comes_back_and_others_stay_as_they_were(resolved, tmp_path):
    plan = resolved(ROBUSTNESS)
    plan.write(tmp_path / "p.json")
    assert read_plan(tmp_path / "p.json") == plan
    other = resolved(ROBUSTNESS.replace("classes: [0, 2, 4]", "classes: [0, 2, 5]"))
    assert other.digest != plan.digest
    raw = json.loads((tmp_path / "p.json").read_text())  # as version 0.1 wrote it
    (tmp_path / "p.json").write_text(json.dumps(raw | {"evaluate": {"ood": ["held-out"]}}))
    assert read_plan(tmp_path / "p.json") == plan
    resolved(GOOD).write(tmp_path / "p.json")
    assert "classes" not in json.loads((tmp_path / "p.json").read_text())


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["beyond", "beyond-classes", "beyond-tuning", "beyond-quick", "beyond-quick-tuning"])
def test_studies_beyond_the_paper_hold_every_method_at_matched_epsilon(name):
    plan = resolve(STUDIES[f"{name}.yaml"])
    methods = set(stackable()) - ({"dp-steady"} if "quick" in name else set())  # which came after those had run
    assert {r.method for r in plan.runs} == methods
    cells = {
        m: {(r.batch_size, r.noise_multiplier, r.max_grad_norm) for r in plan.runs if r.method == m} for m in methods
    }
    assert len(set(map(frozenset, cells.values()))) == 1  # the same σ for all, so the same ε
    tuning = name.endswith("tuning")
    assert (plan.split == "tuning") is tuning
    if not tuning:
        assert len(cells["dp-sgd"]) == 4
        assert {"beyond": 3, "beyond-classes": 3, "beyond-quick": 2}[name] == len({r.seed for r in plan.runs})


def test_lists_mean_all_of_them(resolved):
    plan = resolved(GOOD)
    assert len(plan.runs) == 4 * 2 + 4 * 2
    assert PlannedRun("dp-ivon-gradsq", 64, 1.0, 2.0, 0, 0.1, {"ess": 200.0, "hess_init": 0.5}) in plan.runs


def test_a_plan_comes_back_from_its_file(resolved, tmp_path):
    plan = resolved(GOOD)
    plan.write(tmp_path / "p.json")
    again = read_plan(tmp_path / "p.json")
    assert again == plan
    assert again.digest == plan.digest
    assert resolved(GOOD.replace("epochs: 2", "epochs: 3")).digest != plan.digest
    raw = json.loads((tmp_path / "p.json").read_text())
    for change, words in (({"format": "x"}, "not a plan"), ({"more": 1}, "key"), ({"epochs": 0}, "epochs=0")):
        (tmp_path / "p.json").write_text(json.dumps(raw | change))
        with pytest.raises(ArgumentError, match=words):
            read_plan(tmp_path / "p.json")


def test_chosen_rates_replace_the_files(resolved, tmp_path):
    (tmp_path / "lr.json").write_text('{"lr": {"dp-sgd": 0.7}}')
    plan = resolved(GOOD, tmp_path / "lr.json")
    assert {r.lr for r in plan.runs if r.method == "dp-sgd"} == {0.7}
    assert {r.lr for r in plan.runs if r.method == "dp-ivon-gradsq"} == {0.1}
    (tmp_path / "lr.json").write_text("{}")
    with pytest.raises(ArgumentError, match="dpivon study pick"):
        resolved(GOOD, tmp_path / "lr.json")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("name: a", "name: A b", r"name='A b'"),
        ("dataset: digits", "dataset: imagenet", r"dataset='imagenet'"),
        ("epochs: 2", "epochs: 0", r"epochs=0"),
        ("epochs: 2", "epochs: two", r"epochs='two'"),
        ("epochs: 2", "epoch: 2", r"epochs"),
        ("delta: 1e-4", "delta: 2", r"delta=2"),
        ("batch_size: [32, 64]", "batch_size: []", r"grid.batch_size"),
        ("batch_size: [32, 64]", "batch_size: [1.5]", r"grid.batch_size.0=1.5"),
        ("noise_multiplier: [1]", "noise_multiplier: [-1]", r"grid.noise_multiplier.0=-1"),
        (
            "noise_multiplier: [1]",
            "noise_multiplier: [1], epsilon: [1]",
            r"grid: give exactly one of noise_multiplier and ep",
        ),
        ("noise_multiplier: [1], ", "", r"grid: give exactly one of noise_multiplier and epsilon"),
        ("noise_multiplier: [1]", "epsilon: [0]", r"grid.epsilon.0=0"),
        ("noise_multiplier: [1]", "epsilon: []", r"grid.epsilon"),
        ("epochs: 2", "epochs: 2\nclasses: [3]", r"classes=\[3\]"),
        ("epochs: 2", "epochs: 2\nclasses: [3, 11]", r"classes.1=11"),
        ("epochs: 2", "epochs: 2\nevaluate: {ood: [held-out]}", r"evaluate"),
        ("epochs: 2", "epochs: 2\nclasses: [1]", r"two or more different classes"),
        ("epochs: 2", "epochs: 2\nclasses: [1, 1, 2]", r"two or more different classes"),
        ("noise_multiplier: [1]", "noise_multiplier: [.inf]", r"grid.noise_multiplier.0=inf"),
        ("method: dp-sgd", "method: dp-magic", r"method='dp-magic'"),
        ("lr: [0.1, 0.2]", "lr: 0", r"methods.0.lr"),
        ("hess_init: 0.5", "hess: 0.5", r"options=\['hess'\]"),
        ("lr: [0.1, 0.2]", "lr: [0.1, 0.1]", r"planned twice"),
        ("methods:", "methods: [", r"is not YAML"),
    ],
)
def test_what_is_wrong_is_named(resolved, old, new, words):
    assert old in GOOD
    with pytest.raises(ArgumentError, match=words):
        resolved(GOOD.replace(old, new))
    with pytest.raises(ArgumentError, match="does not exist"):
        resolve(Path("nowhere.yaml"))


def recipe(trace):
    """The recipe's options as a table has them: they name its estimator, so that another default would not change the runs."""
    return json.dumps({"curvature": METHODS["dp-steady"].defaults["curvature"], "trace": trace})


STRONG = {"strong-paper": (75, 150), "strong-epsilon": (45, 90), "strong-fashion": (18, 75)}  # tuning, final


@pytest.mark.parametrize("name", STRONG)
def test_strong_studies_tune_alike_and_then_run_what_was_chosen(name, tmp_path):
    tuning, final = (resolve(STUDIES[f"{name}{end}.yaml"]) for end in ("-tuning", ""))
    assert (tuning.split, final.split) == ("tuning", "final")
    assert (len(tuning.runs), len(final.runs)) == STRONG[name]
    assert tuning.temperature_noise == final.temperature_noise > 0
    assert {r.seed for r in final.runs} == set(range(5))
    others = [r for r in tuning.runs if r.method != "dp-steady"]
    assert len(set(Counter((r.method, r.noise_multiplier) for r in others).values())) == 1  # as many rates for everyone
    cells = {r.noise_multiplier for r in tuning.runs}
    assert cells == {r.noise_multiplier for r in final.runs}
    ours, theirs = ([r for r in final.runs if (r.method == "dp-steady") is mine] for mine in (True, False))
    assert {(r.method, r.lr) for r in theirs} <= {(r.method, r.lr) for r in others}
    assert {r.lr for r in ours} == {RATE}
    # The largest rate at each σ, as if it had won: those replace the file's, and the recipe stays as it is shipped.
    rows = [{"method": r.method, "lr": r.lr, "accuracy": r.lr, "nll": 1.0, "id": r.id} | vars(r) for r in tuning.runs]
    table.write(tmp_path / "tuning.csv", [row | {"options": ""} for row in rows])
    tuned.pick(tmp_path, tmp_path / "lr.json", by_cell=True)
    plan = resolve(STUDIES[f"{name}.yaml"], tmp_path / "lr.json")
    largest = {r.method: max(o.lr for o in others if o.method == r.method) for r in others}
    for method, lr in largest.items():
        assert {r.lr for r in plan.runs if r.method == method} == {lr}
    shipped = Counter(changed(r.options) for r in plan.runs if (r.method, r.lr) == ("dp-steady", RATE))
    assert shipped == {recipe(trace): 5 * len(cells) for trace in (WIDTH, 0.1, 0.0)}
    # A candidate that has no row yet is known by the plan.
    tuning.write(tmp_path / "study.json")
    left = [row | {"options": ""} for row in rows if (row["method"], row["lr"]) != ("dp-sgd", largest["dp-sgd"])]
    table.write(tmp_path / "tuning.csv", left)
    with pytest.raises(ArgumentError, match="dp-sgd's candidates have not all run"):
        tuned.pick(tmp_path, tmp_path / "lr.json", by_cell=True)


def test_the_recipe_on_the_papers_grid_has_the_papers_cells():
    def cells(plan):
        return {(r.batch_size, r.noise_multiplier, r.max_grad_norm, r.seed) for r in plan.runs}

    grid, paper = resolve(STUDIES["strong-grid.yaml"]), resolve(STUDIES["paper.yaml"])
    assert cells(grid) == {cell for cell in cells(paper) if cell[0] == 512}
    assert (grid.epochs, grid.delta, grid.network, grid.seed) == (paper.epochs, paper.delta, paper.network, paper.seed)
    assert {(r.method, r.lr) for r in grid.runs} == {("dp-steady", METHODS["dp-steady"].lr)} == {("dp-steady", RATE)}
    assert len(resolve(STUDIES["strong-ablation.yaml"]).runs) == 108


@pytest.mark.parametrize(
    ("name", "examples", "b"), [("strong-epsilon", 50_000, 4096), ("strong-fashion", 60_000, 1024)]
)
def test_strong_studies_spend_what_they_say(name, examples, b):
    final = resolve(STUDIES[f"{name}.yaml"])
    assert {(r.batch_size, r.max_grad_norm) for r in final.runs} == {(b, 1)}
    spent = [
        budget(
            dataset_size=examples,
            batch_size=b,
            epochs=final.epochs,
            delta=final.delta,
            noise_multiplier=sigma,
            also=[temperature_cost(final.temperature_noise)],
            accountant="rdp",
        ).epsilon
        for sigma in sorted({r.noise_multiplier for r in final.runs}, reverse=True)
    ]
    for epsilon, target in zip(spent, (1.0, 3.0, 7.5), strict=True):
        assert 0.99 * target < epsilon <= target


def test_rates_by_cell(resolved, tmp_path):
    def cell(method, b, sigma, c, lr):
        return {"method": method, "batch_size": b, "noise_multiplier": sigma, "max_grad_norm": c, "lr": lr}

    rates = [cell("dp-sgd", b, 1.04, c, b * c / 100) for b in (32, 64) for c in (1.0, 2.0)]
    (tmp_path / "lr.json").write_text(json.dumps({"cells": rates}))
    plan = resolved(GOOD, tmp_path / "lr.json")  # its σ is 1, which 1.04 stands for
    assert {(r.batch_size, r.max_grad_norm): r.lr for r in plan.runs if r.method == "dp-sgd"} == {
        (32, 1): 0.32, (32, 2): 0.64, (64, 1): 0.64, (64, 2): 1.28,
    }  # fmt: skip
    assert {r.lr for r in plan.runs if r.method == "dp-ivon-gradsq"} == {0.1}  # of which the file does not speak
    for problem in (rates[1:], [r | {"noise_multiplier": 1.2} for r in rates]):
        (tmp_path / "lr.json").write_text(json.dumps({"cells": problem}))
        with pytest.raises(ArgumentError, match=r"no rate of dp-sgd at b = 32, σ = 1, C = 1"):
            resolved(GOOD, tmp_path / "lr.json")
    kept = GOOD.replace("lr: [0.1, 0.2]}", "lr: [0.1, 0.32], tuned: false}")
    (tmp_path / "lr.json").write_text(json.dumps({"cells": rates}))
    assert {r.lr for r in resolved(kept, tmp_path / "lr.json").runs if r.method == "dp-sgd"} == {0.1, 0.32}
    beside = kept + "  - {method: dp-sgd, lr: 0.1}\n"
    with pytest.raises(ArgumentError, match="planned twice"):
        resolved(beside)


def test_the_leaderboards_study():
    """The rates that equal tuning chose, the recipe as it is shipped, views and averaged iterates for all, ε as it says."""
    final = resolve(STUDIES["leaderboard.yaml"])
    assert len(final.runs) == 8
    assert final.network == "compact"
    assert final.augment == Augmentation(2, flip=True, crop=4)
    assert all("ema" in r.options or r.method == "dp-steady" for r in final.runs)
    rates = tuned.read_rates(STUDIES["strong-epsilon-lr.json"])
    for r in final.runs:
        if r.method == "dp-steady":
            assert (r.lr, changed(r.options)) == (RATE, recipe(WIDTH))
        else:
            assert r.lr == rates.of(r.method, r.batch_size, r.noise_multiplier, r.max_grad_norm)
    for sigma, target in zip(sorted({r.noise_multiplier for r in final.runs}), (7.5, 3.0), strict=True):
        cost = {"dataset_size": 50_000, "batch_size": 4096, "epochs": 90, "delta": 1e-5, "noise_multiplier": sigma}
        cost |= {"accountant": "rdp"}
        assert 0.99 * target < budget(**cost, also=[temperature_cost(35)]).epsilon <= target
