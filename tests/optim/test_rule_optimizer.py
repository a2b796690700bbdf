"""Rules as torch optimizers: equal to torch's own, exact on resume, at home in every dtype, deaf to raw gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpivon import PrivacyError, Release
from dpivon.optim import RuleOptimizer
from dpivon.optim.point import SGD, Adam, AdamW
from dpivon.optim.rule import REQUIRED, debias, full_like
from dpivon.optim.tensors import TensorList


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in ((4, 3), (5,), ())]


def gradients(params: list[nn.Parameter], steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in params] for _ in range(steps)]


def feed(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: list[list[Tensor]]) -> None:
    for gs in steps:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
        optimizer.step()


PAIRS = {
    "sgd": (SGD(), {"momentum": 0.0}, torch.optim.SGD, {"weight_decay": 1e-4}),
    "momentum": (SGD(), {"momentum": 0.8}, torch.optim.SGD, {"momentum": 0.8, "weight_decay": 1e-4}),
    "nesterov": (
        SGD(),
        {"nesterov": True, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (Adam(), {"beta2": 0.98}, torch.optim.Adam, {"betas": (0.9, 0.98), "weight_decay": 1e-4}),
    "adamw": (AdamW(), {"weight_decay": 0.2}, torch.optim.AdamW, {"weight_decay": 0.2}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_equals_torch(pair: str) -> None:
    rule, ours, theirs, options = PAIRS[pair]
    a, b = weights(), weights()
    steps = gradients(a, 20)
    feed(RuleOptimizer(a, rule, lr=0.05, **ours), a, steps)
    feed(theirs(b, lr=0.05, **options), b, steps)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_of_a_stack_follow_the_same_rule(pair: str) -> None:
    """The stack's shape: hyperparameters in columns, one row a run, t a tensor."""
    rule, ours, *_ = PAIRS[pair]
    settings = [{"lr": lr, **rule.defaults, **ours} for lr in (0.05, 0.2)]
    hyper = {key: torch.tensor([[float(s[key])] for s in settings], dtype=torch.float64) for key in settings[0]}
    params = [nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in settings]
    state = rule.start(torch.stack([p.detach().clone() for p in params]), hyper)
    for t, gs in enumerate(gradients(params, 7), start=1):
        state = rule.step(state, torch.stack(gs), t=torch.tensor(t), noise_variance=0.0, normal=None, hyper=hyper)
    for i, s in enumerate(settings):
        alone = [params[i]]
        options = {key: value for key, value in s.items() if key != "lr"}
        feed(RuleOptimizer(alone, rule, lr=s["lr"], **options), alone, [[gs[i]] for gs in gradients(params, 7)])
        torch.testing.assert_close(state["mean"][i], alone[0].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pair", PAIRS)
def test_resume_is_exact(pair: str) -> None:
    rule, ours, *_ = PAIRS[pair]
    a = weights(torch.float32)
    steps = gradients(a, 8)
    first = RuleOptimizer(a, rule, lr=0.05, **ours)
    feed(first, a, steps[:4])
    b = [nn.Parameter(p.detach().clone()) for p in a]
    second = RuleOptimizer(b, rule, lr=0.7)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    feed(first, a, steps[4:])
    feed(second, b, steps[4:])
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_bf16_model_is_optimised_in_full_precision() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RuleOptimizer([p], SGD(), lr=1e-3, momentum=0.0, weight_decay=0.0)
    feed(optimizer, [p], [[torch.ones(3, dtype=torch.bfloat16)]] * 10)  # bf16 alone would round every step of 1e-3 away
    assert p.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.state[p]["mean"], torch.full((3,), 0.99), rtol=1e-6, atol=0)
    torch.testing.assert_close(p.float(), torch.full((3,), 0.99), rtol=4e-3, atol=0)
    reloaded = RuleOptimizer([p], SGD(), lr=1e-3)
    reloaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(reloaded.state[p]["mean"], optimizer.state[p]["mean"])


def test_state_follows_a_model_that_is_cast() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = RuleOptimizer([p], Adam(), lr=0.1)
    feed(optimizer, [p], [[torch.ones(3)]])
    p.data = p.data.double()
    p.grad = None
    feed(optimizer, [p], [[torch.ones(3, dtype=torch.float64)]])
    assert optimizer.state[p]["second"].dtype == torch.float64
    assert optimizer.state[p]["step"] == 2


