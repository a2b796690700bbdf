"""SGLD: it samples the posterior it should, at the temperature it says, from what was released and nothing else."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.errors import ArgumentError, DpivonError, PrivacyError
from dpivon.optim.sgld import PSGLD, SGLD, Chain, LangevinDynamics
from dpivon.release import Release

N, DELTA = 50.0, 0.02
HESSIAN = torch.tensor([[1.0, 0.5, 0.0], [0.5, 2.0, 0.3], [0.0, 0.3, 0.6]], dtype=torch.float64)
OPTIMUM = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def stationary(temperature: float, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of θ ← θ − α (H + δ)(θ − μ) + N(0, 2αT/N): mean μ, covariance (T/N) A⁻¹ (I − αA/2)⁻¹ with A = H + δ."""
    eye = torch.eye(3, dtype=torch.float64)
    a = HESSIAN + DELTA * eye
    mean = torch.linalg.solve(a, HESSIAN @ OPTIMUM)
    return mean, torch.linalg.inv(a @ (eye - lr * a / 2)) * temperature / N


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("lr", [0.05, 0.4])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 4.0], ids=lambda s: f"privacy noise makes {s}·T")
def test_it_recovers_a_gaussian_posterior_at_the_right_temperature(share, lr):
    """Mean and covariance of 20000 chains. Below the wanted T the rest is topped up; above, the posterior is tempered."""
    wanted, chains = 0.7, 20000
    generator = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(chains, 3, dtype=torch.float64, generator=generator)  # noqa: E731
    s2 = share * wanted * 2 / (lr * N)  # so that αNs²/2 is this share of T
    rule, hyper = SGLD(), {"lr": lr, "ess": N, "temperature": wanted, "weight_decay": DELTA}
    state = rule.start(normal(), hyper)
    for t in range(1, int(16 / lr)):
        g = (state["mean"] - OPTIMUM) @ HESSIAN + math.sqrt(s2) * normal()
        state = rule.step(state, g, t=t, noise_variance=s2, normal=normal(), hyper=hyper)
    mean, covariance = stationary(max(share, 1.0) * wanted, lr)
    theta = state["mean"]
    assert bool(((theta.mean(0) - mean).abs() < 5 * (covariance.diagonal() / chains).sqrt()).all())
    scale = covariance.diagonal().sqrt()
    error = (torch.cov(theta.T) - covariance) / torch.outer(scale, scale)
    assert float(error.abs().max()) < 5 * math.sqrt(2 / chains)


def test_the_preconditioned_chain_samples_the_same_posterior():
    """Coordinate by coordinate, half of the noise from privacy: neither a forgotten G nor a forgotten α²G²s² would pass."""
    h = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    chains, lr, s2, temperature = 4000, 0.1, 0.04, 1.0
    generator = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(chains, 3, dtype=torch.float64, generator=generator)  # noqa: E731
    rule = PSGLD()
    hyper = {"lr": lr, "ess": N, "temperature": temperature, "weight_decay": 0.0, "beta2": 0.999, "nu": 1e-3}
    state = rule.start(normal() * (temperature / N / h).sqrt(), hyper)
    for t in range(1, 400):
        g = state["mean"] * h + math.sqrt(s2) * normal()
        state = rule.step(state, g, t=t, noise_variance=s2, normal=normal(), hyper=hyper)
    preconditioner = rule.preconditioner(state["second"], t=t, hyper=hyper).mean(0)
    assert float(preconditioner[0] / preconditioner[2]) > 1.4
    implied = lr * N * preconditioner * s2 / 2
    assert 0.25 < float(implied.min()) < float(implied.max()) < temperature  # nowhere tempered
    expected = temperature / N / h / (1 - lr * preconditioner * h / 2)
    assert bool(((state["mean"].var(0) / expected - 1).abs() < 0.12).all())
    assert bool((state["mean"].mean(0).abs() < 5 * (expected / chains).sqrt()).all())


