"""A private run as an auditor sees it: batches of its choice go in; what the optimizer gets comes out.

Beside it stands the clipped sum as the definition has it, which shares no code with the library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.audit.subject import Setting, Subject
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.mechanism import NoiseSpec

#: Stands in for the noise: (shape and dtype to fill, σC) → noise. None leaves the path's own noise in place.
Answer = Callable[[Tensor, float], Tensor]


def silence(like: Tensor, std: float) -> Tensor:
    return torch.zeros_like(like)


def one_std(like: Tensor, std: float) -> Tensor:
    return torch.full_like(like, std)


def drowned(batch: float, bound: float) -> Answer:
    """Noise so large that in fp32 a few gradients of that norm vanish in it: every coordinate of g_dp is 2²³ of it."""
    return lambda like, std: torch.full_like(like, batch * bound * 2.0**23)


@dataclass(frozen=True)
class Observed:
    """One release of one run."""

    released: Tensor  # g_dp, flat, in double: what the optimizer got
    variance: float  # of the noise in it, as stated to the optimizer
    theta: list[Tensor]  # where gradients were taken
    draws: int  # of θ, in this step


class Session:
    """One or several runs of a path. Row indices point into the subject's data. Each path has its subclass."""

    step: Callable[[Sequence[int]], Observed]
    step_in_parts: Callable[
        [Sequence[int]], list[Observed]
    ]  # a batch too large to be computed at once; all its releases
    spec: Callable[[], NoiseSpec]
    accountant: Callable[[], Accountant]
    sampled: Callable[[int], list[list[int]]]  # so many batches as the path draws them
    train: Callable[[int], None]  # on so many batches as the path draws them
    state: Callable[[], list[Tensor]]  # all that was learned: parameters, the optimizer's state, the posterior
    network_as_trained: Callable[[], nn.Module]  # a copy of what a method trains, which may not be what it was given
    means: Callable[[], Tensor]  # the trained parameters, flat

    def __init__(self, subject: Subject, setting: Setting, answer: Answer | None) -> None:
        self.subject, self.setting, self.answer = subject, setting, answer
        self.charged: list[int] = []  # releases that were charged when noise was drawn, one entry per draw

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        """Sum a part of a batch and abandon it; False where a path cannot be left so."""
        return False

    def rebound(self, bound: float) -> bool:
        """Change C between two releases; False where it is fixed."""
        return False


def start(subject: Subject, setting: Setting, answer: Answer | None = None) -> Any:
    """A fresh :class:`Session` of the subject. Equal settings give equal random streams."""
    from dpivon.audit.distributed_session import DistributedSession
    from dpivon.audit.engine_session import EngineSession
    from dpivon.audit.stack_session import StackSession

    kinds: dict[str, type[Session]] = {
        "stacked": StackSession,
        "captured": StackSession,
        "distributed": DistributedSession,
    }
    return kinds.get(subject.path, EngineSession)(subject, setting.but(seed=setting.seed + subject.seed), answer)


def side_by_side(subject: Subject, setting: Setting, batches: Sequence[Sequence[int]]) -> list[Tensor]:
    """b·g_dp without noise of each batch, every one the first step of the same run: the clipped sums at one θ."""
    if subject.path == "distributed":  # in the same processes, which are dear to start
        ranks = start(subject, setting, silence)
        return [ranks.fresh_step(rows).released * setting.batch for rows in batches]
    if not subject.stacked:
        return [start(subject, setting, silence).step(rows).released * setting.batch for rows in batches]
    session = start(subject, setting.but(runs=len(batches), twins=True), silence)
    mask = torch.zeros(len(batches), len(subject.inputs))
    for k, rows in enumerate(batches):
        mask[k, list(rows)] = 1
    return list(session.all_runs(mask) * setting.batch)


# ---- the definition: one example after the other, in double


def gradients(subject: Subject, theta: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """∇ℓ_i at θ for every row, [B, P], in double."""
    model = copy.deepcopy(subject.model).double()
    params = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, value in zip(params, theta, strict=True):
            p.copy_(value)
    x, y = subject.inputs, subject.labels
    x = x.double() if x.is_floating_point() else x
    out = torch.zeros(len(rows), sum(p.numel() for p in params), dtype=torch.float64)
    for row, i in zip(out, rows, strict=True):
        loss = subject.loss(model(x[i : i + 1]), y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, params, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
        row.copy_(torch.cat([g.flatten() for g in flat]))
    return out


def clipped(rows: Tensor, bound: float) -> Tensor:
    """g_i · min(1, C/‖g_i‖)."""
    return rows * (bound / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def clipped_sum(subject: Subject, seen: Observed, rows: Sequence[int], bound: float) -> Tensor:
    """Of these examples, at the θ of what was seen."""
    return clipped(gradients(subject, seen.theta, rows), bound).sum(0)


def unknown(subject: Subject) -> str:
    """Why the definition cannot be held against a run to rounding; empty where it can."""
    if subject.autocast and not subject.stacked:  # a stack has a precision of its own
        return "autocast rounds the forward pass, so the definition, in double, is another number"
    return "the forward pass is random, so the definition cannot be evaluated beside it" if is_random(subject) else ""


def is_random(subject: Subject) -> bool:
    """Whether two training passes over one batch differ, as with dropout or layers that draw their weights."""
    model = start(subject, Setting(), silence).network_as_trained().train()
    x = subject.inputs[:2]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return any(not torch.equal(model(x), model(x)) for _ in range(3))
