"""The library against a twin that is written as the paper writes Algorithms 1 and 2: one example, one parameter at a time.

Both see the same Poisson batches (drawn by the loader under test, empty ones included), the same θ-noise and the same
privacy noise. The twin knows nothing of hooks, foreach kernels, Gram norms or micro-batches.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from private_runs import without_rules
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon

N, B = 48, 3  # q = 1/16: an empty batch comes about once in 22
CLASSES = 3
EPS_NUM = 1e-6
SHORT = 40
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
THETA_SEED, PRIVACY_SEED, LOADER_SEED = 11, 12, 54

Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    model: str = "linear"
    dtype: torch.dtype = torch.float64
    clip: float = 0.4  # C; gradients here have norms of about 1
    sigma: float = 0.8
    decay: float = 1e-2
    lr: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    hess_init: float = 0.7
    ess: float = 30.0
    curvature: str = "gradsq-corrected"
    samples: int = 1
    augmentations: int = 1
    steps: int = 100


def make_model(run: Run) -> nn.Module:
    torch.manual_seed(0)
    if run.model == "linear":
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES, bias=False))
    else:
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, CLASSES),
        )
    return model.to(run.dtype)


def data(run: Run) -> TensorDataset:
    """Images (one for every augmentation), labels, and the index by which the twin finds them again."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, run.augmentations, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (N,), generator=generator)
    return TensorDataset(x.to(run.dtype), y, torch.arange(N))


