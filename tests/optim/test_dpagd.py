"""DPAGD against torch's optimizers, against our own rules, and against the algebra of the paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpivon import Release
from dpivon.optim import RuleOptimizer
from dpivon.optim.curvature import CorrectedSquaredGradient, Evidence
from dpivon.optim.ivon_rule import IVONState, ivon_update
from dpivon.optim.point import (
    ADAGRAD,
    ADAMBC,
    AVERAGE,
    CORRECTED,
    DPAGD,
    GRADIENT,
    PHI,
    PSI,
    RMSPROP,
    SGD,
    SQUARE_AVERAGE,
    Adam,
    dpagd_step,
)

STEPS, WIDTH = 25, 6


def released(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(STEPS, WIDTH, generator=generator, dtype=torch.float64))


def start() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))


def after(optimizer: Any, p: nn.Parameter, variance: float | None = None) -> Tensor:
    for g in released():
        if variance is None:
            p.grad = g.clone()
            optimizer.step()
        else:
            optimizer.step(release=Release({p: g}, variance))
    return p.detach()


def ours(rule: Any, *, lr: float = 0.03, variance: float | None = None, **hyper: float) -> Tensor:
    p = start()
    return after(RuleOptimizer([p], rule, lr=lr, **hyper), p, variance)


def torchs(kind: Any, **options: Any) -> Tensor:
    p = start()
    return after(kind([p], lr=0.03, **options), p)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a, start())


def test_sgd_is_an_instance() -> None:
    same(ours(DPAGD(GRADIENT, PSI["one"]), nu=0.0), torchs(torch.optim.SGD, weight_decay=1e-4))
    momentum = ours(DPAGD(PHI["momentum"], PSI["one"]), nu=0.0)
    same(momentum, torchs(torch.optim.SGD, momentum=0.9, weight_decay=1e-4))
    same(momentum, ours(SGD()))


def test_rmsprop_is_an_instance() -> None:
    same(ours(RMSPROP), torchs(torch.optim.RMSprop, weight_decay=1e-4))


def test_adagrad_is_an_instance() -> None:
    same(ours(ADAGRAD), torchs(torch.optim.Adagrad, weight_decay=1e-4))


def test_adam_is_an_instance() -> None:
    same(ours(DPAGD(AVERAGE, SQUARE_AVERAGE)), torchs(torch.optim.Adam, weight_decay=1e-4))
    same(ours(DPAGD()), ours(Adam()))


def test_the_cap_bounds_v_from_above() -> None:
    """θ after one step in closed form: v = min(g², λ)."""
    g = torch.tensor([0.1, 1.0, -5.0], dtype=torch.float64)
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = g
    RuleOptimizer([p], DPAGD(), lr=0.5, cap=4.0, nu=0.25).step()
    expected = -0.5 * g / (torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64) + 0.25)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=0)


def test_a_small_enough_cap_makes_any_psi_sgd() -> None:
    """min(ψ, λ) = λ everywhere: the step is α g / (√λ + ν)."""
    capped = ours(DPAGD(GRADIENT, SQUARE_AVERAGE), cap=1e-12, nu=1.0)
    same(capped, ours(DPAGD(GRADIENT, PSI["one"]), lr=0.03 / (1e-6 + 1.0), nu=0.0))


def test_gradsq_ivon_is_the_dpagd_step_with_its_own_phi_and_psi() -> None:
    """m − α (s̄ + δ m)/(h + δ) is the step with φ = s̄ + δ m, ψ = (h + δ)², ν = 0 and no cap."""
    delta, ess, s2, beta1, beta2, lr = 0.1, 50.0, 0.3, 0.9, 0.95, 0.02
    m = start().detach()
    state = IVONState(mean=m, momentum=torch.zeros_like(m), hess=torch.full_like(m, 0.7))
    theta = m.clone()
    phi_rule, phi_state = AVERAGE, {"momentum": torch.zeros_like(m)}
    for t, g in enumerate(released(), start=1):
        h_hat = CorrectedSquaredGradient()(
            Evidence(
                g=g,
                g_squared=g**2,
                g_perturbation=None,
                noise_variance=s2,
                hess=state.hess,
                ess=ess,
                weight_decay=delta,
            )
        )
        state = ivon_update(
            state, g, h_hat, lr=lr, beta1=beta1, beta2=beta2, weight_decay=delta, debias=1 - math.pow(beta1, t)
        )
        s_bar, phi_state = phi_rule.update(phi_state, g, t=t, noise_variance=s2, hyper={"beta1": beta1})
        theta = dpagd_step(theta, s_bar + delta * theta, (state.hess + delta).square(), lr=lr)
        torch.testing.assert_close(theta, state.mean, rtol=1e-11, atol=1e-12)


# ---- DP-AdamBC


def test_adambc_follows_its_published_equation() -> None:
    """Written out as in the paper: Δ = m̂ / √max(v̂ − (σC/B)², γ′)."""
    s2, gamma, lr = 0.4, 0.05, 0.03
    theta = start().detach().clone()
    m = v = torch.zeros(WIDTH, dtype=torch.float64)
    floored = 0
    for t, g in enumerate(released(), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        corrected = v / (1 - 0.999**t) - s2
        floored += int((corrected < gamma).sum())
        theta = theta - lr * (m / (1 - 0.9**t)) / corrected.clamp(min=gamma).sqrt()
    assert 0 < floored < STEPS * WIDTH  # both branches of the maximum were taken
    got = ours(ADAMBC, variance=s2, floor=gamma, relative_floor=0.0, weight_decay=0.0)
    torch.testing.assert_close(got, theta, rtol=1e-9, atol=1e-12)


def test_adambc_without_noise_is_adam() -> None:
    same(ours(ADAMBC, variance=0.0, floor=1e-300, nu=1e-8), ours(Adam()))


def test_adambc_reads_the_variance_of_each_release() -> None:
    """A noise schedule: each g² is corrected by the variance that was in it."""
    rule, hyper = CORRECTED, {"beta2": 0.5, "floor": 1e-12, "relative_floor": 0.0}
    state = {"second": torch.zeros(1, dtype=torch.float64)}
    g = torch.tensor([2.0], dtype=torch.float64)
    _, state = rule.update(state, g, t=1, noise_variance=1.0, hyper=hyper)
    psi, _ = rule.update(state, g, t=2, noise_variance=3.0, hyper=hyper)
    assert float(psi) == pytest.approx((0.25 * (4 - 1) + 0.5 * (4 - 3)) / 0.75)


@pytest.mark.parametrize(("floor", "share", "expected"), [(0.3, 0.1, 0.3), (0.1, 0.5, 1.0)])
def test_adambcs_floor_is_the_larger_of_its_two(floor: float, share: float, expected: float) -> None:
    """ψ at g² = s² = 2, where nothing is left: γ, or κ s²; as numbers and as columns."""
    rule, hyper = CORRECTED, {"beta2": 0.9, "floor": floor, "relative_floor": share}
    g = torch.full((1, 2), math.sqrt(2.0), dtype=torch.float64)
    psi, _ = rule.update({"second": torch.zeros_like(g)}, g, t=1, noise_variance=2.0, hyper=hyper)
    assert psi.tolist() == [[expected, expected]]
    columns = {key: torch.tensor([[value]], dtype=torch.float64) for key, value in hyper.items()}
    variance = torch.tensor([[2.0]], dtype=torch.float64)
    psi, _ = rule.update({"second": torch.zeros_like(g)}, g, t=torch.tensor(1), noise_variance=variance, hyper=columns)
    assert psi.tolist() == [[expected, expected]]


def test_adambc_is_unbiased_where_adam_is_not() -> None:
    """ψ over many coordinates of constant signal: E[v̂ − s²] = ḡ², where Adam's ψ has ḡ² + s²."""
    n, signal, s = 200_000, 0.7, 1.0
    generator = torch.Generator().manual_seed(1)
    hyper = {"beta2": 0.9, "floor": 1e-12, "relative_floor": 0.0}
    corrected, plain = CORRECTED, SQUARE_AVERAGE
    state = {"second": torch.zeros(n)}
    raw = {"second": torch.zeros(n)}
    for t in range(1, 4):
        g = signal + s * torch.randn(n, generator=generator)
        _, state = corrected.update(state, g, t=t, noise_variance=s**2, hyper=hyper)
        psi, raw = plain.update(raw, g, t=t, noise_variance=s**2, hyper=hyper)
    unprojected = state["second"] / (1 - 0.9**3)
    error = 5 * float(unprojected.std()) / n**0.5
    assert abs(float(unprojected.mean()) - signal**2) < error
    assert abs(float(psi.mean()) - signal**2 - s**2) < error


