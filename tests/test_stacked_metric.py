"""Stacks that clip in a metric: sums, releases, D, checkpoints, and who is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.mlp import BatchedMLP, BatchedSums
from torch import Tensor, nn

from dpivon import ArgumentError, Augmentation, FactoredMetric
from dpivon.models import PaperCNN
from dpivon.models.standardised import StandardisedConv2d
from dpivon.optim.curvature import ESTIMATORS, matrix
from dpivon.optim.metric import MEMORY, flat
from dpivon.privacy.clipping import EPS_NUM
from dpivon.privacy.kernels.layout import Layout
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import LoopedGradients, seen
from dpivon.stacked import AnyNetwork, PaperNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.study.watch import Watch

N = 60
NETWORKS: dict[str, Any] = {
    "images": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 10)),
    "standardised": lambda: nn.Sequential(StandardisedConv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)),
}
METHODS = ("dp-steady", "dp-ivon-gradsq", "dp-adambc", "dp-psgld")


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, 8, 8, generator=generator), torch.randint(10, (N,), generator=generator)


def run(method: str = "dp-steady", seed: int = 1, metric: float = 0.5, **options: Any) -> Run:
    return Run(method, seed, 0.8, 0.5, 0.01, 12, {"metric": metric, **options})


def rank_one(network: AnyNetwork, seed: int) -> Tensor:
    """A row of D that is row times column in every tensor, in the network's own order."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.exp(0.7 * torch.randn(n, generator=generator))  # noqa: E731
    return torch.cat([torch.outer(draw(r), draw(c)).flatten() for r, c in network.matrices])


def trained(runs: list[Run], network: Any, data: Any, steps: int, **options: Any) -> Stack:
    stack = Stack(runs, network, *data, steps=steps, **options)
    for _ in stack.train(steps):
        pass
    return stack


# ---- sums


@pytest.mark.parametrize("augment", [None, Augmentation(2, flip=True, crop=1)], ids=["as-they-are", "views"])
@pytest.mark.parametrize("name", NETWORKS)
def test_loop_and_traced_program_sum_what_a_plain_loop_sums(data: Any, name: str, augment: Augmentation | None) -> None:
    network = AnyNetwork(NETWORKS[name])
    stack = Stack([run(seed=s) for s in (1, 2, 3)], network, *data, augment=augment)
    traced = PaddedGradients(network, stack.device, torch.float32, augment)
    metric = [rank_one(network, 1), None, rank_one(network, 3)]
    batch, theta, bound = stack._batch(*stack.sampler.parts(0)[0]), stack._theta(), stack.mechanism.bound
    looped = stack.gradients.clipped_sums(theta, batch, bound, metric)
    torch.testing.assert_close(traced.clipped_sums(theta, batch, bound, metric), looped, rtol=1e-5, atol=1e-6)
    for k, scale in enumerate(metric):
        rows = slice(int(batch.start[k]), int(batch.start[k + 1]))
        model = network.model(theta[k]).double()
        d = torch.ones(network.size).double() if scale is None else scale.double()
        total = torch.zeros_like(d)
        pictures = seen(augment, batch.inputs[rows], batch.views, rows).double()
        for x, y in zip(pictures.split(1 if augment is None else augment.views), batch.labels[rows], strict=True):
            loss = nn.functional.cross_entropy(model(x), y.expand(len(x)))  # the mean over views
            g = d * torch.cat([t.flatten() for t in torch.autograd.grad(loss, list(model.parameters()))])
            total += g * min(1.0, float(bound[k]) / (float(g.norm()) + EPS_NUM))
        torch.testing.assert_close(looped[k], total, rtol=1e-5, atol=2e-6)


def test_the_papers_network_has_its_own_order_and_the_loop_keeps_to_it(data: Any) -> None:
    """D lies in a row as the weights do, outputs last; the same D in the model's order gives the same sums."""
    layout = Layout(widths=(4, 4, 8), hidden=8, groups=2, image=8)
    network = PaperNetwork(layout)
    build = lambda: PaperCNN(widths=layout.widths, hidden=8, classes=10, groups=2, image_size=8)  # noqa: E731
    plain = AnyNetwork(build)
    theta, scale = network.initial(3), rank_one(network, 5)
    stack = Stack([run()], network, *data)
    batch, bound = stack._batch(*stack.sampler.parts(0)[0]), stack.mechanism.bound
    got = LoopedGradients(network, torch.float32).clipped_sums(theta[None], batch, bound, [scale])
    rows = [plain.pack(network.model(row)) for row in (theta, scale)]
    expected = LoopedGradients(plain, torch.float32).clipped_sums(rows[0][None], batch, bound, [rows[1]])
    torch.testing.assert_close(plain.pack(network.model(got[0].float())), expected[0].float(), rtol=1e-5, atol=1e-6)


