"""A temperature chosen on private data, and charged like any other release.

**The mechanism.** Halve a public interval of log T, k times. At its midpoint every calibration example contributes

    c_i = clip(surprise_i − entropy_i, ±B)         (:mod:`dpivon.temperature`: the gradient of its NLL in log 1/T)

and S + N(0, k σ² B²), S = Σ_i c_i, is released; where it is positive the model is too sure, and the upper half is kept. The
temperature is the midpoint of what is left.

**Why it is private.** The model is public (it was released before) and θ is drawn once for the whole choice, so c_i depends
on example i alone, whichever batch it is in, and |c_i| ≤ B:
adding or removing one example moves S by at most B, whatever the interval. Each answer is thus a Gaussian mechanism of noise
multiplier σ√k at sampling rate 1; which interval comes next is post-processing of the answers before (adaptive composition). k
of them cost exactly what one of noise multiplier σ costs, and they enter the account as k rows (σ√k, q = 1), so that
every accountant composes them with the training. Rényi, PRV and PLD bounds hold as for gradients.

**Why this one.** Near the best τ = log T the summed NLL is n a (τ − τ*)²/2. An exponential mechanism over a grid at the same
Rényi cost errs by the order of (σ/n)^½; a noisy gradient errs by B σ √k/(n a), the order of σ/n. Noise on the NLLs of a grid
of G has sensitivity B √G. ``experiments.strong_privacy.recipe`` measures all three. B = 3 nats: of predictions that are right
about themselves the root moves by 3 % at most, from 2 classes to 100; a tighter bound has less noise and leans to too sure.

**Which data.** Calibration data are private people too. If they may also be training data, charge the training's own
account (``account=engine``, the default way): ε composes. If no record is in both, each record is in one of two
mechanisms and the larger ε holds: :func:`parallel_epsilon`, which wants to see the data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.durable.ledger import Record, Terms
from dpivon.durable.tensors import bytes_of
from dpivon.errors import ArgumentError, PrivacyError, bad, check_number, check_whole
from dpivon.privacy.accounting import DEFAULT, Accountant
from dpivon.privacy.accounting import noise_multiplier as calibrate
from dpivon.privacy.accounting.accountant import check_delta
from dpivon.privacy.accounting.history import Entry
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.mechanism import NoiseSpec, release
from dpivon.privacy.noise import NoiseSource, SecureNoise, TorchNoise
from dpivon.temperature import Predictor, Tempered, log_probabilities, surprise_less_entropy

HALVINGS = 6
#: T between 1/8 and 8: six halvings leave steps of 6.7 %, within which the NLL hardly moves.
LARGEST = 8.0
#: B, in nats.
BOUND = 3.0

Charge = Callable[[NoiseSpec], None]
#: What the ledger calls such a release.
MECHANISM = "gaussian, temperature"


class TemperatureSpec(NoiseSpec):
    """A release of one clipped sum over all calibration examples; the ledger calls it by its own name."""

    @property
    def terms(self) -> dict[str, Any]:
        return {**super().terms, "mechanism": MECHANISM}


@dataclass(frozen=True, eq=False)
class CalibratedTemperature(Tempered):
    """A tempered predictor, and what is public about how its temperature was found.

    Attributes:
        predictor: what is tempered.
        temperature: T.
        noise_multiplier: σ of the whole choice.
        bound: B, at which an example's contribution was clipped.
        answers: the (T, noisy sum) that it was made from.
    """

    noise_multiplier: float
    bound: float
    answers: tuple[tuple[float, float], ...]


def temperature_cost(noise_multiplier: float, halvings: int = HALVINGS) -> Entry:
    """The row of an account that a choice makes: (σ√k, 1, k).

    Args:
        noise_multiplier: σ of the whole choice.
        halvings: k.
    """
    sigma = check_number("noise_multiplier", noise_multiplier, "Use a value such as 20", at_least=0.0)
    k = check_whole("halvings", halvings, f"Use about {HALVINGS}", at_least=1)
    return sigma * math.sqrt(k), 1.0, k


def temperature_spec(noise_multiplier: float, bound: float = BOUND, halvings: int = HALVINGS) -> TemperatureSpec:
    """Each of the k releases that a choice of noise multiplier σ makes."""
    sigma, q, _ = temperature_cost(noise_multiplier, halvings)
    return TemperatureSpec(sigma, bound, 1.0, q, loss_reduction="sum")


def temperature_noise(epsilon: float, delta: float, halvings: int = HALVINGS, accountant: str = DEFAULT) -> float:
    """The σ whose choice costs (ε, δ) by itself.

    Args:
        epsilon: ε.
        delta: δ.
        halvings: k, how many answers a choice is made of.
        accountant: what computes ε.
    """
    k = check_whole("halvings", halvings, f"Use about {HALVINGS}", at_least=1)
    return calibrate(epsilon, delta, 1.0, k, accountant) / math.sqrt(k)


def calibrate_temperature(
    predictor: Predictor,
    calibration_data: tuple[Tensor, Tensor] | Iterable[tuple[Tensor, Tensor]],
    *,
    account: Accountant | PrivacyEngine,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    bound: float = BOUND,
    halvings: int = HALVINGS,
    generator: torch.Generator | None = None,
    **options: Any,
) -> CalibratedTemperature:
    """``predictor`` with the temperature that suits private data, chosen privately and charged to ``account`` first.

    >>> calibrated = dpivon.calibrate_temperature(fitted, (x, y), noise_multiplier=20, account=fitted.account)
    >>> calibrated.temperature, calibrated.predict(test_x).probs

    Args:
        predictor: has ``predict(x)``: a ``Fitted``, a ``Learner``, an ``Ensemble``. It must be public: made of releases alone.
            All batches get the same draws of θ; one that draws for every row by itself is refused.
        calibration_data: (inputs, labels), or batches of them, read once. The unit of privacy is one example. Without random
            augmentation: what is drawn for an example must not depend on the others.
        account: the training's ``PrivacyEngine`` or ``Accountant``: ε then composes. An engine's ledger is written first.
        noise_multiplier: σ of the whole choice; the noise on a sum of n examples is like σ√k B.
        epsilon: instead, with ``delta``: what the choice would cost by itself. Composed with training it adds far less.
        bound: B, public.
        halvings: k.
        generator: for public data only; by default noise comes from the operating system.
        **options: of ``predictor.predict``, such as ``samples=``.
    """
    sigma = _noise(noise_multiplier, epsilon, delta, halvings)
    log_probs, labels = _predicted(predictor, calibration_data, options)
    noise: NoiseSource = SecureNoise() if generator is None else TorchNoise(generator)
    b = check_number("bound", bound, "Use about 3 nats", above=0.0)
    ((temperature, answers),) = choose([log_probs], labels, sigma, b, halvings, [noise], charge_to(account))
    return CalibratedTemperature(predictor, temperature, sigma, b, answers)


def choose(
    log_probs: Sequence[Tensor],
    labels: Tensor,
    noise_multiplier: float,
    bound: float,
    halvings: int,
    noises: Sequence[NoiseSource],
    charge: Charge,
    before: Callable[[Sequence[Tensor]], None] = lambda sums: None,
) -> list[tuple[float, tuple[tuple[float, float], ...]]]:
    """The mechanism, for one run or for several that are charged together. Nothing else here looks at calibration data.

    ``before`` is shown the sums of all runs when they are charged and no noise is drawn yet; what it raises keeps them in.
    """
    origin = noises[0].origin
    spec, k = temperature_spec(noise_multiplier, bound, halvings).replace(drawn_by=(origin, origin)), halvings
    middle = [0.0] * len(log_probs)
    answers: list[list[tuple[float, float]]] = [[] for _ in log_probs]
    for step in range(1, k + 1):
        charge(spec)
        sums = [clipped_sum(z, labels, math.exp(m), bound) for z, m in zip(log_probs, middle, strict=True)]
        before(sums)
        for i, noise in enumerate(noises):
            total = sums[i].reshape(1)
            answer = float(release({total: total}, spec, noise, _charged).gradients[total])
            answers[i].append((math.exp(middle[i]), answer))
            middle[i] += math.copysign(math.log(LARGEST) / 2**step, answer)
    return [(math.exp(m), tuple(found)) for m, found in zip(middle, answers, strict=True)]


def _charged(spec: NoiseSpec) -> None:
    """It was, for all runs at once, just before."""


def for_temperature(terms: Terms) -> bool:
    """Whether a ledger's releases of these terms were for temperatures, which all runs of a stack are charged for alike."""
    return terms[0].get("mechanism") == MECHANISM


