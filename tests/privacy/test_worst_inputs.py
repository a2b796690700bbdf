"""What one example moves the sum by, on inputs chosen against its arithmetic: large, cancelling, repeated, subnormal.

Here roundings are all there is, so that a mean over the batch that was divided by its size would show at once.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_runs import make
from torch import nn
from worst_inputs import INPUTS, NETWORKS, PATHS, agreement, moved

import dpivon
from dpivon.privacy.clipping import row_norms, weighted_sum
from dpivon.privacy.kernels.reference import LoopedGradients
from dpivon.privacy.layers.uses import Outer, Rows, merge
from dpivon.privacy.precision import capturing

TOLERANCE = 1e-5


@pytest.mark.campaign(keep=87)
@pytest.mark.parametrize("inputs", ["cancelling", "large and cancelling", "offset 1e6", "mixed positions", "subnormal"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("path", ["eager", "eager, mean", "eager, unmade", "looped"])
def test_one_example_moves_the_sum_by_at_most_the_bound(path, network, inputs):
    assert max(moved(path, network, inputs, examples=5, bound=1e-2, scale=1e3)) <= 1 + TOLERANCE


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("network", ["tokens", "shared and wide", "standardised convolution", "tied embedding"])
def test_so_it_does_in_a_recorded_program(network):
    assert max(moved("captured", network, "large and cancelling", examples=5, bound=1e-2, scale=1e3)) <= 1 + TOLERANCE


@pytest.mark.parametrize("inputs", ["alike", "constant", "random", "cancelling and alike"])
@pytest.mark.parametrize("network", ["linear", "one weight", "attention", "embedding"])
def test_so_it_does_in_a_large_batch(network, inputs):
    assert max(moved("eager", network, inputs, examples=512, bound=1e-2, scale=1e3)) <= 1 + TOLERANCE


@pytest.mark.campaign(keep=52)
@pytest.mark.parametrize("inputs", ["random", "small", "alike", "mixed positions"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("path", ["eager", "eager, unmade", "looped"])
def test_the_sum_is_that_of_a_loop_in_double(path, network, inputs):
    error = agreement(path, network, inputs, examples=5, bound=1e-2, scale=1.0)
    assert error <= (1e-2 if inputs == "mixed positions" else 1e-4)  # the forward itself is in fp32


@pytest.mark.slow
@given(
    path=st.sampled_from(sorted(PATHS)),
    network=st.sampled_from(sorted(NETWORKS)),
    inputs=st.sampled_from(sorted(INPUTS)),
    examples=st.sampled_from([1, 2, 3, 17, 63, 65, 130, 512]),
    bound=st.sampled_from([1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1e-9, 1.0, 1e3, 1e6]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_a_search_finds_no_example_that_moves_it_further(path, network, inputs, examples, bound, scale, seed):
    far = max(moved(path, network, inputs, examples=examples, bound=bound, scale=scale, seed=seed))
    assert far <= 1 + TOLERANCE


@pytest.mark.slow
@given(
    kinds=st.lists(st.floats(0.5, 2.0, width=32), min_size=1, max_size=3),
    n=st.integers(2, 600),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_rounding_of_one_coordinate_moves_a_sum_of_few_kinds_of_rows_by_less(kinds, n, seed):
    """All of a rounding then lies along the example that is removed, and examples that are alike are rounded alike."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(n) != int(torch.randint(n, (), generator=generator))
    rows = torch.tensor(kinds)[torch.randint(len(kinds), (n,), generator=generator)].unsqueeze(1)
    c = 1.0 / rows[:, 0]
    assert abs(float(weighted_sum(c, rows) - weighted_sum(c[kept], rows[kept]))) <= 1 + TOLERANCE


def test_the_engine_adds_up_what_it_measured():
    """The case of one linear layer on two inputs, of which the difference has no gradient at all."""
    torch.manual_seed(0)
    x = 1e6 * torch.randn(64, 1, 6).repeat(1, 2, 1)
    y = torch.zeros(64, dtype=torch.long)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 40)

        def forward(self, x):
            return (self.layer(x[:, 0]) - self.layer(x[:, 1])) * 1e3

    run = make("bookkeeping", module=Difference(), data=(x, y), max_grad_norm=1e-2)
    assert float(run.release(x, y).norm()) <= 1e-2 * (1 + TOLERANCE)


