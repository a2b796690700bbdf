"""Privacy per person: people are drawn, a person's rows are put together before one clip, and N counts people."""

from __future__ import annotations

import gc
import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager as OpacusManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import dpivon
from dpivon import ArgumentError, BatchMemoryManager, PrivacyEngine, PrivacyError
from dpivon.durable.ledger import read
from dpivon.privacy.people import People, end_of_part

ROWS, C = 60, 0.3
#: From one row to 23; the rows of a person are anywhere in the data set.
SIZES = {"ann": 9, "bob": 1, "cyd": 2, "dan": 3, "eve": 5, "fay": 17, "gus": 23}
IDS = [one for one, n in SIZES.items() for _ in range(n)]
random.Random(0).shuffle(IDS)
PEOPLE = list(SIZES)


class Net(nn.Module):
    """Layers of every kind of use: rows of a table, a matrix with positions and without, a bare parameter, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(5, 6), nn.Linear(6, 6)
        self.norm, self.shift = nn.LayerNorm(6), nn.Parameter(torch.zeros(1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.table(x[:, :4].abs().mul(2).long().clamp(0, 4))
        h = self.norm(torch.tanh(self.inner(tokens))).mean(1) * x[:, 4:].mean(1, keepdim=True) + self.shift
        out: Tensor = self.head(h)
        return out


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), torch.randint(3, (ROWS,), generator=generator), torch.arange(ROWS))


def private(model: nn.Module, *, ids: Any = IDS, optimizer: Any = None, engine: Any = None, **options: Any) -> Any:
    engine = engine or PrivacyEngine(generator=torch.Generator().manual_seed(3))
    dtype = next(model.parameters()).dtype
    made = engine.make_private(
        module=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(options.pop("dataset", data(dtype)), batch_size=options.pop("batch", 4)),
        max_grad_norm=options.pop("bound", C),
        noise_multiplier=options.pop("sigma", 0.0),
        user_ids=ids,
        **options,
    )
    return (engine, *made)


def reference(
    model: nn.Module, x: Tensor, y: Tensor, owners: list[Any], gradient: str, thetas: list[Any]
) -> list[Tensor]:
    """The definition, in a loop over people in double: the mean or sum over rows, the mean over θ, one clip, the sum."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for one in sorted(set(owners)):
        rows = [i for i, owner in enumerate(owners) if owner == one]
        own = [torch.zeros_like(p) for p in params]
        for theta in thetas:
            with torch.no_grad():
                for p, value in zip(params, theta, strict=True):
                    p.copy_(value)
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction=gradient)
            own = [o + g / len(thetas) for o, g in zip(own, torch.autograd.grad(loss, params), strict=True)]
        norm = math.sqrt(sum(float(g.square().sum()) for g in own))
        if math.isfinite(norm):
            total = [t + g * min(1.0, C / (norm + 1e-6)) for t, g in zip(total, own, strict=True)]
    return total


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
@pytest.mark.parametrize(
    ("gradient", "reduction", "physical", "samples", "k", "mode"),
    [
        ("mean", "mean", None, 1, None, None),
        ("sum", "mean", 7, 1, 3, None),
        ("mean", "sum", 4, 2, 2, None),
        ("mean", "mean", None, 1, 3, "hooks"),
    ],
)
def test_the_sum_is_that_of_a_loop_over_people(
    gradient: str, reduction: str, physical: int | None, samples: int, k: int | None, mode: str | None
) -> None:
    """Whole or in micro-batches, of a mean or a summed loss, at several θ, with all rows of a person or some."""
    torch.manual_seed(0)
    model, twin = Net().double(), Net().double()
    ivon = dpivon.IVON(model.parameters(), lr=0.0, ess=7, mc_samples=samples)
    _, wrapped, optimizer, loader = private(
        model, optimizer=ivon, user_gradient=gradient, rows_per_user=k, loss_reduction=reduction, grad_sample_mode=mode
    )
    dataset, splits, sizes = data(), 0, set()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical or 1, optimizer=optimizer)
    with manager if physical else nullcontext(loader) as batches:
        seen: list[int] = []
        for x, y, rows in batches:
            optimizer.zero_grad()
            thetas = []
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    thetas.append([p.detach().clone() for p in optimizer.params])
                    nn.functional.cross_entropy(wrapped(x), y, reduction=reduction).backward()
            before = optimizer.last_release
            seen += rows.tolist()
            splits += 1
            optimizer.step()
            if optimizer.last_release is before:
                continue
            owners = [IDS[row] for row in seen]
            sizes |= {owners.count(one) for one in owners}
            expected = reference(twin, *(t[seen] for t in dataset.tensors[:2]), owners, gradient, thetas)
            divisor = 4.0 if reduction == "mean" else 1.0
            for p, s in zip(optimizer.params, expected, strict=True):
                torch.testing.assert_close(optimizer.last_release.gradients[p] * divisor, s, rtol=1e-9, atol=1e-11)
            seen = []
    assert len(sizes) > 1
    assert max(sizes) == (k or 23)
    assert physical is None or splits > len(loader)


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_people_are_drawn_independently_with_all_their_rows_or_some_afresh() -> None:
    for k in (None, 3):
        _, _, _, loader = private(Net(), expected_batch_size=2.8, rows_per_user=k)
        sampler = loader.batch_sampler
        sampler.steps = 1500
        drawn = dict.fromkeys(PEOPLE, 0)
        together, chosen = 0, set()
        for rows in sampler:
            owners = [IDS[row] for row in rows]
            assert owners == sorted(owners, key=owners.index)  # a person's rows are together
            counts = tuple(owners.count(one) for one in dict.fromkeys(owners))
            assert counts == sampler.sizes.popleft()
            assert len(set(rows)) == len(rows)
            for one in set(owners):
                assert owners.count(one) == min(k or ROWS, SIZES[one])
                drawn[one] += 1
            together += {"ann", "bob"} <= set(owners)
            chosen.add(tuple(row for row in rows if IDS[row] == "ann"))
        for n in drawn.values():  # q = 0.4 whatever their rows; 5 standard deviations
            assert abs(n / 1500 - 0.4) < 5 * math.sqrt(0.24 / 1500)
        assert abs(together / 1500 - 0.16) < 5 * math.sqrt(0.1344 / 1500)
        assert len(chosen) == 2 if k is None else len(chosen) > 100  # none or all; or one of many choices


