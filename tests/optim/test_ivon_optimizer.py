"""IVON keeps the contract of ``torch.optim.Optimizer``, and its own about sampling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpivon import IVON, ArgumentError, DpivonError
from dpivon.optim.curvature import Evidence

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (16,), generator=torch.Generator().manual_seed(2))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def make(model: nn.Module, seed: int = 3, **options: Any) -> IVON:
    options = {"lr": 0.1, "ess": 50.0, "beta2": 0.99, **options}
    return IVON(model.parameters(), generator=torch.Generator().manual_seed(seed), **options)


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)), Y[: len(x)])


def train(model: nn.Module, optimizer: IVON, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(optimizer.mc_samples):
            with optimizer.sampled_params(train=True):
                loss_of(model).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def same_state(left: IVON, right: IVON) -> bool:
    mine, theirs = left.state_dict()["state"], right.state_dict()["state"]
    return mine.keys() == theirs.keys() and all(
        mine[i].keys() == theirs[i].keys()
        and all(torch.equal(torch.as_tensor(mine[i][k]), torch.as_tensor(theirs[i][k])) for k in mine[i])
        for i in mine
    )


# ---- saving, resuming, copying


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(dtype: torch.dtype, samples: int) -> None:
    model = make_model(dtype)
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.generator.get_state()], file)
    file.seek(0)
    train(model, optimizer, 4)

    resumed_model = make_model(dtype)
    resumed = make(resumed_model, seed=99, mc_samples=samples)
    saved_weights, saved_state, saved_generator = torch.load(file, weights_only=True)
    resumed_model.load_state_dict(saved_weights)
    resumed.load_state_dict(saved_state)
    resumed.generator.set_state(saved_generator)
    train(resumed_model, resumed, 4)
    assert equal(weights(model), weights(resumed_model))
    assert same_state(optimizer, resumed)
    assert all(s["step"] == 7 for s in resumed.state.values())


def test_a_resumed_run_does_not_restart_the_debiasing() -> None:
    """With a constant gradient the debiased momentum is that gradient, so that every step has the same size."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options: dict[str, Any] = {"lr": 0.1, "ess": 1.0, "weight_decay": 0.0, "curvature": "gradsq", "beta2": 1.0}
    optimizer = IVON([p], **options)

    def step(optimizer: IVON) -> float:
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        return p.item() - before

    first = [step(optimizer) for _ in range(3)]
    resumed = IVON([p], **options)
    resumed.load_state_dict(optimizer.state_dict())
    assert [*first, step(resumed), step(resumed)] == pytest.approx([-0.1] * 5, rel=1e-12)


def test_loading_keeps_full_precision_state_for_bf16_parameters() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make(model)
    train(model, optimizer, 3)
    other_model = make_model(torch.bfloat16)
    other_model.load_state_dict(model.state_dict())
    other = make(other_model)
    other.load_state_dict(optimizer.state_dict())
    assert same_state(optimizer, other)
    for p, state in other.state.items():
        assert p.dtype == torch.bfloat16
        assert {state[k].dtype for k in ("momentum", "hess", "mean")} == {torch.float32}
        assert torch.equal(state["mean"].bfloat16(), p.detach())
        assert not torch.equal(state["mean"].bfloat16().float(), state["mean"])  # it really holds more than p does
    mean = other.posterior().mean
    assert all(torch.equal(mean[str(i)], s["mean"]) for i, s in enumerate(other.state.values()))


def test_loaded_state_is_a_copy() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other_model = make_model()
    other = make(other_model)
    other.load_state_dict(saved)
    train(other_model, other, 2)
    assert all(torch.equal(saved["state"][i]["hess"], kept["state"][i]["hess"]) for i in kept["state"])


def test_a_deepcopy_continues_identically_and_independently() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 3)
    twin_model, twin = copy.deepcopy((model, optimizer))
    at_copy = weights(model)
    train(twin_model, twin, 3)
    assert equal(weights(model), at_copy)
    train(model, optimizer, 3)
    assert equal(weights(model), weights(twin_model))
    assert same_state(optimizer, twin)


