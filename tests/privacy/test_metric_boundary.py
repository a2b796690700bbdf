"""Clipping in a metric: what is summed, what one example can do to it, what D may know, and what comes out of the boundary."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import ArgumentError, FactoredMetric, PrivacyEngine, PrivacyError
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError
from dpivon.models.standardised import StandardisedConv2d
from dpivon.optim.curvature import matrix
from dpivon.optim.metric import Factors, of_tensors, starting
from dpivon.optim.steady import SteadyOptimizer
from dpivon.optim.tensors import TensorList
from dpivon.privacy import metric as metric_module
from dpivon.privacy.clipping import EPS_NUM, FlatClipping, PerLayerClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.layers import uses
from dpivon.privacy.layers.uses import Outer
from dpivon.privacy.metric import Scaling

N, B, C, SIGMA = 40, 8, 0.5, 0.7
EAGER = FactoredMetric(every=1, caution=0.0)  # a D that moves at every step, whatever it knows


class Words(nn.Module):
    """Embedding, a bare parameter, attention and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, 8), nn.Parameter(0.1 * torch.randn(1, 6, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1)[:, :6].mul(2).long().clamp(0, 6)
        return self.head(
            self.twice(torch.tanh(self.twice(self.encoder(self.embedding(tokens) + self.position).mean(1))))
        )


NETWORKS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ),
    "standardised": lambda: nn.Sequential(StandardisedConv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
    "words": Words,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = NETWORKS[name]().to(dtype)
    return model


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (N,), generator=generator)


def some_metric(params: list[Any], spread: float = 0.8) -> list[Factors]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.exp(spread * torch.randn(*shape, generator=generator, dtype=torch.float64))  # noqa: E731
    out = []
    for p in params:
        rows, columns = matrix(p.shape)
        out.append(Factors(draw(rows, 1).to(p.dtype), draw(1, columns).to(p.dtype)))
    return out


def each_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[list[Tensor]]:
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        yield list(torch.autograd.grad(loss, list(model.parameters())))


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, metric: list[Factors], bound: float) -> list[Tensor]:
    """Σ_i D g_i min(1, C/‖D g_i‖), one example at a time in double."""
    model = copy.deepcopy(model).double()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for gradient in each_gradient(model, x.double(), y):
        stretched = [g * f.full(g.shape).double() for g, f in zip(gradient, metric, strict=True)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in stretched))
        total = [t + g * min(1.0, bound / (norm + EPS_NUM)) for t, g in zip(total, stretched, strict=True)]
    return total


def kept(model: nn.Module, x: Tensor, y: Tensor) -> BookKeeper:
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    return keeper


def clipped_sums(
    model: nn.Module, x: Tensor, y: Tensor, metric: list[Factors] | None, bound: float = C
) -> list[Tensor]:
    keeper = kept(model, x, y)
    out = keeper.clipped_sums(list(model.parameters()), FlatClipping(bound), metric)
    keeper.detach_from_model()
    return out


