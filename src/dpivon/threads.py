"""One thread for small operations on the host.

torch shares an operation out to as many threads as there are cores, and they wait for each other in a loop. On tensors of a few
thousand numbers, beside other programs, that waiting is nearly all they do, and one thread is done many times sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Also a decorator. Afterwards torch has as many threads as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
