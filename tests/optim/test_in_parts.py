"""Large models are updated some parameters at a time: the same numbers, in less room."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import dpivon
from dpivon.optim import ivon
from dpivon.optim.tensors import in_parts


def test_parts_are_in_order_and_no_larger_than_wanted() -> None:
    tensors = [torch.zeros(n) for n in (3, 4, 9, 1, 1, 5)]
    parts = list(in_parts(tensors, 7))
    assert [[len(t) for t in part] for part in parts] == [[3, 4], [9], [1, 1, 5]]
    assert [t for part in parts for t in part] == tensors
    assert list(in_parts([], 7)) == []


def trained(module: nn.Module, **options: Any) -> list[torch.Tensor]:
    model = copy.deepcopy(module)
    drawing = torch.Generator().manual_seed(1)
    optimizer = dpivon.IVON(model.parameters(), lr=0.1, ess=50, generator=drawing, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        for _ in range(options.get("mc_samples", 1)):
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [*model.parameters(), *(state["hess"] for state in optimizer.state.values())]


@pytest.mark.parametrize("options", [{}, {"mc_samples": 2}, {"curvature": "reparam"}, {"curvature": "averaged"}])
def test_in_parts_a_posterior_learns_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    whole = trained(module, **options)
    monkeypatch.setattr(ivon, "in_parts", functools.partial(in_parts, most=70))
    assert all(torch.equal(a, b) for a, b in zip(whole, trained(module, **options), strict=True))
