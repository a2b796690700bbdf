"""Forked processes and copies draw neither the noise nor the batches of the original."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_runs import data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpivon import PrivacyEngine, PrivacyError, PrivacyWarning
from dpivon.durable.ledger import Ledger, read
from dpivon.privacy import noise
from dpivon.privacy.streams import PRIVACY, Streams
from dpivon.stacked import AnyNetwork, Run, Stack

PLACES = 300


def in_fork(action: Callable[[], Any]) -> Any:
    """What ``action`` returns in a forked process, or the text of its error."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # python's own, of forks of processes with threads
        pid = os.fork()
        if pid == 0:
            try:
                answer = json.dumps(action()).encode()
            except BaseException as error:
                answer = json.dumps(f"{type(error).__name__}: {error}").encode()
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def private(engine: PrivacyEngine | None = None, **options: Any):
    net = nn.Linear(5, 3)
    return (engine or PrivacyEngine()).make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data(PLACES)), batch_size=PLACES // 2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def step(made, batch=None) -> list[float]:
    """One step, on a batch of the loader's; what was released."""
    model, optimizer, loader = made
    x, y = batch if batch is not None else next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()]).tolist()


def seeded() -> PrivacyEngine:
    return PrivacyEngine(generator=torch.Generator().manual_seed(3))


ENGINES = {"os-entropy": PrivacyEngine, "seeded": seeded, "secure": lambda: PrivacyEngine(secure_mode=True)}


def draws(made) -> tuple[list[int], list[float]]:
    """A batch and noise, as the next step would draw them."""
    _, optimizer, loader = made
    return next(iter(loader.batch_sampler)), optimizer.noise.normal(torch.zeros(200).double(), 1.0).tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fork_draws_other_noise_and_other_batches_than_its_parent(engine):
    made = private(ENGINES[engine]())
    step(made)
    child, other = in_fork(lambda: draws(made)), in_fork(lambda: draws(made))
    parent = draws(made)
    for one, two in ((child, parent), (other, parent), (child, other)):
        assert one[0] != two[0]
        assert not set(one[1]) & set(two[1])


def test_multiprocessing_by_fork_is_no_other():
    made = private()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=lambda: queue.put(draws(made)))
        process.start()
    child = queue.get()
    process.join()
    batch, drawn = draws(made)
    assert child[0] != batch
    assert not set(child[1]) & set(drawn)


@pytest.mark.parametrize("missing", ["hook", "pid"])
def test_either_of_two_signs_of_a_fork_is_enough(monkeypatch, missing):
    """Python's hook misses forks of other languages; process numbers come again."""
    if missing == "pid":
        monkeypatch.setattr(noise.os, "getpid", lambda: 7)
    made = private()

    def child():
        if missing == "hook":
            noise._forks -= 1
        return draws(made)

    assert not set(in_fork(child)[1]) & set(draws(made)[1])


def test_a_fork_of_a_seeded_run_says_that_its_draws_are_the_operating_systems():
    engine = seeded()
    made, terms = private(engine), []
    charge = made[1].charge
    made[1].charge = lambda spec: terms.append((spec.terms["noise"], spec.terms["batches"])) or charge(spec)
    step(made)

    def child():
        step(made)
        return terms

    assert in_fork(child) == [["seeded", "seeded"], ["os-entropy", "os-entropy"]]
    step(made)
    assert terms == [("seeded", "seeded")] * 2


def test_a_fork_says_that_the_parents_account_does_not_know_of_it():
    made = private()

    def child():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PrivacyWarning)
            step(made)
            step(made)
        return [message for w in told if "loss was not checked" not in (message := str(w.message))]

    told = in_fork(child)
    assert len(told) == 2  # of noise and of batches, once each
    assert all("not in the parent's account" in message for message in told)


def test_a_batch_that_was_drawn_before_a_fork_is_the_parents():
    made = private()
    batch = next(iter(made[2]))
    told = in_fork(lambda: step(made, batch))
    assert told.startswith("PrivacyError: step() in a forked process on a batch that was drawn before the fork")
    step(made, batch)
    assert isinstance(in_fork(lambda: step(made)), list)


