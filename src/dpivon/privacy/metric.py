"""The metric that a private optimizer clips in, from release to release: the ordinary one until enough is known.

D of a batch is fixed when the release before it is made, so it cannot depend on the batch: whoever learns it is handed released
numbers, and whoever clips in it only reads it. The derivation is in :mod:`dpivon.optim.metric`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpivon.errors import DpivonError, PrivacyError, bad
from dpivon.optim.curvature import matrix
from dpivon.optim.metric import FactoredMetric, Factors, of_tensors, starting
from dpivon.optim.precision import full_dtype
from dpivon.optim.releases import check_per_coordinate
from dpivon.optim.tensors import TensorList
from dpivon.release import Release


class Scaling:
    """D of the next release, and what it is made of."""

    def __init__(self, metric: FactoredMetric, params: Sequence[Tensor]) -> None:
        self.metric, self._params = metric, list(params)
        self.releases = 0
        self._memory = starting([p.detach().to(full_dtype(p)) for p in params])
        self._factors: list[Factors] | None = None  # None is D = 1

    def factors(self, params: Sequence[Tensor]) -> list[Factors] | None:
        """D for these parameters; None where it is 1."""
        if len(params) != len(self._params) or any(p is not q for p, q in zip(params, self._params, strict=True)):
            raise PrivacyError(
                f"metric={self.metric}: a parameter was frozen or thawed since make_private, and D covers those of then. "
                "Nothing was released. Call make_private after freezing."
            )
        self._follow([p.device for p in params])
        return self._factors

    def _follow(self, devices: list[torch.device]) -> None:
        """To where the model was moved, if it was."""
        if [t.device for t in next(iter(self._memory.values()))] == devices:
            return
        self._memory = {
            name: TensorList([t.to(device) for t, device in zip(values, devices, strict=True)])
            for name, values in self._memory.items()
        }
        if self._factors is not None:
            moved = zip(self._factors, devices, strict=True)
            self._factors = [Factors(f.rows.to(device), f.columns.to(device)) for f, device in moved]

    @torch.no_grad()
    def unscaled(self, release: Release) -> Release:
        """g_dp = S/(b D) from S/b, with the variance (σC/b)²/D² of each coordinate. Post-processing."""
        if self._factors is None:
            return release
        assert isinstance(release.variance, float)
        gradients, variance = {}, {}
        for (p, g), factors in zip(release.gradients.items(), self._factors, strict=True):
            scale = factors.full(g.shape).to(g)
            gradients[p], variance[p] = g / scale, release.variance / scale.square()
        return replace(release, gradients=gradients, variance=variance)

    @torch.no_grad()
    def learn(self, release: Release) -> None:
        """Take in a release that was unscaled; from time to time it makes a new D."""
        told = release.variance
        g = TensorList(list(release.gradients.values()))
        noise = told if isinstance(told, float) else TensorList(list(told.values()))
        self.releases += 1
        evidence = self.metric.evidence(self._memory, g, noise_variance=noise, t=self.releases)
        self._memory = dict(evidence.memory)
        if self.releases % self.metric.every == 0:
            self._factors = of_tensors(self.metric.factors(evidence))

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All of it is public once the releases are."""
        known = self._factors or []
        return {
            "metric": asdict(self.metric),
            "releases": self.releases,
            "memory": {name: [t.clone() for t in values] for name, values in self._memory.items()},
            "rows": [f.rows.clone() for f in known],
            "columns": [f.columns.clone() for f in known],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Whether it is a state of this metric and these parameters: all of it, before any of it is taken."""
        try:
            known, releases, memory = dict(state["metric"]), int(state["releases"]), dict(state["memory"])
            factors = list(zip(state["rows"], state["columns"], strict=True))
            sides = [(r.shape, c.shape) for r, c in factors]
            held = [[t.shape for t in values] for values in memory.values()]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DpivonError(
                f"load_state_dict: the metric's state is damaged ({type(error).__name__}: {error}). Give one that "
                "state_dict() made."
            ) from None
        if known != asdict(self.metric):
            fix = "Give the metric that the run was begun with"
            raise bad("metric", self.metric, f"but the state is of {state['metric']!r}", fix)
        shapes = [p.shape for p in self._params]
        asked = [((rows, 1), (1, columns)) for rows, columns in map(matrix, shapes)]
        if memory.keys() != self._memory.keys() or any(h != shapes for h in held) or (sides and sides != asked):
            raise DpivonError("load_state_dict: the metric's state is of other parameters. Give that of this model.")
        numbers = [t for values in memory.values() for t in values]
        positive = all(bool((t.isfinite() & (t > 0)).all()) for pair in factors for t in pair)
        if releases < 0 or not positive or not all(bool(t.isfinite().all()) for t in numbers):
            raise DpivonError(
                "load_state_dict: the metric's state has factors that are not positive, or numbers that are not finite; every "
                "weight would become NaN. Give one that state_dict() made."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        like, saved = next(iter(self._memory.values())).tensors, state["memory"]
        self.releases = int(state["releases"])
        self._memory = {
            name: TensorList([t.to(u, copy=True) for t, u in zip(saved[name], like, strict=True)])
            for name in self._memory
        }
        pairs = zip(state["rows"], state["columns"], like, strict=False)  # neither, or one for each
        self._factors = [Factors(r.to(u, copy=True), c.to(u, copy=True)) for r, c, u in pairs] or None


def make_scaling(metric: FactoredMetric | None, optimizer: Optimizer, *, ranks: int) -> Scaling | None:
    """The state of the metric asked for, if whoever is to clip in it and to learn from it can."""
    if metric is None:
        return None
    if not isinstance(metric, FactoredMetric):
        raise bad("metric", metric, "is not a metric", "Use dpivon.FactoredMetric(), or leave it out")
    if ranks > 1:
        raise bad("metric", metric, f"is for one process, and there are {ranks}", "Train alone, or leave it out")
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len({p.device for p in params}) > 1:
        raise bad("metric", metric, "is for a model on one device", "Put it on one, or leave the metric out")
    check_per_coordinate(optimizer)
    return Scaling(metric, params)