@pytest.mark.slow
def test_a_private_chain_recovers_the_posterior_of_a_regression():
    """Through the engine: privacy noise is all the Langevin noise there is, and the ledger is charged for every step."""
    torch.manual_seed(0)
    n, alpha, bound = 40, 0.4, 25.0
    x = torch.randn(n, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + torch.randn(n, 1, dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()
    sigma = math.sqrt(2 / (alpha * n)) * n / bound  # T = αNσ²C²/(2b²) = 1
    chain = {"burn_in": 200, "thinning": 1, "max_samples": 10**6}
    inner = LangevinDynamics(model.parameters(), lr=alpha, ess=n, temperature=1.0, weight_decay=0.05, **chain)
    engine = dpivon.PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=n),
        noise_multiplier=sigma,
        max_grad_norm=bound,
        noise_generator=torch.Generator().manual_seed(1),
    )
    for _ in range(1500):
        for xb, yb in loader:
            optimizer.zero_grad()
            (0.5 * (private(xb) - yb).square()).mean().backward()
            optimizer.step()
    assert len(engine.accountant) == 1500
    report = inner.temperature()
    assert report.implied == pytest.approx(1.0)
    assert report.tempered == 0.0
    a = x.T @ x / n + 0.05 * torch.eye(2, dtype=torch.float64)
    mean = torch.linalg.solve(a, x.T @ y / n).flatten()
    covariance = torch.linalg.inv(a @ (torch.eye(2, dtype=torch.float64) - alpha * a / 2)) / n
    samples = inner.posterior(model).samples["weight"][:, 0]
    assert len(samples) == 1300
    scale = covariance.diagonal().sqrt()
    effective = (
        1300 * 0.1
    )  # steps that are as good as independent, on the safe side: the slowest mode decays by .7 a step
    assert bool(((samples.mean(0) - mean).abs() < 5 * scale / math.sqrt(effective)).all())
    error = (torch.cov(samples.T) - covariance) / torch.outer(scale, scale)
    assert float(error.abs().max()) < 4 * math.sqrt(2 / effective)


# ---- the temperature


def released(params, variance: float) -> Release:
    return Release({p: torch.zeros_like(p) for p in params}, variance)


@pytest.mark.parametrize("sigma", [0.5, 5.0])
def test_the_report_is_the_formula(sigma):
    """T = αNσ²C²/(2b²), and whether the posterior is tempered."""
    alpha, n, c, b = 0.1, 1000, 0.7, 64
    layer = nn.Linear(3, 2)
    optimizer = LangevinDynamics(layer.parameters(), lr=alpha, ess=n, temperature=1.0)
    optimizer.step(release=released(layer.parameters(), (sigma * c / b) ** 2))
    report = optimizer.temperature()
    assert report.implied == pytest.approx(alpha * n * sigma**2 * c**2 / (2 * b**2))
    assert report.highest == pytest.approx(report.implied)
    assert report.effective == pytest.approx(max(report.implied, 1.0))
    assert report.tempered == (1.0 if report.implied > 1 else 0.0)
    assert ("tempered" in str(report)) == (report.implied > 1)
    assert float(optimizer.posterior(layer).metadata["temperature"]) == pytest.approx(report.effective, rel=1e-4)


def test_the_preconditioned_report_is_by_coordinate():
    layer = nn.Linear(2, 1, bias=False)
    optimizer = LangevinDynamics(
        layer.parameters(), 0.1, 100, temperature=1.0, preconditioned=True, beta2=0.0, nu=0.0, weight_decay=0.0
    )
    optimizer.step(release=Release({layer.weight: torch.tensor([[0.1, 10.0]])}, 0.04))
    report = optimizer.temperature()
    implied = [0.1 * 100 * g * 0.04 / 2 for g in (10.0, 0.1)]  # 2 and 0.02
    assert report.highest == pytest.approx(implied[0], rel=1e-5)
    assert report.implied == pytest.approx(sum(implied) / 2, rel=1e-5)
    assert report.effective == pytest.approx((2 + 1) / 2, rel=1e-5)
    assert report.tempered == 0.5


