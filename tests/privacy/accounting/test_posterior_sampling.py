"""Privacy for free: the theorem's ε against posteriors that can be written down."""

from __future__ import annotations

import math

import pytest
import torch

from dpivon.errors import ArgumentError
from dpivon.privacy.accounting.posterior_sampling import BoundedLikelihood, exact_posterior_epsilon

CLASSES, CANDIDATES, EXAMPLES = 3, 6, 5


def log_posterior(log_likelihoods: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of a finite set of candidates θ under a uniform prior, [candidates, examples] → [candidates]."""
    return torch.log_softmax(log_likelihoods.sum(1) / temperature, 0)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("floor", [0.05, 0.5])
def test_no_neighbour_changes_a_posterior_by_more_than_epsilon(floor, temperature):
    """Over random and adversarial data sets, exactly; and the adversarial one comes close, so the bound is not slack."""
    likelihood = BoundedLikelihood(CLASSES, floor)
    generator = torch.Generator().manual_seed(0)
    worst = {"replace": 0.0, "add-remove": 0.0}
    unbounded = 0.0
    for trial in range(300):
        logits = torch.randn(CANDIDATES, EXAMPLES + 1, CLASSES, generator=generator, dtype=torch.float64) * 30
        y = torch.randint(CLASSES, (EXAMPLES + 1,), generator=generator)
        if trial == 0:  # one candidate explains the new example and no other does; the old one the other way round
            logits.zero_()
            y.zero_()
            logits[0, -1, 0], logits[1:, -1, 1] = 1e4, 1e4
            logits[0, 0, 1], logits[1:, 0, 0] = 1e4, 1e4
            logits[0, 1:-1, 1] = 4.0  # and that candidate had no chance before
        each = likelihood.log_likelihood(logits, y.expand(CANDIDATES, -1))
        assert float(each.max() - each.min()) <= 2 * likelihood.bound + 1e-12
        before = log_posterior(each[:, :-1], temperature)
        for kind, rows in (("add-remove", each), ("replace", each[:, 1:])):
            change = (log_posterior(rows, temperature) - before).abs().max()
            worst[kind] = max(worst[kind], float(change))
        raw = torch.log_softmax(logits, -1).gather(-1, y.expand(CANDIDATES, -1).unsqueeze(-1)).squeeze(-1)
        unbounded = max(unbounded, float((log_posterior(raw, 1.0) - log_posterior(raw[:, :-1], 1.0)).abs().max()))
    for kind, change in worst.items():
        epsilon = exact_posterior_epsilon(likelihood.bound, temperature=temperature, neighbours=kind)
        assert 0.7 * epsilon < change <= epsilon * (1 + 1e-12)
    assert unbounded > 100  # without the floor there is no such bound


def test_numbers_of_the_theorem():
    assert exact_posterior_epsilon(0.25) == 1.0
    assert exact_posterior_epsilon(0.25, samples=10, temperature=5.0) == pytest.approx(2.0)
    assert exact_posterior_epsilon(0.25, neighbours="add-remove") == 0.5
    assert BoundedLikelihood(10, 1.0).bound == 0.0  # answers at random: nothing to learn, nothing to pay


def test_logits_that_are_not_finite_stay_within_the_bound():
    likelihood = BoundedLikelihood(4, 0.1)
    logits = torch.tensor([[math.nan] * 4, [math.inf, 0, 0, 0], [0.0, 0, 0, 0]])
    values = likelihood.log_likelihood(logits, torch.zeros(3, dtype=torch.int64))
    assert bool(torch.isfinite(values).all())
    assert float(values.min()) >= math.log(0.1 / 4) - 1e-6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exact_posterior_epsilon(math.inf), "bound"),
        (lambda: exact_posterior_epsilon(-1.0), "bound"),
        (lambda: exact_posterior_epsilon(1.0, samples=0), "samples"),
        (lambda: exact_posterior_epsilon(1.0, temperature=0.0), "temperature"),
        (lambda: exact_posterior_epsilon(1.0, neighbours="zero-out"), "neighbours"),
        (lambda: BoundedLikelihood(1, 0.1), "classes"),
        (lambda: BoundedLikelihood(3, 0.0), "floor"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
