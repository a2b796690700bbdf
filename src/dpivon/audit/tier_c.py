"""Tier C, empirical: attackers with canaries, and the ε that their success proves.

*Single releases.* Canary j has the gradient C·e_j and is in a release by a fair coin, at q = 1; its score ⟨b·g_dp, e_j⟩/C is
N(0, σ²) or N(1, σ²), and the attacker guesses at ½. Canaries are orthogonal, so each is a neighbouring pair of its own.

*One training run.* Canaries are in the data set by a fair coin; the run is trained with its own batches and noise; the attacker
sees the final weights and guesses the canaries whose coordinates moved most and least.

Both bounds are statements about the claim: if (ε, δ) held, a bound above ε would come up with probability α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq

from dpivon.audit.probes import canary_probe
from dpivon.audit.session import Session, Setting, Subject, Tier, Verdict, clipped, gradients, start
from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import epsilon


def gaussian_delta(mu: float, eps: float) -> float:
    """δ(ε) of a Gaussian mechanism whose worlds are N(0, 1) and N(μ, 1): Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2)."""
    first = stats.norm.cdf(-eps / mu + mu / 2)
    return float(first - math.exp(eps + stats.norm.logcdf(-eps / mu - mu / 2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε of that mechanism at δ, exactly; 0 where δ allows any guess that good."""
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    top = 1.0
    while gaussian_delta(mu, top) > delta:
        top *= 2
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, top, xtol=1e-10))


def upper(errors: int, trials: int, alpha: float) -> float:
    """Clopper and Pearson's upper bound on a probability, at level α."""
    return 1.0 if errors >= trials else float(stats.beta.ppf(1 - alpha, errors + 1, trials - errors))


def mu_lower_bound(false_positives: int, negatives: int, misses: int, positives: int, alpha: float) -> float:
    """μ ≥ Φ⁻¹(1 − FPR↑) − Φ⁻¹(FNR↑) with confidence 1 − α (Nasr et al., 2023)."""
    fpr, fnr = upper(false_positives, negatives, alpha / 2), upper(misses, positives, alpha / 2)
    return float(stats.norm.ppf(1 - fpr) - stats.norm.ppf(fnr))


def expected_bound(sigma: float, trials: int, delta: float, alpha: float) -> float:
    """The bound that a correct engine is expected to get from so many guesses in either world."""
    errors = round(trials * stats.norm.cdf(-0.5 / sigma))
    return gaussian_epsilon(mu_lower_bound(errors, trials, errors, trials, alpha), delta)


def noticed_deficit(sigma: float, trials: int, claimed: float, delta: float, alpha: float) -> float:
    """The smallest factor by which noise may be too small so that the expected bound passes the claim."""
    factor = 1.0
    while factor < 64 and expected_bound(sigma / factor, trials, delta, alpha) <= claimed:
        factor *= 1.01
    return factor


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """The largest ε that so many correct guesses about canaries of one training run refute at level α.

    Each canary was in or out by a fair coin; the attacker guesses some of them. Under (ε, δ) the number of correct ones is
    dominated by a binomial with success e^ε/(1 + e^ε), up to a term in δ (Steinke, Nasr and Jagielski, *Privacy auditing
    with one (1) training run*, 2023, theorem 5.2).
    """

    def p_value(eps: float) -> float:
        success = 1 / (1 + math.exp(-eps))
        beta = float(stats.binom.sf(correct - 1, guesses, success))
        i = np.arange(1, correct + 1)
        slope = float((np.cumsum(stats.binom.pmf(correct - i, guesses, success)) / i).max(initial=0.0))
        return min(1.0, beta + slope * delta * 2 * canaries)

    if p_value(0.0) > alpha:
        return 0.0
    top = 1.0
    while p_value(top) < alpha and top < 64:
        top *= 2
    return float(brentq(lambda eps: p_value(eps) - alpha, 0.0, top, xtol=1e-4))


