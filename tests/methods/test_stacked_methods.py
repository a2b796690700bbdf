"""Every method in a stack against the same method alone, on the same releases; ensembles and their joint budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpivon
from dpivon import EMA, Release
from dpivon.methods import METHODS
from dpivon.optim.curvature import ESTIMATORS
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.predict import predict
from dpivon.stacked import AnyNetwork, Ensemble, Run, Stack, ensemble_noise, joint_epsilon
from dpivon.stacked.run import defaults_of, stackable

N, STEPS = 40, 6


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 2, 2, 3, generator=generator), torch.randint(3, (N,), generator=generator)


def options_of(name: str) -> dict[str, float]:
    """Away from the defaults where a default would hide a mistake."""
    special = {
        "beta2": 0.9,
        "curvature_decay": 0.6,
        "temperature": 0.3,
        "nesterov": 1.0,
        "cap": 1e-4,
        "floor": 1e-5,
        "weight_decay": 0.05,
        "momentum": 0.7,
        "fade": 0.8,
        "ramp": 90.0,
    }
    return {key: value for key, value in special.items() if key in defaults_of(name)}


@pytest.mark.campaign(keep=10)
@pytest.mark.parametrize("ema", [None, 0.7])
@pytest.mark.parametrize("name", stackable())
def test_a_row_is_the_method_alone_on_the_same_releases(name: str, ema: float | None, data: Any) -> None:
    check_row(name, options_of(name) | ({} if ema is None else {"ema": ema}), data)


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("curvature", ESTIMATORS)
def test_so_it_is_with_any_estimator(curvature: str, data: Any) -> None:
    check_row("dp-ivon-gradsq", {**options_of("dp-ivon-gradsq"), "curvature": curvature}, data)
    if not {"reparam", "gradsq"} & set(curvature.split("-")):
        check_row("dp-calm", {**options_of("dp-calm"), "curvature": curvature, "ema": 0.7}, data)


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("name", stackable())
def test_so_it_is_with_the_spread_of_its_iterates(name: str, data: Any) -> None:
    check_row(name, {**options_of(name), "ema": 0.7, "trace": 2.5}, data)


@pytest.mark.parametrize("options", [{"steps": 25.0}, {"steps": 25.0, "ema": 0.6, "trace": 0.0}, {"scale": 0.3}])
def test_so_it_is_with_a_plan(options: dict[str, float], data: Any) -> None:
    check_row("dp-steady", options, data)


@pytest.mark.parametrize("name", ["dp-steady", "dp-calm"])
def test_so_it_is_where_the_pull_to_zero_is_longer_than_what_the_step_divides_by(name: str, data: Any) -> None:
    """σC/b is about 1e-7 and α δ is not: a step that passed zero by more than it came from would end in NaN."""
    stack, row, start = check_row(name, {"weight_decay": 1e-3}, data, clip=1e-6)
    assert stack.mean[row].abs().max() < start.abs().max()


def check_row(name: str, options: dict[str, Any], data: Any, clip: float = 1.0) -> tuple[Stack, int, Tensor]:
    ema = options.get("ema")
    run = Run(name, 21, 1.0, clip, 0.05, 8, options)
    others = [Run("dp-sgd", 1, 1.0, 1.0, 0.1, 4), Run(name, 2, 0.5, 2.0, 0.01, 16)]
    stack = Stack([others[0], run, others[1]], AnyNetwork(build), *data)
    row = stack._row(1)
    model = stack.model(1)
    own = {key: value for key, value in options.items() if key != "ema"}  # trace is the learner's by the same name
    if "ivon" in name:
        own["rescale_lr"] = False
    learner = dpivon.method(name, model, dataset_size=N, lr=0.05, ema=ema, **own)
    optimizer: Any = learner.optimizer
    optimizer.bind_to_releases()
    params = list(model.parameters())

    def split(values: Tensor) -> list[Tensor]:
        pieces = values.split([p.numel() for p in params])
        return [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]

    normals: list[Tensor] = []
    optimizer._standard_normal = lambda like: normals.pop(0)
    original = stack._update

    def update(sums: Tensor) -> None:
        g = stack.mechanism.release(sums, stack._t)[row]
        normals[:] = [piece.clone() for piece in split(stack._eps[row])]
        if learner.variational:
            with optimizer.sampled_params(train=True):
                pass
        released = dict(zip(params, split(g), strict=True))
        optimizer.step(release=Release(released, float(stack.mechanism.variance[row]), batch_size=8.0))
        original(sums)

    stack._update = update  # type: ignore[method-assign]
    start = stack.mean[row].clone()
    for _ in stack.train(STEPS):
        pass
    assert not torch.allclose(stack.mean[row], start)
    torch.testing.assert_close(stack.mean[row], nn.utils.parameters_to_vector(params).detach(), rtol=2e-4, atol=1e-5)
    q, solo = stack.posterior(1, averaged=run.averaged), learner.posterior()
    if isinstance(solo, SampledPosterior):  # a stack keeps no samples: its row is where the chain is, the last one kept
        last = len(solo) - 1
        assert len(solo) == STEPS // 2
        solo = Posterior(solo[last], {key: torch.zeros_like(v) for key, v in solo[last].items()})
    for key in solo.mean:
        torch.testing.assert_close(q.mean[key], solo.mean[key], rtol=2e-4, atol=1e-5)
        torch.testing.assert_close(q.variance[key], solo.variance[key], rtol=1e-4, atol=0)
    return stack, row, start


def test_runs_of_every_method_in_one_stack_equal_themselves_alone(data: Any) -> None:
    runs = [Run(name, i, 1.0, 1.0, 0.02, 8) for i, name in enumerate(stackable())]
    runs += [Run(name, 100 + i, 1.0, 1.0, 0.02, 8, {"ema": 0.5}) for i, name in enumerate(stackable())]
    together = Stack(runs, AnyNetwork(build), *data)
    for _ in together.train(4):
        pass
    for i, run in enumerate(runs):
        alone = Stack([run], AnyNetwork(build), *data)
        for _ in alone.train(4):
            pass
        torch.testing.assert_close(together.mean[together._row(i)], alone.mean[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together.average[together._row(i)], alone.average[0], rtol=1e-5, atol=1e-6)
        same = torch.equal(alone.average, alone.mean)
        assert same == (not run.averaged)


@pytest.fixture(scope="module")
def of_every_rule(data: Any) -> Stack:
    """On a GPU a stack compiles its rules and captures them in a graph: nothing in them may need Python between kernels."""
    runs = [Run(name, i, 1.0, 1.0, 0.02, 8, {"ema": 0.5} if i % 2 else {}) for i, name in enumerate(stackable())]
    runs += [Run("dp-ivon-gradsq", 50 + i, 1.0, 1.0, 0.02, 8, {"curvature": c}) for i, c in enumerate(ESTIMATORS)]
    return Stack(runs, AnyNetwork(build), *data)


def states(stack: Stack) -> list[dict[str, Tensor]]:
    return [{k: v.clone() for k, v in part.state.items()} for part in stack.parts]


def check_same_updates(stack: Stack, update: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    g, eps = (torch.randn(stack.mean.shape, generator=generator) for _ in range(2))
    eager, other = states(stack), states(stack)
    for t in (1, 2):
        stack._update_rows(g, eps, torch.tensor(t), eager)
        update(g, eps, torch.tensor(t), other)
        for part, ours, theirs in zip(stack.parts, eager, other, strict=True):
            assert not torch.equal(ours["mean"], part.state["mean"])
            for key in ours:
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_no_rule_reads_a_value_and_its_record_of_operations_is_the_rule(of_every_rule: Stack) -> None:
    """Recorded on tensors that have no values."""

    def update(g: Tensor, eps: Tensor, t: Tensor, into: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        of_every_rule._update_rows(g, eps, t, into)
        return into

    g, eps = torch.zeros_like(of_every_rule.mean), torch.zeros_like(of_every_rule.mean)
    given = (g, eps, torch.tensor(1), states(of_every_rule))
    check_same_updates(of_every_rule, make_fx(update, tracing_mode="fake", _allow_non_fake_inputs=True)(*given))


@pytest.mark.slow
def test_every_rule_can_be_compiled_whole(of_every_rule: Stack) -> None:
    check_same_updates(of_every_rule, torch.compile(of_every_rule._update_rows, fullgraph=True, backend="aot_eager"))


def test_every_method_with_a_stacked_rule_has_the_defaults_of_the_registry() -> None:
    assert set(stackable()) <= set(METHODS)
    for name in stackable():
        registered = METHODS[name].defaults
        for key, value in defaults_of(name).items():
            assert registered[key] in (value, None), (name, key)


def test_a_run_without_an_average_has_none_to_give(data: Any) -> None:
    stack = Stack([Run("dp-sgd", 1, 1.0, 1.0, 0.1, 4)], AnyNetwork(build), *data)
    with pytest.raises(ValueError, match="keeps no average"):
        stack.posterior(0, averaged=True)


@pytest.mark.parametrize("options", [{"ema": 1.0}, {"beta2": 3.0}, {"cap": 0.0}, {"beta1": float("nan")}])
def test_options_of_a_run_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Run("dpagd", 1, 1.0, 1.0, 0.1, 4, options)


@pytest.mark.parametrize(
    ("method", "curvature", "message"),
    [
        ("dp-ivon-gradsq", "sined", "curvature='sined': is not a known estimator"),
        ("dp-ivon-gradsq", 1.0, "curvature=1.0: is not a name"),
        ("dp-calm", "reparam", "curvature='reparam': does not estimate a second moment"),
        ("dp-adam", "averaged", r"options=\['curvature'\]"),
    ],
)
def test_an_estimator_that_a_run_cannot_have_is_named(method: str, curvature: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(method, 1, 1.0, 1.0, 0.1, 4, {"curvature": curvature})


# ---- ensembles


def ensemble(data: Any, seeds: Any = range(3), **options: Any) -> Ensemble:
    return Ensemble(Run("dp-adam", 0, 0.9, 1.0, 0.05, 8, options), seeds, AnyNetwork(build), *data)


def test_the_joint_budget_is_that_of_all_releases_together(data: Any) -> None:
    made = ensemble(data)
    for _ in made.train(STEPS):
        pass
    facts: dict[str, Any] = {"dataset_size": N, "batch_size": 8, "delta": 1e-3, "noise_multiplier": 0.9}
    assert made.epsilon(1e-3) == pytest.approx(dpivon.budget(steps=3 * STEPS, **facts).epsilon, rel=1e-12)
    assert made.member_epsilon(1e-3) == pytest.approx(dpivon.budget(steps=STEPS, **facts).epsilon, rel=1e-12)
    assert made.epsilon(1e-3) > made.member_epsilon(1e-3)


def test_a_stack_of_different_runs_composes_too(data: Any) -> None:
    runs = [Run("dp-sgd", 1, 1.0, 1.0, 0.1, 4), Run("dp-adam", 2, 2.0, 1.0, 0.1, 8)]
    stack = Stack(runs, AnyNetwork(build), *data)
    for _ in stack.train(3):
        pass
    account = dpivon.Accountant()
    for run in runs:
        account.charge(noise_multiplier=run.noise_multiplier, sample_rate=run.batch_size / N, steps=3)
    assert joint_epsilon(stack, 1e-3) == account.get_epsilon(1e-3)


def test_an_ensemble_predicts_around_the_averages_that_its_method_keeps(data: Any) -> None:
    """Named by ``ema`` or kept by the method itself, as dp-steady does."""
    for run in (Run("dp-steady", 0, 0.9, 1.0, 3.5, 8), Run("dp-sgd", 0, 0.9, 1.0, 0.5, 8, {"ema": 0.9})):
        made = Ensemble(run, [1, 2], AnyNetwork(build), *data, steps=STEPS)
        for _ in made.train(STEPS):
            pass
        x = data[0][:5]
        averaged, last = (
            torch.stack([made.stack.model(i, averaged=a).eval()(x).softmax(-1) for i in range(2)]).mean(0).detach()
            for a in (True, False)
        )
        assert not torch.allclose(averaged, last, atol=1e-4)
        torch.testing.assert_close(made.predict(x).probs, averaged)


def test_a_run_without_noise_makes_the_ensemble_unaccounted(data: Any) -> None:
    made = Ensemble(Run("dp-sgd", 0, 0.0, 1.0, 0.05, 8), [1, 2], AnyNetwork(build), *data)
    for _ in made.train(1):
        pass
    with pytest.warns(dpivon.PrivacyWarning):
        assert made.epsilon(1e-3) == float("inf")


@pytest.mark.slow
def test_noise_for_a_joint_target_is_enough_and_not_too_much() -> None:
    facts: dict[str, Any] = {"delta": 1e-4, "dataset_size": 1000, "batch_size": 50}
    sigma = ensemble_noise(4, target_epsilon=3.0, steps=100, **facts)
    assert 2.9 < dpivon.budget(steps=400, noise_multiplier=sigma, **facts).epsilon <= 3.0
    assert sigma > ensemble_noise(1, target_epsilon=3.0, steps=100, **facts)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_ensemble_predicts_the_mixture_of_its_members(data: Any, ema: float | None) -> None:
    made = ensemble(data, **({} if ema is None else {"ema": ema}))
    for _ in made.train(STEPS):
        pass
    x = data[0].permute(0, 3, 1, 2)[:7]
    members = [
        predict(made.stack.model(i), made.stack.posterior(i, averaged=ema is not None), x).probs for i in range(3)
    ]
    mixture = torch.stack(members).mean(0)
    got = made.predict(x)
    torch.testing.assert_close(got.probs, mixture)
    torch.testing.assert_close(got.probs.sum(-1), torch.ones(7))
    torch.testing.assert_close(got.entropy, torch.special.entr(mixture).sum(-1))
    disagreement = torch.special.entr(mixture).sum(-1) - torch.special.entr(torch.stack(members)).sum(-1).mean(0)
    torch.testing.assert_close(got.mutual_information, disagreement, rtol=1e-3, atol=1e-6)
    assert (got.mutual_information > 1e-5).any()
    assert got.samples == 3


def test_members_need_seeds_of_their_own(data: Any) -> None:
    for seeds in ([1], [1, 1], [1, 2, 1]):
        with pytest.raises(ValueError, match="seeds="):
            ensemble(data, seeds)


def test_an_ema_follows_the_private_optimizer() -> None:
    """Attached to what make_private returned: one average a release, of what the inner optimizer made of it."""
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long)), batch_size=4
    )
    private, optimizer, batches = dpivon.PrivacyEngine().make_private(
        module=model, optimizer=inner, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    average = EMA(optimizer, 0.5)
    iterates = []
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y, reduction="mean").backward()
        optimizer.step()
        iterates.append(model.weight.detach().clone())
    assert len(iterates) == 2
    torch.testing.assert_close(average.average(model.weight), (0.5 * iterates[0] + iterates[1]) / 1.5)
