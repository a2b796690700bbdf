"""The tables: one CSV row per run, appended as runs finish, by several processes at once if need be.

python -m experiments.leaderboard.priors.tables FOLDER    # merges FOLDER's tables into results/; idempotent
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.leaderboard.priors.plans import NAMES, Row

COLUMNS = (
    *("plan", "split", *NAMES, "delta", "max_grad_norm", "noise_multiplier", "steps", "epsilon_spent", "train_size"),
    *("scale", "accuracy", "nll", "ece", "temperature", "tempered_nll", "tempered_ece"),
    *("tta_accuracy", "tta_nll", "tta_ece", "seconds", "stack_size", "precision", "device", "torch", "commit"),
)
#: What a row of predictions.csv has of its run's row, and what it adds.
SHARED = ("plan", "split", *NAMES, "noise_multiplier", "epsilon_spent", "device", "torch", "commit")
PREDICTIONS = (*SHARED, "predictor", "fitted", "map", "charged", "accuracy", "nll", "ece")

#: The columns that identify a row, table by table.
KEYS = {
    "runs": ("commit", "plan", "split", *NAMES),
    "predictions": ("commit", "plan", "split", *NAMES, "predictor", "fitted", "map", "charged"),
    "probe": ("prior",),
}


def read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> None:
    """Write rows at the end, whole, while no other process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def merge(path: Path, rows: Sequence[Row], keys: Sequence[str]) -> None:
    """Add rows to a table; a row with the keys of an earlier one takes its place."""
    known = read(path)
    if known and rows and list(known[0]) != list(rows[0]):
        raise SystemExit(
            f"{path}: has columns {list(known[0])}, the new rows {list(rows[0])}. Give tables of one format."
        )
    merged = {tuple(row[key] for key in keys): row for row in [*known, *rows]}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list((known or rows)[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())


def facts(device: torch.device) -> dict[str, str]:
    """On what and by which code a row was made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "commit": os.environ.get("DPIVON_COMMIT") or _commit()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of new tables")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    a = parser.parse_args()
    for name, keys in KEYS.items():
        if rows := read(a.folder / f"{name}.csv"):
            merge(a.results / f"{name}.csv", rows, keys)


if __name__ == "__main__":
    main()
