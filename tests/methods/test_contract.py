"""What every method must do, whatever it optimises. A new method is covered by being registered."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from method_trials import (
    BATCH,
    CLASSES,
    FEATURES,
    SIGMA,
    FrozenReleases,
    N,
    Trial,
    data,
    finite,
    flat,
    network,
    same,
    start,
    with_frozen_releases,
)
from torch import Tensor, nn

import dpivon
from dpivon import BatchMemoryManager, PrivacyError
from dpivon.methods import METHODS

pytestmark = pytest.mark.parametrize("name", METHODS)


# ---- privacy


@pytest.mark.parametrize("ema", [None, 0.9])
def test_with_releases_frozen_other_data_leave_everything_bit_equal(
    name: str, ema: float | None, monkeypatch: Any
) -> None:
    ours, theirs = start(name, ema=ema), start(name, ema=ema)
    first = with_frozen_releases(ours, data(seed=0), monkeypatch)
    other = with_frozen_releases(theirs, tuple(t[:11] for t in data(seed=50)), monkeypatch)
    assert not torch.equal(first, other)  # the data did differ, and reached the boundary
    assert same(ours, theirs)
    a, b = ours.learner.posterior(), theirs.learner.posterior()
    assert all(torch.equal(a.mean[key], b.mean[key]) for key in a.mean)
    assert all(torch.equal(a.variance[key], b.variance[key]) for key in a.mean)


def test_raw_gradients_are_refused(name: str) -> None:
    trial = start(name)
    next(iter(trial.loader))
    trial.pass_over(*data())
    for p in trial.learner.model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in trial.learner.model.parameters()]
    with pytest.raises(PrivacyError):
        trial.learner.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, trial.learner.model.parameters(), strict=True))


def test_every_step_is_one_charge_of_the_same_release(name: str) -> None:
    trial = start(name)
    for x, y in trial.loader:
        trial.optimizer.zero_grad()
        trial.pass_over(x, y)
        trial.optimizer.step()
    steps = math.ceil(N / BATCH)
    planned = dpivon.budget(dataset_size=N, batch_size=BATCH, steps=steps, delta=1e-3, noise_multiplier=SIGMA)
    assert trial.engine.get_epsilon(1e-3) == pytest.approx(planned.epsilon, rel=1e-12)
    assert trial.optimizer.last_release.variance == pytest.approx((SIGMA / BATCH) ** 2)


def test_an_example_never_contributes_more_than_the_bound(name: str, monkeypatch: Any) -> None:
    """Taking one example out (by making it NaN, which counts for nothing) moves the clipped sum by at most C.

    The batch keeps its shape, so a random forward pass draws the same numbers both times.
    """
    x, y = data()
    x, without = 100 * x, 100 * x
    without[-1] = float("nan")
    sums = []
    for batch in (x, without):
        trial, frozen = start(name), FrozenReleases()
        monkeypatch.setattr("dpivon.privacy.mechanism.release", frozen)
        torch.manual_seed(5)
        trial.step(batch, y)
        sums.append(frozen.sums[0])
    moved = float((sums[1] - sums[0]).norm())
    assert 0.9 < moved <= 1.0 + 1e-6  # features of size 100: it is clipped, and to the full bound


# ---- training


def test_resume_is_exact(name: str) -> None:
    def go_on(trial: Trial) -> None:
        torch.manual_seed(11)  # masks and sampled layers draw from the global generator
        for seed in range(3):
            trial.step(*data(seed=seed, n=BATCH))

    first = start(name, ema=0.8)
    go_on(first)
    saved = copy.deepcopy((first.learner.model.state_dict(), first.optimizer.state_dict()))
    generators = first.theta.get_state(), first.noise.get_state()
    go_on(first)
    second = start(name, ema=0.8)
    second.learner.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    second.theta.set_state(generators[0])
    second.noise.set_state(generators[1])
    go_on(second)
    assert same(first, second)
    x = data()[0]
    predictions = [t.learner.predict(x, generator=torch.Generator().manual_seed(0)).probs for t in (first, second)]
    assert torch.equal(*predictions)


@pytest.mark.campaign(keep=6)
def test_state_follows_the_model_to_another_dtype(name: str) -> None:
    trial = start(name)
    trial.step(*data(n=BATCH))
    trial.learner.model.double()
    x, y = data(seed=1, n=BATCH)
    trial.step(x.double(), y)
    assert all(p.dtype == torch.float64 for p in trial.learner.model.parameters())
    state = trial.learner.optimizer.state
    assert all(
        t.dtype == torch.float64 for s in state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()
    )
    assert trial.learner.predict(x.double()).probs.dtype == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_follows_the_model_to_another_device(name: str) -> None:
    trial = start(name)
    trial.step(*data(n=BATCH))
    trial.learner.model.cuda()
    trial.theta = trial.learner.optimizer.generator = torch.Generator("cuda").manual_seed(0)
    x, y = data(seed=1, n=BATCH)
    trial.step(x.cuda(), y.cuda())
    state = trial.learner.optimizer.state
    assert all(t.is_cuda for s in state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
    assert trial.learner.predict(x.cuda()).probs.is_cuda
    assert finite(trial)


def test_frozen_parameters_are_left_alone(name: str) -> None:
    model = network()
    for p in model[0].parameters():
        p.requires_grad_(False)
    trial = start(name, model=model)
    frozen = {key: p.detach().clone() for key, p in trial.learner.model.named_parameters() if not p.requires_grad}
    trained = {key: p.detach().clone() for key, p in trial.learner.model.named_parameters() if p.requires_grad}
    assert frozen
    assert trained
    for seed in range(3):
        trial.step(*data(seed=seed, n=BATCH))
    now = dict(trial.learner.model.named_parameters())
    assert all(torch.equal(value, now[key]) for key, value in frozen.items())
    assert all(not torch.equal(value, now[key]) for key, value in trained.items())
    assert not set(frozen) & set(trial.learner.posterior().mean)
    assert trial.learner.predict(data()[0]).probs.shape == (N, CLASSES)


@pytest.mark.campaign(keep=9)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_precision_is_trained_in_full(name: str, dtype: torch.dtype) -> None:
    trial = start(name, dtype=dtype)
    for seed in range(2):
        trial.step(*data(seed=seed, n=BATCH, dtype=dtype))
    assert finite(trial)
    assert all(p.dtype == dtype for p in trial.learner.model.parameters())
    full = torch.float32 if dtype == torch.bfloat16 else dtype
    assert all(m.dtype == full for m in trial.learner.posterior().mean.values())
    state = trial.learner.optimizer.state
    assert all(t.dtype == full for s in state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())


@pytest.mark.campaign(keep=6)
def test_a_closure_is_the_loop(name: str) -> None:
    loop, closed = start(name), start(name)
    for seed in range(3):
        x, y = data(seed=seed, n=BATCH)
        torch.manual_seed(seed)
        loop.step(x, y)
        torch.manual_seed(seed)
        next(iter(closed.loader))
        closed.optimizer.zero_grad()
        loss = closed.optimizer.step(lambda x=x, y=y: _backward(closed, x, y))
        assert math.isfinite(loss.item())
    assert same(loop, closed)


def _backward(trial: Trial, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(trial.model(x), y)
    loss.backward()
    return loss


@pytest.mark.campaign(keep=6)
def test_virtual_batches_are_one_release_each(name: str) -> None:
    whole, split = start(name), start(name)
    for _ in range(2):
        for x, y in whole.loader:
            whole.optimizer.zero_grad()
            whole.pass_over(x, y)
            whole.optimizer.step()
    with BatchMemoryManager(data_loader=split.loader, max_physical_batch_size=3, optimizer=split.optimizer) as batches:
        for _ in range(2):
            for x, y in batches:
                assert len(x) <= 3
                split.optimizer.zero_grad()
                split.pass_over(x, y)
                split.optimizer.step()
    assert split.engine.accountant.history == whole.engine.accountant.history
    steps = [s["step"] for s in split.learner.optimizer.state.values()]
    assert set(steps) == {2 * math.ceil(N / BATCH)}
    if not whole.random_forward:
        for a, b in zip(whole.learner.model.parameters(), split.learner.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_is_noise_and_a_charge(name: str) -> None:
    trial = start(name)
    before = [p.detach().clone() for p in trial.optimizer.params]
    trial.step(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.long))
    assert len(trial.engine.accountant) == 1
    assert finite(trial)
    assert all(not torch.equal(a, b) for a, b in zip(before, trial.optimizer.params, strict=True))
    noise = torch.cat([g.flatten() for g in trial.optimizer.last_release.gradients.values()])
    assert float(noise.std()) == pytest.approx(SIGMA / BATCH, rel=0.4)


def test_an_example_that_is_not_finite_counts_for_nothing(name: str, monkeypatch: Any) -> None:
    x, y = data()
    poisoned = x.clone()
    poisoned[3] = float("nan")
    keep = torch.arange(N) != 3
    sums = []
    for batch in ((poisoned, y), (x[keep], y[keep])):
        trial, frozen = start(name), FrozenReleases()
        with monkeypatch.context() as patch:
            patch.setattr("dpivon.privacy.mechanism.release", frozen)
            trial.step(*batch)
        assert bool(torch.isfinite(frozen.sums[0]).all())
        assert finite(trial)
        sums.append(frozen.sums[0])
    if not trial.random_forward:
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-6)


# ---- what comes out


def trained(name: str, **options: Any) -> Trial:
    trial = start(name, **options)
    for seed in range(6):
        trial.step(*data(seed=seed, n=BATCH))
    return trial


@pytest.mark.campaign(keep=6)
def test_predictions_are_distributions(name: str) -> None:
    trial = trained(name)
    x = data()[0]
    before = [t.clone() for t in trial.tensors()]
    prediction = trial.learner.predict(x, generator=torch.Generator().manual_seed(1))
    assert prediction.probs.shape == (N, CLASSES)
    assert bool((prediction.probs >= 0).all())
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(N))
    assert bool((prediction.entropy <= math.log(CLASSES) + 1e-6).all())
    assert bool((prediction.mutual_information >= 0).all())
    again = trial.learner.predict(x, generator=torch.Generator().manual_seed(1))
    assert torch.equal(prediction.probs, again.probs)
    assert all(torch.equal(a, b) for a, b in zip(before, trial.tensors(), strict=True))  # nothing was disturbed


def test_a_posterior_has_width_exactly_where_the_method_says_so(name: str) -> None:
    """Draws disagree where several are averaged; a point estimate is sure of itself."""
    trial = trained(name)
    prediction = trial.learner.predict(data()[0], generator=torch.Generator().manual_seed(1))
    assert bool((prediction.mutual_information > 1e-9).any()) == (METHODS[name].samples > 0)


@pytest.mark.campaign(keep=6)
def test_the_posterior_survives_a_file(name: str, tmp_path: Path) -> None:
    trial = trained(name, ema=0.8)
    for learner in (trial.learner, trained(name).learner):
        q = learner.posterior()
        q.save(tmp_path / "q.safetensors")
        loaded = type(q).load(tmp_path / "q.safetensors")
        assert loaded.metadata == q.metadata
        x = data()[0]
        probs = [
            learner.method.predict(learner.model, each, x, 8, generator=torch.Generator().manual_seed(2)).probs
            for each in (q, loaded)
        ]
        assert torch.equal(*probs)


def test_the_average_is_the_closed_form_of_the_iterates(name: str) -> None:
    trial, iterates = start(name, ema=0.6), []
    for seed in range(5):
        trial.step(*data(seed=seed, n=BATCH))
        iterates.append([p.detach().clone() for p in trial.optimizer.params])
    weights = [0.6 ** (4 - k) for k in range(5)]
    assert trial.learner.average is not None
    for i, p in enumerate(trial.optimizer.params):
        expected = sum(w * m[i] for w, m in zip(weights, iterates, strict=True)) / sum(weights)
        torch.testing.assert_close(trial.learner.average.average(p), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.campaign(keep=6)
def test_the_same_seed_gives_the_same_run_and_another_does_not(name: str) -> None:
    def run(seed: int) -> Trial:
        torch.manual_seed(seed)
        trial = start(name, seed=10 * seed)
        torch.manual_seed(seed)
        for batch in range(3):
            trial.step(*data(seed=batch, n=BATCH))
        return trial

    assert same(run(1), run(1))
    assert not same(run(1), run(2))


@pytest.mark.campaign(keep=6)
def test_state_is_plain_data(name: str, tmp_path: Path) -> None:
    """Tensors, numbers and strings: loadable without executing anything."""
    trial = trained(name, ema=0.8)
    torch.save(trial.optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(flat(loaded), flat(trial.optimizer.state_dict()), strict=True))
