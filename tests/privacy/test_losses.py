"""Losses whose mean depends on who else is in the batch: refused wherever they can be seen, or made safe."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_runs import CLASSES, EXAMPLES, data, make, mlp, sgd
from torch import Tensor, nn

import dpivon
from dpivon import ArgumentError, PerExampleLoss, PrivacyError
from dpivon.privacy import losses
from dpivon.privacy.gradients.means import intercept_backward, losses_under_way

C = 0.3
WEIGHT = torch.tensor([100.0, 1.0, 0.01])
Loss = Callable[[Tensor, Tensor], Tensor]


def skewed() -> tuple[Tensor, Tensor]:
    """Eleven examples of a light class; the twelfth, of the heavy one, is what a neighbour adds."""
    x, _ = data()
    return x, torch.tensor([2] * (EXAMPLES - 1) + [0])


def moved(loss: Loss, mode: str, monkeypatch: pytest.MonkeyPatch | None = None) -> float:
    """‖S(D) − S(D − last)‖ / C with membership forced."""
    sums = []
    for n in (EXAMPLES, EXAMPLES - 1):
        x, y = skewed()
        run = make(mode, optimizer=sgd, data=(x[:n], y[:n]), max_grad_norm=C)
        run.criterion = loss
        sums.append(run.release(x[:n], y[:n]))
    return float((sums[0] - sums[1]).norm()) / C


def weighted_function(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, weight=WEIGHT)


def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, weight=WEIGHT, label_smoothing=0.1)


def two_steps(outputs: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * F.nll_loss(outputs.log_softmax(-1), labels, weight=WEIGHT) + outputs.square().mean()


def ignoring(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, ignore_index=1)


def over_places(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[..., None, None], labels[:, None, None], weight=WEIGHT)


WEIGHTED: list[Loss] = [
    nn.CrossEntropyLoss(weight=WEIGHT),
    nn.CrossEntropyLoss(ignore_index=0),
    nn.CrossEntropyLoss(ignore_index=-1),
    weighted_function,
    smoothed,
    two_steps,
    ignoring,
    over_places,
]


@pytest.mark.parametrize("loss", WEIGHTED, ids=lambda f: getattr(f, "__name__", repr(f)))
def test_a_weighted_mean_is_refused_in_backward_though_never_handed_over(mode, loss):
    run = make(mode, optimizer=sgd)
    x, y = next(iter(run.loader))
    with pytest.raises(PrivacyError, match=r"(weight|ignore_index)=.* one example rescales all others.*PerExampleLoss"):
        loss(run.model(x), y).backward()
    assert len(run.engine.accountant) == 0
    assert run.contributions == []
    alone = make(mode, optimizer=sgd).release(*data())
    torch.testing.assert_close(run.release(*data()), alone)  # a corrected loss goes on, and inherits nothing
    assert len(run.engine.accountant) == 1


def test_without_the_check_one_example_moves_the_sum_by_several_c(monkeypatch):
    monkeypatch.setattr("dpivon.privacy.losses.check_watch", lambda: None)
    monkeypatch.setattr("dpivon.privacy.losses._check_nll", lambda node, ignored: None)
    assert moved(nn.CrossEntropyLoss(weight=WEIGHT), "bookkeeping") > 3.0


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=WEIGHT),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=0),
        functools.partial(F.cross_entropy, weight=WEIGHT),
    ],
    ids=["weight", "smoothing", "ignore_index", "partial"],
)
def test_the_same_losses_one_example_at_a_time_keep_the_bound(mode, criterion):
    assert moved(PerExampleLoss(criterion), mode) <= 1.0 + 1e-5


def test_an_ignored_label_of_minus_100_does_not_rescale_the_others():
    x, y = skewed()
    y[-1] = -100  # torch's default ignore_index: the plain mean divides by eleven, and the engine multiplies by twelve
    outputs = mlp()(x)
    (with_it,) = torch.autograd.grad(PerExampleLoss(nn.CrossEntropyLoss())(outputs, y) * EXAMPLES, outputs)
    outputs = mlp()(x[:-1])
    assert not with_it[-1].any()
    assert torch.isfinite(with_it).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_weights_it_is_the_ordinary_loss(reduction):
    torch.manual_seed(0)
    z, y = torch.randn(7, CLASSES), torch.randint(CLASSES, (7,))
    ours = PerExampleLoss(nn.CrossEntropyLoss(), reduction)
    torch.testing.assert_close(ours(z, y), F.cross_entropy(z, y, reduction=reduction))
    torch.testing.assert_close(
        PerExampleLoss(F.mse_loss, reduction)(z, 2 * z), F.mse_loss(z, 2 * z, reduction=reduction)
    )
    assert float(ours(z[:0], y[:0])) == 0.0


def test_plain_losses_are_left_alone(mode):
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        run = make(mode, optimizer=sgd, criterion=loss)
        run.release(*data())
        assert len(run.engine.accountant) == 1


def test_a_weighted_sum_is_left_alone_and_keeps_the_bound():
    sums = []
    for n in (EXAMPLES, EXAMPLES - 1):
        x, y = skewed()
        run = make("bookkeeping", optimizer=sgd, data=(x[:n], y[:n]), max_grad_norm=C, loss_reduction="sum")
        run.criterion = nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum")
        sums.append(run.release(x[:n], y[:n]))
    assert float((sums[0] - sums[1]).norm()) <= C * (1 + 1e-5)


def test_another_model_may_use_a_weighted_mean():
    run = make("bookkeeping", optimizer=sgd)
    x, y = next(iter(run.loader))
    public = mlp()
    F.cross_entropy(public(x), y, weight=WEIGHT).backward()
    run.step(x, y)
    assert all(p.grad is not None for p in public.parameters())


def test_a_loss_beside_ours_may_be_weighted():
    run = make("bookkeeping", optimizer=sgd)
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    (run.criterion(run.model(x), y) + F.cross_entropy(mlp()(x), y, weight=WEIGHT)).backward()
    run.optimizer.step()
    assert len(run.engine.accountant) == 1


def test_the_loss_is_found_from_another_thread_as_on_a_gpu():
    found: list[Any] = []

    def look(g: Tensor) -> None:
        thread = threading.Thread(target=lambda: found.extend(losses_under_way()))
        thread.start()
        thread.join()

    intercept_backward()
    z = torch.randn(4, CLASSES, requires_grad=True) * 2
    z.register_hook(look)
    loss = F.cross_entropy(z, torch.zeros(4, dtype=torch.long), weight=WEIGHT)
    loss.backward()
    assert any(root is loss for root in found)


def renamed_function(monkeypatch):
    monkeypatch.setattr(losses, "losses_under_way", list)  # as if it were found under no name


def renamed_node(monkeypatch):
    monkeypatch.setattr(losses, "_NLL", "NegativeLogLikelihood")


def renamed_attribute(monkeypatch):
    def fails(node):
        raise AttributeError("no attribute '_saved_ignore_index'")

    monkeypatch.setattr(losses, "_check_nll", fails)


@pytest.mark.parametrize("change", [renamed_function, renamed_node, renamed_attribute])
def test_a_torch_in_which_losses_cannot_be_inspected_is_refused_before_anything_is_made(monkeypatch, change):
    change(monkeypatch)
    losses.check_watch.cache_clear()
    try:
        with pytest.raises(PrivacyError, match=r"torch=.*cannot be inspected.*tested with\.$"):
            make("bookkeeping", optimizer=sgd)
    finally:
        losses.check_watch.cache_clear()


def test_a_backward_whose_losses_are_not_found_is_refused(monkeypatch):
    """As on a device whose threads torch starts in another way: the trial before was on a CPU."""
    run = make("bookkeeping", optimizer=sgd)
    renamed_function(monkeypatch)
    with pytest.raises(PrivacyError, match="losses it began with are unknown"):
        run.release(*data())
    assert len(run.engine.accountant) == 0
    assert run.contributions == []


def test_watching_the_loss_keeps_no_graph_alive():
    run = make("bookkeeping", optimizer=sgd)
    outputs: list[weakref.ref[Tensor]] = []
    run.model.register_forward_hook(lambda module, args, z: outputs.append(weakref.ref(z)))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            run.release(*data())
        assert [z() is None for z in outputs] == [True] * 3
    finally:
        gc.enable()


# ---- a criterion that is handed over


class ByItsOwnWeights(nn.Module):
    """A weighted mean of the caller's own making: nothing about it says so."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        weight = WEIGHT[labels]
        return (weight * F.cross_entropy(outputs, labels, reduction="none")).sum() / weight.sum()


