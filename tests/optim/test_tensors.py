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


def test_what_comes_out_of_a_joined_list_is_joined_again_without_a_copy(monkeypatch):
    monkeypatch.setattr(tensors, "joins", lambda several: True)
    parts = (TensorList(lists(1)) * 2.0).tensors
    again = TensorList(parts).flat
    assert again is not None
    assert again.data_ptr() == parts[0].data_ptr()
    assert torch.equal(again, torch.cat([p.flatten() for p in parts]))


@pytest.mark.parametrize("change", ["another order", "other memory", "a gap", "another layout"])
def test_tensors_that_are_no_longer_neighbours_are_joined_by_a_copy(monkeypatch, change):
    monkeypatch.setattr(tensors, "joins", lambda several: True)
    parts = (TensorList(lists(1)) * 2.0).tensors
    assert tensors.neighbours(parts) is not None
    if change == "another order":
        parts[0], parts[1] = parts[1], parts[0]
    elif change == "other memory":
        parts[1].data = parts[1].clone()
    elif change == "a gap":
        del parts[1]
    else:
        parts[0] = parts[0].mT
    assert tensors.neighbours(parts) is None
    assert torch.equal(TensorList(parts).flat, torch.cat([p.flatten() for p in parts]))


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("dtypes", [[torch.float32] * 5, [torch.bfloat16, torch.float64, *[torch.float32] * 3]])
def test_copies_are_rounded_once_and_share_no_memory_with_the_list(monkeypatch, joins, dtypes):
    monkeypatch.setattr(tensors, "joins", lambda several: joins and len({t.dtype for t in several}) == 1)
    given = [t.double() / 3.0 for t in lists(1)]
    copies = TensorList(given).copied(dtypes).tensors
    for t, copy, dtype in zip(given, copies, dtypes, strict=True):
        assert copy.dtype == dtype
        assert torch.equal(copy, t.to(dtype))
    before = [t.clone() for t in given]
    for copy in copies:
        copy.zero_()
    assert all(torch.equal(t, b) for t, b in zip(given, before, strict=True))


def test_pieces_of_memory_that_happen_to_follow_each_other_are_no_neighbours(monkeypatch):
    """As blocks of an allocator may: a view from the first into the second would reach beyond what the first owns."""
    monkeypatch.setattr(tensors, "joins", lambda several: True)
    memory = memoryview(bytearray(range(64)))
    parts = [torch.frombuffer(memory[at : at + 16], dtype=torch.float32) for at in (0, 16, 32)]
    assert parts[1].data_ptr() == parts[0].data_ptr() + 16
    assert tensors.neighbours(parts) is None
    assert torch.equal(TensorList(parts).flat, torch.cat(parts))


def test_tensors_without_elements_do_no_harm(monkeypatch):
    monkeypatch.setattr(tensors, "joins", lambda several: True)
    given = [torch.rand(2), torch.rand(0, 3), torch.rand(3)]
    doubled = TensorList((TensorList(given) * 2.0).tensors) * 1.0
    assert [tuple(t.shape) for t in doubled] == [(2,), (0, 3), (3,)]
    assert all(torch.equal(d, 2.0 * g) for d, g in zip(doubled, given, strict=True))


@pytest.mark.parametrize(("joins", "at_once", "drawn"), [(True, True, [60]), (True, False, None), (False, True, None)])
def test_a_list_is_filled_by_one_draw_or_by_one_a_tensor(monkeypatch, joins, at_once, drawn):
    monkeypatch.setattr(tensors, "joins", lambda several: joins)
    like, asked = [*lists(1)[:4], torch.rand(38)], []
    filled = TensorList(like).filled(
        lambda t: asked.append(t.numel()) or torch.full_like(t, len(asked)), at_once=at_once
    )
    assert asked == (drawn or [t.numel() for t in like])
    for i, (t, made) in enumerate(zip(like, filled, strict=True), start=1):
        assert torch.equal(made, torch.full_like(t, 1 if drawn else i))
