"""Out of memory on a micro-batch: the same logical batch again, in smaller parts, charged once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import BatchMemoryManager, PrivacyEngine
from dpivon.errors import ArgumentError, PrivacyError


class Recorded:
    """A noise source that keeps the sums it is given, and adds nothing."""

    generator = None

    def __init__(self):
        self.sums = []

    def normal(self, like, std):
        self.sums.append(like.clone())
        return torch.zeros_like(like)


def run(fail, *, ivon=True, size=6, steps=2):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    inner = dpivon.IVON(net.parameters(), lr=0.1, ess=1e9) if ivon else torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(24, 4), torch.randint(2, (24,))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    loader.batch_sampler.generator.manual_seed(5)
    optimizer.noise = Recorded()
    calls, seen, restored = [], [], []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as micro_batches:
        for inputs, labels in micro_batches:
            calls.append(len(inputs))
            before = [p.detach().clone() for p in net.parameters()]
            try:
                optimizer.zero_grad()
                with optimizer.sampled_params(train=True) if ivon else torch.enable_grad():
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                    if len(calls) in fail:
                        raise torch.OutOfMemoryError("out of memory")
                optimizer.step()
            except torch.OutOfMemoryError:
                restored.append(all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)))
                micro_batches.retry()
                assert all(p.summed_grad is None for p in net.parameters())
            seen.append(len(engine.accountant))
            if len(engine.accountant) == steps:
                break
    parameters = len(optimizer.params)
    sums = [
        torch.cat([s.flatten() for s in optimizer.noise.sums[i : i + parameters]])
        for i in range(0, steps * parameters, parameters)
    ]
    return sums, calls, len(engine.accountant), restored


@pytest.mark.parametrize("ivon", [True, False])
@pytest.mark.parametrize("fail", [[1], [2], [1, 2], [4]])
def test_the_same_batch_is_released_once_and_charged_once(ivon, fail):
    whole, _, charged, _ = run([], ivon=ivon)
    assert charged == 2
    sums, calls, charged, restored = run(fail, ivon=ivon)
    assert charged == 2
    assert restored == [True] * len(fail)
    assert max(calls[fail[-1] :]) <= 6 // 2 ** len(fail)
    for ours, theirs in zip(sums, whole, strict=True):  # θ is another sample of a posterior that is narrow here
        torch.testing.assert_close(ours, theirs, rtol=1e-3 if ivon else 1e-6, atol=1e-3 if ivon else 1e-6)


def test_what_was_released_is_not_retried_and_one_example_must_fit():
    with pytest.raises(ArgumentError, match=r"max_physical_batch_size=1: not even one example fits"):
        run([1, 2, 3], size=2)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as micro_batches:
        with pytest.raises(ArgumentError, match="num_workers"):
            micro_batches.retry()
        for x, y in micro_batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with pytest.raises(PrivacyError, match="released twice"):
                micro_batches.retry()
