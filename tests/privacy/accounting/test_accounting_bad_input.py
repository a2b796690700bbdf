"""One clear sentence each, naming the argument and its value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import Accountant, budget, epsilon, noise_multiplier

ROW = (1.0, 0.01, 10)


def refused(call: Any, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    message = str(caught.value)
    assert f"{name}={value!r}" in message
    assert message.endswith(".")


@pytest.mark.parametrize("delta", [0, 0.0, -1e-5, 1, 1.0, 2.0, math.nan, math.inf, "small", None])
def test_delta(delta: Any) -> None:
    refused(lambda: epsilon([ROW], delta), "delta", delta)
    refused(lambda: Accountant().get_epsilon(delta), "delta", delta)
    refused(lambda: noise_multiplier(1.0, delta, 0.1, 10), "delta", delta)


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, "loud", None])
@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
def test_noise_multiplier(sigma: Any, accountant: str) -> None:
    refused(lambda: epsilon([(sigma, 0.1, 5)], 1e-5, accountant), "noise_multiplier", sigma)
    refused(lambda: Accountant().step(noise_multiplier=sigma, sample_rate=0.1), "noise_multiplier", sigma)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0001, math.nan, math.inf, "all", None])
def test_sample_rate(q: Any) -> None:
    refused(lambda: epsilon([(1.0, q, 5)], 1e-5), "sample_rate", q)
    refused(lambda: Accountant().step(noise_multiplier=1.0, sample_rate=q), "sample_rate", q)
    refused(lambda: noise_multiplier(1.0, 1e-5, q, 10), "sample_rate", q)


@pytest.mark.parametrize("steps", [-1, 1.5, math.nan, math.inf, "many", None])
def test_steps(steps: Any) -> None:
    refused(lambda: epsilon([(1.0, 0.1, steps)], 1e-5), "steps", steps)
    refused(lambda: Accountant().charge(noise_multiplier=1.0, sample_rate=0.1, steps=steps), "steps", steps)
    refused(lambda: Accountant().record_unaccounted("shuffled", steps=steps), "steps", steps)
    refused(lambda: noise_multiplier(1.0, 1e-5, 0.1, steps), "steps", steps)


@pytest.mark.parametrize("order", [1, 1.0, 0.5, -2, math.nan, math.inf, "two"])
def test_orders(order: Any) -> None:
    refused(lambda: epsilon([ROW], 1e-5, orders=[2.0, order]), "orders", order)


@pytest.mark.parametrize("orders", ["narrow", [], (), 7, None])
def test_sets_of_orders(orders: Any) -> None:
    refused(lambda: epsilon([ROW], 1e-5, orders=orders), "orders", orders)
    refused(lambda: epsilon([ROW], 1e-5, "pld", orders=orders), "orders", orders)
    refused(lambda: Accountant(orders=orders), "orders", orders)


@pytest.mark.parametrize("accountant", ["moments", "RDP", "", None, 3])
def test_accountant(accountant: Any) -> None:
    refused(lambda: epsilon([ROW], 1e-5, accountant), "accountant", accountant)
    refused(lambda: Accountant(accountant), "accountant", accountant)
    refused(lambda: noise_multiplier(1.0, 1e-5, 0.1, 10, accountant), "accountant", accountant)


def test_gdp_is_refused_in_its_own_words() -> None:
    for call in (lambda: epsilon([ROW], 1e-5, "gdp"), lambda: Accountant("gdp")):
        with pytest.raises(ArgumentError, match=r"accountant='gdp'.*under-estimates"):
            call()


@pytest.mark.parametrize("target", [0, -1.0, math.nan, math.inf, "low", None])
def test_target_epsilon(target: Any) -> None:
    refused(lambda: noise_multiplier(target, 1e-5, 0.1, 10), "target_epsilon", target)


def test_nothing_to_calibrate_for() -> None:
    refused(lambda: noise_multiplier(1.0, 1e-5, 0.1, 0), "steps", 0)


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_reason(reason: Any) -> None:
    refused(lambda: Accountant().record_unaccounted(reason), "reason", reason)


@pytest.mark.parametrize("history", [7, None, "rows"])
def test_history(history: Any) -> None:
    refused(lambda: epsilon(history, 1e-5), "history", history)


PLAN: dict[str, Any] = {
    "dataset_size": 1000,
    "batch_size": 10,
    "epochs": 2,
    "delta": 1e-5,
    "noise_multiplier": 1.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset_size", 0),
        ("dataset_size", 10.5),
        ("batch_size", 0),
        ("batch_size", 1001),
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", None),
        ("delta", 0.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", None),
        ("accountant", "gdp"),
        ("orders", "narrow"),
        ("steps", 5),
        ("target_epsilon", 1.0),
    ],
)
def test_budget(name: str, value: Any) -> None:
    refused(lambda: budget(**(PLAN | {name: value})), name, value)


@pytest.mark.parametrize("steps", [-1, 2.5])
def test_budget_steps(steps: Any) -> None:
    refused(lambda: budget(**(PLAN | {"epochs": None, "steps": steps})), "steps", steps)
