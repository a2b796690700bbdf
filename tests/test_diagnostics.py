"""Diagnostics against numbers worked out by hand, and against what a pure-noise gradient must show."""

from __future__ import annotations

import csv
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon import IVON, DpivonError, PrivacyEngine, PrivacyError, Release
from dpivon.diagnostics import Diagnostics, Spread
from dpivon.posterior import Posterior


def released(gradient: torch.Tensor, variance: float, optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """What Diagnostics needs of a private optimizer, and nothing else."""
    p = optimizer.param_groups[0]["params"][0]
    return SimpleNamespace(original_optimizer=optimizer, last_release=Release({p: gradient}, variance))


def stepped_ivon(n: int = 4) -> IVON:
    p = nn.Parameter(torch.zeros(n))
    optimizer = IVON([p], lr=0.0, ess=100.0, weight_decay=0.25, hess_init=1.0, curvature="gradsq")
    with optimizer.sampled_params(train=True):
        p.grad = torch.zeros(n)
    optimizer.step()
    return optimizer


def private(optimizer_of, sigma: float = 1.0, n: int = 32):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    x, y = torch.randn(n, 5), torch.randint(3, (n,))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer_of(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    return model, optimizer, loader


def test_row_by_hand() -> None:
    optimizer = stepped_ivon()
    p = optimizer.param_groups[0]["params"][0]
    optimizer.state[p]["hess"] = torch.tensor([0.75, 3.75, 1.75, 0.0])
    row = Diagnostics(released(torch.tensor([1.0, -2.0, 3.0, 0.0]), 4.0, optimizer)).observe()
    assert row.step == 1
    assert row.private
    assert row.gradient_rms == pytest.approx(math.sqrt(14 / 4))
    assert row.noise_std == 2.0
    assert row.projected_share == 0.75  # 1, 4 and 0 do not pass 4
    assert row.noise_to_signal == math.inf  # 14/4 − 4 < 0: no signal to be seen
    assert (row.hess.min, row.hess.median, row.hess.max) == (0.0, 0.75, 3.75)
    assert row.hess.mean == pytest.approx(6.25 / 4)
    # σ = 1/√(100 (h + 0.25)): 0.1, 0.05, 0.0707…, 0.2
    assert row.std.min == pytest.approx(0.05)
    assert row.std.max == pytest.approx(0.2)
    assert row.std.mean == pytest.approx((0.1 + 0.05 + 0.1 / math.sqrt(2) + 0.2) / 4)


def test_noise_to_signal_is_the_ratio_of_variances() -> None:
    row = Diagnostics(released(torch.tensor([3.0, 3.0, 3.0, 3.0]), 3.0, stepped_ivon())).observe()
    assert row.noise_to_signal == pytest.approx(3 / (9 - 3))
    assert row.projected_share == 0.0


def test_pure_noise_is_projected_with_probability_of_one_standard_deviation() -> None:
    n, s = 1_000_000, 0.03
    g = torch.randn(n, generator=torch.Generator().manual_seed(0)) * s
    row = Diagnostics(released(g, s**2, stepped_ivon(n))).observe()
    expected = math.erf(math.sqrt(0.5))  # 0.6827
    assert row.projected_share == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / n))
    assert row.noise_to_signal > 1 / (
        5 * math.sqrt(2 / n)
    )  # the estimate of the signal is within 5 standard errors of 0


