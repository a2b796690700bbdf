"""engine.compile between two steps: what may change reaches the next release, and what must be checked again is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from test_compiled_step import N, losses, made, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.diagnostics import Diagnostics
from dpivon.errors import BudgetSpent, PrivacyError
from dpivon.privacy.kernels import whole_step
from dpivon.privacy.kernels.whole_step import WholeStep


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[WholeStep]:
    """The whole steps that were launched."""
    call, found = WholeStep.__call__, []
    monkeypatch.setattr(WholeStep, "__call__", lambda self, spec: (found.append(self), call(self, spec))[1])
    return found


def weights(optimizer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in optimizer.params])


class Crossed(nn.Module):
    """Its first layer sees the rows in reverse: harmless while that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(108, 108), nn.Linear(108, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x.flatten(1).flip(0)).flip(0)))
        return out


@pytest.mark.parametrize("capture", [False, True])
def test_a_layer_that_is_thawed_later_is_checked_before_it_is_trained(capture):
    engine, _, optimizer, loader = made("sgd", module=Crossed())
    module = optimizer.source.module
    module.a.requires_grad_(False)
    step, drawn = engine.compile(losses, capture=capture), iter(loader)
    for _ in range(3):
        step(next(drawn))
    module.a.requires_grad_(True)
    batch = next(drawn)
    with pytest.raises(PrivacyError):
        step(batch)
    assert len(engine.accountant) == 3


@pytest.mark.parametrize("kind", ["ivon", "dp-steady"])
def test_a_step_size_that_is_changed_after_a_state_was_loaded_is_taken(kind, launched):
    engine, _, optimizer, loader = made(kind)
    step, drawn = engine.compile(losses, capture=True), iter(loader)
    for _ in range(3):
        step(next(drawn))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = weights(optimizer)
    step(next(drawn))
    assert len(launched) == 2
    assert torch.equal(weights(optimizer), before)


@pytest.mark.parametrize("kind", ["ivon", "adam"])
def test_every_step_is_a_release_of_its_own_to_those_who_watch(kind, launched):
    engine, _, optimizer, loader = made(kind)
    step, log = engine.compile(losses, capture=True), Diagnostics(optimizer)
    for batch in loader:
        step(batch)
        log.observe()
    assert len(launched) == len(loader) - 2
    assert len(log.rows) == len(loader)


@pytest.mark.parametrize("capture", [False, True])
def test_an_optimizer_that_writes_to_its_gradients_does_not_change_the_release(capture):
    module, engine = nn.Sequential(nn.Flatten(), nn.Linear(108, 3)), dpivon.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        data_loader=DataLoader(TensorDataset(*rows(N)), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    step, held = engine.compile(losses, capture=capture), []
    optimizer.attach_step_hook(lambda o: held.append([g.clone() for g in o.last_release.gradients.values()]))
    for batch in loader:
        step(batch)
        for now, then in zip(optimizer.last_release.gradients.values(), held[-1], strict=True):
            assert torch.equal(now, then)


def test_a_whole_step_for_which_there_is_no_memory_is_made_in_parts(monkeypatch):
    engine, _, _, loader = made()

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory for rows")

    monkeypatch.setattr(whole_step, "rows_of", full)
    step = engine.compile(losses, capture=True)
    drawn = iter(loader)
    for _ in range(2):
        step(next(drawn))
    third = next(drawn)
    with pytest.warns(UserWarning, match="noise and update are not captured"):
        step(third)
    for batch in drawn:
        step(batch)
    assert step.path == "captured"
    assert len(engine.accountant) == len(loader)


def test_a_subclass_learns_by_its_own_rule(launched):
    called = []

    class Own(dpivon.IVON):
        def _update(self, *given: Any) -> None:
            called.append(1)
            super()._update(*given)

    module = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    inner = Own(module.parameters(), lr=0.1, ess=N)
    loader = DataLoader(TensorDataset(*rows(N)), batch_size=10)
    engine = dpivon.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=module, optimizer=inner, data_loader=loader, noise_multiplier=1.0, max_grad_norm=0.5
    )
    step = engine.compile(losses, capture=True)
    for batch in loader:
        step(batch)
    assert len(called) == len(loader)
    assert not launched


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("kind", ["ivon", "adam"])
def test_no_example_moves_the_sum_that_the_whole_program_noises(kind, launched):
    """The release itself, with and without one example, under the same noise and θ."""
    x, y = rows(50)
    x, y = x[:1] + 0.01 * x, y[:1].expand(50).clone()
    engine, _, optimizer, _ = made(kind, max_grad_norm=1.0, poisson_sampling=False)
    step = engine.compile(losses, capture=True)
    step.capacity = 60
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(4):
        step((x, y))
    own = getattr(optimizer.original_optimizer, "generator", None)
    drawing = [g for g in (optimizer.noise.generator, step._places, own) if g is not None]
    states, learned = [g.get_state() for g in drawing], copy.deepcopy(optimizer.state_dict())
    released = []
    for n in (50, 49):
        for generator, state in zip(drawing, states, strict=True):
            generator.set_state(state)
        optimizer.load_state_dict(copy.deepcopy(learned))
        launched.clear()
        step((x[:n], y[:n]))
        assert len(launched) == 1
        gradients = optimizer.last_release.gradients.values()
        released.append(torch.cat([g.flatten().double() for g in gradients]) * optimizer.spec.divisor)
    assert 0.5 < float((released[0] - released[1]).norm()) <= 1 + 1e-5


def test_a_budget_stops_the_captured_step_that_would_pass_it(launched):
    module = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    engine = dpivon.PrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=module,
        optimizer=dpivon.IVON(module.parameters(), lr=0.1, ess=N),
        data_loader=DataLoader(TensorDataset(*rows(N)), batch_size=10),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=0.5,
    )
    step = engine.compile(losses, capture=True)
    for batch in loader:
        step(batch)
    assert launched
    before, made_so_far = weights(optimizer), len(launched)
    batch = next(iter(loader))
    with pytest.raises(BudgetSpent):
        step(batch)
    assert len(launched) == made_so_far
    assert torch.equal(weights(optimizer), before)
    assert engine.get_epsilon(1e-3) <= 2.0


def test_of_a_sum_rules_go_by_their_own_batch_size():
    """No batch size is stated with a summed release, captured or not."""
    found = []
    for capture in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, _, optimizer, loader = made("dp-calm", loss_reduction="sum")
        step = engine.compile(losses, capture=capture)
        for _ in range(2):
            for batch in loader:
                step(batch)
        found.append(weights(optimizer))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
