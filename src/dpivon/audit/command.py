"""``dpivon audit``: which model, and the loop over paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.audit.distributed_session import can_fork
from dpivon.audit.page import write
from dpivon.audit.run import Audit, audit
from dpivon.audit.subject import PATHS, STACK_PATHS, check_path, probe
from dpivon.errors import bad
from dpivon.import_paths import imported
from dpivon.stacked.rules import stackable


def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network and scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, torch.tensor(x[:64], dtype=torch.float32) / 16.0, torch.tensor(y[:64])


def small() -> tuple[nn.Module, Tensor, Tensor]:
    """A few parameters, a layer of which is used twice."""
    subject = probe("bookkeeping", "dp-sgd")
    return subject.model, subject.inputs, subject.labels


MODELS = {"digits": digits, "small": small}


def load(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """One of ours, or what a function of the user's own returns: (model, inputs, labels)."""
    if name in MODELS:
        return MODELS[name]()
    fix = f"Use one of {', '.join(MODELS)}, or package.module:function that returns (model, inputs, labels)"
    made: Any = imported("model", name, fix)()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise bad("model", name, "did not return (model, inputs, labels)", fix)
    return made


def run(out: Path, *, model: str, method: str, paths: list[str], quick: bool, say: Any) -> bool:
    """Audit on every path, print what was found, write the report; whether everything holds."""
    for path in paths:
        check_path(path)
    network, inputs, labels = load(model)
    possible = [p for p in PATHS if p not in STACK_PATHS or method in stackable()]
    if not can_fork():
        possible.remove("distributed")
    audits: list[Audit] = []
    for i, path in enumerate(paths or possible):  # each with noise of its own, so that they are so many trials
        asked: dict[str, Any] = {"method": method, "path": path, "quick": quick}
        audits.append(audit(network, (inputs, labels), seed=100 * i, **asked))
        say(str(audits[-1]))
    write(audits, out)
    say(f"report in {out / 'audit.html'}")
    return all(a.holds for a in audits)