def test_frozen_parameters_stay_and_late_ones_start_at_step_one() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = RuleOptimizer([a, b], Adam(), lr=0.1, weight_decay=0.0)
    a.grad = torch.ones(2)
    for _ in range(3):
        optimizer.step()
    assert torch.equal(b, torch.zeros(2))
    b.requires_grad_(True)
    b.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(b.detach(), torch.full((2,), -0.1))  # Adam's first step is α, debiased by its own count


def test_learns_from_the_release_and_never_from_p_grad() -> None:
    class Recorder(SGD):
        seen: list[Any] = []  # noqa: RUF012

        def step(self, state: Any, g: Any, **facts: Any) -> Any:
            self.seen.append((g[0].clone(), facts["noise_variance"]))
            return super().step(state, g, **facts)

    p = nn.Parameter(torch.zeros(2))
    optimizer = RuleOptimizer([p], Recorder(), lr=1.0)
    optimizer.bind_to_releases()
    p.grad = torch.full((2,), 99.0)
    with pytest.raises(PrivacyError, match="without a release"):
        optimizer.step()
    with pytest.raises(PrivacyError, match="without a release"):
        copy.deepcopy(optimizer).step()
    optimizer.step(release=Release({p: torch.tensor([1.0, 2.0], dtype=torch.float64)}, variance=0.25))
    g, variance = Recorder.seen[0]
    assert variance == 0.25
    assert torch.equal(g, torch.tensor([1.0, 2.0]))
    assert torch.equal(p.detach(), torch.tensor([-1.0, -2.0]))


def test_a_rule_that_draws_gets_normals_from_its_generator() -> None:
    class Walk(SGD):
        draws = True

        def step(self, state: Any, g: Any, *, normal: Any, **facts: Any) -> Any:
            return {**state, "mean": state["mean"] + normal}

    p = nn.Parameter(torch.zeros(4))
    optimizer = RuleOptimizer([p], Walk(), lr=1.0, generator=torch.Generator().manual_seed(5))
    feed(optimizer, [p], gradients([p], 1))
    assert torch.equal(p.detach(), torch.randn(4, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("value", [1, 3, 40])
def test_debias_is_the_same_for_numbers_lists_and_columns(value: int) -> None:
    betas = torch.tensor([[0.9], [0.99999], [1.0], [0.0]])
    column = debias(betas, torch.tensor(value))
    for beta, factor in zip((0.9, 0.99999, 1.0, 0.0), column.flatten().tolist(), strict=True):
        assert debias(beta, value) == pytest.approx(factor, rel=2e-3 if beta == 0.99999 else 1e-6)
        assert debias(beta, [value, 2]) == [debias(beta, value), debias(beta, 2)]
    assert debias(torch.tensor([[0.99999]], dtype=torch.float64), torch.tensor(1)).item() == pytest.approx(
        1e-5, rel=1e-9
    )


def test_full_like() -> None:
    rows = full_like(torch.zeros(2, 3), torch.tensor([[1.0], [2.0]]))
    assert rows.tolist() == [[1.0] * 3, [2.0] * 3]
    assert full_like(TensorList([torch.zeros(2)]), 3.0)[0].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be at least 0"),
        ({"lr": 0.1, "momentum": "much"}, "momentum='much': is not a number"),
        ({"lr": 0.1, "beta9": 1.0}, "beta9=1.0: is not an option of 'sgd'"),
        ({"lr": 0.1, "nesterov": 0.5}, "nesterov=0.5: is neither"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuleOptimizer(weights(), SGD(), **options)


def test_a_required_option_cannot_be_left_out() -> None:
    class Needs(SGD):
        defaults = {**SGD.defaults, "ess": REQUIRED}  # noqa: RUF012

    with pytest.raises(ValueError, match="ess=nan: is not a number"):
        RuleOptimizer(weights(), Needs(), lr=0.1)
    assert RuleOptimizer(weights(), Needs(), lr=0.1, ess=10).param_groups[0]["ess"] == 10.0


def test_a_step_without_gradients_is_refused() -> None:
    with pytest.raises(Exception, match="without a gradient"):
        RuleOptimizer(weights(), SGD(), lr=0.1).step()
