"""Tier B, statistical: the path's own noise and its own batches, against what accounting assumes of them.

Every test is at about five standard deviations, so that one in a million fails by chance.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from scipy import stats
from torch import Tensor

from dpivon.audit.probes import wide_probe
from dpivon.audit.session import Observed, Setting, Subject, Tier, Verdict, start

COORDINATES = 100_000
EXAMPLES, RATE, STEPS = 400, 0.05, 1200
TIER_B = Tier("B")
_WIDTH = f"sees a noise multiplier wrong by {5 / math.sqrt(2 * COORDINATES):.1%} or more"
_CORRELATED = f"sees correlations above {5 / math.sqrt(COORDINATES // 2):.3f}"
_RATE = f"sees a rate wrong by {5 * math.sqrt((1 - RATE) / (RATE * EXAMPLES * STEPS)):.1%} or more"


def _noisy(subject: Subject) -> Subject:
    """The subject with a loss that has no gradient, or a wide network in its place where it has few parameters."""
    few = sum(p.numel() for p in subject.trained()) < COORDINATES // 4
    return wide_probe(subject) if few else subject.silent_loss()


def _setting(subject: Subject) -> Setting:
    return Setting(sigma=1.5, bound=0.5, size=len(subject.inputs), batch=float(len(subject.inputs)), lr=1e-6)


def _releases(subject: Subject, setting: Setting, least: int = 2) -> list[Tensor]:
    """Noise in units of σC, one vector a release, enough of them for the sharpness wanted."""
    session = start(subject, setting)
    out: list[Tensor] = []
    while len(out) < least or sum(len(noise) for noise in out) < COORDINATES:
        seen = session.step([0, 1])
        out.append(seen.released * (setting.batch / (setting.sigma * setting.bound)))
    return out


def _correlation(a: Tensor, b: Tensor) -> float:
    """In units of its standard deviation under independence."""
    pair = torch.stack([a.flatten().double(), b.flatten().double()])
    found = abs(float(torch.corrcoef(pair)[0, 1])) * math.sqrt(pair.shape[1])
    return math.inf if math.isnan(found) else found


@TIER_B.asks("Is the noise N(0, σ²C²)?", _WIDTH)
def the_noise_is_gaussian_of_the_stated_width(subject: Subject) -> Verdict:
    noisy = _noisy(subject)
    noise = torch.cat(_releases(noisy, _setting(noisy)))
    n = len(noise)
    spread = (float(noise.var(correction=0)) - 1) / math.sqrt(2 / n)
    shift = float(noise.mean()) * math.sqrt(n)
    p = float(stats.kstest(noise.numpy(), "norm").pvalue)
    others = [float(stats.kstest(noise.numpy(), stats.norm(scale=s).cdf).pvalue) for s in (2 / 3, 3 / 2)]
    distinct = len(noise.unique()) / n
    ok = abs(spread) < 5 and abs(shift) < 5 and p > 1e-6 and max(others) < 1e-12 and distinct > 0.98
    detail = f"n = {n}: variance {float(noise.var()):.4f} σ²C² ({spread:+.1f} sd), mean {shift:+.1f} sd, KS p = {p:.2g}"
    return ok, detail + (f", {distinct:.1%} distinct" if distinct <= 0.98 else "")


@TIER_B.asks("Is noise never used twice?", _CORRELATED)
def noise_is_independent_across_coordinates_parameters_and_steps(subject: Subject) -> Verdict:
    noisy = _noisy(subject)
    first, second = _releases(noisy, _setting(noisy))[:2]
    network = start(noisy, _setting(noisy)).network_as_trained()
    shapes = [p.numel() for p in network.parameters() if p.requires_grad]
    blocks = first.split(shapes)
    half = len(first) // 2
    pairs = [
        (first, second),
        (first[:half], first[half : 2 * half]),
        (first[:-1], first[1:]),
        (first[:-1:2], first[1::2]),
    ]
    pairs += [(a[: min(len(a), len(b))], b[: min(len(a), len(b))]) for a, b in pairwise(blocks)]
    worst = max(_correlation(a, b) for a, b in pairs if len(a) > 1000)
    return worst < 5, f"correlations at most {worst:.1f} sd"


@TIER_B.asks("Is privacy noise independent of θ?", _CORRELATED)
def privacy_noise_is_independent_of_posterior_noise(subject: Subject) -> Verdict:
    noisy = _noisy(subject)
    setting = _setting(noisy)
    session = start(noisy, setting)
    privacy, posterior = [], []
    for _ in range(2):
        mean = session.means()
        seen: Observed = session.step([0, 1])
        privacy.append(seen.released)
        if len(mean) != sum(t.numel() for t in seen.theta):
            return None, "the method trains another network than it was given"
        posterior.append(torch.cat([t.flatten().double() for t in seen.theta]) - mean)
    if float(posterior[0].abs().max()) == 0.0:
        return None, "the method takes gradients at its mean"
    worst = max(_correlation(a, b) for a in privacy for b in posterior)
    worst = max(worst, _correlation(*posterior))
    return worst < 5, f"correlations at most {worst:.1f} sd"


@TIER_B.asks("Do runs have noise and batches of their own?", _CORRELATED)
def two_runs_share_neither_noise_nor_batches(subject: Subject) -> Verdict:
    noisy = _noisy(subject)
    setting = _setting(noisy)
    if subject.stacked:
        session = start(noisy, setting.but(runs=2, ladder=True))
        mask = torch.zeros(2, len(noisy.inputs))
        mask[:, 0] = 1
        one, two = session.all_runs(mask)
    else:
        one, two = (start(noisy, setting.but(seed=seed)).step([0]).released for seed in (0, 1))
    unit = setting.sigma * setting.bound / setting.batch
    widths = [float(noise.std()) / unit for noise in (one, two)]
    stated = [1.0, 2.0 if subject.stacked else 1.0]
    off = max(abs(w / s - 1) for w, s in zip(widths, stated, strict=True))
    worst = _correlation(one, two)
    batches = [_inclusion(subject, seed, 200) for seed in (0, 1)]
    worst = max(worst, _correlation(*batches))
    allowed = 5 / math.sqrt(2 * len(one))
    return (
        worst < 5 and off < allowed,
        f"correlation {worst:.1f} sd; widths {widths[0]:.3f} and {widths[1]:.3f} of σ = {stated}",
    )


def _inclusion(subject: Subject, seed: int, steps: int) -> Tensor:
    """Who was in which batch, [steps, N], as drawn by the path; an example that came twice is a 2."""
    data = {
        "inputs": subject.inputs[:1].repeat(EXAMPLES, *[1] * (subject.inputs.dim() - 1)),
        "labels": subject.labels[:1].repeat(EXAMPLES),
    }
    setting = Setting(size=EXAMPLES, batch=EXAMPLES * RATE, seed=seed)
    out = torch.zeros(steps, EXAMPLES)
    for row, batch in zip(out, start(subject.but(**data), setting).sampled(steps), strict=True):
        if batch:
            row.index_add_(0, torch.tensor(batch), torch.ones(len(batch)))
    return out


@TIER_B.asks("Is every example drawn independently with probability q?", _RATE)
def batches_are_poisson_samples_at_the_charged_rate(subject: Subject) -> Verdict:
    included = _inclusion(subject, 0, STEPS)
    if float(included.max()) > 1:
        return False, "an example was twice in one batch"
    sizes, variance = included.sum(1), EXAMPLES * RATE * (1 - RATE)
    epoch = int(1 / RATE)
    unseen = (included.reshape(-1, epoch, EXAMPLES).sum(1) == 0).float()
    chance = (1 - RATE) ** epoch
    found = {
        "mean size": (float(sizes.mean()) - EXAMPLES * RATE) / math.sqrt(variance / STEPS),
        "its variance": (float(sizes.var()) / variance - 1) / math.sqrt(2 / STEPS),
        "examples unseen in an epoch": (float(unseen.mean()) - chance)
        / math.sqrt(chance * (1 - chance) / unseen.numel()),
        "an example's rate": float((included.mean(0) - RATE).abs().max()) / math.sqrt(RATE * (1 - RATE) / STEPS) - 1,
        "step to step": _correlation(included[:-1], included[1:]),
        "neighbour to neighbour": _correlation(included[:, :-1], included[:, 1:]),
        "even to odd": _correlation(included[:, ::2], included[:, 1::2]),
    }
    worst = max(found, key=lambda name: abs(found[name]))
    return abs(found[worst]) < 5, f"{STEPS} batches of {EXAMPLES} examples, worst: {worst}, {found[worst]:+.1f} sd"