def test_batches_that_workers_hold_are_the_parents_too(monkeypatch):
    made = private()
    batches = iter(made[2])
    next(batches)
    made[2].__dict__["num_workers"] = 1  # as with workers, whose batches were drawn ahead
    assert "A pass over the data loader that began before a fork" in in_fork(lambda: next(batches))
    next(batches)


def test_loader_workers_are_forks_that_draw_nothing():
    """They get copies of the data set, and no word of warning."""
    net = nn.Linear(5, 3)
    made = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=4, num_workers=1, multiprocessing_context="fork"),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for batch in made[2]:
        step(made, batch)
    assert len(made[1].last_release.gradients) == 2


def test_a_fork_cannot_charge_its_parents_ledger(tmp_path):
    engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    made = private(engine)
    step(made)
    told = in_fork(lambda: step(made))
    assert told.startswith(f"PrivacyError: {tmp_path / 'ledger.jsonl'}: was opened by process {os.getpid()}")
    step(made)  # whose ledger is as it was
    assert read(tmp_path / "ledger.jsonl").releases == 2
    in_fork(engine.ledger.close)
    with pytest.raises(Exception, match="another process is using it"):
        Ledger(tmp_path / "ledger.jsonl")


# ---- copies


def test_a_copied_loader_draws_new_batches_from_the_one_stream():
    _, _, loader = private()
    copied = copy.deepcopy(loader)
    batches = [next(iter(each.batch_sampler)) for each in (loader, copied, loader, copy.copy(loader))]
    assert len({tuple(batch) for batch in batches}) == 4


def test_a_batch_of_a_copied_loader_is_released_once():
    made = private()
    copied = copy.deepcopy(made[2])
    batch = next(iter(copied))
    step(made, batch)
    with pytest.raises(PrivacyError, match=r"step\(\) twice on one Poisson batch"):
        step(made, batch)


def test_neither_sampler_nor_noise_can_be_pickled():
    _, optimizer, loader = private()
    for thing, name in ((loader, "sampler"), (loader.batch_sampler, "sampler"), (optimizer.noise, "noise source")):
        with pytest.raises(PrivacyError, match=f"The {name} of a private run cannot be pickled"):
            pickle.dumps(thing)


# ---- stacks

RUNS = [Run("dp-sgd", 7, 1.0, 1.0, 0.1, 50), Run("dp-ivon-gradsq", 8, 1.0, 1.0, 0.1, 50)]


def stack() -> Stack:
    return Stack(RUNS, AnyNetwork(lambda: nn.Linear(5, 3)), *data(PLACES), block=2)


def released(made: Stack, steps: int = 2) -> list[Tensor]:
    """The noise of the next steps and their batches."""
    found, release = [], made.mechanism.release

    def watched(sums: Tensor, at: Tensor) -> Tensor:
        g = release(sums, at)
        found.append(made.mechanism._noise.clone())
        return g

    made.mechanism.release = watched
    for _ in made.train(steps):
        pass
    return [torch.stack(found).flatten(), made._buffers.index.flatten()]


def test_a_fork_of_a_stack_draws_other_noise_and_batches():
    made = stack()
    released(made)

    def child():
        noise, batches = released(made)
        return noise.tolist(), batches.tolist(), made.mechanism.terms[0]["noise"]

    noise_there, batches_there, origin = in_fork(child)
    noise_here, batches_here = released(made)
    assert origin == "os-entropy, counter-based"
    assert made.mechanism.terms[0]["noise"] == "seeded, counter-based"
    assert not set(noise_there) & set(noise_here.tolist())
    assert batches_there != batches_here.tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda streams: pickle.loads(pickle.dumps(streams))])
def test_copied_streams_begin_anew(copied):
    streams = Streams([7, 8], torch.device("cpu"))
    other = copied(streams)
    assert other.origin == "os-entropy, counter-based"
    step = torch.tensor(3)
    a, b = (s.normal(torch.empty(2, 50).double(), step, PRIVACY).flatten().tolist() for s in (streams, other))
    assert not set(a) & set(b)
    assert streams.seeds == [7, 8]


def test_a_refresh_is_seen_by_steps_that_were_captured():
    streams = Streams([7, 8], torch.device("cpu"))
    rows = streams._seed_rows
    streams.refresh()
    assert rows.tolist() == streams.seeds != [7, 8]
