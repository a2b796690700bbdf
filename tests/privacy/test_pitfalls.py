"""Each known way in which a variational optimizer and a privacy engine have lost the guarantee together: closed here."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ivon as upstream
import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager as OpacusMemoryManager
from private_runs import CLASSES, EXAMPLES, FEATURES, CapturingNoise, Run, convnet, data, images, ivon, make, mlp, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import ArgumentError, BatchMemoryManager, DpivonError, PrivacyError, PrivacyWarning
from dpivon.privacy.clipping import FlatClipping, clipped_sum

C = 0.01
MANAGERS = [BatchMemoryManager, OpacusMemoryManager]


def alike(n: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """n equal examples with large gradients: each contributes exactly C in the same direction, so that ‖S‖/C counts them."""
    x, _ = data(1)
    return 10.0 * x.repeat(n, 1), torch.zeros(n, dtype=torch.long)


def count(total: Tensor, bound: float = C) -> float:
    return float(total.norm()) / bound


def parameters(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.optimizer.params]


# ---- 1. raw gradients that reach the optimizer


def test_upstream_ivon_is_refused_by_name_and_left_alone():
    model = mlp()
    optimizer = upstream.IVON(model.parameters(), lr=0.1, ess=100.0)
    with pytest.raises(ArgumentError, match=r"ivon.*captures raw gradients.*dpivon.IVON"):
        make(module=model, optimizer=lambda _: optimizer)
    assert not hasattr(model, "autograd_grad_sample_hooks")


def step_under_opacus(sigma: float, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x, y = data()
    model = mlp()
    optimizer = dpivon.IVON(model.parameters(), lr=0.1, ess=1e4, **options)
    model, private, _ = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=EXAMPLES),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    for _ in range(optimizer.mc_samples):
        with optimizer.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
    private.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_our_ivon_under_opacus_own_engine_learns_from_the_noised_gradient():
    quiet, loud = step_under_opacus(0.5), step_under_opacus(1e6)
    assert max(float((a - b).abs().max()) for a, b in zip(quiet, loud, strict=True)) > 1.0


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing")
def test_our_ivon_with_several_samples_refuses_to_average_raw_gradients_under_opacus():
    with pytest.raises(PrivacyError, match="mc_samples=2"):
        step_under_opacus(1.0, mc_samples=2)


@pytest.mark.parametrize("optimizer", [sgd, lambda m: torch.optim.Adam(m.parameters()), ivon()])
def test_the_inner_optimizer_cannot_step_on_raw_gradients(mode, optimizer):
    run = make(mode, optimizer=optimizer)
    before = parameters(run)
    (x, y) = next(iter(run.loader))
    run.backward(x, y)
    with pytest.raises(PrivacyError, match="make_private returned"):
        run.inner.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))
    run.step(x, y)
    assert not torch.equal(before[0], parameters(run)[0])


def test_after_a_step_the_gradient_of_every_parameter_is_the_released_one(mode):
    run = make(mode, optimizer=sgd)
    run.noise.answer = torch.ones_like
    total = run.release(*data())
    grads = torch.cat([p.grad.flatten() for p in run.optimizer.params])
    torch.testing.assert_close(grads, ((total + 1.0) / EXAMPLES).float())


def test_a_parameter_frozen_between_backward_and_step_keeps_no_raw_gradient():
    run = make("hooks", optimizer=sgd)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    frozen = run.optimizer.params[0]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    run.optimizer.step()
    assert torch.equal(before, frozen)


# ---- 2. logical batches that are left half-way


def train_micro_batches(run: Run, batches: Any, fail_at: int, how: str) -> None:
    """Ordinary training on micro-batches, disturbed once at micro-batch ``fail_at``."""
    for k, (x, y) in enumerate(batches):
        run.optimizer.zero_grad()
        try:
            run.backward(x, y)
            if k == fail_at and how == "continue":
                raise RuntimeError("this micro-batch failed")
            run.optimizer.step()
        except RuntimeError:
            continue
        if k == fail_at and how == "break":
            break
        if k == fail_at and how == "exception":
            raise KeyboardInterrupt


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("how", ["break", "exception", "continue"])
@pytest.mark.parametrize("fail_at", [0, 1])
def test_no_example_enters_a_release_twice_after_a_logical_batch_was_left(mode, manager, how, fail_at):
    run = make(mode, data=alike(), max_grad_norm=C)
    if how == "exception":
        with (
            pytest.raises(KeyboardInterrupt),
            manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches,
        ):
            train_micro_batches(run, batches, fail_at, how)
    else:
        with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
            train_micro_batches(run, batches, fail_at, how)
    with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        train_micro_batches(run, batches, -1, "no")
    for x, y in run.loader:
        run.step(x, y)
    counts = [count(total) for total in run.contributions]
    assert len(counts) >= 2
    assert max(counts) <= EXAMPLES * (1 + 1e-5)
    assert counts[-1] == pytest.approx(EXAMPLES, rel=1e-4)
    assert len(run.engine.accountant) == len(counts)


@pytest.mark.parametrize("manager", MANAGERS)
def test_undisturbed_micro_batches_give_the_sum_of_the_whole_batch(mode, manager):
    whole, split = make(mode), make(mode)
    expected = whole.release(*data())
    with manager(data_loader=split.loader, max_physical_batch_size=5, optimizer=split.optimizer) as batches:
        train_micro_batches(split, batches, -1, "no")
    assert len(split.contributions) == 1
    torch.testing.assert_close(split.contributions[0], expected, rtol=1e-5, atol=1e-6)


def test_opacus_memory_manager_with_workers_is_refused():
    run = make(workers=1)
    with (
        pytest.raises(PrivacyError, match=r"dpivon\.BatchMemoryManager"),
        OpacusMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches,
    ):
        next(iter(batches))


@pytest.mark.parametrize("fail_at", [None, 0, 1, 2])
def test_our_memory_manager_with_workers_keeps_logical_batches_apart_even_after_an_error(fail_at):
    """Workers draw batches ahead, so that a draw does not say which logical batch is under way."""
    run = make(workers=1, data=alike(), batch_size=4, max_grad_norm=C)
    sizes, sum_of = [], []
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as batches:
        announce = run.optimizer.begin_micro_batch
        run.optimizer.begin_micro_batch = lambda *, first, last: (
            sizes.extend([0] * first),
            announce(first=first, last=last),
        )
        for k, (x, y) in enumerate(batches):
            sizes[-1] += len(x)
            run.optimizer.zero_grad()
            run.backward(x, y)
            if k == fail_at:
                continue  # after an error, say
            run.optimizer.step()
            sum_of += [sizes[-1]] * (len(run.contributions) - len(sum_of))
    counts = [count(total) for total in run.contributions]
    assert len(counts) == len(run.engine.accountant) == len(sum_of) >= len(run.loader) - 1
    assert all(released <= drawn * (1 + 1e-5) for released, drawn in zip(counts, sum_of, strict=True))
    if fail_at is None:
        assert counts == [pytest.approx(drawn, rel=1e-4, abs=1e-6) for drawn in sizes]


def test_leaving_our_memory_manager_drops_the_partial_sum(mode):
    run = make(mode)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        run.step(*next(iter(batches)))
        assert all(p.summed_grad is not None for p in run.optimizer.params)
    assert all(p.summed_grad is None for p in run.optimizer.params)


@pytest.mark.parametrize("manager", MANAGERS)
def test_stepping_twice_on_one_micro_batch_is_refused(mode, manager):
    run = make(mode, data=alike(), max_grad_norm=C)
    with manager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        x, y = next(iter(batches))
        run.step(x, y)
        with pytest.raises(PrivacyError, match="twice on one micro-batch"):
            run.step(x, y)
    assert run.contributions == []
    assert len(run.engine.accountant) == 0


def test_an_error_while_summing_leaves_the_sum_of_the_earlier_micro_batches_whole(monkeypatch):
    run = make("hooks", data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        for k, (x, y) in enumerate(batches):
            if k == 1:  # the second sum fails at its last parameter, and is tried again
                last = run.optimizer.params[-1]
                good, last.summed_grad = last.summed_grad, torch.zeros(99)
                with pytest.raises(RuntimeError):
                    run.step(x, y)
                last.summed_grad = good
            run.step(x, y)
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]


def test_a_release_that_failed_leaves_nothing_for_the_next_one(mode):
    """As the loop in Opacus's documentation has it: zero_grad comes after step, and is jumped over by the error."""
    run = make(mode, data=alike(), max_grad_norm=C)
    run.noise.fail = True
    x, y = next(iter(run.loader))
    run.backward(x, y)
    with pytest.raises(RuntimeError, match="broken"):
        run.optimizer.step()
    run.noise.fail = False
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.step()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]
    assert len(run.engine.accountant) == 2  # the failed one stays charged