def test_a_pickled_optimizer_continues_identically() -> None:
    model = make_model()
    optimizer = make(model, curvature="gradsq", mc_samples=2)
    train(model, optimizer, 3)
    twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 3)
    train(twin_model, twin, 3)
    assert (twin.mc_samples, twin.curvature.name) == (2, "gradsq")
    assert equal(weights(model), weights(twin_model))


def test_a_copy_holds_no_pending_gradients() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=2)
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()
    assert copy.deepcopy(optimizer).samples_used == 0
    assert optimizer.samples_used == 1
    assert all(set(s) == {"step", "momentum", "hess"} for s in optimizer.state_dict()["state"].values())


# ---- precision


def test_updates_too_small_for_bf16_accumulate_in_the_master_mean() -> None:
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = IVON([p], lr=1e-4, ess=1.0, beta1=0.0, weight_decay=0.0, curvature="gradsq", beta2=1.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(p.detach() - 1e-4, p.detach())  # one update alone is rounded away
    torch.testing.assert_close(optimizer.posterior().mean["0"], torch.full((8,), 0.99), rtol=1e-5, atol=0)
    assert torch.equal(p.detach(), torch.full((8,), 0.99).bfloat16())


def test_weights_written_into_a_bf16_parameter_become_the_mean() -> None:
    p = nn.Parameter(torch.full((6,), 0.3).bfloat16())
    optimizer = IVON([p], lr=0.1, ess=1e12, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    p.grad = torch.full_like(p, 1e-4)
    optimizer.step()
    master = optimizer.posterior().mean["0"].clone()
    with torch.no_grad():
        p[:3] = 2.0
    written = optimizer.posterior().mean["0"]
    assert torch.equal(written[:3], torch.full((3,), 2.0))
    assert torch.equal(written[3:], master[3:])
    with optimizer.sampled_params(train=True):  # σ = 1e-6: the sample shows where the mean is
        assert torch.equal(p.detach()[:3], torch.full((3,), 2.0).bfloat16())
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.posterior().mean["0"][:3], torch.full((3,), 1.9))


@pytest.mark.parametrize("cast", ["double", "float", "bfloat16", "half"])
@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16])
def test_state_follows_a_model_that_is_cast_after_training_began(start: torch.dtype, cast: str) -> None:
    """State is in the parameter's precision, and in fp32 with an fp32 master below that; the cast weights are the mean."""
    model = make_model(start)
    optimizer = make(model)
    train(model, optimizer, 2)
    momentum = optimizer.state[model[0].weight]["momentum"].clone()
    getattr(model, cast)()
    low = cast in ("bfloat16", "half")
    dtype = model[0].weight.dtype
    mean = optimizer.posterior().mean
    expected = torch.float32 if low else dtype
    for p, m in zip(model.parameters(), mean.values(), strict=True):
        assert m.dtype == expected
        assert torch.equal(m.to(dtype), p.detach())
    state = optimizer.state[model[0].weight]
    assert {v.dtype for k, v in state.items() if k != "step"} == {expected}
    assert ("mean" in state) == low
    assert torch.equal(state["momentum"], momentum.to(expected))
    train(model, optimizer, 1)
    assert state["step"] == 3
    assert all(v.dtype == expected for v in optimizer.posterior().variance.values())


def test_casting_before_the_first_step_is_the_same_as_casting_before_the_optimizer() -> None:
    early, late = make_model(torch.float64), make_model()
    optimizer = make(late)
    late.double()
    with torch.no_grad():
        for p, q in zip(late.parameters(), early.parameters(), strict=True):
            p.copy_(q)
    other = make(early)
    train(late, optimizer, 3)
    train(early, other, 3)
    assert equal(weights(early), weights(late))


def test_training_under_bf16_autocast_follows_full_precision() -> None:
    full, mixed = make_model(), make_model()
    ours, theirs = make(full), make(mixed)
    for _ in range(5):
        for model, optimizer, amp in ((full, ours, False), (mixed, theirs, True)):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    loss = loss_of(model)
                loss.backward()
            optimizer.step()
    a, b = torch.cat([w.flatten() for w in weights(full)]), torch.cat([w.flatten() for w in weights(mixed)])
    assert mixed[0].weight.dtype == torch.float32
    assert not torch.equal(a, b)
    assert (a - b).norm() < 0.01 * a.norm()  # bf16 has a relative precision of 2⁻⁸


