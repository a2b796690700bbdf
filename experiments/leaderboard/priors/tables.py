"""The table of runs: one CSV row per run, appended as runs finish, by several processes at once if need be."""

from __future__ import annotations

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
        writer = csv.DictWriter(file, columns)
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())


def facts(device: torch.device) -> dict[str, str]:
    """On what and by which code a row was made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "commit": os.environ.get("COMMIT") or _commit()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return found.stdout.strip() or "unknown"
