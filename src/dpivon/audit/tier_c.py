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

import torch

from dpivon.audit.bounds import expected_bound, gaussian_epsilon, mu_lower_bound, noticed_deficit, one_run_epsilon
from dpivon.audit.probes import canary_probe
from dpivon.audit.session import Session, clipped, gradients, start
from dpivon.audit.subject import Setting, Subject, Tier, Verdict
from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import epsilon

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
