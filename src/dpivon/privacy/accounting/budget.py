"""What a run will cost, or how much noise it needs, before it starts."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from dpivon.errors import ArgumentError, PrivacyWarning, bad, check_whole
from dpivon.privacy.accounting.accountant import check_accountant, check_delta, epsilon
from dpivon.privacy.accounting.calibrate import noise_multiplier as calibrate
from dpivon.privacy.accounting.history import History, check_entry, check_history
from dpivon.privacy.accounting.rdp import Orders


@dataclass(frozen=True)
class Budget:
    """What a plan costs: (ε, δ) of T steps at noise multiplier σ and sampling rate q. ``print`` says it in one line.

    Attributes:
        epsilon: ε, an upper bound.
        delta: δ.
        noise_multiplier: σ, as given or as calibrated.
        sample_rate: q = batch_size / dataset_size.
        steps: T.
        dataset_size: N.
        batch_size: the expected batch b.
        accountant: what computed ε.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    dataset_size: int
    batch_size: int
    accountant: str

    def __str__(self) -> str:
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:.3g} ({self.accountant}): {self.steps} steps, "
            f"σ = {self.noise_multiplier:.6g}, q = {self.sample_rate:.4g} "
            f"({self.batch_size} of {self.dataset_size} expected per batch)"
        )


def _one_of(first: str, a: object, second: str, b: object) -> None:
    if (a is None) == (b is None):
        problem = "neither was given" if a is None else "both were given"
        raise ArgumentError(f"{first}={a!r}, {second}={b!r}: {problem}. Give exactly one of them.")


def budget(
    *,
    dataset_size: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    delta: float,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    accountant: str = "rdp",
    orders: Orders = "wide",
    also: History | None = None,
) -> Budget:
    """The cost of a run of σ, or the σ of a run of cost ε, before any data is touched.

    >>> budget(dataset_size=50_000, batch_size=512, epochs=30, delta=1e-5, target_epsilon=3.0).noise_multiplier

    Args:
        dataset_size: the public number of examples N.
        batch_size: the expected batch b; q = b/N.
        epochs: length of the run in epochs of ⌈N/b⌉ steps, rounded up: no step that runs goes unaccounted.
        steps: length of the run in steps instead.
        delta: δ, well below 1/N.
        noise_multiplier: σ, to learn ε.
        target_epsilon: ε, to learn the σ it needs.
        accountant: ``"rdp"``, ``"prv"`` or ``"pld"``.
        orders: Rényi orders of ``"rdp"``.
        also: releases to be made besides, as rows (σ, q, steps): a temperature chosen afterwards is
            ``[dpivon.temperature_cost(20)]``. ε is of everything together.
    """
    size = check_whole("dataset_size", dataset_size, "Give the number of training records", at_least=1)
    batch = check_whole("batch_size", batch_size, "Give the expected number of records in a batch", at_least=1)
    if batch > size:
        raise bad("batch_size", batch_size, f"is larger than dataset_size={size}", "Give at most dataset_size")
    _one_of("epochs", epochs, "steps", steps)
    _one_of("noise_multiplier", noise_multiplier, "target_epsilon", target_epsilon)
    name, probability, rate = check_accountant(accountant), check_delta(delta), batch / size
    if steps is not None:
        number = check_whole("steps", steps, "Give the number of steps as a whole number")
    else:
        passes = check_whole("epochs", epochs, "Give a whole number of epochs, or give steps instead", at_least=1)
        number = passes * math.ceil(size / batch)
    if probability >= 1 / size:
        warnings.warn(
            f"delta={delta!r}: is at least 1/dataset_size={1 / size:.3g}, which permits publishing a record. "
            "Give a delta well below it.",
            PrivacyWarning,
            stacklevel=2,
        )
    if noise_multiplier is not None:
        sigma = check_entry(noise_multiplier, rate, number)[0]
    else:
        assert target_epsilon is not None
        sigma = calibrate(target_epsilon, probability, rate, number, name, orders, also)
    spent = epsilon([(sigma, rate, number), *check_history(also or [])], probability, name, orders)
    return Budget(spent, probability, sigma, rate, number, size, batch, name)
