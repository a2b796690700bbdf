"""Canary audits of three programs from the matrix: what an attacker measures is below what was claimed, or they are refused.

Canary j is the only example whose gradient is along coordinate j. *Many runs*: every release has each canary in it by a fair
coin, at q = 1, and the attacker guesses from its coordinate. *One run*: canaries are in the data by a fair coin, and the
attacker sees the weights after training with the path's own batches and noise (:mod:`dpivon.audit.tier_c`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_case import Net, mapped
from runners import Rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpivon
from dpivon.audit.tier_c import (
    ALPHA,
    DELTA,
    ONE_RUN_ALPHA,
    expected_bound,
    gaussian_epsilon,
    mu_lower_bound,
    one_run_epsilon,
)
from dpivon.privacy.accounting import epsilon

CANARIES, RELEASES, SIGMA = 64, 160, 1.0
MANY, STEPS, GUESSES = 500, 12, 100

#: (model, inputs, targets, one loss per example) for so many canaries
Program = tuple[nn.Module, Any, Tensor, Callable[[Any, Tensor], Tensor]]


def _unit(n: int) -> nn.Linear:
    unit = nn.Linear(n, 1, bias=False)
    nn.init.zeros_(unit.weight)
    return unit


def folded(n: int, *, as_dict: bool) -> Program:
    """Four tokens per example, folded into rows. They point the same way, so clipped apart they would count four times."""

    def run(m, given):
        x = given["x"] if as_dict else given
        return m.unit(x.reshape(-1, n)).view(len(x), -1).mean(1)

    x = 10 * torch.eye(n).unsqueeze(1).repeat(1, 4, 1)
    return Net(run, unit=_unit(n)), {"x": x} if as_dict else x, torch.zeros(n), lambda z, y: z


def bare(n: int) -> Program:
    """A bare [1, n] parameter, summed over its first dimension."""
    net = Net(lambda m, x: (x * m.p.sum(0)).sum(1), p=nn.Parameter(torch.zeros(1, n)))
    return net, 10 * torch.eye(n), torch.zeros(n), lambda z, y: z


def weighted(n: int) -> Program:
    """Class weights in a PerExampleLoss."""
    y = torch.arange(n) % 2
    losses = dpivon.PerExampleLoss(lambda z, y: z.squeeze(1) * torch.tensor([1.0, 9.0])[y]).per_example
    return Net(lambda m, x: m.unit(x), unit=_unit(n)), 10 * torch.eye(n), y, losses


PROGRAMS: dict[tuple[str, str], Callable[[int], Program]] = {
    ("folded rows, dict input", "engine"): lambda n: folded(n, as_dict=True),
    ("folded rows", "fit"): lambda n: folded(n, as_dict=False),
    ("bare parameter", "engine"): bare,
    ("bare parameter", "fit"): bare,
    ("weighted loss", "engine"): weighted,
    ("weighted loss", "fit"): weighted,
}


def engine_run(program: Program, rows: list[int], size: int, steps: int, rate: float) -> tuple[Tensor, Any]:
    """How far a training run in a loop of one's own moves the weights, at a learning rate of 1; and its account."""
    model, inputs, targets, losses = program
    data = Rows((inputs, targets), rows, 0)
    engine = dpivon.PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=1, collate_fn=data.collate),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        dataset_size=size,
        expected_batch_size=rate * size,
    )

    def mean_loss(z: Any, y: Tensor) -> Tensor:
        return losses(z, y).sum() / max(len(y), 1)

    check = getattr(engine, "check", None)
    if check is not None:
        check(mean_loss)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            mean_loss(private(x), y).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    moved = before - nn.utils.parameters_to_vector(model.parameters()).detach()
    return moved * rate * size, engine.accountant.history


def fit_run(program: Program, rows: list[int], size: int, steps: int, rate: float) -> tuple[Tensor, Any]:
    model, inputs, targets, losses = program
    taken = mapped(lambda t: t[rows], (inputs, targets))
    batch = int(rate * size)
    fitted = dpivon.fit(
        model, *taken, lr=1.0, batch_size=batch, epochs=int(steps * rate), delta=DELTA, noise_multiplier=SIGMA,
        dataset_size=size, method="dp-sgd", loss=losses,
    )  # fmt: skip
    before, after = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, fitted.model))
    return (before - after) * batch, fitted.account.history


RUNS = {"engine": engine_run, "fit": fit_run}


def claimed(history: Any) -> float:
    return min(epsilon(history, DELTA, name) for name in ("rdp", "pld"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), PROGRAMS)
def test_many_runs_measure_less_than_is_claimed(name: str, path: str) -> None:
    coins = torch.Generator().manual_seed(7)
    counts = torch.zeros(4, dtype=torch.int64)  # false positives, negatives, misses, positives
    for _ in range(RELEASES):
        inside = torch.rand(CANARIES, generator=coins) < 0.5
        try:
            moved, history = RUNS[path](
                PROGRAMS[name, path](CANARIES), inside.nonzero().flatten().tolist(), CANARIES, 1, 1.0
            )
        except dpivon.DpivonError:
            return  # refused: nothing to measure
        said = moved > 0.5
        counts += torch.stack([(said & ~inside).sum(), (~inside).sum(), (~said & inside).sum(), inside.sum()])
    false, negatives, misses, positives = (int(n) for n in counts)
    audited = gaussian_epsilon(mu_lower_bound(false, negatives, misses, positives, ALPHA), DELTA)
    assert audited <= claimed(history)
    assert audited > 0.5 * expected_bound(SIGMA, RELEASES * CANARIES // 2, DELTA, ALPHA)  # the canaries are not lost


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), PROGRAMS)
def test_one_run_measures_less_than_is_claimed(name: str, path: str) -> None:
    inside = torch.rand(MANY, generator=torch.Generator().manual_seed(3)) < 0.5
    try:
        moved, history = RUNS[path](PROGRAMS[name, path](MANY), inside.nonzero().flatten().tolist(), MANY, STEPS, 0.5)
    except dpivon.DpivonError:
        return
    order = moved.argsort(descending=True)
    half = GUESSES // 2
    correct = int(inside[order[:half]].sum()) + int((~inside[order[-half:]]).sum())
    assert one_run_epsilon(MANY, GUESSES, correct, DELTA, ONE_RUN_ALPHA) <= claimed(history)
    assert correct > 0.6 * GUESSES  # the canaries are not lost