# ---- 3. several θ-samples


@pytest.mark.parametrize("samples", [2, 4])
def test_several_theta_samples_are_clipped_once_and_charged_once(mode, samples):
    if mode == "ghost":
        with pytest.raises(ArgumentError, match=r"mc_samples=.*ghost"):
            make(mode, optimizer=ivon(mc_samples=samples))
        return
    run = make(mode, data=alike(), max_grad_norm=C, optimizer=ivon(mc_samples=samples, ess=1e8))
    for x, y in run.loader:
        for _ in range(samples):
            with run.optimizer.sampled_params(train=True):
                run.backward(x, y)
        run.optimizer.step()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-3)]
    assert len(run.engine.accountant) == 1


def test_the_gradients_at_several_theta_samples_are_averaged(mode):
    if mode == "ghost":
        pytest.skip("one sample a step in ghost mode")
    sums = []
    for samples in (1, 3):
        run = make(mode, max_grad_norm=1e3, optimizer=ivon(mc_samples=samples, ess=1e14))
        x, y = next(iter(run.loader))
        for _ in range(samples):
            with run.optimizer.sampled_params(train=True):
                run.backward(x, y)
        run.optimizer.step()
        sums.append(run.contributions[0])
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


def test_theta_samples_of_one_step_on_different_batches_are_refused(mode):
    if mode == "ghost":
        pytest.skip("one sample a step in ghost mode")
    run = make(mode, optimizer=ivon(mc_samples=2))
    x, y = next(iter(run.loader))
    with run.optimizer.sampled_params(train=True):
        run.backward(x, y)
    with pytest.raises(PrivacyError, match="different batches"), run.optimizer.sampled_params(train=True):
        run.backward(x.flip(0), y.flip(0))
    assert run.contributions == []


