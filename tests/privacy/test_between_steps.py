"""What is remembered from one step to the next is asked anew wherever it may have changed."""

from __future__ import annotations

import cProfile
import pstats
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from benchmarks.overhead import as_on_a_gpu
from opacus.optimizers.optimizer import _check_processed_flag
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon import PrivacyError
from dpivon.optim.parameters import full_dtype, full_dtypes
from dpivon.optim.tensors import views
from dpivon.privacy.forward_watch import ForwardWatch, _changed, _norms, marks
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import Kept, Tree
from dpivon.privacy.layers.uses import Dense, Outer
from dpivon.privacy.logical_batch import _in_order, unreleased_sums

X = torch.randn(3, 4)


class Net(nn.Module):
    """Two layers of one size, and a change that its forward makes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.one.register_parameter("last", nn.Parameter(torch.ones(4), requires_grad=False))
        self.register_buffer("table", torch.ones(4))
        self.change = None

    def forward(self, x):
        x = self.two(self.one(x))
        if self.change is not None:
            self.change(self)
        return x


def pass_of(model):
    """A forward, the check of a step, and a backward."""
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum")
    watch = ForwardWatch(keeper)

    def step():
        loss = model(X).sum()
        watch.check_tensors()
        loss.backward()
        keeper.clear()
        keeper.forget_passes()

    for _ in range(3):
        step()
    return step


def replace_parameter(net):
    net.one.weight = nn.Parameter(net.one.weight.detach().clone())


def replace_buffer(net):
    net.table = net.table.clone()


def swap(net):
    net.one.weight, net.two.weight = net.two.weight, net.one.weight


def move_to_another_layer(net):
    """Over all layers tensors, their names and their order are what they were."""
    net.two._parameters = {"last": net.one._parameters.pop("last"), **net.two._parameters}


def rename(net):
    net._buffers["other"] = net._buffers.pop("table")


def remove(net):
    del net.one.bias


def copy_of_a_dict(net):
    net.one._parameters = dict(net.one._parameters)


def write(net):
    net.table.add_(1.0)


def write_unseen_by_torch(net):
    net.table.data.add_(1.0)


@pytest.mark.parametrize(
    "change",
    [replace_parameter, replace_buffer, swap, move_to_another_layer, rename, remove, write, write_unseen_by_torch],
)
def test_a_tensor_that_a_forward_changes_after_many_that_did_not_is_refused(change):
    model = Net()
    step = pass_of(model)
    model.change = change
    with pytest.raises(PrivacyError, match="was changed by forward"):
        step()


def test_what_is_changed_between_steps_is_not():
    model = Net()
    step = pass_of(model)
    for change in (replace_parameter, replace_buffer, swap, write, rename, copy_of_a_dict):
        change(model)
        step()


def test_a_layer_that_is_put_in_between_steps_is_watched():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1.0)
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    step = pass_of(model)
    model[1][0] = Writes()
    with pytest.raises(PrivacyError, match=r"1\.0\.count"):
        step()


def test_other_trainable_parameters_modes_and_places_of_them_are_announced_once_each():
    model, seen = Net(), []
    keeper = BookKeeper(model, batch_first=True, loss_reduction="sum", on_first=lambda *given: seen.append(given))

    def announced():
        before = len(seen)
        for _ in range(2):
            model(X)
            keeper.clear()
            keeper.forget_passes()
        return len(seen) - before

    assert announced() == 1
    model.one.weight.requires_grad_(False)
    assert announced() == 1
    model.one.weight.requires_grad_(True)
    assert announced() == 0  # as it was first
    model.two.eval()
    assert announced() == 1
    model.two.train()
    model.one.bias = None
    assert announced() == 1


def test_every_kind_of_change_of_an_attribute_is_found():
    model = Net()
    tree = Tree(model)
    one = model.one
    one.number, one.tensor, one.several, one.text = 1, torch.zeros(2), [1], "a"

    def changed(change):
        before = marks(tree)
        assert not _changed(before, marks(tree))
        change()
        return {key for _, key in _changed(before, marks(tree))}

    assert changed(lambda: setattr(one, "number", 2)) == {"number"}
    assert changed(lambda: setattr(one, "number", torch.zeros(2))) == {"number"}
    assert changed(lambda: one.number.add_(1)) == {"number"}
    assert changed(lambda: setattr(one, "number", None)) == {"number"}
    assert changed(lambda: setattr(one, "number", 1.5)) == {"number"}
    assert changed(lambda: setattr(one, "tensor", torch.zeros(2))) == {"tensor"}
    assert changed(lambda: one.several.append(2)) == {"several"}
    assert changed(lambda: setattr(one, "several", {})) == {"several"}
    assert changed(lambda: setattr(one, "new", 1)) == {"new"}
    assert changed(lambda: delattr(one, "new")) == {"new"}
    assert changed(lambda: setattr(one, "text", "b")) == set()  # which is not looked at
    assert changed(lambda: setattr(model, "two", nn.Linear(4, 4))) == set()
    assert changed(lambda: setattr(model.two, "in_features", 5)) == {"in_features"}


class Own:
    """A use of a caller's, with what no dataclass has."""

    def __init__(self, g):
        self.g, self.name = g, "own"


