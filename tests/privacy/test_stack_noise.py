"""The privacy noise of stacks: normals in double from 64 random bits, added in double, rounded once."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from private_runs import data
from scipy.stats import kstest
from scripts import run
from torch import Tensor, nn

from dpivon.privacy import stack as boundary
from dpivon.privacy.streams import POSTERIOR, PRIVACY, SAMPLING, Streams, _box_muller_double, philox
from dpivon.stacked import AnyNetwork, Run, Stack

DRAWS = 1_000_000
WORD = 2**32 - 1


def drawn(
    n: int = DRAWS, seed: int = 7, step: int = 0, stream: int = PRIVACY, dtype: torch.dtype = torch.float64
) -> Tensor:
    return Streams([seed], torch.device("cpu")).normal(torch.zeros(1, n, dtype=dtype), torch.tensor(step), stream)[0]


def of_words(*words: int) -> tuple[float, float]:
    x, y = _box_muller_double(*(np.array([word], np.uint64) for word in words))
    return float(x[0]), float(y[0])


def test_philox_gives_the_published_answer():
    """Known answers of Random123 for philox4x32-10."""
    assert [int(w[0]) for w in philox(0, np.array([0]), 0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_normals_are_normal_and_independent_across_runs_steps_and_streams():
    streams = Streams([1, 2], torch.device("cpu"))
    n = 40_000
    draws = {
        (step, stream): streams.normal(torch.empty(2, n), torch.tensor(step), stream)
        for step in (0, 1)
        for stream in (0, 1)
    }
    rows = torch.cat(list(draws.values()))
    assert (rows.mean(1).abs() < 5 / n**0.5).all()
    assert ((rows.var(1) - 1).abs() < 5 * (2 / n) ** 0.5).all()
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / n**0.5
    assert SAMPLING not in (0, 1)


def test_a_million_draws_are_normal():
    noise = drawn().numpy()
    assert kstest(noise, "norm").pvalue > 1e-3
    assert kstest(noise[::2], "norm").pvalue > 1e-3  # both of a pair
    assert kstest(noise[1::2], "norm").pvalue > 1e-3
    assert kstest(noise * 1.01, "norm").pvalue < 1e-3  # and the test would see one percent
    tail = (np.abs(noise) > 4).sum()
    assert abs(tail - DRAWS * 6.334e-5) < 5 * math.sqrt(DRAWS * 6.334e-5)


def test_no_two_of_a_million_are_equal_and_their_low_bits_are_random():
    """From 32 bits in single precision thousands of a million are, and 29 low bits are zero."""
    noise = drawn()
    assert len(noise.unique()) == DRAWS
    mantissa = noise.view(torch.int64)
    for bit in range(40):
        ones = float(((mantissa >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 5 / (2 * math.sqrt(DRAWS)), bit
    coarse = drawn(dtype=torch.float32)
    assert len(coarse.unique()) < DRAWS - 5000


def test_the_tail_reaches_beyond_nine_and_values_next_to_zero():
    """What a map from uniforms to normals can give at its extremes."""
    farthest, side = of_words(0, 0, 0, 0)  # √(2 ln 2⁶⁴)
    assert farthest == pytest.approx(math.sqrt(2 * 64 * math.log(2)), rel=1e-15)
    assert farthest > 9.4
    assert side == 0.0
    assert of_words(0, 1, 0, 0)[0] < farthest  # neighbours in the tail differ: its bits are not rounded away
    assert of_words(WORD, WORD, 0, 0)[0] == 0.0
    nearest = of_words(WORD, WORD - 2**11, 0, 0)[0]
    assert 0 < nearest < 1e-7
    assert of_words(0, 0, 2**31, 0)[0] == -farthest
    assert of_words(0, 0, 2**30, 0)[1] == farthest
    for words in ((0, 0, 0, 0), (WORD,) * 4, (0, 0, WORD, WORD), (WORD, WORD, 0, 0)):
        assert all(math.isfinite(value) for value in of_words(*words))


@pytest.mark.parametrize("place", range(4))
def test_every_word_decides(place: int):
    """Also by its lower half: 32 bits of a word that are not used would be 32 bits less."""
    words = [0x12345678, 0x9ABCDEF0, 0x0FEDCBA9, 0x87654321]
    changed = list(words)
    changed[place] ^= 1 << 16
    assert of_words(*words) != of_words(*changed)


def test_runs_steps_and_streams_are_independent():
    n = 200_000
    places = [
        (7, 0, PRIVACY),
        (8, 0, PRIVACY),
        (7, 1, PRIVACY),
        (7, 0, POSTERIOR),
        (7, 0, SAMPLING),
        (7 + 2**32, 0, PRIVACY),
    ]
    rows = torch.stack([drawn(n, *place) for place in places])
    for values in (rows, rows.abs(), rows[:, ::2], rows[:, 1::2]):
        correlation = torch.corrcoef(values) - torch.eye(len(rows), dtype=torch.float64)
        assert correlation.abs().max() < 5 / values.shape[1] ** 0.5
    x, y = rows[0, ::2], rows[0, 1::2]
    for a, b in ((x, y), (x.abs(), y.abs()), (x[1:], x[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / len(a) ** 0.5
    coarse = drawn(n, dtype=torch.float32)
    assert not set(coarse.double().tolist()) & set(rows[0].tolist())


def test_a_release_is_the_sum_and_noise_in_double_rounded_once(monkeypatch):
    made = Stack([Run("dp-sgd", 7, 1.5, 0.7, 0.1, 4)], AnyNetwork(lambda: nn.Linear(5, 3)), *data(), block=1)
    mechanism = made.mechanism
    sums = torch.randn(1, 18, dtype=torch.float64)
    g = mechanism.release(sums, torch.tensor(4))
    noise = Streams([7], torch.device("cpu")).normal(torch.zeros(1, 18, dtype=torch.float64), torch.tensor(4), PRIVACY)
    assert mechanism._noise.dtype == torch.float64
    assert torch.equal(g, ((sums + noise * (1.5 * 0.7)) / 4.0).float())
    assert boundary._combine(sums, noise, mechanism.noise_std, mechanism.divisor).dtype == torch.float32
    assert bool((noise != noise.float()).all())  # there are bits to round away


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with torch for GPUs")
def test_the_kernel_interpreted_draws_the_same():
    assert run("random_interpreted.py", TRITON_INTERPRET="1").count("ok") == 4
