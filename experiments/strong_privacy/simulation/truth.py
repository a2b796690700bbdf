"""Part one: every estimator against the truth, at one point of a softmax regression."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import nn

import experiments.strong_privacy  # noqa: F401  registers the estimators of the ablations
from dpivon.optim.curvature import ESTIMATORS, Evidence, estimate, memory_of, remembered
from experiments.strong_privacy.simulation import BATCH, BOUND, RHO, noise


class Regression:
    """Softmax regression on the digits: K sets of weights [K, 10, 65], the bias last, and their clipped examples."""

    def __init__(self, x, y):
        self.x = torch.cat([x.flatten(1), torch.ones(len(x), 1)], 1)
        self.y = nn.functional.one_hot(y, 10).float()
        self.length = self.x.norm(dim=1)

    def residuals(self, weights):
        """(p − y) of every example, scaled so that its gradient has norm at most C: [K, N, 10]."""
        r = (self.x @ weights.mT).softmax(-1) - self.y
        return r * (BOUND / (r.norm(dim=-1) * self.length)).clamp(max=1.0).unsqueeze(-1)

    def gradient(self, residuals, mask):
        """Σ over the drawn examples / b: [K, 10, 65]."""
        return (residuals * mask.unsqueeze(-1)).mT @ self.x / BATCH

    def hessian(self, weights):
        """The diagonal of the (unclipped) mean Hessian, which is the expected Fisher: [10, 65]."""
        p = (self.x @ weights.mT).softmax(-1)
        return (p * (1 - p)).mT @ self.x.square() / len(self.x)


def ranks(v):
    """Ranks, ties sharing theirs."""
    _, inverse, counts = torch.unique(v, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[inverse]


def spearman(a, b):
    stacked = torch.stack([ranks(a), ranks(b)])
    r = float(torch.corrcoef(stacked)[0, 1])
    return 0.0 if math.isnan(r) else r


def held_weights(model, steps=60):
    """Where gradient descent on clipped gradients is after some steps: neither at the start nor at the optimum."""
    weights = torch.zeros(1, 10, 65)
    everyone = torch.ones(1, len(model.x))
    for _ in range(steps):
        weights = weights - 2.0 * model.gradient(model.residuals(weights), everyone) * BATCH / len(model.x)
    return weights


def against_truth(digits, epsilon, steps=200, replicates=24):
    """Bias, spread, errors and rank correlations of every estimator after so many releases at one point."""
    model, n = Regression(digits.train.x, digits.train.y), len(digits.train)
    q, sigma = BATCH / n, noise(n, epsilon)
    s2 = (sigma * BOUND / BATCH) ** 2
    weights = held_weights(model)
    clipped = model.residuals(weights)
    mean = (model.gradient(clipped, torch.ones(1, n)) * (BATCH / n))[0]
    fisher = (clipped[0].square().mT @ model.x.square()) / n
    v = mean.square() + (1 - q) * fisher / BATCH
    hessian = model.hessian(weights[0])
    generator = torch.Generator().manual_seed(int(1000 * epsilon))
    ess, h = float(n), 1.0
    memory = {name: {m: torch.zeros(replicates, 650) for m in memory_of(e)} for name, e in ESTIMATORS.items()}
    plain = {name: torch.zeros(replicates, 650) for name, e in ESTIMATORS.items() if not memory_of(e)}
    found = {}
    for t in range(1, steps + 1):
        mask = (torch.rand(replicates, n, generator=generator) < q).float()
        eta = math.sqrt(s2) * torch.randn(replicates, 10, 65, generator=generator)
        shift = torch.randn(replicates, 10, 65, generator=generator) / math.sqrt(ess * h)
        g = model.gradient(clipped, mask) + eta
        sampled = model.gradient(model.residuals(weights + shift), mask) + eta
        for name, estimator in ESTIMATORS.items():
            if name.endswith("-fisher"):
                continue  # the same estimate in another unit
            own = (sampled if estimator.needs_sample else g).flatten(1)
            evidence = Evidence(
                g=own,
                g_squared=own.square(),
                g_perturbation=own * shift.flatten(1),
                noise_variance=torch.full((replicates, 1), s2),
                hess=torch.full_like(own, h),
                ess=torch.full((replicates, 1), ess),
                weight_decay=torch.zeros(replicates, 1),
                t=torch.tensor(t),
                decay=torch.full((replicates, 1), RHO),
                memory=memory[name],
            )
            evidence = remembered(estimator, evidence)
            memory[name] = evidence.memory
            if name in plain:  # estimators without memory leave the averaging to IVON's recursion
                now = estimate(estimator, evidence, ((10, 65),))
                plain[name] = plain[name] * RHO + now * (1 - RHO)
                found[name] = plain[name] / (1 - RHO**t)
            elif t == steps:
                found[name] = estimate(estimator, evidence, ((10, 65),))
    rows = {}
    alive = hessian.flatten() > 0  # a pixel that is blank in every digit has neither gradient nor curvature
    for name, value in found.items():
        price = ESTIMATORS[name].needs_sample
        target = (hessian if price else v).flatten()
        got = value if price else value / ess
        error = got - target
        scale = float(target.mean())
        rows[name] = {
            "target": "diagonal Hessian" if price else "v",
            "bias": float(error.mean()) / scale,
            "bias on blank pixels": float(error[:, ~alive].mean()) / scale,
            "std": float(got.std(0).mean()) / scale,
            "rmse": float(error.square().mean().sqrt()) / scale,
            "rmse, squared mean": float((got - mean.square().flatten()).square().mean().sqrt())
            / float(mean.square().mean()),
            "rank, squared mean": fmean(spearman(row, mean.square().flatten()) for row in got),
            "rank, Fisher": fmean(spearman(row, fisher.flatten()) for row in got),
            "rank, Hessian": fmean(spearman(row, hessian.flatten()) for row in got),
        }
    facts = {
        "noise_multiplier": sigma,
        "noise variance over mean v": s2 / float(v.mean()),
        "share of v that is sampling": float(((1 - q) * fisher / BATCH).mean() / v.mean()),
        "rank of v with the Fisher": spearman(v.flatten(), fisher.flatten()),
    }
    return facts, rows