def test_n_counts_people_in_rate_account_and_budget() -> None:
    model = Net()
    engine, _, optimizer, loader = private(model, sigma=1.0, batch=2)
    n = len(PEOPLE)
    assert optimizer.spec.sample_rate == pytest.approx(2 / n)
    assert optimizer.spec.unit == "person"
    assert len(loader) == math.ceil(n / 2)
    with pytest.warns(dpivon.PrivacyWarning, match=r"1/N = 0\.143"):
        engine.get_epsilon(1 / n)
    one, model = PrivacyEngine(accountant="rdp", orders=[4.0, 8.0]), Net()
    _, planned, _ = one.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(torch.float32), batch_size=2),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=5,
        max_grad_norm=1.0,
        user_ids=IDS,
        rows_per_user=2,
    )
    limit = one._limit
    assert (limit.sample_rate, limit.steps) == (2 / n, 5 * math.ceil(n / 2))
    assert planned.draws.sampler().people.rows == 2
    with pytest.raises(ArgumentError, match=r"larger than the dataset \(7 people\)"):
        private(Net(), batch=8)


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
@pytest.mark.parametrize("physical", [None, 4])
def test_a_person_moves_the_sum_by_at_most_c_with_any_rows(physical: int | None) -> None:
    """In fp32: rows that are huge, that cancel to rounding, that are not finite; alone and among others; one and 200 rows."""
    x, y, _ = data(torch.float32).tensors
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 3))
    one = torch.randn(1, 10, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([0, 1, 2])
    opposed = torch.cat([one, one]) * torch.tensor([[1.0], [1 + 2**-20]])
    extremes = {
        "200 rows alike": (one.repeat(200, 1) * 30, torch.zeros(200, dtype=torch.int64)),
        "huge": (one.repeat(3, 1) * 1e6, labels),
        "cancelling": (torch.cat([opposed] * 40), torch.tensor([0, 1] * 40)),
        "not finite": (torch.cat([one, one * math.nan]), labels[:2]),
        "one row": (one * 30, labels[:1]),
    }
    for bound in (0.01, 0.5):
        for name, (more_x, more_y) in extremes.items():
            found = []
            for with_x in (False, True):
                own_x, own_y = (torch.cat([x, more_x]), torch.cat([y, more_y])) if with_x else (x, y)
                ids = IDS + ["new"] * (len(own_x) - ROWS)
                found.append(everyone(model, own_x, own_y, ids, bound, physical))
            moved = float((found[1] - found[0]).norm()) / bound
            assert moved <= 1 + 1e-5, name
            assert moved == 0.0 if name == "not finite" else moved > 0.05, name


def everyone(model: nn.Module, x: Tensor, y: Tensor, ids: list[str], bound: float, physical: int | None) -> Tensor:
    """The clipped sum of all people, in double."""
    n = len(set(ids))
    _, _, optimizer, loader = private(
        model, ids=ids, dataset=TensorDataset(x, y), batch=n, bound=bound, wrap_model=False, unchecked=True
    )
    sums: list[Tensor] = []
    own = optimizer.clip_and_accumulate

    def noted() -> None:
        own()
        sums[:] = [torch.cat([p.summed_grad.flatten() for p in optimizer.params])]

    optimizer.clip_and_accumulate = noted
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical or 1, optimizer=optimizer)
    with manager if physical else nullcontext(loader) as batches:
        for a, b in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    optimizer.source.detach_from_model()
    (total,) = sums
    return total