def temperature_releases(record: Record, since: int = 0) -> int:
    """How many releases of a ledger were for temperatures, from number ``since`` on."""
    found = place = 0
    for terms, n in record.rows:
        if for_temperature(terms):
            found += max(0, place + n - max(place, since))
        place += n
    return found


def clipped_sum(log_probs: Tensor, labels: Tensor, temperature: float, bound: float) -> Tensor:
    """S in double; an example whose prediction is not finite counts for nothing."""
    each = surprise_less_entropy(log_probs, labels, temperature)
    return torch.where(torch.isfinite(each), each, 0.0).clamp(-bound, bound).sum()


def charge_to(account: Accountant | PrivacyEngine) -> Charge:
    """An engine refuses what passes its budget and writes its ledger before its memory; an accountant has memory alone."""
    if isinstance(account, PrivacyEngine):
        return account._charge
    given: Any = account
    if not isinstance(given, Accountant):
        fix = "Give the PrivacyEngine that trained the model, or its accountant: a release without an account has no ε"
        raise bad("account", type(account).__name__, "is not an account", fix)

    def charge(spec: NoiseSpec) -> None:
        account.keep_unit(spec.unit)
        if spec.unaccounted:
            account.record_unaccounted(spec.unaccounted)
        else:
            sigma, rate = spec.cost
            account.charge(noise_multiplier=sigma, sample_rate=rate)

    return charge


