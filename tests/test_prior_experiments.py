"""Random processes, what is learned from them, and the plans of the experiments on priors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experiments.leaderboard.priors import learn, private
from experiments.leaderboard.priors.plans import EPSILONS, PLANS, Cell, best_prior, cell_of
from experiments.leaderboard.priors.processes import MIXTURES, images
from experiments.leaderboard.priors.starts import Starts, hidden_units
from torch import nn

from dpivon.privacy.accounting import epsilon


def made(name: str, seed: int, n: int = 6, size: int = 20, channels: int = 3) -> torch.Tensor:
    return images(name, n, torch.Generator().manual_seed(seed), size, channels)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_seed_decides_the_images(name: str) -> None:
    first, again, other = made(name, 1), made(name, 1), made(name, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.uint8
    assert len(first.flatten(1).unique(dim=0)) == len(first)  # no two alike


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(("size", "channels"), [(17, 1), (40, 4)])
def test_any_size_and_channels(name: str, size: int, channels: int) -> None:
    x = made(name, 0, 5, size, channels)
    assert x.shape == (5, channels, size, size)
    assert (x.flatten(1).float().std(1) > 5).all()  # none is flat


def test_spectra_fall_with_frequency() -> None:
    power = torch.fft.rfft2(made("spectra", 0, 64, 32).float()).abs().square().mean((0, 1))
    assert power[1:3, 1:3].mean() > 10 * power[12:16, 12:16].mean()


def test_uniformity_is_that_of_all_pairs() -> None:
    z = nn.functional.normalize(torch.randn(9, 5, dtype=torch.float64), dim=1)
    expected = torch.pdist(z).square().mul(-2).exp().mean().log()
    torch.testing.assert_close(learn.uniformity(z), expected)


def test_views_are_of_the_input_range_and_differ() -> None:
    x, draws = made("leaves", 0, 4, 48), torch.rand(8, learn.DRAWS, generator=torch.Generator().manual_seed(0))
    seen = learn.views(torch.cat([x, x]), draws)
    assert seen.shape == (8, 3, 32, 32)
    assert seen.abs().max() <= 2.0
    assert not torch.equal(seen[:4], seen[4:])


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
