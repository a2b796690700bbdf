"""The count of bytes and operations, where they are known."""

from __future__ import annotations

import pytest
import torch

from dpivon.privacy.stack import room as _room
from programs.traffic import FP32_PRODUCTS, PRODUCTS, _traced, kernels_of, plain_trace, private_trace

X, W = torch.randn(8, 16), torch.randn(16, 4)


def counted(program, *args):
    return kernels_of(_traced(program, *args))


def test_a_product_reads_its_operands_and_writes_its_result():
    (kernel,) = counted(lambda x, w: x @ w, X, W)
    assert (kernel.bytes, kernel.flops, kernel.rate) == (4 * (128 + 64 + 32), 2 * 8 * 16 * 4, FP32_PRODUCTS)
    (kernel,) = counted(lambda x, w: torch.bmm(x.float(), w.float()), X[None].bfloat16(), W[None].bfloat16())
    assert (kernel.bytes, kernel.rate) == (2 * (128 + 64) + 4 * 32, PRODUCTS)  # what is widened is read as it is


def test_elementwise_operations_are_computed_where_they_are_read():
    (kernel,) = counted(lambda x: (torch.relu(x) * 2 + 1).sum(0), X)
    assert kernel.bytes == 4 * (128 + 16)
    first, second = counted(lambda x, w: torch.relu(x) @ w, X, W)  # a product wants them in memory
    assert (first.bytes, second.bytes) == (4 * (128 + 128), 4 * (128 + 64 + 32))


def test_reductions_share_a_walk_unless_one_waits_for_the_other():
    (kernel,) = counted(lambda x: (x.sum(0), x.square().sum(1)), X)
    assert kernel.bytes == 4 * (128 + 16 + 8)
    first, second = counted(lambda x: (x / x.sum(1, keepdim=True)).sum(0), X)
    assert (first.bytes, second.bytes) == (4 * (128 + 8), 4 * (128 + 8 + 16))


def test_views_are_free_and_what_is_expanded_is_read_once():
    (kernel,) = counted(lambda x: x.T.reshape(4, 4, 8).expand(2, 4, 4, 8) + 1, X)
    assert kernel.bytes == 4 * (128 + 256)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kernels", [False, True])
def test_the_kernels_keep_every_examples_gradient_out_of_memory(kernels):
    found = kernels_of(private_trace("text", 32, kernels))
    room = _room(32)
    values = [n.meta["val"] for k in found for n in k.writes if "conv_sums" not in str(n.target)]
    written = {tuple(v.shape) for v in values if isinstance(v, torch.Tensor)}
    for shape in ((384, 128), (128, 128), (512, 128), (128, 512)):
        assert ((room, *shape) in written) is not kernels
    parts = {k.part.split(",")[0] for k in found}
    assert {"norms", "sums", "forward", "forward of norm layers", "backward"} <= parts
    # The ordinary part is what a plain step does, less weight gradients, for the rows that a Poisson batch may have.
    plain = sum(k.flops for k in kernels_of(plain_trace("text", room)))
    assert 0.6 < sum(k.flops for k in found if k.part in ("forward", "backward")) / plain < 0.9