def contrastive(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs @ outputs.T).log_softmax(1).diagonal().neg()


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs, targets)


@pytest.mark.parametrize(
    ("criterion", "value"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), "weight"),
        (nn.NLLLoss(weight=WEIGHT), "weight"),
        (nn.CrossEntropyLoss(ignore_index=0), "ignore_index=0"),
        (nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
        (ByItsOwnWeights(), "ByItsOwnWeights"),
        (weighted_function, "weighted_function"),
        (lambda z, y: contrastive(z, y).mean(), "lambda"),
    ],
)
def test_a_criterion_that_is_no_plain_mean_is_refused_and_nothing_was_changed(criterion, value):
    module = mlp()
    options: dict[str, Any] = {"module": module, "optimizer": sgd, "call": None}
    engine = dpivon.PrivacyEngine()
    options["call"] = functools.partial(engine.make_private, criterion=criterion)
    with pytest.raises(ArgumentError, match="criterion=") as caught:
        make("bookkeeping", **options)
    assert value in str(caught.value)
    assert not hasattr(module, "autograd_grad_sample_hooks")
    make(
        "bookkeeping",
        **options | {"call": functools.partial(engine.make_private, criterion=PerExampleLoss(F.mse_loss))},
    )


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.MSELoss(),
        nn.BCEWithLogitsLoss(),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        nn.KLDivLoss(reduction="mean"),
        nn.GaussianNLLLoss(),
        huber,
    ],
)
def test_plain_means_pass(criterion):
    call = functools.partial(dpivon.PrivacyEngine().make_private, criterion=criterion)
    assert make("bookkeeping", optimizer=sgd, call=call).optimizer is not None