# ---- what is summed


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("materialised", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_book_keeping_sums_what_a_plain_loop_sums(
    name: str, materialised: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gradients are never made: ghost norms and contractions of A and G, stretched each by itself."""
    if not materialised:
        monkeypatch.setattr(uses, "MEMORY_CAP", 1)
    model, (x, y) = build(name, dtype), data(dtype)
    metric = some_metric(list(model.parameters()))
    made: list[Any] = []
    real = Outer.weighted_sum
    monkeypatch.setattr(Outer, "weighted_sum", lambda self, c: (made.append(self), real(self, c))[1])
    expected = plain_loop(model, x, y, metric, C)
    for got, want in zip(clipped_sums(model, x, y, metric), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert made or name == "standardised"  # row times column is a use of its own, and is not materialised
    if not materialised and name in ("cnn", "words"):
        assert any(use.order is not None for use in made) or name == "words"


def test_one_gradient_too_few_or_a_metric_for_another_layer_is_no_silent_thing() -> None:
    model, (x, y) = build("mlp"), data()
    metric = some_metric(list(model.parameters()))
    with pytest.raises(ValueError, match="zip"):
        clipped_sums(model, x, y, metric[:-1])


@pytest.mark.parametrize("name", ["mlp", "cnn", "words"])
def test_clipping_by_layers_knows_the_metric_too(name: str) -> None:
    model, (x, y) = build(name), data()
    params = list(model.parameters())
    metric, bounds = some_metric(params), tuple(0.1 + 0.05 * i for i in range(len(params)))
    keeper = kept(model, x, y)
    got = keeper.clipped_sums(params, PerLayerClipping(bounds), metric)
    keeper.detach_from_model()
    total = [torch.zeros_like(p) for p in params]
    for gradient in each_gradient(model, x, y):
        for i, (g, f) in enumerate(zip(gradient, metric, strict=True)):
            g = g * f.full(g.shape)
            total[i] = total[i] + g * min(1.0, bounds[i] / (float(g.norm()) + EPS_NUM))
    for t, s in zip(total, got, strict=True):
        torch.testing.assert_close(s, t.detach(), rtol=1e-9, atol=1e-10)


# ---- what one example can do


def moved(model: nn.Module, x: Tensor, y: Tensor, metric_of: Any, bound: float = C) -> float:
    """The largest ‖S(D) − S(D ∖ {x})‖, in the stretched space, in which the noise is the same for all coordinates."""
    whole = clipped_sums(model, x, y, metric_of(x, y), bound)
    worst = 0.0
    for i in (0, len(x) // 2, len(x) - 1):
        rest = torch.arange(len(x)) != i
        less = clipped_sums(model, x[rest], y[rest], metric_of(x[rest], y[rest]), bound)
        worst = max(worst, math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, less, strict=True))))
    return worst


@pytest.mark.parametrize("cap", [None, 1])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_one_example_moves_the_sum_that_gets_the_noise_by_at_most_c(
    name: str, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, at 513 examples whose gradients are the same, under a D that spans four orders of magnitude."""
    if cap is not None:
        monkeypatch.setattr(uses, "MEMORY_CAP", cap)
    model = build(name, torch.float32)
    x, y = data(torch.float32)
    x, y = x[:1].expand(513, -1, -1, -1).clone(), y[:1].expand(513).clone()
    metric = some_metric(list(model.parameters()), spread=2.0)
    full = torch.cat([f.full(p.shape).flatten() for f, p in zip(metric, model.parameters(), strict=True)])
    assert float(full.max() / full.min()) > 1e4
    got = moved(model, x, y, lambda *_: metric, bound=1e-2)
    assert 0.99e-2 < got <= 1e-2 * (1 + 1e-6)


def test_a_d_of_the_batch_at_hand_is_seen_by_that_test() -> None:
    """The seeded bug: D from the sum that is being clipped. Then one example moves everybody's gradient."""
    model, (x, y) = build("mlp"), data()

    def of_this_batch(x: Tensor, y: Tensor) -> list[Factors]:
        summed = plain_loop(model, x, y, [Factors.of(torch.ones_like(p)) for p in model.parameters()], C)
        memory: Any = starting(summed)
        metric = FactoredMetric(caution=0.0, bound=1000.0)
        return of_tensors(metric.factors(metric.evidence(memory, TensorList(summed), noise_variance=0.0, t=1)))

    assert max(moved(model, x[i : i + 10], y[i : i + 10], of_this_batch) for i in range(0, 30, 3)) > 1.5 * C


# ---- through the engine


def trained(
    name: str = "mlp",
    *,
    metric: FactoredMetric | None = EAGER,
    steps: int = 5,
    sigma: float = SIGMA,
    make: Any = None,
    x: Tensor | None = None,
    **options: Any,
) -> Any:
    """The optimizer after some steps, with the D of every step, what was summed and what was released."""
    model = build(name)
    inputs, y = data()
    inputs = inputs if x is None else x
    engine = PrivacyEngine(generator=torch.Generator().manual_seed(1), ledger=options.pop("ledger", None))
    inner = make(model) if make else torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(inputs, y, torch.arange(N)), batch_size=B),
        noise_multiplier=sigma,
        max_grad_norm=C,
        metric=metric,
        **options,
    )
    optimizer.engine, optimizer.log = engine, []
    wrapped = _
    while len(optimizer.log) < steps:
        for batch, labels, index in loader:
            if len(optimizer.log) == steps:
                break
            at, before = copy.deepcopy(model.state_dict()), known(optimizer)
            optimizer.zero_grad()
            loss = lambda: nn.functional.cross_entropy(wrapped(batch), labels).backward()  # noqa: B023, E731
            if isinstance(inner, dpivon.IVON):
                with optimizer.sampled_params(train=True):
                    loss()
            else:
                loss()
            optimizer.step()
            optimizer.log.append((index, at, before, optimizer.last_release))
    return optimizer


