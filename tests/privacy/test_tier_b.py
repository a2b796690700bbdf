"""Statistics of the noise and of the sampling, against what accounting assumes of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from private_runs import Run, data, ivon, make, sgd
from scipy import stats
from torch import Tensor, nn

import dpivon
from dpivon import PrivacyError
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.sampling import PoissonSampler

C, SIGMA = 0.5, 1.5
WIDTH = 240  # two layers of 57,600 coordinates each
N = 2 * WIDTH * WIDTH


class Nothing(nn.Module):
    """A loss without a gradient, so that the release is all noise."""

    reduction = "sum"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        each = 0.0 * output.sum(dim=1)
        return each if self.reduction == "none" else each.sum()


def noise_run(mode: str, **options: Any) -> Run:
    x, y = torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.long)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    return make(
        mode,
        module=net,
        data=(x, y),
        criterion=Nothing(),
        loss_reduction="sum",
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        capture=False,
        **options,
    )


def released(run: Run) -> list[Tensor]:
    """One release: by parameter, the noise in it."""
    x, y = next(iter(run.loader))
    run.step(x, y)
    return [p.grad.flatten().double() for p in run.optimizer.params]


def correlation(a: Tensor, b: Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1]))


@pytest.mark.parametrize("secure_mode", [False, True])
def test_noise_is_gaussian_with_the_accounted_standard_deviation(mode, secure_mode):
    noise = torch.cat(released(noise_run(mode, optimizer=sgd, secure_mode=secure_mode)))
    assert len(noise) == N
    standard = noise / (SIGMA * C)
    assert abs(float(standard.var(correction=0)) - 1) < 5 * math.sqrt(2 / N)
    assert abs(float(standard.mean())) < 5 / math.sqrt(N)
    assert stats.kstest(standard.numpy(), "norm").pvalue > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(standard.numpy(), stats.norm(scale=wrong).cdf).pvalue < 1e-12
    assert float(standard.abs().max()) > 3.5  # the tails are there
    assert len(standard.unique()) > 0.99 * N


@pytest.mark.parametrize("secure_mode", [False, True])
def test_noise_is_independent_across_coordinates_parameters_and_steps(secure_mode):
    run = noise_run("bookkeeping", optimizer=sgd, secure_mode=secure_mode)
    first, second = released(run), released(run)
    half = len(first[0]) // 2
    pairs = [(first[0], first[1]), (first[0], second[0]), (first[0], second[1]), (first[1], second[1])]
    pairs += [(first[0][:half], first[0][half:]), (first[0][:-1], first[0][1:]), (first[0][::2], first[0][1::2])]
    for a, b in pairs:
        assert correlation(a, b) < 5 / math.sqrt(len(a))


def test_privacy_noise_is_independent_of_the_posterior_noise(mode):
    run = noise_run(mode, optimizer=ivon(ess=10.0, lr=0.0))
    mean = [p.detach().clone() for p in run.optimizer.params]
    privacy, posterior = [], []
    for _ in range(2):
        x, y = next(iter(run.loader))
        run.optimizer.zero_grad()
        with run.optimizer.sampled_params(train=True):
            posterior.append(
                torch.cat([(p.detach() - m).flatten() for p, m in zip(run.optimizer.params, mean, strict=True)])
            )
            run.backward(x, y)
        run.optimizer.step()
        privacy.append(torch.cat([p.grad.flatten() for p in run.optimizer.params]))
    assert float(posterior[0].std()) > 0.1
    for a in privacy:
        for b in posterior:
            assert correlation(a, b) < 5 / math.sqrt(N)
    assert correlation(posterior[0], posterior[1]) < 5 / math.sqrt(N)


def test_secure_noise_ignores_the_seed():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(released(noise_run("bookkeeping", optimizer=sgd, secure_mode=True))[0])
    assert correlation(*drawn) < 5 / math.sqrt(len(drawn[0]))
    assert not torch.equal(*drawn)


def test_a_noise_generator_is_the_only_source_of_noise():
    drawn = []
    for seed in (1, 1, 2):
        run = noise_run("bookkeeping", optimizer=sgd, noise_generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(int(torch.randint(10**6, ())))
        drawn.append(released(run)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert correlation(drawn[0], drawn[2]) < 5 / math.sqrt(len(drawn[0]))


# ---- sampling

DATASET, Q, STEPS = 1000, 0.02, 4000


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "secure"])
def inclusion(request: pytest.FixtureRequest) -> Tensor:
    """Which example was in which batch, from the sampler that the engine puts into the loader."""
    x, y = data(DATASET)
    run = make(data=(x, y), batch_size=int(DATASET * Q), secure_mode=request.param)
    sampler = run.loader.batch_sampler
    assert isinstance(sampler, PoissonSampler)
    assert sampler.sample_rate == Q
    sampler.steps = STEPS
    included = torch.zeros(STEPS, DATASET)
    for t, indices in enumerate(sampler):
        included[t, indices] = 1.0
        assert len(set(indices)) == len(indices)
    return included


def test_batch_sizes_have_the_variance_of_independent_draws(inclusion):
    sizes = inclusion.sum(1)
    variance = DATASET * Q * (1 - Q)
    assert abs(float(sizes.mean()) - DATASET * Q) < 5 * math.sqrt(variance / STEPS)
    assert abs(float(sizes.var()) / variance - 1) < 5 * math.sqrt(2 / STEPS)


def test_an_example_is_unseen_in_an_epoch_as_often_as_chance_has_it(inclusion):
    epoch = int(1 / Q)
    unseen = (inclusion.reshape(STEPS // epoch, epoch, DATASET).sum(1) == 0).float()
    expected = (1 - Q) ** epoch
    assert expected == pytest.approx(0.364, abs=1e-3)
    assert abs(float(unseen.mean()) - expected) < 5 * math.sqrt(expected * (1 - expected) / unseen.numel())


def test_inclusion_is_independent_across_steps_and_examples(inclusion):
    for a, b in (
        (inclusion[:-1], inclusion[1:]),
        (inclusion[:-50], inclusion[50:]),
        (inclusion[:, :-1], inclusion[:, 1:]),
    ):
        assert correlation(a, b) < 5 / math.sqrt(a.numel())


def test_every_example_is_included_at_the_rate_that_is_accounted(inclusion):
    rates = inclusion.mean(0)
    assert float((rates - Q).abs().max()) < 6 * math.sqrt(Q * (1 - Q) / STEPS)


def test_two_passes_draw_different_batches():
    run = make(data=data(200), batch_size=20)
    first, second = (list(run.loader.batch_sampler) for _ in range(2))
    assert len(first) == len(second) == 10
    assert first != second


# ---- the budget


def test_the_budget_stops_the_step_that_would_pass_it_and_not_one_before():
    engine = dpivon.PrivacyEngine()
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 2, "noise_multiplier": None}
    run = make(engine=engine, call=engine.make_private_with_epsilon, data=data(40), batch_size=10, **target)
    planned = 2 * len(run.loader)
    taken, refused = 0, None
    while refused is None:
        for x, y in run.loader:
            weights, releases = [p.detach().clone() for p in run.optimizer.params], len(run.contributions)
            try:
                run.step(x, y)
            except PrivacyError as error:
                refused = error
                break
            taken += 1
    assert "target_epsilon=2.0" in str(refused)
    assert taken >= planned
    assert len(run.contributions) == releases == len(engine.accountant) == taken
    assert all(torch.equal(a, b) for a, b in zip(weights, run.optimizer.params, strict=True))
    assert engine.get_epsilon(1e-5) <= 2.0
    (row,) = engine.accountant.history
    assert epsilon([(row[0], row[1], taken + 1)], 1e-5) > 2.0


def test_less_noise_than_planned_is_stopped_when_it_would_pass_the_budget():
    engine = dpivon.PrivacyEngine()
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 5, "noise_multiplier": None}
    run = make(engine=engine, call=engine.make_private_with_epsilon, data=data(40), batch_size=10, **target)
    run.optimizer.noise_multiplier = 0.3
    x, y = next(iter(run.loader))
    with pytest.raises(PrivacyError, match=r"target_epsilon=2\.0"):
        run.step(x, y)
    assert run.contributions == []
    assert len(engine.accountant) == 0


def test_a_release_without_noise_is_refused_under_a_budget():
    engine = dpivon.PrivacyEngine()
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 5, "noise_multiplier": None}
    run = make(engine=engine, call=engine.make_private_with_epsilon, data=data(40), batch_size=10, **target)
    run.optimizer.noise_multiplier = 0.0
    x, y = next(iter(run.loader))
    with pytest.raises(PrivacyError, match=r"target_epsilon=2\.0.*noise_multiplier=0"):
        run.step(x, y)
    assert run.contributions == []
