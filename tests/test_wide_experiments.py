"""WRN-16-4 from a prior: what is learned, kept and spent."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.leaderboard.priors.data import Split
from experiments.leaderboard.priors.learn import Settings
from experiments.leaderboard.priors.private import DELTA
from experiments.leaderboard.wide import private, report
from experiments.leaderboard.wide.heads import Arm, best_arm
from experiments.leaderboard.wide.learn import WideLearning
from experiments.leaderboard.wide.network import UNIT, features, load_wide

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wide") / "w.safetensors"
    learning = WideLearning(Settings("spectra", 1e9, 2, 16, pool=32, fresh=8, every=4, warmup=2), CPU)
    learning.fill()
    learning.learn(out, 1e9)
    return out


def split() -> Split:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, 32, 32, generator=g), torch.randint(0, 10, (40,), generator=g)
    return Split("validation", x, y, x[:8], y[:8], x[8:16], y[8:16])


def test_learning_goes_on_for_longer_and_features_have_their_unit(prior: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    out.write_bytes(prior.read_bytes())
    learning = WideLearning(Settings("spectra", 1e9, 4, 16, pool=32, fresh=8, every=8, warmup=2), CPU)
    learning.fill()
    assert learning.learn(out, 1e9)
    assert learning.step == 4
    seen = features(load_wide(out, toy=True), learning.shown())
    torch.testing.assert_close(seen.mean(0), torch.zeros(64), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.std(0), torch.full((64,), UNIT), rtol=1e-3, atol=0)
    other = WideLearning(replace(learning.settings, process="leaves"), CPU)
    with pytest.raises(SystemExit, match="is of spectra"):
        other.restore(out)


@pytest.mark.slow
def test_both_phases_together_spend_epsilon(prior: Path, tmp_path: Path) -> None:
    cell = private.Cell("w", 2.0, "dp-steady", 1.25, 0, 8, 2, 2, 0.4, 2)
    a = argparse.Namespace(heads=None, work=tmp_path, prior=prior, toy=True, until=float("inf"))
    group = private.Group([cell, replace(cell, seed=1)], split(), a)
    stack = group.train()
    assert stack is not None
    for row in group.rows(stack):
        assert 0.98 * 2.0 < row["epsilon_spent"] <= 2.0
        assert set(row) == set(private.COLUMNS)
    by_itself = private.epsilon([group.heads[0].cost(group.head_sigmas[0])], DELTA, "rdp")
    assert 0.98 * 0.8 < by_itself <= 0.8
    # The head that was released is the one that training goes on from, also after a restart.
    first = group.networks()[0].head.weight
    assert torch.equal(first, private.Group(group.cells, split(), a).networks()[0].head.weight)
    assert not torch.equal(first, group.networks()[1].head.weight)


def test_arms_are_chosen_by_validation_rows_alone() -> None:
    keys = ("prior", "split", "epsilon", "method", "lr", "steps", "accuracy")
    table = [
        dict(zip(keys, row, strict=True))
        for row in (
            ("w", "validation", "1.0", "dp-sgd", "0.1", "40", "0.5"),
            ("w", "validation", "1.0", "dp-sgd", "0.3", "40", "0.6"),
            ("w", "validation", "1.0", "dp-steady", "1.25", "40", "0.7"),
            ("w", "test", "1.0", "dp-adam", "0.001", "40", "0.9"),
            ("w", "validation", "3.0", "dp-adam", "0.002", "40", "0.8"),
        )
    ]
    assert private.arms(["best"], table, 1.0, "w") == [("dp-sgd", 0.3), ("dp-steady", 1.25)]
    assert private.arms(["chosen", "dp-sgd:1"], table, 1.0, "w") == [("dp-steady", 1.25), ("dp-sgd", 1.0)]
    assert best_arm(table, "w", 1.0) == Arm(1.0, "dp-steady", 1.25, 40)
    assert best_arm(table, "other", 1.0) == Arm(1.0)
    with pytest.raises(SystemExit, match="no validation rows at ε=8"):
        private.arms(["best"], table, 8.0, "w")


def test_the_page_is_what_the_tables_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    report.main()