# ---- which parameters move


def test_frozen_parameters_stay_and_are_not_in_the_posterior() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make(model)
    before = weights(model)
    with optimizer.sampled_params():
        assert torch.equal(model[0].weight, before[0])
        assert not torch.equal(model[2].weight, before[2])
    train(model, optimizer, 2)
    after = weights(model)
    assert equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    assert set(optimizer.posterior(model).mean) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("samples", [1, 3])
def test_a_parameter_frozen_with_its_gradient_in_place_stays(samples: int) -> None:
    model = make_model()
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 1)
    loss_of(model).backward()
    model[0].requires_grad_(False)
    before = weights(model)
    for _ in range(samples):
        with optimizer.sampled_params(train=True):
            loss_of(model).backward()
    optimizer.step()
    assert equal(weights(model)[:2], before[:2])
    assert not torch.equal(weights(model)[2], before[2])


@pytest.mark.parametrize("samples", [1, 3])
def test_unused_parameters_are_left_alone_and_debiased_by_their_own_count(samples: int) -> None:
    model = make_model()
    spare = nn.Parameter(torch.ones(2))
    model.register_parameter("spare", spare)
    optimizer = make(model, mc_samples=samples)
    train(model, optimizer, 3)
    assert torch.equal(spare.detach(), torch.ones(2))
    assert optimizer.state[spare]["step"] == 0
    assert optimizer.state[model[0].weight]["step"] == 3


def test_a_parameter_used_at_some_samples_only_has_gradient_zero_at_the_others() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = IVON([p, q], lr=0.1, ess=1.0, mc_samples=2, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    with optimizer.sampled_params(train=True):
        (3.0 * p + 4.0 * q).sum().backward()
    with optimizer.sampled_params(train=True):
        p.sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 * 2.0))
    torch.testing.assert_close(q.detach(), torch.full((2,), 1 - 0.1 * 2.0))


def test_parameter_groups_use_their_own_hyperparameters() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = IVON(
        [{"params": [p], "lr": 0.5, "hess_init": 4.0, "ess": 10.0}, {"params": [q]}],
        lr=0.1,
        ess=100.0,
        hess_init=2.0,
        beta2=1.0,
        weight_decay=0.0,
        curvature="gradsq",
        rescale_lr=False,
    )
    variance = optimizer.posterior().variance
    torch.testing.assert_close(variance["0"], torch.full((3,), 1 / 40))
    torch.testing.assert_close(variance["1"], torch.full((3,), 1 / 200))
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.5 / 4))
    torch.testing.assert_close(q.detach(), torch.full((3,), 1 - 0.1 / 2))


def test_a_group_added_later_is_checked_and_trained() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = IVON([p], lr=0.1, ess=10, curvature="gradsq")
    with pytest.raises(ArgumentError, match=r"ess=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "ess": -1})
    optimizer = IVON([p], lr=0.1, ess=10, curvature="gradsq")
    optimizer.add_param_group({"params": [q], "lr": 0.0})
    with optimizer.sampled_params(train=True):
        (p * q).sum().backward()
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(3))
    assert torch.equal(q.detach(), torch.ones(3))


def test_a_learning_rate_scheduler_scales_the_steps() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = IVON([p], lr=0.8, ess=1.0, beta1=0.0, beta2=1.0, weight_decay=0.0, curvature="gradsq")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    moves = []
    for _ in range(6):
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
        moves.append(before - p.item())
    assert moves == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2, 0.2], rel=1e-12)


# ---- closures


