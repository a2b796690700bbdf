"""Tensors and nested state on disk, as safetensors and JSON: nothing in such a file can be code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpivon.durable.files import check_parent, replacing
from dpivon.errors import bad

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], mode: int | None = None
) -> None:
    """Write a safetensors file; a crash half-way leaves whatever was at ``path`` before."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(path)
    check_parent("path", target)
    if target.is_dir():
        raise bad("path", str(target), "is a folder", "Pass the name of a file")
    # Cloned: safetensors refuses tensors that share memory, such as views of one flat vector.
    own = {name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    with replacing(target, mode) as temporary:
        try:
            save_file(own, temporary, dict(metadata))
            _sort_metadata(temporary)
        except SafetensorError as error:  # as it calls a full disk
            raise OSError(str(error)) from error


def _sort_metadata(path: Path) -> None:
    """safetensors writes metadata in another order every time; sorted, the same content is the same file."""
    with open(path, "rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def read_tensors(
    path: str | os.PathLike[str], *, key: str, version: str, what: str, fix: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file whose metadata say ``key=version``. Only safetensors is read: nothing is unpickled."""
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    if not source.is_file():
        raise bad("path", str(source), "is not an existing file", fix)
    try:
        with safe_open(source, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            found = metadata.pop(key, None)
            if found is None:
                raise bad("path", str(source), f"is a safetensors file but holds no {what}", fix)
            if found != version:
                problem = f"has format {found}, and this dpivon reads format {version}"
                raise bad("path", str(source), problem, "Use the dpivon version that wrote the file")
            # Cloned: the tensor may still be a view of the file, which others can overwrite.
            names = file.keys()
            return {name: file.get_tensor(name).clone() for name in names}, metadata
    except (SafetensorError, OSError, EOFError) as error:
        problem = f"cannot be read as a safetensors file ({error})"
        raise bad("path", str(source), problem, f"{fix}; pickled checkpoints are never opened") from None


def flatten(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` with every tensor moved to ``tensors`` and replaced by its name: something JSON can hold."""
    if isinstance(value, Tensor):
        tensors[prefix] = value.detach()
        return {_TENSOR: prefix}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: flatten(v, f"{prefix}.{key}", tensors) for key, v in value.items()}
        pairs = [[flatten(k, prefix, tensors), flatten(v, f"{prefix}.{k}", tensors)] for k, v in value.items()]
        return {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = [flatten(v, f"{prefix}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise bad(
        prefix, type(value).__name__, "cannot be kept without pickle", "Keep numbers, texts, lists and tensors only"
    )


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    if isinstance(value, list):
        return [unflatten(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]].clone(memory_format=torch.contiguous_format)
    if _TUPLE in value:
        return tuple(unflatten(v, tensors) for v in value[_TUPLE])
    if _PAIRS in value:
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value[_PAIRS]}
    return {key: unflatten(v, tensors) for key, v in value.items()}


def bytes_of(value: Tensor) -> bytes:
    """The bytes of a tensor, of any dtype."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def held_tensors(dataset: Any) -> Iterator[Tensor]:
    """The tensors of a data set that is held in memory; none if it is of another kind."""
    for inner in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())):
        if inner is not None:
            yield from held_tensors(inner)
    held = [
        *getattr(dataset, "tensors", ()),
        *(getattr(dataset, name, None) for name in ("data", "targets", "indices")),
    ]
    for value in held:
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not callable(value):
            try:
                yield torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                continue
