"""What a run will cost or how much noise it needs before it starts, and a limit that holds while it runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dpivon.errors import ArgumentError, BudgetSpent, PrivacyWarning, bad, check_number, check_whole
from dpivon.privacy.accounting import pld
from dpivon.privacy.accounting.accountant import DEFAULT, Accountant, check_accountant, check_delta, epsilon
from dpivon.privacy.accounting.history import Entry, History, append, check_entry, check_history, merged
from dpivon.privacy.accounting.rdp import WHOLE_ORDERS, Orders, check_orders

SMALLEST, LARGEST = 5e-4, 1e8
TOLERANCE = 1e-3


def _least(fits: Callable[[float], bool], high: float, gap: float) -> float:
    """Bisection between a σ that fits and one that does not, down to a relative gap."""
    if fits(SMALLEST):
        return SMALLEST
    low = max(high / 2, SMALLEST)
    while fits(low):
        low, high = max(low / 2, SMALLEST), low
    while high > low * (1 + gap):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


#: Up to here the other accountants have a bound of their own; fractional Rényi orders matter far above.
USUAL = 20.0


def _least_of_few(excess: Callable[[float], float], high: float) -> float:
    """As :func:`_least`, down from a σ that fits, where ``excess``, log(ε/target), takes long.

    log ε is nearly a line in log σ: a try is just on one side of where the line through the last two crosses zero, and in
    the middle of the gap where the curve is not like that.
    """
    x, y, low = high, excess(high), 0.0
    aim, tries = max(0.92 * high, SMALLEST), 0
    while high > low * (1 + TOLERANCE):
        value, tries = excess(aim), tries + 1
        if value <= 0 and aim == SMALLEST:
            return SMALLEST  # where δ covers ever being sampled, every σ fits
        low, high = (low, aim) if value <= 0 else (aim, high)
        slope = (value - y) / math.log(aim / x)
        x, y = aim, value
        aim = math.sqrt(max(low, high / 4) * high)
        if tries < 8 and -100 < slope < -0.01:
            root = x * math.exp(min(max(-y / slope, -1.0), 1.0))
            root *= 1 + TOLERANCE / 3 * (-1 if low * (1 + TOLERANCE) < root else 1)
            aim = root if low < root < high else aim
        aim = SMALLEST if low == 0 and tries == 3 else max(aim, SMALLEST)
    return high


def calibrated(
    target_epsilon: float,
    sample_rate: float,
    steps: int,
    cost: Callable[[Entry], float],
    tighter: Callable[[Entry], float] | None = None,
) -> float:
    """The smallest σ, to ``TOLERANCE``, at which ``cost((σ, q, T))``, which falls in σ, is at most the target.

    ``tighter`` is a smaller bound that takes longer: it is asked only from that σ downwards.
    """
    target = check_number("target_epsilon", target_epsilon, "Give a target ε greater than 0", above=0.0)
    _, rate, _ = check_entry(1.0, sample_rate, steps)
    number = check_whole("steps", steps, "Give at least one step to calibrate for", at_least=1)
    least = cost((LARGEST, rate, number))
    if least > target:
        raise bad(
            "target_epsilon",
            target,
            f"no noise reaches it, the smallest ε that can be shown being {least:.6g}",
            "Raise target_epsilon or delta, or use wider orders",
        )
    high = 1.0
    while cost((high, rate, number)) > target:
        high = min(2 * high, LARGEST)
    gap = TOLERANCE if tighter is None else 0.1
    sigma = _least(lambda value: cost((value, rate, number)) <= target, high, gap)
    if tighter is None:
        return sigma
    return _least_of_few(lambda value: _log_ratio(tighter((value, rate, number)), target), sigma)


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), at most 0 exactly where value ≤ target."""
    ratio = math.log(value / target) if value > 0 else -math.inf
    return max(ratio, 1e-300) if value > target else min(ratio, 0.0)


