"""Every reader of files, each with a small valid file, and the one question that fuzzing asks of it."""

from __future__ import annotations

import gzip
import io
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dpivon
from dpivon.data import cifar10
from dpivon.data.cifar10 import read_pickle
from dpivon.data.fashion_mnist import read_idx
from dpivon.durable.checkpoint import Rotation
from dpivon.durable.checkpoint import read as read_run_checkpoint
from dpivon.durable.ledger import Ledger
from dpivon.durable.ledger import read as read_record
from dpivon.errors import DpivonError
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.study.plan import config
from dpivon.study.plan.plan import read_plan
from dpivon.study.results import table, tuning

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from archives import batch_pickle, binary, idx, pictures, tar

QUICK = Path(__file__).parents[2] / "examples" / "study.yaml"
RESULTS = Path(__file__).parents[2] / "experiments" / "paper" / "results" / "quick"
CELL_RATES = b'{"cells": [{"method": "a", "batch_size": 8, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "lr": 0.5}]}'


@dataclass(frozen=True)
class Reader:
    """A file's name, a valid content, and what reads the file."""

    file: str
    valid: Callable[[], bytes]
    read: Callable[[Path], Any]
    text: bool = False


def attempt(reader: Reader, content: bytes, folder: Path) -> str:
    """ "read" or "refused", by an error of ours in one line; any other exception is a finding and comes out."""
    path = folder / reader.file
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(path)
    except DpivonError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 1500, len(message)
        return "refused"
    return "read"


def _saved(thing: Any, folder: Path) -> bytes:
    thing.save(folder / "x.safetensors")
    return (folder / "x.safetensors").read_bytes()


def _posterior() -> bytes:
    import tempfile

    mean = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}
    with tempfile.TemporaryDirectory() as folder:
        return _saved(Posterior(mean, {k: v.square() for k, v in mean.items()}, {"method": "x"}), Path(folder))


def _samples() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return _saved(SampledPosterior({"w": torch.ones(3, 2), "b": torch.zeros(3, 1)}), Path(folder))


def _five(content: bytes, suffix: str) -> Callable[[Path], Any]:
    """The other files of the folder are valid."""

    def read(path: Path) -> Any:
        for i in range(2, 6):
            (path.parent / f"data_batch_{i}{suffix}").write_bytes(content)
        (path.parent / f"test_batch{suffix}").write_bytes(content)
        return cifar10._read(path.parent)

    return read


def _tar(kind: str) -> bytes:
    content, suffix = (binary(*pictures(2)), ".bin") if kind == "binary" else (batch_pickle(*pictures(2)), "")
    names = [f"data_batch_{i}{suffix}" for i in range(1, 6)] + [f"test_batch{suffix}"]
    return tar({f"cifar/{name}": content for name in names})


def _plan() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        plan = config.resolve(QUICK)
        small = type(plan)(**{**vars(plan), "runs": plan.runs[:3]})
        small.write(Path(folder) / "plan.json")
        return (Path(folder) / "plan.json").read_bytes()


def _checkpoint() -> bytes:
    buffer = io.BytesIO()
    dpivon.PrivacyEngine().save_checkpoint(path=buffer, module=nn.Linear(2, 1))
    return buffer.getvalue()


def _load_checkpoint(path: Path) -> Any:
    return dpivon.PrivacyEngine().load_checkpoint(path=path, module=nn.Linear(2, 1))


def _ledger() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        for n, sigma in ((3, 1.0), (1, 2.0), (32, 1.0)):
            ledger.charge((NoiseSpec(sigma, 1.0, 8.0, 0.2).terms,), n, f"{n:032x}" if n == 1 else "")
        ledger.close()
        return ledger.path.read_bytes()


def _read_ledger(path: Path) -> Any:
    """Read, accounted for, and opened for charging."""
    record = read_record(path)
    if record.runs:
        history(record, 0)
    Ledger(path).close()


def _run_checkpoint() -> bytes:
    import tempfile

    state = {"model": {"w": torch.ones(2, 3)}, "steps": 3, "also": {}, "pairs": {0: (1, 2.5), 1: [None, "a"]}}
    with tempfile.TemporaryDirectory() as folder:
        return Rotation(Path(folder)).write(3, state).read_bytes()


READERS: dict[str, Reader] = {
    "ledger": Reader("ledger.jsonl", _ledger, _read_ledger, text=True),
    "run-checkpoint": Reader("release-000000000003.safetensors", _run_checkpoint, read_run_checkpoint),
    "posterior": Reader("p.safetensors", _posterior, Posterior.load),
    "sampled-posterior": Reader("s.safetensors", _samples, SampledPosterior.load),
    "cifar-binary": Reader("data_batch_1.bin", lambda: binary(*pictures(2)), _five(binary(*pictures(2)), ".bin")),
    "cifar-python": Reader("data_batch_1", lambda: batch_pickle(*pictures(1)), _five(batch_pickle(*pictures(1)), "")),
    "cifar-pickle": Reader("x", lambda: batch_pickle(*pictures(0)), lambda p: read_pickle(p.read_bytes(), "x")),
    "cifar-archive": Reader("cifar-10-binary.tar.gz", lambda: _tar("binary"), lambda p: cifar10._read(p.parent)),
    "cifar-python-archive": Reader("cifar-10-python.tar.gz", lambda: _tar("python"), lambda p: cifar10._read(p.parent)),
    "idx": Reader(
        "images", lambda: idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)), lambda p: read_idx(p, "Fix it")
    ),
    "idx-gzip": Reader(
        "images.gz", lambda: gzip.compress(idx(np.arange(24, dtype=np.uint8))), lambda p: read_idx(p, "Fix it")
    ),
    "plan": Reader("plan.json", _plan, read_plan, text=True),
    "study": Reader("study.yaml", QUICK.read_bytes, config.resolve, text=True),
    "rates": Reader("lr.json", lambda: json.dumps({"lr": {"dp-sgd": 0.5}}).encode(), tuning.read_rates, text=True),
    "rates-by-cell": Reader("lr.json", lambda: CELL_RATES, tuning.read_rates, text=True),
    "table": Reader(
        "runs.csv", lambda: b"".join((RESULTS / "runs.csv").read_bytes().splitlines(True)[:3]), table.read, text=True
    ),
    "checkpoint": Reader("c.pt", _checkpoint, _load_checkpoint),
}
