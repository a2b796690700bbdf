"""From probabilities to answers: the class that costs least, none where it is uncertain, or a set of classes.

All of it is public: declared, or released with noise (:mod:`dpivon.privacy.counting`). It is applied after a prediction, and
so is post-processing of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dpivon.errors import bad
from dpivon.temperature import temper

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
BALANCED: Literal["balanced"] = "balanced"


class Decision(BaseModel):
    """How to answer, for C classes; an empty tuple stands for the same number for each of them.

    Attributes:
        prior: the share of each class, declared or counted.
        counted: whether the prior was counted with noise, and not declared.
        costs: of not recognising an example of each class. The answer is argmax_k cost_k p_k, which costs least on average
            where p is right: with two classes a threshold of cost_0/(cost_0 + cost_1) on p_1.
        weights: of each class's losses in training. A model of the weighted rows gives p_k w_k up to a constant, so
            probabilities are divided by them.
        temperature: T of the probabilities after that (:mod:`dpivon.temperature`); 1 where none was chosen.
        factors: of each class's probability after that, fitted so that their mean is the prior.
        abstain: no answer where cost_k p_k, summed to 1 over the classes, is below this level for all k.
        coverage: the share of each class's examples whose prediction set holds their class, at least.
        thresholds: class k is in the set where p_k ≥ 1 − threshold_k.
        each: of several labels, how to answer each of them; probabilities are then [N, labels, 2].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prior: tuple[Share, ...] = ()
    counted: bool = False
    costs: tuple[Positive, ...] = ()
    weights: tuple[Positive, ...] = ()
    temperature: Positive = 1.0
    factors: tuple[Positive, ...] = ()
    abstain: Annotated[float, Field(ge=0, lt=1)] = 0.0
    coverage: Share | None = None
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    each: tuple[Decision, ...] = ()

    def with_prior(self, prior: tuple[float, ...], cost: Mapping[str, float] | str, classes: tuple[str, ...]) -> Self:
        """The same for these shares: costs by class name, or ``"balanced"`` for those at which a class's prior decides.

        Balanced costs are 1/prior: the answer is the class whose probability exceeds its share most, which is best for the
        balanced accuracy.
        """
        if cost == BALANCED and not prior:
            raise bad("cost", cost, "needs the shares of the classes", "Give --prior NAME=SHARE, or --prior count")
        if cost == BALANCED:
            costs: tuple[float, ...] = tuple(max(prior) / share for share in prior)
        else:
            assert not isinstance(cost, str)
            check_names("cost", cost, classes)
            costs = tuple(float(cost.get(name, 1.0)) for name in classes) if cost else ()
        return type(self).model_validate(self.model_dump() | {"prior": prior, "costs": costs})

    def with_factors(self, factors: tuple[float, ...]) -> Self:
        """The same with these factors; of several labels two for each, one label after the other."""
        each = tuple(own.with_factors(factors[2 * k : 2 * k + 2]) for k, own in enumerate(self.each))
        return self.model_copy(update={"each": each} if each else {"factors": factors})

    def loss_weights(self, classes: int) -> tuple[float, ...]:
        """The costs, scaled so that their mean over examples is 1 by the prior, or over classes where there is none."""
        costs = self.costs or (1.0,) * classes
        shares = self.prior or (1 / classes,) * classes
        mean = sum(c * s for c, s in zip(costs, shares, strict=True))
        return tuple(c / mean for c in costs)

    def probabilities(self, probs: Tensor) -> Tensor:
        """p ∝ (p / weights)^(1/T) · factors: of examples as frequent as they are, whatever they weighed in training."""
        if self.each:
            return torch.stack([own.probabilities(p) for own, p in zip(self.each, probs.unbind(1), strict=True)], 1)
        probs = _scaled(probs, tuple(1 / w for w in self.weights))
        return _scaled(probs if self.temperature == 1 else temper(probs, self.temperature), self.factors)

    def labels(self, probs: Tensor) -> Tensor:
        """The answer to each row of :meth:`probabilities`, [N] or [N, labels]; −1 for none."""
        if self.each:
            return torch.stack([own.labels(p) for own, p in zip(self.each, probs.unbind(1), strict=True)], 1)
        certainty, answer = _scaled(probs, self.costs).max(-1)
        return answer.where(certainty >= self.abstain, -1)

    def sets(self, probs: Tensor) -> Tensor:
        """Whether each class is in the prediction set of each row, boolean [N, C]."""
        return 1 - probs.double() <= probs.new_tensor(self.thresholds, dtype=torch.float64)

    def threshold(self) -> tuple[int, float] | None:
        """Of two classes that which is answered below one half, and from which probability on; None if there is none."""
        if len(self.costs) != 2 or len(set(self.costs)) == 1:
            return None
        dear = self.costs.index(max(self.costs))
        return dear, self.costs[1 - dear] / sum(self.costs)

    @property
    def plain(self) -> bool:
        """Whether the answer is always the most probable class."""
        return len(set(self.costs)) <= 1 and self.abstain == 0

    def sentences(self, classes: tuple[str, ...], labels: tuple[str, ...] = ()) -> list[str]:
        """What was decided, in sentences; of several ``labels`` one for each."""
        if self.each:
            return [f"{name}: {' '.join(own.sentences(classes))}" for name, own in zip(labels, self.each, strict=True)]
        said = []
        if self.prior:
            how = "counted with noise, and charged" if self.counted else "as declared"
            said.append(f"Shares of the classes, {how}: {_listed(classes, self.prior, '.3g')}.")
        if self.temperature != 1:
            how = "chosen by sums with noise over private rows, and charged"
            said.append(f"Probabilities have the temperature {self.temperature:.3g}, {how}.")
        if self.factors:
            said.append(
                "Probabilities were scaled so that their mean over the training rows is these shares, by sums with noise, and "
                f"charged: factors {_listed(classes, self.factors, '.3g')}."
            )
        if len(set(self.costs)) > 1:
            said.append(f"Cost of not recognising a class: {_listed(classes, self.costs, '.3g')}.")
        if (found := self.threshold()) is not None:
            said.append(f"So {classes[found[0]]} is answered from a probability of {found[1]:.1%} on.")
        if self.weights:
            said.append(
                f"Weights of the classes in training: {_listed(classes, self.weights, '.3g')}. A loss is weighted before its "
                "gradient is clipped, so the bound C and ε stay as they are; probabilities are divided by the weights."
            )
        if self.abstain:
            said.append(f"No answer (abstain) where no class reaches {self.abstain:.1%}.")
        if self.coverage is not None and self.thresholds:
            certain = ", ".join(n for n, t in zip(classes, self.thresholds, strict=True) if t == 1.0)
            every = f" Too few held-out rows to leave it out: {certain} is in every set." if certain else ""
            said.append(
                f"Prediction sets hold the true class of at least {self.coverage:.1%} of each class's examples, if new "
                f"examples are like the held-out ones.{every}"
            )
        return said


