"""The optimizer inside a private one. It may step on a release only: elsewhere ``p.grad`` is raw."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from dpivon.errors import PrivacyError
from dpivon.optim.ivon import IVON
from dpivon.optim.releases import LearnsFromReleases
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.release import Release


def bind(inner: Optimizer) -> None:
    """From now on a step that is not :func:`step_on`'s is an error."""
    if isinstance(inner, LearnsFromReleases):
        inner.bind_to_releases()
    elif hasattr(inner, "_optimizer_step_pre_hooks"):
        inner.register_step_pre_hook(_refuse_unreleased_step)


def step_on(inner: Optimizer, release: Release | None) -> None:
    """Let it learn from the release, or from ``p.grad``, which holds it."""
    if isinstance(inner, LearnsFromReleases):
        inner.step(release=release)
        return
    inner._stepping_on_release = True  # type: ignore[attr-defined]
    try:
        inner.step()
    finally:
        inner._stepping_on_release = False  # type: ignore[attr-defined]


def _refuse_unreleased_step(inner: Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(inner, "_stepping_on_release", False):
        raise PrivacyError(
            f"step() on the inner {type(inner).__name__}: p.grad holds raw gradients. Call step() on the optimizer that "
            "make_private returned."
        )


#: What a rule may be made of, and what that is called here.
_PARTS = {"estimator": "curvature", "phi": "phi", "psi": "psi"}


def described(inner: Optimizer) -> dict[str, Any]:
    """What an optimizer does that neither its class nor its state tells: its groups are in the state, these are not."""
    if isinstance(inner, IVON):
        return {"mc_samples": inner.mc_samples, "curvature": inner.curvature.name}
    if not isinstance(inner, RuleOptimizer):
        return {}
    parts = {told: getattr(inner.rule, part, None) for part, told in _PARTS.items()}
    return {"rule": inner.rule.name, **{told: part.name for told, part in parts.items() if part is not None}}
