"""Bugs of the sums by class (``privacy/counting``): each a line of the source that is rewritten."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record_bugs import RecordBug
from sowing import Patch

from dpivon.privacy import counting
from dpivon.privacy.noise import TorchNoise
from dpivon.privacy.people import People

SIGMA, BOUND = 3.0, 2.0


def noisy(sigma: float, charged: list[Any], people: People | None = None) -> Any:
    return counting.NoisySums(sigma, TorchNoise(torch.Generator().manual_seed(1)), charged.append, people)


def a_person_is_bounded(folder: Path) -> bool:
    """Forty rows of one person, long, short and not finite, are added to three of others."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.randn(3, 4, generator=draw), 9 * torch.rand(40, 4, generator=draw)])
    rows[5, 1], rows[6, 2] = torch.nan, torch.inf
    who = torch.cat([torch.arange(3), torch.full((40,), 3)])
    with_them = noisy(1e-12, [], People(who))(rows, BOUND)
    without = noisy(1e-12, [], People(who[:3]))(rows[:3], BOUND)
    return bool(torch.isfinite(with_them).all()) and float((with_them - without).norm()) <= BOUND * (1 + 1e-5)


def a_row_is_bounded(folder: Path) -> bool:
    found = noisy(1e-12, [])(torch.tensor([[30.0, 40.0], [torch.nan, 1.0]]), BOUND)
    return bool(torch.isfinite(found).all()) and float(found.norm()) <= BOUND * (1 + 1e-5)


def noise_is_as_charged(folder: Path) -> bool:
    charged: list[Any] = []
    found = noisy(SIGMA, charged)(torch.zeros(1, 4000), BOUND)
    terms = [(spec.noise_multiplier, spec.sample_rate) for spec in charged]
    return terms == [(SIGMA, 1.0)] and abs(float(found.std()) / (SIGMA * BOUND) - 1) < 0.1


def as_many_are_made_as_planned(folder: Path) -> bool:
    probs, labels = torch.full((30, 3), 1 / 3), torch.arange(30) % 3
    shares: list[Any] = []
    counts = counting.class_counts(labels, 3, noisy(1.0, shares))
    counting.class_factors(probs, counts, noisy(1.0, shares))
    sets: list[Any] = []
    counting.class_thresholds(probs, labels, 0.9, noisy(1.0, sets))
    planned = counting.shares_cost(1.0, 1e-5, counted=True)[2], counting.sets_cost(1.0, 1e-5)[2]
    return (len(shares), len(sets)) == planned


def rewritten(target: Any, name: str, old: str, new: str) -> Patch:
    """The function with ``old`` in its source replaced by ``new``."""
    source = textwrap.dedent(inspect.getsource(getattr(target, name)))
    assert source.count(old) == 1, f"{name} has changed: the mutant must be written anew"
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), name, "exec"), vars(counting), made)
    return lambda: mock.patch.object(target, name, made[name])


def counting_bugs() -> list[RecordBug]:
    sums, person, row = counting.NoisySums, a_person_is_bounded, a_row_is_bounded
    noise, planned = noise_is_as_charged, as_many_are_made_as_planned

    def of(where: Any, name: str, old: str, new: str) -> Patch:
        return rewritten(where, name, old, new)

    cut = "rows * (bound / rows.norm(dim=1, keepdim=True).clamp_min(bound))"
    mean = "rows / self.people.counts[self.people.of_row].unsqueeze(1)"
    finite = "torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)"
    spec, rounds = "CountSpec(self.sigma, bound, 1.0, 1.0,", "range(ROUNDS)"
    low, sampled = spec.replace("bound", "bound / 2"), spec.replace("1.0, 1.0", "1.0, 0.1")
    sigma = spec.replace("self.sigma", "2 * self.sigma").replace("bound", "bound / 2")
    found = [
        ("rows of a sum by class are not cut", "a row counts any number", sums, "__call__", cut, "rows", row),
        ("a sum by class adds up a person's rows", "a person counts often", sums, "__call__", mean, "rows", person),
        ("a sum by class keeps rows that are not finite", "one row says so", sums, "__call__", finite, "rows", row),
        ("noise of a sum by class for half its bound", "σ is half", sums, "__call__", spec, low, noise),
        ("a sum by class is charged as sampled", "q is 1", sums, "__call__", spec, sampled, noise),
        ("a sum by class is charged at twice its σ", "σ is half", sums, "__call__", spec, sigma, noise),
        ("a sum by class is not charged", "ε is free", sums, "__call__", "self.charge)", "lambda _: None)", noise),
        ("a round of factors too many", "not planned", counting, "class_factors", rounds, "range(1 + ROUNDS)", planned),
        ("a halving too many", "not planned", counting, "class_thresholds", "range(HALVINGS)", "range(9)", planned),
        ("counts are not planned", "σ is small", counting, "shares_cost", "ROUNDS + counted", "ROUNDS", planned),
    ]
    return [RecordBug(name, bug, of(*patch), check) for name, bug, *patch, check in found]
