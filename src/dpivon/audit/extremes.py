"""Examples that go as far as an example can."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpivon.audit.subject import Subject

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "opposite": lambda x: -x,
    "scaled by 30": lambda x: 30.0 * x,
    "scaled by 1e6": lambda x: 1e6 * x,
    "scaled by 1e-6": lambda x: 1e-6 * x,
    "zero": lambda x: 0.0 * x,
    "NaN": lambda x: torch.full_like(x, math.nan),
    "one NaN": lambda x: torch.where(torch.arange(x.numel()).reshape(x.shape) == 0, math.nan, x),
    "Inf": lambda x: torch.full_like(x, math.inf),
    "overflowing": lambda x: torch.full_like(x, 3e38),
}


def with_extremes(subject: Subject, members: int = 12, at: int = 2) -> tuple[Subject, dict[str, int]]:
    """The first examples of the data, and after them example ``at`` driven to every extreme, each under the next one's label.

    Data that are not numbers on a line, such as tokens, cannot be scaled: of those only ordinary and repeated examples.
    Also where each extreme stands.
    """
    x, y = subject.inputs[:members], subject.labels[:members]
    kinds = EXTREMES if x.is_floating_point() else {"ordinary": EXTREMES["ordinary"]}
    extras = [*(change(x[at]) for change in kinds.values()), x[at]]
    labels = [y[(at + 1) % len(y)]] * len(kinds) + [y[at]]
    larger = subject.but(inputs=torch.cat([x, torch.stack(extras)]), labels=torch.cat([y, torch.stack(labels)]))
    return larger, {kind: len(x) + i for i, kind in enumerate([*kinds, "duplicated"])}
