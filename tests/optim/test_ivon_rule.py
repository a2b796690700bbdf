"""The pure update rule and the curvature estimators, against their definitions and their expectations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpivon import IVON
from dpivon.optim.curvature import CorrectedSquaredGradient, Evidence, Reparameterised, SquaredGradient
from dpivon.optim.ivon_rule import IVONState, ivon_update, std, variance
from dpivon.optim.rule import debias as debias_factor
from dpivon.optim.tensors import TensorList

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def state_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> IVONState[Tensor]:
    return IVONState(
        mean=normal(shape, seed, dtype),
        momentum=normal(shape, seed + 1, dtype),
        hess=normal(shape, seed + 2, dtype).exp(),
    )


def listed(states: list[IVONState[Tensor]]) -> IVONState[TensorList]:
    return IVONState(*(TensorList([getattr(s, field) for s in states]) for field in ("mean", "momentum", "hess")))


def evidence(g: Any, hess: Any, *, perturbation: Any = None, ess: Any = 50.0, variance: Any = 0.0) -> Evidence[Any]:
    return Evidence(
        g=g,
        g_squared=g.square(),
        g_perturbation=None if perturbation is None else g * perturbation,
        noise_variance=variance,
        hess=hess,
        ess=ess,
        weight_decay=0.01,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip_radius", [math.inf, 0.5])
@pytest.mark.parametrize("with_curvature", [True, False])
def test_a_list_of_tensors_computes_bit_for_bit_like_each_tensor(
    dtype: torch.dtype, clip_radius: float, with_curvature: bool
) -> None:
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "clip_radius": clip_radius}
    states = [state_of(shape, 10 * i, dtype) for i, shape in enumerate(SHAPES)]
    gradients = [normal(shape, 100 + i, dtype) for i, shape in enumerate(SHAPES)]
    targets = [normal(shape, 200 + i, dtype) for i, shape in enumerate(SHAPES)]
    debias = [debias_factor(0.9, t) for t in (1, 2, 5, 9)]
    together = ivon_update(
        listed(states), TensorList(gradients), TensorList(targets) if with_curvature else None, debias=debias, **rates
    )
    for i, (state, g, h_hat) in enumerate(zip(states, gradients, targets, strict=True)):
        alone = ivon_update(state, g, h_hat if with_curvature else None, debias=debias[i], **rates)
        for field in ("mean", "momentum", "hess"):
            assert torch.equal(getattr(together, field)[i], getattr(alone, field)), field
    sigmas = std(TensorList([s.hess for s in states]), ess=50.0, weight_decay=0.01)
    for state, sigma in zip(states, sigmas, strict=True):
        assert torch.equal(sigma, std(state.hess, ess=50.0, weight_decay=0.01))


@pytest.mark.parametrize("estimator", [Reparameterised(), SquaredGradient(), CorrectedSquaredGradient()], ids=type)
def test_an_estimator_computes_bit_for_bit_alike_on_lists_and_tensors(estimator: Any) -> None:
    gs = [normal(shape, i) for i, shape in enumerate(SHAPES)]
    hs = [normal(shape, 20 + i).exp() for i, shape in enumerate(SHAPES)]
    epsilons = [normal(shape, 40 + i) for i, shape in enumerate(SHAPES)]
    together = estimator(evidence(TensorList(gs), TensorList(hs), perturbation=TensorList(epsilons), variance=0.3))
    for g, h, epsilon, ours in zip(gs, hs, epsilons, together, strict=True):
        assert torch.equal(ours, estimator(evidence(g, h, perturbation=epsilon, variance=0.3)))


def test_the_update_is_the_written_equation_coordinate_by_coordinate() -> None:
    m, s, h, g, h_hat = 0.7, -0.2, 1.5, 0.3, -2.0
    lr, beta1, beta2, delta, t = 0.1, 0.9, 0.95, 0.02, 3
    tensors = [torch.tensor(v, dtype=torch.float64) for v in (m, s, h, g, h_hat)]
    new = ivon_update(
        IVONState(*tensors[:3]),
        tensors[3],
        tensors[4],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=delta,
        debias=debias_factor(beta1, t),
    )
    new_s = beta1 * s + (1 - beta1) * g
    new_h = beta2 * h + (1 - beta2) * h_hat + (1 - beta2) ** 2 * (h - h_hat) ** 2 / (2 * (h + delta))
    new_m = m - lr * (new_s / (1 - beta1**t) + delta * m) / (new_h + delta)
    assert float(new.momentum) == pytest.approx(new_s, rel=1e-14)
    assert float(new.hess) == pytest.approx(new_h, rel=1e-14)
    assert float(new.mean) == pytest.approx(new_m, rel=1e-14)
    assert float(variance(tensors[2], ess=40.0, weight_decay=delta)) == pytest.approx(1 / (40 * (h + delta)), rel=1e-14)


def test_stacked_models_equal_single_runs_with_their_own_hyperparameters() -> None:
    k, shape, steps = 4, (3, 2), 25
    lr = [0.01, 0.1, 0.5, 0.03]
    beta1 = [0.0, 0.9, 0.5, 0.99]
    beta2 = [0.9, 0.999, 1.0, 0.5]
    decay = [0.0, 1e-3, 0.1, 1.0]
    ess = [10.0, 100.0, 1e4, 1.0]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).reshape(k, 1, 1)

    estimator = Reparameterised()
    singles = [state_of(shape, 10 * i, torch.float64) for i in range(k)]
    stacked = IVONState(*(torch.stack([getattr(s, f) for s in singles]) for f in ("mean", "momentum", "hess")))

    def observe(hess: Tensor, g: Tensor, noise: Tensor, ess: Any, decay: Any) -> Tensor:
        perturbation = noise * std(hess, ess=ess, weight_decay=decay)
        return estimator(Evidence(g, g.square(), g * perturbation, 0.0, hess, ess, decay))

    for t in range(1, steps + 1):
        g = normal((k, *shape), 1000 + t, torch.float64)
        noise = normal((k, *shape), 2000 + t, torch.float64)
        stacked = ivon_update(
            stacked,
            g,
            observe(stacked.hess, g, noise, column(ess), column(decay)),
            lr=column(lr),
            beta1=column(beta1),
            beta2=column(beta2),
            weight_decay=column(decay),
            debias=column([debias_factor(b, t) for b in beta1]),
        )
        singles = [
            ivon_update(
                single,
                g[i],
                observe(single.hess, g[i], noise[i], ess[i], decay[i]),
                lr=lr[i],
                beta1=beta1[i],
                beta2=beta2[i],
                weight_decay=decay[i],
                debias=debias_factor(beta1[i], t),
            )
            for i, single in enumerate(singles)
        ]
    for i, single in enumerate(singles):
        for field in ("mean", "momentum", "hess"):
            torch.testing.assert_close(getattr(stacked, field)[i], getattr(single, field), rtol=1e-12, atol=1e-14)


@given(
    x=st.floats(1e-4, 1e4),
    decay=st.one_of(st.just(0.0), st.floats(1e-6, 10.0)),
    h_hat=st.floats(-1e8, 1e8),
    beta2=st.floats(0.0, 1.0),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_precision_stays_positive_whatever_the_sign_of_the_target(
    x: float, decay: float, h_hat: float, beta2: float
) -> None:
    h = torch.tensor(x - decay, dtype=torch.float64)  # x = h + δ > 0: h itself may be negative
    before = float(h + decay)
    zero = torch.zeros((), dtype=torch.float64)
    new = ivon_update(
        IVONState(zero, zero, h),
        zero,
        torch.tensor(h_hat, dtype=torch.float64),
        lr=0.1,
        beta1=0.9,
        beta2=beta2,
        weight_decay=decay,
    )
    after = float(new.hess + decay)
    assert after >= before / 2 * (1 - 1e-6)


@pytest.mark.parametrize("h_hat", [1e30, -1e30])
def test_beta2_of_one_leaves_the_curvature_alone_even_where_its_square_would_overflow(h_hat: float) -> None:
    state = state_of((4,), 0)
    new = ivon_update(state, normal((4,), 5), torch.full((4,), h_hat), lr=0.1, beta1=0.9, beta2=1.0, weight_decay=0.0)
    assert torch.equal(new.hess, state.hess)


def test_debias_factor_undoes_the_zero_start_of_the_momentum() -> None:
    s = torch.zeros((), dtype=torch.float64)
    g = torch.tensor(1.7, dtype=torch.float64)
    for t in range(1, 8):
        s = 0.9 * s + 0.1 * g
        assert float(s / debias_factor(0.9, t)) == pytest.approx(1.7, rel=1e-12)
    assert debias_factor(0.0, 1) == 1.0
    assert debias_factor(1.0, 5) == 1.0


def test_reparameterised_estimator_is_unbiased_for_a_quadratics_hessian() -> None:
    """ĥ_j = Σ_k A_jk ε_k ε_j/σ_j² + c_j ε_j/σ_j²: mean A_jj, with the variance computed below."""
    n, decay, ess = 200_000, 0.01, 30.0
    a = torch.tensor([[2.0, 0.3, -0.4], [0.3, 0.5, 0.1], [-0.4, 0.1, 1.0]], dtype=torch.float64)
    c = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)  # the gradient at the mean
    hess = torch.tensor([0.7, 1.5, 3.0], dtype=torch.float64)
    sigma = std(hess, ess=ess, weight_decay=decay)
    epsilon = normal((n, 3), 3, torch.float64) * sigma
    g = epsilon @ a + c
    h_hat = Reparameterised()(Evidence(g, g.square(), g * epsilon, 0.0, hess, ess, decay))
    ratio = sigma.square()[None, :] / sigma.square()[:, None]
    spread = (a.square() * ratio).sum(1) + a.diagonal().square() + c.square() / sigma.square()
    bound = 5 * (spread / n).sqrt()
    assert ((h_hat.mean(0) - a.diagonal()).abs() <= bound).all()
    torch.testing.assert_close(h_hat.var(0), spread, rtol=0.05, atol=0.0)


def test_a_step_without_a_sample_gives_the_reparameterised_estimator_nothing_to_say() -> None:
    assert Reparameterised()(evidence(torch.ones(2), torch.ones(2))) is None


def test_corrected_squared_gradient_is_the_projected_difference_elementwise() -> None:
    g = torch.tensor([0.0, 0.1, -0.1, 0.25, -3.0], dtype=torch.float64)
    s2, ess = 0.01, 200.0
    ours = CorrectedSquaredGradient()(evidence(g, torch.ones_like(g), ess=ess, variance=s2))
    expected = [ess * max(x * x - s2, 0.0) for x in g.tolist()]
    assert ours.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    uncorrected = SquaredGradient()(evidence(g, torch.ones_like(g), ess=ess, variance=s2))
    assert uncorrected.tolist() == pytest.approx([ess * x * x for x in g.tolist()], rel=1e-12)
    without_noise = CorrectedSquaredGradient()(evidence(g, torch.ones_like(g), ess=ess))
    assert torch.equal(without_noise, uncorrected)


def test_corrected_squared_gradient_has_the_stated_bias_at_zero_signal() -> None:
    """E[max(s²(z² − 1), 0)] = 2 φ(1) s², and the second moment follows from ∫_{|z|>1} (z² − 1)² φ = 4 (φ(1) + 1 − Φ(1))."""
    n, s, ess = 400_000, 0.3, 20.0
    g = s * normal((n,), 11, torch.float64)
    h_hat = CorrectedSquaredGradient()(evidence(g, torch.ones_like(g), ess=ess, variance=s * s))
    density = math.exp(-0.5) / math.sqrt(2 * math.pi)
    mean = 2 * density * s**2 * ess
    second = 4 * (density + 0.5 * math.erfc(1 / math.sqrt(2))) * (s**2 * ess) ** 2
    assert 2 * density == pytest.approx(0.484, abs=1e-3)
    assert abs(float(h_hat.mean()) - mean) <= 5 * math.sqrt((second - mean**2) / n)
    assert float(h_hat.square().mean()) == pytest.approx(second, rel=0.05)
    plain = SquaredGradient()(evidence(g, torch.ones_like(g), ess=ess, variance=s * s))
    assert abs(float(plain.mean()) - s**2 * ess) <= 5 * math.sqrt(2 / n) * s**2 * ess


def test_beta2_of_one_leaves_the_curvature_alone_even_where_the_target_overflows():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = IVON(
        [p], lr=0.25, ess=1e30, beta1=0.0, beta2=1.0, weight_decay=0.0, curvature="gradsq", rescale_lr=False
    )
    p.grad = torch.tensor([1e5, 1.0, 0.0])  # 1e30 · 1e10 is beyond fp32
    optimizer.step()
    assert p.tolist() == [1 - 0.25e5, 0.75, 1.0]
    assert optimizer.state[p]["hess"].tolist() == [1.0, 1.0, 1.0]
