"""Stacks on disk: a run that is killed goes on where it was, and is never charged less for it.

Two files. The *ledger* holds how many releases have been charged, and is written before they are made. The *checkpoint*
holds the rows' states, the step and the accounts. Batches, noise and samples are functions of seed and step, so a stack
restored at step t goes on as if it had never stopped. What the ledger has and the checkpoint has not was made and
lost: it is charged again, since somebody may have seen it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from dpivon.errors import PrivacyError, bad
from dpivon.stacked.stack import Stack

_KEY = "dpivon_stack"


class Ledger:
    """The number of releases charged to every run of a stack, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> int:
        """0 if nothing was ever charged."""
        try:
            value = json.loads(self.path.read_text())["charged"]
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise PrivacyError(
                f"{self.path}: cannot be read ({error}), so nobody knows what was charged. "
                f"Delete {self.path.parent} to begin its runs again, and count what they had released."
            ) from None
        return int(value)

    def write(self, charged: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace(self.path, json.dumps({"charged": charged}).encode())


def charged(stack: Stack) -> int:
    """Releases charged to each run so far."""
    return len(stack.mechanism.accountants[0])


def save(stack: Stack, path: Path, extra: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all. ``extra`` is anything JSON can hold."""
    from safetensors.torch import save

    tensors = {f"{i}.{k}": v.contiguous().cpu() for i, p in enumerate(stack.parts) for k, v in p.state.items()}
    meta = {
        "step": int(stack._t),
        "runs": _fingerprint(stack),
        "accounts": [dict(a.state_dict()) for a in stack.mechanism.accountants],
        "extra": extra,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, save(tensors, metadata={_KEY: json.dumps(meta)}))


def restore(stack: Stack, path: Path, ledger: Ledger) -> dict[str, Any]:
    """Put a fresh stack where the checkpoint was, charge what was lost since, and return ``extra``.

    Without a checkpoint the stack stays at its beginning; what the ledger has is charged all the same.
    """
    extra: dict[str, Any] = {}
    on_disk = ledger.read()
    if path.exists():
        if not ledger.path.exists():
            raise PrivacyError(
                f"{ledger.path}: is missing, so nobody knows what was charged since the checkpoint. "
                f"Delete {path.parent} to begin its runs again, and count what they had released."
            )
        extra = _load(stack, path)
    lost = on_disk - charged(stack)
    if lost > 0:
        stack.mechanism.reserve(lost)
        for _ in range(lost):
            stack.mechanism.spend()  # spent before the crash: it must not cover a step to come
    return extra


def _load(stack: Stack, path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    fix = f"Delete {path.parent} to begin its runs again"
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})[_KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dictionary
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise bad("checkpoint", str(path), f"cannot be read ({error})", fix) from None
    if meta["runs"] != _fingerprint(stack):
        raise bad("checkpoint", str(path), "is of other runs, another network or other data", fix)
    with torch.no_grad():
        for i, part in enumerate(stack.parts):
            for name, value in part.state.items():
                value.copy_(tensors[f"{i}.{name}"])
    for accountant, state in zip(stack.mechanism.accountants, meta["accounts"], strict=True):
        accountant.load_state_dict(state)
    stack._t.fill_(meta["step"])
    stack.steps_done = meta["step"]
    return dict(meta["extra"])


def _fingerprint(stack: Stack) -> str:
    """Which stack this is, without its seeds, which are as secret as the noise."""
    shape = {k: list(v.shape) for p in stack.parts for k, v in p.state.items()}
    rates = [s.digest for s in stack.mechanism.specs]
    text = json.dumps([[repr(run) for run in stack.runs], rates, shape, len(stack.inputs), str(stack.inputs.dtype)])
    return hashlib.sha256(text.encode()).hexdigest()


def replace(path: Path, content: bytes) -> None:
    """The old file or the new one, whenever the power fails."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name as well: a ledger that fell back would charge too little
    finally:
        os.close(folder)
