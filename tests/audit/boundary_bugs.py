"""Bugs of who learns from what: something right of the boundary that reads what is left of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from program_bugs import raw_sums
from sowing import Patch, attr, both, everywhere
from torch import Tensor

import dpivon.stacked.stack as stacked
from dpivon.optim.ivon import IVON
from dpivon.posterior import Posterior
from dpivon.privacy.optimizer import DPOptimizer


def raw_gradient(where: str) -> dict[str, Patch | str]:
    """Momentum or curvature reads the clipped sum before its noise."""

    def engine(original: Any) -> Any:
        def evidence(self: Any, group: Any, params: Any, release: Any) -> Any:
            made = original(self, group, params, release)
            if release is None:
                return made
            raw = [(p.summed_grad / 13.0).to(h.dtype) for p, h in zip(params, made.hess, strict=True)]
            listed = type(made.g)(raw)
            from dataclasses import replace

            return replace(made, g=listed) if where == "momentum" else replace(made, g_squared=listed.square())

        return evidence

    def update(original: Any) -> Any:
        def stash(self: Any, total: Tensor) -> None:
            self.raw = (total / 13.0).float()
            original(self, total)

        return stash

    def rows(original: Any) -> Any:
        def apply(self: Any, g: Tensor, eps: Tensor, t: Tensor, states: Any) -> None:
            if where == "momentum":
                return original(self, self.raw, eps, t, states)
            before = [{k: v.clone() for k, v in part.state.items()} for part in self.parts]
            original(self, g, eps, t, states)
            for part, old in zip(self.parts, before, strict=True):
                if "hess" in old:
                    new = part.rule.step(old, self.raw[part.rows], eps[part.rows], t, part.hyper)
                    part.state["hess"].copy_(new["hess"])
            return None

        return apply

    def program(original: Any, self: Any) -> None:
        if where == "momentum":
            return self.rows.step(self.program.raw)
        (group,) = self.rows.groups
        kept = [*self.params, group.t, *group.rows.values()]
        before = [t.clone() for t in kept]
        original(self)
        after = [t.clone() for t in kept]
        torch._foreach_copy_(kept, before)
        self.rows.step(self.program.raw)
        hess = group.rows["hess"].clone()
        torch._foreach_copy_(kept, after)
        group.rows["hess"].copy_(hess)
        return None

    return everywhere(
        attr(IVON, "_evidence", engine),
        both(attr(stacked.Stack, "_update", update), attr(stacked.Stack, "_update_rows", rows)),
        compiled=raw_sums(program),
    )


def posterior_reads_data() -> dict[str, Patch | str]:
    """The width that is handed out depends on the private sums."""

    def posterior(original: Any) -> Any:
        def widened(self: Any, model: Any = None) -> Posterior:
            q = original(self, model)
            extra = sum(float(p.summed_grad.abs().sum()) for p in self.params if p.summed_grad is not None)
            return Posterior(q.mean, {k: v * (1 + extra) for k, v in q.variance.items()}, metadata=dict(q.metadata))

        return widened

    def stash(original: Any) -> Any:
        def update(self: Any, total: Tensor) -> None:
            self.raw = float(total.abs().sum())
            original(self, total)

        return update

    def program(original: Any, self: Any) -> None:
        original(self)
        for p, raw in zip(self.params, self.program.raw.split(self.program.sizes), strict=True):
            p.summed_grad = raw

    wide = attr(DPOptimizer, "posterior", posterior)
    std = property(lambda self: torch.cat([stacked._std(p) for p in self.parts]) * (1 + self.raw))
    return everywhere(
        wide,
        both(attr(stacked.Stack, "_update", stash), lambda: mock.patch.object(stacked.Stack, "std", std)),
        compiled=both(wide, raw_sums(program)),
    )
