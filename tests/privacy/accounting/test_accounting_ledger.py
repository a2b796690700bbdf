"""The ledger of a run: what is charged, what is saved, and what has no guarantee."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from opacus.accountants import IAccountant, RDPAccountant

from dpivon.errors import ArgumentError, PrivacyError, PrivacyWarning
from dpivon.privacy.accounting import Accountant, epsilon


def test_it_is_an_opacus_accountant() -> None:
    accountant = Accountant("pld")
    assert isinstance(accountant, IAccountant)
    assert accountant.mechanism() == "pld"

    class Optimizer:
        noise_multiplier = 1.5
        accumulated_iterations = 2

    accountant.get_optimizer_hook_fn(sample_rate=0.01)(Optimizer())
    assert accountant.history == [(1.5, 0.02, 1)]


def test_a_million_steps_are_a_few_rows() -> None:
    accountant = Accountant("rdp")
    for _ in range(100_000):
        accountant.step(noise_multiplier=1.0, sample_rate=0.001)
    accountant.charge(noise_multiplier=1.0, sample_rate=0.001, steps=900_000)
    assert accountant.history == [(1.0, 0.001, 1_000_000)]
    assert len(accountant) == 1_000_000
    accountant.charge(noise_multiplier=2.0, sample_rate=0.001, steps=10)
    accountant.step(noise_multiplier=1.0, sample_rate=0.001)
    assert len(accountant.history) == 3
    assert len(accountant) == 1_000_011
    assert accountant.get_epsilon(1e-5) == epsilon([(1.0, 0.001, 1_000_001), (2.0, 0.001, 10)], 1e-5, "rdp")


def test_it_agrees_with_opacus() -> None:
    ours, theirs = Accountant("rdp", orders="opacus"), RDPAccountant()
    for accountant in (ours, theirs):
        for step in range(300):
            accountant.step(noise_multiplier=1.0 + (step > 100), sample_rate=0.01)
    assert ours.history == theirs.history
    assert ours.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-12)


def test_a_new_ledger_is_true_and_free() -> None:
    accountant = Accountant("rdp")
    assert accountant
    assert len(accountant) == 0
    assert accountant.get_epsilon(1e-5) == 0
    accountant.charge(noise_multiplier=1.0, sample_rate=0.1, steps=0)
    assert accountant.history == []


def test_unaccounted_releases_make_epsilon_infinite() -> None:
    accountant = Accountant("rdp")
    accountant.charge(noise_multiplier=1.0, sample_rate=0.01, steps=10)
    accountant.record_unaccounted("batches are shuffled, not sampled", steps=3)
    accountant.record_unaccounted("batches are shuffled, not sampled")
    accountant.step(noise_multiplier=0.0, sample_rate=0.01)
    assert len(accountant) == 15
    with pytest.warns(PrivacyWarning, match=r"shuffled, not sampled \(4 steps\); noise_multiplier=0 \(1 steps\)"):
        assert accountant.get_epsilon(1e-5) == math.inf
    # the history alone says the same, to whoever reads it
    assert epsilon(accountant.history, 1e-5) == math.inf


def test_a_foreign_history_without_noise_is_infinite_too() -> None:
    accountant = Accountant("rdp")
    accountant.load_state_dict({"history": [[0.0, 0.5, 2]], "mechanism": "rdp"})
    with pytest.warns(PrivacyWarning, match=r"noise_multiplier=0 \(2 steps\)"):
        assert accountant.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("mechanism", ["rdp", "prv", "pld"])
def test_save_and_load_change_nothing(mechanism: str) -> None:
    first = Accountant(mechanism)
    first.charge(noise_multiplier=1.1, sample_rate=0.01, steps=50)
    state = json.loads(json.dumps(first.state_dict()))
    second = Accountant(mechanism)
    second.charge(noise_multiplier=1.1, sample_rate=0.01, steps=7)  # is in the state, and is not counted twice
    second.load_state_dict(state)
    assert second.history == first.history
    assert second.get_epsilon(1e-5) == first.get_epsilon(1e-5)
    for accountant in (first, second):
        accountant.charge(noise_multiplier=1.1, sample_rate=0.01, steps=50)
    assert second.get_epsilon(1e-5) == first.get_epsilon(1e-5)
    assert len(second) == 100


def test_a_saved_state_is_a_copy_and_keeps_the_reasons() -> None:
    first = Accountant("rdp")
    first.record_unaccounted("shuffled")
    state = first.state_dict()
    first.record_unaccounted("shuffled")
    assert state["unaccounted"] == {"shuffled": 1}
    second = Accountant("rdp")
    second.load_state_dict(state)
    with pytest.warns(PrivacyWarning, match="shuffled"):
        assert second.get_epsilon(1e-5) == math.inf
    destination: dict[str, Any] = {"other": 1}
    assert second.state_dict(destination) is destination
    assert destination["mechanism"] == "rdp"


@pytest.mark.parametrize(
    ("history", "unaccounted", "named"),
    [
        ([(9.0, 0.5, 10)], {}, "the 10 of noise_multiplier=1 and sample_rate=0.1"),  # as many, of another kind
        ([(1.0, 0.1, 9), (9.0, 0.5, 90)], {}, "the 10 of noise_multiplier=1 and sample_rate=0.1"),  # more, one missing
        ([(1.0, 0.1, 10)], {}, "the 2 of noise_multiplier=0 and sample_rate=1"),
        ([(1.0, 0.1, 10), (0.0, 1.0, 2)], {"else": 2}, r"the 2 without a guarantee \(shuffled\)"),
    ],
)
def test_a_state_that_lacks_a_release_is_refused_and_changes_nothing(
    history: Any, unaccounted: Any, named: str
) -> None:
    accountant = Accountant("rdp")
    accountant.charge(noise_multiplier=1.0, sample_rate=0.1, steps=10)
    accountant.record_unaccounted("shuffled", 2)
    before = accountant.state_dict()
    with pytest.raises(PrivacyError, match=f"fewer releases than {named}"):
        accountant.load_state_dict({"history": history, "mechanism": "rdp", "unaccounted": unaccounted})
    assert accountant.state_dict() == before


def test_a_state_that_holds_every_release_in_another_order_is_taken() -> None:
    accountant = Accountant("rdp")
    for sigma in (1.0, 2.0, 1.0):
        accountant.charge(noise_multiplier=sigma, sample_rate=0.1, steps=5)
    history = [(2.0, 0.1, 6), (1.0, 0.1, 10)]
    accountant.load_state_dict({"history": history, "mechanism": "rdp"})
    assert accountant.history == history


GOOD = {"history": [(1.0, 0.1, 5)], "mechanism": "rdp", "unaccounted": {}}


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (None, "state_dict=None"),
        ({}, "state_dict={}"),
        ({"mechanism": "rdp"}, "'history'"),
        ({"history": []}, "'mechanism'"),
        (GOOD | {"mechanism": "prv"}, "mechanism='prv'"),
        (GOOD | {"history": 7}, "history=7"),
        (GOOD | {"history": [(1.0, 0.1)]}, "history=(1.0, 0.1)"),
        (GOOD | {"history": [(-1.0, 0.1, 5)]}, "noise_multiplier=-1.0"),
        (GOOD | {"history": [(1.0, 2.0, 5)]}, "sample_rate=2.0"),
        (GOOD | {"history": [(1.0, 0.1, 1.5)]}, "steps=1.5"),
        (GOOD | {"unaccounted": ["shuffled"]}, "unaccounted=['shuffled']"),
        (GOOD | {"unaccounted": {"shuffled": -1}}, "unaccounted=-1"),
        (GOOD | {"unaccounted": {"shuffled": 2}}, "unaccounted={'shuffled': 2}"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(state: Any, named: str) -> None:
    accountant = Accountant("rdp")
    accountant.charge(noise_multiplier=3.0, sample_rate=0.1)
    with pytest.raises(ArgumentError) as caught:
        accountant.load_state_dict(state)
    assert named in str(caught.value)
    assert accountant.history == [(3.0, 0.1, 1)]
