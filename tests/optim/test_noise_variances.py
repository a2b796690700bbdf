"""Corrections for the noise's variance, against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dpivon.optim.curvature import ESTIMATORS, EmpiricalBayes, Evidence, estimate, matrix, memory_of, remembered
from dpivon.optim.point import CORRECTED
from dpivon.optim.steady import calm_step
from dpivon.optim.tensors import TensorList

SHAPES = [torch.Size((4, 3)), torch.Size((5,))]


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(values: Tensor, mean: Tensor | float, errors: float = 4.5) -> None:
    """Each coordinate's sample mean [n, …] is the closed form to a few of its standard errors."""
    off = (values.mean(0) - mean).abs() / (values.std(0) / math.sqrt(len(values)))
    assert float(off.max()) < errors


def evidence_of(g: Any, variance: Any, memory: dict[str, Any], t: Any = 3, column: bool = False) -> Evidence[Any]:
    number = (lambda x: torch.full((len(g), 1), x, dtype=torch.float64)) if column else (lambda x: x)
    return Evidence(
        g=g,
        g_squared=g.square(),
        g_perturbation=g * 0.1,
        noise_variance=variance,
        hess=g.square() + 1.0,
        ess=number(50.0),
        weight_decay=number(0.01),
        batch_size=number(8.0),
        t=t,
        decay=number(0.9),
        memory=memory,
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_of_a_stack_agree_with_lists_of_tensors(name: str) -> None:
    estimator = ESTIMATORS[name]
    steps = [[normals(*s, seed=10 * t + i) for i, s in enumerate(SHAPES)] for t in range(3)]

    def lists(told: Any) -> Tensor:
        memory: Any = {
            n: TensorList([torch.zeros(s, dtype=torch.float64) for s in SHAPES]) for n in memory_of(estimator)
        }
        for t, g in enumerate(steps, 1):
            evidence = remembered(estimator, evidence_of(TensorList(g), told, memory, [t, t]))
            memory = evidence.memory
        return flat(estimate(estimator, evidence))

    def rows(told: Tensor) -> Tensor:
        memory: Any = {n: torch.zeros(1, 17, dtype=torch.float64) for n in memory_of(estimator)}
        for t, g in enumerate(steps, 1):
            evidence = remembered(estimator, evidence_of(flat(g)[None], told, memory, torch.tensor(t), column=True))
            memory = evidence.memory
        return estimate(estimator, evidence, [matrix(s) for s in SHAPES])[0]

    torch.testing.assert_close(rows(torch.tensor([[0.3]], dtype=torch.float64)), lists(0.3), rtol=1e-12, atol=1e-12)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


# ---- closed forms, where coordinates differ by factors of a hundred, and change on the way


S2 = torch.logspace(-2, 0, 6, dtype=torch.float64)


def test_the_projection_leaves_its_share_of_each_coordinates_own_noise() -> None:
    g = S2.sqrt() * normals(200_000, 6)
    left = ESTIMATORS["gradsq-corrected"](evidence_of(g, S2.expand_as(g), {}))
    share = 2 * math.exp(-0.5) / math.sqrt(2 * math.pi)
    close(left / 50.0, share * S2)


@pytest.mark.parametrize("signal", [0.0, 0.3])
def test_averages_are_unbiased_and_know_their_error_while_variances_change(signal: float) -> None:
    """a_t has mean ḡ² and, without a signal, the standard deviation that it states, in every coordinate."""
    estimator, n = EmpiricalBayes(), 20_000
    memory: Any = {name: torch.zeros(n, 1, 6, dtype=torch.float64) for name in memory_of(estimator)}
    for t in range(1, 9):
        told = (S2 if t < 5 else S2.flip(0)).expand(n, 1, 6)
        g = signal + told.sqrt() * normals(n, 1, 6, seed=t)
        evidence = remembered(estimator, evidence_of(g, told, memory, t))
        memory = evidence.memory
    a = estimator.average(evidence)[:, 0]
    close(a, signal**2)
    if signal == 0.0:
        error = estimator.standard_error(evidence)[:, 0]
        close(a.square(), error[0].square())
        present = S2.flip(0) * math.sqrt(2 * 0.1 / 1.9 * (1 + 0.9**8) / (1 - 0.9**8))
        assert float((error[0] / present).max()) > 3.0  # what the present variances alone would have claimed


def test_empirical_bayes_has_the_squared_error_of_a_wiener_filter_for_each() -> None:
    """With noise e_i² and spread τ² the mean squared error is the mean of λ_i e_i², less than one λ for all can have."""
    rows, tau = 400, 0.5
    e2 = S2.repeat(rows, 100).view(1, rows, 600)
    v = 2.0 + tau * normals(1, rows, 600, seed=1)
    a = v + e2.sqrt() * normals(1, rows, 600, seed=2)
    memory = {"second": a * (1 - 0.9**3), "fourth": e2 / 2 * (1 - 0.9**3) ** 2}
    got = EmpiricalBayes().moment(evidence_of(torch.zeros_like(a), e2, memory))
    expected = float((tau**2 * S2 / (tau**2 + S2)).mean())
    off = float((got - v).square().mean())
    assert off == pytest.approx(expected, rel=0.02)
    one = float(S2.mean())
    assert off < 0.8 * tau**2 * one / (tau**2 + one)


def test_adambc_is_unbiased_for_the_clean_second_moment_of_each_coordinate() -> None:
    n, signal = 100_000, 0.5
    hyper = {"beta2": 0.9, "floor": -math.inf, "relative_floor": 0.0}
    state: Any = {"second": torch.zeros(n, 6, dtype=torch.float64)}
    psi = CORRECTED
    columns = {key: torch.full((n, 1), value, dtype=torch.float64) for key, value in hyper.items()}
    for t in range(1, 5):
        g = signal + S2.sqrt() * normals(n, 6, seed=t)
        value, state = psi.update(state, g, t=torch.tensor(t), noise_variance=S2.expand(n, 6), hyper=columns)
    # The projection at κ s² = 0 is taken off: what is tested is the correction.
    close(state["second"] / (1 - 0.9**4), signal**2)
    assert bool((value >= 0).all())


def test_the_calm_step_is_noise_of_the_same_size_in_every_coordinate() -> None:
    """Without a signal the step is α z/1, whatever the coordinate's own variance."""
    g = S2.sqrt() * normals(50_000, 6)
    zero = torch.zeros_like(g)
    step = calm_step(zero, g, zero, lr=0.1, noise_variance=S2.expand_as(g), decay=0.0, nu=0.0)
    close(step.square(), 0.01)
