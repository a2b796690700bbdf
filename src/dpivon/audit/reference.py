"""The clipped sum as the definition has it: one example after the other, in double, with nothing of the library in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from dpivon.audit.session import Observed, silence, start
from dpivon.audit.subject import Setting, Subject


def gradients(subject: Subject, theta: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """∇ℓ_i at θ for every row, [B, P], in double."""
    model = copy.deepcopy(subject.model).double()
    params = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, value in zip(params, theta, strict=True):
            p.copy_(value)
    x, y = subject.inputs, subject.labels
    x = x.double() if x.is_floating_point() else x
    out = []
    for i in rows:
        loss = subject.loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, params, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        out.append(torch.cat([g.flatten() for g in flat]))
    return torch.stack(out) if out else torch.zeros(0, sum(p.numel() for p in params), dtype=torch.float64)


def clipped(rows: Tensor, bound: float) -> Tensor:
    """g_i · min(1, C/‖g_i‖)."""
    return rows * (bound / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def clipped_sum(subject: Subject, seen: Observed, rows: Sequence[int], bound: float) -> Tensor:
    """Of these examples, at the θ of what was seen."""
    return clipped(gradients(subject, seen.theta, rows), bound).sum(0)


def unknown(subject: Subject) -> str:
    """Why what is above cannot be held against a run to rounding; empty where it can."""
    if subject.autocast and not subject.stacked:  # a stack has a precision of its own
        return "autocast rounds the forward pass, so the definition, in double, is another number"
    return "the forward pass is random, so the definition cannot be evaluated beside it" if is_random(subject) else ""


def is_random(subject: Subject) -> bool:
    """Whether two training passes over one batch differ, as with dropout or layers that draw their weights."""
    model = start(subject, Setting(), silence).network_as_trained().train()
    x = subject.inputs[:2]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return any(not torch.equal(model(x), model(x)) for _ in range(3))
