"""Sums over private rows, by class, released with noise and charged: class counts, factors of probabilities, prediction sets.

**What is released.** Row i contributes a vector v_i with a coordinate per class and norm at most B. With several rows per
person a person's contribution is the mean of theirs, whose norm is at most B too. Adding or removing one person (or row)
moves the sum by at most B, and the sum with noise N(0, σ²B² I) is one Gaussian mechanism of noise multiplier σ at sampling
rate 1. It enters the account as a row (σ, 1, 1), before the noise is drawn. What follows from the sums is post-processing.

**Class counts.** v_i is the one-hot label, B = 1: one release. With K labels per row it is K of them, B = √K; likewise below.

**Factors.** A clipped gradient is a biased one: examples of a rare class have the longer gradients, lose more of them, and
the model's probabilities of that class come out too small. Factors f_k, p_k ← f_k p_k / Σ_j f_j p_j, are fitted so that the
rows' probabilities add up to the number of rows of each class: f_k ← f_k n_k/m_k, a few times, m = Σ_i p_i with noise, B = 1.

**Prediction sets.** Rows that training never saw, with score s_i = 1 − p_i[y_i] under the released model. For class c
the smallest threshold t is wanted whose exceedances fulfil

    S_c(t) = Σ_{i: y_i = c} (1[s_i > t] − a) ≤ −(1 − a).

That is the order statistic ⌈(n_c + 1)(1 − a)⌉ of split conformal prediction (Vovk et al., 2005), without n_c: if new rows
are exchangeable with these, P(s ≤ t | y = c) ≥ 1 − a. k halvings of [0, 1] ask for S_c with noise, all classes at
once, and move down only where S_c(t) + z ≤ −(1 − a) − m. Where every z ≥ −m, no threshold that was accepted is below the
smallest; m makes that fail with probability at most β per class. Coverage is at least 1 − a − β, and a = 0.9 α, β = 0.1 α.
A class with too few rows keeps t = 1: it is in every set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.privacy.accounting import noise_multiplier
from dpivon.privacy.accounting.history import Entry
from dpivon.privacy.mechanism import NoiseSpec, release
from dpivon.privacy.noise import NoiseSource
from dpivon.privacy.people import People

HALVINGS, ROUNDS = 6, 4
#: Shares of the budget: of 1/σ² of the one Gaussian release that all of (ε, δ) would buy.
SHARES_SHARE, SETS_SHARE = 0.05, 0.15
_MISSED = 0.1  # β as a share of α
_MOST = 8.0  # by which a factor changes in a round


class CountSpec(NoiseSpec):
    """A release of one sum over all rows; the ledger calls it by its own name."""

    @property
    def terms(self) -> dict[str, Any]:
        return {**super().terms, "mechanism": "gaussian, sums by class"}


def shares_cost(epsilon: float, delta: float, counted: bool) -> Entry:
    """The row of an account that class counts (unless they were declared) and factors make: a small share of (ε, δ)."""
    return _divided(epsilon, delta, SHARES_SHARE, ROUNDS + counted)


def sets_cost(epsilon: float, delta: float) -> Entry:
    """The row of an account that thresholds of prediction sets make."""
    return _divided(epsilon, delta, SETS_SHARE, HALVINGS)


def _divided(epsilon: float, delta: float, share: float, releases: int) -> Entry:
    return noise_multiplier(epsilon, delta, 1.0, 1, "rdp") * math.sqrt(releases / share), 1.0, releases


@dataclass(frozen=True)
class NoisySums:
    """How sums are released: σ of each of them, where noise comes from, what is charged, and whose the rows are.

    ``people`` says whose each row is; None where every row is a person of its own.
    """

    sigma: float
    noise: NoiseSource
    charge: Callable[[NoiseSpec], None]
    people: People | None = None

    def __call__(self, rows: Tensor, bound: float) -> Tensor:
        """Σ of the rows [n, C], each cut to the norm ``bound``. Nothing else here looks at private rows."""
        rows = rows.double()
        rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
        rows = rows * (bound / rows.norm(dim=1, keepdim=True).clamp_min(bound))
        if self.people is not None:
            self.people.check(len(rows))
            rows = rows / self.people.counts[self.people.of_row].unsqueeze(1)
        sums, origin = rows.sum(0), self.noise.origin
        spec = CountSpec(self.sigma, bound, 1.0, 1.0, loss_reduction="sum").replace(
            drawn_by=(origin, origin), unit="" if self.people is None else self.people.unit
        )
        return release({sums: sums}, spec, self.noise, self.charge).gradients[sums]


def class_counts(labels: Tensor, classes: int, noisy: NoisySums) -> list[float]:
    """Noisy counts of each class, of labels [N] or [N, K] one label after the other; every person counts 1 in all per label."""
    own = nn.functional.one_hot(labels.long(), classes).flatten(1)
    found: list[float] = noisy(own, math.sqrt(own.shape[1] / classes)).tolist()
    return found


def class_factors(probs: Tensor, counts: Sequence[float], noisy: NoisySums) -> tuple[float, ...]:
    """Factors of the probabilities, [N, C] or [N, K, C], that make their sums the ``counts``, which are public or noisy."""
    wanted = torch.tensor(counts, dtype=torch.float64).clamp_min(0.5).reshape(probs.shape[1:])
    factors = torch.ones_like(wanted)
    for _ in range(ROUNDS):
        scaled = probs.double() * factors
        each = (scaled / scaled.sum(-1, keepdim=True)).flatten(1)
        found = noisy(each, math.sqrt(each.shape[1] / probs.shape[-1])).reshape(wanted.shape)
        factors = factors * (wanted / found.clamp_min(0.5)).clamp(1 / _MOST, _MOST)
    return tuple((factors / factors.amax(-1, keepdim=True)).flatten().tolist())


def class_thresholds(probs: Tensor, labels: Tensor, coverage: float, noisy: NoisySums) -> tuple[float, ...]:
    """A threshold for each class, so that sets {k: p_k ≥ 1 − t_k} cover ``coverage`` of each class's examples."""
    a, beta = (1 - _MISSED) * (1 - coverage), _MISSED * (1 - coverage)
    bound = max(a, 1 - a)
    margin = -NormalDist().inv_cdf(-math.expm1(math.log1p(-beta) / HALVINGS)) * noisy.sigma * bound
    score = 1 - probs.double().gather(1, labels.unsqueeze(1)).squeeze(1)
    own = nn.functional.one_hot(labels, probs.shape[1])
    high, step = torch.ones(probs.shape[1], dtype=torch.float64), 1.0
    for _ in range(HALVINGS):
        step /= 2
        exceeds = (score > (high - step)[labels]).double() - a
        low_enough = noisy(own * exceeds.unsqueeze(1), bound) <= -(1 - a) - margin
        high = torch.where(low_enough, high - step, high)
    return tuple(high.tolist())