def complete_prior(given: Mapping[str, float], classes: tuple[str, ...]) -> tuple[float, ...]:
    """The share of every class; one that is not given has what is left."""
    check_names("prior", given, classes)
    left = [name for name in classes if name not in given]
    rest = 1 - sum(given.values())
    if len(left) > 1 or (left and not 0 < rest < 1) or (not left and abs(rest) > 1e-6):
        problem = f"leaves no shares for {', '.join(left)}" if left else "does not add up to 1"
        raise bad(
            "prior", _listed(tuple(given), tuple(given.values()), "g"), problem, "Give the share of all classes but one"
        )
    return tuple(float(given.get(name, rest)) for name in classes)


def shares_of(counts: Sequence[float]) -> tuple[float, ...]:
    """Shares from noisy counts, each at least half an example's: post-processing."""
    least = [max(count, 0.5) for count in counts]
    return tuple(count / sum(least) for count in least)


def check_names(option: str, given: Mapping[str, float], classes: tuple[str, ...]) -> None:
    """An error about a name that is none of the classes or labels."""
    for name in given:
        if name not in classes:
            raise bad(option, name, "is not a class or label to predict", f"Use the names {', '.join(classes)}")


def _scaled(probs: Tensor, factors: tuple[float, ...]) -> Tensor:
    if len(set(factors)) <= 1:
        return probs
    found = probs.double() * probs.new_tensor(factors, dtype=torch.float64)
    return (found / found.sum(-1, keepdim=True)).to(probs.dtype)


def _listed(names: tuple[str, ...], values: tuple[float, ...], kind: str) -> str:
    return ", ".join(f"{name} {value:{kind}}" for name, value in zip(names, values, strict=True))