def test_the_benchmarks_own_sums_are_the_loops() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 64, generator=generator), torch.randint(10, (40,), generator=generator)
    network = BatchedMLP()
    stack = Stack([run(seed=s) for s in (1, 2)], network, x, y)
    metric = [rank_one(network, 4), None]
    batch, theta, bound = stack._batch(*stack.sampler.parts(0)[0]), stack._theta(), stack.mechanism.bound
    expected = LoopedGradients(network, torch.float32).clipped_sums(theta, batch, bound, metric)
    torch.testing.assert_close(BatchedSums().clipped_sums(theta, batch, bound, metric), expected, rtol=1e-4, atol=1e-5)


# ---- training


@pytest.mark.parametrize("method", METHODS)
def test_until_d_is_made_a_run_is_the_ordinary_one_to_the_bit_and_then_no_longer(data: Any, method: str) -> None:
    every = FactoredMetric().every
    network = AnyNetwork(NETWORKS["images"])
    for steps, same in ((every, True), (every + 2, False)):
        plain, metric = (trained([run(method, metric=p)], network, data, steps) for p in (0.0, 0.5))
        assert torch.equal(plain.mean, metric.mean) == same
        assert plain.epsilon(0, 1e-3) == metric.epsilon(0, 1e-3)
        assert bool(torch.isfinite(metric.mean).all())
        torch.testing.assert_close(plain.mean, metric.mean, rtol=0.2, atol=0.05)  # D is near 1 where little is known


def test_d_is_made_of_the_releases_before_it_and_each_row_has_its_own(data: Any) -> None:
    """Made again, run by run, from what the mechanism let out; two methods, two powers and one run without."""
    network = AnyNetwork(NETWORKS["images"])
    runs = [run("dp-adam", 1, 0.5), run("dp-adam", 2, 0.25), run("dp-steady", 3, 0.5), run("dp-steady", 4, 0.0)]
    stack = Stack(runs, network, *data, steps=20)
    released, used, real = [], [], stack.mechanism.release
    stack.mechanism.release = lambda *a: released.append(real(*a)) or released[-1]  # type: ignore[method-assign, func-returns-value]
    sums = stack.gradients.clipped_sums
    stack.gradients.clipped_sums = lambda *a: used.append([d if d is None else d.clone() for d in a[3]]) or sums(*a)  # type: ignore[method-assign, func-returns-value]
    for _ in stack.train(20):
        pass
    shapes = [matrix(p.shape) for p in NETWORKS["images"]().parameters()]
    metric = FactoredMetric()
    moved = 0
    for k, spec in enumerate(stack.runs):
        power = spec.options["metric"]
        if not power:
            assert all(step[k] is None for step in used)
            continue
        scale, memory = torch.ones(1, network.size), {name: torch.zeros(1, network.size) for name in MEMORY}
        for t, (g, step) in enumerate(zip(released, used, strict=True), 1):
            torch.testing.assert_close(step[k], scale[0], rtol=1e-5, atol=1e-6)
            variance = torch.tensor([[stack.mechanism.specs[k].variance]]) / scale.square()
            decay = torch.full((1, 1), metric.decay)
            evidence = metric.evidence(
                memory, g[k : k + 1] / scale, noise_variance=variance, t=torch.tensor(t), decay=decay
            )
            memory = dict(evidence.memory)
            if t % metric.every == 0:
                scale = flat(metric.factors(evidence, shapes, torch.full((1, 1, 1), float(power))))
        moved += float((scale - 1).abs().max()) > 1e-3
    assert moved == 3


