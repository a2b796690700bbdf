"""What a method is, and a method at work on a model.

A method is a description: its update rule, what it optimises, what its posterior is, how it predicts, its defaults, its
reference. Clipping, noise, sampling and accounting are not part of it: they are the engine's, and the same for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpivon.errors import PrivacyError, bad
from dpivon.optim.average import EMA, window_decay
from dpivon.optim.ivon import IVON
from dpivon.optim.parameters import parameter_names
from dpivon.optim.rule import UpdateRule, takes_prior
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.posterior import Posterior
from dpivon.predict import predict
from dpivon.release import HasPosterior


@dataclass(frozen=True)
class Setup:
    """What a method is made with. ``dataset_size`` is the public N; ``options`` are the method's defaults, overridden."""

    lr: float
    dataset_size: int
    generator: torch.Generator | None
    options: Mapping[str, Any]
    rule: UpdateRule | None = None


Build = Callable[[nn.Module, Setup], tuple[nn.Module, Optimizer]]
Predict = Callable[..., Any]


def over_parameters(model: nn.Module, setup: Setup) -> tuple[nn.Module, Optimizer]:
    """The model as it is, and the rule over its parameters."""
    assert setup.rule is not None
    own = {"ess": float(setup.dataset_size)} if "ess" in setup.rule.defaults else {}
    options = {**own, **setup.options}
    return model, RuleOptimizer(model.parameters(), setup.rule, lr=setup.lr, generator=setup.generator, **options)


@dataclass(frozen=True)
class Method:
    """A method by its name: what tables and the command line say of it, and how it is made.

    Attributes:
        name: as in ``dpivon.method(name, …)``.
        title: as in tables.
        summary: a line for ``dpivon methods``.
        choose: when to choose it.
        reference: who proposed it.
        lr: the step size where the caller gives none.
        rule: its update rule; with one it can be stacked, and ``build`` and ``defaults`` follow from it.
        optimises: what it optimises.
        posterior: what its posterior is.
        predicts: how it predicts.
        build: ``build(model, setup)`` returns the model to train, which may be another one than it was given, and its
            optimizer; by default the model as it is, and the rule over its parameters.
        defaults: its options and their values where the caller gives none; by default the rule's.
        samples: how many draws a prediction averages; 0 for a point.
        predict: ``predict(model, posterior, x, samples, …)``; :func:`dpivon.predict` unless the method has its own way.
        averages: whether it averages its iterates by default, over a tenth of the training.
        trace: how much of the iterates' spread is width.
    """

    name: str
    title: str
    summary: str
    choose: str
    reference: str
    lr: float
    rule: UpdateRule | None = None
    optimises: str = "weights"
    posterior: str = "none: a point"
    predicts: str = "one pass"
    build: Build = over_parameters
    defaults: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    predict: Predict = predict
    averages: bool = False
    trace: float = 0.0

    def __post_init__(self) -> None:
        if self.rule is not None and not self.defaults:
            object.__setattr__(self, "defaults", options_of(self.rule))


def options_of(rule: UpdateRule) -> dict[str, float]:
    """A rule's defaults, without N, which is not an option but ``dataset_size``."""
    return {key: value for key, value in rule.defaults.items() if key != "ess"}


