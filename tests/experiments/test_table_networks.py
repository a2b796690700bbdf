"""Residual networks and learned starts for tables: clipped sums, the command at toy size, and the committed page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from experiments.leaderboard.priors import tables
from experiments.tables import networks
from experiments.tables.train import HIDDEN, Net, Residual, Spec, train
from torch.nn import functional as F


@pytest.mark.parametrize("given", [{}, {"measured": 4, "embedded": 2}])
def test_clipped_sums_are_those_of_single_examples(given):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(20, 9, generator=generator), torch.randint(3, (20,), generator=generator)
    net, bound = Residual(9, 3, width=8, **given), torch.tensor([0.2, 50.0])
    theta = torch.stack([net.start(0), net.start(1)])
    for row, c, ours in zip(theta, bound, net.clipped_sums(theta, x, y, bound), strict=True):
        total = torch.zeros_like(row)
        for i in range(len(x)):
            own = row[None].clone().requires_grad_()
            (g,) = torch.autograd.grad(F.cross_entropy(net.taps(own, x[i : i + 1])[0][0], y[i : i + 1]), own)
            total += g[0] * min(1.0, float(c / g.norm()))
        torch.testing.assert_close(ours, total, rtol=1e-4, atol=1e-5)


def test_a_learned_start_has_a_head_of_zero_and_a_prior_around_it():
    net = networks.network("prior", "mixed", 5, 2, learn=3)
    weight, bias, *head = (p[0] for p in net.parts(net.start(2)[None]))
    assert torch.equal(weight, networks.learned(5, 2, 3)[0])
    assert torch.equal(bias, networks.learned(5, 2, 3)[1])
    assert not any(p.any() for p in head)
    usual = Net(5, 2, HIDDEN, 3.0)
    assert not torch.equal(weight, usual.parts(usual.start(2)[None])[0][0])
    mean, variance = net.prior(2)
    assert torch.equal(mean, net.start(2))
    assert bool((variance > 0).all())
    x, y = torch.rand(30, 5, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    still = train(net, [Spec("dp-steady", 1e-9, 1.0)], x, y, sigma=1.0, batch=10, steps=2, seed=2, prior=True)[0]
    torch.testing.assert_close(still[0], mean)


def test_random_functions_have_both_labels():
    generator = torch.Generator().manual_seed(0)
    labels = networks.functions(networks.columns(200, 7, generator), 30, generator)
    assert set(labels.unique().tolist()) == {-1.0, 1.0}
    assert bool(((labels > 0).float().mean(0) > 0.15).all())


def test_the_command_trains_what_has_no_rows(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for part in ("train", "validation", "test"):
        arrays |= {f"{part}_x": rng.uniform(-1, 1, (60, 9)), f"{part}_y": rng.integers(0, 2, 60)}
    np.savez(tmp_path / "categories.npz", **arrays)
    table = tmp_path / "rows.csv"
    command = f"--data {tmp_path} --table {table} --tables categories --epsilons 1 --rates 0.5 2 --steps 3 --learn 2"
    networks.main([*command.split(), "--seeds", "1"])
    rows = tables.read(table)
    arms = {"linear", "mlp", "residual", "embedding", "zero", "start", "prior"}
    assert [row["arm"] for row in rows if row["seed"] == "1"] == sorted(arms, key=[r["arm"] for r in rows].index)
    assert len(rows) == 3 * len(arms)
    assert all(0.9 < float(row["epsilon_spent"]) <= 1.0001 and row["commit"] and row["torch"] for row in rows)
    networks.main([*command.split(), "--seeds", "2"])
    again = tables.read(table)
    assert again[: len(rows)] == rows
    assert len(again) == 4 * len(arms)


def test_the_page_is_what_the_report_writes():
    text = (networks.HERE / "README.md").read_text()
    committed = text.split(networks.BEGIN)[1].split(networks.END)[0].strip()
    assert committed == networks.page(tables.read(networks.RESULTS)).strip()