def test_a_resumed_stack_goes_on_in_the_metric_it_had(data: Any, tmp_path: Any) -> None:
    network, runs = AnyNetwork(NETWORKS["images"]), [run(seed=1), run("dp-ivon-gradsq", 2, 0.25)]
    whole = trained(runs, network, data, 24)
    first = Stack(runs, network, *data, steps=24)
    kept = StackCheckpoints(first, tmp_path)
    kept.restore()
    for _ in first.train(13):
        pass
    kept.save({})
    kept.close()
    again = Stack(runs, network, *data, steps=24)
    kept = StackCheckpoints(again, tmp_path)
    kept.restore()
    assert float((again.parts[0].state["metric"] - 1).abs().max()) > 1e-4
    for _ in again.train(11):
        pass
    kept.close()
    assert torch.equal(again.mean, whole.mean)
    for p, q in zip(again.parts, whole.parts, strict=True):
        assert all(torch.equal(p.state[name], q.state[name]) for name in p.state)
    other = Stack([run(seed=1, metric=0.25), runs[1]], network, *data, steps=24)
    with pytest.raises(ArgumentError, match="other runs"):
        StackCheckpoints(other, tmp_path).restore()


def test_the_watch_holds_every_coordinate_against_its_own_noise(data: Any) -> None:
    stack = Stack([run("dp-ivon-gradsq", 1, 0.5)], AnyNetwork(NETWORKS["images"]), *data)
    part = stack.parts[0]
    part.state["metric"].copy_(rank_one(stack.network, 7))  # type: ignore[arg-type]
    scale, released, real = part.state["metric"].clone(), [], stack.mechanism.release
    stack.mechanism.release = lambda *a: released.append(real(*a)) or released[-1]  # type: ignore[method-assign, func-returns-value]
    watch = Watch(stack)
    watch.before()
    for _ in stack.train(1):
        pass
    (row,) = watch.after()
    s = math.sqrt(stack.mechanism.specs[0].variance)
    expected = float((released[0].abs() < s).double().mean())  # g/D against s/D
    assert row["projected_share"] == pytest.approx(expected, abs=3 / scale.numel())
    assert "noise_variance" not in part.hyper  # so that nobody takes the stretched one for it


@pytest.mark.slow
def test_a_compiler_follows_the_step_whole(data: Any) -> None:
    """What a GPU compiles and captures: no break in the graph, and the same numbers as without it."""
    runs = [run("dp-adam", 1), run("dp-steady", 2), run("dp-ivon-gradsq", 3, 0.25), run("dp-adam", 4, 0.0)]
    network = AnyNetwork(NETWORKS["images"])
    plain, traced = (Stack(runs, network, *data, steps=12) for _ in range(2))
    traced._apply = torch.compile(traced._update_rows, backend="eager", fullgraph=True)
    traced.gradients = PaddedGradients(network, traced.device, torch.float32)
    for stack in (plain, traced):
        for _ in stack.train(12):
            pass
    torch.testing.assert_close(traced.mean, plain.mean, rtol=1e-4, atol=1e-5)
    scales = [part.state["metric"] for part in traced.parts if "metric" in part.state]
    assert len(scales) == 3
    assert all(float((d - 1).abs().max()) > 1e-4 for d in scales)


# ---- refusals


def test_kernels_that_know_no_metric_refuse_it_by_name(data: Any) -> None:
    class Kernels(AnyNetwork):
        def gradients(self, *args: Any) -> Any:
            looped = super().gradients(*args)
            looped.scales = False  # type: ignore[attr-defined]
            return looped

    with pytest.raises(ArgumentError, match=r"metric=0\.5: is not known to LoopedGradients"):
        Stack([run()], Kernels(NETWORKS["images"]), *data)
    assert Stack([run(metric=0.0)], Kernels(NETWORKS["images"]), *data).runs


@pytest.mark.parametrize("power", [-0.1, 1.5, math.nan, "much"])
def test_a_power_that_is_none_is_refused_by_name(power: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^metric="):
        run(metric=power)


def test_an_estimator_that_knows_one_variance_is_refused_before_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Foreign:
        name, elementwise, needs_sample = "foreign", True, False

        def __call__(self, evidence: Any) -> Any:
            return evidence.g_squared - evidence.noise_variance

    monkeypatch.setitem(ESTIMATORS, "foreign", Foreign())
    assert run("dp-ivon-gradsq", metric=0.0, curvature="foreign")
    with pytest.raises(ArgumentError, match="'foreign' knows one noise variance"):
        run("dp-ivon-gradsq", metric=0.5, curvature="foreign")