# ---- every combination


@pytest.mark.parametrize("phi", PHI)
@pytest.mark.parametrize("psi", PSI)
def test_rows_equal_parameters_for_every_phi_and_psi(phi: str, psi: str) -> None:
    rule = DPAGD(PHI[phi], PSI[psi])
    settings = [
        {"lr": 0.05, **rule.defaults, "cap": 0.5, "nu": 0.1, **({"floor": 0.01} if psi == "corrected" else {})},
        {"lr": 0.01, **rule.defaults, "nu": 0.2, **({"floor": 0.1} if psi == "corrected" else {})},
    ]
    hyper = {key: torch.tensor([[s[key]] for s in settings], dtype=torch.float64) for key in settings[0]}
    variance = torch.tensor([[0.2], [0.4]], dtype=torch.float64)
    state = rule.start(torch.stack([start().detach()] * 2), hyper)
    for t, g in enumerate(released(), start=1):
        rows = torch.stack([g, g])
        state = rule.step(state, rows, t=torch.tensor(t), noise_variance=variance, normal=None, hyper=hyper)
    for i, s in enumerate(settings):
        lr = s.pop("lr")
        alone = ours(rule, lr=lr, variance=float(variance[i]), **s)
        torch.testing.assert_close(state["mean"][i], alone, rtol=1e-11, atol=1e-12)