def test_entering_more_theta_samples_than_declared_is_refused(mode):
    run = make(mode, optimizer=ivon())
    x, y = next(iter(run.loader))
    with run.optimizer.sampled_params(train=True):
        run.backward(x, y)
    with pytest.raises(PrivacyError, match="mc_samples=1"), run.optimizer.sampled_params(train=True):
        run.backward(x, y)


def test_an_exception_inside_sampled_params_restores_the_mean(mode):
    run = make(mode, optimizer=ivon(ess=1.0))
    before = parameters(run)
    x, y = next(iter(run.loader))
    inside = []

    def fail() -> None:
        with run.optimizer.sampled_params(train=True):
            run.backward(x, y)
            inside.extend(parameters(run))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not torch.equal(before[0], inside[0])
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))


# ---- 4 and 5. schedulers and hooks


def test_a_clip_scheduler_changes_the_bound_that_is_really_used(mode):
    run = make(mode, data=alike(), max_grad_norm=1.0)
    scheduler = ExponentialGradClip(run.optimizer, gamma=0.1)
    for bound in (1.0, 0.1, 0.01):
        total = run.release(*alike())
        assert count(total, bound) == pytest.approx(EXAMPLES, rel=1e-3)
        assert run.noise.stds[-1] == pytest.approx(bound)
        scheduler.step()


def test_a_noise_scheduler_changes_noise_correction_and_account_together(mode):
    run = make(mode, noise_multiplier=2.0, max_grad_norm=0.5)
    scheduler = ExponentialNoise(run.optimizer, gamma=0.5)
    for sigma in (2.0, 1.0, 0.5):
        run.release(*data())
        assert run.noise.stds[-1] == pytest.approx(sigma * 0.5)
        assert run.optimizer.last_release.variance == pytest.approx((sigma * 0.5 / EXAMPLES) ** 2)
        assert run.engine.accountant.history[-1] == (pytest.approx(sigma), 1.0, 1)
        scheduler.step()


@pytest.mark.parametrize("change", [{"noise_multiplier": 9.0}, {"max_grad_norm": 9.0}])
def test_a_scheduler_in_the_middle_of_a_logical_batch_is_refused(mode, change):
    run = make(mode)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as batches:
        passing = iter(batches)
        run.step(*next(passing))
        for name, value in change.items():
            setattr(run.optimizer, name, value)
        with pytest.raises(PrivacyError, match="middle of a logical batch"):
            run.step(*next(passing))
    assert run.contributions == []


def test_a_second_step_hook_displaces_neither_the_first_nor_the_account(mode):
    run = make(mode)
    seen = []
    run.optimizer.attach_step_hook(lambda o: seen.append("first"))
    run.optimizer.attach_step_hook(lambda o: seen.append("second"))
    run.release(*data())
    assert seen == ["first", "second"]
    assert len(run.engine.accountant) == 1


def test_torch_step_hooks_and_learning_rate_schedulers_work(mode):
    run = make(mode, optimizer=sgd)
    seen = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    run.release(*data())
    scheduler.step()
    assert seen == ["before", "after"]
    assert run.inner.param_groups[0]["lr"] == pytest.approx(0.05)
    assert len(run.engine.accountant) == 1


