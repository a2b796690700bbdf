"""Numbers that would bend the bound: layouts, precision, loss scaling, records that are not finite, long rows.

Each is a known way in which a variational optimizer and a privacy engine have lost the guarantee together.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from private_runs import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    alike,
    convnet,
    count,
    data,
    images,
    make,
    mlp,
    parameters,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import ArgumentError, PrivacyError
from dpivon.privacy.clipping import FlatClipping, clipped_sum


def test_channels_last_inputs_and_models_give_the_sum_of_contiguous_ones(mode):
    torch.manual_seed(0)
    net, (x, y) = convnet(), images()
    sums = []
    for model_format in (torch.contiguous_format, torch.channels_last):
        for input_format in (torch.contiguous_format, torch.channels_last):
            module = copy.deepcopy(net).to(memory_format=model_format)
            run = make(mode, module=module, data=(x, y), max_grad_norm=0.5)
            sums.append(run.release(x.to(memory_format=input_format), y))
    reference = make("bookkeeping", module=copy.deepcopy(net), data=(x, y), max_grad_norm=0.5).release(x, y)
    assert reference.norm() > 0.5
    for total in sums:
        torch.testing.assert_close(total, reference, rtol=1e-4, atol=1e-5)


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


class Normalised(nn.Module):
    """Divides by what a dropped example has as 0 or NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h / h.norm(dim=1, keepdim=True)
        return self.outer(h.square().sum(1, keepdim=True).sqrt() * h)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:noise_multiplier=0")
@pytest.mark.parametrize("seed", range(4))
def test_a_backward_inside_autocast_does_not_round_what_is_measured(seed):
    """A product of fp32 comes out in bf16 there. The norm of such gradients was rounded to bf16, and their sum was not."""
    torch.manual_seed(seed)
    x, y = torch.randn(1, 8, 6, 6), torch.tensor([1])
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 16, 3))
    model, optimizer, _ = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=1e-3,
        poisson_sampling=False,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nn.functional.cross_entropy(model(x).float(), y).backward()
    optimizer.step()
    released = [g.double().square().sum() for g in optimizer.last_release.gradients.values()]
    assert float(sum(released).sqrt()) == pytest.approx(1e-3, rel=1e-5)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, CLASSES))


@pytest.mark.campaign(keep=7)
@pytest.mark.parametrize("network", [mlp, deep, Normalised])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38], ids=["nan", "inf", "-inf", "overflow"])
def test_a_bad_record_contributes_zero_and_the_update_is_that_of_the_data_without_it(mode, network, value):
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


@pytest.mark.parametrize("value", [0.01, 0.3])
def test_the_norm_of_ten_million_equal_coordinates_is_not_under_estimated(value):
    total = clipped_sum([torch.full((1, 10_000_000), value)], FlatClipping(1.0))[0]
    assert float(total.double().norm()) == pytest.approx(1.0, abs=1e-5)


def test_a_norm_too_large_for_a_clip_factor_in_fp32_contributes_zero():
    factors = FlatClipping(1.0).factors(torch.tensor([[0.7e45, 1e10]], dtype=torch.float64))
    assert factors[0, 0] == 0.0
    assert factors[0, 1] == pytest.approx(1e-10)
