"""Batch, epochs and step size where the user says nothing: rules of public numbers, never of a row.

They were set on public data (scikit-learn's breast cancer and digits, ε from 0.5 to 8), and are rules of thumb.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from dpivon.errors import DpivonError
from dpivon.methods import METHODS
from dpivon.privacy import budget

METHOD, EPOCHS = "dp-ivon-gradsq", 40
_LARGEST, _WANDER = 0.5, 0.5


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is not given yet. Of values that cannot be used something is returned too: validation will name them."""
    method = METHODS.get(str(given.get("method", METHOD)), METHODS[METHOD])
    try:
        n = max(1, int(given["dataset_size"]))
    except (TypeError, ValueError, OverflowError):
        n = 1
    found = {"batch_size": min(n, max(16, min(1024, n // 8))), "epochs": EPOCHS, "samples": method.samples}
    if given.get("lr") is not None:
        return found
    return {**found, "lr": method.lr * (_calm({**found, **given}) if method.name.startswith("dp-ivon") else 1.0)}


def _calm(given: Mapping[str, Any]) -> float:
    """The share of IVON's step size that noise leaves room for.

    T steps of noise σC/b walk a weight by about lr·√T·σC/b; that is held to half a unit, and the share to 0.5.
    """
    try:
        b = int(given["batch_size"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to warn of is said when the run is planned
            plan = budget(
                dataset_size=int(given["dataset_size"]),
                batch_size=b,
                epochs=int(given["epochs"]),
                delta=float(given["delta"]),  # YAML reads 1e-5 as a text
                target_epsilon=float(given["epsilon"]),
            )
        walk = math.sqrt(plan.steps) * plan.noise_multiplier * float(given.get("max_grad_norm", 1.0)) / b
        return min(_LARGEST, _WANDER / walk)
    except (DpivonError, KeyError, TypeError, ValueError, ArithmeticError):
        return _LARGEST
