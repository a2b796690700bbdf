"""engine.compile with privacy per person: the padded program holds so many rows of each, and clips a person once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_runs import CapturingNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from compiled_runs import by_hand, private_run
from dpivon.errors import PrivacyError
from dpivon.privacy.kernels.padded_step import PaddedStep
from dpivon.privacy.layers.groups import Groups

N, B, K, CLASSES, C = 24, 6, 3, 3, 0.5
#: From one row to six, a person's rows anywhere in the data set.
IDS = [person for person in range(N) for _ in range(1 + person % 6)]
IDS = [IDS[i] for i in torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0)).tolist()]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def table(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def made(kind: str = "ivon", views: int = 1, ids: Any = IDS, data: Any = None, b: int = B, **options: Any):
    torch.manual_seed(0)
    x, y = table(len(ids)) if data is None else data
    x = x.unsqueeze(1) + 0.1 * torch.arange(views).view(-1, 1)

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return x.flatten(0, 1), y.repeat_interleave(views)

    loader = DataLoader(TensorDataset(x, y), batch_size=b, collate_fn=collate)
    options = {"rows_per_user": K, "max_grad_norm": C} | options
    return private_run(network(), loader, kind, augmentations=views, user_ids=ids, **options)


def trained(way: str, most: int | None = None, **options: Any):
    engine, model, optimizer, loader = made(**options)
    engine.check(losses)
    step, shown = engine.compile(losses, capture=way == "padded" or None, max_physical_batch_size=most), []
    for batch in itertools.chain(loader, loader, loader):
        if way == "loop":
            by_hand(losses, optimizer, model, batch, options.get("samples", 1))
        else:
            shown.append(float(step(batch)))
    assert step.path == ("captured" if way == "padded" else "eager (on cpu)")
    assert way != "padded" or most or all(program.whole.prepared for program in step._programs.values())
    return torch.cat([p.detach().flatten() for p in optimizer.params]), engine.get_epsilon(1e-3), shown


CASES = {
    "mean": {},
    "sum": {"user_gradient": "sum"},
    "θ-samples and augmentations": {"samples": 2, "views": 2},
    "in parts": {"most": 7},
    "summed, in parts of one person": {"most": 2, "user_gradient": "sum", "views": 2},
    "adam": {"kind": "adam", "loss_reduction": "sum"},
    "empty batches": {"b": 1},
}


@pytest.mark.campaign(keep=4)
@pytest.mark.filterwarnings("ignore:delta=0.001")
@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_of_people_is_the_eager_loop(case):
    options = {key: value for key, value in CASES[case].items() if key != "most"}
    if case != "adam":  # whose loss is summed, and the loop's is a mean
        expected, epsilon, _ = trained("loop", **options)
    else:
        expected, epsilon, _ = trained("eager", **options)
    eager, spent, told = trained("eager", **CASES[case])
    padded, charged, shown = trained("padded", **CASES[case])
    torch.testing.assert_close(eager, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(padded, expected, rtol=1e-5, atol=1e-6)
    assert spent == charged == epsilon
    assert shown == pytest.approx(told, rel=1e-4)


def sums(ids: list[int], data: tuple[Tensor, Tensor], sizes: list[tuple[int, ...]], **options: Any) -> list[Tensor]:
    """The clipped sums of batches of these people, whose rows come one after the other, about to be noised."""
    engine, _, optimizer, loader = made("sgd", ids=ids, data=data, **options)
    optimizer.noise = noise = CapturingNoise()
    step, drawn, draws = engine.compile(losses, capture=True), itertools.cycle(loader), optimizer.draws
    step.capacity = 30
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for people in [(2,) * 5, *sizes]:  # the first is run eagerly
        next(drawn)
        rows = sum(people)
        batch = data[0][:rows], data[1][:rows]
        draws.sizes, draws.batch = people, batch
        step(batch)
    assert step.path == "captured"
    return noise.releases(len(optimizer.params))[1:]


@pytest.mark.parametrize("gradient", ["mean", "sum"])
@pytest.mark.parametrize("what", ["alike", "large", "cancelling", "not finite"])
def test_no_person_moves_the_padded_sum_by_more_than_c(gradient, what):
    """The last person of the batch, with one row or as many as are used."""
    for last in (1, K):
        x, y = table(60)
        x, y = x[:1] + 0.01 * x, y[:1].expand(60).clone()
        before = (2, 1, 3, 3, 2, 1, 3, 1, 2, 3)
        own = slice(sum(before), sum(before) + last)
        if what == "large":
            x[own] *= 1e6
        if what == "cancelling":
            y[own] = torch.arange(last) % CLASSES
        if what == "not finite":
            x[own.stop - 1, 0] = torch.inf
        ids = list(range(60))
        whole, less = sums(ids, (x, y), [(*before, last), before], user_gradient=gradient, rows_per_user=K)
        assert whole.dtype == torch.float64
        moved = float((whole - less).norm())
        assert moved < 1e-6 if what == "not finite" else 1e-3 < moved <= C * (1 + 1e-5)


def test_repeated_rows_that_counted_would_be_seen(monkeypatch):
    """The tests above can fail."""
    x, y = table(60)
    x *= 3.0
    sizes, ids = [(1, 3, 1, 2)], list(range(60))
    (right,) = sums(ids, (x, y), sizes, max_grad_norm=100.0)
    padded = Groups.padded
    monkeypatch.setattr(Groups, "padded", lambda self, r: (padded(self, r)[0], torch.ones(len(self.sizes) * r)))
    (wrong,) = sums(ids, (x, y), sizes, max_grad_norm=100.0)
    assert float((right - wrong).norm()) > 0.1
    rows = PaddedStep._seated
    monkeypatch.setattr(Groups, "padded", padded)
    monkeypatch.setattr(PaddedStep, "_seated", lambda self, t, places: rows(self, t, places).flip(0))
    (wrong,) = sums(ids, (x, y), sizes, max_grad_norm=100.0)
    assert float((right - wrong).norm()) > 0.1


def test_rows_that_a_loss_reorders_are_refused_before_any_release():
    engine, _, _, loader = made()
    step = engine.compile(lambda model, batch: losses(model, [t.flip(0) for t in batch]), capture=True)
    batch = next(iter(loader))
    with pytest.raises(PrivacyError):
        step(batch)
    assert len(engine.accountant) == 0


def test_rows_of_a_batch_in_another_order_or_number_are_refused():
    engine, _, _, loader = made()
    step, drawn = engine.compile(losses, capture=True), iter(loader)
    step(next(drawn))
    released = len(engine.accountant)
    batch = next(drawn)
    with pytest.raises(PrivacyError, match="user_ids: the model was given"):
        step([t[1:] for t in batch])
    with pytest.raises(PrivacyError, match="in another order"):
        step([t.flip(0) for t in batch])
    assert len(engine.accountant) == released


def test_people_with_all_their_rows_run_eagerly_and_the_reason_is_said():
    engine, _, _, loader = made(rows_per_user=None)
    with pytest.warns(UserWarning, match="rows_per_user=None"):
        step = engine.compile(losses, capture=True)
    step(next(iter(loader)))
    assert step.path.startswith("eager (rows_per_user=None")
