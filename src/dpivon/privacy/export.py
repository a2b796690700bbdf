"""What of a run may be published: the model, its posterior and what it cost; nothing that draws, seeds or remembers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpivon._version import __version__
from dpivon.durable.checkpoint import Rotation
from dpivon.durable.files import replace
from dpivon.durable.ledger import read
from dpivon.durable.tensors import write_tensors
from dpivon.errors import bad
from dpivon.optim.ivon_rule import variance
from dpivon.optim.prior import damping
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.privacy.accounting.recorded import DELTA, LEDGER, drawn, epsilons, history, own_delta


def export(
    run: Path, out: Path, delta: float | None = None, posterior: Posterior | SampledPosterior | None = None
) -> dict[str, float]:
    """Write the newest checkpoint's model to the new folder ``out``; ε by every accountant.

    δ is the run's own unless it is given, and 1e-5 where the folder does not say.

    ``model.safetensors`` is the model's ``state_dict``, ``posterior.safetensors`` its posterior if IVON trained it, and
    ``privacy.json`` what was released. A ``posterior`` that the caller has is written in its place: of other methods the
    checkpoint does not tell it. One of samples is ``samples.safetensors``.

    Built up from what is wanted, not cut down from the checkpoint: whatever is added to checkpoints stays out of it.
    """
    files = Rotation(run).files()
    if not files:
        raise bad("run", str(run), "holds no checkpoint", "Give the folder that was given to dpivon.Checkpoints")
    state = Rotation(run).read(tidy=False)
    assert state is not None
    if "model" not in state:
        raise bad(
            "run", str(run), "is a stack of a study", "Run the study with --keep; it writes the posteriors itself"
        )
    record = read(run / LEDGER)
    rows = history(record, 0)
    if delta is None:
        delta = own_delta(run / LEDGER) or DELTA
    spent = epsilons(rows, delta)
    if out.exists():
        raise bad("out", str(out), "exists", "Give a new folder")
    out.mkdir(parents=True)
    write_tensors(out / "model.safetensors", state["model"], {"dpivon": __version__})
    posterior = _posterior(state) if posterior is None else posterior
    if posterior is not None:
        posterior.save(
            out / ("samples.safetensors" if isinstance(posterior, SampledPosterior) else "posterior.safetensors")
        )
    stated = {
        "delta": delta,
        "unit": record.unit or "example",
        "epsilon": {name: value if math.isfinite(value) else "inf" for name, value in spent.items()},
        "run": record.id,
        "releases": [_release(terms[0], n) for terms, n in record.rows if n],
        "drawn_by": drawn(record, 0),
        "steps": state["steps"],
        "version": __version__,
    }
    replace(out / "privacy.json", (json.dumps(stated, indent=1) + "\n").encode())
    return spent


def _release(terms: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """A row of the ledger: σ and q as they are accounted, and whose it is if it is of an earlier run."""
    without = {} if terms["unaccounted"] is None else {"noise_multiplier": 0.0, "sample_rate": 1.0}
    return {**terms, **without, "steps": steps}


def _posterior(state: Mapping[str, Any]) -> Posterior | None:
    """N(m, 1/(N_ess (h + δ))), as :meth:`dpivon.IVON.posterior` has it."""
    if state["optimizer_class"] != "IVON":
        return None
    mean: dict[str, Tensor] = {}
    spread: dict[str, Tensor] = {}
    for group in state["optimizer"]["param_groups"]:
        for index in group["params"]:
            own, name = state["optimizer"]["state"].get(index, {}), state["names"][index]
            if not own:
                continue
            hess: Tensor = own["hess"]
            mean[name] = own.get("mean", state["model"][name]).to(hess.dtype)
            spread[name] = variance(hess, ess=group["ess"], weight_decay=damping(own, group))
    if not mean:
        return None
    with torch.no_grad():
        return Posterior(mean=mean, variance=spread, metadata={"method": "ivon"})
