"""What validation data chose: a learning rate for each method and cell, and what its rates scored there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpivon.study.results.table import Row, value
from dpivon.study.results.tuning import Candidate, candidates, nearest
from experiments.strong_privacy.compare.cell import Cell


@dataclass(frozen=True)
class Validation:
    """Scores of one rate on validation data: of the cell itself, or (``here`` false) of other cells with its σ."""

    accuracy: float
    nll: float
    tempered_nll: float | None
    here: bool


class Tuning:
    """The tables of tuning studies; empty where there was none."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def ranked(self, method: str, options: str, cell: Cell, *, alike: bool = False) -> list[Candidate]:
        """The cell's own candidates, the best first: by validation accuracy, ties by NLL, diverged ones last. ``alike`` leaves
        out what had other options."""
        rows = [r for r in self._rows(method, options, cell, here=True) if not alike or r["options"] == options]
        return candidates(rows)[method] if rows else []

    def validation(self, method: str, options: str, lr: float, cell: Cell) -> Validation | None:
        """None where no row speaks of this rate at this σ."""
        for here in (True, False):
            rows = [r for r in self._rows(method, options, cell, here=here) if math.isclose(r["lr"], lr, rel_tol=1e-6)]
            if rows:
                accuracy, nll = value(r["accuracy"] for r in rows), value(r["nll"] for r in rows)
                tempered = value(r.get("tempered_nll") for r in rows)
                assert accuracy is not None
                assert nll is not None
                return Validation(accuracy.mean, nll.mean, None if tempered is None else tempered.mean, here)
        return None

    def _rows(self, method: str, options: str, cell: Cell, *, here: bool) -> list[Row]:
        s = cell.setting
        rows = [r for r in self.rows if (r["method"], r["dataset"], r["network"]) == (method, s.dataset, s.network)]
        if here:
            place = (s.epochs, s.batch_size, s.max_grad_norm, s.augment)
            rows = [
                r for r in rows if (r["epochs"], r["batch_size"], r["max_grad_norm"], r.get("augment", "")) == place
            ]
        sigma = nearest(cell.noise_multiplier, {r["noise_multiplier"] for r in rows})
        rows = [r for r in rows if r["noise_multiplier"] == sigma]
        return [r for r in rows if r["options"] == options] or rows
