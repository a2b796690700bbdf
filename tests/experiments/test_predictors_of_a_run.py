"""Predictors of the same private runs: their draws, and the page that the table gives."""

from __future__ import annotations

import pytest
import torch
from experiments.posterior.__main__ import HERE, Table, page
from experiments.posterior.predictors import Trained


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
    assert page(Table(HERE / "results" / "rows.csv")) == (HERE / "README.md").read_text()
