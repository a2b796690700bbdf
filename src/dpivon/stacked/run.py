"""One private training run of a stack, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dpivon.errors import bad, check_number, check_whole
from dpivon.methods import METHODS
from dpivon.optim.rule import check_hyper
from dpivon.stacked.rules import defaults_of, estimator_of, rule_of, stackable


class Kind(NamedTuple):
    """What sets rows apart besides their numbers."""

    method: str
    averaged: bool
    curvature: str  # the estimator it names
    traced: bool


@dataclass(frozen=True)
class Run:
    """One private training run, as plain data.

    Attributes:
        method: a name of ``dpivon methods`` that can be stacked.
        seed: decides first weights, batches, noise and posterior samples. A secret, unless the data is public.
        noise_multiplier: σ.
        max_grad_norm: C.
        lr: the step size α, as in the paper: IVON's is not multiplied by h₀ + δ here.
        batch_size: the expected batch b.
        options: override the method's defaults (``beta1``, ``ess``, ``hess_init``, …). ``ema``, for every method, keeps an
            average of the iterates beside them: ``Stack.average``; ``trace`` adds so many times their spread to the
            posterior's variance. ``curvature`` names another estimator of :mod:`dpivon.optim.curvature` for a method that
            has one; all others are numbers.
    """

    method: str
    seed: int
    noise_multiplier: float
    max_grad_norm: float
    lr: float
    batch_size: int
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise bad("options", self.options, "are not options by name", 'Give a dictionary, such as {"ema": 0.99}')
        object.__setattr__(self, "options", dict(self.options))  # checked below, and not to be changed afterwards
        if self.method not in stackable():
            raise bad("method", self.method, "cannot be stacked", f"Use one of {', '.join(map(repr, stackable()))}")
        own = defaults_of(self.method)
        check_whole("seed", self.seed, "Use a whole number; it seeds the privacy noise, so keep it secret")
        check_number("lr", self.lr, "Use a positive step size", above=0.0)
        check_whole("batch_size", self.batch_size, "Use the expected batch", at_least=1)
        unknown = set(self.options) - set(own) - {"ess", "ema", "trace"}
        if "steps" in own:
            unknown -= {"scale"}
        if estimator_of(self.method) is not None:
            unknown -= {"curvature"}
        if unknown:
            raise bad("options", sorted(unknown), f"are not options of {self.method!r}", f"Use {sorted(own)}")
        for name, value in self.options.items():
            if name != "curvature":
                check_hyper(name, value)
        if self.options.get("trace") and not self.averaged:
            trace = self.options["trace"]
            raise bad("trace", trace, "is of averaged iterates, and none are averaged", "Give ema too, such as 0.99")
        if not isinstance(self.options.get("curvature", ""), str):
            raise bad("curvature", self.options["curvature"], "is not a name", "Name an estimator; a run is plain data")
        rule_of(self.method, self.kind.curvature)  # names an estimator that is unknown

    @property
    def averaged(self) -> bool:
        """Whether an average of its iterates is kept."""
        return "ema" in self.options or METHODS[self.method].averages

    @property
    def trace(self) -> float:
        """How many times their spread is width."""
        return float(self.options.get("trace", METHODS[self.method].trace))

    @property
    def kind(self) -> Kind:
        """Rows of one kind are updated together."""
        return Kind(self.method, self.averaged, str(self.options.get("curvature", "")), self.trace > 0)
