"""The recipe for private training with calibrated probabilities and one default for every ε.

Its parts and their reasons (docs/strong-privacy.md has the measurements):

1. **A step in units of the weights** (``dp-steady``): α = 3.5 w/√T, divided by the root mean square over all weights of what is
   released, whose noise is known. It is gradient descent's direction, and σ, C, b and T drop out of the choice of its length.
   Where T is below 400 the first steps climb to it.
2. **Averaged iterates** over the last tenth of the training: noise moves every iterate, and averaging loses most of it.
3. **A posterior from the spread of the iterates** in that window; predictions average over draws of it. Its variance is a
   quarter of theirs where there is a temperature, which does most of what width is for, and all of it where there is none.
4. **A private temperature**, chosen on the training data itself and charged to the same account. Training under privacy
   can hardly fit examples one by one, so training data tell the temperature nearly as well as held-out data, and no example is
   held out of the training. It gets an ε of ``temperature_share`` of the whole by itself; since costs add up in squares, the
   training pays for it with about a hundredth of its budget. Where the data are so few that noise would blur the mean of
   surprise less entropy by more than ``WORTH``, it is left out, and training has the whole budget: that depends on N, ε and
   δ alone, all public.

**From a prior** (``start_from``, docs/priors.md) only a last layer is trained, on what the prior's network sees, in flat
coordinates (:mod:`dpivon.priors.features`). Noise grows with the number of weights, and flat features leave the rest
little to add. With much data and a large ε such a layer does fit examples. Then some are held out of the training, each by
a hash of its own, and the temperature is chosen on these: about as many as keep its noise at ``WORTH``, where that is at most
a twentieth of all. It is charged to all, as if no one were held out.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpivon.defaults import METHOD
from dpivon.durable.files import read_json, replace
from dpivon.durable.tensors import bytes_of
from dpivon.errors import BudgetSpent, PrivacyWarning, bad, check_number, check_whole
from dpivon.fit import Fitted, fit, seed_after
from dpivon.posterior import Posterior
from dpivon.priors.features import Features
from dpivon.privacy import Accountant, PrivacyEngine
from dpivon.privacy.accounting import DEFAULT
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.privacy.augmentation import used
from dpivon.privacy.people import People
from dpivon.privacy.temperature import BOUND, calibrate_temperature, temperature_cost, temperature_noise
from dpivon.temperature import Tempered

#: How much of the iterates' spread is width, with a temperature and without.
WIDTH, WIDTH_ALONE = 0.25, 1.0

#: What a kept run's temperature is in.
TEMPERATURE = "temperature.json"

#: Nats. A miscalibration smaller than this is not worth a release.
WORTH = 0.02

#: The part of ε that a temperature would cost by itself.
SHARE = 0.1

#: The largest share of the examples on a prior's features that is held out for the temperature.
HELD_OUT = 0.05


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How a run's temperature is chosen: decided by N, ε and δ alone, all public.

    Attributes:
        noise_multiplier: σ of the whole choice; None where there is none, since noise would blur it by more than ``WORTH``.
        held_out: how many of the N examples are left out of the training for it, on average; 0 where it is chosen on all.
    """

    noise_multiplier: float | None = None
    held_out: int = 0

    @classmethod
    def planned(
        cls,
        examples: int,
        target_epsilon: float,
        delta: float,
        *,
        share: float = SHARE,
        held_out: float = 0.0,
        accountant: str = DEFAULT,
    ) -> Calibration:
        """That of N examples, with the shares of ε and of the examples that :func:`steady` has."""
        share = check_number("temperature_share", share, f"Use about {SHARE}", above=0.0, below=1.0)
        target = check_number("target_epsilon", target_epsilon, "Use a value such as 3.0", above=0.0)
        sigma = temperature_noise(share * target, delta, accountant=accountant)
        blurred = blur(sigma, examples)
        few = math.ceil(examples * blurred / WORTH)  # blurred by WORTH
        return cls(sigma, few if few <= held_out * examples else 0) if blurred <= WORTH else cls()

    @property
    def cost(self) -> History:
        """What the plan of the training leaves room for."""
        return [] if self.noise_multiplier is None else [temperature_cost(self.noise_multiplier)]

    @property
    def trace(self) -> float:
        """How much of the iterates' spread is width."""
        return WIDTH_ALONE if self.noise_multiplier is None else WIDTH


