"""Data parallel: any number of ranks is one process, to rounding; and ranks that disagree release nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trainings
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from processes import run
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dpivon
from dpivon.privacy.accounting import noise_multiplier as calibrate

STEPS, ROUNDING = 6, 2e-6


def training(
    rank: int,
    physical: int | None = None,
    batch: float = trainings.B,
    wrapper: Any = None,
    method: str = "ivon",
    mode: str | None = None,
) -> Any:
    engine, model, optimizer, loader = trainings.start(method=method, wrap=wrapper, batch=batch, grad_sample_mode=mode)
    seen = trainings.train(model, optimizer, loader, STEPS, physical)
    return seen, trainings.learned(engine, optimizer)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "physical"),
    [
        (1, None),
        pytest.param(2, None, marks=SLOW),
        (4, 2),
        pytest.param(4, None, marks=SLOW),
        pytest.param(2, 2, marks=SLOW),
    ],
)
def test_any_number_of_ranks_is_one_process(world: int, physical: int | None) -> None:
    alone_sizes, alone = training(0)
    results = run(world, training, physical)
    if physical is None:
        assert [sum(sizes) for sizes in zip(*(seen for seen, _ in results), strict=True)] == alone_sizes
    for _, learned in results:
        assert trainings.apart(learned, alone) < ROUNDING
        assert trainings.apart(learned, results[0][1]) == 0.0  # to the bit
        assert learned["epsilon"] == alone["epsilon"]
        assert learned["history"] == alone["history"]
    if world == 1:  # the comparison has force: other batches move the posterior by far more
        assert trainings.apart(training(0, batch=trainings.B + 1)[1], alone) > 1000 * ROUNDING


@pytest.mark.parametrize(
    "wrapper",
    [nn.parallel.DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel],
    ids=["DDP", "Opacus"],
)
def test_a_wrapped_model_is_taken_as_it_comes(wrapper: Any) -> None:
    _, alone = training(0, method="sgd")
    for _, learned in run(
        2, training, None, trainings.B, wrapper, "sgd", "hooks"
    ):  # in which p.grad is computed as well
        assert trainings.apart(learned, alone) < ROUNDING


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(("batch", "world"), [(2.0, 4), (1e-3, 2)], ids=["empty parts", "empty batches"])
def test_empty_batches_keep_step(batch: float, world: int) -> None:
    alone_sizes, alone = training(0, batch=batch)
    results = run(world, training, None, batch)
    assert any(0 in seen for seen, _ in results)
    assert (sum(alone_sizes) == 0) == (batch < 0.1)
    for seen, learned in results:
        assert len(seen) == STEPS
        assert trainings.apart(learned, alone) < ROUNDING
        assert learned["epsilon"] == alone["epsilon"]


def by_mode(rank: int, mode: str) -> Any:
    options: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
    net = trainings.network()
    engine = dpivon.PrivacyEngine(replica_check_every=2)
    made = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.2),
        data_loader=DataLoader(trainings.dataset(), batch_size=trainings.B, generator=torch.Generator().manual_seed(6)),
        noise_multiplier=1.0,
        max_grad_norm=0.8,
        noise_generator=torch.Generator().manual_seed(7),
        grad_sample_mode=mode,
        **options,
    )
    model, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return trainings.learned(engine, optimizer)


@pytest.mark.parametrize("mode", ["hooks", "ghost", pytest.param("functorch", marks=SLOW)])
def test_every_way_to_clip_adds_up(mode: str) -> None:
    alone = by_mode(0, mode)
    for learned in run(2, by_mode, mode):
        assert trainings.apart(learned, alone) < 5e-6


# ---- privacy per person


#: 20 people of one to five rows; those of a person are anywhere.
IDS = [(i * 7) % 20 if i % 3 else i % 5 for i in range(trainings.N)]


def by_person(rank: int, physical: int | None = None, sigma: float = 1.0, without: int | None = None) -> Any:
    """A few steps on most people, each time with at most four rows; or the clipped sum of all, without one of them."""
    data = trainings.dataset()
    if sigma:
        engine, model, optimizer, loader = trainings.start(batch=9.0, rows_per_user=4, user_ids=IDS)
        seen = trainings.train(model, optimizer, loader, STEPS, physical)
        return seen, trainings.learned(engine, optimizer)
    keep = [i for i, one in enumerate(IDS) if one != without]
    x, y = (t[keep].clone() for t in data.tensors)
    x[[i for i, row in enumerate(keep) if IDS[row] == 0]] *= 1e4
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    ids = [IDS[i] for i in keep]
    n = float(len(set(ids)))
    engine = dpivon.PrivacyEngine()
    _, model, optimizer, loader = trainings.start(
        method="sgd", sigma=0.0, batch=n, data=loader, engine=engine, user_ids=ids
    )
    ((x, y),) = loader
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return torch.cat([n * g.double().flatten() for g in optimizer.last_release.gradients.values()])


@pytest.mark.parametrize(("world", "physical"), [(2, None), pytest.param(2, 5, marks=SLOW)])
def test_people_on_two_ranks_are_those_of_one_process(world: int, physical: int | None) -> None:
    alone_sizes, alone = by_person(0)
    results = run(world, by_person, physical)
    if physical is None:
        assert [sum(sizes) for sizes in zip(*(seen for seen, _ in results), strict=True)] == alone_sizes
    for _, learned in results:
        assert trainings.apart(learned, alone) < ROUNDING
        assert learned["history"] == alone["history"]


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_a_person_moves_the_sum_of_two_ranks_by_at_most_c() -> None:
    """One with many large rows, and one with ordinary ones; on whichever rank."""
    everyone = run(2, by_person, None, 0.0)[0]
    for one in (0, 1, 2):
        moved = float((everyone - run(2, by_person, None, 0.0, one)[0]).norm()) / 0.8
        assert 0.1 < moved <= 1 + 1e-5


# ---- ranks that disagree


WHOLE = "poisson_sampling"
DIFFERENT = ("noise_multiplier", "expected_batch_size", "dataset_size", "data", "user_ids", "grad_sample_mode")


def disagreeing(rank: int) -> dict[str, str]:
    """How each of them ends; every rank goes from one to the next."""
    found = {}
    for what in DIFFERENT:
        try:
            start_with(rank, what)
        except dpivon.DpivonError as error:
            found[what] = f"{type(error).__name__}: {error}"
    for name, options in ((WHOLE, {}), ("wrap_model", {"wrap": nn.parallel.DistributedDataParallel})):
        try:
            trainings.start(**{name: False}, **options)
        except dpivon.DpivonError as error:
            found[name] = str(error)
    return found


def start_with(rank: int, what: str) -> None:
    options: dict[str, Any] = {"user_ids": IDS} if what == "user_ids" else {}
    if rank == 1:
        if what == "user_ids":
            options["user_ids"] = IDS[1:] + IDS[:1]
        elif what == "data":
            order = list(reversed(range(trainings.N)))
            options["data"] = DataLoader(Subset(trainings.dataset(), order), batch_size=6)
        elif what == "grad_sample_mode":
            options["grad_sample_mode"] = "nonsense"
        else:
            options = {
                "noise_multiplier": {"sigma": 2.0},
                "expected_batch_size": {"batch": 11.0},
                "dataset_size": {"dataset_size": 61, "batch": 12.0},
            }[what]
    trainings.start(**options)


def test_if_ranks_differ_or_one_fails_no_rank_starts() -> None:
    first, second = run(2, disagreeing)
    for what in DIFFERENT[:-1]:
        assert first[what] == second[what]
        assert first[what].startswith(f"PrivacyError: {what}=")
        assert "rank 1" in first[what]
    assert "DistributedSampler" in first[WHOLE]
    assert "average raw gradients" in first["wrap_model"]
    assert first["grad_sample_mode"].startswith("RankError: Rank 1 failed")
    assert second["grad_sample_mode"].startswith("ArgumentError: grad_sample_mode='nonsense'")


def changed_on_one_rank(rank: int, what: str) -> Any:
    engine, model, optimizer, loader = trainings.start()
    batches = iter(loader)
    trainings.one_step(model, optimizer, *next(batches))
    if rank == 1 and what == "sigma":
        optimizer.noise_multiplier = 0.5
    if rank == 1 and what == "batch":
        next(batches)
    if rank == 1 and what == "weights":
        with torch.no_grad():
            next(iter(model.parameters())).add_(1e-6)
    try:
        trainings.one_step(model, optimizer, *next(batches))
    except dpivon.DpivonError as error:
        return type(error).__name__, str(error), len(engine.accountant)
    return "nothing", "", len(engine.accountant)


@pytest.mark.parametrize(
    ("what", "error", "said", "charged"),
    [
        ("sigma", "PrivacyError", "noise_multiplier", 1),
        ("batch", "PrivacyError", "batch number", 1),
        ("weights", "DpivonError", "other weights", 2),
    ],
)
def test_a_rank_that_drifts_is_noticed_by_all(what: str, error: str, said: str, charged: int) -> None:
    for kind, text, releases in run(2, changed_on_one_rank, what):
        assert kind == error
        assert said in text
        assert releases == charged


# ---- noise, batches, the account


def streams(rank: int, secure: bool) -> Any:
    _, model, optimizer, loader = trainings.start(
        engine=dpivon.PrivacyEngine(secure_mode=secure), sigma=5.0, batch=30.0
    )
    before = optimizer.generator.get_state() if optimizer.generator is not None else None
    parts, released = [], []
    for _ in range(3):
        for indices, (x, y) in zip(list(loader.batch_sampler), loader, strict=False):
            parts.append(indices)
            trainings.one_step(model, optimizer, x, y)
            released.append(torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()]))
    drew = before is not None and not torch.equal(before, optimizer.generator.get_state())
    return parts, torch.stack(released), drew


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_drawn_by_the_first_rank_only_and_examples_have_one_rank(secure: bool) -> None:
    results = run(2, streams, secure)
    for rank, (parts, released, drew) in enumerate(results):
        assert {i % 2 for part in parts for i in part} == {rank}
        assert drew == (rank == 0 and not secure)
        assert torch.equal(released, results[0][1])
    sizes = torch.tensor([len(a) + len(b) for a, b in zip(results[0][0], results[1][0], strict=True)]).double()
    assert abs(float(sizes.mean()) - 30) < 5 * (15 / len(sizes)) ** 0.5
    noise = results[0][1] * 30.0 / (5.0 * 0.8)
    assert abs(float(noise.var()) - 1) < 5 * (2 / noise.numel()) ** 0.5 + 0.25  # the sums add at most (30 C)²/P


def budgeted(rank: int, folder: str) -> Any:
    net = trainings.network()
    engine = dpivon.PrivacyEngine(ledger=f"{folder}/ledger.jsonl")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(trainings.dataset(), sampler=DistributedSampler(trainings.dataset()), batch_size=6),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    steps = 0
    try:
        for _ in range(2):
            for x, y in loader:
                trainings.one_step(model, optimizer, x, y)
                steps += 1
    except dpivon.PrivacyError as error:
        return steps, str(error), engine.get_epsilon(1e-5), optimizer.expected_batch_size, engine.ledger.record.releases
    return None


@pytest.mark.slow
def test_the_budget_ends_on_all_ranks_at_once(tmp_path) -> None:
    from dpivon.durable.ledger import read

    # Remembered, so that the ranks need not compute it each.
    calibrate(target_epsilon=2.0, delta=1e-5, sample_rate=0.2, steps=5, accountant="rdp", orders="wide")
    results = run(2, budgeted, str(tmp_path))
    assert results[0][0] == results[1][0] == 5  # ⌈60 / 12⌉ steps of one epoch, with b = 2 ranks × 6
    for _, error, epsilon, batch, recorded in results:
        assert "2.0" in error
        assert 1.8 < epsilon <= 2.0
        assert batch == 12.0
        assert recorded == 5
    assert read(tmp_path / "ledger.jsonl").releases == 5


def one_each(rank: int) -> Any:
    engine = dpivon.PrivacyEngine(distributed=False)
    _, model, optimizer, loader = trainings.start(engine=engine)
    if rank == 0:
        trainings.train(model, optimizer, loader, 3)
    return len(engine.accountant)


def test_ranks_may_train_alone() -> None:
    assert run(2, one_each) == [3, 0]
