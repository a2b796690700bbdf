"""An optimizer's state as rows that stay where they are, so that a captured program can draw θ and write the next state.

It is what a stack does for K runs, for one: the same rule on rows [1, P]. Step sizes and other numbers are read from the
device's memory, where they are written whenever they change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpivon.optim import tensors
from dpivon.optim.curvature import matrix
from dpivon.optim.ivon import IVON, MEMORY
from dpivon.optim.ivon_rule import DEFAULTS, IVONRule
from dpivon.optim.rule import UpdateRule
from dpivon.optim.rule_optimizer import ReleaseOptimizer, RuleOptimizer
from dpivon.optim.steady import CalmOptimizer
from dpivon.optim.tensors import TensorList

State = dict[str, Tensor]
_IVONS = ("_update", "_evidence", "_draw", "_perturb")  # which a subclass would have computed otherwise
_MADE = ("batch_size", "noise_variance")  # numbers of the release, not of a group


class Numbers:
    """Numbers on the device, each a tensor of its own; written there without waiting, when one has changed."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._there = torch.zeros(count, dtype=torch.float64, device=device)
        self._last: tuple[float, ...] = ()

    def __iter__(self) -> Any:
        return iter(self._there.unbind())

    def write(self, values: tuple[float, ...]) -> None:
        if values != self._last:
            here = torch.tensor(values, dtype=torch.float64, pin_memory=self._there.is_cuda)
            self._there.copy_(here, non_blocking=True)
            self._last = values


class _Group:
    """The parameters of one group of an optimizer, one after the other."""

    def __init__(self, inner: Any, index: int, params: list[Tensor], rule: UpdateRule) -> None:
        self.index, self.params, self.rule, self.inner = index, params, rule, inner
        self.shapes = [p.shape for p in params]
        self.variational = isinstance(inner, IVON)
        first = self._states()[0]
        self._keys = {key.removeprefix(MEMORY) if self.variational else key: key for key in first if key != "step"}
        size, device = sum(p.numel() for p in params), params[0].device
        self._like = params[0].detach().new_empty(1).expand(1, size)
        self.rows = {name: torch.zeros(1, size, dtype=params[0].dtype, device=device) for name in self._keys}
        self._views = [
            [(key, view) for key, view in zip(self._keys.values(), views, strict=True)]
            for views in zip(*(self.split(row) for row in self.rows.values()), strict=True)
        ]
        self._names = ("lr", *(("ess", *DEFAULTS) if self.variational else rule.defaults))
        self._numbers = Numbers(len(self._names) + len(_MADE), device)
        self.hyper = dict(zip((*self._names, *_MADE), self._numbers, strict=True))  # of the release last, for all rules
        self.t = torch.zeros((), dtype=torch.int64, device=device)
        self.normals = torch.zeros(1, size, dtype=params[0].dtype, device=device)  # of the θ of this step, added up
        self._done = 0

    @property
    def group(self) -> dict[str, Any]:
        """As the optimizer has it now: loading a state puts another in its place."""
        own: dict[str, Any] = self.inner.param_groups[self.index]
        return own

    def _states(self) -> list[dict[str, Any]]:
        return [self.inner._state(p, self.group) for p in self.params]

    def split(self, row: Tensor) -> list[Tensor]:
        return TensorList.of(row.view(-1), self.shapes).tensors

    def mean(self) -> Tensor:
        return _joined(TensorList(self.params))

    def normal(self) -> Tensor:
        """Standard normals as the optimizer itself draws them."""
        if tensors.joins(self.params):
            return self.inner._standard_normal(self._like)
        return _joined(TensorList([self.inner._standard_normal(p) for p in self.params]))

    def adopt(self) -> bool:
        """Take over what the optimizer's state holds now. False if that does not fit in rows."""
        steps, state = set(), self.inner.state
        if self.variational and not _plain(self.group):
            return False
        for p, views in zip(self.params, self._views, strict=True):
            own = state[p]
            if len(own) != len(views) + 1 or "mean" in own:
                return False
            for key, view in views:
                if own[key] is not view:
                    view.copy_(own[key])
                    own[key] = view
            steps.add(own["step"])
        if len(steps) > 1:
            return False
        (done,) = steps
        if done != self._done:
            self.t.fill_(done)
            self._done = done
        return True

    def write(self, batch_size: float, variance: float) -> None:
        group = self.group
        own = {name: float(group[name]) for name in self._names}
        if self.variational and group["rescale_lr"]:
            own["lr"] *= group["hess_init"] + group["weight_decay"]
        own |= {"batch_size": batch_size} if "batch_size" in own else {}
        self._numbers.write((*own.values(), batch_size, variance))

    def count(self) -> None:
        self._done += 1
        for p in self.params:
            self.inner.state[p]["step"] = self._done


