"""Private training in one call: from a model and its data to a posterior."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpivon.defaults import METHOD
from dpivon.durable.ledger import read
from dpivon.errors import bad, check_whole
from dpivon.methods import METHODS
from dpivon.posterior import Posterior
from dpivon.predict import ClassPrediction, predict
from dpivon.privacy import Accountant, Budget, budget
from dpivon.privacy.accounting import DEFAULT
from dpivon.privacy.accounting.history import History, check_history
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.augmentation import Augmentation
from dpivon.privacy.clipping import Clipping
from dpivon.privacy.engine import PrivacyEngine
from dpivon.privacy.noise import seed_of
from dpivon.privacy.people import People
from dpivon.stacked.networks import cross_entropy, network_for
from dpivon.stacked.run import Run, stackable
from dpivon.stacked.stack import Stack
from dpivon.terminal import Bar

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Fitted:
    """What :func:`fit` returns: the posterior, and what it cost.

    Attributes:
        model: a copy of the network, at the posterior mean; where there are ``features``, the layer that takes these.
        posterior: the Gaussian over its weights.
        budget: the plan that was run, with its ε.
        account: what was spent, and what is charged later; of a run that is kept in a folder, its engine.
        path: ``"captured"`` where steps were replayed as a CUDA graph, or ``"eager"`` with the reason.
        features: what inputs go through before the model: of a prior, by :func:`dpivon.steady`.
    """

    model: nn.Module
    posterior: Posterior
    budget: Budget
    account: Accountant | PrivacyEngine = field(default_factory=Accountant)
    path: str = ""
    features: nn.Module | None = None

    def __post_init__(self) -> None:
        if isinstance(self.account, Accountant) and not self.account.history:
            plan = self.budget  # made of a plan alone: what is charged later must come on top of it
            self.account.charge(noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate, steps=plan.steps)

    @property
    def ledger(self) -> Path | None:
        """The file that all releases are in; None where the training was not kept in a folder."""
        return None if isinstance(self.account, Accountant) or self.account.ledger is None else self.account.ledger.path

    @property
    def history(self) -> History:
        """All that was released, as rows (σ, q, steps); of a training that was kept, what its ledger says."""
        return list(_accountant(self).history) if self.ledger is None else history(read(self.ledger), 0)

    @property
    def epsilon(self) -> float:
        """Of the plan; ``account`` says what was spent, a temperature chosen later included."""
        return self.budget.epsilon

    def predict(self, x: Tensor, samples: int = 32, **options: Any) -> ClassPrediction:
        """Class probabilities averaged over the posterior, as :func:`dpivon.predict`."""
        if self.features is not None:
            x = self.features(x) if isinstance(x, Tensor) else map(self.features, map(_inputs, x))
        return predict(self.model, self.posterior, x, samples, **options)


def fit(
    model: nn.Module,
    inputs: Tensor | Dataset[Any],
    labels: Tensor | None = None,
    *,
    batch_size: int,
    epochs: int,
    delta: float,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    lr: float | None = None,
    max_grad_norm: float = 1.0,
    dataset_size: int | None = None,
    method: str = METHOD,
    options: Mapping[str, float] | None = None,
    loss: Loss = cross_entropy,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    accountant: str = DEFAULT,
    also: History | None = None,
    after: Fitted | None = None,
    augment: Augmentation | None = None,
    clipping: str | Clipping = "flat",
    user_ids: Any = None,
    rows_per_user: int | None = None,
    prior: Posterior | str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, steps: None,
    progress: bool | None = None,
    out: str | os.PathLike[str] | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    physical_batch_size: int | None = None,
    device: str | torch.device | None = None,
) -> Fitted:
    """Train a copy of ``model`` within (ε, δ), starting from its weights.

    Tensors stay where they are. On a GPU every step runs there whole: batches are drawn, gradients clipped and noised, and the
    posterior updated in one captured program, after the budget of each block of steps was charged. On a CPU the same steps run
    one by one.

    With ``out``, ``user_ids``, ``evaluate`` or a ``Dataset`` the run is the engine's (:meth:`dpivon.PrivacyEngine.compile`):
    data may be larger than the device, and with ``out`` every release is in the ledger before it is made, and a run that was
    stopped or killed goes on with the same call, on a CPU to the bit.

    >>> fitted = dpivon.fit(model, x, y, batch_size=256, epochs=20, target_epsilon=3.0, delta=1e-5)
    >>> fitted.predict(test_x).probs

    Give either ``target_epsilon`` or ``noise_multiplier``. ``dp-steady`` has one default step for every ε;
    :func:`dpivon.steady` adds a private temperature to it. The model and the data are on one device, or go to ``device``.

    Args:
        model: the network; it is copied.
        inputs: as the model takes them, normalised by public constants, one example per row; or a ``Dataset`` of such pairs.
        labels: one per example.
        batch_size: the expected batch b.
        epochs: length of the run, in epochs of ⌈N/b⌉ steps.
        delta: δ, well below 1/N.
        target_epsilon: the ε to stay within.
        noise_multiplier: σ instead.
        lr: the step size; None takes the method's own. That of ``dp-steady`` has no unit and serves every ε; the others' were
            chosen on the digits at ε = 4. For a squared error take a third of it: about 1. That of a DP-IVON is the paper's α,
            not multiplied by h₀ + δ as in :class:`dpivon.IVON`.
        max_grad_norm: C.
        dataset_size: the public N if it is not simply ``len(inputs)``; q = b/N.
        method: a name of ``dpivon methods`` that can be stacked; ``"dp-ivon-gradsq"`` is the paper's.
        options: the method's own, such as ``{"ess": …, "hess_init": …}``.
        loss: ``loss(outputs, labels)`` returns one loss per example.
        accountant: ``"pld"`` (the tightest), ``"prv"`` or ``"rdp"`` (the paper's).
        also: releases to be made besides, which the plan leaves room for (:func:`~dpivon.privacy.accounting.budget.budget`).
        after: an earlier training on the same people, such as that of the weights in ``model``. Its releases come first in
            the account, and in the ledger, so ε is of both together. With ``out`` it must be in a folder too. The same
            ``seed`` draws other noise than it did there.
        dtype: ``torch.bfloat16`` runs forward and backward in bf16; norms and sums are still taken in fp32 and double.
        seed: decides batches, noise and posterior samples: leave it out (it is then drawn from the operating system)
            unless the data is public. With ``out`` on a CPU the same seed gives other bits than without: noise
            is drawn for the sum that it is added to, so that copies of a folder never add the same noise to two sums.
        augment: augmentations of every drawn image, averaged before clipping (:class:`dpivon.Augmentation`); they cost no
            privacy.
        clipping: the rule that bounds every example at C, by its name or as an object.
        user_ids: whose each row is, for privacy per person (:meth:`dpivon.PrivacyEngine.make_private`): N and b count people.
            The steps are then those of a loop of your own, not one captured program: ``path`` of the result says so.
        rows_per_user: at most so many rows of a person in a step, drawn afresh; None for all.
        prior: of the weights, as for :class:`dpivon.IVON`; begin at its mean by putting that into ``model``.
        on_progress: ``on_progress(done, steps)`` is called after every block.
        progress: a bar on stderr with live ε and the time left; by default where stderr is a terminal.
        out: a folder for ledger, checkpoints, progress and the model, as that of ``dpivon train``: ``dpivon ledger``,
            ``report`` and ``export`` read it. All but its ``model/`` is as secret as the data. The same call on a finished
            folder returns what it holds. Other settings and other data are refused; what a function ``loss`` does is not
            compared.
        evaluate: called with what predicts after every epoch. Its numbers are in ``progress.jsonl`` as not private: do not
            publish them, nor decide anything by them.
        physical_batch_size: with ``out``, ``user_ids``, ``evaluate`` or a ``Dataset``: how many examples run at once.
        device: where to train, if not where the model is; what is returned is there.

    A method that averages its iterates returns the average.
    """
    if method not in stackable():
        raise bad("method", method, "cannot be fitted", f"Use one of {', '.join(map(repr, stackable()))}")
    lr = METHODS[method].lr if lr is None else lr
    if device is not None:
        model = copy.deepcopy(model).to(device)
        inputs = inputs.to(device) if isinstance(inputs, Tensor) else inputs
        labels = labels if labels is None else labels.to(device)
    given: Any = inputs
    people = People.given(user_ids, rows_per_user)
    if people is not None:
        people.check(len(given))
    n = len(given if people is None else people) if dataset_size is None else dataset_size
    earlier = [] if after is None else _earlier(after, "" if people is None else people.unit, out)
    beside = [*earlier, *check_history(also or [])]
    plan = budget(
        dataset_size=n,
        batch_size=batch_size,
        epochs=epochs,
        delta=delta,
        target_epsilon=target_epsilon,
        noise_multiplier=noise_multiplier,
        accountant=accountant,
        also=beside,
    )
    seed = seed if after is None else seed_after(seed, after)
    if labels is None and isinstance(inputs, Tensor):
        raise bad("labels", None, "is missing", "Give one label per row of inputs, or a Dataset of pairs as inputs")
    if out is not None or people is not None or labels is None or evaluate is not None:
        from dpivon.train import own_model  # here, since it needs what a command line needs

        trained, posterior, engine, path = own_model.train(
            model,
            given if labels is None else (given, labels),
            plan,
            out=None if out is None else os.fspath(out),
            after=after,
            also=beside,
            target_epsilon=target_epsilon,
            epochs=epochs,
            lr=lr,
            max_grad_norm=max_grad_norm,
            method=method,
            options=options or {},
            loss=loss,
            dtype=dtype,
            seed=seed,
            augment=augment,
            clipping=clipping,
            people=people,
            prior=prior,
            progress=progress,
            physical_batch_size=physical_batch_size,
            on_progress=on_progress,
            evaluate=evaluate,
        )
        return Fitted(trained, posterior, plan, engine.accountant if out is None else engine, path)
    seed = secrets.randbits(62) if seed is None else seed
    run = Run(method, seed, plan.noise_multiplier, max_grad_norm, lr, batch_size, dict(options or {}))
    network = network_for(model, loss, augment, clipping)
    start = network.pack(model).unsqueeze(0)
    known: dict[str, Any] = {"dataset_size": n, "steps": plan.steps}
    known |= {"augment": augment, "clipping": clipping, "accountant": accountant, "prior": prior}
    stack = Stack([run], network, given, labels, dtype=dtype, start=start, **known)
    account = stack.mechanism.accountants[0]
    for sigma, rate, steps in earlier:
        account.charge(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    with Bar(plan.steps, lambda: account.get_epsilon(delta), progress) as bar:
        for done in stack.train(plan.steps):
            bar.at(done)
            on_progress(done, plan.steps)
    at = {"averaged": run.averaged}
    path = "captured" if given.is_cuda else f"eager (on {given.device.type})"
    return Fitted(stack.model(0, **at), stack.posterior(0, **at), plan, account, path)


def _inputs(batch: Any) -> Tensor:
    found: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return found


def _accountant(fitted: Fitted) -> Accountant:
    return fitted.account if isinstance(fitted.account, Accountant) else fitted.account.accountant


def seed_after(seed: int | None, after: Fitted) -> int | None:
    """Another seed, for a training that comes after this one: the same would draw the same noise on other sums."""
    if seed is None:
        return None
    fix = "Use a whole number; it seeds the privacy noise, so keep it secret"
    return seed_of(f"{check_whole('seed', seed, fix)} after {after.posterior.digest}")


def _earlier(after: Any, unit: str, out: Any) -> History:
    """What an earlier training released, if both are for one unit of privacy and all of it can be in the ledger."""
    if not isinstance(after, Fitted):
        fix = "Give the Fitted that fit returned; of what steady returned, its predictor"
        raise bad("after", type(after).__name__, "is not an earlier training", fix)
    if (theirs := _accountant(after).unit or "") != unit:
        a, b = (name or "the example" for name in (theirs, unit))
        fix = "Give user_ids to both, or to neither"
        raise bad("after", type(after).__name__, f"is for the unit of privacy {a!r}, and this training for {b!r}", fix)
    if out is not None and after.ledger is None:
        problem = "was not kept in a folder, so its releases cannot be in the ledger of this one"
        raise bad("after", type(after).__name__, problem, "Give out= to both, or to neither")
    return after.history