DELTA, ALPHA, ONE_RUN_ALPHA = 1e-5, 1e-6, 1e-2
CANARIES, GUESSES = 64, 20_000
NOTICED = 1.14  # tests hold it to noticed_deficit(1, GUESSES / 2, …)
_SINGLE = (
    f"at σ = 1 sees noise too small by {NOTICED}× or more; a bound above the claim is an error of the claim with confidence "
    f"1 − {ALPHA:g}; one below it proves nothing"
)
_WHOLE = "a smoke test of the whole: sees gross errors only (no noise, no clipping)"
TIER_C = Tier("C")
SIGMAS = (0.5, 0.7, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Audited:
    """A lower bound on ε beside what was claimed, at δ. ``claimed`` is the tightest of the library's accountants."""

    attack: str
    sigma: float
    guesses: int
    audited: float
    claimed: float
    expected: float  # of a correct engine
    notices: float = 1.0  # noise too small by this factor would be noticed

    @property
    def holds(self) -> bool:
        return self.audited <= self.claimed


def _claim(session: Session, releases: int | None) -> float:
    """What the run's own account says: of all its releases, or of one like them."""
    history = session.accountant().history
    if releases is not None:
        history = [(sigma, rate, min(steps, releases)) for sigma, rate, steps in history[:1]]
    if not history:
        return 0.0
    return min(epsilon(history, DELTA, name) for name in ("rdp", "pld"))


def single_releases(subject: Subject, sigma: float, guesses: int = GUESSES) -> Audited:
    """``guesses`` in all about canaries that are, or are not, in single releases."""
    subject = canary_probe(subject, CANARIES)
    setting = Setting(sigma=sigma, bound=1.0, size=CANARIES, batch=float(CANARIES), lr=1e-6)
    session = start(subject, setting)
    coins = torch.Generator().manual_seed(7)
    counts = torch.zeros(4, dtype=torch.int64)  # false positives, negatives, misses, positives
    for _ in range(math.ceil(guesses / CANARIES)):
        inside = torch.rand(CANARIES, generator=coins) < 0.5
        seen = session.step(inside.nonzero().flatten().tolist())
        said = seen.released * (setting.batch / setting.bound) > 0.5
        counts += torch.stack([(said & ~inside).sum(), (~inside).sum(), (~said & inside).sum(), inside.sum()])
    return _audited("single releases", session, guesses, tuple(counts.tolist()))


def own_model(subject: Subject, sigma: float, guesses: int) -> Audited:
    """The same with the subject's own network: its first example is the canary, by the gradient that it has at each θ."""
    setting = Setting(sigma=sigma, bound=0.01, size=len(subject.inputs), batch=float(len(subject.inputs)), lr=1e-6)
    session = start(subject, setting)
    coins = torch.Generator().manual_seed(7)
    counts = [0, 0, 0, 0]
    for _ in range(guesses):
        inside = bool(torch.rand((), generator=coins) < 0.5)
        seen = session.step([0] if inside else [])
        own = gradients(subject, seen.theta, [0])
        u = clipped(own, setting.bound)[0] / setting.bound
        score = float(seen.released @ u) * setting.batch / setting.bound / float(u.norm())
        said = score > 0.5 * float(u.norm())
        counts[1 + 2 * inside] += 1
        counts[2 * inside] += said != inside
    return _audited("own model", session, guesses, (counts[0], counts[1], counts[2], counts[3]))


def _audited(attack: str, session: Session, guesses: int, counts: tuple[int, int, int, int]) -> Audited:
    """The bound that follows from (false positives, negatives, misses, positives)."""
    sigma, each, claimed = session.setting.sigma, guesses // 2, _claim(session, 1)
    bound = gaussian_epsilon(mu_lower_bound(*counts, alpha=ALPHA), DELTA)
    expected = expected_bound(sigma, each, DELTA, ALPHA)
    return Audited(
        attack, sigma, guesses, bound, claimed, expected, noticed_deficit(sigma, each, claimed, DELTA, ALPHA)
    )


def one_run(subject: Subject, sigma: float, canaries: int = 1000, steps: int = 12, rate: float = 0.5) -> Audited:
    """A whole training run of dp-sgd, its own sampling and accounting included, attacked through its final weights."""
    probe = canary_probe(subject.but(method="dp-sgd"), canaries)
    inside = torch.rand(canaries, generator=torch.Generator().manual_seed(3)) < 0.5
    kept = inside.nonzero().flatten()
    subject = probe.but(inputs=probe.inputs[kept], labels=probe.labels[kept])
    setting = Setting(sigma=sigma, bound=1.0, size=canaries, batch=rate * canaries, lr=1.0)
    session = start(subject, setting)
    before = session.means()
    session.train(steps)
    score = before - session.means()  # a canary in the data pulls its own coordinate down
    guesses = canaries // 5
    order = score.argsort(descending=True)
    correct = int(inside[order[: guesses // 2]].sum()) + int((~inside[order[-(guesses // 2) :]]).sum())
    audited = one_run_epsilon(canaries, 2 * (guesses // 2), correct, DELTA, ONE_RUN_ALPHA)
    return Audited("one training run", sigma, guesses, audited, _claim(session, None), float("nan"))


def _verdict(found: Audited) -> Verdict:
    text = f"audited ε ≥ {found.audited:.2f}, claimed {found.claimed:.2f} (σ = {found.sigma:g}, {found.guesses} guesses"
    text += f"; a correct engine gives {found.expected:.2f})" if not math.isnan(found.expected) else ")"
    weak = found.audited < 0.5 * found.expected
    return found.holds and not weak, text + (
        "; far below what a correct engine gives: the canaries are lost" if weak else ""
    )


def plain(subject: Subject) -> bool:
    """Whether the method trains the canaries' network as it is, so that a canary's gradient is known."""
    setting = Setting(size=CANARIES, batch=float(CANARIES))
    try:
        return len(start(canary_probe(subject, CANARIES), setting).means()) == CANARIES
    except ArgumentError:  # as dropout does, which needs a hidden layer
        return False


@TIER_C.asks("Does an attacker learn no more than ε allows?", _SINGLE)
def canaries_in_single_releases(subject: Subject) -> Verdict:
    if not plain(subject):
        return None, "the method does not train the canaries' network as it is, so that their gradients are not known"
    return _verdict(single_releases(subject, 1.0))


@TIER_C.asks("Does one who sees a whole run's result?", _WHOLE)
def canaries_in_one_training_run(subject: Subject) -> Verdict:
    return _verdict(one_run(subject, 1.0))
