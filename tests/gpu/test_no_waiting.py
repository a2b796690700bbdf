"""A step of the user's own loop on a GPU never waits for the device. Skipped where there is none."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

import dpivon
from dpivon.models import PaperCNN
from dpivon.privacy.noise import TorchNoise
from dpivon.train.kept import loader_of

DEVICE = torch.device("cuda")


@contextmanager
def waiting_is_an_error():
    """In this block alone. The mode is set inside ``try``: torch warns once it has set it, and where that is raised as an
    error the mode would stay for all tests that follow in the process."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("spoiled", [False, True])
def test_no_operation_of_a_step_waits_for_the_device(spoiled):
    torch.manual_seed(0)
    model = PaperCNN().to(DEVICE)
    x, y = torch.randn(96, 3, 32, 32, device=DEVICE), torch.randint(10, (96,), device=DEVICE)
    if spoiled:
        x[1] = torch.nan
    parameters = list(model.parameters())
    model, optimizer, _ = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=dpivon.IVON(parameters, lr=0.1, ess=1000),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=96),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def step():
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        step()
    with waiting_is_an_error():
        step()
    assert all(bool(torch.isfinite(p).all()) for p in parameters)


def test_no_captured_step_of_dpivon_train_waits_for_the_device():
    """Its data are on the device, and its iterates are averaged."""
    torch.manual_seed(0)
    model = PaperCNN().to(DEVICE)
    data = torch.randn(960, 3, 32, 32), torch.randint(10, (960,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, engine = dpivon.EMA(optimizer, 0.9, trace=0.25), dpivon.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader_of(data, DEVICE, 96, None),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    step = engine.compile(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    for batch in loader:
        step(batch)
    assert step.path == "captured"
    batches = iter(loader)
    next(batches)
    with waiting_is_an_error():
        for batch in batches:
            step(batch)
    assert all(bool(torch.isfinite(average.average(p)).all()) for p in model.parameters())


@pytest.mark.parametrize("size", [1, 17, 1000])
def test_noise_is_the_generators_standard_normal_times_its_width(size):
    source, reference = (torch.Generator(DEVICE).manual_seed(4) for _ in range(2))
    like = torch.empty(size, dtype=torch.float64, device=DEVICE)
    for _ in range(2):
        drawn = TorchNoise(source).normal(like, 0.37)
        expected = torch.randn(size, dtype=torch.float64, device=DEVICE, generator=reference) * 0.37
        assert torch.equal(drawn, expected)
