"""A private run as an auditor sees it: batches of its choice go in; what the optimizer gets comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    variance: float  # of the noise in it, as the optimizer was told
    theta: list[Tensor]  # where gradients were taken
    draws: int  # of θ, in this step


class Session(Protocol):
    """One or several runs of a path. Row indices point into the subject's data."""

    answer: Answer | None
    charged: list[int]  # releases that were charged when noise was drawn, one entry a draw

    def step(self, rows: Sequence[int], *, run: int = 0) -> Observed: ...

    def step_in_parts(self, rows: Sequence[int]) -> list[Observed]:
        """A batch too large to be computed at once; all releases that came of it."""
        ...

    def leave_half_way(self, rows: Sequence[int]) -> bool:
        """Sum a part of a batch and abandon it; False where a path cannot be left so."""
        ...

    def rebound(self, bound: float) -> bool:
        """Change C between two releases; False where it is fixed."""
        ...

    def spec(self, run: int = 0) -> NoiseSpec: ...

    def accountant(self, run: int = 0) -> Accountant: ...

    def sampled(self, steps: int) -> list[list[int]]:
        """Batches as the path draws them."""
        ...

    def train(self, steps: int) -> None:
        """On batches as the path draws them."""
        ...

    def state(self) -> list[Tensor]:
        """All that was learned: parameters, the optimizer's state, the posterior."""
        ...

    def network_as_trained(self) -> nn.Module:
        """A copy of the network that a method trains, which may be another one than it was given."""
        ...

    def means(self, run: int = 0) -> Tensor:
        """The trained parameters, flat."""
        ...


def start(subject: Subject, setting: Setting, answer: Answer | None = None) -> Session:
    """A fresh run of the subject. Equal settings give equal random streams."""
    from dpivon.audit.distributed_session import DistributedSession
    from dpivon.audit.engine_session import EngineSession
    from dpivon.audit.stack_session import StackSession

    kind: Any = StackSession if subject.stacked else EngineSession
    if subject.path == "distributed":
        kind = DistributedSession
    session: Session = kind(subject, setting.but(seed=setting.seed + subject.seed), answer)
    return session


def side_by_side(subject: Subject, setting: Setting, batches: Sequence[Sequence[int]]) -> list[Tensor]:
    """b·g_dp without noise of each batch, every one the first step of the same run: the clipped sums at one θ."""
    if subject.path == "distributed":  # in the same processes, which are dear to start
        ranks: Any = start(subject, setting, silence)
        return [ranks.fresh_step(rows).released * setting.batch for rows in batches]
    if not subject.stacked:
        return [start(subject, setting, silence).step(rows).released * setting.batch for rows in batches]
    session: Any = start(subject, setting.but(runs=len(batches), twins=True), silence)
    mask = torch.zeros(len(batches), len(subject.inputs))
    for k, rows in enumerate(batches):
        mask[k, list(rows)] = 1
    return list(session.all_runs(mask) * setting.batch)