# ---- 6. what is recorded as not private, and what is refused


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("options", [{"poisson_sampling": False}, {"noise_multiplier": 0.0}])
def test_training_without_a_guarantee_says_so_and_costs_infinity(mode, options):
    with pytest.warns(PrivacyWarning, match="not differentially private"):
        run = make(mode, **options)
    for x, y in run.loader:
        run.step(x, y)
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert run.engine.get_epsilon(1e-5) == math.inf


def test_one_noiseless_release_among_private_ones_costs_infinity():
    run = make()
    run.release(*data())
    run.optimizer.noise_multiplier = 0.0
    run.release(*data())
    run.optimizer.noise_multiplier = 1.0
    run.release(*data())
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert run.engine.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_clipping_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ArgumentError, match=f"max_grad_norm={bound}"):
        make(max_grad_norm=bound)
    run = make(max_grad_norm=1.0)
    with pytest.raises(ArgumentError, match=f"max_grad_norm={bound}"):
        run.optimizer.max_grad_norm = bound
    assert run.optimizer.max_grad_norm == run.optimizer.clipping.sensitivity == 1.0


def test_a_random_batch_in_place_of_an_empty_one_is_refused():
    with pytest.raises(ArgumentError, match="rand_on_empty=True"):
        make(rand_on_empty=True)


def test_adaptive_clipping_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"clipping='adaptive'.*second release"):
        make(clipping="adaptive")


# ---- 7. channels_last


def test_channels_last_inputs_and_models_give_the_sum_of_contiguous_ones(mode):
    torch.manual_seed(0)
    net, (x, y) = convnet(), images()
    sums = []
    for model_format in (torch.contiguous_format, torch.channels_last):
        for input_format in (torch.contiguous_format, torch.channels_last):
            module = copy.deepcopy(net).to(memory_format=model_format)
            run = make(mode, module=module, data=(x, y), max_grad_norm=0.5)
            if mode == "ew" and model_format == torch.channels_last:
                with pytest.raises(RuntimeError, match="view size"):  # torch's expanded weights: wrong, but loud
                    run.release(x.to(memory_format=input_format), y)
                continue
            sums.append(run.release(x.to(memory_format=input_format), y))
    reference = make("functorch", module=copy.deepcopy(net), data=(x, y), max_grad_norm=0.5).release(x, y)
    assert reference.norm() > 0.5
    for total in sums:
        torch.testing.assert_close(total, reference, rtol=1e-4, atol=1e-5)


# ---- 8. loss scaling and precision


def test_a_gradient_scaler_is_refused(mode):
    run = make(mode)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    x, y = next(iter(run.loader))
    run.backward(x, y)
    for p in run.optimizer.params:  # the scaler looks at p.grad, which not every mode fills
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    with pytest.raises(PrivacyError, match="GradScaler"):
        scaler.step(run.optimizer)
    assert run.contributions == []


def test_half_precision_parameters_are_refused(mode):
    with pytest.raises(ArgumentError, match="float16"):
        make(mode, module=mlp().half())


def test_a_step_inside_autocast_does_not_round_the_sum(mode):
    run = make(mode, data=alike(64), max_grad_norm=1.0)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.optimizer.step()
    total = run.contributions[0]
    assert count(total, 1.0) == pytest.approx(64, rel=1e-4)
    assert not torch.equal(total, total.bfloat16().double())


# ---- 9. unknown keywords


@pytest.mark.parametrize("call", ["make_private", "make_private_with_epsilon"])
def test_a_misspelt_keyword_is_a_type_error(call):
    budget = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1, "noise_multiplier": None}
    engine = dpivon.PrivacyEngine()
    with pytest.raises(TypeError, match="clippping"):
        make(engine=engine, call=getattr(engine, call), clippping="per_layer", **(budget if "eps" in call else {}))
    with pytest.raises(TypeError, match="acountant"):
        dpivon.PrivacyEngine(acountant="rdp")


# ---- 10. the expected batch


def test_the_expected_batch_is_the_declared_one_not_one_floored_from_the_dataset():
    x, y = torch.zeros(50_000, FEATURES), torch.zeros(50_000, dtype=torch.long)
    run = make(data=(x, y), batch_size=4096)
    assert run.optimizer.expected_batch_size == 4096
    assert run.optimizer.spec.sample_rate == 4096 / 50_000
    assert len(run.loader) == 13
    declared = make(data=(x, y), batch_size=64, dataset_size=60_000, expected_batch_size=250.5)
    assert declared.optimizer.spec.divisor == 250.5
    assert declared.loader.sample_rate == declared.optimizer.spec.sample_rate == 250.5 / 60_000


def test_the_divisor_does_not_depend_on_the_batch_that_was_drawn(mode):
    run = make(mode, optimizer=sgd)
    run.noise.answer = torch.ones_like
    small = run.release(*(t[:2] for t in data()))
    grads = torch.cat([p.grad.flatten() for p in run.optimizer.params])
    torch.testing.assert_close(grads, ((small + 1.0) / EXAMPLES).float())


