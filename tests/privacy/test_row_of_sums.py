"""The sums in one row are the sums one by one, whatever lies side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpivon.models import TextEncoder, WideResNet
from dpivon.privacy.clipping import FlatClipping, PerLayerClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.side_by_side import neighbours

MODELS = {
    "wide residual": lambda: (WideResNet(depth=10, width=2, groups=4), torch.randn(5, 3, 8, 8)),
    "text": lambda: (TextEncoder(vocabulary=50, width=32, heads=2, depth=1), torch.randint(0, 50, (5, 7))),
    "small only": lambda: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)),
    "one frozen": lambda: (frozen(), torch.randn(5, 4)),
}


def frozen():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].bias.requires_grad = False
    return model


@pytest.mark.parametrize("kind", ["flat", "per layer"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_its_parts_in_the_order_of_the_parameters(name, kind):
    model, x = MODELS[name]()
    params = [p for p in model.parameters() if p.requires_grad]
    clipping = FlatClipping(0.1) if kind == "flat" else PerLayerClipping((0.1,) * len(params))
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    found = []
    for sums in (keeper.clipped_sums, keeper.clipped_row):
        keeper.clear()
        model(x).square().sum().backward()
        found.append(sums(params, clipping))
        keeper.forget_passes()
    one_by_one, row = found
    assert row.dtype == torch.float64
    assert torch.equal(row, torch.cat([s.flatten() for s in one_by_one]))
    assert len({float(s.norm()) for s in one_by_one}) > 1  # parts that changed places would be seen


def test_neighbours_are_cut_where_one_is_left_out():
    assert neighbours([0, 1, 2, 5, 7, 8]) == [[0, 1, 2], [5], [7, 8]]
    assert neighbours([3]) == [[3]]
    assert neighbours([]) == []
