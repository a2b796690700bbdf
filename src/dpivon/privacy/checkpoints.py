"""Checkpoints of a private run: on a CPU it goes on to the bit, at whatever step it was stopped or killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.data_digest import data_digest
from dpivon.durable.ledger import Record
from dpivon.durable.ledger_mark import check_mark, mark
from dpivon.errors import PrivacyWarning, bad
from dpivon.optim.ivon import IVON
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.mechanism import Mechanism
from dpivon.privacy.noise import this_process
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.states import load_model, share_state, whole_model, whole_optimizer
from dpivon.privacy.ranks.team import Team
from dpivon.privacy.resume import ReplayJournal, refresh, repeatable, sampler_of
from dpivon.privacy.sampling import PoissonDataLoader, PoissonSampler

_T = TypeVar("_T")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        steps: steps that the restored model has made; 0 for a run that begins.
        epoch: the pass over the data that comes next, or goes on: ``for epoch in range(resumed.epoch, epochs)``.
        lost: releases made after the checkpoint. They stay charged; on a CPU they are repeated to the bit at no cost.
        extra: what was given to ``save``.
    """

    steps: int
    epoch: int
    lost: int
    extra: dict[str, Any]


class Checkpoints:
    """Keeps a private run in a folder: its ledger and its last checkpoints.

    >>> model, optimizer, loader = engine.make_private(...)
    >>> run = Checkpoints("run", engine=engine, optimizer=optimizer, data_loader=loader)
    >>> for epoch in range(run.restore().epoch, 10):
    ...     for x, y in loader:  # after a resume in the middle of a pass, what is left of it
    ...         ...  # the ordinary step
    ...         run.save()  # now and then

    The ledger (``run/ledger.jsonl``) is the truth about ε: it is attached here, before the first step, and every release
    is in it before it is made, whatever becomes of the checkpoints. The checkpoints hold the model, the optimizer with its
    posterior and momentum, the place in the data, and the generators of batches, noise and samples. So they are secret:
    mode 0600. ``dpivon export`` writes what may be published.

    Args:
        folder: made if it does not exist.
        engine: the engine.
        optimizer: what its ``make_private`` returned.
        data_loader: likewise.
        also: more objects with ``state_dict`` and ``load_state_dict`` to keep, such as schedulers, by name.
        config: anything JSON can hold that must be the same when the run goes on.
        dataset_digest: a text that identifies the data. Tensors in memory are recognised without it.
        keep: how many checkpoints to keep, at least 2.

    A resume is exact with batches drawn in the process itself (``num_workers=0``), parameters on the CPU and
    ``secure_mode=False``. Elsewhere it goes on with new noise, as private and at no more cost than the steps that were lost.
    A folder may be copied and each copy gone on with (:mod:`dpivon.privacy.resume`).

    On several ranks every one makes it, and calls ``restore`` and ``save``; the first has the folder. A run may go on with
    another number of ranks, sharded or not.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        engine: PrivacyEngine,
        optimizer: DPOptimizer,
        data_loader: PoissonDataLoader,
        also: Mapping[str, Any] | None = None,
        config: Any = None,
        dataset_digest: str = "",
        keep: int = 2,
    ) -> None:
        sampler = sampler_of(optimizer) if isinstance(optimizer, DPOptimizer) else None
        if sampler is None or getattr(data_loader, "batch_sampler", None) is not sampler:
            problem = "is not the loader whose Poisson batches the optimizer learns from"
            fix = "Give the optimizer and the loader that make_private returned"
            raise bad("data_loader", type(data_loader).__name__, problem, fix)
        self.folder = Path(folder)
        self._team = optimizer.together if isinstance(optimizer.together, Team) else None
        self._first = self._team is None or self._team.group.first
        if self._first:
            self.folder.mkdir(parents=True, exist_ok=True)
        if engine.ledger is not None and engine.ledger.path.absolute() != (self.folder / LEDGER).absolute():
            fix = f"Give PrivacyEngine(ledger={str(self.folder / LEDGER)!r}), or none: it is attached here"
            raise bad("engine", str(engine.ledger.path), "its ledger is not in the folder of its checkpoints", fix)
        self._engine, self._optimizer = engine, optimizer
        assert isinstance(sampler, PoissonSampler)
        self._sampler = sampler
        self._also, self._config, self._dataset_digest = dict(also or {}), config, dataset_digest
        self._dataset = data_loader.dataset
        self._ahead = data_loader.num_workers > 0
        self._files = Rotation(self.folder, keep)
        self._ledger = engine.ledger or engine.attach_ledger(self.folder / LEDGER)
        self._journal = ReplayJournal(optimizer, self._ledger, engine._charge)
        optimizer.journal = self._journal
        self._steps = 0
        optimizer.attach_step_hook(self._count)
        self._before: dict[str, Any] = {}
        self._due: dict[str, Any] = {}
        self._signal: int | None = None
        self._digest_of_data: tuple[bytes, str] | None = None
        sampler.before_draw = self._before_draw

    def _by_first(self, action: Callable[[], _T]) -> _T | None:
        """Done by the process that has the files; None on the others, and its error on all."""
        return action() if self._team is None else self._team.group.on_first(action)

    def _count(self, optimizer: DPOptimizer) -> None:
        self._steps += 1
        assert optimizer.last_release is not None
        self._journal.made(optimizer.last_release)

    # ---- saving

    def save(self, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, whole or not at all. In the middle of a logical batch it is the one before that batch.

        On several ranks all of them must call it; the first writes.
        """
        return self._save(dict(extra or {}), inside=False)

    def _save(self, extra: dict[str, Any], inside: bool) -> Path:
        """``inside``: an iterator over the batches is known to exist, which has drawn from the global generator."""
        sampler, draws, record = self._sampler, self._sampler.draws, self._ledger.record
        pending = draws.redeemable and sampler.position > 0
        if self._ahead:
            passes, position, generators = sampler.passes, sampler.began_at + draws.redeemed, {}
        else:
            passes, position = sampler.passes, sampler.position - pending
            generators = self._before if pending else self._generators()
        if position >= sampler.steps:
            passes, position = passes + 1, 0
        state = {
            "steps": self._steps,
            "passes": passes,
            "position": position,
            "inside": inside or pending or position > 0,
            "ledger": {**mark(record), "position": self._journal.position},
            "key": torch.frombuffer(bytearray(self._journal.key), dtype=torch.uint8),
            "last": self._journal.last.hex(),
            "config": self._fingerprint(),
            "data": self._data_digest(self._journal.key),
            "names": _names(self._optimizer),
            "optimizer_class": type(self._optimizer.original_optimizer).__name__,
            "noise_multiplier": self._optimizer.noise_multiplier,
            "max_grad_norm": self._optimizer.max_grad_norm,
            "model": whole_model(self._optimizer, keep=self._first),
            "optimizer": whole_optimizer(self._optimizer, keep=self._first),
            "also": {name: part.state_dict() for name, part in self._also.items()},
            "generators": self._of_all_ranks(generators),
            "drawn_by": list(self._optimizer.drawn_by),
            "extra": extra,
        }
        at = self._journal.position
        self._by_first(lambda: self._files.write(at, state))
        return self._files.path(at)

    def _of_all_ranks(self, generators: Mapping[str, Any]) -> dict[str, Any]:
        """With the global generator (dropout) of every rank; the others are the first one's."""
        if self._team is None or not generators:
            return dict(generators)
        return {**generators, "globals": self._team.group.gather_tensors(generators["global"])}

    def _generators(self) -> dict[str, Any]:
        """The states of all that draws: batches, noise, posterior samples, and the global one (dropout)."""
        own = {
            "sampler": None if self._sampler.secure else self._sampler.generator,
            "noise": self._optimizer.generator,
            "posterior": getattr(self._optimizer.original_optimizer, "generator", None),
        }
        states = {name: g.get_state() if g is not None else None for name, g in own.items()}
        remembered = getattr(self._optimizer.noise, "memory", None)
        past = {} if remembered is None else {"memory": remembered[1]}
        return {**states, **past, "global": torch.get_rng_state()}

    def _before_draw(self) -> bytes:
        if self._due:  # making an iterator has drawn from the global generator; the run that never stopped had not
            self._set(self._due)
            self._due = {}
        if self._signal is not None:
            self._stop(self._signal, inside=True)
        if self._ahead:
            return b""
        self._before = self._generators()
        return self._journal.batch_is_for()

    # ---- restoring

    def restore(self) -> Resumed:
        """Go on from the newest whole checkpoint, or begin if there is none. Before the first step."""
        state = self._by_first(self._files.read)
        if self._team is not None:
            state = share_state(self._team.group, self._optimizer, state)
        record = self._ledger.record
        if state is None:
            if lost := record.releases - record.earlier:
                self._tell_lost(lost, "There is no checkpoint")
            self.save()  # a crash before the first that is asked for shall lose nothing either
            return Resumed(0, 0, lost, {})
        self._check(state, record)
        optimizer, sampler, at = self._optimizer, self._sampler, int(state["ledger"]["position"])
        optimizer.abandon_virtual_batch()
        load_model(optimizer, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.noise_multiplier, optimizer.max_grad_norm = state["noise_multiplier"], state["max_grad_norm"]
        for name, part in self._also.items():
            part.load_state_dict(state["also"][name])
        sampler.passes, sampler.position, sampler.begin_at = state["passes"], 0, state["position"]
        sampler.draws.redeemable = False
        self._steps = int(state["steps"])
        self._journal.key, self._journal.last = bytes(state["key"].tolist()), bytes.fromhex(state.get("last", ""))
        lost = record.releases - at
        self._resume_generators(state, at, lost)
        return Resumed(self._steps, state["passes"], lost, state["extra"])

    def _resume_generators(self, state: Mapping[str, Any], at: int, lost: int) -> None:
        saved = state["generators"]
        exact = bool(saved) and not self._ahead and repeatable(self._optimizer.noise, self._optimizer.params)
        exact = exact and saved["noise"] is not None and saved["sampler"] is not None and not self._sampler.secure
        if self._team is not None:
            exact = bool(self._team.group.broadcast_value(exact and not self._team.sharded))
        if exact and (not lost or at in self._ledger.record.evidence):
            self._journal.repeat_from(at)
            self._set(saved)
            noise: Any = self._optimizer.noise
            noise.origin, self._sampler.origin = state.get("drawn_by", self._optimizer.drawn_by)
            self._due = saved if state["inside"] else {}
            return
        refresh(self._optimizer)
        if lost:
            self._tell_lost(lost, "They cannot be repeated to the bit here")

    def _set(self, saved: Mapping[str, Any]) -> None:
        noise: Any = self._optimizer.noise
        if self._first:
            noise.generator = torch.Generator()  # our own: one that the caller holds must not be able to draw our noise
            noise.generator.set_state(saved["noise"])
            noise.memory = (this_process(), saved["memory"]) if "memory" in saved else None
        self._sampler.generator.set_state(saved["sampler"])
        drawing: Any = self._optimizer.original_optimizer
        if saved["posterior"] is not None and getattr(drawing, "generator", None) is not None:
            drawing.generator.set_state(saved["posterior"])
        rank = self._optimizer.together.rank
        known = saved.get("globals") or [saved["global"]]
        if rank < len(known):  # on more ranks than before the new ones keep their own
            torch.set_rng_state(known[rank])

    def _tell_lost(self, lost: int, why: str) -> None:
        stated = f"{self.folder}: {lost} releases were made and lost. {why}: they stay charged, and noise and batches are new."
        warnings.warn(stated, PrivacyWarning, stacklevel=3)

    def _check(self, state: Mapping[str, Any], record: Record) -> None:
        fix = "Go on with what the run was begun with, or begin another in another folder"
        check_mark(self._ledger.path, record, state["ledger"])
        ours, begun = self._fingerprint(), {"mechanism": Mechanism.name, "unit": "", **state["config"]}
        if "clipping" not in begun:  # from before it was written down: of a list of bounds there was their norm alone
            ours["max_grad_norm"] = self._optimizer.first_spec.max_grad_norm
        for name, value in begun.items():  # what was not written down when it was begun is not compared
            if ours.get(name) != value:
                raise bad(name, ours.get(name), f"but the run in {self.folder} was begun with {value!r}", fix)
        if self._data_digest(bytes(state["key"].tolist())) != state["data"]:
            raise bad("data_loader", str(self.folder), "the run was begun with other data", fix)
        if set(state["also"]) != set(self._also):
            raise bad("also", sorted(self._also), f"but {sorted(state['also'])} were saved", fix)

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        optimizer, spec, clipping = self._optimizer, self._optimizer.first_spec, self._optimizer.first_clipping
        named = optimizer.module.named_parameters()
        shapes = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named]
        return {
            "module": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
            "optimizer": type(optimizer.original_optimizer).__name__,
            **_described(optimizer.original_optimizer),
            "noise_multiplier": spec.noise_multiplier,
            "mechanism": repr(spec.mechanism) if fields(spec.mechanism) else spec.mechanism.name,
            "clipping": clipping.name,
            "max_grad_norm": clipping.given,
            "sample_rate": spec.sample_rate,
            "expected_batch_size": spec.expected_batch_size,
            "loss_reduction": spec.loss_reduction,
            "augmentations": optimizer.source.augmentations,
            **({"unit": ""} if self._sampler.people is None else self._sampler.people.terms),
            "accountant": self._engine.accountant.mechanism(),
            "config": json.loads(json.dumps(self._config)),
        }

    def _data_digest(self, key: bytes) -> str:
        """Keyed, as everything that is a function of the data; once, since it may be large."""
        if self._digest_of_data is not None and self._digest_of_data[0] == key:
            return self._digest_of_data[1]
        people = None if self._sampler.people is None else self._sampler.people.of_row
        self._digest_of_data = key, data_digest(key, self._dataset, people, self._dataset_digest)
        return self._digest_of_data[1]

    # ---- signals

    @contextmanager
    def saving_on_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and Ctrl-C save before the next batch is drawn, and exit with 143 and 130.

        On several ranks a signal to any of them stops all, after the step under way.
        """
        if threading.current_thread() is not threading.main_thread():
            raise bad("saving_on_signals", threading.current_thread().name, "is not the main thread", "Enter it there")
        wanted = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._ask) for number in wanted}
        if self._team is not None:
            self._team.on_stop = lambda number: self._stop(number, inside=True)
        try:
            yield
            if self._team is not None:
                asked = self._team.group.gather_numbers([self._team.asked_to_stop])
                self._signal = max(n for (n,) in asked) or None
            if self._signal is not None:
                self._stop(self._signal, inside=False)
        finally:
            if self._team is not None:
                self._team.on_stop, self._team.asked_to_stop = None, 0
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        before = self._signal if self._team is None else self._team.asked_to_stop
        if before == signal.SIGINT == number:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        if self._team is None:
            self._signal = number
        else:
            self._team.asked_to_stop = number  # acted on when all ranks know of it

    def _stop(self, number: int, *, inside: bool) -> None:
        self._signal = None
        self._save({}, inside)
        raise SystemExit(128 + number)


def _names(optimizer: DPOptimizer) -> list[str]:
    """The model's name of every parameter, in the optimizer's order."""
    known: dict[Any, str] = {p: name for name, p in optimizer.module.named_parameters()}
    return [known.get(p, "") for group in optimizer.param_groups for p in group["params"]]


#: What a rule may be made of, and what that is called here.
_PARTS = {"estimator": "curvature", "phi": "phi", "psi": "psi"}


def _described(inner: Optimizer) -> dict[str, Any]:
    """What an optimizer does that neither its class nor its state tells: its groups are in the state, these are not."""
    if isinstance(inner, IVON):
        return {"mc_samples": inner.mc_samples, "curvature": inner.curvature.name}
    if not isinstance(inner, RuleOptimizer):
        return {}
    parts = {stated: getattr(inner.rule, part, None) for part, stated in _PARTS.items()}
    return {"rule": inner.rule.name, **{stated: part.name for stated, part in parts.items() if part is not None}}