# ---- 11. records that are not finite


class Normalised(nn.Module):
    """Divides by what a struck-out example has as 0 or NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h / h.norm(dim=1, keepdim=True)
        return self.outer(h.square().sum(1, keepdim=True).sqrt() * h)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, CLASSES))


@pytest.mark.parametrize("network", [mlp, deep, Normalised])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38], ids=["nan", "inf", "-inf", "overflow"])
def test_a_bad_record_contributes_zero_and_the_update_is_that_of_the_data_without_it(mode, network, value):
    if mode == "ew" and network is Normalised:
        pytest.skip("expanded weights know layers only")
    x, y = data()
    bad = x.clone()
    bad[3] = value
    rest = [i for i in range(EXAMPLES) if i != 3]
    torch.manual_seed(1)
    net = network()
    results = []
    for batch in ((bad, y), (x[rest], y[rest])):
        declared = {"dataset_size": EXAMPLES, "expected_batch_size": EXAMPLES, "batch_size": 4}
        run = make(mode, module=copy.deepcopy(net), data=batch, **declared)
        total = run.release(*batch)
        run.release(*batch)
        results.append((total, torch.cat([p.flatten() for p in parameters(run)])))
    (with_bad, updated), (without, expected) = results
    assert torch.isfinite(with_bad).all()
    if value == 1e38 and network is not deep:  # saturates or is normalised: a record like any other
        assert (with_bad - without).norm() <= 1 + 1e-5
        return
    assert without.norm() > 0.1
    torch.testing.assert_close(with_bad, without, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(updated, expected, rtol=1e-5, atol=1e-6)


# ---- empty batches, fresh batches


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_an_empty_batch_still_releases_noise_and_is_charged(mode, wrap_model, net):
    if mode == "ew" and not wrap_model:
        pytest.skip("expanded weights need the wrapper")
    batch, module = (images(), convnet()) if net == "conv" else (data(), mlp())
    run = make(
        mode, module=module, data=batch, expected_batch_size=1e-3, wrap_model=wrap_model, capture=False, optimizer=sgd
    )
    model = run.model if wrap_model else module
    x, y = next(iter(run.loader))
    assert len(x) == 0
    run.criterion(model(x), y).backward()
    run.optimizer.step()
    noise = torch.cat([p.grad.flatten() for p in run.optimizer.params]) * 1e-3
    assert len(run.engine.accountant) == 1
    assert noise.std() == pytest.approx(1.0, rel=0.3)


def test_stepping_twice_on_one_poisson_batch_is_refused(mode):
    run = make(mode)
    x, y = next(iter(run.loader))
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)
    assert len(run.contributions) == len(run.engine.accountant) == 1


def test_credit_for_a_skipped_batch_does_not_pay_for_a_second_release_of_another():
    run = make(data=data(40), batch_size=10)
    batches = iter(run.loader)
    next(batches)
    x, y = next(batches)
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)


def test_batches_drawn_ahead_by_workers_do_not_pay_for_a_second_release():
    run = make(data=data(40), batch_size=4, workers=1)
    batches = iter(run.loader)
    x, y = next(batches)
    run.step(x, y)
    with pytest.raises(PrivacyError, match="twice on one Poisson batch"):
        run.step(x, y)
    run.step(*next(batches))
    assert len(run.engine.accountant) == 2
    batches.close()


def test_a_step_without_zero_grad_is_refused(mode):
    run = make(mode, data=alike(), max_grad_norm=C)
    run.backward(*next(iter(run.loader)))
    run.optimizer.step()
    batch = next(iter(run.loader))

    def again() -> None:
        run.backward(*batch)
        run.optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match=r"zero_grad|before step|accumulat|[Pp]rocessed"):
        again()
    assert [count(total) for total in run.contributions] == [pytest.approx(EXAMPLES, rel=1e-4)]


def test_two_backward_passes_before_a_step_are_refused_or_counted_once(mode):
    """In a micro-batch too, whose sum is not released at once."""
    run = make(mode, data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        for x, y in batches:
            run.optimizer.zero_grad()
            run.backward(x, y)
            refused = 0
            for action in (lambda x=x, y=y: run.backward(x, y), run.optimizer.step):
                try:
                    action()
                except (ValueError, RuntimeError):
                    refused += 1
            assert refused >= 1
    assert all(count(total) <= EXAMPLES * (1 + 1e-5) for total in run.contributions)


def test_gradients_of_two_passes_that_piled_up_all_the_same_are_not_summed():
    """Opacus raises in the second backward, but leaves both passes behind; a caller may catch that and step."""
    run = make("hooks", module=nn.Sequential(nn.Linear(FEATURES, CLASSES)), data=alike(), max_grad_norm=C)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer) as batches:
        x, y = next(iter(batches))
        run.backward(x, y)
        with pytest.raises(ValueError, match="accumulation"):
            run.backward(x, y)
        with pytest.raises(DpivonError, match=r"merged|batches"):
            run.optimizer.step()
        assert all(p.summed_grad is None for p in run.optimizer.params)


# ---- copies


def test_a_copy_shares_account_and_noise_stream(mode):
    generator = torch.Generator().manual_seed(7)
    run = make(mode, optimizer=sgd, capture=False, noise_generator=generator)
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)  # replaces optimizer.step by a wrapper bound to the original
    twin = copy.deepcopy(run.optimizer)
    assert twin.noise is run.optimizer.noise
    assert twin.charge == run.optimizer.charge
    assert twin.params[0] is not run.optimizer.params[0]
    noises = []
    for optimizer in (run.optimizer, twin):
        next(iter(run.loader))
        optimizer.zero_grad()
        # Both release the same sum, so that only the noise can differ.
        sums = [torch.zeros_like(p) for p in optimizer.params]
        optimizer.source.clipped_sums = lambda *_, sums=sums: sums
        optimizer.step()
        noises.append(torch.cat([p.grad.flatten() for p in optimizer.params]))
    assert len(run.engine.accountant) == 2
    assert float((noises[0] - noises[1]).abs().min()) > 0.0
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 0.6


def test_a_copied_optimizer_cannot_step_its_inner_one_either():
    run = make("hooks", optimizer=sgd)
    twin = copy.deepcopy(run.optimizer)
    twin.params[0].grad = torch.ones_like(twin.params[0])
    with pytest.raises(PrivacyError, match="inner SGD"):
        twin.original_optimizer.step()


def test_copied_model_and_optimizer_train_on(mode):
    if mode in ("ghost", "bookkeeping"):
        pytest.skip("their criterion or hooks stay with the original")
    run = make(mode, capture=False)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    before = [p.detach().clone() for p in run.model.parameters()]
    x, y = next(iter(run.loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert not torch.equal(before[0], next(model.parameters()))
    assert len(run.engine.accountant) == 1


def test_pickling_a_private_optimizer_is_refused(mode):
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(make(mode).optimizer)


# ---- passes that were interrupted


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise RuntimeError("out of memory, say")


class Fragile(nn.Module):
    """Fails in the middle of backward when it is told to, after the last layer and before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.explode = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(Explosive.apply(h) if self.explode else h)