def test_a_closure_sees_samples_and_its_losses_are_averaged() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=4)
    mean = weights(model)
    seen, losses = [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.append(model[0].weight.detach().clone())
        losses.append(loss.detach())
        return loss

    result = optimizer.step(closure)
    assert len(seen) == 4
    assert all(not torch.equal(theta, mean[0]) for theta in seen)
    assert all(not torch.equal(seen[0], theta) for theta in seen[1:])
    torch.testing.assert_close(result.detach(), torch.stack(losses).mean())


@pytest.mark.parametrize("enters_context", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_closure_gives_the_step_of_the_explicit_loop(samples: int, enters_context: bool) -> None:
    explicit_model, model = make_model(), make_model()
    explicit, optimizer = make(explicit_model, mc_samples=samples), make(model, mc_samples=samples)
    train(explicit_model, explicit, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        if enters_context:
            with optimizer.sampled_params(train=True):
                loss = loss_of(model)
                loss.backward()
        else:
            loss = loss_of(model)
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert equal(weights(model), weights(explicit_model))
    assert same_state(optimizer, explicit)


def test_a_closure_without_a_result_is_fine() -> None:
    model = make_model()
    optimizer = make(model, mc_samples=2)
    before = weights(model)

    def closure() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()

    assert optimizer.step(closure) is None
    assert not equal(weights(model), before)


def test_a_closure_that_fails_leaves_the_mean_and_the_optimizer_usable() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model), make(reference_model)
    before = weights(model)

    def closure() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert equal(weights(model), before)
    with pytest.raises(DpivonError, match="already inside"), optimizer.sampled_params(), optimizer.sampled_params(True):
        pass  # the nesting that only a running closure may do is an error again
    optimizer.generator.manual_seed(3)
    train(model, optimizer, 2)
    train(reference_model, reference, 2)
    assert equal(weights(model), weights(reference_model))


# ---- gradients of one step


def test_gradients_accumulate_inside_one_context() -> None:
    whole_model, parts_model = make_model(torch.float64), make_model(torch.float64)
    whole, parts = make(whole_model), make(parts_model)
    for _ in range(3):
        whole.zero_grad()
        with whole.sampled_params(train=True):
            loss_of(whole_model).backward()
        whole.step()
        parts.zero_grad()
        with parts.sampled_params(train=True):
            for x, y in zip(X.double().split(4), Y.split(4), strict=True):
                (nn.functional.cross_entropy(parts_model(x), y) / 4).backward()
        parts.step()
    for a, b in zip(weights(whole_model), weights(parts_model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("declared", [1, 3])
@pytest.mark.parametrize("estimator", ["reparam", "gradsq"])
def test_several_contexts_average(estimator: str, declared: int) -> None:
    """g, g² and g ⊙ ε are averages over the contexts entered, whether or not mc_samples announced them."""
    model = make_model(torch.float64)
    optimizer = make(model, curvature=estimator, mc_samples=declared, beta1=0.0, beta2=0.9, debias=False)
    mean = weights(model)
    gradients, perturbations = [], []
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            loss_of(model).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            perturbations.append([p.detach() - m for p, m in zip(model.parameters(), mean, strict=True)])
    optimizer.step()
    for i, p in enumerate(model.parameters()):
        gs = torch.stack([g[i] for g in gradients])
        epsilons = torch.stack([e[i] for e in perturbations])
        h_hat = 50.0 * (gs.square().mean(0) if estimator == "gradsq" else (gs * epsilons).mean(0) * (1 + 1e-4))
        h = 0.9 + 0.1 * h_hat + 0.01 * (1 - h_hat).square() / (2 * (1 + 1e-4))
        torch.testing.assert_close(optimizer.state[p]["momentum"], gs.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["hess"], h, rtol=1e-9, atol=1e-10)


def test_zero_grad_after_a_complete_set_of_samples_starts_over() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model), make(reference_model)
    with optimizer.sampled_params(train=True):
        (100.0 * loss_of(model)).backward()
    optimizer.zero_grad()
    optimizer.generator.manual_seed(3)
    train(model, optimizer, 1)
    train(reference_model, reference, 1)
    assert equal(weights(model), weights(reference_model))


# ---- sampling


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_restored_exactly_whatever_happens_inside(
    dtype: torch.dtype, training: bool, error: type[BaseException]
) -> None:
    model = make_model(dtype)
    optimizer = make(model)
    train(model, optimizer, 1)
    before, posterior = weights(model), optimizer.posterior()

    def fail() -> None:
        assert not equal(weights(model), before)
        raise error

    with pytest.raises(error), optimizer.sampled_params(train=training):
        fail()
    assert equal(weights(model), before)
    assert all(torch.equal(m, posterior.mean[name]) for name, m in optimizer.posterior().mean.items())
    with optimizer.sampled_params(train=training):
        assert not equal(weights(model), before)
    assert equal(weights(model), before)


def test_weights_are_restored_where_the_parameters_are_whatever_memory_they_were_given() -> None:
    """The room that holds the mean meanwhile is kept between blocks; parameters may be moved between them, and inside."""
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 1)
    with torch.inference_mode(), optimizer.sampled_params():  # a prediction makes the room that training writes to
        model(X)
    before = weights(model)
    with optimizer.sampled_params(train=True):
        for p in model.parameters():
            p.data = p.data.clone()
    assert equal(weights(model), before)
    model.double()
    before = weights(model)
    with optimizer.sampled_params():
        assert not equal(weights(model), before)
    assert equal(weights(model), before)
    next(model.parameters()).requires_grad_(False)  # one less to keep
    with optimizer.sampled_params():
        assert not equal(weights(model)[1:], before[1:])
    assert equal(weights(model), before)


def test_a_sample_that_failed_is_used_again_and_counts_once() -> None:
    model, reference_model = make_model(), make_model()
    optimizer, reference = make(model, mc_samples=2), make(reference_model, mc_samples=2)
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()

    def fail_after_backward() -> None:
        loss_of(model).backward()
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        fail_after_backward()
    optimizer.zero_grad()
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()
    optimizer.step()
    train(reference_model, reference, 1)
    assert equal(weights(model), weights(reference_model))


def test_what_a_failed_sample_left_behind_is_not_learned_from() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = IVON([p, q], lr=0.1, ess=1.0, mc_samples=2, curvature="gradsq", beta1=0.0, beta2=1.0, weight_decay=0.0)
    with optimizer.sampled_params(train=True):
        (3.0 * p).sum().backward()

    def fail_after_backward() -> None:
        (p + 5.0 * q).sum().backward()
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        fail_after_backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 * 3.0))
    assert torch.equal(q.detach(), torch.ones(2))


