"""A digest of the data of a run, under a key that only its checkpoints hold."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from torch import Tensor

from dpivon.durable.tensors import bytes_of, held_tensors


def data_digest(key: bytes, dataset: Any, people: Tensor | None = None, stated: str = "") -> str:
    """The digest of a data set that is held in memory; of another kind, of its length and what is ``stated``.

    Args:
        key: the run's secret.
        dataset: the data set.
        people: whose each row is, where an example is a person.
        stated: a digest of the caller's own.
    """
    total = hmac.new(key, f"{len(dataset)} {stated}".encode(), hashlib.sha256)
    if people is not None:
        total.update(bytes_of(people))
    for value in held_tensors(dataset):
        total.update(f"{value.dtype} {list(value.shape)}".encode())
        total.update(bytes_of(value))
    return total.hexdigest()
