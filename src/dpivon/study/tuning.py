"""Learning rates chosen on held-out training data, and what choosing them cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpivon.errors import bad
from dpivon.privacy.accounting.accountant import epsilon
from dpivon.privacy.accounting.history import History
from dpivon.study import table
from dpivon.study.cells import value
from dpivon.study.table import Row


@dataclass(frozen=True)
class Candidate:
    """A learning rate of a method with its mean validation accuracy over the tuning grid."""

    method: str
    lr: float
    accuracy: float
    nll: float


def candidates(rows: Sequence[Row]) -> dict[str, list[Candidate]]:
    """By method, the best first: highest mean accuracy, then lowest mean NLL. A rate that diverged anywhere is last."""
    out: dict[str, list[Candidate]] = {}
    for method, lr in sorted({(row["method"], row["lr"]) for row in rows}):
        mine = [row for row in rows if (row["method"], row["lr"]) == (method, lr)]
        accuracy, nll = value(r["accuracy"] for r in mine), value(r["nll"] for r in mine)
        assert accuracy is not None
        assert nll is not None
        out.setdefault(method, []).append(Candidate(method, lr, accuracy.mean, nll.mean))
    for found in out.values():
        found.sort(key=lambda c: (c.accuracy != c.accuracy, -c.accuracy, c.nll))
    return out


def pick(out: Path, target: Path) -> dict[str, list[Candidate]]:
    """Write each method's winner to ``target``, which ``study run --lr`` reads."""
    rows = table.read(out / "tuning.csv")
    if not rows:
        raise bad("out", str(out), "holds no tuning.csv", "Run `dpivon study run studies/paper-tuning.yaml` first")
    counts = {(r["method"], r["lr"]): 0 for r in rows}
    for r in rows:
        counts[r["method"], r["lr"]] += 1
    for method in {m for m, _ in counts}:
        if len({n for (m, _), n in counts.items() if m == method}) > 1:
            raise bad("out", str(out), f"{method}'s candidates have not all run", "Finish the tuning study first")
    found = candidates(rows)
    if any(c.accuracy != c.accuracy for winners in found.values() for c in winners[:1]):
        raise bad("out", str(out), "every candidate of a method diverged", "Tune over smaller learning rates")
    chosen = {method: winners[0].lr for method, winners in found.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"lr": chosen, "chosen_by": "mean validation accuracy"}, indent=1) + "\n")
    return found


def history(row: Row) -> History:
    """What a finished run released."""
    return [(row["noise_multiplier"], row["batch_size"] / row["train_size"], row["releases"])]


def epsilon_with_tuning(row: Row, tuning: Sequence[Row]) -> float:
    """ε of a run composed with every candidate of its method, tuned on a part of the same data."""
    spent = history(row)
    for other in tuning:
        if other["method"] == row["method"]:
            spent = spent + history(other)
    return epsilon(spent, row["delta"])