def test_a_part_never_cuts_a_person() -> None:
    def parts(sizes: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
        begin, found = 0, []
        while begin < len(sizes):
            end = end_of_part(sizes, begin, most)
            found.append(sizes[begin:end])
            begin = end
        return found

    assert parts((3, 2, 9, 1, 1), 5) == [(3, 2), (9,), (1, 1)]
    assert parts((1, 1, 1), 2) == [(1, 1), (1,)]
    assert parts((4,), 1) == [(4,)]


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_rows_that_are_not_those_of_the_batch_are_refused() -> None:
    _, model, optimizer, loader = private(Net())
    x, y, _ = next(iter(loader))
    with pytest.raises(PrivacyError, match=f"the model was given {len(x) - 1} rows, and the batch has {len(x)} of"):
        model(x[1:])
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(PrivacyError, match="nothing says whose the rows"):
        model(x)
    opacus = OpacusManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with opacus as batches, pytest.raises(PrivacyError, match="Opacus's BatchMemoryManager with user_ids"):
        next(iter(batches))


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_rows_in_another_order_are_refused() -> None:
    """Sorted by the collate function, or in the loop; what is computed from rows in their order is not."""

    def by_size(rows: list[Any]) -> Any:
        return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))

    net, loader = Net(), DataLoader(data(torch.float32), batch_size=4)
    shared = {"module": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "noise_multiplier": 1.0}
    shared |= {"max_grad_norm": 1.0, "user_ids": IDS}
    with pytest.raises(ArgumentError, match="data_loader='collate_fn': puts rows in another order"):
        PrivacyEngine().make_private(
            data_loader=DataLoader(data(torch.float32), batch_size=4, collate_fn=by_size), **shared
        )
    model, _, loader = PrivacyEngine(generator=torch.Generator().manual_seed(2)).make_private(
        data_loader=loader, **shared
    )
    x, _, _ = next(iter(loader))
    assert len(x) > 7
    model(2 * x)
    with pytest.raises(PrivacyError, match="was given the rows of its batch in another order"):
        model(x[x.sum(1).argsort()])


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_layouts_stay_with_their_batches_in_workers_and_overlapping_passes() -> None:
    loader = DataLoader(data(torch.float32), batch_size=3, num_workers=1, prefetch_factor=2)
    engine = PrivacyEngine(generator=torch.Generator().manual_seed(1))
    net = Net()
    _, _, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        user_ids=IDS,
    )
    first = iter(loader)
    for batches in (first, iter(loader), first):
        _, _, rows = next(batches)
        owners = [IDS[row] for row in rows]
        assert loader.draws.sizes == tuple(owners.count(one) for one in dict.fromkeys(owners))


