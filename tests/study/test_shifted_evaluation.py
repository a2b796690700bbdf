"""Beyond the test set: what is looked at, what is written down, and that a stack changes nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_study import BARE
from tiny_study import PLAN as TINY
from torch import nn

from dpivon import metrics
from dpivon.data import Images
from dpivon.errors import ArgumentError
from dpivon.predict import ClassPrediction
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.study.plan.data import load_data
from dpivon.study.plan.plan import Evaluation
from dpivon.study.results import table
from dpivon.study.results.folder import merge
from dpivon.study.run import evaluation, runner
from dpivon.study.run import robustness as beyond
from dpivon.study.run.predict import CompiledPasses, EagerPasses, first_that_agrees, predict_row
from dpivon.study.run.robustness import Condition, make_conditions, ood_scores, robustness_rows
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from dpivon.study.run.work import Work

WANTED = Evaluation(("gaussian_noise", "contrast"), (1, 5), ("fashion-mnist", "held-out"), True, 100)
PLAN = replace(
    TINY,
    mc_samples=3,
    runs=tuple(replace(run, batch_size=64) for run in TINY.runs),
    classes=(7, 1, 2, 3, 4, 5, 6, 0),
    evaluate=WANTED,
)
FAST = Settings(quiet=True, block=8, device="cpu")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fashion(monkeypatch):
    """Two hundred images in place of Fashion-MNIST's ten thousand."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28, 1), np.uint8)
    found = Images(pixels, np.zeros(200, np.uint8))
    monkeypatch.setattr(beyond, "load_fashion_mnist_test", lambda root: found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28, 1), np.uint8)
        patch.setattr(beyond, "load_fashion_mnist_test", lambda root: Images(pixels, np.zeros(200, np.uint8)))
        out = tmp_path_factory.mktemp("beyond")
        assert run_study(PLAN, out, FAST).finished == 3
        return out


def rows_of(out):
    found = table.read(out / "robustness.csv")
    return {(r["id"], r["predicts"], r["condition"], r["severity"]): r for r in found}


def test_conditions_are_the_same_images_in_other_states(tmp_path):
    data = load_data(PLAN, tmp_path, CPU)
    made = make_conditions(PLAN, data, tmp_path)
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
    torch.testing.assert_close(made[6].images, data.ood)
    assert make_conditions(replace(PLAN, evaluate=None), data, tmp_path) == []


@pytest.mark.slow
def test_rows_hold_the_metrics_of_what_the_final_posterior_says(whole, tmp_path, monkeypatch):
    """The very stack that the study trained, evaluated here by the library's functions."""
    kept = []
    monkeypatch.setattr(runner, "clear", lambda device: None)
    evaluate = Work.evaluate
    monkeypatch.setattr(Work, "evaluate", lambda self, *a: kept.append((self.stack, self.runs)) or evaluate(self, *a))
    run_study(PLAN, tmp_path, FAST)
    data = load_data(PLAN, tmp_path, CPU)
    found, made = rows_of(tmp_path), make_conditions(PLAN, data, tmp_path)
    assert found == rows_of(whole)
    assert len(found) == 7 * (1 + 2 + 1)
    for stack, (run,) in kept:
        answers = predict_row(
            stack.network, stack.mean[0], stack.std[0], [c.images for c in made], samples=3, seed=0 * 1_000_003
        )
        assert set(answers) == ({"mean", "average"} if run.method == "dp-ivon-gradsq" else {"mean"})
        for way, each in answers.items():
            for condition, answer in zip(made, each, strict=True):
                row = found[run.id, way, condition.name, condition.severity]
                assert row["kind"] == condition.kind
                p, y = answer.probs, condition.labels
                if y is None:
                    suspicious = [-p.amax(-1) for p in (each[0].probs, p)]
                    assert row["auroc_confidence"] == pytest.approx(metrics.ood_auroc(*suspicious), rel=1e-6)
                    assert row["fpr95_confidence"] == pytest.approx(metrics.ood_fpr(*suspicious), rel=1e-6)
                    assert row["accuracy"] is None
                    assert (row["auroc_information"] is None) == (way == "mean")
                else:
                    assert row["ece"] == pytest.approx(metrics.ece(p, y), rel=1e-5)
                    assert row["aurc"] == pytest.approx(metrics.aurc(p, y), rel=1e-5)
                    assert row["accuracy_at_80"] == pytest.approx(metrics.accuracy_at_coverage(p, y, 0.8), rel=1e-5)
                    assert row["auroc_entropy"] is None
    clean = found[PLAN.runs[0].id, "mean", "clean", 0]
    assert clean["accuracy"] != found[PLAN.runs[0].id, "mean", "contrast", 5]["accuracy"]