def known(optimizer: Any) -> list[Factors] | None:
    return None if optimizer._scaling is None else optimizer._scaling._factors


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_mode_releases_the_plain_loops_gradient_divided_by_d(name: str) -> None:
    """Without noise, so that the release is the sum: step after step, with the D that was known before each."""
    with pytest.warns(dpivon.PrivacyWarning):
        optimizer = trained(name, sigma=0.0)
    x, y = data()
    seen = 0
    for index, at, metric, release in optimizer.log:
        model = build(name)
        model.load_state_dict(at)
        ones = [Factors.of(torch.ones_like(p)) for p in model.parameters()]
        expected = plain_loop(model, x[index], y[index], metric or ones, C)
        for (p, g), s, f in zip(release.gradients.items(), expected, metric or ones, strict=True):
            torch.testing.assert_close(g, s / (B * f.full(p.shape)), rtol=1e-9, atol=1e-10)
        seen += metric is not None
    assert seen == 4
    d = torch.cat([f.full(p.shape).flatten() for f, p in zip(optimizer.log[-1][2], release.gradients, strict=True)])
    assert float(d.max() / d.min()) > 1.5


def test_before_anything_is_known_nothing_differs_to_the_bit() -> None:
    plain, early = (trained("cnn", metric=m) for m in (None, FactoredMetric(every=10**6)))
    for (*_, a), (*_, b) in zip(plain.log, early.log, strict=True):
        assert a.variance == b.variance
        assert all(torch.equal(g, h) for g, h in zip(a.gradients.values(), b.gradients.values(), strict=True))


def test_noise_of_the_stated_variance_is_in_every_coordinate() -> None:
    """g_dp of examples that all are struck, over the stated standard deviation, is N(0, 1)."""
    x = torch.full((N, 2, 4, 4), torch.nan, dtype=torch.float64)  # a gradient that is not finite contributes zero
    optimizer = trained(steps=60, x=x, metric=EAGER)
    ratios, spread = [], []
    for *_, metric, release in optimizer.log[1:]:
        for (p, g), f in zip(release.gradients.items(), metric, strict=True):
            s2 = release.variance[p]
            torch.testing.assert_close(s2, (SIGMA * C / B) ** 2 / f.full(p.shape).square(), rtol=1e-12, atol=0.0)
            ratios.append((g / s2.sqrt()).flatten())
            spread.append(s2.flatten())
    z, s2 = torch.cat(ratios), torch.cat(spread)
    assert float(s2.max() / s2.min()) > 4.0
    assert abs(float(z.mean())) < 4.5 / math.sqrt(len(z))
    assert abs(float(z.square().mean()) - 1.0) < 4.5 * math.sqrt(2 / len(z))
    loud = z[s2 > s2.median()]
    assert abs(float(loud.square().mean()) - 1.0) < 4.5 * math.sqrt(2 / len(loud))


