"""Variants of a method in one table: its options and learning rates told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dpivon.methods import METHODS
from dpivon.study.plan import shown
from dpivon.study.table import Row

Variant = tuple[str, str, float | None]  # method, options, learning rate; None where each cell has its own


def variants(rows: Sequence[Row]) -> list[Variant]:
    """Every (method, options, learning rate) of the table, in its order; no rate where each cell has its own."""
    rates: dict[tuple[str, str], dict[tuple[Any, ...], set[float]]] = {}
    for row in rows:
        cell = (row["batch_size"], row["noise_multiplier"], row["max_grad_norm"])
        rates.setdefault((row["method"], row["options"]), {}).setdefault(cell, set()).add(row["lr"])
    by_cell = {
        key
        for key, cells in rates.items()
        if len(set().union(*cells.values())) > 1 and all(len(found) == 1 for found in cells.values())
    }
    keys = ((row["method"], row["options"], row["lr"]) for row in rows)
    return list(dict.fromkeys((m, o, None if (m, o) in by_cell else lr) for m, o, lr in keys))


def is_ablation(rows: Sequence[Row]) -> bool:
    """Whether some method stands in several variants, so that its cells must not be averaged together."""
    found = variants(rows)
    return len({method for method, _, _ in found}) < len(found)


def is_of(row: Row, variant: Variant) -> bool:
    """Whether the row is one of the variant's, at whatever rate where each cell has its own."""
    method, options, lr = variant
    return (row["method"], row["options"]) == (method, options) and lr in (None, row["lr"])


def describe(variant: Variant) -> str:
    """A variant in words: its method, what of it was changed, and last its learning rate."""
    method, options, lr = variant
    changed = ", ".join(f"{k} = {shown(v)}" for k, v in json.loads(options).items()) if options else ""
    rate = "a rate for each cell" if lr is None else f"lr {lr:g}"
    return f"{METHODS[method].title if method in METHODS else method}{', ' + changed if changed else ''}, {rate}"