class StateRows:
    """All of an optimizer's state in rows. Made by :func:`rows_of`.

    Args:
        inner: the optimizer.
        compiled: what makes a function fast where it runs.
    """

    def __init__(self, inner: ReleaseOptimizer, rule: UpdateRule, compiled: Callable[[Any], Any]) -> None:
        trained = [[p for p in group["params"] if p.requires_grad] for group in inner.param_groups]
        self.groups = [_Group(inner, i, own, _on(rule, own)) for i, own in enumerate(trained) if own]
        self.samples = inner.mc_samples if isinstance(inner, IVON) else 0
        self.params = [p for group in self.groups for p in group.params]
        self._perturbed, self._stepped = compiled(self._theta), compiled(self._next)

    def ready(self, batch_size: float, variance: float) -> bool:
        """Whether the next step can be made here; state and numbers are then in place."""
        if not all(group.adopt() for group in self.groups):
            return False
        for group in self.groups:
            group.write(batch_size, variance)
        return True

    def draw(self, thetas: Sequence[Sequence[Tensor]]) -> None:
        """Write so many draws of θ, each parameter by parameter."""
        for k, theta in enumerate(thetas):
            normals = [group.normal() for group in self.groups]
            known = [(group.mean(), group.rows, group.hyper) for group in self.groups]
            made = self._perturbed(known, normals)
            values = [v for group, row in zip(self.groups, made, strict=True) for v in group.split(row)]
            torch._foreach_copy_(list(theta), values)
            for group, normal in zip(self.groups, normals, strict=True):
                group.normals.copy_(group.normals + normal if k else normal)

    def _theta(self, known: Sequence[tuple[Tensor, State, State]], normals: Sequence[Tensor]) -> list[Tensor]:
        rules: list[Any] = [group.rule for group in self.groups]
        each = zip(rules, known, normals, strict=True)
        return [mean + rule.perturbation(rows, normal, hyper) for rule, (mean, rows, hyper), normal in each]

    def step(self, g: Tensor) -> None:
        """The update from a released gradient, one number per weight."""
        sizes = [sum(shape.numel() for shape in group.shapes) for group in self.groups]
        normals = [
            group.normals if group.variational else group.normal() if group.rule.draws else None
            for group in self.groups
        ]
        for group in self.groups:
            group.t += 1
        known = [(group.mean(), group.rows, group.hyper, group.t) for group in self.groups]
        means = self._stepped([part.view(1, -1) for part in g.split(sizes)], normals, known)
        torch._foreach_copy_(
            self.params, [v for group, m in zip(self.groups, means, strict=True) for v in group.split(m)]
        )

    def _next(self, g: Sequence[Tensor], normals: Sequence[Any], known: Sequence[Any]) -> list[Tensor]:
        means = []
        for group, own, normal, (mean, rows, hyper, t) in zip(self.groups, g, normals, known, strict=True):
            new = group.rule.step(
                {**rows, "mean": mean}, own, t=t, noise_variance=hyper["noise_variance"], normal=normal, hyper=hyper
            )
            for name, value in rows.items():
                if new[name] is not value:
                    value.copy_(new[name])
            means.append(new["mean"])
        return means

    def count(self) -> None:
        """A step was made."""
        for group in self.groups:
            group.count()
        torch.autograd.graph.increment_version(self.params)  # a replay writes without torch's knowledge


def rows_of(inner: Optimizer, compiled: Callable[[Any], Any]) -> StateRows | None:
    """The optimizer's state in rows; None if its rule cannot be computed with there."""
    rule = _rule(inner)
    params = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    if rule is None or {p.dtype for p in params} != {torch.float32}:
        return None
    assert isinstance(inner, ReleaseOptimizer)
    return StateRows(inner, rule, compiled)


def _rule(inner: Optimizer) -> UpdateRule | None:
    if isinstance(inner, IVON) and all(getattr(type(inner), name) is getattr(IVON, name) for name in _IVONS):
        return IVONRule(inner.curvature) if all(map(_plain, inner.param_groups)) else None
    if isinstance(inner, RuleOptimizer) and type(inner)._update in (RuleOptimizer._update, CalmOptimizer._update):
        return inner.rule
    return None


def _plain(group: dict[str, Any]) -> bool:
    """Whether a group's IVON is the rule's."""
    return bool(group["debias"]) and math.isinf(group["clip_radius"])


def _on(rule: UpdateRule, params: Sequence[Tensor]) -> UpdateRule:
    """The rule for a row of these parameters."""
    if not hasattr(rule, "matrices"):
        return rule
    made: UpdateRule = replace(rule, matrices=tuple(matrix(p.shape) for p in params))  # type: ignore[type-var]
    return made


def _joined(values: TensorList) -> Tensor:
    flat = values.flat
    return (torch.cat([t.reshape(-1) for t in values]) if flat is None else flat).view(1, -1)
