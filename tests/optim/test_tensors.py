"""Lists of tensors compute the same whether they are joined into one flat tensor, as on a GPU, or taken one by one."""

from __future__ import annotations

import pytest
import torch

from dpivon.optim import tensors
from dpivon.optim.tensors import TensorList

SHAPES = [(3, 4), (5,), (), (2, 1, 2)]


def lists(seed, channels_last=False):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.rand(s, generator=generator) + 0.5 for s in [*SHAPES, (2, 3, 4, 4)]]
    if channels_last:
        made[-1] = made[-1].to(memory_format=torch.channels_last)
    return made


def formula(a, b, numbers):
    """Every operation once."""
    x = (a + b) * 0.5 - b / a + (2.0 - a) + (-b).square() * 3.0
    y = x.clamp(min=0.1, max=2.0).sqrt() + (a + 1.0).rsqrt() + 1.5 * b + (0.5 + a)
    return y / numbers


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("numbers", [[2.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_flat_and_listed_results_are_equal_to_the_last_bit(monkeypatch, numbers, channels_last):
    a, b = lists(1, channels_last), lists(2)
    listed = formula(TensorList(a), TensorList(b), numbers)
    monkeypatch.setattr(tensors, "joins", lambda several: True)
    joined = formula(TensorList(a), TensorList(b), numbers)
    assert len(joined) == len(listed) == 5
    for x, y, n in zip(listed, joined, numbers, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y), n
    targets = [torch.empty_like(t, dtype=torch.float64) for t in a]
    joined.copy_to(targets)
    assert all(torch.equal(t.float(), x) for t, x in zip(targets, listed, strict=True))


def test_on_a_cpu_nothing_is_joined():
    assert TensorList(lists(1)).flat is None
