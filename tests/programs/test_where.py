"""What a kernel is charged for, and that norms and sums read the same numbers from the same place."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.precision import options
from programs.traffic import private_program

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def test_a_kernel_takes_the_longer_of_bytes_and_products():
    from programs.where import BANDWIDTH, BF16, Kernel, again

    bytes_ = int(BANDWIDTH)
    kernel = Kernel("forward", "mm", {"a": bytes_}, {"b": bytes_}, ("float32[2]",), "mm", flops=BF16)
    assert kernel.seconds == pytest.approx(2.0)
    kernel = Kernel("forward", "mm", {"a": bytes_}, {"b": 0}, ("float32[2]",), "mm", flops=3 * BF16)
    assert kernel.seconds == pytest.approx(3.0)
    twice = Kernel(
        "forward", "elementwise", {}, {"a": 4_000_000, "b": 2_000_000, "c": 2_000_000}, ("f4", "f2", "f2"), ""
    )
    assert again(twice) == 2_000_000


@needs_triton
@pytest.mark.slow
def test_the_compilers_kernels_are_counted_where_they_are_known():
    """x → relu(x) @ w, and the product's columns added up: the product's bytes are known, and nothing is read twice."""
    from programs.traffic import _recorded, part
    from programs.where import kernels

    def program(x, w):
        with part("forward"):
            made = torch.relu(x) @ w
        with part("sums, Dense 3x4"):
            return made, made.sum(0)

    found = kernels(_recorded(program, torch.randn(512, 256), torch.randn(256, 128)), options(again=False))
    by_part = {(k.part, k.kind): k for k in found}
    product = by_part["forward", "mm"]
    assert sum(product.read.values()) == 4 * (512 * 256 + 256 * 128)
    assert sum(product.written.values()) == 4 * 512 * 128
    assert product.flops == 2 * 512 * 256 * 128
    assert by_part["forward", "elementwise"].bytes == 4 * 2 * 512 * 256
    added = [k for k in found if k.part == "sums, Dense"]
    assert sum(k.read.get(next(iter(product.written)), 0) for k in added) == 4 * 512 * 128


@pytest.mark.slow
@pytest.mark.parametrize(("model", "product"), [("wrn", "convolution"), ("text", "mm")])
def test_norms_and_sums_read_what_the_forward_rounded(model, product):
    """One rounding of every layer's input: the kernels' operand is the very tensor that the forward product multiplied."""
    graph = private_program(model, 4, kernels=True).graph
    ours = [n for n in graph.nodes if "conv_statistics" in str(n.target) or "conv_sums" in str(n.target)]
    assert len(ours) == {"wrn": 2 * 16, "text": 2 * 8}[model]
    multiplied = {_source(a) for n in graph.nodes if f"aten.{product}" in str(n.target) or "addmm" in str(n.target)
                  for a in n.all_input_nodes}  # fmt: skip
    assert {_source(n.args[0]) for n in ours} <= multiplied


@pytest.mark.slow
def test_the_first_layers_gradient_is_stored_before_it_is_measured_and_summed():
    """No product reads it, so a compiler would compute it, and round it, once for norms and once for sums."""
    graph = private_program("wrn", 4, kernels=True).graph
    first = [n for n in graph.nodes if "dpivon.conv_" in str(n.target) and n.args[0].meta["val"].shape[1] == 3]
    assert len(first) == 2
    assert {str(_source(n.args[1]).target) for n in first} == {"dpivon.stored.default"}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "biases"), [("text", 8), ("vit", 17)])
def test_biases_are_added_up_once_from_what_their_weights_are_measured_by(model, biases):
    """One operator for all of them; norms and sums both read what it wrote."""
    graph = private_program(model, 4, kernels=True).graph
    added = [n for n in graph.nodes if "position_sums" in str(n.target) and not n.args[1]]
    long = [n for n in added if n.args[0][0].meta["val"].shape[1] > conv_ops._FEW]
    (made,) = long  # beside those of normalisations, which are added up partly before
    assert len(made.args[0]) == biases
    assert {_source(g) for g in made.args[0]} == {
        _source(n.args[1]) for n in graph.nodes if "conv_statistics" in str(n.target)
    }
    read = {n.meta["part"].split(",")[0] for n in made.users}
    assert read == {"norms", "sums"}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("model", "layers"), [("text", 8), ("vit", 17)])
def test_the_compiler_measures_and_sums_from_the_same_buffers(model, layers):
    """Every layer; and no gradient is rounded once for its bias and once for its weight."""
    from programs.where import again, kernels, shared

    found = kernels(private_program(model, 64, kernels=True), options(again=True))
    assert shared(found) == (layers, layers)
    assert sum(again(k) for k in found if k.kind in ("elementwise", "reduction")) == 0


def _source(node):
    """What a view is a view of."""
    while any(
        name in str(node.target) for name in ("view", "permute", "transpose", "alias", "detach", "unsqueeze", "aten.t.")
    ):
        node = node.args[0]
    return node
