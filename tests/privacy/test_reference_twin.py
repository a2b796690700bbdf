"""The library against a twin that is written as the paper writes Algorithms 1 and 2: one example, one parameter at a time.

Both see the same Poisson batches (drawn by the loader under test, empty ones included), the same θ-noise and the same
privacy noise. The twin knows nothing of hooks, foreach kernels, Gram norms or micro-batches.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from opacus.optimizers import optimizer as opacus_optimizer
from private_runs import without_rules
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon

N, B = 48, 3  # q = 1/16: an empty batch comes about once in 22
CLASSES = 3
EPS_NUM = 1e-6
SHORT = 40
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
THETA_SEED, PRIVACY_SEED, LOADER_SEED = 11, 12, 53

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


ACTIVE = Run()
INACTIVE = Run(clip=1e3, sigma=1e-3, decay=0.0)  # σC stays of the size of a gradient
DTYPES = [torch.float32, torch.float64]
MODELS = ["linear", "conv"]
MODES = ["bookkeeping", "alone"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_where_clipping_is_active(model: str, mode: str, dtype: torch.dtype) -> None:
    theirs = check_against_twin(replace(ACTIVE, model=model, dtype=dtype), mode)
    assert theirs.clipped > 0.9 * theirs.examples


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_where_nothing_is_clipped(model: str, mode: str, dtype: torch.dtype) -> None:
    theirs = check_against_twin(replace(INACTIVE, model=model, dtype=dtype), mode)
    assert theirs.clipped == 0
    assert theirs.examples > 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_paper_for_other_dampings(model: str, decay: float, dtype: torch.dtype) -> None:
    check_against_twin(replace(ACTIVE, model=model, dtype=dtype, decay=decay))


def test_the_comparison_notices_a_missing_correction() -> None:
    run = replace(ACTIVE, steps=SHORT)
    batches, ours = library(run)
    assert_same(ours, twin(run, batches), 1e-10)
    with pytest.raises(AssertionError, match="at step 0"):
        assert_same(ours, twin(replace(run, curvature="gradsq"), batches), 1e-5)
    with pytest.raises(AssertionError, match="means at step 0"):
        assert_same(ours, twin(replace(run, clip=run.clip * 1.001), batches), 1e-5)


@pytest.mark.parametrize(
    ("mode", "curvature"),
    [
        ("alone", "gradsq-corrected"),
        ("alone", "gradsq"),
        ("alone", "reparam"),
        ("bookkeeping", "gradsq"),
        ("bookkeeping", "reparam"),
        ("bookkeeping", "gradsq-corrected"),
    ],
)
def test_several_theta_samples_are_averaged_per_example_before_clipping(mode: str, curvature: str) -> None:
    check_against_twin(replace(ACTIVE, model="conv", samples=3, curvature=curvature, steps=SHORT), mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_reparameterised_estimator_reads_the_released_gradient(mode: str) -> None:
    check_against_twin(replace(ACTIVE, curvature="reparam", steps=SHORT), mode)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_augmentations_are_averaged_per_example_before_clipping(mode: str, samples: int) -> None:
    check_against_twin(replace(ACTIVE, model="conv", augmentations=3, samples=samples, steps=SHORT), mode)


@pytest.mark.parametrize(
    ("mode", "samples", "micro"),
    [
        ("alone", 1, 1),
        ("alone", 3, 2),
        ("bookkeeping", 1, 1),
        ("bookkeeping", 1, 2),
        ("bookkeeping", 3, 2),
        ("bookkeeping", 3, 1),
    ],
)
def test_micro_batches_change_nothing(mode: str, samples: int, micro: int) -> None:
    run = replace(ACTIVE, model="conv", samples=samples, curvature="reparam", steps=SHORT)
    whole_batches, whole = library(run, mode)
    split_batches, split = library(run, mode, micro)
    assert whole_batches == split_batches
    assert max(map(len, whole_batches)) > 2 * micro
    assert_same(split, whole, 1e-11)
    assert_same(split, twin(run, split_batches), 1e-10)


# ---- ordinary optimizers, against Opacus itself


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus's own
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_at", [0.4, 1e3])
def test_ordinary_optimizers_equal_opacus_step_by_step(
    monkeypatch: pytest.MonkeyPatch, name: str, model_name: str, clip_at: float
) -> None:
    run = replace(ACTIVE, model=model_name, dtype=torch.float64, clip=clip_at, sigma=0.3 / clip_at)

    def private(engine: Any, **options: str) -> tuple[nn.Module, Any, Any]:
        model = make_model(run)
        return engine.make_private(
            module=model,
            optimizer=OPTIMIZERS[name](model.parameters()),
            data_loader=loader_for(run),
            noise_multiplier=run.sigma,
            max_grad_norm=run.clip,
            **options,
        )

    ours, our_optimizer, loader = private(dpivon.PrivacyEngine())
    our_optimizer.noise = StreamedNoise()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus on its own generator and on backward hooks
        theirs, their_optimizer, _ = private(opacus.PrivacyEngine(), grad_sample_mode="hooks")
    stream = Stream(PRIVACY_SEED)
    monkeypatch.setattr(opacus_optimizer, "_generate_noise", lambda std, reference, **_: std * stream(reference))
    steps = 0
    while steps < 20:
        for x, y, _ in loader:
            if len(y) == 0:
                continue  # Opacus is not asked to survive one here; the twin above is
            for model, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.flatten(0, 1)), y).backward()
                optimizer.step()
            assert relative_error(list(ours.parameters()), list(theirs.parameters())) <= 1e-10
            steps += 1
    start = list(make_model(run).parameters())
    assert relative_error(list(ours.parameters()), start) > 0.05  # it went somewhere
