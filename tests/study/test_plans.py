"""What a plan keeps: views, noise and digests, and which plans share randomness."""

from __future__ import annotations

import json
from dataclasses import replace

import experiments.strong_privacy  # noqa: F401  registers the estimators that its studies name
import pytest
from study_files import DIGEST_OF_THE_PAPER, GOOD, RESULTS, STUDIES

from dpivon import Augmentation
from dpivon.errors import ArgumentError
from dpivon.methods import METHODS
from dpivon.optim import curvature as estimators
from dpivon.optim.steady import Steady
from dpivon.study.plan.config import resolve
from dpivon.study.plan.plan import (
    first_seed,
    noise_seed,
    read_plan,
    sample_seed,
)

AUGMENTED = GOOD + "augment: {views: 4, flip: true, crop: 2}\n"


def test_a_plan_with_views_comes_back_and_one_without_says_nothing_of_them(resolved, tmp_path):
    plan, plain = resolved(AUGMENTED), resolved(GOOD)
    assert plan.augment == Augmentation(4, flip=True, crop=2, padding="reflect")
    plan.write(tmp_path / "p.json")
    assert read_plan(tmp_path / "p.json") == plan
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["augment"] == {"views": 4, "flip": True, "crop": 2, "padding": "reflect"}
    plain.write(tmp_path / "p.json")
    assert "augment" not in json.loads((tmp_path / "p.json").read_text())
    assert plain.digest != plan.digest
    assert noise_seed(plain, plain.runs[0]) != noise_seed(plan, plan.runs[0])
    # as they were before there were views
    paper = resolve(STUDIES["paper.yaml"])
    assert (paper.digest, noise_seed(paper, paper.runs[0])) == (DIGEST_OF_THE_PAPER, 5592308393345167930)
    nothing = resolved(GOOD + "augment: {views: 1}\n")
    assert nothing.augment is None
    assert nothing.digest == plain.digest


def test_plans_of_one_name_and_seed_share_noise_only_where_their_runs_are_the_same():
    paper = resolve(STUDIES["paper.yaml"])
    run, views = paper.runs[0], Augmentation(4, flip=True)
    others = [
        paper,
        *(replace(paper, dataset=name) for name in ("digits", "fashion-mnist")),
        *(replace(paper, network=name) for name in ("small", "compact")),
        *(replace(paper, classes=some) for some in ((0, 1), (0, 2), (1, 0), tuple(range(10)))),
        replace(paper, dataset="digits", network="small"),
        replace(paper, epochs=151),
        replace(paper, split="tuning"),
        replace(paper, seed=1),
        replace(paper, name="paper-2"),
        replace(paper, augment=views),
        replace(paper, augment=views, network="compact"),
    ]
    assert len({noise_seed(plan, run) for plan in others}) == len(others)
    same = [replace(paper, delta=1e-6), replace(paper, mc_samples=3), replace(paper, temperature_noise=20.0)]
    assert {noise_seed(plan, run) for plan in same} == {noise_seed(paper, run)}  # what comes after training


@pytest.mark.parametrize(
    ("folder", "seed"),
    [
        ("paper", 4651430630612416712),
        ("paper-tuning", 7153838104943615553),
        ("paper-ablations", 1297295963018791715),
        ("paper-check", 3566076731622109620),
        ("beyond", 1668366569244183779),
        ("beyond-tuning", 9179853526137022194),
    ],
)
def test_results_of_the_papers_experiment_keep_their_noise(folder, seed):
    plan = read_plan(RESULTS[folder] / "study.json")
    assert noise_seed(plan, plan.runs[0]) == seed


@pytest.mark.slow
def test_a_repetition_begins_and_predicts_alike_in_every_plan_of_one_seed():
    """It is the unit of a comparison, also over several studies."""
    paper = resolve(STUDIES["paper.yaml"])
    other = replace(paper, name="b", split="tuning", epochs=3, runs=paper.runs[::-1])
    for seed_of in (first_seed, sample_seed):
        known = {r.seed: seed_of(paper, r) for r in paper.runs}
        assert len(set(known.values())) == len(known) > 1  # no two repetitions
        assert all(seed_of(plan, r) == known[r.seed] for plan in (paper, other) for r in plan.runs)
        assert not set(known.values()) & {seed_of(replace(paper, seed=1), r) for r in paper.runs}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{flip: true}", r"augment\.views"),
        ("{views: 0}", r"augment\.views"),
        ("{views: 2, crop: -1}", r"augment\.crop"),
        ("{views: 2, rotate: true}", r"augment\.rotate"),
        ("{views: 2, padding: edge}", r"augment\.padding"),
    ],
)
def test_what_is_wrong_with_views_is_named(resolved, given, words):
    with pytest.raises(ArgumentError, match=words):
        resolved(GOOD + f"augment: {given}\n")


def test_a_plan_whose_views_are_damaged_is_refused(resolved, tmp_path):
    resolved(AUGMENTED).write(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    for damaged, words in (('"views": 0', "views=0"), ('"views": [4]', r"views=\[4\]"), ('"viewz": 4', "viewz")):
        (tmp_path / "p.json").write_text(text.replace('"views": 4', damaged))
        with pytest.raises(ArgumentError, match=words):
            read_plan(tmp_path / "p.json")


def test_a_plan_without_a_temperature_keeps_its_digest(resolved):
    """Results of plans from before there was one still belong to them."""
    plan = resolve(STUDIES["paper.yaml"])
    assert plan.digest == DIGEST_OF_THE_PAPER
    assert replace(plan, temperature_noise=20.0).digest != plan.digest
    with pytest.raises(ArgumentError, match=r"temperature_noise=-1\.0"):
        replace(plan, temperature_noise=-1.0)


def test_a_run_whose_default_estimator_is_another_one_by_now_has_noise_of_its_own(monkeypatch):
    """Sums that differ under the same noise could be subtracted. What ran before keeps the noise that its results have."""
    plan = resolve(STUDIES["beyond.yaml"])
    run = next(r for r in plan.runs if r.method == "dp-steady")
    named = replace(run, options={"curvature": "whole-fisher"})
    seeds, names = [], ("empirical-bayes-fisher", METHODS["dp-steady"].defaults["curvature"], "averaged-fisher")
    for name in names:
        monkeypatch.setitem(METHODS, "dp-steady", replace(METHODS["dp-steady"], rule=Steady(estimators.resolve(name))))
        seeds.append((noise_seed(plan, run), noise_seed(plan, named)))
    assert seeds[0][0] == 5841052354061426290
    assert len({own for own, _ in seeds}) == len(names)
    assert len({of_named for _, of_named in seeds}) == 1