def test_a_failure_after_the_samples_were_rewound_leaves_the_count_at_zero() -> None:
    model = make_model()
    optimizer = make(model)

    def rewind_and_fail() -> None:
        optimizer.rewind_samples()  # as a private optimizer does when a batch is drawn inside the block
        raise RuntimeError

    with pytest.raises(RuntimeError), optimizer.sampled_params(train=True):
        rewind_and_fail()
    assert optimizer.samples_used == 0


def test_a_full_precision_checkpoint_gives_a_bf16_model_its_master_mean() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 2)
    low_model = make_model(torch.bfloat16)
    low_model.load_state_dict(model.state_dict())
    low = make(low_model)
    low.load_state_dict(optimizer.state_dict())
    for p, m in zip(low_model.parameters(), low.posterior().mean.values(), strict=True):
        assert m.dtype == torch.float32
        assert torch.equal(m, p.detach().float())
        assert torch.equal(low.state[p]["mean"], m)


def test_predicting_between_backward_and_step_does_not_change_the_step() -> None:
    class TwoStreams(IVON):
        """Training noise from a fixed list, so that prediction samples do not shift it."""

        def _standard_normal(self, like: Tensor) -> Tensor:
            if training[0]:
                return torch.randn(like.shape, generator=fixed)
            return torch.randn(like.shape, generator=other)

    outcomes = []
    for predicts in (False, True):
        training, fixed, other = [True], torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
        model = make_model()
        optimizer = TwoStreams(model.parameters(), lr=0.1, ess=50.0, beta2=0.99, mc_samples=2)
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                training[0] = True
                with optimizer.sampled_params(train=True):
                    loss_of(model).backward()
                training[0] = False
                if predicts:
                    with optimizer.sampled_params(), torch.no_grad():
                        model(X)
            optimizer.step()
        outcomes.append((weights(model), optimizer))
    (plain, plain_optimizer), (interrupted, interrupted_optimizer) = outcomes
    assert equal(plain, interrupted)
    assert same_state(plain_optimizer, interrupted_optimizer)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        lambda o: o.state_dict(),
        lambda o: o.step(),
        lambda o: o.posterior(),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.dumps(o),
    ],
    ids=["state_dict", "step", "posterior", "deepcopy", "pickle"],
)
def test_reading_the_mean_inside_the_context_is_an_error(act: Callable[[IVON], Any], training: bool) -> None:
    model = make_model()
    optimizer = make(model)
    with optimizer.sampled_params(train=training), pytest.raises(DpivonError, match="inside sampled_params"):
        act(optimizer)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_nested_contexts_are_an_error_and_do_no_harm(outer: bool, inner: bool) -> None:
    model = make_model()
    optimizer = make(model)
    before = weights(model)
    with optimizer.sampled_params(train=outer):
        theta = weights(model)
        with pytest.raises(DpivonError, match="already inside"), optimizer.sampled_params(train=inner):
            pass
        assert equal(weights(model), theta)
    assert equal(weights(model), before)


