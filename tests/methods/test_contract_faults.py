"""The contract's check of privacy, on a method with a fault sown into it."""

from __future__ import annotations

from typing import Any

import torch
from method_trials import data, same, start, with_frozen_releases

from dpivon import Release
from dpivon.optim import RuleOptimizer
from dpivon.optim.point import SGD


def test_a_look_at_the_private_sums_is_seen(monkeypatch: Any) -> None:
    """An optimizer that goes behind the boundary's back, by a millionth."""

    class Leaky(RuleOptimizer):
        def step(self, closure: Any = None, *, release: Release | None = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(1e-6 * p.summed_grad.to(p.dtype))
            return super().step(closure, release=release)

    trials = []
    for batch in (data(seed=0), data(seed=50)):
        trial = start("dp-sgd")
        trial.optimizer.original_optimizer = Leaky(trial.learner.model.parameters(), SGD(), lr=0.1)
        with_frozen_releases(trial, batch, monkeypatch)
        trials.append(trial)
    assert not same(*trials)
