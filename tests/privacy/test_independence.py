"""Rows of a batch are shown to be examples, on made-up inputs, before anything is released."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_runs import CLASSES, FEATURES, data, make, mlp, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpivon
from dpivon import PerExampleLoss, PrivacyEngine, PrivacyError, PrivacyWarning
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.independence import check_loss_rows, check_model_rows
from dpivon.privacy.made_up import same_for_every_row


class Program(nn.Module):
    """A linear layer and whatever is done around it."""

    def __init__(self, program: Any, **parts: Any) -> None:
        super().__init__()
        self.program, self.first, self.last = program, nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.program(self, x)


class CentredBackward(torch.autograd.Function):
    """The identity, with a gradient that mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


MIXING = {
    "batch mean taken off": lambda m, x: m.last((h := m.first(x)) - h.mean(0)),
    "rows reversed and added": lambda m, x: m.last(m.first(x) + m.first(x).flip(0)),
    "the size of the batch": lambda m, x: m.last(m.first(x) * len(x)),
    "the place in the batch": lambda m, x: m.last(m.first(x) + torch.arange(len(x)).unsqueeze(1)),
    "a backward that centres": lambda m, x: m.last(CentredBackward.apply(m.first(x))),
    "only large numbers": lambda m, x: m.last(m.first(x) + (x.abs().max() > 50) * m.first(x).mean(0)),
    "only large batches": lambda m, x: m.last(m.first(x) + (len(x) > 8) * m.first(x).mean(0)),
    "zero times another row": lambda m, x: m.last(m.first(x) + 0.0 * x.sum()),
    "one layer on sorted rows": lambda m, x: m.last(m.first(x[o := x[:, 0].argsort()])[o.argsort()]),
    "a permutation that is drawn": lambda m, x: m.last(m.first(x) + m.first(x)[torch.randperm(len(x))]),
}


@pytest.mark.parametrize("what", MIXING)
def test_a_model_whose_rows_depend_on_each_other_is_refused_before_anything_is_released(what):
    run = make(module=Program(MIXING[what]), optimizer=sgd)
    with pytest.raises(PrivacyError, match=r"made-up inputs.*(Linear|Program|last|first)"):
        run.release(*data())
    assert run.contributions == []
    assert len(run.engine.accountant) == 0


FINE = {
    "dropout": lambda m, x: m.last(F.dropout(m.first(x), 0.5, m.training)),
    "noise": lambda m, x: m.last(m.first(x) + 0.1 * torch.randn(len(x), 6)),
    "a stochastic depth": lambda m, x: m.last(m.first(x) * (torch.rand(len(x), 1) < 0.8) / 0.8),
    "in single precision inside": lambda m, x: m.last(m.first(x).float().softmax(1).to(m.last.weight.dtype)),
    "a normalisation": lambda m, x: m.last(F.layer_norm(m.first(x), (6,))),
    "a counter": lambda m, x: m.last(m.first(x)) if setattr(m, "calls", getattr(m, "calls", 0) + 1) is None else None,
}


@pytest.mark.parametrize("what", FINE)
def test_a_model_that_looks_at_one_row_at_a_time_is_not(what):
    torch.manual_seed(0)
    run = make(module=Program(FINE[what]), optimizer=sgd)
    state = torch.random.get_rng_state()
    run.engine.check(nn.CrossEntropyLoss())
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's randomness is left alone
    run.release(*data())
    assert len(run.contributions) == 1


def test_the_check_changes_neither_the_model_nor_its_mode():
    model = Program(FINE["a counter"])
    model.calls = 7
    run = make(module=model, optimizer=sgd)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.eval()
    run.engine.check(nn.CrossEntropyLoss())
    assert not model.training
    assert model.calls == 7
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


BARE = {
    "its mean": lambda m, x: m.last(m.first(x) * m.bare.mean()),
    "repeat": lambda m, x: m.last(m.first(x) + m.bare.repeat(len(x), 1)),
    "over its norm": lambda m, x: m.last(m.first(x) * (m.bare / m.bare.norm())),
    "its first row": lambda m, x: m.last(m.first(x) + m.bare[0]),
    "expand": lambda m, x: m.last(m.first(x) + m.bare.expand(len(x), -1)),
    "a product": lambda m, x: m.last(m.first(x) @ m.bare),
}


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ("a product", (6, 6)),
        *((how, (1, 6)) for how in BARE if how != "a product"),
        *((how, (6,)) for how in BARE if how not in ("a product", "its first row")),
    ],
)
def test_bare_parameters_are_right_whatever_is_done_with_them(how, shape):
    torch.manual_seed(0)
    model = Program(BARE[how], bare=nn.Parameter(torch.randn(shape)))
    (x, y), each = data(), []
    for i in range(len(x)):
        one = x[i : i + 1], y[i : i + 1]
        each.append(make(module=copied(model), optimizer=sgd, max_grad_norm=0.3, data=one).release(*one))
    assert all(float(g.norm()) <= 0.3 * (1 + 1e-5) for g in each)
    total = make(module=model, optimizer=sgd, max_grad_norm=0.3).release(x, y)
    torch.testing.assert_close(total, torch.stack(each).sum(0), rtol=1e-4, atol=1e-6)


