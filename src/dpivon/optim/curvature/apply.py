"""An estimator at work on a whole model, or on the rows of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dpivon.optim.curvature.base import CurvatureEstimator, Evidence
from dpivon.optim.tensors import TensorList

#: (rows, columns) of every tensor of a row of numbers, in their order.
Matrices: TypeAlias = Sequence[tuple[int, int]]


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
    """ĥ at once where the estimator allows it, tensor by tensor otherwise; ``matrices`` says where tensors are in a row."""
    if estimator.needs_sample and evidence.g_perturbation is None:
        return None
    if estimator.elementwise or getattr(estimator, "whole", False):
        return estimator(evidence)
    if isinstance(evidence.g, TensorList):
        shaped = matrix if getattr(estimator, "pools", False) else None
        tensors = [estimator(_tensor(evidence, i, shaped)) for i in range(len(evidence.g))]
        return TensorList(
            [t if shaped is None else t.reshape(g.shape) for t, g in zip(tensors, evidence.g, strict=True)]
        )
    return torch.cat([estimator(part).flatten(1) for part in by_tensor(evidence, matrices)], 1)


def by_tensor(evidence: Evidence[Any], matrices: Matrices = ()) -> list[Evidence[Tensor]]:
    """Each tensor's part of the evidence, as K matrices [K, rows, columns]; K = 1 outside a stack."""
    if isinstance(evidence.g, TensorList):
        return [_tensor(evidence, i, matrix) for i in range(len(evidence.g))]
    parts, at = [], 0
    for rows, columns in matrices:
        parts.append(_slice(evidence, at, rows, columns))
        at += rows * columns
    return parts


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter: its outputs and what each of them reads; a vector is one row."""
    return (shape[0], torch.Size(shape[1:]).numel()) if len(shape) > 1 else (1, torch.Size(shape).numel())


def _tensor(evidence: Evidence[TensorList], i: int, shaped: Callable[..., tuple[int, int]] | None) -> Evidence[Tensor]:
    def one(values: TensorList | None) -> Any:
        if values is None or shaped is None:
            return None if values is None else values[i]
        return values[i].reshape(1, *shaped(values[i].shape))

    return Evidence(
        g=one(evidence.g),
        g_squared=one(evidence.g_squared),
        g_perturbation=one(evidence.g_perturbation),
        noise_variance=evidence.noise_variance,
        hess=one(evidence.hess),
        ess=evidence.ess,
        weight_decay=evidence.weight_decay,
        batch_size=evidence.batch_size,
        t=evidence.t[i] if isinstance(evidence.t, list) else evidence.t,
        decay=evidence.decay,
        memory={key: one(value) for key, value in evidence.memory.items()},
    )


def _slice(evidence: Evidence[Tensor], at: int, rows: int, columns: int) -> Evidence[Tensor]:
    def part(values: Tensor | None) -> Any:
        return None if values is None else values[:, at : at + rows * columns].unflatten(1, (rows, columns))

    def column(value: Any) -> Any:
        return value.unsqueeze(-1) if isinstance(value, Tensor) else value

    return Evidence(
        g=part(evidence.g),
        g_squared=part(evidence.g_squared),
        g_perturbation=part(evidence.g_perturbation),
        noise_variance=column(evidence.noise_variance),
        hess=part(evidence.hess),
        ess=column(evidence.ess),
        weight_decay=column(evidence.weight_decay),
        batch_size=column(evidence.batch_size),
        t=evidence.t,
        decay=column(evidence.decay),
        memory={key: part(value) for key, value in evidence.memory.items()},
    )
