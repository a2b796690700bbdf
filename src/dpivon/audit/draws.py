"""Tier A, of what is drawn: nothing twice, by no fork, copy or resumed copy, and noise finer than what is released."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.audit.compiled_session import CompiledSession
from dpivon.audit.distributed_session import can_fork
from dpivon.audit.engine_session import EngineSession
from dpivon.audit.session import Setting, Subject, Tier, Verdict, start
from dpivon.posterior import Posterior
from dpivon.predict import predict
from dpivon.privacy.checkpoints import Checkpoints
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.streams import PRIVACY
from dpivon.privacy.temperature import _predicted, clipped_sum

BATCHES = 30
DRAWS, _DRAWS = Tier("A"), "an equal draw has odds below 1e-9"
_RANKS = "its ranks are processes of their own"


@DRAWS.asks("Does a forked process draw anew?", _DRAWS)
def a_fork_draws_neither_noise_nor_batches_again(subject: Subject) -> Verdict:
    if subject.path == "distributed" or not can_fork():
        return None, _RANKS if can_fork() else "beside a GPU autograd does not survive a fork"
    session = start(subject, _setting(subject))
    session.step([0, 1])

    def draws() -> tuple[Tensor, list[list[int]]]:
        return session.step([0, 1]).released, session.sampled(BATCHES)

    (noise, batches), (noise_there, batches_there) = _in_fork(draws), draws()
    shared = int((noise == noise_there).sum())
    same = sum(a == b for a, b in zip(batches, batches_there, strict=True))
    return (
        shared < 2 and same < BATCHES // 2,
        f"{shared} of {len(noise)} numbers and {same} of {BATCHES} batches are the same",
    )


@DRAWS.asks("Does a copied loader or stack draw anew?", _DRAWS)
def a_copy_draws_nothing_again(subject: Subject) -> Verdict:
    if subject.path == "distributed":
        return None, _RANKS
    session = start(subject, _setting(subject))
    if subject.stacked:
        own, step = session.streams.own, torch.tensor(0)
        a, b = (s.normal(torch.zeros(1, 1000).double(), step, PRIVACY) for s in (own, copy.deepcopy(own)))
        return not bool((a == b).any()), f"{int((a == b).sum())} of 1000 numbers are the same"
    copied = copy.deepcopy(session.loader).batch_sampler
    copied.steps = BATCHES
    same = sum(a == b for a, b in zip(list(copied), session.sampled(BATCHES), strict=True))
    return same < BATCHES // 2, f"{same} of {BATCHES} batches are the same"


@DRAWS.asks("May a run's folder be copied?", _DRAWS)
def copies_of_a_run_that_go_on_apart_share_no_noise(subject: Subject) -> Verdict:
    """A run's folder copied, and gone on with at two learning rates: equal noise on sums that are not equal."""
    if subject.stacked or subject.path == "distributed":
        return None, "a stack refuses another learning rate" if subject.stacked else _RANKS
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        _released(subject, folder / "run", 1.0)
        for i in range(2):
            shutil.copytree(folder / "run", folder / str(i))
        one, two = (_released(subject, folder / str(i), rate) for i, rate in enumerate((1.0, 3.0)))
    pairs = list(zip(one, two, strict=True))
    met = sum(bool((n == m).any()) for (s, n), (t, m) in pairs if not torch.equal(s, t))
    apart = sum(not torch.equal(s, t) for (s, _), (t, _) in pairs)
    return met == 0 and apart > 0, f"{met} of {apart} different sums got the same noise"


@DRAWS.asks("Does one example move a temperature's sum by at most B?", "sees draws that depend on the batch")
def predictions_for_a_temperature_are_of_one_function(subject: Subject) -> Verdict:
    """Of a wide posterior, in batches: removing one example moves the sum by at most B."""
    torch.manual_seed(subject.seed)
    generator = torch.Generator().manual_seed(subject.seed)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    model, bound = nn.Linear(4, 3), 0.5
    point = Posterior.point(model)
    wide = Posterior(point.mean, {name: torch.ones_like(m) for name, m in point.mean.items()})

    class Wide:
        def predict(self, x: Tensor) -> Any:
            return predict(model, wide, x, 1)

    def total(keep: Tensor) -> float:
        torch.manual_seed(subject.seed)
        pairs = zip(x[keep].split(7), y[keep].split(7), strict=True)
        return float(clipped_sum(*_predicted(Wide(), pairs, {}), 1.0, bound))

    everyone = torch.arange(60)
    moved = max(abs(total(everyone) - total(everyone != i)) for i in (0, 20, 40)) / bound
    return moved <= 1 + 1e-5, f"at most {moved:.5f} B"


@DRAWS.asks("Is noise drawn in double?", "sees noise of 24 bits")
def noise_is_finer_than_what_is_released(subject: Subject) -> Verdict:
    if subject.path == "distributed":
        return None, _RANKS
    session = start(subject, _setting(subject))
    if subject.stacked:
        session.step([0, 1])
        noise = session.stack.mechanism._noise
    else:
        noise = session.standard_normal(torch.zeros(1000, dtype=torch.float64))
    rounded = int((noise == noise.float()).sum())
    return rounded <= noise.numel() // 100, f"{rounded} of {noise.numel()} numbers have no bits that rounding drops"


def _setting(subject: Subject) -> Setting:
    n = len(subject.inputs)
    return Setting(size=n, batch=n / 2)


def _in_fork(action: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)  # more would wait for threads that a fork does not have
            try:
                answer = action()
            except Exception as error:
                answer = error
            with os.fdopen(writer, "wb") as file:
                pickle.dump(answer, file)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = pickle.load(file)  # of our own child
    os.waitpid(pid, 0)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _released(subject: Subject, folder: Path, rate: float, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Sums and their noise, of the next steps of a run that is kept in a folder; its learning rate times ``rate``."""
    kind = CompiledSession if subject.path == "compiled" else EngineSession
    session = kind(subject, _setting(subject).but(sigma=1.0, bound=1.0), None, PrivacyEngine())
    engine, optimizer, found = session.engine, session.optimizer, list[tuple[Tensor, Tensor]]()
    optimizer.noise = getattr(optimizer.noise, "own", optimizer.noise)
    kept = Checkpoints(folder, engine=engine, optimizer=optimizer, data_loader=session.loader)
    kept.restore()
    for group in optimizer.param_groups:
        group["lr"] *= rate
    with session.noted(found):
        session.train(steps)
    kept.save()
    assert engine.ledger is not None
    engine.ledger.close()
    return found
