"""Beyond the test set: what is looked at, what is written down, and that it is what the study's own runs predict."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.robustness import evaluate as beyond
from experiments.robustness.evaluate import (
    Condition,
    Evaluation,
    check_plan,
    evaluate,
    make_conditions,
    ood_scores,
    read_evaluation,
    robustness_rows,
)
from torch import nn

from dpivon import metrics
from dpivon.data import Images
from dpivon.errors import ArgumentError
from dpivon.predict import ClassPrediction
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.run.evaluation import posterior_row, predict_row
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings

WANTED = Evaluation(("gaussian_noise", "contrast"), (1, 5), ("fashion-mnist", "held-out"), True, 100)
PLAN = Plan(
    name="tiny",
    dataset="digits",
    network="small",
    split="final",
    epochs=1,
    delta=1e-4,
    mc_samples=3,
    seed=0,
    classes=(7, 1, 2, 3, 4, 5, 6, 0),
    runs=(
        PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5),
        PlannedRun("dp-ivon-gradsq", 64, 1.0, 1.0, 0, 0.5, {"ema": 0.9}),
    ),
)
FAST = Settings(quiet=True, block=8, device="cpu", keep=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fashion(monkeypatch):
    """Two hundred images in place of Fashion-MNIST's ten thousand."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28, 1), np.uint8)
    monkeypatch.setattr(beyond, "_fashion_test", lambda root: Images(pixels, np.zeros(200, np.uint8)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("beyond")
    assert run_study(PLAN, out, FAST).finished == 2
    return out


def rows_of(out):
    found = table.read(out / "robustness.csv")
    return {(r["id"], r["predicts"], r["condition"], r["severity"]): r for r in found}


def test_conditions_are_the_same_images_in_other_states(tmp_path):
    data = load_data(PLAN, tmp_path, CPU)
    made = make_conditions(PLAN, WANTED, data, tmp_path)
    assert [(c.kind, c.name, c.severity, len(c.images)) for c in made] == [
        ("clean", "clean", 0, 100),
        ("shift", "gaussian_noise", 1, 100), ("shift", "gaussian_noise", 5, 100),
        ("shift", "contrast", 1, 100), ("shift", "contrast", 5, 100),
        ("ood", "fashion-mnist", 0, 100), ("ood", "held-out", 0, 60),
    ]  # fmt: skip
    clean = data.eval_images[:100]
    assert torch.equal(made[0].images, clean)
    raw = clean * 0.25 + 0.5
    flat = made[4].images.float() / 255
    mean = raw.mean((2, 3), keepdim=True)
    torch.testing.assert_close(flat, (raw - mean) * 0.15 + mean, atol=0.6 / 255, rtol=0)
    assert all(torch.equal(c.labels, data.eval_labels[:100]) for c in made[:5])
    assert made[5].labels is None
    assert made[5].images.shape == (100, 1, 8, 8)
    assert made[5].images.dtype == torch.uint8
    everything = load_data(replace(PLAN, classes=()), tmp_path, CPU)
    torch.testing.assert_close(made[6].images, everything.eval_images[everything.eval_labels >= 8])


def test_rows_hold_the_metrics_of_the_posteriors_that_were_kept(whole):
    """All test images, clean, have the scores of the study's own table; the others those of the library's metrics."""
    evaluate(whole, replace(WANTED, images=None), whole, say=lambda line: None)
    evaluate(whole, replace(WANTED, images=None), whole, say=lambda line: None)  # no row stands twice
    found = rows_of(whole)
    assert len(table.read(whole / "robustness.csv")) == len(found) == 7 * 3
    for row in table.read(whole / "runs.csv"):
        for way, prefix in (("mean", ""), ("average", "mc_")):
            if (row["id"], way, "clean", 0) not in found:
                assert row["mc_nll"] is None
                continue
            clean = found[row["id"], way, "clean", 0]
            for score in table.SCORES:
                assert clean[score] == pytest.approx(row[prefix + score], rel=1e-5)
            assert clean["accuracy"] != found[row["id"], way, "contrast", 5]["accuracy"]
            assert clean["auroc_entropy"] is None
            ood = found[row["id"], way, "held-out", 0]
            assert ood["accuracy"] is None
            assert (ood["auroc_information"] is None) == (way == "mean")


RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 8),
    Run("dp-calm", 14, 1.0, 1.0, 0.05, 8),
]