def steady(
    model: nn.Module,
    inputs: Tensor | Dataset[Any],
    labels: Tensor | None = None,
    *,
    target_epsilon: float,
    delta: float,
    batch_size: int,
    epochs: int,
    start_from: str | os.PathLike[str] | Posterior | Features | None = None,
    max_grad_norm: float = 1.0,
    temperature_share: float = SHARE,
    samples: int = 32,
    held_out: float | None = None,
    accountant: str = DEFAULT,
    seed: int | None = None,
    **options: Any,
) -> Tempered:
    """Train a copy of a classifier by the recipe, all of it within (ε, δ).

    >>> trained = dpivon.steady(model, x, y, target_epsilon=1, delta=1e-5, batch_size=512, epochs=30)
    >>> trained.predict(test_x).probs, trained.temperature, trained.predictor.account.get_epsilon(1e-5)

    ``predictor`` of what it returns is the :class:`dpivon.Fitted`; ``temperature`` is 1 where none was worth its cost.
    Larger batches and more epochs cost computing time. More of both helped on CIFAR-10; more epochs did
    not always help on small tables (docs/methods.md).

    Args:
        model: the classifier; it is copied.
        inputs: as the model takes them, normalised by public constants, one example per row.
        labels: one per example.
        target_epsilon: ε of everything together.
        delta: δ, well below 1/N.
        batch_size: the expected batch b.
        epochs: length of the run, in epochs of ⌈N/b⌉ steps.
        start_from: train a new last layer alone, on what a prior's network sees: ``model`` is that network, and says how many
            classes there are. The prior is a name such as ``"images-32"``, a file of ``dpivon prior learn``, or
            :class:`dpivon.priors.Features` of any network and public inputs. All features are in memory at once. With ``out=``
            a run goes on where features come out to the bit, so on the same kind of machine; its ``model/`` is the last
            layer, so keep ``predictor.features`` too, by ``save``.
        max_grad_norm: C.
        temperature_share: the part of ε that the temperature would cost by itself; composed with training it is far less.
        samples: the draws that the temperature is chosen for; predict with as many.
        held_out: the share of the examples that may be left out of the training for the temperature. It is about as few as tell
            that; where more would be needed, none. A hash of each says which, so each row must be of its example alone, to
            the bit. None is 0.05 with ``start_from``, whose layer fits its examples at a large ε, and 0 without.
        accountant: as in :func:`~dpivon.fit.fit`.
        seed: as in :func:`~dpivon.fit.fit`: leave it out unless the data is public.
        **options: of :func:`~dpivon.fit.fit`, such as ``out=`` for a run that is kept, ``dtype=``, ``lr=`` for another r than
            3.5, or ``options={"ramp": 0}`` for first steps of full size however few there are. With ``user_ids`` no
            temperature is chosen: its guarantee is for rows.
    """
    plan: dict[str, Any] = {
        "target_epsilon": target_epsilon,
        "delta": delta,
        "batch_size": batch_size,
        "epochs": epochs,
    }
    plan |= {"max_grad_norm": max_grad_norm, "temperature_share": temperature_share, "samples": samples}
    plan |= {"accountant": accountant, "seed": seed}
    default = 0.0 if start_from is None else HELD_OUT
    fix = f"Use {HELD_OUT}, or 0 for none"
    most = default if held_out is None else check_number("held_out", held_out, fix, at_least=0.0, below=1.0)
    if held_out and (options.get("dataset_size") or (start_from is None and not isinstance(inputs, Tensor))):
        problem = "was given with a Dataset or a dataset_size, where all are trained on"
        raise bad("held_out", held_out, problem, "Leave it out, or give tensors whose length is N")
    if start_from is None:
        return _trained(model, inputs, labels, held_out=most, **plan, **options)
    last, features, raw, x, y = _on_features(model, start_from, inputs, labels, options)
    found = _trained(last, x, y, held_out=most, raw=raw, **plan, **options)
    fitted: Any = found.predictor
    return dataclasses.replace(found, predictor=dataclasses.replace(fitted, features=features))


def _trained(
    model: nn.Module,
    inputs: Tensor | Dataset[Any],
    labels: Tensor | None,
    *,
    target_epsilon: float,
    delta: float,
    temperature_share: float,
    samples: int,
    accountant: str,
    seed: int | None,
    held_out: float,
    raw: Tensor | None = None,
    **options: Any,
) -> Tempered:
    """The recipe; ``raw`` are the inputs as they were given, if what is trained on is made of them."""
    given: Any = inputs
    people = People.given(options.get("user_ids"), options.get("rows_per_user"))
    n = options.get("dataset_size") or len(given if people is None else people)
    tensors = isinstance(inputs, Tensor) and isinstance(labels, Tensor) and len(labels) == n  # fit refuses others
    held_out = held_out if tensors and not options.get("dataset_size") else 0.0
    chosen_on = Calibration.planned(
        n, target_epsilon, delta, share=temperature_share, held_out=held_out, accountant=accountant
    )
    chosen_on = chosen_on if people is None else Calibration()
    own = {"trace": chosen_on.trace, **dict(options.pop("options", None) or {})}
    plan: dict[str, Any] = {"delta": delta, "accountant": accountant, "target_epsilon": target_epsilon, "seed": seed}
    plan |= {"also": chosen_on.cost or None}
    data: Any = (inputs, labels) if labels is not None else inputs
    if few := chosen_on.held_out:
        pair: Any = given, labels
        held = left_out(given if raw is None else raw, pair[1], few / n).to(given.device)
        data, (inputs, labels) = tuple(t[held] for t in pair), (t[~held] for t in pair)
        options["dataset_size"] = n - few  # public, as n is: how many there really are depends on what they are
        batch = check_whole("batch_size", options["batch_size"], "Give the expected number in a batch", at_least=1)
        options["batch_size"] = min(batch, n - few) if batch <= n else batch
    fitted = fit(model, inputs, labels, method=METHOD, options=own, **plan, **options)
    if chosen_on.noise_multiplier is None:
        return Tempered(fitted, 1.0)
    chosen: dict[str, Any] = {"noise_multiplier": chosen_on.noise_multiplier, "samples": samples}
    own_seed = None if seed is None else seed ^ 0x7E3F
    own_seed = own_seed if options.get("after") is None else seed_after(own_seed, options["after"])
    chosen["generator"] = None if own_seed is None else torch.Generator().manual_seed(own_seed)
    data = data if isinstance(data, tuple) else DataLoader(data, batch_size=1024)
    if isinstance(fitted.account, Accountant) or options.get("out") is None:
        return calibrate_temperature(fitted, data, account=fitted.account, **chosen)
    return _kept_temperature(fitted, data, Path(options["out"]), chosen)


