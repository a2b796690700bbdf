"""The release boundary of a stack: K runs sample, clip, and release at once, each under its own NoiseSpec and account."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpivon.durable.ledger import Ledger, Terms
from dpivon.durable.tensors import bytes_of
from dpivon.errors import PrivacyError, bad
from dpivon.privacy.accounting import DEFAULT, Accountant
from dpivon.privacy.accounting.recorded import replay
from dpivon.privacy.kernels.reference import Batch
from dpivon.privacy.mechanism import Mechanism, Memory, NoiseSpec, on_grid
from dpivon.privacy.precision import compiled
from dpivon.privacy.streams import PRIVACY, STREAMS, Streams


class StackedGradients(Protocol):
    """Clipped sums of K models: [K, P] in fp64."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """The data set as :meth:`clipped_sums` reads it, once."""
        ...

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        """Σ_i ḡ_i of every run."""
        ...


class StackedMechanism:
    """Releases one row per run: g_dp = (Σ ḡ + N(0, σ²C²)) / b, row by row from the run's own stream.

    Charging comes first and by the block: :meth:`reserve` charges every run for n releases before any of them is
    launched, since a captured step runs without Python. What a crash leaves unused stays charged.

    With a ledger the block is on disk first. On a CPU, where steps are made one by one, every release is written by itself
    beside the evidence of its sum (:meth:`record`), so that a lost one can be repeated to the bit.
    """

    def __init__(
        self, specs: Sequence[NoiseSpec], streams: Streams, device: torch.device, accountant: str = DEFAULT
    ) -> None:
        if any(s.mechanism != specs[0].mechanism for s in specs):
            raise bad(
                "mechanism", [s.mechanism for s in specs], "differs among the runs of a stack", "Stack them apart"
            )
        self._specs, self.streams, self._by = list(specs), streams, accountant
        self.accountants = [Accountant(accountant) for _ in specs]
        column: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.noise_std = torch.tensor([[s.noise_std] for s in specs], **column)
        self.divisor = torch.tensor([[s.divisor] for s in specs], **column)
        self.variance = torch.tensor([[s.variance] for s in specs], dtype=torch.float32, device=device)
        self.bound = torch.tensor([_down(s.max_grad_norm) for s in specs], dtype=torch.float32, device=device)
        self.reserved = 0
        self.ledger: Ledger | None = None
        self.names: tuple[str, ...] = ()  # of the runs, row by row, as the ledger has them
        self.key = b""
        self.covered = 0  # releases to be repeated, that were charged before a crash
        self._noise: Tensor | None = None
        self.memory: Memory = {}  # what a mechanism of the caller's own remembers of its draws
        self.remembered = list(streams.seeds)  # those that it was drawn with
        self._combine = compiled(_combine, device)

    @property
    def specs(self) -> list[NoiseSpec]:
        """Of every run, with where its draws come from: a fork or a copy draws from new seeds."""
        by = (self.streams.origin, self.streams.origin)
        if any(s.drawn_by != by for s in self._specs):
            self._specs = [s.replace(drawn_by=by) for s in self._specs]
        return self._specs

    @property
    def terms(self) -> Terms:
        return self.named([spec.terms for spec in self.specs])

    def named(self, terms: Sequence[Mapping[str, Any]]) -> Terms:
        """One entry per row, each with its run's name where the runs have names."""
        return (
            tuple({"run": n, **own} for n, own in zip(self.names, terms, strict=True)) if self.names else tuple(terms)
        )

    @property
    def one_by_one(self) -> bool:
        return self.noise_std.device.type == "cpu"

    @property
    def recording(self) -> bool:
        """Whether every release is written by itself."""
        return self.ledger is not None and self.one_by_one

    def attach(self, ledger: Ledger, key: bytes) -> None:
        """Take over all that a ledger holds, and record there from now on."""
        if ledger.record.rows and ledger.record.runs != len(self.specs):
            raise PrivacyError(
                f"{ledger.path}: is of {ledger.record.runs} runs, not {len(self.specs)}. Give the right one."
            )
        if self.charged and self.ledger is not ledger:
            raise PrivacyError(
                f"{ledger.path}: this stack has made {self.charged} releases that would not be in it. Attach it before the "
                "first step."
            )
        self.ledger, self.key = ledger, key
        self.accountants = [Accountant(self._by) for _ in self.specs]
        for run, accountant in enumerate(self.accountants):
            replay(ledger.record, run, accountant)

    @property
    def charged(self) -> int:
        """Releases charged to every run."""
        return len(self.accountants[0])

    def reserve(self, releases: int) -> None:
        """Charge every run for so many releases, but for those that were charged before a crash and are repeated."""
        repeated = min(releases, self.covered)
        self.write_ahead(releases - repeated)
        self._charge(releases - repeated)
        self.covered -= repeated
        self.reserved += releases

    def write_ahead(self, releases: int) -> None:
        """Have so many more releases than are charged on disk: one wait for it serves many blocks."""
        if self.ledger is not None and not self.one_by_one:
            short = self.charged + releases - self.ledger.record.releases
            if short > 0:
                self.ledger.charge(self.terms, short)

    def charge_beside(self, spec: NoiseSpec, releases: int = 1) -> None:
        """Charge every run for releases of another kind, made while no step is under way. The disk first."""
        if self.reserved:
            raise PrivacyError(f"{self.reserved} reserved steps are under way: let them end before another release.")
        if self.ledger is not None:
            self.ledger.give_back(max(0, self.ledger.record.releases - self.charged))  # written ahead, never launched
            self.ledger.charge(self.named([spec.terms] * len(self.specs)), releases)
        self._charge(releases, [spec] * len(self.specs))

    def _charge(self, releases: int, specs: Sequence[NoiseSpec] | None = None) -> None:
        for spec, accountant in zip(self.specs if specs is None else specs, self.accountants, strict=True):
            if spec.unaccounted:
                accountant.record_unaccounted(spec.unaccounted, releases)
            else:
                sigma, rate = spec.cost
                accountant.charge(noise_multiplier=sigma, sample_rate=rate, steps=releases)

    def record(self, sums: Tensor, at: int) -> bool:
        """On disk before its noise is drawn. False if it was to repeat a lost release, and is another: do not release it."""
        assert self.ledger is not None
        evidence, record = self.evidence(sums, at), self.ledger.record
        if at < record.releases:
            return record.terms_at(at) == self.terms and hmac.compare_digest(record.evidence.get(at, ""), evidence)
        self.ledger.charge(self.terms, 1, evidence)
        return True

    def evidence(self, sums: Tensor, at: int) -> str:
        """Of what release number ``at`` is made of, keyed."""
        total = hmac.new(self.key, f"{at} {list(sums.shape)}".encode(), hashlib.sha256)
        total.update(bytes_of(sums))
        return total.hexdigest()[:32]

    def forsake(self, releases: int) -> int:
        """What was lost is not repeated after all: charge the so many still to come, and say where new draws begin."""
        assert self.ledger is not None
        self.covered, at = 0, self.ledger.record.releases
        self._charge(max(0, at + releases - self.charged))
        return at

    def spend(self) -> None:
        """One reserved release is about to be launched."""
        if self.reserved < 1:
            raise PrivacyError("A release that was not reserved: call reserve(n) before launching n steps.")
        self.reserved -= 1

    def release(self, sums: Tensor, step: Tensor) -> Tensor:
        """[K, P] in fp32. The noise of step t is drawn once; ``step`` is read on the device.

        Noise is drawn and added in double and the result is rounded here, as in :func:`dpivon.privacy.mechanism.release`.
        """
        mechanism = self._specs[0].mechanism
        if type(mechanism) is not Mechanism:
            noise = self._noise_of(mechanism, sums, step)
            return self._combine(on_grid(sums, self._specs[0]), noise, torch.ones_like(self.noise_std), self.divisor)
        if self._noise is None or self._noise.shape != sums.shape:
            self._noise = torch.empty(sums.shape, dtype=torch.float64, device=sums.device)
        noise = self.streams.normal(self._noise, step, PRIVACY)
        return self._combine(sums, noise, self.noise_std, self.divisor)

    def _noise_of(self, mechanism: Mechanism, like: Tensor, step: Tensor) -> Tensor:
        """Memory is written in place, where a captured step finds it; new seeds begin it anew."""
        draws = itertools.count(PRIVACY, STREAMS)

        def draw(std: Tensor) -> Tensor:
            return self.streams.normal(torch.empty_like(like, dtype=torch.float64), step, next(draws)) * std

        if not self.memory or self.remembered != self.streams.seeds:
            self.memory = mechanism.init(torch.zeros_like(like, dtype=torch.float64))
            self.remembered = list(self.streams.seeds)
        noise, after = mechanism.noise(draw, self.noise_std, self.memory)
        for name, value in self.memory.items():
            value.copy_(after[name])
        return noise


