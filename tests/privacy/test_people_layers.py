"""The rows of a person, by every kind of layer: added up by book-keeping as a loop over rows adds them up."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from per_example_loop import book, loss_of, small_cnn
from torch import Tensor, nn

from dpivon.privacy.clipping import FlatClipping, clipped_sum
from dpivon.privacy.layers import uses
from dpivon.privacy.layers.groups import Groups
from dpivon.privacy.people import GRADIENTS
from dpivon.variational.layers import SpreadLinear


def _same(groups: Groups, rows: int, inputs: Any) -> Groups:
    return groups


class Bare(nn.Module):
    """A parameter that no rule is for: its module runs row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.last = nn.Parameter(torch.randn(6, 5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(x @ self.matrix))
        return out


def spread(*size: int) -> SpreadLinear:
    layer = SpreadLinear(*size)
    layer.start(0.5)
    return layer


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("cap", [uses.MEMORY_CAP, 0])
@pytest.mark.parametrize("sizes", [(2, 1, 5, 1, 3), (3, 3, 3, 3)])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30)), (6,)),
        (nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Flatten(), nn.Linear(80, 3)), (4, 6)),
        (small_cnn(), (3, 8, 8)),
        (nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (5, 8)),
        (nn.Sequential(nn.Tanh(), spread(6, 7), nn.Tanh(), spread(7, 3)), (6,)),
        (Bare(), (6,)),
    ],
    ids=["mlp", "positions", "cnn", "attention", "variational", "bare"],
)
def test_every_kind_of_layer_adds_up_the_rows_of_a_person(
    model: nn.Module, shape: tuple[int, ...], sizes: tuple[int, ...], cap: int, monkeypatch: Any
) -> None:
    """Against a loop over rows in double, where gradients are kept and where they are made twice; in fp32 too."""
    monkeypatch.setattr(uses, "MEMORY_CAP", cap)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(8192, generator=generator, dtype=torch.float64)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    for reduction in GRADIENTS:
        groups = Groups.of_people(sizes, len(x), 1, mean=reduction == "mean")
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            model.double()
            params = [p for p in model.parameters() if p.requires_grad]
            each = []
            for row in x:
                torch.manual_seed(0)
                each.append(torch.autograd.grad(loss_of(model(row.unsqueeze(0)), weight).sum(), params))
            rows = [torch.stack(column) for column in zip(*each, strict=True)]
            own = [r.new_zeros(len(sizes), *r.shape[1:]).index_add_(0, owner, r) for r in rows]
            if reduction == "mean":
                own = [o / torch.tensor(sizes).view(-1, *[1] * (o.dim() - 1)) for o in own]
            bound = FlatClipping(0.9 * math.sqrt(sum(float(o[0].square().sum()) for o in own)))
            expected = clipped_sum(own, bound)
            torch.manual_seed(0)
            found = book(model.to(dtype), x.to(dtype), weight.to(dtype), bound, people=partial(_same, groups))
            off = math.sqrt(sum(float((e - f).square().sum()) for e, f in zip(expected, found, strict=True)))
            assert off <= tolerance * bound.sensitivity