def test_a_study_takes_the_way_that_was_tried_on_a_run_of_its_own(whole, tmp_path, monkeypatch):
    """As on a GPU, with a model that would be compiled there: tried on the run with width, and one of the others is lost."""
    tried = []

    def chosen(network, rows, images, say):
        tried.append((len(rows), all(bool(torch.isfinite(row).all()) for row in rows)))
        ways = iter([lambda: CompiledPasses(network, CPU, channels_last=True, batch=64)])
        return first_that_agrees(ways, EagerPasses(network, CPU), rows, images, pytest.fail)

    monkeypatch.setattr(evaluation, "eager_will_do", lambda device, passes: False)
    monkeypatch.setattr(evaluation, "chosen", chosen)
    train = Work.train
    monkeypatch.setattr(Work, "train", lambda self, stop: train(self, stop) and lost(self))

    def lost(self):
        place = self.stack.runs.index(next(r for r in self.stack.runs if r.method == "dp-sgd"))
        part = next(p for p in self.stack.parts if p.rows.start <= place < p.rows.stop)
        part.state["mean"][place - part.rows.start] = torch.nan
        return True

    run_study(PLAN, tmp_path, replace(FAST, stack=3))
    assert tried == [(1 + PLAN.mc_samples, True)]
    found, expected = rows_of(tmp_path), rows_of(whole)
    assert found.keys() == expected.keys()
    for key, row in found.items():
        for name, value in row.items():
            if isinstance(value, float) and name != "severity":
                if key[0].startswith("dp-sgd"):
                    assert math.isnan(value), (key, name)
                else:  # of a hundred images, trained beside others
                    assert value == pytest.approx(expected[key][name], abs=0.03), (key, name)


def test_all_images_clean_are_the_row_in_the_other_table(tmp_path):
    plan = replace(PLAN, runs=PLAN.runs[1:2], evaluate=Evaluation(ood=("held-out",)))
    run_study(plan, tmp_path, FAST)
    (row,) = table.read(tmp_path / "runs.csv")
    found = rows_of(tmp_path)
    for way, prefix in (("mean", ""), ("average", "mc_")):
        for score in table.SCORES:
            assert found[row["id"], way, "clean", 0][score] == row[prefix + score]
        assert found[row["id"], way, "clean", 0]["aurc"] is None  # not asked for


RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 8),
    Run("dp-ivon-gradsq", 13, 5.0, 1.0, 0.2, 8, {"ess": 500.0}),
    Run("dp-calm", 14, 1.0, 1.0, 0.05, 8),
]


