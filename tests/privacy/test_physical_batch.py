"""The largest physical batch: found by failing, on made-up inputs, and nothing of the run changes."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpivon
from dpivon.privacy.physical_batch import _Limit

N, B = 64, 16


class Unread(Dataset):
    """Data that must not be looked at."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> None:
        raise AssertionError("private data were read")


def private(method: str = "ivon", data: Dataset | None = None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 3))
    inner = (
        dpivon.IVON(net.parameters(), lr=0.1, ess=N, mc_samples=2, generator=torch.Generator().manual_seed(1))
        if method == "ivon"
        else torch.optim.AdamW(net.parameters(), lr=0.1)
    )
    engine = dpivon.PrivacyEngine(generator=torch.Generator().manual_seed(2))
    loader = DataLoader(Unread() if data is None else data, batch_size=B)
    made = engine.make_private(
        module=net, optimizer=inner, data_loader=loader, noise_multiplier=1.0, max_grad_norm=0.5, **options
    )
    return engine, *made


def batch_of(rows: int = 4):
    """Shapes and types alone: neither numbers nor labels are such that the model could take them."""
    return torch.full((rows, 5), torch.nan), torch.full((rows,), 10**6)


def failing(above: int, where: str = "loss"):
    """A loss that runs out of memory above a size: before, inside or after the model, or in backward."""

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("too large")

    def loss_fn(model, batch):
        x, y = batch
        too_large = len(x) > above
        if too_large and where == "forward":
            handle = model[3].register_forward_pre_hook(out_of_memory)
        z = None
        try:
            z = model(x)
        finally:
            if too_large and where == "forward":
                handle.remove()
        if too_large and where == "loss":
            out_of_memory()
        if too_large and where == "backward":
            z.register_hook(out_of_memory)
        return nn.functional.cross_entropy(z, y)

    return loss_fn


@pytest.mark.parametrize(("above", "where"), [(3, "loss"), (5, "forward"), (13, "backward"), (16, "loss")])
def test_it_is_the_largest_that_does_not_fail(above, where):
    engine, *_ = private()
    assert engine.largest_physical_batch(failing(above, where), batch_of(), at_most=100, memory=1e9) == above


def test_it_is_no_larger_than_what_is_worth_trying():
    engine, *_ = private("adamw")
    assert engine.largest_physical_batch(failing(1000), batch_of(), memory=1e9) == B + 6 * 4  # b + 6 √b
    assert engine.largest_physical_batch(failing(1000), batch_of(), memory=1e9, at_most=7) == 7
    with pytest.raises(dpivon.ArgumentError, match=r"memory=None: on cpu .* such as memory=8e9"):
        engine.largest_physical_batch(failing(3), batch_of())
    with pytest.raises(dpivon.PrivacyError, match="before make_private"):
        dpivon.PrivacyEngine().largest_physical_batch(failing(3), batch_of(), memory=1e9)


def test_of_a_model_that_is_not_tried_one_example_is_the_least():
    """The check itself needs room for three."""
    engine, *_ = private(unchecked=True)
    assert engine.largest_physical_batch(failing(1), batch_of(), memory=1e9) == 1
    with pytest.raises(dpivon.ArgumentError, match="not even one example fits"):
        engine.largest_physical_batch(failing(0), batch_of(), memory=1e9)


def test_a_loss_in_which_examples_touch_is_refused_as_by_check():
    engine, *_ = private()
    with pytest.raises(dpivon.PrivacyError, match="loss"):
        engine.largest_physical_batch(lambda model, batch: model(batch[0]).sum(1).var(), batch_of(), memory=1e9)


def everything(engine, model, optimizer, loader):
    """All that a step depends on, or that a release leaves."""
    return copy.deepcopy(
        {
            "weights": [(p.detach().clone(), p.grad, p.requires_grad) for p in model.parameters()],
            "modes": [layer.training for layer in model.modules()],
            "state": optimizer.original_optimizer.state_dict(),
            "draws": optimizer.original_optimizer.generator.get_state(),
            "noise": optimizer.noise.generator.get_state(),
            "batches": loader.batch_sampler.generator.get_state(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "account": engine.accountant.history,
        }
    )


def test_nothing_of_the_run_changes_and_its_next_release_is_the_same_to_the_bit():
    def run(looks: bool) -> list[torch.Tensor]:
        data = TensorDataset(torch.randn(N, 5, generator=torch.Generator().manual_seed(3)), torch.arange(N) % 3)
        engine, model, optimizer, loader = made = private(data=data)
        engine.check(nn.functional.cross_entropy)
        for i, (x, y) in enumerate(loader):
            if looks and i == 1:
                model.eval()
                before = everything(*made)
                for where in ("loss", "forward", "backward"):
                    found = engine.largest_physical_batch(failing(9, where), batch_of(), memory=1e9)
                    assert found == 9
                torch.testing.assert_close(everything(*made), before, rtol=0, atol=0, equal_nan=True)
                model.train()
            optimizer.zero_grad()
            for _ in range(2):
                with optimizer.sampled_params(train=True):
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("method", ["ivon", "adamw"])
def test_a_stated_memory_holds_the_batch_that_is_found_and_no_larger_one(method):
    def at(memory: float, **options) -> int:
        engine, *_ = private(method, **options)
        return engine.largest_physical_batch(nn.CrossEntropyLoss(), batch_of(), at_most=5000, memory=memory)

    small, large = at(100_000), at(200_000)
    assert 1 < small < large < 5000
    per_example = 100_000 / (large - small)  # what is held grows by the example
    assert abs(at(300_000) - large - (large - small)) <= 0.1 * large
    assert per_example > 4 * (5 + 8 + 8 + 3)  # at least inputs and outputs of its layers


def test_the_limit_counts_what_is_alive():
    def chain(kept: bool) -> None:
        held = [torch.zeros(1000)]
        for _ in range(5):
            held.append(held[-1].clone())
            held[-1].view(10, 100).add_(1)  # a view takes nothing
            if not kept:
                del held[0]

    given = torch.zeros(500)
    for kept, peak in ((False, 2 * 4000), (True, 6 * 4000)):
        with _Limit(peak + 2000, [given, given.view(5, 100)]):
            chain(kept)
        with pytest.raises(torch.OutOfMemoryError), _Limit(peak + 1999, [given]):
            chain(kept)