def test_ids_that_are_none_are_named() -> None:
    assert len(People.of([3, "x", 3.0, "y"])) == 3
    for ids, problem in (
        ([1, None], "row 1 has no id"),
        ([math.nan, 1], "row 0 has no id"),
        (["a", ""], "row 1 has no id"),
        ([[1], [2]], "row 0 has no id"),
        ("ab", "is not one id per row"),
        (5, "is not one id per row"),
    ):
        with pytest.raises(ArgumentError, match=f"user_ids=.*{problem}"):
            People.of(ids)
    with pytest.raises(ArgumentError, match=r"59 ids'?: but the data set has 60 rows"):
        private(Net(), ids=IDS[1:])
    with pytest.raises(ArgumentError, match="rows_per_user=0"):
        private(Net(), rows_per_user=0)
    with pytest.raises(ArgumentError, match="user_gradient='median'"):
        private(Net(), user_gradient="median")
    with pytest.raises(ArgumentError, match="user_ids=None: but something is said about the rows of a person"):
        private(Net(), ids=None, rows_per_user=3)
    with pytest.raises(ArgumentError, match="poisson_sampling=False: would draw rows"):
        private(Net(), poisson_sampling=False)


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_one_account_and_one_ledger_are_of_one_unit(tmp_path: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    engine = PrivacyEngine(ledger=path)
    people = People.of(IDS, unit="patient_id")
    _, model, optimizer, loader = private(Net(), ids=people, engine=engine, sigma=1.0)
    for x, y, _ in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert read(path).unit == "patient_id"
    with pytest.raises(PrivacyError, match="the unit 'patient_id', and a release for 'the example'"):
        private(Net(), ids=None, engine=engine, sigma=1.0)
    x, y, _ = data(torch.float32).tensors
    for account in (engine, engine.accountant):  # of which a temperature is a release per row
        with pytest.raises(PrivacyError, match="a release for 'the example'"):
            dpivon.calibrate_temperature(
                dpivon.method("dp-sgd", Net(), dataset_size=7), (x, y), account=account, noise_multiplier=20.0
            )
    with pytest.raises(PrivacyError, match="an account is for people"):
        dpivon.parallel_epsilon([(engine.accountant, x[:30]), (engine.accountant, x[30:])], 1e-5)
    engine.ledger.close()
    with pytest.raises(PrivacyError, match="the unit 'patient_id', and a release for 'person'"):
        private(Net(), engine=PrivacyEngine(ledger=path), sigma=1.0)


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_a_run_goes_on_with_its_own_unit_only(tmp_path: Any) -> None:
    def begin(**options: Any) -> dpivon.Checkpoints:
        engine, _, optimizer, loader = private(Net(), sigma=1.0, **options)
        return dpivon.Checkpoints(tmp_path, engine=engine, optimizer=optimizer, data_loader=loader)

    for _ in range(2):
        begin(rows_per_user=2).restore()
        gc.collect()
    for options, problem in (
        ({"ids": None, "dataset_size": 7}, "unit=''.*begun with 'person'"),
        ({"rows_per_user": 3}, "rows_per_user=3.*begun with 2"),
        ({"rows_per_user": 2, "user_gradient": "sum"}, "user_gradient='sum'.*begun with 'mean'"),
        ({"rows_per_user": 2, "ids": IDS[1:] + IDS[:1]}, "begun with other data"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            begin(**options).restore()
        gc.collect()
