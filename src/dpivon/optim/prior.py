"""A Gaussian prior N(μ, diag v) in place of the usual N(0, 1/(N_ess δ)): a precision per coordinate, and where steps pull to.

    δ_i = 1 / (N_ess v_i),   δ m in an update becomes δ_i (m_i − μ_i),   h + δ becomes h_i + δ_i

So weight decay is the prior with μ = 0 and v = 1/(N_ess δ). A rule finds both in its state, under :data:`PRIOR`, where they
stay as they are; they are saved with it.

The prior must not depend on the data that is trained on: it is made of public or synthetic data, or it is an earlier private
posterior, whose ε then composes with that of this training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dpivon.errors import bad
from dpivon.optim.tensors import TensorList
from dpivon.posterior import Posterior

PRIOR = ("prior_mean", "prior_decay")


def damping(state: Mapping[str, Any], hyper: Mapping[str, Any]) -> Any:
    """δ: the prior's, or the number."""
    return state.get("prior_decay", hyper["weight_decay"])


def dampings(states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> Any:
    """δ of the parameters with these states: of each its own where there is a prior, else one number."""
    alone = "prior_decay" not in states[0]
    return group["weight_decay"] if alone else TensorList([state["prior_decay"] for state in states])


def pull(mean: Any, weight_decay: Any, prior_mean: Any = None) -> Any:
    """δ (m − μ)."""
    return (mean if prior_mean is None else mean - prior_mean) * weight_decay


def kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a step leaves as it is."""
    return {key: state[key] for key in PRIOR if key in state}


def as_prior(prior: Posterior | str | os.PathLike[str]) -> Posterior:
    """The prior, read if it is a file of :meth:`dpivon.Posterior.save`; refused where a precision is not finite."""
    found = Posterior.load(prior) if isinstance(prior, str | os.PathLike) else prior
    if not isinstance(found, Posterior):
        raise bad("prior", type(found).__name__, "is not a Gaussian posterior", "Give a dpivon.Posterior or its file")
    for name, v in found.variance.items():
        if not bool((v > 0).all()):
            raise bad("prior", name, "has a variance of 0, which no data could move", "Give every weight some variance")
    return found


def prior_state(prior: Posterior, name: str, like: Tensor, ess: Any) -> dict[str, Tensor]:
    """μ and δ of the parameter with this name, for the whole of it."""
    if name not in prior.mean:
        fix = "Make the optimizer from model.named_parameters(), of the model that the prior is of"
        raise bad("prior", sorted(prior.mean)[:3], f"has no parameter {name!r}", fix)
    mean, variance = prior.mean[name], prior.variance[name]
    if mean.shape != like.shape:
        problem = f"has shape {tuple(mean.shape)}, and the parameter {tuple(like.shape)}"
        raise bad("prior", name, problem, "Give the prior of this network")
    return {"prior_mean": mean.clone(), "prior_decay": 1.0 / (variance.double() * ess).clamp_min(1e-38)}
