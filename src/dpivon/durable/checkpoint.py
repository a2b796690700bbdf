"""Checkpoints on disk: safetensors with a checksum over all they hold, the last few kept, the newest whole one loaded.

They hold the states of the generators that draw noise and batches, and so they are as secret as the data: who has one can
subtract the noise. Mode 0600, and the file says so itself.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

from dpivon.durable.files import SECRET, replace
from dpivon.durable.tensors import bytes_of, flatten, read_tensors, unflatten, write_tensors
from dpivon.errors import ArgumentError, DpivonError, bad, check_whole

_KEY, _VERSION = "dpivon_checkpoint", "1"
_NAMES = "release-*.safetensors"
_WARNING = "holds the state of noise generators: as secret as the training data; publish what `dpivon export` writes"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """One checkpoint, whole or not at all, readable by its owner only."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(flatten(state, "state", tensors))
    metadata = {_KEY: _VERSION, "secret": _WARNING, "state": text, "sha256": _checksum(text, tensors)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, metadata, mode=SECRET)


def read(path: Path) -> dict[str, Any]:
    """What :func:`write` wrote; an error that names the file if one bit of it is different."""
    fix = "Use another copy of it, or begin again"
    tensors, metadata = read_tensors(path, key=_KEY, version=_VERSION, what="checkpoint", fix=fix)
    text = metadata.get("state", "")
    if metadata.get("sha256") != _checksum(text, tensors):
        raise bad("checkpoint", str(path), "is damaged: its checksum does not match", fix)
    state: dict[str, Any] = unflatten(json.loads(text), tensors)  # whole, so it is what flatten made
    return state


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        total.update(bytes_of(value))
    return total.hexdigest()


class Rotation:
    """The last ``keep`` checkpoints of a folder, by the number of releases they have seen."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, check_whole("keep", keep, "Keep at least 2, one may be damaged", at_least=2)

    def files(self) -> list[Path]:
        """The newest first."""
        return sorted(self.folder.glob(_NAMES), reverse=True)

    def path(self, releases: int) -> Path:
        return self.folder / f"release-{releases:012}.safetensors"

    def write(self, releases: int, state: Mapping[str, Any]) -> Path:
        """The new one is on disk before an old one goes."""
        path = self.path(releases)
        write(path, state)
        self._drop()
        return path

    def adopt(self, name: str, content: bytes) -> None:
        """The same for one that :meth:`write` wrote on another machine."""
        if not fnmatch(name, _NAMES) or Path(name).name != name:
            raise bad("name", name, "is no checkpoint's", f"Give the name of a file {_NAMES}")
        replace(self.folder / name, content, mode=SECRET)
        self._drop()

    def _drop(self) -> None:
        for old in self.files()[self.keep :]:
            old.unlink()

    def read(self, *, tidy: bool = True) -> dict[str, Any] | None:
        """The newest that is whole; those that are not are named in a warning and put aside. None if there is none.

        ``tidy=False`` changes nothing in the folder, which another process may be using.
        """
        if tidy:
            for left in self.folder.glob(".release-*.tmp"):  # by a process that was killed while it wrote
                left.unlink()
        damaged: list[tuple[Path, str]] = []
        for path in self.files():
            try:
                state = read(path)
            except ArgumentError as error:
                damaged.append((path, str(error)))
                continue
            for other, problem in damaged:
                warnings.warn(f"{problem} Going on from the one before it, {path}.", stacklevel=3)
                if tidy:
                    other.rename(other.with_suffix(".damaged"))
            return state
        if damaged:
            problems = " ".join(problem for _, problem in damaged)
            raise DpivonError(f"{self.folder}: not one of its {len(damaged)} checkpoints is whole. {problems}")
        return None
