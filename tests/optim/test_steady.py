"""The steady step: how far noise alone carries it, in units of the weights, and where those units come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import ArgumentError, Release
from dpivon.data import load_digits
from dpivon.models import SmallCNN
from dpivon.optim.average import window_decay
from dpivon.optim.steady import Steady, SteadyOptimizer, weight_scale
from dpivon.stacked import AnyNetwork, Run, Stack


def walk(steps: int, noise: float, *, known: bool = True, r: float = 3.0, size: float = 0.2, **hyper: float) -> float:
    """Root mean square displacement after so many releases of nothing but noise, over w."""
    generator = torch.Generator().manual_seed(steps)
    p = nn.Parameter(size * torch.randn(40, 50, generator=generator))
    start = p.detach().clone()
    hyper = {"ess": 1.0, "steps": float(steps) if known else 0.0, "weight_decay": 0.0, **hyper}
    optimizer = SteadyOptimizer([p], lr=r, **hyper)
    for _ in range(steps):
        g = noise * torch.randn(p.shape, generator=generator)
        optimizer.step(release=Release({p: g}, noise**2, batch_size=1.0))
    moved = float((p.detach() - start).square().mean().sqrt())
    return moved / float(start.square().mean().sqrt())


@pytest.mark.parametrize(("steps", "noise"), [(100, 1e-3), (100, 50.0), (400, 1.0)])
def test_noise_alone_moves_the_weights_by_r_times_their_size(steps: int, noise: float) -> None:
    """Whatever the noise and the number of steps: the one thing that a rate for every budget must have."""
    assert walk(steps, noise, known=True) == pytest.approx(3.0, rel=0.1)


def test_its_default_step_is_gradient_descents_of_known_length() -> None:
    """Without noise and momentum the step is r w/√T times the release over its root mean square over all weights: the direction
    is gradient descent's however much the tensors' gradients differ, and the length D/√(T E‖g‖²) with D = r ‖w‖."""
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in ((8, 6), (4, 8))]
    start = torch.cat([p.detach().flatten() for p in params])
    gradients = {
        p: size * torch.randn(p.shape, generator=generator) for p, size in zip(params, (1e-3, 5.0), strict=True)
    }
    hyper = {"ess": 1.0, "steps": 900.0, "weight_decay": 0.0, "beta1": 0.0}
    SteadyOptimizer(params, lr=3.5, **hyper).step(release=Release(gradients, 0.0, batch_size=1.0))
    moved = start - torch.cat([p.detach().flatten() for p in params])
    g = torch.cat([gradients[p].flatten() for p in params])
    assert torch.nn.functional.cosine_similarity(moved, g, dim=0) > 1 - 1e-6
    assert float(moved.norm()) == pytest.approx(3.5 * float(start.norm()) / 30, rel=1e-3)


def test_every_group_has_a_second_moment_of_its_own() -> None:
    """w is of all parameters, v̂ of a group: each moves by r w/√T a weight, however little gradient it has."""
    params = [nn.Parameter(torch.full(shape, 0.1)) for shape in ((8, 6), (4, 8))]
    gradients = {p: torch.full_like(p, size) for p, size in zip(params, (1e-3, 5.0), strict=True)}
    hyper = {"ess": 1.0, "steps": 900.0, "weight_decay": 0.0, "beta1": 0.0}
    optimizer = SteadyOptimizer([{"params": [p]} for p in params], lr=3.0, **hyper)
    optimizer.step(release=Release(gradients, 0.0, batch_size=1.0))
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.1 - 0.01), rtol=1e-4, atol=0.0)


def test_without_anything_to_train_there_is_no_scale() -> None:
    with pytest.raises(ArgumentError, match="scale=None: no weight is trained"):
        SteadyOptimizer([nn.Parameter(torch.ones(2), requires_grad=False)], ess=1.0)


def carried(steps: int, *, beta1: float, ramp: float) -> float:
    """How far noise alone carries the weights, over r w: release k moves them by c_k of itself, and the c_k² add up."""
    a = [min(1.0 / math.sqrt(steps), t / math.sqrt(ramp) if ramp else math.inf) for t in range(1, steps + 1)]
    times = range(1, steps + 1)
    share = [[a[t - 1] * (1 - beta1) * beta1 ** (t - k) / (1 - beta1**t) for t in times if t >= k] for k in times]
    return math.sqrt(sum(sum(c) ** 2 for c in share))


@pytest.mark.parametrize("ramp", [0.0, 400.0, 2500.0])
@pytest.mark.parametrize("steps", [8, 12, 60])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_with_few_steps_noise_moves_them_as_far_as_the_ramp_says(steps: int, beta1: float, ramp: float) -> None:
    expected = carried(steps, beta1=beta1, ramp=ramp)
    assert walk(steps, 1.0, beta1=beta1, ramp=ramp, curvature_decay=0.999) == pytest.approx(3.0 * expected, rel=0.06)


def test_with_the_ramp_noise_never_carries_the_weights_much_beyond_r_times_their_size() -> None:
    """Without one momentum counts the first releases several times, which few steps do not make up for."""
    assert max(carried(steps, beta1=0.9, ramp=400.0) for steps in (1, 2, 4, *range(8, 64, 8), 100, 200)) < 1.08
    assert carried(12, beta1=0.9, ramp=0.0) > 1.2


@pytest.mark.parametrize("steps", [0, 4, 12, 100, 399])
def test_the_t_th_step_is_at_most_t_times_that_of_a_plan_as_long_as_the_ramp(steps: int) -> None:
    hyper = {"lr": 5.0, "scale": 0.2, "steps": float(steps), "fade": 0.0, "ramp": 400.0}
    plain = {**hyper, "ramp": 0.0}
    for t in range(1, steps + 50):
        full, first = Steady().rate(plain, t), 5.0 * 0.2 / math.sqrt(400.0)
        assert Steady().rate(hyper, t) == pytest.approx(min(full, t * first), rel=1e-12)
    assert Steady().rate(hyper, 1) == pytest.approx(0.25 * 0.2)  # a quarter of a weight, for the default r
    climbed = math.ceil(math.sqrt(400.0 / steps) if steps else 100.0 ** (1 / 3))
    assert Steady().rate(hyper, climbed) == Steady().rate(plain, climbed)
    assert Steady().rate(hyper, climbed - 1) < Steady().rate(plain, climbed - 1)


@pytest.mark.parametrize("r", [2.5, 5.0, 10.0, 40.0])
def test_a_plan_as_long_as_the_ramp_is_what_it_was_to_the_bit(r: float) -> None:
    """Studies that ran without a ramp are repeated by a library that has one, at any rate."""
    steps = [400.0, 401.0, 990.0, 2940.0]
    columns = {"lr": [r] * 4, "scale": [0.0184] * 4, "steps": steps, "fade": [0.0, 0.7, 0.0, 1.0]}
    rows = {key: torch.tensor(value).unsqueeze(1) for key, value in columns.items()}
    for t in (1, 2, 3, 7, 50, 400, 3000):
        planned, fade = rows["steps"], rows["fade"]
        left = 1.0 - fade * ((torch.tensor(float(t)) - 0.5) / planned).clamp(max=1.0)
        before = planned.rsqrt() * left * (1.0 - fade + fade * fade / 3.0).rsqrt()
        made = Steady().rate({**rows, "ramp": torch.full((4, 1), 400.0)}, torch.tensor(t))
        assert torch.equal(made, rows["lr"] * rows["scale"] * before)
        for i in range(4):
            alone = {key: value[i] for key, value in columns.items()}
            assert Steady().rate({**alone, "ramp": 400.0}, t) == Steady().rate({**alone, "ramp": 0.0}, t)


@pytest.mark.slow
def test_few_steps_leave_the_hidden_units_of_a_network_alive() -> None:
    """σ is that of ε = 8. Without a ramp the first steps kill a ReLU layer."""
    digits = load_digits()
    network, steps, seeds = AnyNetwork(SmallCNN), 12, 12
    runs = [
        Run("dp-steady", 1001 + i, 0.62, 1.0, 5.0, 128, {"ramp": ramp}) for i, ramp in enumerate([0.0, 400.0] * seeds)
    ]
    start = torch.stack([network.initial(i // 2) for i in range(len(runs))])
    stack = Stack(runs, network, digits.train.x, digits.train.y, start=start, steps=steps)
    for _ in stack.train(steps):
        pass
    alive = []
    for i in range(len(runs)):
        model: Any = stack.model(i)
        with torch.no_grad():
            hidden = model.head.hidden(model.head.flatten(model.features(digits.validation.x)))
        alive.append(float((hidden > 0).any(0).double().mean()))
    without, climbing = (sum(alive[i::2]) / seeds for i in (0, 1))  # of 24 seeds .10 and .22
    assert without < 0.25
    assert climbing > 1.5 * without


def test_where_nobody_knows_the_number_of_steps_it_takes_as_much_way() -> None:
    steps = 2500
    hyper = {"lr": 3.0, "scale": 0.2, "steps": 0.0, "fade": 1.0, "ramp": 0.0}  # and nothing to fade by
    rates = [Steady().rate(hyper, t) for t in range(1, steps + 1)]
    assert sum(rates) == pytest.approx(steps * 3.0 * 0.2 / math.sqrt(steps), rel=0.02)
    climbing = [Steady().rate({**hyper, "ramp": 400.0}, t) for t in range(1, steps + 1)]
    assert climbing[4:] == rates[4:]  # t r w/√400 is above r w/(2√t) from t = 100^(1/3) on
    assert sum(climbing[:4]) < 0.5 * sum(rates[:4])
    # and noise, of which the first steps are larger, carries it less than twice as far
    assert 3.0 < walk(400, 1.0, known=False) < 6.0


@pytest.mark.parametrize("fade", [0.0, 0.5, 1.0])
def test_a_step_that_fades_ends_at_its_share_and_carries_noise_as_far(fade: float) -> None:
    steps, hyper = 500, {"lr": 3.0, "scale": 0.2, "steps": 500.0, "fade": fade, "ramp": 400.0}
    rates = [Steady().rate(hyper, t) for t in range(1, steps + 1)]
    assert sum(a * a for a in rates) == pytest.approx((3.0 * 0.2) ** 2, rel=1e-4)
    assert rates[-1] / rates[0] == pytest.approx(1.0 - fade, abs=2e-3)
    assert Steady().rate(hyper, 10 * steps) == pytest.approx(
        (1.0 - fade) * rates[0], abs=1e-3 * rates[0]
    )  # never below


def test_rates_of_rows_are_those_of_runs() -> None:
    hyper = {"lr": [[5.0], [2.0], [2.0]], "scale": [[0.1], [0.3], [0.3]], "steps": [[0.0], [64.0], [64.0]]}
    hyper |= {"fade": [[1.0], [0.0], [0.8]], "ramp": [[400.0], [0.0], [2500.0]]}
    for t in (1, 2, 9):
        rows = Steady().rate({k: torch.tensor(v) for k, v in hyper.items()}, torch.tensor(t))
        for i in range(3):
            alone = Steady().rate({key: value[i][0] for key, value in hyper.items()}, t)
            assert float(rows[i]) == pytest.approx(alone, rel=1e-6)


def test_the_unit_is_the_size_of_matrices_and_kernels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8, 4))
    kernels = torch.cat([model[0].weight.flatten(), model[3].weight.flatten()])
    made = dpivon.method("dp-steady", model, dataset_size=10).optimizer
    assert made.param_groups[0]["scale"] == pytest.approx(float(kernels.detach().square().mean().sqrt()))


def test_weights_that_begin_at_zero_have_the_size_of_torchs_own() -> None:
    model = nn.Linear(300, 40)
    usual = weight_scale([model.weight], [(40, 300)])
    nn.init.zeros_(model.weight)
    assert weight_scale([model.weight], [(40, 300)]) == pytest.approx(usual, rel=0.02)
    assert weight_scale([torch.full((7,), 2.0)], [(1, 7)]) == pytest.approx(2.0)  # vectors, where there is nothing else


def test_a_plan_in_epochs_tells_the_step_and_the_average() -> None:
    x, y = torch.randn(24, 3), torch.randint(2, (24,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    settings = {"target_epsilon": 1.0, "target_delta": 1e-3, "epochs": 20, "max_grad_norm": 1.0}
    learner = dpivon.method("dp-steady", nn.Linear(3, 2), dataset_size=24)
    assert learner.average is not None
    assert learner.average.decay == 0.99
    learner.make_private_with_epsilon(dpivon.PrivacyEngine(), loader, **settings)
    assert learner.optimizer.param_groups[0]["steps"] == 60.0
    assert learner.average.decay == window_decay(60) == pytest.approx(1 - 10 / 70)
    told = dpivon.method("dp-steady", nn.Linear(3, 2), dataset_size=24, steps=500.0, ema=0.5)
    told.make_private_with_epsilon(dpivon.PrivacyEngine(), loader, **settings)
    assert told.optimizer.param_groups[0]["steps"] == 500.0
    assert told.average is not None
    assert told.average.decay == 0.5


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("dp-sgd", {"trace": 1.0}, "trace=1.0: is of averaged iterates"),
        ("dp-sgd", {"trace": -1.0, "ema": 0.9}, "trace=-1.0"),
        ("dp-steady", {"steps": -1.0}, "steps=-1.0"),
        ("dp-steady", {"scale": 0.0}, "scale=0.0"),
        ("dp-steady", {"ramp": -1.0}, "ramp=-1.0"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, options: dict[str, float], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        dpivon.method(name, nn.Linear(2, 2), dataset_size=5, **options)


def test_a_state_from_before_an_option_goes_on_with_what_the_optimizer_was_made_with() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    saved = SteadyOptimizer([weight], lr=5.0, ess=10.0, steps=100.0).state_dict()
    del saved["param_groups"][0]["ramp"]
    optimizer = SteadyOptimizer([weight], lr=2.0, ess=10.0, steps=50.0, ramp=9.0)
    optimizer.load_state_dict(saved)
    assert {k: optimizer.param_groups[0][k] for k in ("lr", "steps", "ramp")} == {
        "lr": 5.0,
        "steps": 100.0,
        "ramp": 9.0,
    }


def test_a_state_that_another_estimator_left_is_refused_before_anything_moves() -> None:
    """One that was saved when v̂ was shrunk to its tensor by default, among others."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    first = SteadyOptimizer([weight], ess=10.0, steps=100.0, curvature="empirical-bayes-fisher")
    first.step()
    optimizer = SteadyOptimizer([weight], ess=10.0, steps=100.0)
    with pytest.raises(
        ArgumentError, match=r"state_dict=\['fourth'.*Make the optimizer with the rule, or the curvature"
    ):
        optimizer.load_state_dict(first.state_dict())
    assert not optimizer.state
    again = SteadyOptimizer([weight], ess=10.0, steps=100.0, curvature="empirical-bayes-fisher")
    again.load_state_dict(first.state_dict())
    again.step()