@pytest.mark.parametrize("accident", ["forward only", "in backward", "in forward"])
@pytest.mark.parametrize("optimizer", [sgd, ivon()])
def test_an_interrupted_pass_leaves_nothing_that_reaches_the_next_release(mode, accident, optimizer):
    net = Fragile()
    clean = make(mode, module=copy.deepcopy(net), optimizer=sgd).release(*data())
    run = make(mode, module=net, optimizer=optimizer)
    x, y = next(iter(run.loader))
    if accident == "forward only":
        run.model(10 * x)
    elif accident == "in forward":
        with pytest.raises(RuntimeError):
            run.model(torch.cat([10 * x, x], dim=1))
    else:
        net.explode = True
        with pytest.raises(RuntimeError, match="out of memory"):
            run.backward(10 * x, y)
        net.explode = False
    run.release(*data())
    torch.testing.assert_close(run.contributions[0], clean, rtol=1e-5, atol=1e-6)


# ---- what goes around the mechanism


class WithBuffer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(FEATURES, CLASSES), how
        self.register_buffer("seen", torch.zeros(FEATURES))
        self.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "in place":
            self.seen.add_(mean)
        elif self.how == "replaced":
            self.seen = self.seen * 0.9 + mean
        elif self.how == "through .data":
            self.seen.data.add_(mean)
        elif self.how == "once" and not self.seen.any():
            self.seen.add_(mean)
        elif self.how == "frozen parameter":
            with torch.no_grad():
                self.frozen.add_(mean)
        return self.linear(x)


@pytest.mark.parametrize("how", ["in place", "replaced", "through .data", "frozen parameter"])
def test_a_buffer_written_in_forward_is_refused(mode, how):
    run = make(mode, module=WithBuffer(how), optimizer=lambda m: sgd(m.linear))
    x, y = next(iter(run.loader))
    run.backward(x, y)
    with pytest.raises(PrivacyError, match=r"seen|frozen"):
        run.optimizer.step()
    assert run.contributions == []


