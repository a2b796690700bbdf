"""Copies, interrupted passes and checkpoints: nothing is drawn, charged or summed a second time.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_runs import (
    CLASSES,
    FEATURES,
    C,
    CapturingNoise,
    Run,
    alike,
    data,
    ivon,
    make,
    parameters,
    sgd,
)
from torch import Tensor, nn

from dpivon import ArgumentError, PrivacyError, PrivacyWarning
from dpivon.models.standardised import StandardisedConv2d
from dpivon.privacy.gradients.bookkeeping import BookKeeper


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


def test_a_copied_model_predicts_with_its_own_weights():
    """Layers with a training forward of their own kept calling the original's, so a snapshot went on learning."""
    model = nn.Sequential(StandardisedConv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, CLASSES))
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    x = torch.randn(2, 3, 6, 6)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        before = twin(x)
        model[0].weight.normal_()
        assert torch.equal(twin(x), before)
        twin[0].weight.copy_(model[0].weight)
        assert torch.equal(twin(x), model.eval()(x))
    keeper.detach_from_model()


def test_a_copied_optimizer_cannot_step_its_inner_one_either():
    run = make("bookkeeping", optimizer=sgd)
    twin = copy.deepcopy(run.optimizer)
    twin.params[0].grad = torch.ones_like(twin.params[0])
    with pytest.raises(PrivacyError, match="inner SGD"):
        twin.original_optimizer.step()


def test_copied_model_and_optimizer_train_on(mode):
    run = make(mode, capture=False)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    before = [p.detach().clone() for p in run.model.parameters()]
    x, y = next(iter(run.loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert not torch.equal(before[0], next(model.parameters()))
    assert len(run.engine.accountant) == 1


def test_a_copy_watches_its_own_passes_and_not_the_originals():
    run = make("bookkeeping", optimizer=ivon(mc_samples=2), capture=False)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    x, y = data()

    def two_passes(model: nn.Module, optimizer: Any, second: Tensor) -> None:
        for inputs in (x, second):
            with optimizer.sampled_params(train=True):
                F.cross_entropy(model(inputs), y).backward()

    next(iter(run.loader))
    two_passes(run.model, run.optimizer, x)  # which the copy's passes over other rows do not disturb
    with pytest.raises(PrivacyError, match="different batches"):
        two_passes(model, optimizer, x.flip(0))
    two_passes(model, optimizer, x)  # as if the others had never been
    run.optimizer.step()


def test_pickling_a_private_optimizer_is_refused(mode):
    with pytest.raises(PrivacyError, match="state_dict"):
        pickle.dumps(make(mode).optimizer)


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
    run.model(data()[0])  # what comes now is found to be in order, before anything goes wrong
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


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("without", [False, True], ids=["accounted", "not private"])
def test_a_checkpoint_of_another_run_with_as_many_steps_does_not_replace_the_account(without):
    """ε fell from 9.62 to .082, and from ∞, since releases were only counted."""
    cheap, file = make(noise_multiplier=50.0, capture=False), io.BytesIO()
    dear = make(noise_multiplier=0.5, poisson_sampling=not without, capture=False)
    for run in (cheap, dear):
        for _ in range(3):
            run.step(*next(iter(run.loader)))
    cheap.engine.save_checkpoint(path=file, module=cheap.model, optimizer=cheap.optimizer)
    file.seek(0)
    history, weights = list(dear.engine.accountant.history), parameters(dear)
    assert len(cheap.engine.accountant) == len(dear.engine.accountant)
    with pytest.raises(PrivacyError, match="fewer releases than the 3 of noise_multiplier"):
        dear.engine.load_checkpoint(path=file, module=dear.model, optimizer=dear.optimizer)
    assert dear.engine.accountant.history == history
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters(dear), strict=True))


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_what_had_no_guarantee_in_a_checkpoint_has_none_when_it_is_loaded():
    first, file = make(poisson_sampling=False, capture=False), io.BytesIO()
    first.step(*next(iter(first.loader)))
    first.engine.save_checkpoint(path=file, module=first.model, optimizer=first.optimizer)
    file.seek(0)
    second = make(capture=False)
    second.engine.load_checkpoint(path=file, module=second.model, optimizer=second.optimizer)
    second.step(*next(iter(second.loader)))
    with pytest.warns(PrivacyWarning, match="poisson_sampling=False"):
        assert second.engine.get_epsilon(1e-5) == math.inf


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