def copied(model: Program) -> Program:
    made = Program(model.program, bare=nn.Parameter(model.bare.detach().clone()))
    made.load_state_dict(model.state_dict())
    return made


class Nested(Dataset[Any]):
    """Records as dicts, whose rows a model folds."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return {"x": [data()[0][i]]}, data()[1][i]


def test_rows_are_found_in_nested_inputs_too():
    def folded(m: Program, batch: Any) -> Tensor:
        x = batch["x"][0]
        return m.last(m.first(x.repeat(2, 1)).view(2, len(x), 6).mean(0))

    model = Program(folded)
    private, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model),
        data_loader=DataLoader(Nested(), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    inputs, _ = next(iter(loader))
    with pytest.raises(PrivacyError, match=r"Linear 'first' saw 6 rows in a batch of 3"):
        private(inputs)


def test_another_structure_of_inputs_is_checked_anew():
    def program(m: Program, x: Any) -> Tensor:
        return m.last(m.first(x)) if isinstance(x, Tensor) else m.last(m.first(x["x"]) + m.first(x["x"]).mean(0))

    run = make(module=Program(program), optimizer=sgd)
    run.release(*data())
    with pytest.raises(PrivacyError, match="made-up inputs"):
        run.model({"x": data()[0]})


class Particular(nn.Module):
    """Takes only numbers that no made-up input has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not (x == 7.0).any():
            raise ValueError("there must be a seven")
        return self.linear(x)


def test_what_cannot_be_tried_is_refused_or_allowed_by_name_and_recorded(tmp_path):
    x, y = data()
    x[:, 0] = 7.0
    refused = make(module=Particular(), optimizer=sgd, data=(x, y))
    with pytest.raises(PrivacyError, match=r"could not be tried.*must be a seven.*unchecked=True"):
        refused.release(x, y)
    engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    allowed = make(module=Particular(), optimizer=sgd, data=(x, y), engine=engine, unchecked=True)
    allowed.release(x, y)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert "unchecked" in json.dumps(lines)


def test_the_models_own_error_comes_first():
    run = make(optimizer=sgd)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.model(torch.randn(4, FEATURES + 1))


# ---- the loss


def by_their_weight(z: Tensor, y: Tensor) -> Tensor:
    w = torch.tensor([1.0, 3.0, 9.0])[y].to(z)
    return (F.cross_entropy(z, y, reduction="none") * w).sum() / w.sum()