@pytest.mark.parametrize("how", ["in place", "once"])
def test_a_buffer_written_in_an_earlier_forward_or_without_gradients_is_refused(mode, how):
    run = make(mode, module=WithBuffer(how), optimizer=lambda m: sgd(m.linear))
    x, y = next(iter(run.loader))
    with torch.no_grad():
        run.model(x)  # in training mode: a pass that only gathers statistics
    run.backward(x, y)
    with pytest.raises(PrivacyError, match="seen"):
        run.optimizer.step()


def test_a_buffer_that_is_only_read_is_fine(mode):
    run = make(mode, module=WithBuffer("read"), optimizer=lambda m: sgd(m.linear))
    run.release(*data())
    assert len(run.contributions) == 1


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"affine": False, "track_running_stats": False}])
def test_a_layer_that_mixes_examples_is_refused_trainable_or_not(mode, options):
    module = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7, **options), nn.Linear(7, CLASSES))
    with pytest.raises(ArgumentError, match="BatchNorm") as caught:
        make(mode, module=module)
    assert isinstance(caught.value, opacus.validators.errors.UnsupportedModuleError)


# ---- ghost clipping's own traps


class Squared(nn.Module):
    """Regression with a loss of shape (batch, outputs)."""

    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(
            output, F.one_hot(target, CLASSES).float()[:, : output.shape[1]] * 100, reduction=self.reduction
        )


@pytest.mark.parametrize("outputs", [1, CLASSES])
def test_losses_with_a_trailing_dimension_are_clipped_example_by_example(mode, outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, outputs))
    run = make(mode, module=copy.deepcopy(net), criterion=Squared(), max_grad_norm=C)
    reference = make("functorch", module=net, criterion=Squared(), max_grad_norm=C)
    total = run.release(*data())
    assert count(total) <= EXAMPLES
    torch.testing.assert_close(total, reference.release(*data()), rtol=1e-4, atol=1e-6)


class ReducesAnyway(nn.Module):
    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target).reshape(1)


def test_a_criterion_that_reduces_to_one_loss_is_refused_in_ghost_mode():
    run = make("ghost", criterion=ReducesAnyway(), max_grad_norm=C, data=alike())
    x, y = next(iter(run.loader))
    with pytest.raises(DpivonError, match=r"12 examples|one loss an example"):
        run.backward(x, y)
    with pytest.raises(PrivacyError):
        run.optimizer.step()
    assert run.contributions == []


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, used by function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.embedding(tokens).mean(1), self.embedding.weight)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TiedByLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(FEATURES, 4)
        self.head = Head(self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("network", [Tied, TiedByLayer])
@pytest.mark.parametrize("kind", ["ghost", "bookkeeping", "hooks"])
def test_a_weight_used_in_two_places_is_clipped_as_a_whole_or_refused(network, kind):
    tokens = torch.randint(FEATURES, (1, 3), generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1])
    run = make(kind, module=network(), data=(tokens, target), max_grad_norm=C)
    try:
        total = run.release(tokens, target)
    except DpivonError:
        assert run.contributions == []
    else:
        assert count(total) <= 1 + 1e-5


def test_a_penalty_on_the_weights_does_not_bypass_clipping(mode):
    run = make(mode, data=alike(1), max_grad_norm=C)
    x, y = next(iter(run.loader))
    penalty = 10 * sum(p.square().sum() for p in run.optimizer.params)
    try:
        (run.criterion(run.model(x), y) + penalty).backward()
        run.optimizer.step()
    except PrivacyError:
        assert run.contributions == []
    else:
        assert count(run.contributions[0]) <= 1 + 1e-5


def test_a_second_plain_loss_does_not_bypass_clipping(mode):
    run = make(mode, data=alike(1), max_grad_norm=C)
    x, y = next(iter(run.loader))
    run.backward(x, y)

    def add_plain_loss() -> None:
        (100 * F.cross_entropy(run.model(x), y)).backward()
        run.optimizer.step()

    with pytest.raises((DpivonError, ValueError, RuntimeError)):
        add_plain_loss()
    assert all(count(total) <= 1 + 1e-5 for total in run.contributions)


