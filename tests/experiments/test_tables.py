"""The loop of the tables' experiment against the library's own: clipped sums, and whole runs without noise."""

import pytest
import torch
from experiments.tables.run import RATES
from experiments.tables.train import Net, Spec, auc, scores, train

from dpivon.privacy.clipping import FLAT
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.stacked import Run, Stack
from dpivon.stacked.networks import AnyNetwork


def data(n=40, features=5, classes=3):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, features, generator=generator) * 2 - 1, torch.randint(classes, (n,), generator=generator)


@pytest.mark.parametrize("hidden", [0, 7])
def test_clipped_sums_are_those_of_book_keeping(hidden):
    net, (x, y) = Net(5, 3, hidden, 1.0), data()
    size = sum(torch.Size(s).numel() for s in net.shapes)
    theta = torch.randn(3, size, generator=torch.Generator().manual_seed(2))
    bound = torch.tensor([0.2, 1.0, 50.0])
    ours = net.clipped_sums(theta, x, y, bound)
    for row, c, mine in zip(theta, bound, ours, strict=True):
        model = net.module()
        torch.nn.utils.vector_to_parameters(row, model.parameters())
        keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
        torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        sums = keeper.clipped_sums(list(model.parameters()), FLAT.rescaled(float(c)))
        torch.testing.assert_close(mine.double(), torch.cat([s.flatten().double() for s in sums]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", RATES)
def test_a_run_is_that_of_a_stack(method):
    """On whole batches with next to no noise; IVON's θ is drawn, so its posterior is made narrow by its step of zero length."""
    net, (x, y), steps = Net(5, 3, 7, 1.0), data(), 6
    lr = RATES[method][2]
    specs = [Spec(method, lr, 0.5)]
    last, average = train(net, specs, x, y, sigma=1e-9, batch=len(x), steps=steps, seed=3)
    run = Run(method, 3, 1e-9, 0.5, lr, len(x), {"ema": 1 - 10 / (steps + 10)} if method != "dp-steady" else {})
    stack = Stack([run], AnyNetwork(net.module), x, y, start=net.start(3)[None], steps=steps)
    for _ in stack.train(steps):
        pass
    near = {"rtol": 1e-3, "atol": 2e-2 if method == "dp-ivon-gradsq" else 1e-4}
    torch.testing.assert_close(last, stack.mean, **near)
    torch.testing.assert_close(average, stack.average, **near)


def test_scores():
    assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])) == 0.75
    assert auc(torch.zeros(4), torch.tensor([False, False, True, True])) == 0.5
    y = torch.tensor([0] * 9 + [1])
    constant = torch.tensor([[0.9, 0.1]]).log().repeat(10, 1)  # says the prior, and nothing else
    found = scores(constant, y, torch.tensor([0.9, 0.1], dtype=torch.float64))
    assert found["accuracy"] == 0.9
    assert found["balanced_nll"] == pytest.approx(0.6931, abs=1e-4)
    assert found["balanced_accuracy"] == 0.5