def test_known_signal_is_recovered() -> None:
    n, s, signal = 1_000_000, 0.1, 0.05
    g = torch.randn(n, generator=torch.Generator().manual_seed(1)) * s + signal
    row = Diagnostics(released(g, s**2, stepped_ivon(n))).observe()
    assert row.noise_to_signal == pytest.approx(s**2 / signal**2, rel=0.03)


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 12_345])
def test_quantiles_are_those_of_the_sorted_numbers(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    spread = Spread.of([values[: n // 2], values[n // 2 :]])
    ordered = sorted(values.tolist())
    for q, got in ((0.01, spread.p01), (0.5, spread.median), (0.99, spread.p99)):
        assert sum(v <= got for v in ordered) >= q * n
        assert sum(v < got for v in ordered) < q * n
    assert (spread.min, spread.max) == (ordered[0], ordered[-1])
    assert spread.mean == pytest.approx(sum(ordered) / n, abs=1e-6)


def test_more_numbers_than_torch_quantile_takes() -> None:
    n = 2**24 + 10
    spread = Spread.of([torch.arange(n, dtype=torch.int32)])
    assert spread.median == math.ceil(n / 2) - 1
    assert spread.p99 == math.ceil(0.99 * n) - 1


def test_a_private_run_is_watched_through_its_releases_only() -> None:
    model, optimizer, loader = private(lambda params: IVON(params, lr=0.1, ess=32))
    diagnostics = Diagnostics(optimizer)
    with pytest.raises(DpivonError, match="before the first step"):
        diagnostics.observe()
    for x, y in loader:
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p in optimizer.params:  # whatever is in p.grad, it is not what is read
            p.grad = torch.full_like(p, math.nan)
        row = diagnostics.observe()
        g = torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()])
        assert row.private
        assert row.noise_std == pytest.approx(1 / 8)
        assert row.gradient_rms == pytest.approx(float(g.square().mean().sqrt()), rel=1e-5)
        assert row.projected_share == float((g.abs() <= 1 / 8).double().mean())
        posterior_std = torch.cat([t.flatten() for t in optimizer.posterior().std.values()])
        assert row.std.mean == pytest.approx(float(posterior_std.mean()), rel=1e-5)
    assert [row.step for row in diagnostics.rows] == [1, 2, 3, 4]
    assert diagnostics.observe() is diagnostics.rows[-1]  # no new release, no new row
    assert len(diagnostics.rows) == 4


def test_the_inner_optimizer_is_refused_because_its_gradients_may_be_raw() -> None:
    _, optimizer, _ = private(lambda params: IVON(params, lr=0.1, ess=32))
    with pytest.raises(PrivacyError, match="raw gradients"):
        Diagnostics(optimizer.original_optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_other_optimizers_leave_the_posterior_columns_empty(kind) -> None:
    model, optimizer, loader = private(lambda params: kind(params, lr=0.1))
    diagnostics = Diagnostics(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        row = diagnostics.observe()
        assert 0 < row.projected_share < 1
        assert math.isnan(row.hess.mean)
        assert math.isnan(row.std.median)
    assert [row.step for row in diagnostics.rows] == [1, 2, 3, 4]


def test_without_privacy_rows_say_so() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = IVON([p], lr=0.1, ess=10.0)
    diagnostics = Diagnostics(optimizer)
    with pytest.raises(DpivonError, match="without a gradient"):
        diagnostics.observe()
    with optimizer.sampled_params(train=True):
        (p * torch.tensor([3.0, 4.0, 0.0])).sum().backward()
    optimizer.step()
    row = diagnostics.observe(step=17)
    assert row.step == 17
    assert not row.private
    assert row.gradient_rms == pytest.approx(math.sqrt(25 / 3))
    assert row.noise_to_signal == 0.0
    assert row.projected_share == pytest.approx(1 / 3)  # the exact zero
    assert math.isfinite(row.hess.mean)


def test_noise_free_releases_are_not_called_private() -> None:
    row = Diagnostics(released(torch.ones(4), 0.0, stepped_ivon())).observe()
    assert not row.private


def test_csv_has_every_number(tmp_path) -> None:
    diagnostics = Diagnostics(released(torch.tensor([1.0, -2.0, 3.0, 0.0]), 4.0, stepped_ivon()))
    with pytest.raises(DpivonError, match="without rows"):
        diagnostics.to_csv(tmp_path / "rows.csv")
    row = diagnostics.observe()
    diagnostics.to_csv(tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["private"] == "True"
    assert float(line["projected_share"]) == row.projected_share
    assert float(line["noise_to_signal"]) == math.inf
    assert float(line["hess_p99"]) == row.hess.p99
    assert float(line["std_median"]) == row.std.median


def test_width_by_layer() -> None:
    q = Posterior(
        {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.tensor([1.0, 9.0]), "b": torch.tensor([0.25])}
    )
    layers = Diagnostics.by_layer(q)
    assert list(layers) == ["a", "b"]
    assert (layers["a"].min, layers["a"].mean, layers["a"].max) == (1.0, 2.0, 3.0)
    assert layers["b"].median == 0.5


def test_only_optimizers_are_accepted() -> None:
    with pytest.raises(DpivonError, match="is no optimizer"):
        Diagnostics(nn.Linear(1, 1))
