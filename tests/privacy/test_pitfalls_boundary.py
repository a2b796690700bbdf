"""Nothing but a release reaches the optimizer, the weights or a buffer.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

from typing import Any

import ivon as upstream
import opacus
import pytest
import torch
import torch.nn.functional as F
from private_runs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    C,
    alike,
    count,
    data,
    ivon,
    make,
    mlp,
    parameters,
    sgd,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import ArgumentError, DpivonError, PrivacyError


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
    run = make("bookkeeping", optimizer=sgd)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    frozen = run.optimizer.params[0]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    run.optimizer.step()
    assert torch.equal(before, frozen)


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


class WithBuffer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.passes = nn.Linear(FEATURES, CLASSES), how, 0
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
        elif self.how == "through .data, later":
            self.passes += 1
            if self.passes > 20:  # long after every check
                self.linear.weight.data.add_(0.1 * mean)
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
    with pytest.raises(PrivacyError, match=r"seen|frozen"):
        run.step(x, y)
    assert run.contributions == []


def test_a_parameter_written_through_data_long_after_every_check_is_refused(mode):
    run = make(mode, module=WithBuffer("through .data, later"), optimizer=lambda m: sgd(m))

    def train() -> None:
        for _ in range(30):
            run.release(*data())

    with pytest.raises(PrivacyError, match=r"linear.weight.*changed by forward"):
        train()
    assert 1 <= len(run.contributions) <= 20


@pytest.mark.parametrize("how", ["in place", "once"])
def test_a_buffer_written_in_an_earlier_forward_or_without_gradients_is_refused(mode, how):
    run = make(mode, module=WithBuffer(how), optimizer=lambda m: sgd(m.linear))
    x, y = next(iter(run.loader))
    with torch.no_grad():
        run.model(x)  # in training mode: a pass that only gathers statistics
    with pytest.raises(PrivacyError, match="seen"):
        run.step(x, y)


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


def test_the_spec_of_a_release_follows_what_it_is_made_of():
    optimizer = make("bookkeeping").optimizer
    first = optimizer.spec_of_release()
    assert optimizer.spec_of_release() is first
    optimizer.noise_multiplier = 3.0
    assert optimizer.spec_of_release().noise_multiplier == 3.0
    optimizer.max_grad_norm = 0.25
    assert optimizer.spec_of_release().max_grad_norm == 0.25
    optimizer.noise.origin = "cryptographic"
    assert optimizer.spec_of_release().drawn_by[0] == "cryptographic"
