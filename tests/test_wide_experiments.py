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
from experiments.leaderboard.wide.heads import ACCOUNTANT, Arm, best_arm, trained_heads
from experiments.leaderboard.wide.learn import WideLearning
from experiments.leaderboard.wide.network import HEAD, UNIT, as_kept, balanced, features, load_wide, wide

from dpivon.priors.features import flat
from dpivon.priors.learning import state_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wide") / "w.npz"
    learning = WideLearning(Settings("spectra", 1e9, 2, 16, pool=32, fresh=8, every=4, warmup=2), CPU)
    learning.fill()
    learning.learn(out, 1e9)
    return out


def split() -> Split:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, 32, 32, generator=g), torch.randint(0, 10, (40,), generator=g)
    return Split("validation", x, y, x[:8], y[:8], x[8:16], y[8:16])


def test_learning_goes_on_for_longer_and_features_have_their_unit(prior: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.npz"
    for path in (prior, state_of(prior)):
        (tmp_path / path.name).write_bytes(path.read_bytes())
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
    # A new schedule from this network: its weights, but neither its steps nor its projection.
    other.begin_from(out)
    assert other.step == 0
    theirs, ours = other.model.network.stem.weight, learning.model.network.stem.weight.detach()
    assert torch.equal(theirs, as_kept({"w": ours})["w"])
    # Rounded to a 31st of the filter's largest weight, and once only.
    assert bool(((theirs - ours).abs() <= ours.abs().amax((1, 2, 3), keepdim=True) / 62 * 1.001).all())
    torch.testing.assert_close(as_kept({"w": theirs})["w"], theirs, rtol=1e-6, atol=0)
    assert not torch.equal(other.model.projection[0].weight, learning.model.projection[0].weight)


@pytest.mark.parametrize("places", [1, 4])
def test_balancing_the_head_leaves_the_function_and_gives_it_its_size(places: int) -> None:
    torch.manual_seed(0)
    network, x = wide(True, places), torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(network.features(x).unflatten(1, (64, -1)).mean(2), network.maps(x).mean((2, 3)))
    with torch.no_grad():
        network.head.weight.mul_(30.0)
        before = network(x)
        after = balanced(network)(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert float(network.head.weight.detach().square().mean().sqrt()) == pytest.approx(HEAD / places, rel=1e-5)
    torch.nn.init.zeros_(network.head.weight)
    assert torch.equal(balanced(network)(x), network.head.bias.expand(4, 10))


@pytest.mark.slow
def test_both_phases_together_spend_epsilon(prior: Path, tmp_path: Path) -> None:
    cell = private.Cell("w", 2.0, "dp-steady", 1.25, 0, 8, 2, 2, 2, 0.4, 2, "dp-sgd", 1.0)
    a = argparse.Namespace(head_steps=2, work=tmp_path, prior=prior, toy=True, until=float("inf"))
    group = private.Group([cell, replace(cell, seed=1, head_method="flat-dp-steady", head_lr=3.5)], split(), a)
    stack = group.train()
    assert stack is not None
    for row in group.rows(stack):
        assert 0.98 * 2.0 < row["epsilon_spent"] <= 2.0
        assert set(row) == set(private.COLUMNS)
    by_itself = private.epsilon([group.heads[0].cost(group.head_sigmas[0])], DELTA, ACCOUNTANT)
    assert 0.98 * 0.8 < by_itself <= 0.8
    # The head that was released is the one that training goes on from, also after a restart.
    first = group.networks()[0].head.weight
    assert torch.equal(first, private.Group(group.cells, split(), a).networks()[0].head.weight)
    assert not torch.equal(first, group.networks()[1].head.weight)


def test_a_head_learned_in_flat_coordinates_is_one_of_features_as_they_are() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(60, 4, generator=g) * torch.tensor([9.0, 1.0, 0.3, 0.1]) + 2,
        torch.randint(0, 10, (60,), generator=g),
    )
    mean, matrix = flat(x)
    runs = [Arm(3.0, "flat-dp-steady", 3.5, 20).run("test", 1.0, len(x))]
    (ours,), (theirs,) = trained_heads(runs, 20, x, y, (mean, matrix)), trained_heads(runs, 20, (x - mean) @ matrix, y)
    torch.testing.assert_close(ours(x), theirs((x - mean) @ matrix), rtol=1e-3, atol=1e-4)
    assert float(ours(x).detach().std(0).min()) > 1e-3


def test_arms_are_chosen_by_validation_rows_alone() -> None:
    keys = ("prior", "split", "epsilon", "method", "lr", "steps", "accuracy")
    head = {"share": "0.2", "head_method": "dp-sgd", "head_lr": "3.0"}
    other = dict(zip(keys, ("w", "validation", "1.0", "dp-adam", "0.1", "40", "0.9"), strict=True))
    table = [other | head | {"places": "4"}] + [
        dict(zip(keys, row, strict=True)) | head | {"places": "2"}
        for row in (
            ("w", "validation", "1.0", "dp-sgd", "0.1", "40", "0.5"),
            ("w", "validation", "1.0", "dp-sgd", "0.3", "40", "0.6"),
            ("w", "validation", "1.0", "dp-steady", "1.25", "40", "0.7"),
            ("w", "test", "1.0", "dp-adam", "0.001", "40", "0.9"),
            ("w", "validation", "3.0", "dp-adam", "0.002", "40", "0.8"),
        )
    ]
    given, theirs = "0.35:dp-sgd:1", (0.2, "dp-sgd", 3.0)
    best = [("w", "dp-sgd", 0.3, *theirs), ("w", "dp-steady", 1.25, *theirs)]
    assert private.arms(["best"], table, 1.0, "w", 2, given) == best
    words = ["chosen", "dp-sgd:1", "dp-sgd:2@0.1:dp-adam:3", "dp-sgd:4@0", "dp-sgd:5@scratch"]
    assert private.arms(words, table, 1.0, "w", 2, given) == [
        ("w", "dp-steady", 1.25, *theirs),
        ("w", "dp-sgd", 1.0, 0.35, "dp-sgd", 1.0),
        ("w", "dp-sgd", 2.0, 0.1, "dp-adam", 3.0),
        ("w", "dp-sgd", 4.0, 0.0, "", 0.0),
        ("scratch", "dp-sgd", 5.0, 0.0, "", 0.0),
    ]
    assert best_arm(table, "w", 2, 1.0) == Arm(1.0, "dp-steady", 1.25, 40)
    assert best_arm(table, "other", 2, 1.0) == Arm(1.0)
    with pytest.raises(SystemExit, match="no validation rows at ε=8"):
        private.arms(["best"], table, 8.0, "w", 2, given)


def test_the_page_is_what_the_tables_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    report.main()
