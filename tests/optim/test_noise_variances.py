"""A noise variance for every coordinate, as clipping in a metric makes it, in every correction that uses one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from dpivon import IVON, ArgumentError, Diagnostics, LangevinDynamics, Release, RuleOptimizer
from dpivon.optim.calm_rule import Calm, calm_step
from dpivon.optim.curvature import ESTIMATORS, EmpiricalBayes, Evidence, estimate, matrix, memory_of, remembered
from dpivon.optim.curvature.averages import SquareAverage
from dpivon.optim.dpagd_rule import ADAMBC, DPAGD
from dpivon.optim.moments import Average, CorrectedSquareAverage
from dpivon.optim.sgld_rule import SGLD
from dpivon.optim.steady_rule import Steady
from dpivon.optim.tensors import TensorList
from dpivon.stacked.rules import POINT_RULES

SHAPES = [torch.Size((4, 3)), torch.Size((5,))]
HYPER = {"lr": 0.1, "ess": 50.0, "batch_size": 8.0, "scale": 0.5, "steps": 10.0}
ELEMENTWISE = {
    **{name: rule for name, rule in POINT_RULES.items() if name not in ("dp-calm", "dp-steady")},
    "dp-calm": Calm(ESTIMATORS["averaged-fisher"]),
    "dp-steady": Steady(ESTIMATORS["averaged-fisher"]),
}


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(values: Tensor, mean: Tensor | float, errors: float = 4.5) -> None:
    """Each coordinate's sample mean [n, …] is the closed form to a few of its standard errors."""
    off = (values.mean(0) - mean).abs() / (values.std(0) / math.sqrt(len(values)))
    assert float(off.max()) < errors


# ---- exactness: what each coordinate would be told alone


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_rule_treats_every_coordinate_as_if_its_variance_were_all_there_is(name: str) -> None:
    rule, hyper = ELEMENTWISE[name], {**ELEMENTWISE[name].defaults, **HYPER}
    mean = [normals(*s, seed=i) for i, s in enumerate(SHAPES)]
    state = rule.start(TensorList(mean), hyper)
    alone = {
        (i, j): rule.start(TensorList([m.flatten()[j]]), hyper) for i, m in enumerate(mean) for j in range(m.numel())
    }
    for t in range(1, 4):
        g, noise = ([normals(*s, seed=10 * t + i + k) for i, s in enumerate(SHAPES)] for k in (3, 5))
        told = [0.5 * normals(*s, seed=10 * t + i).square() for i, s in enumerate(SHAPES)]
        normal = TensorList(noise) if rule.draws else None
        state = rule.step(state, TensorList(g), t=[t, t], noise_variance=TensorList(told), normal=normal, hyper=hyper)
        for (i, j), own in alone.items():
            draw = TensorList([noise[i].flatten()[j]]) if rule.draws else None
            one = TensorList([g[i].flatten()[j]])
            variance = float(told[i].flatten()[j])
            alone[i, j] = rule.step(own, one, t=[t], noise_variance=variance, normal=draw, hyper=hyper)
    for (i, j), own in alone.items():
        for key, value in own.items():
            torch.testing.assert_close(state[key][i].flatten()[j], value[0], rtol=1e-12, atol=1e-14)


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
def test_equal_variances_are_one_variance_and_a_stack_agrees(name: str) -> None:
    """For every estimator, as lists of tensors and as rows; unequal ones must agree between the two as well."""
    estimator = ESTIMATORS[name]
    assert estimator.per_coordinate  # type: ignore[attr-defined]
    steps = [[normals(*s, seed=10 * t + i) for i, s in enumerate(SHAPES)] for t in range(3)]
    equal = [torch.full(s, 0.3, dtype=torch.float64) for s in SHAPES]
    unequal = [0.1 + 0.3 * normals(*s, seed=77).square() for s in SHAPES]

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

    torch.testing.assert_close(lists(TensorList(equal)), lists(0.3), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows(flat(equal)[None]), lists(0.3), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows(torch.tensor([[0.3]], dtype=torch.float64)), lists(0.3), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows(flat(unequal)[None]), lists(TensorList(unequal)), rtol=1e-12, atol=1e-12)


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
        present = SquareAverage.standard_error(estimator, replace(evidence, memory={}))[0, 0]
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
    psi = CorrectedSquareAverage()
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