def test_a_stack_is_evaluated_like_each_run_alone_and_as_the_metrics_say():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 3, 4, 4, generator=generator), torch.randint(0, 10, (60,), generator=generator)
    network = AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)))
    noise = torch.randint(0, 256, (40, 3, 4, 4), generator=generator, dtype=torch.uint8)
    made = [Condition("clean", "clean", 0, images, labels), Condition("ood", "noise", 0, noise, None)]

    def rows(runs):
        stack = Stack(runs, network, images, labels, block=4)
        for _ in stack.train(6):
            pass
        out = []
        for i, run in enumerate(runs):
            found = predict_row(network, *posterior_row(stack, i), [images, noise], samples=4, seed=run.seed)
            out.append((found, robustness_rows(f"{run.seed}", found, made, selective=True)))
        return out

    together = rows(RUNS)
    assert [len(r) for _, r in together] == [4, 2, 4]
    for run, (answers, found) in zip(RUNS, together, strict=True):
        ((_, alone),) = rows([run])
        for a, b in zip(found, alone, strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                assert value == (b[key] if isinstance(value, str) else pytest.approx(b[key], rel=1e-4, abs=1e-6)), key
        for clean, ood, (inside, outside) in zip(found[::2], found[1::2], answers.values(), strict=True):
            assert clean["ece"] == pytest.approx(metrics.ece(inside.probs, labels), rel=1e-9)
            assert clean["accuracy_at_80"] == metrics.accuracy_at_coverage(inside.probs, labels, 0.8)
            suspicious = [-p.probs.double().amax(-1) for p in (inside, outside)]
            assert ood["auroc_confidence"] == metrics.ood_auroc(*suspicious)
            assert ood["fpr95_confidence"] == metrics.ood_fpr(*suspicious)


def test_what_diverged_has_no_scores():
    nan, none = torch.full((4,), math.nan), torch.zeros(4)
    bad = ClassPrediction(torch.full((4, 3), math.nan), nan, nan, 5)
    good = ClassPrediction(torch.full((4, 3), 1 / 3), none, none, 5)
    assert all(math.isnan(v) for v in ood_scores(bad, good).values())
    assert len(ood_scores(good, bad)) == 6
    assert ood_scores(good, good)["auroc_information"] == 0.5
    clean = Condition("clean", "clean", 0, torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    (row,) = robustness_rows("run", {"mean": [bad]}, [clean], selective=True)
    assert all(math.isnan(v) for k, v in row.items() if isinstance(v, float) and k != "severity")


def test_what_is_missing_is_named(whole, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(beyond, "DEBIAN", tmp_path)
    with pytest.raises(ArgumentError, match=r"lacks t10k-images.*Fashion-MNIST"):
        evaluate(whole, WANTED, tmp_path)
    run_study(replace(PLAN, runs=PLAN.runs[:1]), tmp_path / "unkept", replace(FAST, keep=False))
    with pytest.raises(ArgumentError, match=r"keeps no posterior.*--keep"):
        evaluate(tmp_path / "unkept", Evaluation(ood=("held-out",)), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ()}, r"held-out.*no class is held out"),
        ({"split": "tuning"}, "never sees"),
        ({"dataset": "fashion-mnist"}, "is what the study learns"),
    ],
)
def test_plans_that_cannot_be_evaluated(changes, words):
    with pytest.raises(ArgumentError, match=words):
        check_plan(replace(PLAN, **changes), WANTED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((("rain",), (1,)), "corruptions='rain'"),
        ((("fog",), (6,)), "severities=6"),
        ((("fog",), ()), "Give both or neither"),
        ((("fog", "fog"), (1,)), "names something twice"),
        (((), (), ("svhn",)), "ood='svhn'"),
        (((), (), (), True, 3), "images=3"),
        (((), (), (), "yes"), "selective='yes'"),
    ],
)
def test_evaluations_that_cannot_be(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        Evaluation(*arguments)


def test_the_files_of_the_experiment_are_read(tmp_path):
    files = sorted(Path(beyond.__file__).parent.glob("studies/*-evaluate.yaml"))
    assert [len(read_evaluation(path).corruptions) for path in files] == [0, 11, 6]
    (tmp_path / "other.yaml").write_text("shift: {}\n")
    with pytest.raises(ArgumentError, match="shift"):
        read_evaluation(tmp_path / "other.yaml")
