"""A new accountant is one registration: everything then knows it by name."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.errors import ArgumentError, PrivacyWarning
from dpivon.privacy.accounting import ACCOUNTANTS, Accountant, epsilon, noise_multiplier, register_accountant
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import epsilons
from dpivon.privacy.engine import PrivacyEngine
from dpivon.train.config import Config

HISTORY: History = [(1.0, 0.01, 1000)]
RUN = {"data": "table.csv", "epsilon": 3, "delta": 1e-5, "dataset_size": 1000, "classes": ["a", "b"]}


def half_of_rdp(history: History, delta: float) -> float:
    """Stands in for a tighter accountant."""
    return 0.5 * epsilon(history, delta, "rdp")


@pytest.fixture
def toy() -> Iterator[str]:
    register_accountant("toy", "Toy accounting", half_of_rdp)
    yield "toy"
    del ACCOUNTANTS["toy"]


def test_a_registered_accountant_is_known_everywhere(toy: str) -> None:
    expected = 0.5 * epsilon(HISTORY, 1e-5, "rdp")
    assert epsilon(HISTORY, 1e-5, toy) == expected
    assert epsilons(HISTORY, 1e-5)[toy] == expected
    account = Accountant(toy)
    account.charge(noise_multiplier=1.0, sample_rate=0.01, steps=1000)
    assert account.get_epsilon(1e-5) == expected
    assert PrivacyEngine(accountant=toy).accountant.mechanism() == toy
    assert Config(**RUN, batch_size=10, epochs=1, lr=0.1, accountant=toy).accountant == toy  # type: ignore[arg-type]
    plan = ["--dataset-size", "1000", "--batch-size", "10", "--delta", "1e-5", "--steps", "1000", "--json"]
    said = CliRunner().invoke(app, ["budget", *plan, "--noise-multiplier", "1", "--accountant", toy])
    assert json.loads(said.stdout)["epsilon"] == expected


def test_calibration_uses_it(toy: str) -> None:
    sigma = noise_multiplier(1.0, 1e-5, 0.01, 1000, toy)
    assert epsilon([(sigma, 0.01, 1000)], 1e-5, toy) <= 1.0 < epsilon([(0.99 * sigma, 0.01, 1000)], 1e-5, toy)
    assert sigma < noise_multiplier(1.0, 1e-5, 0.01, 1000, "rdp")


def test_a_looser_one_never_exceeds_rdp() -> None:
    register_accountant("loose", "Loose accounting", lambda history, delta: 3 * epsilon(history, delta, "rdp"))
    try:
        assert epsilon(HISTORY, 1e-5, "loose") == epsilon(HISTORY, 1e-5, "rdp")
    finally:
        del ACCOUNTANTS["loose"]


def test_one_that_fails_gives_the_rdp_bound() -> None:
    register_accountant("broken", "Broken accounting", lambda history, delta: float("nan"))
    try:
        with pytest.warns(PrivacyWarning, match="BROKEN accountant found no bound"):
            assert epsilon(HISTORY, 1e-5, "broken") == epsilon(HISTORY, 1e-5, "rdp")
    finally:
        del ACCOUNTANTS["broken"]


def test_a_name_is_registered_once(toy: str) -> None:
    with pytest.raises(ArgumentError, match=r"accountant='toy'.*registered already"):
        register_accountant(toy, "Another", half_of_rdp)
