"""What the experiments on priors learn, and their plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experiments.leaderboard.priors import learn, private
from experiments.leaderboard.priors.plans import EPSILONS, PLANS, Cell, best_prior, cell_of
from experiments.leaderboard.priors.starts import Starts, hidden_units

from dpivon.privacy.accounting import epsilon


def test_learning_goes_on_where_it_stopped(tmp_path) -> None:
    settings = learn.Settings("spectra", 1e9, 6, batch=16, pool=32, fresh=8, every=4, warmup=2)
    out = tmp_path / "p.safetensors"
    first = learn.Learning(replace(settings), torch.device("cpu"))
    first.fill()
    assert not first.learn(out, limit=0.0)
    second = learn.Learning(settings, torch.device("cpu"))
    second.fill()
    assert second.learn(out, limit=1e9)
    assert second.step == 6
    network = learn.load_prior(out)
    assert not network.head.logits.weight.any()
    torch.testing.assert_close(network.head.hidden.weight, second.model.network.head.hidden.weight.detach())


def test_another_geometry_is_the_same_function() -> None:
    starts, x = Starts({}), torch.randn(5, 3, 32, 32)
    cell = Cell("scratch", 1.0, seed=3)
    plain, scaled = (starts.network(c)(x) for c in (cell, replace(cell, body=2.0, features=0.5)))
    torch.testing.assert_close(plain, scaled, rtol=1e-2, atol=1e-3)  # up to GroupNorm's own constant
    a, b = (hidden_units(starts.network(c), x) for c in (cell, replace(cell, features=2.0)))
    torch.testing.assert_close(2 * a, b)


@pytest.mark.slow
def test_sigmas_spend_what_they_say() -> None:
    for size in (45_000, 50_000):
        for batch, epochs in ((4096, 90), (8192, 150), (16384, 300)):
            rate, steps = batch / size, -(-size // batch) * epochs
            for target in EPSILONS:
                spent = epsilon([(private.sigma(target, rate, steps), rate, steps)], private.DELTA, "rdp")
                assert 0.98 * target < spent <= target


def rows(accuracies: dict[str, float]) -> list[dict[str, str]]:
    found = []
    for start, accuracy in accuracies.items():
        for e in EPSILONS:
            for r in (1.75, 0.9):
                cell = Cell(start, e, lr=r)
                found.append(dict(zip(private.CELL, cell.key, strict=True)))
                found[-1] |= {"split": "validation", "accuracy": str(accuracy + 0.01 * (r == 0.9))}
    return found


def test_choices_read_validation_rows_alone() -> None:
    table = rows({"a": 0.5, "b": 0.6, "scratch": 0.9})
    table += [row | {"split": "test", "accuracy": "0.99"} for row in rows({"a": 0.5})]
    assert best_prior(table) == "b"
    cells = PLANS["views"](table, [])
    assert {(c.start, c.lr, c.views, c.epsilon) for c in cells} == {("b", 0.9, 4, e) for e in EPSILONS}
    assert cell_of(table[0]).key == tuple(table[0][name] for name in private.CELL)


def test_no_two_cells_share_their_noise() -> None:
    cells = PLANS["compare"](rows({"a": 0.5}), ["a", "b"])
    seeds = [c.stream(what) for c in cells for what in ("validation", "test", "validation head")]
    assert len(set(seeds)) == len(seeds)


def test_a_group_fits_the_room_and_loses_no_cell() -> None:
    cells = [Cell("a", e, seed=s, batch=16384) for e in EPSILONS for s in range(5)]
    groups = private.grouped(cells)
    assert sorted(c.key for g in groups for c in g) == sorted(c.key for c in cells)
    assert all(len(g) * 16384 <= private.ROOM for g in groups)