def noise_multiplier(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = DEFAULT,
    orders: Orders = "wide",
    also: History | None = None,
) -> float:
    """The smallest σ, to one part in a thousand, whose ε after ``steps`` steps, and ``also``, is at most ``target_epsilon``.

    ε(σ*) ≤ target < ε(0.99 σ*): the side that is returned was itself accounted, never interpolated. ``sample_rate`` is q;
    ``delta``, ``accountant`` and ``orders`` are those of :func:`epsilon`; ``also`` are releases to be made besides, as
    rows (σ, q, steps).
    """
    name, probability, alphas = check_accountant(accountant), check_delta(delta), check_orders(orders)
    beside = check_history(also or [])
    if name != "rdp" and isinstance(target_epsilon, float | int) and target_epsilon <= USUAL:
        alphas = WHOLE_ORDERS  # RDP only says where the search begins

    def cost(row: Entry, by: str) -> float:
        return epsilon([row, *beside], probability, by, alphas)

    tighter, first = None if name == "rdp" else partial(cost, by=name), "rdp"
    if (
        beside
        and isinstance(target_epsilon, float | int)
        and epsilon(beside, probability, "rdp", alphas) >= target_epsilon
    ):
        first = name  # planned by the tighter bound, they may leave RDP no room
    with warnings.catch_warnings(), pld.searching():
        # A candidate that an accountant gives up on is bounded by RDP; only the result is worth a warning.
        warnings.simplefilter("ignore", PrivacyWarning)
        sigma = calibrated(target_epsilon, sample_rate, steps, partial(cost, by=first), tighter)
    if tighter is not None:
        epsilon([(sigma, sample_rate, steps), *beside], probability, name)
    return sigma


_calibrate = noise_multiplier  # `budget` has an argument of that name


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
    accountant: str = DEFAULT,
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
        accountant: ``"pld"`` (the tightest), ``"prv"`` or ``"rdp"`` (the paper's).
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
        sigma = _calibrate(target_epsilon, probability, rate, number, name, orders, also)
    spent = epsilon([(sigma, rate, number), *check_history(also or [])], probability, name, orders)
    return Budget(spent, probability, sigma, rate, number, size, batch, name)


@dataclass(frozen=True)
class Limit:
    """(ε, δ) for a plan of ``steps`` releases with noise σ at rate q, and those in ``also``, calibrated beforehand.

    It stops the step that would exceed ε, not the one after. Inside the plan nothing need be computed. More steps of the
    same kinds are a longer plan, whose ε is computed before every release; those of training leave room for ``also``, which
    comes last. Another σ or q may have been chosen by looking at releases: as a privacy filter only RDP is known to hold then
    (Feldman and Zrnic 2021), so it decides.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    also: tuple[Entry, ...] = ()

    def check(self, accountant: Accountant, noise_multiplier: float, sample_rate: float) -> None:
        """Raise :class:`BudgetSpent` if one more release would spend more than ε."""
        history = list(accountant.history)
        append(history, (noise_multiplier, sample_rate, 1))
        planned = merged([(self.noise_multiplier, self.sample_rate, self.steps), *self.also])
        found = merged(history)
        if all(n <= planned.get(terms, 0) for terms, n in found.items()):
            return
        by = accountant.mechanism() if found.keys() <= planned.keys() else "rdp"
        if (noise_multiplier, sample_rate) == (self.noise_multiplier, self.sample_rate):
            history += [
                (*terms, n - found.get(terms, 0)) for terms, n in merged(self.also).items() if n > found.get(terms, 0)
            ]
        after = epsilon(history, self.delta, by, accountant.orders)
        if after > self.epsilon:
            raise BudgetSpent(
                f"target_epsilon={self.epsilon!r}: with this step, and what is planned besides, ε would be {after:.4g} at "
                f"δ = {self.delta:g}, so nothing was released. Stop here, or plan more epochs or more noise from the start."
            )
