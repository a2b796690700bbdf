"""What a curvature estimator reads and how it is applied: evidence from one step in, a curvature target ĥ out.

All of :class:`Evidence` is public once the step's gradient has been released: an estimator is post-processing whatever it
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from dpivon.optim.tensors import TensorList, Values

#: (rows, columns) of every tensor of a row of numbers, in their order.
Matrices: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Evidence(Generic[Values]):
    """What one step knows about the curvature.

    Attributes:
        g: the gradient of the step: released g_dp under privacy, otherwise the average over θ-samples.
        g_squared: average over θ-samples of g_k²; equal to g² when only the average was released.
        g_perturbation: average over θ-samples of g_k ⊙ (θ_k − m); K·g ⊙ mean(θ_k − m) when only the average was
            released (unbiased, since E[g_j ⊙ (θ_k − m)] = 0 for j ≠ k).
            None when the step took no θ-sample, or the estimator did not ask for one.
        noise_variance: variance of the privacy noise in each coordinate of g; 0 without privacy. One number per model.
        hess, ess, weight_decay: h, N_ess and δ before the update.
        batch_size: the expected batch b that g is a mean over; None where it is not known.
        t: the number of this step, from 1.
        decay: ρ of the averages that an estimator keeps.
        memory: what the estimator keeps between steps, by its own names, this step included.
    """

    g: Values
    g_squared: Values
    g_perturbation: Values | None
    noise_variance: Any
    hess: Values
    ess: Any
    weight_decay: Any
    batch_size: Any = None
    t: Any = 1
    decay: Any = 0.99
    memory: Mapping[str, Values] = field(default_factory=dict)


@runtime_checkable
class CurvatureEstimator(Protocol):
    """Maps :class:`Evidence` to a curvature target ĥ, or to None to leave h as it is.

    ``name`` identifies it in reports. ``elementwise`` says that every coordinate is treated alike, so that it may be
    given all parameters at once; otherwise it is called tensor by tensor. ``needs_sample`` says that it reads
    ``g_perturbation``.

    Optional attributes:

    - ``pools = True``: each tensor comes as K matrices [K, rows, columns] (K = 1 outside a stack; a vector is one row),
      which must not be mixed. Needed in stacks by those that are not elementwise.
    - ``whole = True`` pools over all parameters at once.
    - ``remembers``: the names of tensors that it keeps between steps, which have the shape of the parameters and begin at
      zero. ``remember(evidence)`` returns them after this step given those before it, coordinate by coordinate;
      ``__call__`` finds the new ones in ``evidence.memory``.
    """

    @property
    def name(self) -> str:
        """What reports and checkpoints call it."""

    @property
    def elementwise(self) -> bool:
        """Whether every coordinate is treated alike."""

    @property
    def needs_sample(self) -> bool:
        """Whether it reads ``g_perturbation``."""

    def __call__(self, evidence: Evidence[Any]) -> Any: ...


def memory_of(estimator: CurvatureEstimator) -> tuple[str, ...]:
    """The names of what the estimator keeps between steps."""
    return getattr(estimator, "remembers", ())


def remembered(estimator: CurvatureEstimator, evidence: Evidence[Any]) -> Evidence[Any]:
    """The evidence with the estimator's memory brought up to this step."""
    if not memory_of(estimator):
        return evidence
    remember: Callable[[Evidence[Any]], dict[str, Any]] = estimator.remember  # type: ignore[attr-defined]
    return replace(evidence, memory=remember(evidence))


def estimate(estimator: CurvatureEstimator, evidence: Evidence[Any], matrices: Matrices = ()) -> Any:
    """ĥ at once where the estimator allows it, tensor by tensor otherwise.

    ``matrices`` says where tensors are in a row of a stack.
    """
    if estimator.needs_sample and evidence.g_perturbation is None:
        return None
    if estimator.elementwise or getattr(estimator, "whole", False):
        return estimator(evidence)
    if isinstance(evidence.g, TensorList):
        shaped = getattr(estimator, "pools", False)
        each = [estimator(_tensor(evidence, i, shaped)) for i in range(len(evidence.g))]
        return (
            TensorList([h.reshape(g.shape) for h, g in zip(each, evidence.g, strict=True)])
            if shaped
            else TensorList(each)
        )
    parts, at = [], 0
    for rows, columns in matrices:
        parts.append(estimator(_slice(evidence, at, rows, columns)).flatten(1))
        at += rows * columns
    return torch.cat(parts, 1)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter: its outputs and what each of them reads; a vector is one row."""
    return (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else (1, torch.Size(shape).numel())


def _tensor(evidence: Evidence[TensorList], i: int, shaped: bool) -> Evidence[Tensor]:
    """One tensor's part of the evidence; as a matrix [1, rows, columns] if ``shaped``."""

    def one(values: TensorList | None) -> Any:
        if values is None:
            return None
        return values[i].reshape(1, *matrix(values[i].shape)) if shaped else values[i]

    t = evidence.t[i] if isinstance(evidence.t, list) else evidence.t
    return _mapped(evidence, one, lambda number: number, t)


def _slice(evidence: Evidence[Tensor], at: int, rows: int, columns: int) -> Evidence[Tensor]:
    """One tensor's part of rows [K, P], as matrices [K, rows, columns]."""

    def part(values: Tensor | None) -> Any:
        return None if values is None else values[:, at : at + rows * columns].unflatten(1, (rows, columns))

    def column(number: Any) -> Any:
        return number.unsqueeze(-1) if isinstance(number, Tensor) else number

    return _mapped(evidence, part, column, evidence.t)


def _mapped(
    evidence: Evidence[Any], values: Callable[[Any], Any], number: Callable[[Any], Any], t: Any
) -> Evidence[Tensor]:
    wd = evidence.weight_decay  # a number, or as many as there are weights
    whole = isinstance(wd, TensorList) or (isinstance(wd, Tensor) and wd.shape == evidence.hess.shape)
    return Evidence(
        g=values(evidence.g),
        g_squared=values(evidence.g_squared),
        g_perturbation=values(evidence.g_perturbation),
        noise_variance=number(evidence.noise_variance),
        hess=values(evidence.hess),
        ess=number(evidence.ess),
        weight_decay=values(wd) if whole else number(wd),
        batch_size=number(evidence.batch_size),
        t=t,
        decay=number(evidence.decay),
        memory={key: values(value) for key, value in evidence.memory.items()},
    )
