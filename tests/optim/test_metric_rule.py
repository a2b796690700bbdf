"""The metric as a rule: what D is, that it follows from Lagrange's rule, and that noise alone does not move it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dpivon import ArgumentError, FactoredMetric
from dpivon.optim.curvature import matrix
from dpivon.optim.metric import MEMORY, Factors, flat, of_tensors, starting
from dpivon.optim.tensors import TensorList

SHAPES = [torch.Size((6, 5)), torch.Size((4,)), torch.Size((3, 2, 2, 2))]


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learned(metric: FactoredMetric, gradients: list[list[Tensor]], noise_variance: Any = 0.0) -> list[Tensor]:
    """D after these gradients, one list a step."""
    memory: Any = starting(gradients[0])
    for t, g in enumerate(gradients, 1):
        evidence = metric.evidence(memory, TensorList(g), noise_variance=noise_variance, t=t)
        memory = evidence.memory
    made = of_tensors(metric.factors(evidence))
    return [f.full(g.shape) for f, g in zip(made, gradients[0], strict=True)]


def rank_one(seed: int) -> list[Tensor]:
    """Second moments v that are row times column in every tensor, within a factor of two or so."""
    out = []
    for i, shape in enumerate(SHAPES):
        rows, columns = matrix(shape)
        r, c = (1 + 0.4 * torch.tanh(normals(n, seed=seed + 2 * i + k)) for k, n in enumerate((rows, columns)))
        out.append((0.5 + i) * torch.outer(r, c).reshape(shape))
    return out


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_without_noise_d_is_the_power_of_v_that_leaves_the_clipped_norm_as_it_was(power: float) -> None:
    v = rank_one(1)
    d = learned(FactoredMetric(power=power), [[x.sqrt() for x in v]] * 3)
    together, scale = (torch.cat([x.flatten() for x in values]) for values in (v, d))
    torch.testing.assert_close(scale / scale[0], (together / together[0]) ** -power, rtol=1e-9, atol=0.0)
    torch.testing.assert_close((scale.square() * together).sum(), together.sum(), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize(("power", "weight"), [(0.25, 0.0), (0.5, 1.0)])
def test_no_other_d_of_that_norm_has_less_noise(power: float, weight: float) -> None:
    """Σ s²/D² for 1/4, Σ s²/(D² v) for 1/2, over perturbations that keep Σ D² v."""
    v = torch.cat([x.flatten() for x in rank_one(2)])
    d = torch.cat([x.flatten() for x in learned(FactoredMetric(power=power), [[x.sqrt() for x in rank_one(2)]])])
    noise = lambda d: float((1 / (d.square() * v**weight)).sum())  # noqa: E731
    for seed in range(20):
        other = d * torch.exp(0.1 * normals(len(v), seed=seed))
        other *= ((d.square() * v).sum() / (other.square() * v).sum()).sqrt()
        assert noise(d) < noise(other)
    assert noise(d) < noise(torch.ones_like(d))


def test_d_stays_within_its_bound() -> None:
    g = [torch.tensor([[1e-8, 1e8], [1.0, 0.0]], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    for bound in (2.0, 10.0):
        d = torch.cat([x.flatten() for x in learned(FactoredMetric(bound=bound), [g])])
        assert bool(torch.isfinite(d).all())
        assert 1.0 < float(d.max() / d.min()) <= bound**2 * (1 + 1e-9)


@pytest.mark.parametrize(("power", "caution"), [(0.25, 3.0), (0.5, 3.0), (0.25, 0.0), (0.5, 0.0)])
def test_noise_alone_does_not_move_d_where_there_is_a_floor(power: float, caution: float) -> None:
    """Releases of pure noise, each with the variance that the D before it gave it."""
    metric, s2, shapes = FactoredMetric(power=power, caution=caution), 0.04, [torch.Size((32, 64)), torch.Size((10,))]
    worst, d = 0.0, [torch.ones(s, dtype=torch.float64) for s in shapes]
    memory: Any = starting(d)
    for t in range(1, 121):
        g = [math.sqrt(s2) * normals(*s, seed=2 * t + i) / x for i, (s, x) in enumerate(zip(shapes, d, strict=True))]
        told = TensorList([s2 / x.square() for x in d])
        evidence = metric.evidence(memory, TensorList(g), noise_variance=told, t=t)
        memory = evidence.memory
        if t % metric.every == 0:
            d = [f.full(s) for f, s in zip(of_tensors(metric.factors(evidence)), shapes, strict=True)]
            scale = torch.cat([x.flatten() for x in d])
            worst = max(worst, float(scale.max() / scale.min()))
    assert (worst < 1.4) if caution else (worst > 3.0)


def test_rows_of_a_stack_have_the_metric_that_each_would_have_alone() -> None:
    metric, runs, steps = FactoredMetric(), 3, 4
    sizes = [s.numel() for s in SHAPES]
    g = normals(steps, runs, sum(sizes), seed=3)
    told = 0.1 + normals(runs, sum(sizes), seed=4).square()
    powers = torch.tensor([0.25, 0.5, 0.5], dtype=torch.float64).view(-1, 1, 1)
    memory: Any = {name: torch.zeros_like(g[0]) for name in MEMORY}
    decay = torch.full((runs, 1), metric.decay, dtype=torch.float64)
    for t in range(1, steps + 1):
        evidence = metric.evidence(memory, g[t - 1], noise_variance=told, t=torch.tensor(t), decay=decay)
        memory = evidence.memory
    got = flat(metric.factors(evidence, [matrix(s) for s in SHAPES], powers))
    for k in range(runs):
        parts = [[x.view(s) for x, s in zip(row[k].split(sizes), SHAPES, strict=True)] for row in g]
        variance = TensorList([x.view(s) for x, s in zip(told[k].split(sizes), SHAPES, strict=True)])
        alone = learned(FactoredMetric(power=float(powers[k])), parts, variance)
        torch.testing.assert_close(got[k], torch.cat([x.flatten() for x in alone]), rtol=1e-9, atol=0.0)


def test_factors_are_found_in_a_d_that_has_them() -> None:
    for shape in (*SHAPES, torch.Size(())):
        rows, columns = matrix(shape)
        full = torch.outer(normals(rows).exp(), normals(columns, seed=1).exp()).reshape(shape)
        torch.testing.assert_close(Factors.of(full).full(shape), full, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("power", 0.0),
        ("power", 2.0),
        ("decay", 1.0),
        ("every", 0),
        ("bound", 1.0),
        ("bound", 1e30),
        ("caution", -1.0),
        ("power", math.nan),
    ],
)
def test_a_metric_that_is_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}="):
        FactoredMetric(**{name: value})
