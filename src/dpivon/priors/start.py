"""First weights from a prior: one that comes with the library, or the file of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.durable.tensors import read_tensors
from dpivon.errors import bad
from dpivon.posterior import Posterior
from dpivon.priors.learning import FORMAT, MEAN, STD, VERSION

#: Priors that come with the library, and the network that each is of.
BUILT_IN = {"images-32": "paper, 3 × 32 × 32", "strokes-8": "small, 1 × 8 × 8"}
#: Those of images that may be mirrored: photographs have no handedness, digits have.
MIRRORED = frozenset({"images-32"})
#: What a posterior that no one's data is in says of its method.
SYNTHETIC = "random process"


def start_from(
    model: nn.Module,
    prior: str | os.PathLike[str] | Posterior,
    *,
    input_mean: float | None = None,
    input_std: float | None = None,
) -> Posterior:
    """Put a prior's mean into ``model``, in place, with a last layer of zero; the prior of this model, for ``prior=``.

    >>> prior = dpivon.priors.start_from(model, "images-32")
    >>> dpivon.fit(model, x, y, target_epsilon=1, delta=1e-5, batch_size=4096, epochs=90, lr=1.75)

    With ``start_from=`` :func:`dpivon.steady` trains a last layer alone instead (:class:`dpivon.priors.Features`).

    Args:
        model: ends in a linear layer, which is new and may have any number of classes.
        prior: a name of :data:`BUILT_IN`, a file of ``dpivon prior learn`` or of ``Posterior.save``, or a posterior.
        input_mean: pixels p in [0, 1] come to the model as (p − input_mean)/input_std; the first layer takes up the
            difference to what the prior was learned with. None: as there, 0.5 and 0.25 with those of the library.
        input_std: see above.
    """
    mean, metadata = _read(prior)
    shown = prior if isinstance(prior, str) else type(prior).__name__
    linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    last = f"{linear[-1][0]}." if linear else "\0"
    named = dict(model.named_parameters())
    mean = mean | {name: torch.zeros_like(p) for name, p in named.items() if name.startswith(last)}
    for name, p in named.items():
        if name not in mean or mean[name].shape != p.shape:
            problem = f"is not of this network: it has {'another' if name in mean else 'no'} {name}"
            of = "; ".join(f"{key}: {value}" for key, value in BUILT_IN.items())
            raise bad("start_from", shown, problem, f"Give a prior of the same network ({of})")
    was = {"input_mean": float(metadata.get("input_mean", MEAN)), "input_std": float(metadata.get("input_std", STD))}
    given = {"input_mean": input_mean, "input_std": input_std}
    now = {name: was[name] if value is None else float(value) for name, value in given.items()}
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(mean[name])
        first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear))
        if first.bias is not None:
            first.bias += first.weight.flatten(1).sum(1) * (now["input_mean"] - was["input_mean"]) / was["input_std"]
        first.weight *= now["input_std"] / was["input_std"]
        own = {name: p.detach().float().clone() for name, p in named.items()}
    variance = {name: p.square().mean().clamp_min(1e-4).expand(p.shape).clone() for name, p in own.items()}
    for name, v in variance.items():
        if name.startswith(last):  # its zeros tell nothing, so they must hardly pull
            v.fill_(1.0)
    return Posterior(own, variance, metadata | {name: repr(value) for name, value in now.items()})


def check_free(found: Posterior, start_from: object, fix: str) -> None:
    """Refuse a posterior that says what trained it: its cost, if there is one, is in no account here."""
    if (by := found.metadata.get("method", SYNTHETIC)) != SYNTHETIC:
        shown = start_from if isinstance(start_from, str) else type(start_from).__name__
        raise bad("start_from", shown, f"was trained by {by}, and what that cost is not in this run's ledger", fix)


def _read(prior: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    if isinstance(prior, str) and prior in BUILT_IN:
        path = Path(__file__).parent / f"{prior}.safetensors"
        tensors, metadata = read_tensors(path, key=FORMAT, version=VERSION, what="prior", fix="Install dpivon again")
        return {n: t.float() for n, t in tensors.items()}, {
            "method": SYNTHETIC,
            "process": metadata["process"],
            "mirror": "yes" if prior in MIRRORED else "no",
        }
    if isinstance(prior, str) and not os.path.exists(prior):
        raise bad("start_from", prior, "is neither a prior by name nor a file", f"Use one of {', '.join(BUILT_IN)}")
    if not isinstance(prior, str | os.PathLike | Posterior):
        fix = "Give a name, a file or a Posterior; to steady, dpivon.priors.Features too"
        raise bad("start_from", type(prior).__name__, "is no prior", fix)
    found = prior if isinstance(prior, Posterior) else Posterior.load(prior)
    return found.mean, found.metadata