class Stream:
    """One sequence of standard normals, in whichever shapes it is asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, like: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.rng.standard_normal(tuple(like.shape)))).to(like.dtype)


# ---- the twin


def example_gradient(model: nn.Module, theta: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """g_i = ∇_θ L(θ; x_i, y_i)."""
    theta = {name: t.clone().requires_grad_() for name, t in theta.items()}
    logits = torch.func.functional_call(model, theta, (x.unsqueeze(0),))
    return list(torch.autograd.grad(nn.functional.cross_entropy(logits, y.unsqueeze(0)), list(theta.values())))


def average(lists: list[list[Tensor]]) -> list[Tensor]:
    return [sum(parts[1:], start=parts[0]) / len(parts) for parts in zip(*lists, strict=True)]


def clip(g: list[Tensor], bound: float) -> list[Tensor]:
    """ḡ_i = g_i · min(1, C / (‖g_i‖₂ + ε_num)), the norm taken over all parameters together."""
    norm = sum(float(t.double().square().sum()) for t in g) ** 0.5
    return [t * min(1.0, bound / (norm + EPS_NUM)) for t in g]


@dataclass
class Trajectory:
    means: list[list[Tensor]]
    momenta: list[list[Tensor]]
    hessians: list[list[Tensor]]
    clipped: int = 0
    examples: int = 0


@functools.cache
def twin(run: Run, batches: Batches) -> Trajectory:
    """Algorithm 2, with Algorithm 1 inside."""
    model, dataset = make_model(run), data(run)
    names = [name for name, _ in model.named_parameters()]
    theta_noise, privacy_noise = Stream(THETA_SEED), Stream(PRIVACY_SEED)
    m = [p.detach().clone() for p in model.parameters()]
    h = [torch.full_like(p, run.hess_init) for p in m]
    s = [torch.zeros_like(p) for p in m]
    out = Trajectory([], [], [])
    for t, batch in enumerate(batches, start=1):
        # Algorithm 1: θ ~ N(m, σ_v²), once for every Monte Carlo sample
        variance = [1 / (run.ess * (h_j + run.decay)) for h_j in h]
        epsilons = [
            [theta_noise(m_j) * v_j.sqrt() for m_j, v_j in zip(m, variance, strict=True)] for _ in range(run.samples)
        ]
        thetas = [{name: m_j + e_j for name, m_j, e_j in zip(names, m, epsilon, strict=True)} for epsilon in epsilons]
        total = [torch.zeros_like(m_j) for m_j in m]
        for i in batch:
            views, y, _ = dataset[i]
            g = average([example_gradient(model, theta, x, y) for theta in thetas for x in views])
            clipped = clip(g, run.clip)
            out.examples += 1
            out.clipped += not torch.equal(g[0], clipped[0])
            for j in range(len(total)):
                total[j] = total[j] + clipped[j]
        for j in range(len(m)):
            g_dp = total[j] / B + (run.sigma * run.clip / B) * privacy_noise(total[j])
            if run.curvature == "gradsq-corrected":
                v_hat = torch.clamp(g_dp**2 - run.sigma**2 * run.clip**2 / B**2, min=0)
                h_hat = run.ess * v_hat
            elif run.curvature == "gradsq":
                h_hat = run.ess * g_dp**2
            else:  # IVON's own, with K·g_dp ⊙ mean_k(θ_k − m) for the average of which only g_dp is known
                deviation = sum((epsilon[j] for epsilon in epsilons[1:]), start=epsilons[0][j]) / run.samples
                h_hat = run.samples * g_dp * deviation / variance[j]
            # Algorithm 2
            h[j] = (
                run.beta2 * h[j]
                + (1 - run.beta2) * h_hat
                + (1 - run.beta2) ** 2 * (h[j] - h_hat) ** 2 / (2 * (h[j] + run.decay))
            )
            s[j] = run.beta1 * s[j] + (1 - run.beta1) * g_dp
            s_bar = s[j] / (1 - run.beta1**t)
            m[j] = m[j] - run.lr * (s_bar + run.decay * m[j]) / (h[j] + run.decay)
        for record, value in ((out.means, m), (out.momenta, s), (out.hessians, h)):
            record.append(list(value))
    return out


# ---- the library, with its noise replaced by the same streams


class StreamedIVON(dpivon.IVON):
    theta_noise: Stream

    def _standard_normal(self, like: Tensor) -> Tensor:
        return self.theta_noise(like)


class StreamedNoise:
    def __init__(self) -> None:
        self.stream = Stream(PRIVACY_SEED)

    def normal(self, like: Tensor, std: float) -> Tensor:
        return std * self.stream(like)


def loader_for(run: Run) -> DataLoader[Any]:
    return DataLoader(data(run), batch_size=B, generator=torch.Generator().manual_seed(LOADER_SEED))


def library(run: Run, mode: str = "bookkeeping", micro: int | None = None) -> tuple[Batches, Trajectory]:
    model = make_model(run)
    inner = StreamedIVON(
        model.parameters(),
        lr=run.lr,
        ess=run.ess,
        hess_init=run.hess_init,
        beta1=run.beta1,
        beta2=run.beta2,
        weight_decay=run.decay,
        mc_samples=run.samples,
        curvature=None if run.curvature == "gradsq-corrected" else run.curvature,
        rescale_lr=False,
    )
    inner.theta_noise = Stream(THETA_SEED)
    with without_rules() if mode == "alone" else nullcontext():
        private, optimizer, loader = dpivon.PrivacyEngine().make_private(
            module=model,
            optimizer=inner,
            data_loader=loader_for(run),
            noise_multiplier=run.sigma,
            max_grad_norm=run.clip,
            augmentations=run.augmentations,
        )
    criterion = nn.CrossEntropyLoss()
    optimizer.noise = StreamedNoise()
    params = list(model.parameters())
    out = Trajectory([], [], [])
    batches: list[tuple[int, ...]] = []
    pending: list[int] = []

    def one_batch(x: Tensor, y: Tensor, index: Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(run.samples):
            with optimizer.sampled_params(train=True):
                criterion(private(x.flatten(0, 1)), y.repeat_interleave(run.augmentations)).backward()
        optimizer.step()
        pending.extend(index.tolist())
        if optimizer._is_last_step_skipped:
            return
        batches.append(tuple(pending))
        pending.clear()
        out.means.append([p.detach().clone() for p in params])
        out.momenta.append([inner.state[p]["momentum"].clone() for p in params])
        out.hessians.append([inner.state[p]["hess"].clone() for p in params])

    while True:
        if micro is None:
            for batch in loader:
                one_batch(*batch)
                if len(batches) == run.steps:
                    return tuple(batches), out
        else:
            with dpivon.BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=micro, optimizer=optimizer
            ) as micro_batches:
                for batch in micro_batches:
                    one_batch(*batch)
                    if len(batches) == run.steps:
                        return tuple(batches), out


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    a, b = (torch.cat([t.detach().flatten() for t in ts]).double() for ts in (ours, theirs))
    return float((a - b).norm() / b.norm())


def assert_same(ours: Trajectory, theirs: Trajectory, tolerance: float) -> None:
    assert len(ours.means) == len(theirs.means)
    for what in ("means", "momenta", "hessians"):
        for t, (a, b) in enumerate(zip(getattr(ours, what), getattr(theirs, what), strict=True)):
            error = relative_error(a, b)
            assert error <= tolerance, f"{what} at step {t}: {error}"


def check_against_twin(run: Run, mode: str = "bookkeeping", micro: int | None = None) -> Trajectory:
    batches, ours = library(run, mode, micro)
    assert () in batches
    assert len({len(batch) for batch in batches}) > 3
    theirs = twin(run, batches)
    assert_same(ours, theirs, TOLERANCE[run.dtype])
    return theirs
