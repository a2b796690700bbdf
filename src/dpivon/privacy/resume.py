"""Noise and batches after a resume: either the very release that was made before, or nothing that was ever drawn before.

A release that was made and lost is charged, and somebody may have seen it. To make it again costs nothing if it comes out
the same to the bit: the same clipped sum, and noise from the same state. Anything else must be a new release, with noise
and a batch that are independent of it: the same noise on two sums subtracts to their difference, and the same batch
under two noises is not a second Poisson sample.

Two copies of a run's folder hold the same generators, and may go on apart: with another learning rate, another loss. So
noise is not drawn from the generator's state alone but from that state and the digest of the sum that it is added to: the
same sum gets the same noise, which is the same release, and another sum gets independent noise. Likewise a batch is drawn
from its generator's state, the release before it and the weights that it is for. No copy can be distinguished from the original
before its first sum is known, so two copies that differ in code alone share one batch, under independent noise.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dpivon.durable.ledger import Ledger
from dpivon.durable.tensors import bytes_of
from dpivon.errors import PrivacyWarning
from dpivon.privacy.mechanism import AGAIN, DROP, NEW, Decision, NoiseSpec
from dpivon.privacy.noise import NoiseSource, TorchNoise
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.ranks.states import FollowedLedger
from dpivon.privacy.sampling import PoissonSampler
from dpivon.release import Release


def refresh(optimizer: DPOptimizer) -> None:
    """Noise and batches from new seeds."""
    if isinstance(optimizer.noise, TorchNoise):
        optimizer.noise.refresh()
    if (sampler := sampler_of(optimizer)) is not None:
        sampler.refresh()
        if not sampler.secure:  # otherwise every rank draws for its own examples
            optimizer.together.share(sampler.generator)


class ReplayJournal:
    """Writes what a release was made of beside its charge, and lets a lost one be repeated only if it is the same.

    The evidence is keyed, with a key that only the checkpoint has: a plain digest in the ledger would let anybody test a
    guess of the sum, which is private.
    """

    def __init__(self, optimizer: DPOptimizer, ledger: Ledger | FollowedLedger, charge: Callable[..., None]) -> None:
        self._optimizer, self._ledger, self._charge = optimizer, ledger, charge
        self.key = secrets.token_bytes(32)
        self.replayed = 0
        self.last = b""  # a digest of the last release
        self._lost: int | None = None  # the number of the next release to repeat; None when all there is is new

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayJournal:
        return self

    @property
    def position(self) -> int:
        """How many of the ledger's releases the model has seen, or will never see."""
        return self._ledger.record.releases if self._lost is None else self._lost

    def repeat_from(self, release: int) -> None:
        """Releases from here to the end of the ledger were made and lost."""
        self._lost = release if release < self._ledger.record.releases else None

    @property
    def reads_sums(self) -> bool:
        """Whether what becomes of a sum depends on it, so that it must be known before it is noised."""
        return self._lost is not None or self._repeats

    def decide(self, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> Decision:
        made_of = self._digest(sums, spec)
        evidence = hmac.new(self.key, made_of, hashlib.sha256).hexdigest()[:32] if made_of else ""
        decision = NEW, evidence
        if self._lost is not None:
            record = self._ledger.record
            made = record.evidence.get(self._lost, "")
            if not (made and hmac.compare_digest(made, evidence) and record.terms_at(self._lost) == (spec.terms,)):
                return DROP, ""
            decision = AGAIN, ""
        noise = self._optimizer.noise
        if made_of and isinstance(noise, TorchNoise):
            noise.branch(bytes_of(noise.generator.get_state()) + made_of)
        return decision

    def charge_for(self, decision: Decision) -> Callable[[NoiseSpec], None] | None:
        what, evidence = decision
        if what == NEW:
            return lambda spec: self._charge(spec, evidence)
        if what == AGAIN:
            return self._again
        assert self._lost is not None
        lost = self._ledger.record.releases - self._lost
        self._lost = None
        refresh(self._optimizer)
        warnings.warn(
            f"A resumed step is not the one that was lost, bit for bit, so it was dropped and not released. The {lost} lost "
            "releases stay charged; noise and batches are new from here.",
            PrivacyWarning,
            stacklevel=6,
        )
        return None

    def _again(self, spec: NoiseSpec) -> None:
        """Charged already, before the crash."""
        assert self._lost is not None
        self.replayed += 1
        self.repeat_from(self._lost + 1)

    def _digest(self, sums: Mapping[Tensor, Tensor], spec: NoiseSpec) -> bytes:
        """Of a clipped sum and the state its noise starts from; empty where that cannot be repeated."""
        if not self._repeats:
            return b""
        generator = self._optimizer.generator
        assert generator is not None
        total = hashlib.sha256(spec.digest.encode())
        total.update(bytes_of(generator.get_state()))
        remembered = getattr(self._optimizer.noise, "memory", None)
        past = [] if remembered is None else [t for values in remembered[1].values() for t in values]
        for value in (*past, *sums.values()):
            total.update(f"{value.dtype} {list(value.shape)}".encode())
            total.update(bytes_of(value))
        return total.digest()

    def batch_is_for(self) -> bytes:
        """What the next batch is bound to: the release before it, and the weights; empty where nothing can be repeated."""
        if not self._repeats:
            return b""
        total = hashlib.sha256(self.last)
        for p in self._optimizer.params:
            total.update(bytes_of(p))
        return total.digest()

    def made(self, release: Release) -> None:
        """Remember the release, as all ranks have it."""
        total = hashlib.sha256()
        for g in release.gradients.values() if self._repeats else ():
            total.update(bytes_of(g))
        self.last = total.digest()

    @property
    def _repeats(self) -> bool:
        return not self._optimizer.together.sharded and repeatable(self._optimizer.noise, self._optimizer.params)


def repeatable(noise: NoiseSource, params: list[Tensor]) -> bool:
    """Whether a release can come out the same again: on a CPU, from a generator that has a state."""
    cpu = torch.device("cpu")
    return isinstance(noise, TorchNoise) and noise.generator.device == cpu and all(p.device == cpu for p in params)


def sampler_of(optimizer: DPOptimizer) -> PoissonSampler | None:
    return None if optimizer.draws is None else optimizer.draws.sampler()