def test_fit_adds_up_what_it_measured(monkeypatch):
    """The sums of two fits that differ by one example, which is the first of a batch of all of them."""
    sums = []
    original = LoopedGradients.clipped_sums
    monkeypatch.setattr(LoopedGradients, "clipped_sums", lambda *a: sums.append(original(*a)) or sums[-1])
    torch.manual_seed(0)
    half = 1e6 * torch.randn(40, 1, 6)
    x, y = torch.cat([half, half * (1 + 3e-7)], 1), torch.zeros(40, dtype=torch.long)
    model = NETWORKS["shared and wide"]()
    plan = {"batch_size": 40, "dataset_size": 40, "epochs": 1, "lr": 0.1, "delta": 1e-5, "noise_multiplier": 1.0}
    plan |= {"method": "dp-ivon-gradsq"}
    for rows in (slice(0, 40), slice(1, 40)):
        dpivon.fit(model, x[rows], y[rows], max_grad_norm=1e-2, seed=1, **plan)
    assert len(sums) == 2
    assert 0.1 * 1e-2 < float((sums[0] - sums[1]).norm()) <= 1e-2 * (1 + TOLERANCE)


def test_examples_that_cancel_are_made_and_others_are_not():
    torch.manual_seed(0)
    a, g = torch.randn(4, 2, 30), torch.randn(4, 2, 20)
    a[2], g[2] = 1e6 * a[2, :1], torch.stack([g[2, 0], -g[2, 0] * (1 + 1e-6)])
    use = Outer(a, g, torch.Size((20, 30)))
    assert use._grams[1].tolist() == [2]
    made, c = use.materialise().double(), torch.rand(4)
    torch.testing.assert_close(use.squared_norm().double(), made.square().sum((1, 2)), rtol=1e-5, atol=0)
    alone = use.weighted_sum(torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert torch.equal(alone, made[2])  # to the bit: what is added up is what was measured
    torch.testing.assert_close(use.weighted_sum(c), torch.einsum("b,bpd->pd", c.double(), made), rtol=1e-4, atol=1e-4)


def test_a_dropped_example_does_not_change_who_is_made():
    torch.manual_seed(0)
    a, g = torch.randn(3, 2, 30), torch.randn(3, 2, 20)
    a[0] = float("nan")
    a[1], g[1] = a[1, :1].clone(), torch.stack([g[1, 0], -g[1, 0] * (1 + 1e-6)])
    use = Outer(a, g, torch.Size((20, 30)))
    norms = use.squared_norm()
    assert norms.isnan().tolist() == [True, False, False]
    left = use.without(norms.isnan())
    assert torch.equal(left.weighted_sum(torch.tensor([0.0, 1.0, 0.0])), use.materialise()[1].double())


def test_rows_of_a_table_are_added_up_once():
    torch.manual_seed(0)
    g = 1e6 * torch.randn(3, 1, 8).repeat(1, 2, 1)
    g[:, 1] *= -(1 + 3e-7)
    use = Rows(torch.zeros(3, 2, dtype=torch.long), g, torch.Size((4, 8)))
    for i in range(3):
        c = torch.zeros(3, dtype=torch.float64)
        c[i] = 0.3 / 7
        measured = float(use.squared_norm()[i].sqrt()) * float(c[i])
        assert float(use.weighted_sum(c).norm()) == pytest.approx(measured, rel=1e-6)


def test_a_weighted_gradient_in_the_subnormal_range_is_left_out():
    """G = 10⁻⁴⁵ has one bit: times a clip factor of 0.6 it would be rounded up to itself."""
    use = Outer(torch.full((2, 1, 3), 1e38), torch.full((2, 1, 2), 1.4e-45), torch.Size((2, 3)))
    for c in (torch.tensor([0.6, 0.0]), torch.tensor([0.6, 0.7])):
        assert float(use.weighted_sum(c).norm()) <= float(c @ use.squared_norm().sqrt().float())


def test_norms_are_right_or_infinite_and_never_too_small_to_matter():
    for size in (1e-30, 1e-22, 1e-10, 1.0, 1e18, 1e19, 1e30):
        g = torch.full((1, 700), size)
        norm = float(row_norms(g))
        true = size * 700**0.5
        assert norm == float("inf") or norm == pytest.approx(true, rel=1e-5) or true < 1e-17


def test_merged_uses_of_a_recorded_program_are_one_tensor():
    """Nothing can be looked at there: what fits is made, and what does not is made twice by the same product."""
    torch.manual_seed(0)
    uses = [Outer(torch.randn(3, 1, 30), torch.randn(3, 1, 20), torch.Size((20, 30))) for _ in range(2)]
    kinds = []

    def record(x):
        assert capturing()
        merged = merge(uses)
        kinds.append(type(merged).__name__)
        return x + merged.squared_norm().sum()

    torch.fx.experimental.proxy_tensor.make_fx(record)(torch.zeros(()))
    assert kinds == ["Dense"]


def test_kernels_for_norms_and_for_sums_add_up_positions_in_one_order():
    program = pytest.importorskip("dpivon.privacy.kernels.paper.program")
    norms, sums = (program.TUNING[kernel] for kernel in ("norms", "sums"))
    assert [options["BT"] for options in norms] == [options["BT"] for options in sums]
