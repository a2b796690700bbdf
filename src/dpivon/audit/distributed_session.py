"""One run on two ranks, each a process of its own, watched from outside.

The ranks are forked, so that they run the library as it stands in this process at that moment, a bug sown into it included.
What both must have alike (releases, θ, charges, state) is compared here as well.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpivon.audit.engine_session import EngineSession, make_optimizer
from dpivon.audit.session import Answer, Observed, Session, Setting, Subject
from dpivon.errors import ArgumentError, PrivacyError, bad
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.mechanism import NoiseSpec

RANKS = 2
_T = TypeVar("_T")
PATIENCE = 60.0  # seconds until a rank that does not answer is given up


class RankSession(EngineSession):
    """What one rank does: its own part of the rows that the auditor names."""

    def step(self, rows: Sequence[int]) -> Observed:
        return super().step(self._mine(rows))

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        return super().step_in_parts(self._mine(rows))

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        return super().leave_half_way(self._mine(rows))

    def fresh_step(self, rows: Sequence[int]) -> Observed:
        """The first step of the same run, begun anew."""
        return type(self)(self.subject, self.setting, self.answer).step(rows)

    @staticmethod
    def _mine(rows: Sequence[int]) -> list[int]:
        return [i for i in rows if i % dist.get_world_size() == dist.get_rank()]


def can_fork() -> bool:
    """Beside a GPU autograd has threads, which a forked process lacks."""
    return not torch.cuda.is_available()


def check_forks(path: str) -> None:
    if not can_fork():
        fix = "Hide the GPU with CUDA_VISIBLE_DEVICES=''"
        raise bad("path", path, "forks its ranks, which autograd does not survive beside a GPU", fix)


def _serve(rank: int, store: str, orders: Any, subject: Subject, setting: Setting, answer: Answer | None) -> None:
    """A rank's whole life: do what is asked, say what came of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        patience = datetime.timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=patience)
        session = RankSession(subject, setting, answer)
        result: Any = None
        while True:
            orders.send_bytes(pickle.dumps((None, result, session.charged)))
            session.charged.clear()
            name, args = pickle.loads(orders.recv_bytes())
            result = getattr(session, name)(*args)
    except Exception as error:
        said = f"rank {rank}: {type(error).__name__}: {error}"
        orders.send_bytes(pickle.dumps(((isinstance(error, ArgumentError), said), None, [])))
    finally:
        os._exit(0)  # nothing of the parent's is run a second time


def _end(processes: list[Any], folder: Any) -> None:
    for process in processes:
        process.kill()
        process.join()
    folder.cleanup()


class DistributedSession(Session):
    """The ranks of one run as one session: what is asked of it is asked of every rank, and their answers are compared."""

    def __init__(self, subject: Subject, setting: Setting, answer: Answer | None) -> None:
        check_forks(subject.path)
        super().__init__(subject, setting, answer)
        context = multiprocessing.get_context("fork")
        folder = tempfile.TemporaryDirectory()
        store = str(Path(folder.name) / "store")
        self._pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs, subject, setting, answer), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: none of ours is needed
                process.start()
            theirs.close()
            self._pipes.append(ours)
            processes.append(process)
        weakref.finalize(self, _end, processes, folder)
        self._hear()

    def _ask(self, name: str, *args: Any) -> list[Any]:
        """What each rank returns."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((name, args)))
        return self._hear()

    def _hear(self) -> list[Any]:
        answers: dict[Any, Any] = {}
        while len(answers) < RANKS:
            ready = wait([p for p in self._pipes if p not in answers], timeout=2 * PATIENCE)
            if not ready:
                raise PrivacyError("The ranks wait for each other: one of them left out a step of the others.")
            for pipe in ready:
                error, result, charged = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                if error is not None:
                    refused, said = error
                    raise ArgumentError(said) if refused else PrivacyError(said)
                answers[pipe] = result
                self.charged += charged
        return [answers[pipe] for pipe in self._pipes]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "answer" and "_pipes" in vars(self):
            self._ask("__setattr__", name, value)

    # ---- steps

    def step(self, rows: Sequence[int]) -> Observed:
        return _one_and_the_same(self._ask("step", list(rows)))

    def fresh_step(self, rows: Sequence[int]) -> Observed:
        return _one_and_the_same(self._ask("fresh_step", list(rows)))

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        by_rank = self._ask("step_in_parts", list(rows))
        _agreed([len(seen) for seen in by_rank], "number of release")
        return [_one_and_the_same(list(seen)) for seen in zip(*by_rank, strict=True)]

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        return all(self._ask("leave_half_way", list(rows)))

    def rebound(self, bound: float) -> bool:
        return all(self._ask("rebound", bound))

    def renoise(self, sigma: float) -> bool:
        return all(self._ask("renoise", sigma))

    def train(self, steps: int) -> None:
        self._ask("train", steps)

    # ---- what is stated and kept

    def spec(self) -> NoiseSpec:
        specs: list[NoiseSpec] = self._ask("spec")
        return _agreed(specs, "NoiseSpec")

    def accountant(self) -> Accountant:
        accounts: list[Accountant] = self._ask("accountant")
        _agreed([a.history for a in accounts], "account")
        return accounts[0]

    def sampled(self, steps: int) -> list[list[int]]:
        """All ranks' parts of each batch; an example that is on two ranks comes twice."""
        return [[i for part in parts for i in part] for parts in zip(*self._ask("sampled", steps), strict=True)]

    def state(self) -> list[Tensor]:
        first, *others = self._ask("state")
        if any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
            raise PrivacyError("The ranks of one run have learned different things.")
        return list(first)

    def network_as_trained(self) -> nn.Module:
        return make_optimizer(self.subject, self.setting)[0]

    def means(self) -> Tensor:
        means: list[Tensor] = self._ask("means")
        return means[0]


def _one_and_the_same(seen: list[Observed]) -> Observed:
    first, *others = seen
    for other in others:
        alike = torch.allclose(first.released, other.released, rtol=0, atol=0, equal_nan=True)
        if not alike or first.variance != other.variance:
            raise PrivacyError("The ranks of one run have different releases: two noised sums under one charge.")
        if any(not torch.equal(a, b) for a, b in zip(first.theta, other.theta, strict=True)):
            raise PrivacyError("The ranks of one run took gradients at different θ.")
    return first


def _agreed(found: list[_T], what: str) -> _T:
    if any(other != found[0] for other in found):
        raise PrivacyError(f"The ranks of one run have different {what}s.")
    return found[0]