def test_topping_up_earns_no_privacy_and_the_prior_is_outside_the_clip():
    """The same account whatever T and δ are; what is clipped does not contain the prior."""
    spent, sums = [], []
    for temperature, weight_decay in ((0.0, 0.0), (1e6, 50.0)):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        nn.init.constant_(layer.weight, 10.0)
        inner = LangevinDynamics(layer.parameters(), lr=0.1, ess=20, temperature=temperature, weight_decay=weight_decay)
        engine = dpivon.PrivacyEngine()
        data = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
        private, optimizer, loader = engine.make_private(
            module=layer,
            optimizer=inner,
            data_loader=DataLoader(data, batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=0.1,
        )
        (x,) = next(iter(loader))
        private(x).square().mean().backward()
        optimizer.step()
        spent.append(engine.get_epsilon(1e-5))
        sums.append(layer.weight.summed_grad.clone())
        assert optimizer.last_release.variance == pytest.approx((0.1 / 20) ** 2)
    assert spent[0] == spent[1]
    assert torch.equal(*sums)


# ---- the chain


def test_samples_are_spread_over_the_chain_after_burn_in_and_within_their_memory():
    chain = Chain(burn_in=0.5, thinning=3, max_samples=10, max_bytes=8 * 4 * 8)  # room for 8 samples of 8 floats
    for t in range(1, 1001):
        if chain.due():
            chain.add({0: torch.full((8,), float(t))})
        assert len(chain.kept) <= 8
    times = sorted(chain.samples())
    gaps = {b - a for a, b in itertools.pairwise(times)}
    assert gaps == {chain.interval}
    assert chain.interval % 3 == 0
    assert times[0] > 500
    assert 4 <= len(times) <= 8
    assert times[0] - 500 <= chain.interval
    assert 1000 - times[-1] < chain.interval
    assert all(float(chain.samples()[t][0][0]) == t for t in times)


def test_burn_in_as_a_number_of_steps():
    chain = Chain(burn_in=7, thinning=2, max_samples=100)
    for t in range(1, 14):
        if chain.due():
            chain.add({0: torch.tensor([float(t)])})
    assert sorted(chain.samples()) == [8, 10, 12]


def chain_of(steps: int, **options) -> tuple[nn.Module, LangevinDynamics]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    options = {"burn_in": 0.3, "thinning": 2, "max_samples": 4, **options}
    optimizer = LangevinDynamics(
        layer.parameters(), lr=0.1, ess=10, generator=torch.Generator().manual_seed(0), **options
    )
    run(layer, optimizer, steps)
    return layer, optimizer


def run(layer: nn.Module, optimizer: LangevinDynamics, steps: int) -> None:
    for _ in range(steps):
        optimizer.step(release=Release({p: p.detach() * 0.1 for p in layer.parameters()}, 1e-4))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_resume_is_exact(preconditioned):
    whole, done = chain_of(37, preconditioned=preconditioned)
    half, optimizer = chain_of(18, preconditioned=preconditioned)
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict(), optimizer.generator.get_state()))
    resumed, optimizer = chain_of(0, preconditioned=preconditioned)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.generator.set_state(saved[2])
    run(resumed, optimizer, 19)
    a, b = done.posterior(whole), optimizer.posterior(resumed)
    assert 2 <= len(a) <= 4
    assert all(torch.equal(a.samples[name], b.samples[name]) for name in a.samples)
    assert torch.equal(whole.weight, resumed.weight)
    assert optimizer.temperature() == done.temperature()


def test_kept_samples_are_the_iterates_and_not_views_of_them():
    layer, optimizer = chain_of(0, burn_in=0.0, thinning=1, max_samples=50)
    visited = []
    for _ in range(5):
        run(layer, optimizer, 1)
        visited.append(layer.weight.detach().clone())
    assert torch.equal(optimizer.posterior(layer).samples["weight"], torch.stack(visited))
    assert set(optimizer.posterior().samples) == {"0", "1"}
    with pytest.raises(ArgumentError, match="does not contain"):
        optimizer.posterior(nn.Linear(3, 2))


def test_before_there_are_samples_the_posterior_is_the_iterate():
    layer, optimizer = chain_of(3, burn_in=100)
    q = optimizer.posterior(layer)
    assert len(q) == 1
    assert torch.equal(q.samples["weight"][0], layer.weight)


def test_frozen_parameters_stay_out_of_the_samples():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    optimizer = LangevinDynamics(layer.parameters(), lr=0.1, ess=10, burn_in=0.0, thinning=1)
    run(layer, optimizer, 3)
    assert set(optimizer.posterior(layer).samples) == {"weight"}
    layer.bias.requires_grad_(True)
    with pytest.raises(DpivonError, match="thawed"):
        optimizer.posterior(layer)


def test_a_bf16_model_keeps_full_precision_samples():
    layer = nn.Linear(3, 2).bfloat16()
    optimizer = LangevinDynamics(layer.parameters(), lr=1e-4, ess=1e9, burn_in=0.0, thinning=1)
    run(layer, optimizer, 2)
    samples = optimizer.posterior(layer).samples["weight"]
    assert samples.dtype == torch.float32
    assert not torch.equal(samples, samples.bfloat16().float())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"burn_in": -1}, "burn_in"),
        ({"burn_in": 2.5}, "burn_in"),
        ({"thinning": 0}, "thinning"),
        ({"max_samples": 1}, "max_samples"),
        ({"max_bytes": 40}, "max_bytes"),
        ({"temperature": -1.0}, "temperature"),
        ({"beta2": 0.9}, "beta2"),
        ({"ess": 0}, "ess"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ArgumentError, match=words):
        LangevinDynamics(nn.Linear(3, 2).parameters(), **{"lr": 0.1, "ess": 10, **options})


def test_it_needs_its_own_state_and_a_release_under_privacy():
    layer, optimizer = chain_of(1)
    with pytest.raises(DpivonError, match="no chain"):
        optimizer.load_state_dict(torch.optim.SGD(layer.parameters(), lr=0.1).state_dict())
    optimizer.bind_to_releases()
    with pytest.raises(PrivacyError, match="without a release"):
        optimizer.step()
