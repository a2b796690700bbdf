"""Is there still signal in the gradient, and what is the curvature doing? The questions of the paper's discussion.

Every number is a function of released quantities (g_dp, the variance s² of its noise, and the posterior), so
watching a private run spends no privacy.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.errors import DpivonError, PrivacyError, bad
from dpivon.optim.ivon import IVON
from dpivon.optim.ivon_rule import std
from dpivon.optim.prior import damping
from dpivon.posterior import Posterior


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of many numbers. The q-quantile is the smallest of them that at least a share q does not pass."""

    min: float = math.nan
    p01: float = math.nan
    median: float = math.nan
    p99: float = math.nan
    max: float = math.nan
    mean: float = math.nan

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Spread:
        """Over all entries of all tensors, exactly."""
        values = torch.cat([t.detach().flatten() for t in tensors])
        if values.numel() == 0:
            return cls()
        # Sorted by hand: torch.quantile refuses more than 16 million numbers, and a network has more.
        ordered = values.sort().values
        n = len(ordered)
        ranks = [math.ceil(q * n) for q in (0.01, 0.5, 0.99)]
        low, p01, median, p99, high = ordered[[0, *(rank - 1 for rank in ranks), n - 1]].tolist()
        return cls(low, p01, median, p99, high, float(values.double().mean()))


@dataclass(frozen=True)
class Row:
    """One step, over all coordinates of the model.

    ``projected_share`` is the share of coordinates with g² ≤ s², whose curvature target max(g² − s², 0) is zero:
    P(|z| ≤ 1) = 0.683 where the gradient is nothing but noise; without noise, the share of exact zeros.
    ``noise_to_signal`` is s² / (mean g² − s²), an estimate, as mean g² − s² estimates the mean squared clean gradient
    with standard error of about s²·√(2/P) for P coordinates; inf where it is not positive, so that no signal is visible.
    ``hess`` and ``std`` are h and the posterior's standard deviation, NaN for optimizers that have none.
    ``private`` says that g came out of a noisy release; otherwise it is the raw ``p.grad``, and no part of the row
    that depends on it may be published as private.
    """

    step: int
    private: bool
    gradient_rms: float
    noise_std: float
    projected_share: float
    noise_to_signal: float
    hess: Spread
    std: Spread


class Diagnostics:
    """A record of a training run.

    >>> diagnostics = Diagnostics(optimizer)
    >>> for x, y in loader:
    ...     ...
    ...     optimizer.step()
    ...     diagnostics.observe()
    >>> diagnostics.to_csv("diagnostics.csv")

    Args:
        optimizer: what ``make_private`` returned, a bare :class:`dpivon.IVON`, or any ``torch.optim`` optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        if getattr(optimizer, "_private", False):
            raise PrivacyError(
                "Diagnostics of the inner IVON of a private optimizer: its p.grad may hold raw gradients. "
                "Pass the optimizer that make_private returned."
            )
        inner = getattr(optimizer, "original_optimizer", optimizer)
        if not hasattr(inner, "param_groups"):
            raise bad("optimizer", type(optimizer).__name__, "is no optimizer", "Pass what make_private returned")
        self.optimizer = optimizer
        self.rows: list[Row] = []
        self._seen: Any = None

    @torch.no_grad()
    def observe(self, step: int | None = None) -> Row:
        """Record the step that was just made, and return its row. Call it after every ``step()``, or every n-th.

        ``step`` numbers the row; by default it is the optimizer's own count, or one more than the last row's for
        optimizers that keep none. A release that is already recorded (a step that only accumulated) adds no row.
        """
        release = getattr(self.optimizer, "last_release", None)
        if release is not None and release is self._seen:
            return self.rows[-1]
        gradients, s2 = self._gradients(release)
        number = sum(g.numel() for g in gradients)
        mean_g2 = sum(float(g.double().square().sum()) for g in gradients) / number
        signal = mean_g2 - s2
        hess, width = self._curvature()
        row = Row(
            step=self._step() if step is None else step,
            private=s2 > 0,
            gradient_rms=math.sqrt(mean_g2),
            noise_std=math.sqrt(s2),
            projected_share=sum(int((g.double().square() <= s2).sum()) for g in gradients) / number,
            noise_to_signal=0.0 if s2 == 0 else s2 / signal if signal > 0 else math.inf,
            hess=hess,
            std=width,
        )
        self.rows.append(row)
        self._seen = release
        return row

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """One line a row; ``hess`` and ``std`` become columns such as ``hess_median``."""
        if not self.rows:
            raise DpivonError("to_csv() without rows: nothing was observed. Call observe() after step().")
        table = [_flat(row) for row in self.rows]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)

    @staticmethod
    def by_layer(posterior: Posterior) -> dict[str, Spread]:
        """The posterior's standard deviation, by parameter name."""
        return {name: Spread.of([width]) for name, width in posterior.std.items()}

    # ---- what was released

    @property
    def _inner(self) -> Any:
        return getattr(self.optimizer, "original_optimizer", self.optimizer)

    def _gradients(self, release: Any) -> tuple[list[Tensor], float]:
        """g, and the variance of the noise in it."""
        if release is not None:
            return list(release.gradients.values()), float(release.variance)
        if hasattr(self.optimizer, "last_release"):
            raise DpivonError("observe() before the first step(): nothing has been released. Call it after step().")
        found = [p.grad for group in self._inner.param_groups for p in group["params"] if p.grad is not None]
        if not found:
            raise DpivonError("observe() without a gradient: no parameter has p.grad. Call it after step().")
        return found, 0.0

    def _curvature(self) -> tuple[Spread, Spread]:
        inner = self._inner
        if not isinstance(inner, IVON):
            return Spread(), Spread()
        hess, width = [], []
        for group in inner.param_groups:
            for p in group["params"]:
                h = inner.state[p].get("hess") if p in inner.state else None
                if h is not None:
                    hess.append(h)
                    width.append(std(h, ess=group["ess"], weight_decay=damping(inner.state[p], group)))
        return (Spread.of(hess), Spread.of(width)) if hess else (Spread(), Spread())

    def _step(self) -> int:
        counts = [int(state["step"]) for state in self._inner.state.values() if "step" in state]
        if counts:
            return max(counts)
        return self.rows[-1].step + 1 if self.rows else 1


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{key}": number for key, number in value.items()}
        else:
            flat[name] = value
    return flat
