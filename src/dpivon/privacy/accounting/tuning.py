"""What choosing hyperparameters on the private data costs: the best of a *random* number of runs.

Train K times with hyperparameters drawn at random, keep the run that scores best on private data, and publish that one
alone. With K fixed the ε of the winner can grow with K; with K drawn at random and kept secret it stays near two or three
times that of a single run. Let one run satisfy (α, ρ(α))-RDP at all orders α. Then the whole search, the choice included,
satisfies (λ, ρ'(λ))-RDP with, for every λ̂ ≥ 1,

    ρ'(λ) = ρ(λ) + (1 + η)(1 − 1/λ̂) ρ(λ̂) + (1 + η) log(1/γ)/λ̂ + log E[K]/(λ − 1)

where K ≥ 1 is truncated negative binomial of shape η > −1 and parameter γ ∈ (0, 1),

    P[K = k] = (1 − γ)^k / (γ^−η − 1) · Π_{l<k} (l + η)/(l + 1),   (1 − γ)^k / (k log(1/γ)) at η = 0,

geometric at η = 1 and logarithmic at η = 0; and, where K ≥ 0 is Poisson of mean μ,

    ρ'(λ) = ρ(λ) + μ δ̂ + log μ/(λ − 1),   δ̂ being that of one run at ε̂ = log(1 + 1/(λ − 1))

(Papernot and Steinke, *Hyperparameter Tuning with Rényi Differential Privacy*, ICLR 2022, arXiv:2110.03620, theorems 2
and 6). We minimise over λ̂ on the accountant's orders and λ̂ = 1, and convert ρ' to (ε, δ) as for a single run.

What the theorems ask for, and no code can check: every run costs at most what is stated, with hyperparameters that do not
depend on the other runs' results (random search, or a public grid drawn from at random; not Bayesian optimisation); K comes
from :meth:`RandomRuns.draw` and is not published; nothing of the losing runs is published either, scores and plots included.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpivon.errors import bad, check_choice, check_number
from dpivon.privacy.accounting import rdp
from dpivon.privacy.accounting.accountant import check_delta, epsilon
from dpivon.privacy.accounting.budget import Budget, calibrated
from dpivon.privacy.accounting.history import Entry, History
from dpivon.privacy.accounting.rdp import Array, Orders, check_orders

LAWS = ("geometric", "logarithmic", "negative-binomial", "poisson")
_SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


@dataclass(frozen=True)
class RandomRuns:
    """How many times to train: K of mean ``mean``, from the law named; ``shape`` is η of the negative binomial."""

    mean: float
    law: str = "geometric"
    shape: float | None = None

    def __post_init__(self) -> None:
        check_choice("law", self.law, LAWS, "Name the law of the number of runs")
        mean = check_number("mean", self.mean, "Give the expected number of runs, 1 or more", at_least=1.0)
        if mean > 1e9:
            raise bad("mean", self.mean, "is more runs than can be made", "Give at most 1e9")
        fix = "Give shape=η only, and always, with law='negative-binomial'"
        if (self.shape is None) == (self.law == "negative-binomial"):
            raise bad("shape", self.shape, f"does not fit law={self.law!r}", fix)
        if self.shape is not None:
            # η at most 100: beyond, K is all but certain and the bound worse than publishing all runs
            shape = check_number("shape", self.shape, "Give η above −1, such as 0.5", above=-1.0, at_most=100.0)
            if _log_mean(-_FAR, shape) < math.log(mean):
                raise bad("shape", self.shape, f"is too near −1 for a mean of {mean:g}", "Raise it, or lower the mean")

    @property
    def eta(self) -> float:
        """η of the truncated negative binomial; NaN for the Poisson law, which has none."""
        return _SHAPES.get(self.law, math.nan) if self.shape is None else float(self.shape)

    @property
    def log_gamma(self) -> float:
        """log γ ≤ 0, by bisection on E[K] = η(1 − γ)/(γ(1 − γ^η)), which falls in γ; 0 if K is 1 for sure."""
        target, low, high = math.log(self.mean), -_FAR, 0.0
        if target == 0.0:
            return 0.0
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if _log_mean(middle, self.eta) > target else (low, middle)
        return low  # the side with the larger mean, which costs more

    def draw(self) -> int:
        """K, from the operating system's generator. Train so many times, publish the best, and never K."""
        u = (secrets.randbits(53) + 0.5) / 2.0**53
        if self.law == "poisson":
            from scipy.stats import poisson

            return int(poisson.ppf(u, self.mean))
        t = self.log_gamma
        if t == 0.0:
            return 1
        k, share, ratio = 1, _first_share(t, self.eta), -math.expm1(t)
        while u > share and share > 0.0:
            u -= share
            share *= ratio * (k + self.eta) / (k + 1)
            k += 1
        return k

    def __str__(self) -> str:
        named = f"{self.law} of shape {self.eta:g}" if self.shape is not None else self.law
        parameter = "" if self.law == "poisson" else f", γ = {math.exp(self.log_gamma):.4g}"
        return f"{named}, {self.mean:g} runs expected{parameter}"


_FAR = 700.0  # the smallest log γ is −700


def _log_mean(t: float, eta: float) -> float:
    """log E[K] at log γ = t."""
    if t == 0.0:
        return 0.0
    # (1 − γ)/γ times η/(1 − γ^η), which is 1/log(1/γ) at η = 0
    log_odds = math.log(-math.expm1(t)) - t
    if eta * -t > _FAR:
        return log_odds + math.log(eta)
    return log_odds + (-math.log(-t) if eta == 0 else math.log(eta / -math.expm1(eta * t)))