@dataclass(frozen=True, slots=True)
class OwnWithSlots:
    g: torch.Tensor


@pytest.mark.parametrize("use", [Dense, Own, OwnWithSlots, lambda g: Outer(torch.ones(2, 1, 3), g, torch.Size([3, 3]))])
def test_a_tensor_of_a_use_that_is_written_to_is_refused(use):
    g = torch.ones(2, 1, 3)
    kept = Kept()
    kept.add([Dense(torch.zeros(2, 3)), use(g), Dense(torch.zeros(2, 3))])
    kept.check()
    g.mul_(2.0)
    with pytest.raises(PrivacyError, match=r"\(2, 1, 3\) was changed in place"):
        kept.check()


def test_an_inference_tensor_among_the_inputs_hides_no_other():
    with torch.inference_mode():
        fixed = torch.ones(2, 3)
    g, kept = torch.ones(2, 3), Kept()
    kept.add([Dense(fixed), Dense(g)])
    kept.check()
    g.mul_(2.0)
    with pytest.raises(PrivacyError, match="changed in place"):
        kept.check()


def private_run(make_optimizer, layers=2):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    x, y = torch.randn(6, 4), torch.randint(4, (6,))
    model, optimizer, *_ = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=make_optimizer(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, optimizer


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
@pytest.mark.parametrize("as_gpu", [False, True])
@pytest.mark.parametrize("make_optimizer", [adamw, lambda p: dpivon.IVON(p, lr=0.1, ess=100)])
def test_a_released_sum_bears_the_mark_by_which_opacus_refuses_it(make_optimizer, as_gpu):
    step, optimizer = private_run(make_optimizer)
    with as_on_a_gpu() if as_gpu else nullcontext():
        step()
    for p in optimizer.params:
        with pytest.raises(ValueError, match="haven't been cleared"):
            _check_processed_flag(p.summed_grad)
    with pytest.raises(ValueError, match="haven't been cleared"):
        unreleased_sums(optimizer.params)


def test_gradients_are_handed_to_their_own_parameters_in_whatever_order_they_come():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    of = {a: torch.ones(2), b: torch.zeros(2)}
    for gradients in (of, dict(reversed(of.items())), {**of, nn.Parameter(torch.zeros(1)): torch.zeros(1)}):
        assert [g is of[p] for g, p in zip(_in_order(gradients, [a, b]), [a, b], strict=True)] == [True, True]


def test_dtypes_and_views_of_many_are_those_of_each():
    params = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.float32, torch.float16)]
    assert full_dtypes(params) == [full_dtype(p) for p in params]
    shapes = [torch.Size([2, 3]), torch.Size([4]), torch.Size([]), torch.Size([0, 2])]
    parts = views(torch.arange(11), shapes, [6, 4, 1, 0])
    assert [part.shape for part in parts] == shapes
    assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(11))


def calls_of(layers):
    """Python's function calls in a private step of so many layers."""
    step, optimizer = private_run(adamw, layers)
    for _ in range(3):
        step()
        optimizer.zero_grad()
    recorder = cProfile.Profile()
    recorder.enable()
    step()
    optimizer.zero_grad()
    recorder.disable()
    return pstats.Stats(recorder).total_calls


# Seen: 249, of which plain training takes 57; 405 when all was looked at anew for every tensor.
@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_a_step_calls_few_functions_for_each_layer():
    with as_on_a_gpu():
        assert (calls_of(40) - calls_of(20)) / 20 <= 255


def test_norms_of_several_dtypes_tell_every_change_and_are_taken_by_dtype(monkeypatch):
    """As on a GPU, where a list of several dtypes is launched tensor by tensor."""
    held = [torch.randn(3), torch.arange(4), torch.randn(2, 5), torch.randn(3).double(), torch.tensor([True, False])]
    lists, norm = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda given, **how: (lists.append(given), norm(given, **how))[1])
    before = _norms(held)
    assert [len(given) for given in lists] == [2, 3]
    assert all(len({t.dtype for t in given}) == 1 for given in lists)
    assert torch.equal(before, _norms(held))
    for t in held:
        t.data.view(-1)[1] = t.view(-1)[1] == 0
        now = _norms(held)
        assert int((now != before).sum()) == 1
        before = now


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-6), (torch.float32, 2**-20)])
def test_norms_tell_a_write_that_is_small_beside_its_tensor(dtype, least):
    """Rounded to the tensor's own dtype they would not, or be infinite."""
    held = torch.full((2**16,), 300.0).to(dtype)
    before = _norms([held])
    held.data[7] *= 1 + least
    assert (before != _norms([held])).all()
    assert before.isfinite().all()


def test_norms_tell_a_write_to_either_part_of_a_complex_number():
    held = torch.polar(torch.ones(8), torch.arange(8.0))
    for part, t in ((0, held), (1, held), (1, held.conj())):
        before = _norms([t])
        torch.view_as_real(held.data)[3, part] += 0.5
        assert (before != _norms([t])).all()