def test_backward_after_leaving_the_context_raises() -> None:
    model = make_model()
    optimizer = make(model)
    with optimizer.sampled_params(train=True):
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- what is refused


@pytest.mark.parametrize("samples", [1, 2])
def test_sparse_gradients_are_refused(samples: int) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = make(embedding, mc_samples=samples)
    before = weights(embedding)

    def closure() -> None:
        embedding(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(DpivonError, match="sparse"):
        optimizer.step(closure)
    assert equal(weights(embedding), before)


def test_a_step_without_a_gradient_is_refused() -> None:
    model = make_model()
    optimizer = make(model)
    with pytest.raises(DpivonError, match=r"step\(\) without a gradient"):
        optimizer.step()


def test_a_step_without_a_sample_warns_once_and_leaves_the_curvature() -> None:
    model = make_model()
    optimizer = make(model)
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="needs a θ-sample"):
        optimizer.step()
    loss_of(model).backward()
    optimizer.step()  # a second warning would be an error
    assert all(torch.equal(s["hess"], torch.ones_like(s["hess"])) for s in optimizer.state.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("ess", 0.0),
        ("ess", -5),
        ("hess_init", 0.0),
        ("hess_init", -1.0),
        ("beta1", -0.1),
        ("beta1", 1.1),
        ("beta2", -0.1),
        ("beta2", 1.1),
        ("weight_decay", -1e-4),
        ("mc_samples", 0),
        ("mc_samples", 1.5),
        ("clip_radius", 0.0),
        ("clip_radius", -1.0),
        ("clip_radius", float("nan")),
        ("curvature", "fisher"),
        ("curvature", 3),
        ("lr", "fast"),
    ],
)
def test_a_bad_hyperparameter_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(make_model(), **{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_both_names_of_the_estimator_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"hess_approx='price'.*curvature='gradsq'"):
        make(make_model(), curvature="gradsq", hess_approx="price")


# ---- limiting settings


def test_beta1_of_one_never_moves_the_momentum() -> None:
    model = make_model()
    optimizer = make(model, beta1=1.0, weight_decay=0.0)
    before = weights(model)
    train(model, optimizer, 3)
    assert equal(weights(model), before)
    assert all(not s["momentum"].any() for s in optimizer.state.values())
    assert any((s["hess"] != 1).any() for s in optimizer.state.values())


def test_beta2_of_one_never_moves_the_curvature() -> None:
    model = make_model()
    optimizer = make(model, beta2=1.0)
    before = weights(model)
    train(model, optimizer, 3)
    assert all(torch.equal(s["hess"], torch.ones_like(s["hess"])) for s in optimizer.state.values())
    assert not equal(weights(model), before)


@pytest.mark.parametrize("lr", [0.25, 0.1])
@pytest.mark.parametrize("estimator", ["gradsq", "reparam"])
def test_degenerate_settings_are_exactly_sgd(estimator: str, lr: float) -> None:
    """Bit for bit where lr·g is exact; SGD's fused multiply-add rounds once where we round twice."""
    sgd_model, model = make_model(), make_model()
    sgd = torch.optim.SGD(sgd_model.parameters(), lr=lr)
    optimizer = IVON(
        model.parameters(),
        lr=lr,
        ess=1e30,
        beta1=0.0,
        beta2=1.0,
        weight_decay=0.0,
        rescale_lr=False,
        curvature=estimator,
    )
    for _ in range(30):
        sgd.zero_grad()
        loss_of(sgd_model).backward()
        sgd.step()
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):  # σ = 1e-15 is below the resolution of every weight here
            loss_of(model).backward()
        optimizer.step()
    if lr == 0.25:
        assert equal(weights(model), weights(sgd_model))
    for ours, theirs in zip(weights(model), weights(sgd_model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


# ---- estimators and names


class Recorder:
    """Curvature as the mean square of the whole tensor: a rule that is not elementwise."""

    name = "tensor-mean"
    elementwise = False
    needs_sample = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, evidence: Evidence[Any]) -> Tensor:
        assert isinstance(evidence.g, Tensor)
        self.seen.append(tuple(evidence.g.shape))
        return evidence.ess * evidence.g_squared.mean().expand_as(evidence.g)


def test_an_estimator_that_is_not_elementwise_is_called_tensor_by_tensor() -> None:
    model = make_model()
    recorder = Recorder()
    optimizer = make(model, curvature=recorder, beta2=0.5)
    train(model, optimizer, 1)
    assert recorder.seen == [tuple(p.shape) for p in model.parameters()]
    for p in model.parameters():
        h_hat = 50.0 * p.grad.square().mean()
        h = 0.5 + 0.5 * h_hat + 0.25 * (1 - h_hat) ** 2 / (2 * (1 + 1e-4))
        torch.testing.assert_close(optimizer.state[p]["hess"], h.expand_as(p), rtol=1e-5, atol=1e-6)
    assert optimizer.posterior().metadata["curvature"] == "tensor-mean"


def test_upstreams_name_of_the_estimator_is_accepted() -> None:
    assert make(make_model(), hess_approx="price").curvature.name == "reparam"
    assert make(make_model(), curvature="price").curvature.name == "reparam"
    assert make(make_model(), hess_approx="gradsq").curvature.name == "gradsq"
    assert make(make_model()).curvature.name == "reparam"


def test_the_posterior_is_named_after_named_parameters_or_the_model_or_positions() -> None:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    named = IVON(model.named_parameters(), lr=0.1, ess=10)
    bare = IVON(model.parameters(), lr=0.1, ess=10)
    assert list(named.posterior().mean) == names
    assert list(bare.posterior().mean) == ["0", "1", "2", "3"]
    assert list(bare.posterior(model).mean) == names
    model[0].weight.requires_grad_(False)
    assert list(bare.posterior().mean) == ["0", "1", "2"]
    assert bare.posterior().matches(model)
    with pytest.raises(ArgumentError, match="does not contain"):
        bare.posterior(make_model())


def test_the_posterior_is_a_snapshot() -> None:
    model = make_model()
    optimizer = make(model)
    train(model, optimizer, 1)
    posterior = optimizer.posterior()
    mean = {name: m.clone() for name, m in posterior.mean.items()}
    var = {name: v.clone() for name, v in posterior.variance.items()}
    train(model, optimizer, 2)
    assert all(torch.equal(posterior.mean[name], mean[name]) for name in mean)
    assert all(torch.equal(posterior.variance[name], var[name]) for name in var)
    assert not torch.equal(optimizer.posterior().mean["0"], mean["0"])


def test_names_of_a_model_wrapped_by_opacus_are_the_models_own() -> None:
    from opacus.grad_sample import GradSampleModule

    model = make_model()
    optimizer = make(model)
    assert list(optimizer.posterior(GradSampleModule(model)).mean) == [name for name, _ in model.named_parameters()]
