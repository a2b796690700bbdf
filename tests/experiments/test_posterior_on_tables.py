"""Predictors of runs on tables: what a run leaves is what a stack of the library leaves, and verdicts follow their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiments.posterior import small
from experiments.posterior.__main__ import TABLES, Table, counted
from experiments.tables.train import Net, Spec, train

from dpivon.stacked import Run, Stack
from dpivon.stacked.networks import AnyNetwork


@pytest.mark.parametrize("method", ["dp-sgd", "dp-ivon-gradsq", "dp-steady"])
def test_iterates_and_widths_are_those_of_a_stack(method: str) -> None:
    """On whole batches with next to no noise; IVON's θ is drawn, so its step is made short."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.rand(40, 5, generator=g) * 2 - 1, torch.randint(3, (40,), generator=g)
    net, steps, lr = Net(5, 3, 7, 1.0), 6, 1e-6 if method == "dp-ivon-gradsq" else 1.0
    watch = small.Watch(steps)
    last, _ = train(net, [Spec(method, lr, 0.5)], x, y, sigma=1e-9, batch=40, steps=steps, seed=3, watch=watch)
    assert len(watch.seen) == 4
    assert torch.equal(watch.seen[-1], last)
    if method == "dp-steady":
        assert not watch.std.any()
        return
    run = Run(method, 3, 1e-9, 0.5, lr, 40, {"ema": 1 - 10 / (steps + 10)})
    stack = Stack([run], AnyNetwork(net.module), x, y, start=net.start(3)[None], steps=steps)
    for _ in stack.train(steps):
        pass
    torch.testing.assert_close(watch.std, stack.std, rtol=1e-3, atol=1e-5)
    assert bool((watch.std > 0).any()) is (method != "dp-sgd")


def test_counts_follow_their_rows() -> None:
    t = Table(Path(small.RESULTS) / "small.csv", TABLES[1])
    _, higher, every = counted(t, ["iterates"])
    for row in t.rows:
        if row["predictor"] == "iterates":
            row["nll"] = str(float(row["nll"]) - 1.0)
    assert higher > 0
    assert counted(t, ["iterates"]) == (every, 0, every)