def test_ghost_mode_refuses_autocast():
    run = make("ghost")
    x, y = next(iter(run.loader))
    with pytest.raises(PrivacyError, match="autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        run.backward(x, y)


# ---- norms of long rows, sums of many


@pytest.mark.parametrize("value", [0.01, 0.3])
def test_the_norm_of_ten_million_equal_coordinates_is_not_under_estimated(value):
    total = clipped_sum([torch.full((1, 10_000_000), value)], FlatClipping(1.0))[0]
    assert float(total.double().norm()) == pytest.approx(1.0, abs=1e-5)


def test_a_norm_too_large_for_a_clip_factor_in_fp32_contributes_zero():
    factors = FlatClipping(1.0).factors(torch.tensor([[0.7e45, 1e10]], dtype=torch.float64))
    assert factors[0, 0] == 0.0
    assert factors[0, 1] == pytest.approx(1e-10)


# ---- checkpoints


class Harmful:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("options", [None, {"weights_only": False}])
def test_a_checkpoint_with_code_in_it_is_refused_and_not_executed(tmp_path, options):
    path, target = tmp_path / "checkpoint.pt", tmp_path / "executed"
    torch.save({"module_state_dict": Harmful(target)}, path)
    run = make()
    with pytest.raises(ArgumentError, match=r"cannot be read as a checkpoint .UnpicklingError"):
        run.engine.load_checkpoint(path=path, module=run.model, torch_load_kwargs=options)
    assert not target.exists()


def trained(steps: int) -> Run:
    run = make(capture=False, noise_generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        x, y = next(iter(run.loader))
        run.step(x, y)
    return run


def test_a_resumed_run_goes_on_where_the_first_one_stopped():
    first, file = trained(3), io.BytesIO()
    first.engine.save_checkpoint(path=file, module=first.model, optimizer=first.optimizer)
    file.seek(0)
    second = make(seed=9, capture=False)
    second.engine.load_checkpoint(path=file, module=second.model, optimizer=second.optimizer)
    assert second.engine.accountant.history == first.engine.accountant.history
    for run in (first, second):
        run.optimizer.noise = CapturingNoise()
        x, y = next(iter(run.loader))
        run.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))


def test_loading_an_older_checkpoint_does_not_take_releases_back():
    run, file = trained(2), io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    run.step(*next(iter(run.loader)))
    spent, weights = run.engine.get_epsilon(1e-5), parameters(run)
    file.seek(0)
    with pytest.raises(PrivacyError, match="fewer releases than the 3"):
        run.engine.load_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    assert run.engine.get_epsilon(1e-5) == spent
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters(run), strict=True))


def test_a_checkpoint_between_backward_and_step_holds_no_raw_gradient():
    run = make(data=alike(), max_grad_norm=C)
    run.backward(*next(iter(run.loader)))
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    state = torch.load(file, weights_only=True)["optimizer_state_dict"]["state"]
    moved = [t for s in state.values() for key, t in s.items() if key == "momentum"]
    assert all(not t.any() for t in moved)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from leaves(v)
    else:
        yield value


def test_a_checkpoint_holds_no_state_of_the_noise():
    run = trained(1)
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    saved = list(leaves(torch.load(file, weights_only=True)))
    assert not any(isinstance(v, Tensor) and v.dtype == torch.uint8 for v in saved)


def test_reseeding_the_global_generator_in_the_loop_repeats_neither_noise_nor_batches(mode):
    """A `torch.manual_seed` every epoch is common; two releases with the same noise would subtract to the data."""
    run = make(mode, capture=False, batch_size=6)
    normal, drawn, batches = run.optimizer.noise.normal, [], []
    run.optimizer.noise.normal = lambda like, std: drawn.append(normal(like, std)) or drawn[-1]
    for _ in range(2):
        torch.manual_seed(0)
        x, y = next(iter(run.loader))
        run.step(x, y)
        batches.append(x)
    half = len(drawn) // 2
    first, second = (torch.cat([n.flatten() for n in part]) for part in (drawn[:half], drawn[half:]))
    assert not torch.equal(first, second)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / len(first) ** 0.5
    assert batches[0].shape != batches[1].shape or not torch.equal(*batches)


@pytest.mark.parametrize("verb", ["add_noise", "scale_grad"])
def test_opacus_verbs_that_would_release_without_a_charge_are_refused(mode, verb):
    run = make(mode)
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.backward(x, y)
    with pytest.raises(dpivon.PrivacyError, match=verb):
        getattr(run.optimizer, verb)()
    assert len(run.engine.accountant) == 0
    assert run.noise.sums == []


def test_a_closure_that_samples_itself_is_sampled_and_clipped_once(mode):
    """Upstream's step(closure) does not sample, so people's closures do; the private one must not nest or pass twice."""
    run = make(mode, max_grad_norm=0.1)
    x, y = next(iter(run.loader))

    def closure():
        run.optimizer.zero_grad()
        with run.optimizer.sampled_params(train=True):
            loss = run.criterion(run.model(x), y)
            loss.backward()
        return loss

    run.optimizer.step(closure)
    assert len(run.engine.accountant) == 1
    (released,) = run.contributions
    assert float(released.norm()) <= len(x) * 0.1 * (1 + 1e-5)
