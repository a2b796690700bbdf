"""The networks: size, shapes, and that no example's output depends on the rest of its batch."""

from __future__ import annotations

import pytest
import torch
from opacus.validators.module_validator import ModuleValidator

from dpivon import ArgumentError
from dpivon.models import MLP, CompactCNN, PaperCNN, SmallCNN, TextEncoder, VisionTransformer, WideResNet
from dpivon.privacy.clipping import FlatClipping, clipped_sum
from dpivon.privacy.gradients.bookkeeping import BookKeeper, has_rules

NETWORKS = [
    (PaperCNN, (3, 32, 32)),
    (CompactCNN, (3, 32, 32)),
    (SmallCNN, (1, 8, 8)),
    (lambda: MLP(64, 10, hidden=(32, 16)), (1, 8, 8)),
]


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_papers_network_has_the_papers_number_of_parameters() -> None:
    assert size(PaperCNN()) == 357_258


def test_small_networks_have_the_documented_sizes() -> None:
    assert size(SmallCNN()) == 9_354
    assert size(MLP(64, 10)) == 64 * 64 + 64 + 64 * 10 + 10
    assert size(MLP(64, 10, hidden=())) == 64 * 10 + 10


@pytest.mark.parametrize(("make", "shape"), NETWORKS)
def test_logits_per_example_do_not_depend_on_the_batch(make, shape) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, *shape)
    together = model(x)
    assert together.shape == (6, 10)
    alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    # Exactly no influence, not just a small one: the gradient of one example's output by the others' inputs is zero.
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x)[2].sum(), x)
    assert g[2].abs().sum() > 0
    assert g[[0, 1, 3, 4, 5]].abs().sum() == 0


@pytest.mark.parametrize(("make", "shape"), NETWORKS)
def test_opacus_finds_nothing_to_complain_about(make, shape) -> None:
    assert ModuleValidator.validate(make()) == []


def test_other_shapes() -> None:
    model = PaperCNN(in_channels=1, classes=4, widths=(8, 16), hidden=12, groups=4, image_size=28)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 4)


def test_impossible_shapes_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"widths=.*12 is not a multiple of groups=8"):
        PaperCNN(widths=(8, 12))
    with pytest.raises(ArgumentError, match=r"widths=.*24 is not a multiple of groups=16"):
        CompactCNN(widths=(24, 32), depths=(1, 1))
    with pytest.raises(ArgumentError, match=r"depths=\(1, 2\).*widths=\(32, 64, 128\)"):
        CompactCNN(depths=(1, 2))
    with pytest.raises(ArgumentError, match="image_size=4"):
        PaperCNN(image_size=4)
    with pytest.raises(ArgumentError, match="hidden=0"):
        MLP(4, 2, hidden=(0,))


@pytest.mark.parametrize(
    ("build", "batch", "parameters"),
    [
        (WideResNet, lambda: torch.randn(3, 3, 32, 32), 2_751_146),
        (lambda: WideResNet(relu_first=True), lambda: torch.randn(3, 3, 32, 32), 2_751_562),
        (VisionTransformer, lambda: torch.randn(3, 3, 32, 32), 809_354),
        (CompactCNN, lambda: torch.randn(3, 3, 32, 32), 279_882),
        (lambda: CompactCNN(standardised=True), lambda: torch.randn(3, 3, 32, 32), 279_882),
        (TextEncoder, lambda: torch.randint(0, 5000, (3, 64)), 1_045_508),
    ],
)
def test_larger_networks_mix_no_examples_and_have_a_rule_for_every_layer(build, batch, parameters):
    torch.manual_seed(0)
    model, x = build(), batch()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert has_rules(model)
    whole = model(x)
    for i in range(len(x)):
        torch.testing.assert_close(model(x[i : i + 1]), whole[i : i + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relu_first", [False, True])
def test_wide_resnet_clipped_sums_are_those_of_a_loop_over_examples(relu_first):
    torch.manual_seed(0)
    model = WideResNet(depth=10, width=1, groups=4, relu_first=relu_first).double()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    params = list(model.parameters())
    rows = [torch.autograd.grad(model(x[i : i + 1]).square().sum(), params) for i in range(3)]
    expected = clipped_sum([torch.stack(column) for column in zip(*rows, strict=True)], FlatClipping(0.5))
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    model(x).square().sum().backward()
    for e, g in zip(expected, keeper.clipped_sums(params, FlatClipping(0.5)), strict=True):
        torch.testing.assert_close(e, g)


def test_a_wide_resnet_with_relu_first_ends_in_a_norm_and_has_one_on_its_skips():
    torch.manual_seed(0)
    model, x = WideResNet(depth=10, width=1, groups=4, relu_first=True), torch.randn(3, 3, 16, 16)
    by_group = model.features(x).view(3, 4, 16).mean(2)
    torch.testing.assert_close(by_group, torch.zeros(3, 4), rtol=0, atol=1e-5)
    assert (WideResNet(depth=10, width=1, groups=4).features(x) >= 0).all()
    block, h = model.blocks[1], torch.randn(2, 16, 8, 8)
    relu = torch.relu
    branch = block.conv2(block.norm2(relu(block.conv1(block.norm1(relu(h))))))
    torch.testing.assert_close(block(h), block.skip(block.skip_norm(relu(h))) + branch)
