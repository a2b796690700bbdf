"""Predictors of the same private runs: their draws, and the page that the table gives."""

from __future__ import annotations

import pytest
import torch
from experiments.posterior.__main__ import HERE, Table, page, read_sets
from experiments.posterior.predictors import Trained
from experiments.posterior.run import DELTA, MEMBERS, RESERVE, RUNS, SIGMAS, averaged, joint_sigma, planned
from experiments.posterior.sets import COVERAGE, rows

from dpivon.privacy.accounting import epsilon
from dpivon.stacked import PaperNetwork


def trained() -> Trained:
    g = torch.Generator().manual_seed(0)
    iterates = torch.randn(12, 6, generator=g)
    return Trained(iterates.mean(0), torch.full((6,), 0.5), iterates, last=2)


def drawn(kind: str, scale: float) -> torch.Tensor:
    run = trained()
    g = torch.Generator().manual_seed(1)
    rows = torch.stack(run.rows(kind, scale, 40_000, g))
    return (rows - run.average).T.cov(correction=0)


def test_swag_is_half_the_diagonal_and_half_the_covariance_of_the_iterates() -> None:
    deviations = trained().iterates - trained().iterates.mean(0)
    whole = deviations.T @ deviations / (len(deviations) - 1)
    expected = 0.5 * whole + 0.5 * torch.diag(deviations.square().mean(0))
    torch.testing.assert_close(drawn("swag", 2.0), 4.0 * expected, atol=0.15, rtol=0.0)


@pytest.mark.slow
def test_the_own_width_and_the_last_layer_alone() -> None:
    torch.testing.assert_close(drawn("own", 2.0), torch.eye(6), atol=0.03, rtol=0.0)
    last = drawn("last", 1.0)
    assert not last[:4].any()
    assert (last.diag()[4:] > 0).all()


def test_iterates_are_those_of_the_run() -> None:
    run = trained()
    rows = torch.stack(run.rows("iterates", 1.0, 12, torch.Generator()))
    assert torch.equal(rows, run.iterates)


def test_the_page_is_what_the_table_gives() -> None:
    assert page(Table(HERE / "results" / "rows.csv"), read_sets()) == (HERE / "README.md").read_text()


def test_members_of_an_ensemble_cost_together_what_one_run_does() -> None:
    rate, steps = 4096 / 50_000, 1170
    sigma = joint_sigma(SIGMAS["3"], rate, steps)
    one, all_ = (
        epsilon([(s, rate, n), RESERVE], DELTA, "rdp") for s, n in ((SIGMAS["3"], steps), (sigma, MEMBERS * steps))
    )
    assert 0.999 * one < all_ <= one
    runs = [run for arm in ("base", "joint", "bound") for _, run, _ in planned(arm, "3", 0, 4096, rate, steps)]
    assert len({run.seed for run in runs}) == len(runs) == 4 + MEMBERS + 4
    assert len(runs) == sum(RUNS[arm] for arm in ("base", "joint", "bound"))
    together = [run for seed in range(5) for _, run, _ in planned("base", "3", seed, 4096, rate, steps)]
    assert len({run.seed for run in together}) == 20  # one stack


def test_passes_that_share_features_are_those_of_each_row() -> None:
    network, g = PaperNetwork(), torch.Generator().manual_seed(0)
    rows = [network.initial(0) for _ in range(3)]
    for row in rows[1:]:
        row[-1290:] += 0.5 * torch.randn(1290, generator=g)
    images = torch.randn(70, 3, 32, 32, generator=g)
    with torch.no_grad():
        each = torch.stack([network.model(row).eval()(images).softmax(-1) for row in rows])
    for shared in (False, True):
        logs, information = averaged(network, rows, images, shared=shared)
        torch.testing.assert_close(logs.exp(), each.mean(0), atol=1e-6, rtol=1e-5)
        assert (information > 0).all()


def test_private_sets_cover_and_those_of_a_better_predictor_are_smaller() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (8000,), generator=g)
    logits = torch.randn(8000, 4, generator=g) + 3.0 * torch.nn.functional.one_hot(labels, 4)
    good, bad = (list(rows((f * logits).softmax(1), labels, 0)) for f in (1.0, 0.0))
    for row in good:
        assert row["coverage"] > COVERAGE - 0.02, row
    sizes = [row["size"] for row in good]
    assert sizes == sorted(sizes, reverse=True)  # less noise, smaller sets
    assert 0.9 <= sizes[-1] < 1.5  # an image may have none
    assert all(row["size"] == 4 for row in bad)