def _on_features(
    model: nn.Module, start_from: Any, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]
) -> tuple[nn.Linear, Features, Tensor, Tensor, Tensor]:
    """A last layer of zero, a prior's features, the inputs as they were given, and the data as that layer sees them."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        problem = "has no linear layer to say how many classes there are"
        raise bad("model", type(model).__name__, problem, "Add an nn.Linear as its last layer")
    if used(options.get("augment")) is not None:
        fix = "Leave augment out, or give start_from=dpivon.priors.Features(…, shift=2, mirror=True)"
        raise bad("augment", options["augment"], "was given with start_from, whose features are made once", fix)
    if options.get("evaluate") is not None:
        fix = "Leave evaluate out, and score what steady returns"
        raise bad("evaluate", options["evaluate"], "was given with start_from, whose training sees features alone", fix)
    if isinstance(inputs, Tensor) == (labels is None):
        given = type(labels).__name__ if labels is not None else None
        problem = "is missing" if labels is None else "was given with a Dataset, which has its own"
        raise bad("labels", given, problem, "Give one label per row of inputs, or a Dataset of pairs as inputs")
    x, y = inputs, labels
    if y is None:
        pairs = list(DataLoader(inputs, batch_size=1024))
        if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
            raise bad(
                "inputs", type(inputs).__name__, "is not a Dataset of pairs", "Give pairs of an input and a label"
            )
        x, y = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
    on = options.get("device") or (x.device if isinstance(inputs, Tensor) else linear[-1].weight.device)
    features = start_from
    if not isinstance(start_from, Features):
        features = Features.of(copy.deepcopy(model).to(on), start_from, tuple(x.shape[1:]))
    return features.last_layer(linear[-1].out_features).to(on), features, x, features(x).to(on), y.to(on)


def _kept_temperature(fitted: Fitted, data: Any, folder: Path, chosen: Mapping[str, Any]) -> Tempered:
    """The temperature that the folder has; or one that is chosen now, charged to its ledger and kept."""
    path, engine = folder / TEMPERATURE, fitted.account
    assert isinstance(engine, PrivacyEngine)
    if path.exists():
        return Tempered(fitted, float(read_json("out", path, "Remove it")["temperature"]))
    again = PrivacyEngine(accountant=fitted.budget.accountant, ledger=folder / LEDGER)
    again._limit = engine._limit
    fitted = dataclasses.replace(fitted, account=again)
    try:
        found = calibrate_temperature(fitted, data, account=again, **chosen)
    except BudgetSpent:
        message = "The budget has no room for a temperature: one was charged before and not kept. It is 1."
        warnings.warn(message, PrivacyWarning, stacklevel=3)
        return Tempered(fitted, 1.0)
    finally:
        assert again.ledger is not None
        again.ledger.close()
    replace(path, (json.dumps({"temperature": found.temperature, "answers": found.answers}) + "\n").encode())
    return found


def left_out(inputs: Tensor, labels: Tensor, share: float) -> Tensor:
    """Whether each example is held out, as about this share of them: by a hash of it and of how many before are the same.

    By its place it would not do: without one example all that follow it have another place, and many would be trained on
    that were held out. By this, one that is added or removed is one more or less on one side, and nothing else changes.
    """
    seen: Counter[bytes] = Counter()
    found = []
    for row in zip(inputs.cpu(), labels.cpu(), strict=True):
        own = hashlib.sha256(b"".join(bytes_of(part) for part in row)).digest()
        coin = hashlib.sha256(own + seen[own].to_bytes(8, "big")).digest()
        found.append(int.from_bytes(coin[:8], "big") < share * 2**64)
        seen[own] += 1
    return torch.tensor(found)


def blur(noise_multiplier: float, examples: int) -> float:
    """Standard deviation of the noise in the mean of surprise less entropy that a temperature is chosen by, in nats."""
    sigma, _, _ = temperature_cost(noise_multiplier)
    return sigma * BOUND / examples