def test_langevin_noise_is_topped_up_to_one_temperature_in_every_coordinate() -> None:
    rule = SGLD()
    hyper = {"lr": 0.1, "ess": 10.0, "temperature": 1.0, "weight_decay": 0.0}  # 2αT/N = .02, α² s² at most .01
    n = 50_000
    g, extra = (TensorList([x]) for x in (S2.sqrt() * normals(n, 6), normals(n, 6, seed=1)))
    told = TensorList([S2.expand(n, 6).clone()])
    out = rule.step({"mean": g * 0.0}, g, t=[1], noise_variance=told, normal=extra, hyper=hyper)
    close(out["mean"][0].square(), 0.02)


# ---- through the optimizers, and refusals


def release_of(model: nn.Module, variances: bool) -> Release:
    g = {p: normals(*p.shape, seed=i).to(p) for i, p in enumerate(model.parameters())}
    told: Any = {p: 0.1 + normals(*p.shape, seed=9 + i).square().to(p) for i, p in enumerate(model.parameters())}
    return Release(g, told if variances else 0.2, 8.0)


def test_ivon_and_rule_optimizers_hand_the_variances_on() -> None:
    """One step of each, against the rule's own formula written out."""
    model = nn.Linear(4, 3).double()
    release = release_of(model, True)
    ivon = IVON(model.parameters(), lr=0.0, ess=50.0, beta2=0.5, weight_decay=0.01, curvature="gradsq-corrected")
    ivon.bind_to_releases()
    ivon.step(release=release)
    for p in model.parameters():
        g, s2 = release.gradients[p], release.variance[p]  # type: ignore[index]
        h_hat = 50.0 * (g.square() - s2).clamp(min=0.0)
        expected = 0.5 + 0.5 * h_hat + 0.125 * (1.0 - h_hat) ** 2 / 1.01
        torch.testing.assert_close(ivon.state[p]["hess"], expected)
    rule = RuleOptimizer(model.parameters(), ADAMBC, lr=0.0, beta2=0.9, weight_decay=0.0)
    rule.step(release=release)
    for p in model.parameters():
        g, s2 = release.gradients[p], release.variance[p]  # type: ignore[index]
        torch.testing.assert_close(rule.state[p]["second"], 0.1 * (g.square() - s2))


def test_diagnostics_hold_every_coordinate_against_its_own_noise() -> None:
    model = nn.Linear(4, 3).double()

    class Optimizer:
        param_groups: ClassVar[list[Any]] = [{"params": list(model.parameters())}]
        state: ClassVar[dict[Any, Any]] = {}
        last_release = release_of(model, True)

    row = Diagnostics(Optimizer()).observe()
    release = Optimizer.last_release
    g, s2 = flat(release.gradients.values()), flat(release.variance.values())  # type: ignore[union-attr]
    assert row.projected_share == pytest.approx(float((g.square() <= s2).double().mean()))
    assert row.noise_std == pytest.approx(math.sqrt(float(s2.mean())))
    assert row.private


@dataclass(frozen=True)
class Foreign:
    """An estimator of somebody who thought of one variance."""

    name = "foreign"
    elementwise = True
    needs_sample = False

    def __call__(self, evidence: Any) -> Any:
        return evidence.g_squared - evidence.noise_variance


@dataclass(frozen=True)
class ForeignMoment:
    name: ClassVar[str] = "foreign"
    defaults: ClassVar[dict[str, float]] = {}

    def start(self, like: Any, hyper: Any) -> dict[str, Any]:
        return {}

    def update(self, state: Any, g: Any, *, t: Any, noise_variance: Any, hyper: Any) -> Any:
        return g.square() + noise_variance, {}


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: IVON(ps, lr=0.1, ess=10.0, curvature=Foreign()),
        lambda ps: RuleOptimizer(ps, DPAGD(Average(), ForeignMoment()), lr=0.1),
        lambda ps: LangevinDynamics(ps, lr=0.1, ess=10.0),
    ],
    ids=["estimator", "moment", "chain"],
)
def test_whoever_knows_one_variance_only_takes_no_other(make: Any) -> None:
    """One that says nothing of variances is refused, though its formula might have gone through."""
    model = nn.Linear(4, 3).double()
    optimizer = make(model.parameters())
    optimizer.step(release=release_of(model, False))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match="one noise variance"):
        optimizer.step(release=release_of(model, True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_foreign_estimator_is_refused_in_rows_too() -> None:
    g = normals(2, 17)
    with pytest.raises(ArgumentError, match="'foreign'"):
        estimate(Foreign(), evidence_of(g, g.square(), {}, torch.tensor(1), column=True), [matrix(s) for s in SHAPES])