@dataclass(frozen=True)
class BatchBlock:
    """The Poisson batches of the next n steps of all runs, drawn ahead."""

    index: Tensor  # [n, capacity], which example
    model: Tensor  # [n, capacity], whose
    start: Tensor  # [n, K + 1]
    places: Tensor  # [n, K, most]
    seats: Tensor  # [n, capacity]
    overflows: dict[int, list[tuple[Tensor, ...]]]  # steps whose batches do not fit, and their parts


class StackedSampler:
    """Poisson batches of K runs, packed one after the other.

    A step that needs more than the capacity is run in parts of the same release, never cut; :func:`room` weighs what such a
    step costs against rows that every other one would leave empty.

    Every example of a run gets a place of its own, drawn uniformly among all ``most`` there are. A GPU's libraries may round
    one example's forward pass otherwise at another place, and in bf16 that changes its gradient by 1e-3. Packed in order,
    everyone after x would move up where x is missing, and the sum would move by more than x's share. Drawn, places without x
    are distributed as places with x are for everyone else: x leaves its own place empty and the sum moves by at most C. When
    x makes a batch too large for its parts, one other example moves for every further part: the order is drawn too.
    """

    def __init__(self, specs: Sequence[NoiseSpec], examples: int, streams: Streams, device: torch.device) -> None:
        self.streams, self.examples, self.device = streams, examples, device
        self.runs = len(specs)
        # Rounded down: a rate above the one that is charged would make ε too small.
        self.rates = torch.tensor([int(s.sample_rate * 2**32) for s in specs], dtype=torch.int64, device=device)
        expected = [s.sample_rate * examples for s in specs]
        self.capacity = min(room(sum(expected)), self.runs * examples)
        self.most = min(max(room(e, among=self.runs) for e in expected), examples)

    def draw(self, first_step: int, steps: int) -> BatchBlock:
        mask = self.streams.poisson(self.examples, self.rates, first_step, steps)
        step, run, example = mask.nonzero(as_tuple=True)  # in order: by step, then run, then example
        counts = torch.bincount(step * self.runs + run, minlength=steps * self.runs).view(steps, self.runs)
        ends = counts.cumsum(1)
        start = torch.nn.functional.pad(ends, (1, 0))
        totals = ends[:, -1]
        step_start = totals.cumsum(0) - totals
        position = torch.arange(len(step), device=self.device) - step_start[step]
        rank = position - start[step, run]
        fits = (position < self.capacity) & (rank < self.most)
        too_many = ((totals > self.capacity) | (counts.max(1).values > self.most)).nonzero().flatten().tolist()
        overflows = {i: self.parts(first_step + i) for i in too_many}
        index = torch.zeros(steps, self.capacity, dtype=torch.int64, device=self.device)
        model = torch.zeros(steps, self.capacity, dtype=torch.int32, device=self.device)
        places = torch.full((steps, self.runs, self.most), self.capacity, dtype=torch.int64, device=self.device)
        seats = torch.zeros(steps, self.capacity, dtype=torch.int64, device=self.device)
        step, run, example, position, rank = (t[fits] for t in (step, run, example, position, rank))
        seat = self._seats(first_step, steps)[step, run, rank]
        index[step, position] = example
        model[step, position] = run.int()
        places[step, run, seat] = position
        seats[step, position] = run * self.most + seat
        return BatchBlock(index, model, start.int(), places, seats, overflows)

    def _seats(self, first_step: int, steps: int) -> Tensor:
        """[steps, K, most]: where the first, second, … example of a run sits."""
        return self.streams.orders(self.most, first_step, steps)

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """One step's batches in as many parts as fit: (index, model, start, places, seats) each."""
        mask = self.streams.poisson(self.examples, self.rates, step, 1)[0].bool()
        run, example = mask.nonzero(as_tuple=True)
        counts = mask.sum(1)
        rank = torch.arange(len(run), device=self.device) - (counts.cumsum(0) - counts)[run]
        rank = self._in_turn(step, counts)[run, rank]
        seats = self._seats(step, 1)[0]
        out: list[tuple[Tensor, ...]] = []
        for low in range(0, int(counts.max()), self.most):
            here = ((rank >= low) & (rank < low + self.most)).nonzero().flatten()
            out += [
                self._part(run[at], example[at], seats[run[at], rank[at] - low]) for at in here.split(self.capacity)
            ]
        return out

    def _in_turn(self, step: int, counts: Tensor) -> Tensor:
        """[K, the most examples of a run]: whose turn it is when a run's examples are taken in an order that was drawn."""
        width = max(1, int(counts.max()))
        order = self.streams.orders(width, step, 1, begin=self.most)[0]
        # Of the first n numbers that come, in the order they come in: those of the n examples that there are.
        there = order < counts.unsqueeze(1)
        turn = there.cumsum(1) - 1
        return torch.zeros_like(order).scatter(1, order, torch.where(there, turn, 0))

    def _part(self, run: Tensor, example: Tensor, seat: Tensor) -> tuple[Tensor, ...]:
        start = torch.nn.functional.pad(torch.bincount(run, minlength=self.runs).cumsum(0), (1, 0))
        position = torch.arange(len(run), device=self.device)
        index = torch.zeros(self.capacity, dtype=torch.int64, device=self.device)
        model = torch.zeros(self.capacity, dtype=torch.int32, device=self.device)
        places = torch.full((self.runs, self.most), self.capacity, dtype=torch.int64, device=self.device)
        seats = torch.zeros_like(index)
        index[position], model[position] = example, run.int()
        places[run, seat] = position
        seats[position] = run * self.most + seat
        return index, model, start.int(), places, seats


def _combine(sums: Tensor, noise: Tensor, noise_std: Tensor, divisor: Tensor) -> Tensor:
    return ((sums + noise * noise_std) / divisor).float()


def _down(c: float) -> float:
    """The largest fp32 number that is at most c: the noise is calibrated to c itself."""
    nearest = np.float32(c)
    return float(nearest if float(nearest) <= c else np.nextafter(nearest, np.float32(0)))


_PASS = 64  # rows that take as long as what a pass costs besides its rows, roughly


def room(expected: float, among: int = 1) -> int:
    """The capacity for so many Poisson batches of this size at which a padded pass costs least on average. One that any of them
    does not fit into takes a second pass: about a fortieth, for one batch of 256."""
    at, spread = int(expected) + 1, NormalDist(expected, max(expected, 1.0) ** 0.5)

    def cost(size: int) -> float:
        return (size + _PASS) * (1 + min(1.0, among * spread.cdf(2 * expected - size - 0.5)))

    return min(range(at, at + int(8 * spread.stdev)), key=cost)
