"""A run's folder as the report sees it: a list of files and, in each, a list of values. Nothing else is opened or shown.

What is not named here cannot get into a report: checkpoints are never opened, keys that a later version adds are ignored, and
seeds are taken out of the configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from dpivon.decisions import Decision
from dpivon.durable.files import read_json
from dpivon.durable.ledger import Record
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import bad
from dpivon.privacy.accounting.recorded import CONFIG, LEDGER
from dpivon.yaml_files import read_yaml, validated

SUMMARY, PROGRESS, TEST, POSTERIOR = "summary.json", "progress.jsonl", "test.npz", "posterior.json"
READ = (SUMMARY, CONFIG, PROGRESS, TEST, POSTERIOR, LEDGER)
WITHHELD = "withheld: whoever knows it can subtract the noise"
_SECRET = re.compile(r"seed|rng|generator|random_state", re.IGNORECASE)
_FIX = "Give the folder of a finished `dpivon train`, or restore the file from a copy"
_Kind = TypeVar("_Kind", bound=BaseModel)


class _Values(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


class About(_Values):
    """What the configuration says the model is."""

    title: str = ""
    date: str = ""
    purpose: str = ""
    responsible: str = ""
    dataset: str = ""


class Task(_Values):
    classes: tuple[str, ...] = ()
    target: str | None = None
    inputs: str = ""
    network: str = ""


class StartedFrom(_Values):
    """The earlier run whose posterior a run started from."""

    sentence: str
    releases: int


class Summary(_Values):
    format: Literal[1]
    about: About = About()
    method: str
    epsilon: float
    delta: float
    accountant: str = "rdp"
    epsilon_by_accountant: dict[str, float] = {}
    adjacency: str = "add/remove"
    unit: str = ""  # the column that names a row's person; empty where the unit of privacy is the row
    dataset_size: int | None = None
    sampling_rate: float | None = None
    steps: int | None = None
    noise_multiplier: float | None = None
    seconds: float | None = None
    hardware: str = ""
    path: str = ""  # captured, or eager with the reason
    versions: dict[str, str] = {}
    task: Task = Task()
    metrics: dict[str, float | None] | None = None
    by_label: dict[str, dict[str, float | None]] = {}  # of several labels to predict
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    decision: Decision = Decision()
    public_inputs: tuple[str, ...] = ()
    choices_not_made: tuple[str, ...] = ()
    ledger_digest: str = ""
    seed_is_secret: bool = True
    started_from: StartedFrom | None = None


class Evaluation(_Values):
    """A line of progress.jsonl."""

    step: int
    epsilon: float | None = None
    heldout_nll: float | None = None
    heldout_accuracy: float | None = None


class Layer(_Values):
    name: str
    numel: int
    sd_q05: float
    sd_median: float
    sd_q95: float


class _Layers(_Values):
    layers: tuple[Layer, ...]


@dataclass(frozen=True, eq=False)
class TestSet:
    """Predictions on the test set: averaged over the posterior, and of its mean; some images, by their place in the set."""

    __test__ = False  # no test of pytest's

    averaged: Tensor
    mean: Tensor
    labels: Tensor
    images: np.ndarray[Any, Any] | None = None
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class LedgerFile:
    record: Record
    digest: str


@dataclass(frozen=True, eq=False)
class RunFolder:
    """What was found; None or empty where a file is not there."""

    folder: Path
    summary: Summary
    config: str | None
    progress: tuple[Evaluation, ...]
    test: TestSet | None
    layers: tuple[Layer, ...]
    ledger: LedgerFile | None

    @property
    def classes(self) -> tuple[str, ...]:
        """A name for every class that the predictions know, however many were named."""
        known = self.summary.task.classes
        count = self.test.averaged.shape[1] if self.test is not None else len(known)
        return tuple(known[i] if i < len(known) else f"class {i}" for i in range(count))


def read(folder: Path) -> RunFolder:
    """All files of the contract that are there, checked."""
    return RunFolder(
        folder,
        _read(Summary, folder / SUMMARY),
        _config(folder / CONFIG),
        tuple(_progress(folder / PROGRESS)),
        _test_set(folder / TEST),
        _values(_Layers, folder / POSTERIOR, read_json("folder", folder / POSTERIOR, _FIX)).layers
        if (folder / POSTERIOR).exists()
        else (),
        _ledger(folder / LEDGER),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad("folder", str(path), f"cannot be read ({error})", _FIX) from None


def _read(kind: type[_Kind], path: Path) -> _Kind:
    return _values(kind, path, read_json("folder", path, _FIX))


def _values(kind: type[_Kind], path: Path, raw: Any) -> _Kind:
    return validated(kind, raw, path.name, fix=_FIX, place=str(path))


def _config(path: Path) -> str | None:
    """The configuration without its seeds."""
    if not path.exists():
        return None
    import yaml

    raw = read_yaml("folder", path, missing=_FIX, fix=_FIX)
    return yaml.safe_dump(without_seeds(raw), sort_keys=False, allow_unicode=True)


def without_seeds(value: Any) -> Any:
    """The same with every value withheld whose key speaks of a seed or a generator; an unset one may be shown."""
    if isinstance(value, dict):
        secret = {k for k, v in value.items() if _SECRET.search(str(k)) and v is not None}
        return {k: WITHHELD if k in secret else without_seeds(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_seeds(v) for v in value]
    return value


def _progress(path: Path) -> list[Evaluation]:
    *lines, torn = _text(path).split("\n") if path.exists() else [""]  # torn by a crash, or empty
    found = []
    for number, line in enumerate([*lines, torn] if torn else lines, 1):
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > len(lines):
                break
            raise bad("folder", f"{path}, line {number}", f"is not valid JSON ({error})", _FIX) from None
        found.append(_values(Evaluation, path, raw))
    return found


def _test_set(path: Path) -> TestSet | None:
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            probabilities, mean, targets = (arrays[k] for k in ("probabilities", "mean_probabilities", "targets"))
            images = arrays["images"] if "images" in arrays.files else None
            index = arrays["image_index"] if "image_index" in arrays.files else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise bad("folder", str(path), f"holds no predictions ({error})", _FIX) from None
    found = TestSet(torch.from_numpy(probabilities), torch.from_numpy(mean), torch.from_numpy(targets))
    if images is None or index is None:
        return found
    fits = images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3 and len(images) == len(index)
    places = tuple(map(int, index))
    if not fits or any(not 0 <= i < len(targets) for i in places):
        raise bad("folder", str(path), "its images or image_index do not fit its targets", _FIX)
    return replace(found, images=images, index=places)


def _ledger(path: Path) -> LedgerFile | None:
    if not path.exists():
        return None
    return LedgerFile(read_ledger(path), hashlib.sha256(path.read_bytes()).hexdigest())
