"""Any update rule as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import DpivonError, PrivacyError, bad
from dpivon.optim.parameters import dense, follow, full_dtype, full_mean, full_means, parameter_names, restore
from dpivon.optim.prior import PRIOR, as_prior, prior_state
from dpivon.optim.rule import UpdateRule, check_hyper, takes_prior
from dpivon.optim.tensors import TensorList
from dpivon.posterior import Posterior
from dpivon.release import Release
from dpivon.shards import local, part_of, whole


class ReleaseOptimizer(Optimizer):
    """What optimizers share that learn from releases: :class:`RuleOptimizer` and :class:`dpivon.IVON`."""

    generator: torch.Generator | None = None
    #: Makes the update from a release of the program that it belongs to; False for any other release.
    replayed: Callable[[Release], bool] | None = None
    _private = False
    _prior: Posterior | None = None

    def _take_prior(self, prior: Posterior | str | os.PathLike[str] | None) -> None:
        """From now on new state has this prior in it; one that does not fit is refused before any step."""
        if prior is None:
            return
        self._prior = as_prior(prior)
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._prior_of(p, group)

    def _prior_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What the state of p has of the prior: the part that is here."""
        if self._prior is None:
            return {}
        found = prior_state(self._prior, parameter_names(self, None)[p], p, group["ess"])
        return {key: part_of(value, p).to(local(p).device, full_dtype(p)) for key, value in found.items()}

    def bind_to_releases(self) -> None:
        """From now on learn from releases only: ``p.grad`` is never read. Called by ``dpivon.DPOptimizer``."""
        self._private = True

    @property
    def private(self) -> bool:
        """Whether this learns from releases only."""
        return self._private

    def _check_release(self, name: str, release: Release | None) -> None:
        if self._private and release is None:
            raise PrivacyError(
                f"step() without a release: this {name} belongs to a dpivon.DPOptimizer, and p.grad may hold raw "
                "gradients. Call step() on the optimizer that make_private returned."
            )

    def _has_gradient(self, p: Tensor, release: Release | None) -> bool:
        return p.grad is not None if release is None else p in release.gradients

    def _trained(self, release: Release | None) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Every group that has gradients, with the parameters that have them."""
        found = []
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.requires_grad and self._has_gradient(p, release)]:
                found.append((group, params))
        return found

    def _standard_normals(self, like: TensorList) -> TensorList:
        return like.filled(self._standard_normal)

    def _standard_normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=self.generator)

    def _gaussian(
        self, model: nn.Module | None, variance: Callable[[Tensor, dict[str, Any]], Tensor], **metadata: str
    ) -> Posterior:
        """N(m, diag variance(p, group)), under the parameters' names; of a sharded model every rank must ask for it."""
        names = parameter_names(self, model)
        mean, var = {}, {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    var[names[p]] = whole(variance(p, group), p)
                    mean[names[p]] = whole(full_mean(local(p), self.state[p]).detach().clone(), p)
        return Posterior(mean=mean, variance=var, metadata=metadata)


NO_GRADIENT = "step() without a gradient: no parameter has p.grad; call loss.backward() before step()."


class RuleOptimizer(ReleaseOptimizer):
    """Runs a pure rule over all parameters of a model.

    >>> optimizer = RuleOptimizer(model.parameters(), AdamBC(), lr=1e-3)

    Under ``dpivon.PrivacyEngine`` it learns from the :class:`~dpivon.release.Release`, so the rule knows the true variance of
    the noise; otherwise from ``p.grad``, with variance 0. State lives in ``self.state`` per parameter (``step`` and what the
    rule remembers, in full precision; for bf16 or fp16 parameters a master ``mean`` too), all of it in ``state_dict()``.

    Args:
        params: parameters, named parameters, or parameter groups; every number below may differ by group.
        rule: the update.
        lr: step size α.
        generator: source of the rule's own normals, if it draws any; the device's default generator if None.
        prior: as for :class:`dpivon.IVON`, for rules that take one.
        **hyper: the rule's hyperparameters; those left out have the rule's defaults.
    """

    def __init__(
        self,
        params: Any,
        rule: UpdateRule,
        *,
        lr: float,
        generator: torch.Generator | None = None,
        prior: Posterior | str | os.PathLike[str] | None = None,
        **hyper: float,
    ) -> None:
        unknown = sorted(set(hyper) - set(rule.defaults))
        if unknown:
            raise bad(
                unknown[0],
                hyper[unknown[0]],
                f"is not an option of {rule.name!r}",
                f"It has {', '.join(map(repr, rule.defaults)) or 'none besides lr'}",
            )
        self.rule, self.generator = rule, generator
        super().__init__(params, {"lr": lr, **rule.defaults, **hyper})
        if prior is not None and not takes_prior(rule):
            raise bad("prior", prior, f"is not used by {rule.name!r}", "Use IVON, 'dp-steady' or 'dp-calm'")
        self._take_prior(prior)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, release: Release | None = None) -> Any:
        """Update from the gradients in ``p.grad``, or from a private ``release`` of them."""
        self._check_release(repr(self.rule.name), release)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if release is None or self.replayed is None or not self.replayed(release):
            trained = self._trained(release)
            if not trained:
                raise DpivonError(NO_GRADIENT)
            for group, params in trained:
                self._update(group, params, release)
        self._stepped(release)
        return loss

    def _stepped(self, release: Release | None) -> None:
        """After a step, for those who do more. Not by overriding ``step``: torch would then run its hooks once a class."""

    def _update(self, group: dict[str, Any], params: list[Tensor], release: Release | None) -> None:
        states = [self._state(p, group) for p in params]
        for state in states:
            state["step"] += 1
        raw = release.gradients if release is not None else {p: p.grad for p in params}
        g = TensorList([dense(raw[p]).to(full_dtype(p)) for p in params])
        remembered = [key for key in states[0] if key not in ("step", "mean")]
        before = {key: TensorList([state[key] for state in states]) for key in remembered}
        here = [local(p) for p in params]
        before["mean"] = TensorList(full_means(here, states))
        after = self.rule.step(
            before,
            g,
            t=[state["step"] for state in states],
            noise_variance=0.0 if release is None else release.variance,
            normal=self._standard_normals(g) if self.rule.draws else None,
            hyper=group,
        )
        after["mean"].copy_to(here)
        for i, state in enumerate(states):
            for key in (*remembered, *(["mean"] if "mean" in state else [])):
                state[key] = after[key][i]

    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            started = self.rule.start(TensorList([local(p.detach()).to(full_dtype(p))]), group)
            state.update({"step": 0, **{key: value[0] for key, value in started.items() if key != "mean"}})
        if "prior_mean" not in state:
            state.update(self._prior_of(p, group))
        follow(local(p), state)
        return state

    # ---- the optimizer protocol

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", *self.rule.defaults):
            group[name] = check_hyper(name, group[name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_memory(state_dict)
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, before, strict=True):
            for name in self.rule.defaults:
                group.setdefault(name, own[name])  # saved before the rule had this one: it is what it was made with
        restore(self, state_dict)

    def _check_memory(self, state_dict: dict[str, Any]) -> None:
        """Refuse what another rule, or this one with another estimator, remembered: a step would fail halfway."""
        started = self.rule.start(TensorList([torch.zeros(1)]), self.param_groups[0])
        ours = {"step", *started} - {"mean"}
        for saved in state_dict["state"].values():
            theirs = set(saved) - {"mean", *PRIOR}
            if theirs and theirs != ours:
                raise bad(
                    "state_dict",
                    sorted(theirs),
                    f"is not what this {self.rule.name!r} remembers, {sorted(ours)}",
                    "Make the optimizer with the rule, or the curvature, that it was saved with",
                )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {key: getattr(self, key) for key in ("rule", "generator", "_private", "_prior")}

    def __repr__(self) -> str:
        return f"{self.rule.name}: {super().__repr__()}"