def parallel_epsilon(parts: Sequence[tuple[Accountant, Tensor]], delta: float) -> float:
    """ε of several accounts of which each was spent on records that no other one saw: the largest of them.

    >>> parallel_epsilon([(training, train_x), (calibration, held_out_x)], delta=1e-5)

    Each part is an account and the inputs, one record a row, that all its releases read. Two conditions:
    no record is in two parts, which is checked bit for bit (a PrivacyError names the parts; people with two records
    are not seen); and which part a record goes to does not depend on the other records, which cannot be checked: an id, a hash
    of it or a coin of its own will do, a random permutation of everyone will not.
    """
    check_delta(delta)
    if len(parts) < 2:
        raise bad("parts", len(parts), "is not several", "Use account.get_epsilon(delta) for one")
    if any(account.unit for account, _ in parts):
        raise PrivacyError(
            "parts: an account is for people, and a person may have rows in two parts, which is not seen here. Charge all to "
            "one account."
        )
    seen: dict[bytes, int] = {}
    for i, (_, inputs) in enumerate(parts):
        for row in {hashlib.sha256(bytes_of(row)).digest() for row in inputs}:
            if seen.setdefault(row, i) != i:
                raise PrivacyError(
                    f"parts: {seen[row]} and {i} share a record, so ε composes. Charge both to one account, or part the data."
                )
    return max(account.get_epsilon(delta) for account, _ in parts)


def _noise(noise_multiplier: float | None, epsilon: float | None, delta: float | None, halvings: int) -> float:
    if (noise_multiplier is None) == (epsilon is None):
        problem = "neither was given" if epsilon is None else "both were given"
        both = f"noise_multiplier={noise_multiplier!r}, epsilon={epsilon!r}"
        raise ArgumentError(f"{both}: {problem}. Give exactly one of them.")
    if epsilon is not None:
        if delta is None:
            raise bad("delta", delta, "is missing, and epsilon alone says nothing", "Give both")
        return temperature_noise(epsilon, delta, halvings)
    fix = "Use a value such as 20; 0 has no guarantee"
    return check_number("noise_multiplier", noise_multiplier, fix, at_least=0.0)


def _one_function(predictor: Predictor, options: dict[str, Any]) -> Callable[[Any], Tensor]:
    """p̄ as one function of x, however often it is called: every call draws the same θ and the same masks.

    Drawn for every batch anew they would differ with the batch that an example is in, and one example that is removed moves
    others to another batch.
    """
    own = options.get("generator")
    generators = [torch.default_generator, *torch.cuda.default_generators]
    states = [(g, g.get_state()) for g in (generators if own is None else [own, *generators])]

    def predict(x: Any) -> Tensor:
        for generator, state in states:
            generator.set_state(state)
        return predictor.predict(x, **options).probs

    return predict


def _check_rows_alone(name: str, predict: Callable[[Any], Tensor], x: Any) -> None:
    """An error if what is predicted for a row depends on its place or on other rows. On made-up rows: it tells of no data."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return
    shape, generator = (2, *x.shape[1:]), torch.Generator().manual_seed(0)
    a, b = torch.rand(shape, generator=generator).to(x) if x.is_floating_point() else x.new_zeros(shape)
    together, alone = predict(torch.stack([a, b, a, a])).double(), predict(torch.stack([a, a])).double()
    if bool(((together[[0, 2, 3]] - alone[[0, 0, 1]]).nan_to_num().abs() > 1e-4).any()):
        fix = "Predict with one draw of weights or masks for all rows, as dpivon.predict does"
        raise bad("predictor", name, "predicts otherwise for a row at another place or beside other rows", fix)


def _predicted(predictor: Predictor, data: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """log p̄ [n, classes] in double and labels [n]."""
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(t, Tensor) for t in data)
    batches = [data] if pair else data
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        fix = "Give (inputs, labels), or batches of them"
        raise bad("calibration_data", type(data).__name__, "is not labelled data", fix)
    log_probs, labels = [], []
    predict, checked = _one_function(predictor, options), False
    for x, y in batches:
        # That there is no row is private too, so it is no error.
        shown = x if len(x) else x.new_zeros(1, *x.shape[1:])
        if not checked:
            _check_rows_alone(type(predictor).__name__, predict, shown)
            checked = True
        found = log_probabilities(predict(shown))[: len(x)]
        if y.shape != found.shape[:1] or y.is_floating_point():
            fix = "Give one class number an example"
            raise bad("labels.shape", tuple(y.shape), f"does not fit {len(found)} predictions", fix)
        log_probs.append(found)
        labels.append(y.to(found.device, torch.int64))
    if not labels:
        raise bad("calibration_data", "no batches", "is empty", "Give at least one example")
    z, y = torch.cat(log_probs), torch.cat(labels)
    if bool(((y < 0) | (y >= z.shape[1])).any()):
        raise bad("labels", "a tensor", f"has classes outside 0 … {z.shape[1] - 1}", "Number classes from 0")
    return z, y
