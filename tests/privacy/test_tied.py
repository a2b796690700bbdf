"""The use of a table that is an embedding and a head: norms and sums are those of gradients that are made."""

from __future__ import annotations

import pytest
import torch

from dpivon.privacy.layers import uses
from dpivon.privacy.layers.made import Tied
from dpivon.privacy.layers.uses import Outer, Rows, merge


@pytest.mark.parametrize("positions", [7, uses._SHORT + 9])
@pytest.mark.parametrize("few", [True, False])
def test_a_tied_table_has_the_gradients_of_both_its_uses(positions, few, monkeypatch):
    monkeypatch.setattr(uses, "MEMORY_CAP", 4 * 11 * 3 * 2 if few else uses.MEMORY_CAP)  # two examples at a time
    shape = torch.Size((11, 3))
    a, g, embedded = (torch.randn(5, positions, n) for n in (3, 11, 3))
    index = torch.randint(11, (5, positions))
    use = merge([Outer(a, g, shape), Rows(index, embedded, shape)])
    assert isinstance(use, Tied)
    each = torch.einsum("btp,btd->bpd", g.double(), a.double())
    each.scatter_add_(1, index.unsqueeze(2).expand(-1, -1, 3), embedded.double())
    c = torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(use.materialise().double(), each, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(use.squared_norm().double(), each.square().sum((1, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(use.weighted_sum(c), torch.einsum("b,bpd->pd", c, each), rtol=1e-5, atol=1e-4)
    dropped = use.without(torch.tensor([True, False, False, True, False]))
    assert dropped.squared_norm()[[0, 3]].tolist() == [0, 0]
    assert torch.equal(dropped.squared_norm()[[1, 2, 4]], use.squared_norm()[[1, 2, 4]])


def test_what_cancels_between_head_and_embedding_is_measured_as_it_is_added_up():
    """One example's two uses cancel to their rounding: clipped by its norm, it still counts for C at most."""
    shape = torch.Size((4, 3))
    index = torch.tensor([[2, 2, 1]])
    g = torch.randn(1, 3, 4)
    a = torch.randn(1, 3, 3)
    made = (g.mT @ a)[0]
    embedded = torch.stack([-made[2] * 0.3, -made[2] * 0.7, -made[1]]).unsqueeze(0)
    g[:, :, [0, 3]] = 0.0
    use = merge([Outer(a, g, shape), Rows(index, embedded, shape)])
    norm = use.squared_norm().double().sqrt()
    assert 0 <= float(norm) < 1e-5
    clipped = use.weighted_sum(1.0 / norm.clamp(min=1e-30))
    assert float(clipped.norm()) <= 1 + 1e-5
