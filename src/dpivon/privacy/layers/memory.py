"""Memory that a book-keeper keeps between steps.

On a CPU fresh pages for every layer of every micro-batch cost more than filling them. A pool belongs to one book-keeper;
what it lends is valid until that book-keeper has made its sums. On a GPU the caching allocator does this already.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dpivon.privacy.precision import now


class Pool:
    """Buffers of one book-keeper, lent out until :meth:`take_back`. :func:`empty` takes from the one that is at work."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        fitting = [t for t in self._free if t.dtype == dtype and size <= t.numel() <= 2 * size + 1024]
        buffer = min(fitting, key=Tensor.numel) if fitting else torch.empty(size, dtype=dtype)
        self._free = [t for t in self._free if t is not buffer]
        self._lent.append(buffer)
        return (buffer if buffer.numel() == size else buffer[:size]).view(shape)

    def give_back(self, t: Tensor) -> None:
        """One lent tensor is no longer needed."""
        for buffer in self._lent:
            if buffer.data_ptr() == t.data_ptr():
                self._lent = [b for b in self._lent if b is not buffer]
                self._free.append(buffer)
                return

    def take_back(self) -> None:
        """Nothing that was lent is needed any more."""
        self._free, self._lent = self._free + self._lent, []


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory, from the active pool if there is one."""
    pool = now.pool
    if pool is None or like.is_cuda:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return pool.lend(shape, like.dtype)


def free(t: Tensor) -> None:
    """Memory from :func:`empty` that is no longer needed."""
    pool = now.pool
    if pool is not None:
        pool.give_back(t)


@functools.cache
def settle_allocator() -> None:
    """Let glibc keep freed activations, once in a process.

    It returns blocks above a threshold to the system as soon as they are freed, and fetching them again costs as much as
    filling them (a third of a step of the paper's CNN). The threshold follows the largest block ever freed, up to 32 MiB.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