def test_d_is_a_function_of_the_releases_before_it() -> None:
    """Made again from what was published, and from nothing else."""
    metric = FactoredMetric(every=2, caution=0.0)
    optimizer = trained("cnn", steps=6, metric=metric)
    memory: Any = starting([p.detach() for p in optimizer.params])
    expected = None
    for t, (*_, used, release) in enumerate(optimizer.log, 1):
        assert (used is None) == (expected is None)
        for f, e in zip(used or [], expected or [], strict=True):
            assert torch.equal(f.rows, e.rows)
            assert torch.equal(f.columns, e.columns)
        told: Any = release.variance
        told = told if isinstance(told, float) else TensorList(list(told.values()))
        g = TensorList(list(release.gradients.values()))
        evidence = metric.evidence(memory, g, noise_variance=told, t=t)
        memory = evidence.memory
        if t % 2 == 0:
            expected = of_tensors(metric.factors(evidence))


def test_what_learns_d_is_handed_released_numbers_without_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing within its reach leads to the batch: no parameter, no p.grad_sample, no graph."""
    seen: list[Tensor] = []
    real = FactoredMetric.evidence

    def watched(self: Any, memory: Any, g: Any, *, noise_variance: Any, t: Any, decay: Any = None) -> Any:
        variances = noise_variance if isinstance(noise_variance, TensorList) else []
        seen.extend([*g, *variances, *(v for values in memory.values() for v in values)])
        return real(self, memory, g, noise_variance=noise_variance, t=t)

    monkeypatch.setattr(FactoredMetric, "evidence", watched)
    optimizer = trained()
    assert seen
    assert not any(isinstance(t, nn.Parameter) or hasattr(t, "grad_sample") or t.grad_fn is not None for t in seen)
    released = {g.data_ptr() for *_, release in optimizer.log for g in release.gradients.values()}
    assert {t.data_ptr() for t in seen} & released
    # Nor does the module that holds D have a way to the batch: it imports neither gradients nor samplers.
    text = Path(metric_module.__file__).read_text()
    assert "privacy." not in text.replace("dpivon.privacy.metric", "")


def test_the_account_is_the_ordinary_one(tmp_path: Path) -> None:
    plain, metric = (
        trained(metric=m, ledger=tmp_path / f"{i}.jsonl") for i, m in enumerate((None, FactoredMetric(every=1)))
    )
    assert plain.engine.get_epsilon(1e-3) == metric.engine.get_epsilon(1e-3)
    first, second = (read(tmp_path / f"{i}.jsonl") for i in range(2))
    assert [first.terms_at(k) for k in range(5)] == [second.terms_at(k) for k in range(5)]
    assert plain.spec == metric.spec


LEARNERS: dict[str, Any] = {
    "ivon": lambda m: dpivon.IVON(m.parameters(), lr=0.1, ess=N, curvature="empirical-bayes-fisher"),
    "paper": lambda m: dpivon.IVON(m.parameters(), lr=0.1, ess=N),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
    "steady": lambda m: SteadyOptimizer(m.parameters(), ess=N, steps=5),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_take_it_and_diagnostics_see_it(name: str) -> None:
    optimizer = trained(make=LEARNERS[name])
    assert not isinstance(optimizer.last_release.variance, float)
    row = dpivon.Diagnostics(optimizer).observe()
    assert row.noise_std > 0
    assert 0.0 < row.projected_share < 1.0
    assert all(bool(torch.isfinite(p).all()) for p in optimizer.params)


# ---- state


def test_state_goes_with_the_optimizers() -> None:
    optimizer, other = trained(steps=4), trained(steps=0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(known(optimizer) or [], known(other) or [], strict=True):
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.columns, b.columns)
    assert other._scaling.releases == 4
    twin = copy.deepcopy(optimizer)
    assert twin._scaling.factors(twin.params) is not optimizer._scaling.factors(optimizer.params)
    with pytest.raises(ArgumentError, match="metric=None"):
        trained(steps=0, metric=None).load_state_dict(optimizer.state_dict())
    with pytest.raises(ArgumentError, match="metric=FactoredMetric"):
        trained(steps=0).load_state_dict(trained(steps=1, metric=None).state_dict())
    with pytest.raises(ArgumentError, match="metric=FactoredMetric"):
        trained(steps=0, metric=FactoredMetric()).load_state_dict(optimizer.state_dict())


def test_a_parameter_that_was_frozen_later_is_named_and_nothing_is_released() -> None:
    optimizer = trained(steps=2)
    charged = len(optimizer.engine.accountant)
    with pytest.raises(PrivacyError, match="frozen or thawed"):
        optimizer._scaling.factors(optimizer.params[:-1])
    assert len(optimizer.engine.accountant) == charged


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metric": 0.5}, "metric=0.5: is not a metric"),
        ({"make": lambda m: dpivon.LangevinDynamics(m.parameters(), lr=0.1, ess=N)}, "one noise variance"),
    ],
)
def test_what_cannot_clip_in_a_metric_or_learn_from_it_is_refused_by_name(options: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        trained(steps=0, **options)


def test_several_ranks_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="one process, and there are 2"):
        metric_module.make_scaling(EAGER, torch.optim.SGD(build("mlp").parameters()), ranks=2)


def test_a_state_of_other_parameters_changes_nothing() -> None:
    optimizer, other = trained(steps=3), trained("cnn", steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(DpivonError, match="other parameters"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    for key in ("rows", "columns"):
        assert all(map(torch.equal, after["dpivon_metric"][key], before["dpivon_metric"][key]))
    assert Scaling(EAGER, list(build("mlp").parameters())).state_dict()["rows"] == []


DAMAGED: dict[str, Any] = {
    "a D of zeros": lambda s: s["rows"][0].zero_(),
    "a D that is not finite": lambda s: s["columns"][1].fill_(math.inf),
    "a D that is no number": lambda s: s["rows"][0].fill_(math.nan),
    "a D below zero": lambda s: s["rows"][0].neg_(),
    "a D for fewer tensors": lambda s: (s["rows"].pop(), s["columns"].pop()),
    "rows without columns": lambda s: s["columns"].pop(),
    "a D of another shape": lambda s: s["rows"].__setitem__(0, torch.ones(99, 1)),
    "averages that are no numbers": lambda s: s["memory"]["second"][0].fill_(math.nan),
    "no averages": lambda s: s["memory"].clear(),
    "no number of releases": lambda s: s.pop("releases"),
    "a negative one": lambda s: s.update(releases=-5),
    "no tensors": lambda s: s.update(rows="abc", columns="abc"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_whole(name: str) -> None:
    """Nothing of it is taken, neither by the metric nor by the optimizer inside; and training goes on."""
    make = lambda m: torch.optim.Adam(m.parameters(), lr=0.1)  # noqa: E731
    optimizer, other = trained(steps=3, make=make), trained(steps=2, make=make)
    state, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(other.state_dict())
    DAMAGED[name](state["dpivon_metric"])
    with pytest.raises(DpivonError, match="load_state_dict: the metric's state"):
        other.load_state_dict(state)
    after = other.state_dict()
    assert after["state"][0]["step"] == before["state"][0]["step"]
    assert after["dpivon_metric"]["releases"] == 2
    assert all(map(torch.equal, after["dpivon_metric"]["rows"], before["dpivon_metric"]["rows"]))


def test_a_small_power_does_not_stop_a_run_after_its_release() -> None:
    """bound^(1/(3·power)) has no number there; D stays near 1."""
    optimizer = trained(metric=FactoredMetric(power=1e-3, every=1, caution=0.0))
    d = torch.cat([f.full(p.shape).flatten() for f, p in zip(known(optimizer) or [], optimizer.params, strict=True)])
    assert len(optimizer.log) == 5
    assert 0.5 < float(d.min()) < float(d.max()) < 2.0


def test_a_metric_follows_its_model_to_another_device() -> None:
    """Seen on the device that is always there and holds nothing."""
    optimizer = trained(steps=2)
    scaling, meta = optimizer._scaling, torch.device("meta")
    scaling._follow([meta] * len(optimizer.params))
    assert all(f.rows.device == f.columns.device == meta for f in scaling._factors)
    assert all(t.device == meta for values in scaling._memory.values() for t in values)