def test_losses_that_compare_rows_are_refused_before_they_see_data():
    loss = PerExampleLoss(contrastive)
    outputs = torch.full((4, CLASSES), torch.nan, requires_grad=True)  # the values do not matter
    with pytest.raises(PrivacyError, match="depends on other rows"):
        loss(outputs, torch.zeros(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PerExampleLoss(None), "criterion=None: is not a loss"),
        (lambda: PerExampleLoss(F.mse_loss, "none"), "loss_reduction='none'"),
        (
            lambda: PerExampleLoss(lambda z, y: z.sum())(torch.ones(3, 2), torch.ones(3)),
            r"criterion=\(\): is not one loss",
        ),
    ],
)
def test_what_is_no_loss_an_example_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


# ---- fit and stacks take one loss an example

FIT: dict[str, Any] = {"method": "dp-ivon-gradsq", "lr": 0.1, "batch_size": 4, "epochs": 1, "delta": 1e-3}
FIT |= {"noise_multiplier": 1.0}


@pytest.mark.parametrize("loss", [F.cross_entropy, weighted_function], ids=["mean", "weighted"])
def test_a_scalar_loss_in_fit_is_refused(loss):
    x, y = data()
    with pytest.raises(ArgumentError, match=r"loss=.*one loss an example"):
        dpivon.fit(mlp(), x, y, **FIT, loss=loss)


def test_a_loss_of_several_rows_in_fit_is_refused():
    x, y = data()
    with pytest.raises(PrivacyError, match=r"loss on made-up inputs.*PerExampleLoss"):
        dpivon.fit(mlp(), x, y, **FIT, loss=contrastive)


def test_fit_takes_the_losses_of_a_per_example_loss():
    x, y = data()
    loss = PerExampleLoss(nn.CrossEntropyLoss(weight=WEIGHT)).per_example
    fitted = dpivon.fit(mlp(), x, y, **FIT, loss=loss, seed=1)
    assert fitted.posterior.num_parameters == sum(p.numel() for p in mlp().parameters())
