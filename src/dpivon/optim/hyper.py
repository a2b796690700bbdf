"""The hyperparameters of update rules: one name, one meaning, one range everywhere."""

from __future__ import annotations

import math
from typing import Any

from dpivon.errors import bad, check_number

_SHARE: dict[str, Any] = {"at_least": 0.0, "at_most": 1.0}
_POSITIVE: dict[str, Any] = {"above": 0.0}
_NOT_NEGATIVE: dict[str, Any] = {"at_least": 0.0}
_MOST = 3.4e38  # rows of a stack hold them in fp32, where more would be infinite

#: name: (range, what to use instead)
RANGES: dict[str, tuple[dict[str, Any], str]] = {
    "lr": (_NOT_NEGATIVE, "Use a non-negative step size such as 0.1"),
    "momentum": (_NOT_NEGATIVE, "Use about 0.9, or 0 for none"),
    "nesterov": (_SHARE, "Use True or False"),
    "beta1": (_SHARE, "Use about 0.9"),
    "beta2": (_SHARE, "Use about 0.999"),
    "weight_decay": (_NOT_NEGATIVE, "Use about 1e-4, or 0 for none"),
    "eps": (_NOT_NEGATIVE, "Use about 1e-8"),
    "nu": (_NOT_NEGATIVE, "Use about 1e-8"),
    "cap": ({"above": 0.0, "finite": False}, "Use inf for no cap"),
    "relative_floor": (_NOT_NEGATIVE, "Use about 0.1, or 0 for none"),
    "floor": (_POSITIVE, "Use about 1e-8; it bounds the step by lr/√floor"),
    "ema": ({"at_least": 0.0, "below": 1.0}, "Use a number such as 0.99, below 1"),
    "trace": (_NOT_NEGATIVE, "Use 1 for the spread of the iterates itself, or 0 for none"),
    "steps": (_NOT_NEGATIVE, "Use the planned number of steps, or 0 where nobody knows it"),
    "fade": (_SHARE, "Use 0 for a constant step, or 1 for one that shrinks to nothing"),
    "ramp": (_NOT_NEGATIVE, "Use 400, or 0 for a first step of full size however few there are"),
    "scale": (_POSITIVE, "Use the root mean square of the first weights"),
    "curvature_decay": ({"at_least": 0.0, "below": 1.0}, "Use about 0.99; 0 remembers nothing"),
    "batch_size": (_POSITIVE, "Use the expected batch size"),
    "hess_init": (_POSITIVE, "Use about 1"),
    "ess": (_POSITIVE, "Use the number of training examples"),
    "temperature": (_NOT_NEGATIVE, "Use 1 for the posterior itself"),
}


def check_hyper(name: str, value: Any) -> float:
    """``value`` inside the range of the hyperparameter ``name``; any finite number where it has none."""
    limits, fix = RANGES.get(name, ({}, "Use a finite number"))
    number = check_number(name, value, fix, **limits)
    if _MOST < abs(number) < math.inf:
        raise bad(name, value, "is more than fp32 holds", fix)
    if name == "nesterov" and number not in (0.0, 1.0):
        raise bad(name, value, "is neither", fix)
    return number
