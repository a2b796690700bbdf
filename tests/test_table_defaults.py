"""The rule for tables, and that every door follows it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dpivon.defaults import table_defaults
from dpivon.integrations.sklearn import DPIVONClassifier, DPIVONRegressor
from dpivon.models import OrdinalMLP, TableMLP
from dpivon.train import load, resolve, train


@pytest.mark.parametrize("n", [1, 107, 5000, 60_000, 10**7])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 8.0, 100.0])
def test_it_is_a_run_that_can_be_made(n: int, epsilon: float) -> None:
    rule = table_defaults(n, epsilon)
    assert 1 <= rule.batch_size <= min(n, 2048)
    assert 1.0 <= rule.lr <= 3.5
    assert 2.0 <= rule.max_grad_norm <= 10.0
    assert rule.hidden == (() if n * min(epsilon, 2) < 30_000 else (64,))
    assert rule.epochs * math.ceil(n / rule.batch_size) >= 90


def test_more_steps_are_not_made_with_smaller_batches() -> None:
    assert table_defaults(10_000, 1.0, 100).epochs == 1
    assert table_defaults(10_000, 1.0).epochs == 20


def test_a_linear_network_begins_at_zero() -> None:
    assert not any(p.any() for p in TableMLP(5, 3).parameters())
    assert all(p.any() for p in TableMLP(5, 3, (4,)).parameters())


def test_ordered_classes_are_cut_from_one_score() -> None:
    net = OrdinalMLP(5, 4, (3,))
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    at_most = net(x).exp().cumsum(1)  # P(y ≤ k) = σ(t_k − s)
    score = TableMLP.forward(net, x)
    torch.testing.assert_close(at_most[:, 3], torch.ones(6))
    torch.testing.assert_close(at_most[:, :3], torch.sigmoid(torch.tensor([0.25, 0.5, 0.75]).logit() - score))
    assert torch.isfinite(net(1e6 * x)).all()
    assert OrdinalMLP(5, 4)(x).exp().allclose(torch.tensor(0.25))


def table(folder: Path) -> dict[str, object]:
    (folder / "rows.csv").write_text("a,y\n0.5,no\n")
    known = {"target": "y", "columns": {"a": {"min": 0, "max": 1}}, "classes": ["no", "yes"]}
    return {"data": str(folder / "rows.csv"), "epsilon": 1.0, "delta": 1e-5, "dataset_size": 5000, **known}


def test_train_follows_it_and_arguments_win(tmp_path: Path) -> None:
    rule, given = table_defaults(5000, 1.0), table(tmp_path)
    config = resolve(given)
    names = ("method", "network", "hidden", "max_grad_norm", "lr", "batch_size", "epochs")
    assert [getattr(config, name) for name in names] == [getattr(rule, name) for name in names]
    own = resolve({**given, "max_grad_norm": 1.5, "hidden": [8], "batch_size": 100})
    assert (own.max_grad_norm, own.hidden, own.batch_size, own.method) == (1.5, (8,), 100, "dp-steady")
    assert own.epochs == table_defaults(5000, 1.0, 100).epochs
    assert resolve({**given, "network": "ordinal"}).lr == rule.lr
    for another in ({"method": "dp-adam"}, {"lr": 0.2}, {"network": "mlp"}):
        assert (found := resolve({**given, **another})).network in ("auto", "mlp")
        assert (found.max_grad_norm, found.hidden) == (1.0, (64,))


def test_classes_are_counted_and_answered_alike_where_that_costs_little(tmp_path: Path) -> None:
    given = table(tmp_path)
    assert (resolve(given).prior, resolve(given).cost) == ("count", "balanced")
    plain = [{"cost": {"yes": 1.0}}, {"method": "dp-sgd"}, {"dataset_size": 1999}, {"classes": list("abcdef")}]
    assert all((found := resolve({**given, **some})).prior is None and found.cost != "balanced" for some in plain)
    assert resolve({**given, "prior": {"yes": 0.1}}).cost == {}


@pytest.mark.slow
def test_a_rare_class_is_recognised_by_default(tmp_path: Path) -> None:
    """16 % positives that overlap the others: the most probable class would be 'no' for nearly every row."""
    draw = np.random.default_rng(1)
    for name, n in (("rows.csv", 5000), ("test.csv", 2000)):
        x = draw.normal(size=(n, 3)).clip(-4, 4)
        ill = draw.random(n) < 1 / (1 + np.exp(2 - x @ [0.8, -0.6, 0.4]))
        lines = [",".join([*(f"{v:.3f}" for v in row), ["no", "yes"][int(y)]]) for row, y in zip(x, ill, strict=True)]
        (tmp_path / name).write_text("\n".join(["a,b,c,y", *lines]))
    given = {"data": str(tmp_path / "rows.csv"), "test": str(tmp_path / "test.csv"), "out": str(tmp_path / "run")}
    given |= {"columns": {name: {"min": -4, "max": 4} for name in "abc"}, "target": "y", "classes": ["no", "yes"]}
    known = {"epsilon": 1.0, "delta": 1e-5, "dataset_size": 5000, "seed": 0, "accountant": "rdp"}
    summary = train(resolve({**given, **known}))
    assert summary["epsilon"] <= 1.0
    assert summary["metrics"]["decided_balanced_accuracy"] > 0.63
    assert summary["metrics"]["recall(yes)"] > 0.55
    published = load(tmp_path / "run")
    unsure = published.predict(published.description.inputs.read(given["test"], None).inputs).mutual_information.mean()
    free = 7  # of the 14 weights: adding the same to both classes changes nothing
    assert free / 2 / 5000 / 4 < unsure < 4 * free / 2 / 5000  # p/(2N) is what Bayesian asymptotics expect


def test_scikit_learn_follows_it() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 4))
    y = (X[:, 0] > 0).astype(int)
    made = DPIVONClassifier(epsilon=3.0, delta=1e-4, classes=[0, 1], bounds=(-1.0, 1.0)).fit(X, y)
    assert isinstance(made.model_, TableMLP)
    assert made.n_iter_ == 100
    assert made.budget_.batch_size == 300
    assert made.score(X, y) > 0.85
    classifier = DPIVONClassifier(epsilon=3.0, method="dp-sgd")
    assert classifier._settings(300, 3.0).method == "dp-sgd"
    regression = DPIVONRegressor(epsilon=3.0)._settings(300, 3.0)
    assert (regression.method, regression.lr) == ("dp-steady", pytest.approx(1.05))
