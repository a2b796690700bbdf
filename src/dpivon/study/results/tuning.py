"""Learning rates chosen on held-out training data, and what choosing them cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpivon.errors import bad
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import STUDY
from dpivon.study.plan.plan import read_plan
from dpivon.study.results import table
from dpivon.study.results.table import CELL, Row, value

SHORT = ("b", "σ", "C")
SAME_SIGMA = 0.1


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


def pick(out: Path, target: Path, *, by_cell: bool = False) -> dict[str, list[Candidate]]:
    """Write each method's winner to ``target``, which ``study run --lr`` reads: one for its whole grid, or one for each cell.

    Returned are the candidates by method, or by method and cell.
    """
    rows = table.read(out / "tuning.csv")
    if not rows:
        raise bad("out", str(out), "holds no tuning.csv", "Run a study with `split: tuning` first")
    counts = Counter((r["method"], r["lr"]) for r in rows)
    methods = {m for m, _ in counts}
    if (out / STUDY).exists():  # a candidate of which no run is finished has no row
        counts.update({(run.method, run.lr): 0 for run in read_plan(out / STUDY).runs if run.method in methods})
    for method in methods:
        if len({n for (m, _), n in counts.items() if m == method}) > 1:
            raise bad("out", str(out), f"{method}'s candidates have not all run", "Finish the tuning study first")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in CELL) if by_cell else (), []).append(row)
    found: dict[str, list[Candidate]] = {}
    chosen: list[dict[str, Any]] = []
    for key, members in sorted(groups.items()):
        where = "".join(f" {k}={v:g}" for k, v in zip(SHORT, key, strict=False))
        for method, ranked in candidates(members).items():
            if ranked[0].accuracy != ranked[0].accuracy:
                problem = f"every candidate of {method}{where} diverged"
                raise bad("out", str(out), problem, "Tune over smaller learning rates")
            found[method + where] = ranked
            chosen.append({"method": method, **dict(zip(CELL, key, strict=False)), "lr": ranked[0].lr})
    if by_cell:
        content: dict[str, Any] = {"cells": chosen, "chosen_by": "validation accuracy, a rate for each cell"}
    else:
        rates = {entry["method"]: entry["lr"] for entry in chosen}
        content = {"lr": rates, "chosen_by": "mean validation accuracy"}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")
    return found


@dataclass(frozen=True)
class Rates:
    """Chosen learning rates: by method, or by method, b, σ and C."""

    by_method: Mapping[str, float] = field(default_factory=dict)
    by_cell: Mapping[tuple[str, int, float, float], float] = field(default_factory=dict)

    def of(self, method: str, batch_size: int, sigma: float, c: float) -> float | None:
        """None where the file does not speak of the method: then the study's own rates stand."""
        if method not in {m for m, *_ in self.by_cell}:
            return self.by_method.get(method)
        known = [s for m, b, s, bound in self.by_cell if (m, b, bound) == (method, batch_size, c)]
        near = nearest(sigma, known)
        if near is None:
            problem = f"has no rate of {method} at b = {batch_size}, σ = {sigma:g}, C = {c:g}"
            raise bad("lr", "cells", problem, "Tune that cell too, then `dpivon study pick --by-cell`")
        return self.by_cell[method, batch_size, near, c]


def read_rates(path: Path) -> Rates:
    """What :func:`pick` has written."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if "cells" not in raw:
            return Rates({str(method): float(value) for method, value in raw["lr"].items()})
        kinds = {"method": str, "batch_size": int, "noise_multiplier": float, "max_grad_norm": float}
        cells: Any = {tuple(kind(e[k]) for k, kind in kinds.items()): float(e["lr"]) for e in raw["cells"]}
        return Rates(by_cell=cells)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        fix = "Write it with `dpivon study pick`"
        raise bad("lr", str(path), f"is not a file of learning rates ({error})", fix) from None


def nearest(sigma: float, known: Iterable[float]) -> float | None:
    """The σ of a tuning study that stands for this one: itself, or the nearest within a tenth.

    A tuning study has nine tenths of the data, so the same ε is at a σ that is about 5 % larger.
    """
    found = min(known, key=lambda s: abs(s - sigma), default=None)
    return found if found is not None and abs(found - sigma) <= SAME_SIGMA * sigma else None


def history(row: Row) -> History:
    """What a finished run released."""
    return [(row["noise_multiplier"], row["batch_size"] / row["train_size"], row["releases"])]


def epsilon_with_tuning(row: Row, tuning: Sequence[Row]) -> float:
    """ε of a run composed with every candidate of its method, tuned on a part of the same data."""
    runs = [row, *(other for other in tuning if other["method"] == row["method"])]
    return epsilon([part for run in runs for part in history(run)], row["delta"], "rdp")