def _first_share(t: float, eta: float) -> float:
    """P[K = 1] = (1 − γ) η/(γ^−η − 1)."""
    if eta == 0:
        return -math.expm1(t) / -t
    return 0.0 if -eta * t > _FAR else -math.expm1(t) * eta / math.expm1(-eta * t)


def tuned_epsilon(history: History, delta: float, runs: RandomRuns, orders: Orders = "wide") -> float:
    """ε of a whole search of which the best run is published: an upper bound.

    Args:
        history: what the costliest single run releases, as for :func:`epsilon`.
        delta: δ.
        runs: the law of how many runs are made.
        orders: Rényi orders.
    """
    probability, alphas = check_delta(delta), check_orders(orders)
    rho = rdp.curve(history, alphas)
    return 0.0 if rho is None else rdp.convert(tuned_curve(rho, np.array(alphas), runs), alphas, probability)


def tuned_curve(rho: Array, alphas: Array, runs: RandomRuns) -> Array:
    """ρ' at the orders where ρ is given."""
    if runs.law == "poisson":
        return _poisson(rho, alphas, runs.mean)
    t, eta = runs.log_gamma, runs.eta
    # λ̂ = 1 needs no more than that ρ(1), the KL divergence, is finite: σ > 0, as any finite ρ says.
    choices = [-t if np.isfinite(rho).any() else math.inf, *((1 - 1 / alphas) * rho - t / alphas)]
    extra = (1 + eta) * np.nanmin(choices)
    cost: Array = rho + extra + max(_log_mean(t, eta), 0.0) / (alphas - 1)
    return cost


def _poisson(rho: Array, alphas: Array, mean: float) -> Array:
    allowed = np.log1p(1 / (alphas - 1))  # ε̂ for each λ
    with np.errstate(over="ignore"):
        # δ of one run at ε̂, from each order: the conversion of rdp.convert, solved for δ
        log_delta = (alphas - 1) * (rho - allowed[:, None] + np.log1p(-1 / alphas)) - np.log(alphas)
        delta = np.exp(np.minimum(np.nanmin(log_delta, axis=1), 0.0))
    cost: Array = rho + mean * delta + math.log(mean) / (alphas - 1)
    return cost


def tuned_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    runs: RandomRuns,
    orders: Orders = "wide",
) -> float:
    """The smallest σ, to one part in a thousand, with which a whole search stays within (``target_epsilon``, ``delta``).

    Each run makes ``steps`` steps at ``sample_rate``; ``runs`` and ``orders`` are those of :func:`tuned_epsilon`.
    """
    return calibrated(target_epsilon, sample_rate, steps, lambda row: tuned_epsilon([row], delta, runs, orders))


@dataclass(frozen=True)
class TuningCost:
    """One law of K: ε of the search with the plan's σ, and the σ the search needs for the target, if there is one.

    Without a law, ``runs`` is a fixed number, all of them published.
    """

    runs: RandomRuns | int
    epsilon: float
    noise_multiplier: float | None = None

    def __str__(self) -> str:
        needs = "" if self.noise_multiplier is None else f"; within the target at σ = {self.noise_multiplier:.6g}"
        if isinstance(self.runs, int):
            return f"ε = {self.epsilon:.4g} (rdp) if {self.runs} runs are made and all are published{needs}"
        return f"ε = {self.epsilon:.4g} (rdp) with tuning ({self.runs}){needs}"

    def as_dict(self) -> dict[str, Any]:
        costs = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        if isinstance(self.runs, int):
            return {"law": "fixed", "mean_runs": self.runs, "gamma": None} | costs
        gamma = None if self.runs.law == "poisson" else math.exp(self.runs.log_gamma)
        return {"law": self.runs.law, "mean_runs": self.runs.mean, "gamma": gamma} | costs


def tuning_costs(
    plan: Budget, mean: float, law: str | None = None, *, target_epsilon: float | None = None
) -> list[TuningCost]:
    """What a search of runs like ``plan`` costs: first if all are published, then by each law of K, or by the one named.

    Args:
        plan: one run, as :func:`~dpivon.privacy.accounting.budget` gives it.
        mean: how many runs are made on average.
        law: ``"geometric"``, ``"logarithmic"`` or ``"poisson"``; None for all three.
        target_epsilon: also find the σ with which the search stays within it.
    """
    laws: tuple[str, ...] = ("geometric", "logarithmic", "poisson")
    if law is not None:
        laws = (check_choice("law", law, laws, "Name the law of the number of runs"),)
    random = [RandomRuns(mean, name) for name in laws]

    def cost(runs: RandomRuns | int) -> TuningCost:
        def spent(row: Entry) -> float:
            return (
                epsilon([row], plan.delta, "rdp") if isinstance(runs, int) else tuned_epsilon([row], plan.delta, runs)
            )

        rate, steps = plan.sample_rate, plan.steps * (runs if isinstance(runs, int) else 1)
        needed = None if target_epsilon is None else calibrated(target_epsilon, rate, steps, spent)
        return TuningCost(runs, spent((plan.noise_multiplier, rate, steps)), needed)

    return [cost(math.ceil(mean)), *map(cost, random)]