def test_a_stack_is_evaluated_like_each_run_alone():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 3, 4, 4, generator=generator), torch.randint(0, 10, (60,), generator=generator)
    network = AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)))
    foreign = torch.randint(0, 256, (40, 3, 4, 4), generator=generator, dtype=torch.uint8)
    made = [Condition("clean", "clean", 0, images, labels), Condition("ood", "noise", 0, foreign, None)]

    def rows(runs):
        stack = Stack(runs, network, images, labels, block=4)
        for _ in stack.train(6):
            pass
        return [
            robustness_rows(stack, i, f"{r.seed}", made, WANTED, samples=4, seed=r.seed) for i, r in enumerate(runs)
        ]

    together = rows(RUNS)
    assert [len(r) for r in together] == [4, 2, 4, 4]
    for run, found in zip(RUNS, together, strict=True):
        (alone,) = rows([run])
        for a, b in zip(found, alone, strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                assert value == (b[key] if isinstance(value, str) else pytest.approx(b[key], rel=1e-4, abs=1e-6)), key


def test_what_diverged_has_no_scores():
    nan, none = torch.full((4,), math.nan), torch.zeros(4)
    bad = ClassPrediction(torch.full((4, 3), math.nan), nan, nan, 5)
    good = ClassPrediction(torch.full((4, 3), 1 / 3), none, none, 5)
    assert all(math.isnan(v) for v in ood_scores(bad, good).values())
    assert len(ood_scores(good, bad)) == 6
    assert ood_scores(good, good)["auroc_information"] == 0.5


def test_a_crash_between_the_tables_repeats_nothing(whole, tmp_path, monkeypatch):
    add = table.add

    def failing(path, rows, *columns):
        if path.name == "runs.csv":
            raise RuntimeError("the machine died")
        add(path, rows, *columns)

    with monkeypatch.context() as patch:
        patch.setattr(table, "add", failing)
        with pytest.raises(RuntimeError, match="died"):
            run_study(PLAN, tmp_path, FAST)
    assert rows_of(tmp_path)  # evaluated, but not finished
    assert run_study(PLAN, tmp_path, FAST).finished == 3
    assert len(table.read(tmp_path / "robustness.csv")) == len(rows_of(tmp_path)) == 28
    assert rows_of(tmp_path) == rows_of(whole)


def test_machines_are_merged(whole, tmp_path):
    for part in ("dp-sgd", "-sigma2-"):
        run_study(PLAN, tmp_path / part, replace(FAST, only=part))
    merge(tmp_path / "all", [tmp_path / "dp-sgd", tmp_path / "-sigma2-"])
    expected = {k: r for k, r in rows_of(whole).items() if not k[0].startswith("dp-ivon")}
    assert rows_of(tmp_path / "all") == expected
    merge(tmp_path / "all", [tmp_path / "dp-sgd"])
    assert len(table.read(tmp_path / "all" / "robustness.csv")) == 14


def test_what_is_missing_is_missed_before_training(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(Stack, "train", lambda *a: pytest.fail("trained first"))
    monkeypatch.setattr(beyond, "DEBIAN", tmp_path)
    with pytest.raises(ArgumentError, match=r"lacks t10k-images.*Fashion-MNIST"):
        run_study(PLAN, tmp_path / "out", replace(FAST, data=tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        plan = replace(PLAN, evaluate=Evaluation(("jpeg_compression",), (1,)))
        with pytest.raises(ArgumentError, match="needs Pillow"):
            run_study(plan, tmp_path / "out2", FAST)


@pytest.mark.slow
def test_a_bare_machine_is_enough(whole, tmp_path):
    wanted = replace(WANTED, ood=("held-out",))
    replace(PLAN, runs=PLAN.runs[1:2], evaluate=wanted).write(tmp_path / "plan.json")
    command = [sys.executable, "-c", BARE, str(tmp_path / "plan.json"), str(tmp_path / "out"), "8", "60"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, there = rows_of(tmp_path / "out"), rows_of(whole)
    assert len(found) == 2 * 6
    assert found == {key: there[key] for key in found}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": (1,)}, "classes"),
        ({"classes": (1, 1, 2)}, "classes"),
        ({"classes": (1, 10)}, "classes"),
        ({"classes": ()}, r"held-out.*no class is held out"),
        ({"split": "tuning"}, "never sees"),
        ({"dataset": "fashion-mnist"}, "is what the study learns"),
    ],
)
def test_plans_that_cannot_be(changes, words):
    with pytest.raises(ArgumentError, match=words):
        replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((("snow",), (1,)), "corruptions='snow'"),
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