LOSSES = {
    "weights over their sum": by_their_weight,
    "contrastive": lambda z, y: (z @ z.T).log_softmax(1).diagonal().neg().mean(),
    "a sum under a mean": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "a penalty on the batch": lambda z, y: F.cross_entropy(z, y) + z.mean(0).square().sum(),
    "inside a function of the batch": lambda model, batch: by_their_weight(model(batch[0]), batch[1]),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_in_which_examples_touch_each_other_is_refused(what):
    run = make(optimizer=sgd)
    with pytest.raises(PrivacyError, match=r"loss on made-up inputs.*PerExampleLoss"):
        run.engine.check(LOSSES[what])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        lambda z, y: F.cross_entropy(z, y),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        PerExampleLoss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 9.0]))),
    ],
)
def test_a_plain_loss_passes_and_nothing_more_is_said(loss):
    run = make(optimizer=sgd)
    run.engine.check(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.release(*data())


def test_the_first_step_says_once_that_the_loss_was_not_checked():
    run = make(optimizer=sgd)
    with pytest.warns(PrivacyWarning, match=r"loss was not checked.*engine\.check"):
        run.release(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.release(*data())
    tried = make(optimizer=sgd, criterion=PerExampleLoss(nn.CrossEntropyLoss()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tried.release(*data())


def test_a_check_before_make_private_says_when_to_call_it():
    with pytest.raises(PrivacyError, match="after"):
        PrivacyEngine().check(nn.CrossEntropyLoss())


@pytest.mark.parametrize("checked", [True, False])
def test_labels_of_minus_100_are_refused_where_the_mean_leaves_them_out(checked):
    x, y = data()
    y[3] = -100
    run = make(optimizer=sgd, data=(x, y))
    if checked:
        run.engine.check(nn.CrossEntropyLoss())
    with pytest.raises(PrivacyError, match=r"-100|ignore_index"):
        run.release(x, y)
    assert run.contributions == []
    safe = make(optimizer=sgd, data=(x, y), criterion=PerExampleLoss(nn.CrossEntropyLoss()))
    safe.engine.check(safe.criterion)
    safe.release(x, y)
    assert len(safe.contributions) == 1


# ---- bf16


def test_the_size_of_the_batch_does_not_round_gradients_in_bf16():
    """1/B in bf16 would round everyone's gradient by B: with all examples alike the sum then moves by almost 2 C."""
    torch.manual_seed(0)
    x = torch.randn(1, FEATURES).repeat(512, 1)
    y = torch.zeros(512, dtype=torch.long)
    net, sums = mlp(), []
    for n in (511, 510):
        module = mlp()
        module.load_state_dict(net.state_dict())
        run = make(module=module, optimizer=sgd, data=(x[:n], y[:n]), max_grad_norm=10.0)
        next(iter(run.loader))
        with torch.autocast("cpu", torch.bfloat16):
            outputs = run.model(x[:n])
        assert outputs.dtype == torch.float32
        F.cross_entropy(outputs, y[:n]).backward()
        run.optimizer.step()
        sums.append(run.contributions[-1])
    one = float(sums[1].norm()) / 510
    assert float((sums[0] - sums[1]).norm()) <= one * (1 + 1e-3)


# ---- what the check is made of


def test_random_draws_are_the_same_for_every_row_and_for_every_batch():
    for draw in (
        lambda n: F.dropout(torch.ones(n, 5), 0.5),
        lambda n: torch.rand(n, 5),
        lambda n: torch.randn(n, 1, 1),
        lambda n: torch.empty(n, 5).uniform_(2, 3),
        lambda n: torch.bernoulli(torch.full((n, 5), 0.4)),
    ):
        found = []
        for n in (1, 4):
            with same_for_every_row(torch.device("cpu"), 0):
                found.append(draw(n))
        assert torch.equal(found[0].expand_as(found[1]), found[1])


def test_the_library_finds_its_own_networks_in_order():
    for model, x in (
        (dpivon.models.SmallCNN(), torch.randn(4, 1, 8, 8)),
        (dpivon.models.TextEncoder(), torch.randint(0, 5, (4, 7))),
    ):
        keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
        check_model_rows(keeper, (x,), {})
        assert check_loss_rows(keeper, lambda m, b: m(b[0]).square().mean(1).mean(), (x, x[:, 0]))
        keeper.detach_from_model()


@pytest.mark.parametrize("classes", [2, 3, 4])  # as many as rows are made up, too
@pytest.mark.parametrize("mixes", [False, True])
def test_a_batch_in_the_second_dimension_is_checked_with_labels_of_one(classes, mixes):
    def run(m: Any, x: Tensor) -> Tensor:
        z = m.out(F.dropout(m.fc(x).tanh(), 0.3)).mean(0)
        return z - z.mean(0) if mixes else z

    model = Program(run, fc=nn.Linear(FEATURES, 6), out=nn.Linear(6, classes))
    keeper = BookKeeper(model, batch_first=False, loss_reduction="mean")
    batch = torch.randn(7, 5, FEATURES), torch.randint(classes, (5,))
    for check in (
        lambda: check_model_rows(keeper, batch[:1], {}),
        lambda: check_loss_rows(keeper, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch),
    ):
        if mixes:
            with pytest.raises(PrivacyError, match=r"other rows|what the example gives"):
                check()
        else:
            check()
    keeper.detach_from_model()


@pytest.mark.filterwarnings("ignore:grad_sample_mode")
@pytest.mark.parametrize("name", ["hooks", "functorch", "ew", "ghost"])
def test_opacus_names_of_modes_mean_book_keeping(name):
    plain = make(optimizer=sgd)
    expected = plain.release(*data())
    torch.manual_seed(0)
    module = mlp()
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=sgd(module),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=len(data()[0])),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=name,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if name == "ghost" else nn.CrossEntropyLoss()
    next(iter(loader))
    x, y = data()
    criterion(model(x), y).backward()
    if name != "ghost":
        assert optimizer.params[0].grad_sample.shape == (len(x), *optimizer.params[0].shape)
    optimizer.step()
    summed = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
    torch.testing.assert_close(summed, expected)
