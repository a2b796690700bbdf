"""The machine: what a number was measured on, in words, and one thread for small operations."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def hardware_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} thread(s)"


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread; afterwards it has as many as before. Also a decorator.

    On tensors of a few thousand numbers torch's threads spend nearly all their time waiting for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
