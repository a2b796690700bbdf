"""Who is in a batch: drawn by gaps, and held to the definition, an independent draw for each."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from dpivon.privacy.sampling import members


def uniform(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda n: torch.rand(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.8])
def test_every_set_of_people_is_as_likely_as_independent_draws_make_it(rate: float) -> None:
    n, trials, draw = 5, 20_000, uniform(0)
    found = dict.fromkeys(itertools.product((0, 1), repeat=n), 0)
    for _ in range(trials):
        drawn = members(n, rate, draw).tolist()
        assert drawn == sorted(set(drawn))
        found[tuple(int(i in drawn) for i in range(n))] += 1
    chances = [rate ** sum(who) * (1 - rate) ** (n - sum(who)) for who in found]
    kept = [(count, trials * p) for count, p in zip(found.values(), chances, strict=True) if trials * p >= 5]
    rest = trials - sum(count for count, _ in kept), trials - sum(expected for _, expected in kept)
    table = kept if rest[1] < 1 else [*kept, rest]
    scale = sum(c for c, _ in table) / sum(e for _, e in table)
    assert stats.chisquare([c for c, _ in table], [e * scale for _, e in table]).pvalue > 1e-6


@pytest.mark.parametrize(("n", "rate"), [(1000, 0.5), (50_000, 0.01), (2_000_000, 1e-5), (7, 0.999999)])
def test_sizes_and_gaps_are_those_of_independent_draws(n: int, rate: float) -> None:
    draw, trials = uniform(1), 400
    batches = [members(n, rate, draw) for _ in range(trials)]
    sizes = torch.tensor([len(b) for b in batches]).double()
    mean, variance = n * rate, n * rate * (1 - rate)
    assert abs(float(sizes.mean()) - mean) <= 5 * math.sqrt(variance / trials) + 1e-9
    if variance > 5:
        assert abs(float(sizes.var()) / variance - 1) < 5 * math.sqrt(2 / trials)
        places = torch.cat(batches).double().numpy()
        assert stats.kstest((places + 0.5) / n, "uniform").pvalue > 1e-6
    assert all(len(b) == 0 or (int(b[0]) >= 0 and int(b[-1]) < n) for b in batches)


def test_all_are_drawn_at_rate_one_and_a_later_row_changes_no_earlier_draw() -> None:
    assert members(9, 1.0, uniform(0)).tolist() == list(range(9))
    short, long = (members(n, 0.2, uniform(3)).tolist() for n in (40, 41))
    assert [i for i in long if i < 40] == short


def test_a_draw_takes_more_numbers_where_the_first_do_not_reach_the_end() -> None:
    """Numbers near zero: everyone is drawn, and no one past the end."""
    calls = []

    def small(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.full((n,), 1e-9, dtype=torch.float64)

    assert members(500, 0.01, small).tolist() == list(range(500))
    assert len(calls) > 1
