"""A caller's mean loss gives every example, to the bit, the gradient of the sum: the size of the batch rounds nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from worst_inputs import FEATURES, INPUTS, NETWORKS, POSITIONS, own_loop

from dpivon import PerExampleLoss
from dpivon.errors import PrivacyWarning
from dpivon.privacy.gradients import means
from dpivon.privacy.gradients.bookkeeping import BookKeeper

CLASSES = 3
Loss = Callable[[Tensor, Tensor, Tensor, str], Tensor]


def reduced(each: Callable[[Tensor, Tensor, Tensor], Tensor], by: Callable[[Tensor], Tensor]) -> Loss:
    """A reduction as the caller writes it, beside its sum."""
    return lambda z, y, t, kind: by(each(z, y, t)) if kind == "mean" else each(z, y, t).sum()


def torchs(loss: Callable[..., Tensor], **options) -> Loss:
    return lambda z, y, t, kind: loss(z, y if loss in OF_CLASSES else t, reduction=kind, **options)


def squares(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return (z - t).square().sum(1)


def two_tasks(z: Tensor, y: Tensor, t: Tensor, kind: str) -> Tensor:
    return (F.cross_entropy(z, y, reduction=kind) + 0.3 * F.nll_loss(z.log_softmax(1), y, reduction=kind)) / 7


def batch_mean(z: Tensor, y: Tensor, t: Tensor, kind: str) -> Tensor:
    return F.kl_div(z.log_softmax(1), t, reduction="batchmean" if kind == "mean" else kind)


OF_CLASSES = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
#: By the number of elements over which torch's mean goes beyond the rows, whose share is a factor of the sum.
LOSSES: dict[str, tuple[int, Loss]] = {
    "cross entropy": (1, torchs(F.cross_entropy)),
    "label smoothing": (1, torchs(F.cross_entropy, label_smoothing=0.1)),
    "nll": (1, torchs(F.nll_loss)),
    "multi margin": (1, torchs(F.multi_margin_loss)),
    "mse": (CLASSES, torchs(F.mse_loss)),
    "l1": (CLASSES, torchs(F.l1_loss)),
    "smooth l1": (CLASSES, torchs(F.smooth_l1_loss)),
    "huber": (CLASSES, torchs(F.huber_loss)),
    "soft margin": (CLASSES, torchs(F.soft_margin_loss)),
    "binary, logits": (CLASSES, torchs(F.binary_cross_entropy_with_logits)),
    "binary, weighted": (CLASSES, torchs(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([1.0, 3.0, 7.0]))),
    "binary": (CLASSES, lambda z, y, t, kind: F.binary_cross_entropy(z.sigmoid(), t, reduction=kind)),
    "kl, batchmean": (1, batch_mean),
    "poisson": (CLASSES, torchs(F.poisson_nll_loss)),
    "two tasks": (1, two_tasks),
    ".mean()": (1, reduced(squares, lambda each: each.mean())),
    "mean over dim 0": (1, reduced(lambda z, y, t: (z - t).square(), lambda each: each.mean(0).sum())),
    ".sum() / B": (1, reduced(squares, lambda each: each.sum() / len(each))),
    "(each / B).sum()": (1, reduced(squares, lambda each: (each / len(each)).sum())),
    ".sum() * (1 / B)": (1, reduced(squares, lambda each: each.sum() * (1 / len(each)))),
    "places": (4, lambda z, y, t, kind: F.cross_entropy(*(a[..., None].expand(*a.shape, 4) for a in (z, y)), reduction=kind)),
    "PerExampleLoss": (1, lambda z, y, t, kind: PerExampleLoss(F.cross_entropy, kind)(z, y)),
}  # fmt: skip


def at_the_output(loss: Callable[[Tensor], Tensor], outputs: Tensor, rows: int | None) -> Tensor:
    """The gradient that a model gets at its output."""
    z, seen = outputs.clone().requires_grad_() * 1.0, []
    z.register_hook(seen.append)
    loss(z if rows is None else means.undo_mean(z, rows)).backward()
    return seen[0]


def some(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    z, t = torch.randn(rows, CLASSES, generator=generator), torch.rand(rows, CLASSES, generator=generator)
    return z, torch.randint(CLASSES, (rows,), generator=generator), t


@pytest.fixture(autouse=True)
def _intercepted():
    means.intercept_backward()


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_mean_is_that_of_the_sum_to_the_bit(name):
    share, loss = LOSSES[name]
    for rows in (1, 2, 3, 7, 41, 47, 49, 55, 61, 82, 97, 98, 107, 128, 511, 4093):
        z, y, t = some(rows)
        mean = at_the_output(lambda z, y=y, t=t: loss(z, y, t, "mean"), z, rows)
        assert torch.equal(mean, at_the_output(lambda z, y=y, t=t: loss(z, y, t, "sum") / share, z, None)), rows


def test_multiplied_afterwards_it_is_not(monkeypatch):
    monkeypatch.setattr(means, "_plan", lambda roots: None)
    z, y, _ = some(49)
    mean = at_the_output(lambda z: F.cross_entropy(z, y), z, 49)
    total = at_the_output(lambda z: F.cross_entropy(z, y, reduction="sum"), z, None)
    assert not torch.equal(mean, total)
    torch.testing.assert_close(mean, total)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: z.square().sum(1) @ torch.full((49,), 1 / 49),  # nothing in it divides
        lambda z: z[:9].square().mean() + z.square().sum() / 49,  # one way without a mean over the rows
        lambda z: (z.square().mean() - z.mean().square()).exp(),
        lambda z: (z - z.mean()).square().mean(),  # two means on one way
    ],
)
def test_a_mean_in_another_form_is_multiplied_by_the_rows(loss):
    z, _, _ = some(49)
    torch.testing.assert_close(at_the_output(loss, z, 49), 49 * at_the_output(loss, z, None))


def test_a_mean_that_is_rounded_is_warned_of_once_and_no_other_is():
    x, y, t = some(9)
    means._say_that_it_is_rounded.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_the_output(lambda z: LOSSES["cross entropy"][1](z, y, t, "mean"), x, 9)
    with pytest.warns(PrivacyWarning, match="undone in single precision"):
        at_the_output(lambda z: (z.square().sum(1) * torch.full((9,), 1 / 9)).sum(), x, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_the_output(lambda z: (z.square().sum(1) * torch.full((9,), 1 / 9)).sum(), x, 9)


def test_what_is_not_private_keeps_the_gradient_of_the_mean():
    z, y, _ = some(49)
    head, beside = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
    for losses in (lambda u: F.cross_entropy(head(u), y), lambda u: F.cross_entropy(u, y) + beside(z).square().mean()):
        found = []
        for rows in (49, None):
            head.zero_grad()
            beside.zero_grad()
            at_the_output(losses, z, rows)
            found.append([p.grad for p in (*head.parameters(), *beside.parameters()) if p.grad is not None])
        assert len(found[0]) == 2
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_graph_that_is_kept_is_left_as_it_was():
    z, y, _ = some(49)
    leaf = z.clone().requires_grad_()
    loss = F.cross_entropy(means.undo_mean(leaf, 49), y)
    loss.backward(retain_graph=True)
    (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)  # which is not a backward into a model
    torch.testing.assert_close(again, leaf.grad)
    first, leaf.grad = leaf.grad, None
    loss.backward()
    assert torch.equal(leaf.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_outputs_of_two_batches_are_each_multiplied_by_their_own_rows():
    (a, y, _), (b, v, _) = some(49), some(41)
    leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    us = [means.undo_mean(z, len(z)) for z in leaves]
    (F.cross_entropy(us[0], y) + F.cross_entropy(us[1], v)).backward()
    for z, labels in ((leaves[0], y), (leaves[1], v)):
        total = at_the_output(lambda z, labels=labels: F.cross_entropy(z, labels, reduction="sum"), z.detach(), None)
        torch.testing.assert_close(z.grad, total)


# ---- what it is for


def moved(
    network: str, inputs: str, loss: str, rows: int, bound: float, scale: float, seed: int, exact: bool = True
) -> float:
    """How far one example moves the sum of a mean loss, in C; which must be that of the summed loss to the bit.

    0 if the forward itself depends on how many rows there are, as products on a CPU may.
    """
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    x = INPUTS[inputs](torch.randn(rows, POSITIONS, FEATURES)).contiguous()
    width = model(x[:1]).shape[1]
    y, t = torch.randint(min(width, CLASSES), (rows,)), torch.rand(rows, width)
    share, write = LOSSES[loss]

    def total(kept: Tensor, reduction: str = "mean") -> Tensor:
        divisor = 1 if share == 1 or reduction == "mean" else width
        whole = lambda z: scale * (write(z, y[kept], t[kept], reduction) / divisor)  # noqa: E731
        return own_loop(model, x[kept], None, bound, reduction, whole)

    everyone, gone = torch.arange(rows), int(torch.randint(rows, ()))
    others = everyone[everyone != gone]
    all_of_them = total(everyone)
    assert not exact or torch.equal(all_of_them, total(everyone, "sum"))
    same = torch.equal(model(x)[others], model(x[others]))
    return float((all_of_them - total(others)).norm()) / bound if same else 0.0


CANCELLING = sorted(name for name in INPUTS if "cancelling" in name)
WRITTEN = ["cross entropy", "mse", "huber", ".mean()", ".sum() / B", "two tasks", "PerExampleLoss"]


@pytest.mark.parametrize("loss", WRITTEN)
@pytest.mark.parametrize("network", ["tokens", "shared", "embedding"])
def test_cancelling_gradients_move_the_sum_by_at_most_the_bound(network, loss):
    assert moved(network, "cancelling but for the last bits", loss, 9, 1e-3, 1e3, 0) <= 1 + 1e-5


@pytest.mark.slow
@given(
    network=st.sampled_from(["tokens", "shared", "shared and wide", "embedding", "tied embedding", "bare parameter"]),
    inputs=st.sampled_from([*CANCELLING, "offset 1e3"]),
    loss=st.sampled_from(WRITTEN),
    rows=st.sampled_from([2, 3, 9, 49, 50, 83]),
    bound=st.sampled_from([1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1.0, 1e3, 1e6]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_a_search_finds_no_mean_loss_that_moves_it_further(network, inputs, loss, rows, bound, scale, seed):
    assert moved(network, inputs, loss, rows, bound, scale, seed) <= 1 + 1e-5


def test_multiplied_afterwards_the_bound_is_passed(monkeypatch):
    monkeypatch.setattr(means, "_plan", lambda roots: None)
    assert moved("tokens", "cancelling but for the last bits", "cross entropy", 9, 1e-3, 1e3, 0, exact=False) > 1 + 1e-5


def test_the_book_keeper_of_a_copy_undoes_its_own_mean():
    model = nn.Linear(FEATURES, CLASSES)
    keeper = BookKeeper(copy.deepcopy(model), batch_first=True, loss_reduction="mean")
    x = torch.randn(49, FEATURES)
    keeper.module(x).square().mean(1).mean().backward()
    squares, _ = keeper.norms_and_sums(list(keeper.module.parameters()), torch.ones(49, dtype=torch.float64))
    model(x[:1]).square().mean().backward()
    alone = sum(p.grad.double().square().sum() for p in model.parameters())
    torch.testing.assert_close(squares[0], alone, rtol=1e-6, atol=0)