class Learner:
    """A method at work on a model: ``model`` and ``optimizer`` to train with, and the posterior to predict from.

    >>> learner = dpivon.method("dp-ivon-gradsq", model, dataset_size=len(train_set))
    >>> model, optimizer, loader = learner.make_private(engine, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     with learner.sample():
    ...         loss_fn(model(x), y).backward()
    ...     optimizer.step()
    >>> learner.predict(test_x)

    ``sample()`` puts a draw of θ into the parameters for the methods that train at one, and does nothing for the others, so
    the loop is the same for all. ``model`` and ``optimizer`` may as well be given to ``PrivacyEngine.make_private`` directly.

    Made by :func:`dpivon.methods.method`. ``average`` holds the averaged iterates, if any; ``windowed`` says that its
    decay follows from the number of steps.
    """

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, average: EMA | None, *, windowed: bool = False
    ) -> None:
        self.method, self.model, self.optimizer, self.average = method, model, optimizer, average
        self.private_optimizer: Any = None
        self.windowed = windowed

    def make_private(self, engine: Any, data_loader: Any, **options: Any) -> Any:
        """``engine.make_private`` for this model and optimizer; the options are that method's."""
        return self._remember(
            engine.make_private(module=self.model, optimizer=self.optimizer, data_loader=data_loader, **options)
        )

    def make_private_with_epsilon(self, engine: Any, data_loader: Any, **options: Any) -> Any:
        """``engine.make_private_with_epsilon`` for this model and optimizer; the options are that method's.

        A step whose size depends on the number of steps, which is public, learns it here unless it was given.
        """
        made = self._remember(
            engine.make_private_with_epsilon(
                module=self.model, optimizer=self.optimizer, data_loader=data_loader, **options
            )
        )
        self._plan(options["epochs"] * len(made[-1]))
        return made

    def _plan(self, steps: int) -> None:
        for group in self.optimizer.param_groups:
            if group.get("steps") == 0.0:
                group["steps"] = float(steps)
                if self.average is not None and self.windowed:
                    self.average.decay = window_decay(steps)

    @property
    def takes_prior(self) -> bool:
        """Whether its steps pull towards a prior's mean (:mod:`dpivon.optim.prior`)."""
        optimizer = self.optimizer
        return isinstance(optimizer, IVON) or (isinstance(optimizer, RuleOptimizer) and takes_prior(optimizer.rule))

    def _take_prior(self, prior: Posterior) -> None:
        """Hand the prior to the optimizer, which knows its parameters by their numbers."""
        if not self.takes_prior:
            fix = "Use 'dp-steady', 'dp-calm' or a DP-IVON"
            raise bad("prior", type(prior).__name__, f"is not used by {self.method.name!r}", fix)
        optimizer: Any = self.optimizer
        names = parameter_names(optimizer, self.model)
        trained = [names[p] for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if missing := [name for name in trained if name not in prior.mean]:
            fix = "Give the prior of this network"
            raise bad("prior", sorted(prior.mean)[:3], f"has no parameter {missing[0]!r}", fix)
        mean, variance = ({str(i): t[name] for i, name in enumerate(trained)} for t in (prior.mean, prior.variance))
        optimizer._take_prior(Posterior(mean, variance))

    def _remember(self, made: Any) -> Any:
        self.private_optimizer = made[1]
        return made

    @property
    def variational(self) -> bool:
        """Whether gradients are taken at a draw θ ~ N(m, diag σ²)."""
        return isinstance(self.optimizer, IVON)

    @contextmanager
    def sample(self) -> Iterator[None]:
        """The θ at which a training step takes its gradients."""
        if not isinstance(self.optimizer, IVON):
            yield
            return
        if self.private_optimizer is None and self.optimizer.private:
            raise PrivacyError(
                "sample(): the optimizer was made private elsewhere. Use learner.make_private, or sampled_params(train=True) "
                "of the private optimizer."
            )
        optimizer = self.optimizer if self.private_optimizer is None else self.private_optimizer
        with optimizer.sampled_params(train=True):
            yield

    def posterior(self) -> Any:
        """What was learned, under the model's own names: averaged iterates if they are averaged."""
        if self.average is not None:
            return self.average.posterior(self.model)
        if isinstance(self.optimizer, HasPosterior):
            return self.optimizer.posterior(self.model)
        return Posterior.point(self.model)

    def predict(self, x: Any, samples: int | None = None, **options: Any) -> Any:
        """As :func:`dpivon.predict`, in the method's own way; ``samples=None`` takes as many draws as is usual for it."""
        if samples is None:
            traced = self.average is not None and self.average.trace > 0
            samples = self.method.samples or (32 if traced else 0)
        return self.method.predict(self.model, self.posterior(), x, samples, **options)
