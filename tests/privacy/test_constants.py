"""A recorded program may read values that follow from shapes, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpivon.privacy.kernels.padded import record

X = torch.arange(12.0).reshape(3, 4)


def recorded(program):
    return record(program, [X], [], channels_last=False)


def of_shapes(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    packed = bool((positions.diff() != 1).any())
    return 2 * x if packed else x + positions


def test_a_value_that_follows_from_shapes_is_read_once_and_the_program_is_the_same():
    program = recorded(of_shapes)
    for x in (X, torch.randn(3, 4)):
        torch.testing.assert_close(program(x), of_shapes(x), rtol=0, atol=0)
    assert not any("local_scalar" in str(node.target) for node in program.graph.nodes)


def of_data(x: Tensor) -> Tensor:
    return x if bool(x.sum() > 0) else -x


def of_a_draw(x: Tensor) -> Tensor:
    return x if bool(torch.rand(()) > 2) else -x


def of_a_constant_that_data_was_written_to(x: Tensor) -> Tensor:
    kept = torch.zeros(4)
    kept.copy_(x[0])
    return x if bool(kept.sum() > 0) else -x


def of_a_constant_whose_view_data_was_written_to(x: Tensor) -> Tensor:
    kept = torch.zeros(4)
    kept[:2].copy_(x[0, :2])
    return x if bool(kept.sum() > 0) else -x


def of_what_a_slice_of_data_was_put_in(x: Tensor) -> Tensor:
    kept = torch.zeros(4)
    kept[1] = x[0, 0]
    return x if bool(kept.sum() > 0) else -x


@pytest.mark.parametrize(
    "program",
    [
        of_data,
        of_a_draw,
        of_a_constant_that_data_was_written_to,
        of_a_constant_whose_view_data_was_written_to,
        of_what_a_slice_of_data_was_put_in,
    ],
)
def test_a_value_that_depends_on_data_or_on_a_draw_is_refused(program):
    with pytest.raises(RuntimeError, match=r"data-dependent|tracing|proxy|item"):
        recorded(program)
