"""A training that comes after another on the same people: one account, one ledger, and noise of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpivon
from dpivon import ArgumentError
from dpivon.durable.ledger import read
from dpivon.privacy.accounting.recorded import LEDGER, started_from

N = 300


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 3, generator=generator), torch.randint(3, (N,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_training_after_another_has_the_account_of_both_and_noise_of_its_own(tmp_path: Path) -> None:
    x, y = data()
    plan: dict[str, Any] = {"batch_size": 50, "epochs": 2, "delta": 1e-3, "seed": 5, "method": "dp-sgd"}
    # No gradient and no decay: what moves the weights is noise.
    plan |= {"options": {"weight_decay": 0.0}, "loss": lambda outputs, labels: 0.0 * outputs.sum(-1)}

    def moved(fitted: dpivon.Fitted) -> Tensor:
        ours = dict(network().named_parameters())
        return torch.cat([(p - ours[n]).detach().flatten() for n, p in fitted.model.named_parameters()])

    for i, inputs in enumerate(((x, y), (TensorDataset(x, y),), (x, y))):
        outs = [{"out": tmp_path / name} if i == 2 else {} for name in ("a", "b")]
        first = dpivon.fit(network(), *inputs, **plan, **outs[0], target_epsilon=1.0)
        second = dpivon.fit(network(), *inputs, **plan, **outs[1], target_epsilon=2.0, after=first)
        assert second.history[0] == first.history[0]
        assert second.account.get_epsilon(1e-3) == pytest.approx(second.epsilon, rel=1e-9)
        assert second.epsilon == pytest.approx(2.0, rel=5e-3)
        assert second.epsilon <= 2.0
        a, b = moved(first), moved(second)
        assert abs(float(torch.nn.functional.cosine_similarity(a, b, dim=0))) < 0.6
    assert started_from(read(tmp_path / "b" / LEDGER), 0) == {read(tmp_path / "a" / LEDGER).id: 12}
    gone = dpivon.fit(network(), x, y, **plan, target_epsilon=1.0)
    with pytest.raises(ArgumentError, match="was not kept in a folder"):
        dpivon.fit(network(), x, y, **plan, target_epsilon=2.0, out=tmp_path / "c", after=gone)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ArgumentError, match="unit of privacy 'the example'"):
        dpivon.fit(network(), x, y, **plan, target_epsilon=2.0, after=first, user_ids=list(range(N)))
