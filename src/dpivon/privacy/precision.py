"""Where norms and sums must agree to the last bits of fp32, whatever the caller has switched on for speed; and what a rule may
ask while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

if TYPE_CHECKING:
    from dpivon.privacy.layers.memory import Pool

_NOTHING = nullcontext()
ALIGNED = 8  # bf16 numbers that tensor cores read at once
_F = TypeVar("_F", bound=Callable[..., object])
_Options = dict[str, str | int | bool | Callable[..., object]]
_OPTIONS: _Options = {
    "emulate_precision_casts": True,
    # Of the operations that read one tensor, with how many others each is tried to be joined. All weights share clip factors:
    # with torch's own 64 it takes twice as long to find the same kernels for a wide residual network.
    "max_fusion_buffer_group_pairwise_attempts": 8,
}
# Up to how many operations and operands the compiler computes again where a result is read again, rather than to store it.
# With torch's own 30 and 4 the backward of every normalisation is stored in fp32 twice on its way to a rounded result.
_AGAIN: _Options = {
    "realize_opcount_threshold": 200,
    "realize_reads_threshold": 12,
    "realize_acc_reads_threshold": 24,
}


class _Now(threading.local):
    pool: Pool | None = None  # of the book-keeper at work
    rows = 1  # consecutive ones that are one example, whose gradients the book-keeper adds up
    capturing: bool | None = None  # where that is known: to ask takes long, and rules ask several times for every layer


now = _Now()


class surroundings:
    """Inside, these hold; what is not given stays as it is outside."""

    __slots__ = ("_before", "_given")

    def __init__(self, *, pool: Pool | None = None, rows: int | None = None, capturing: bool | None = None) -> None:
        self._given = pool, rows, capturing

    def __enter__(self) -> None:
        self._before = before = now.pool, now.rows, now.capturing
        pool, rows, capturing = self._given
        now.pool = before[0] if pool is None else pool
        now.rows = before[1] if rows is None else rows
        now.capturing = before[2] if capturing is None else capturing

    def __exit__(self, *error: object) -> None:
        now.pool, now.rows, now.capturing = self._before


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in fp32 proper. TF32 keeps ten bits, and bf16, to which ``set_float32_matmul_precision("medium")`` lets
    CPUs round that have units for it, seven: what is summed would then not be what was measured."""
    on_gpu = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    switches: list[Any] = [*on_gpu, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv]  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Nothing inside is computed in bf16 because the caller is inside an autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def as_multiplied(x: Tensor) -> Tensor:
    """x as a product in the caller's autocast reads it. Rounded here, once, it is the product's operand and its rule's too: a
    compiler that finds two roundings of x writes x twice, and once more for every kernel that it did not make itself."""
    if x.dtype is not torch.float32 or not torch.is_autocast_enabled(kind := x.device.type):
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype(kind) is torch.bfloat16 else x


def wide(t: Tensor) -> Tensor:
    """In fp32 or better."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype of ``wide(t)``."""
    return t.dtype if t.dtype in (torch.float32, torch.float64) else torch.float32


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b for matrices or stacks of them, added up and returned in fp32 or better; the operands themselves may be bf16."""
    if a.dtype != torch.bfloat16:
        # What matmul comes to for two stacks, without its views.
        multiply = torch.bmm if a.dim() == b.dim() == 3 and len(a) == len(b) else torch.matmul
        return multiply(a, b, out=out)
    if not a.is_cuda:
        return torch.matmul(a.float(), b.float(), out=out)
    if a.dim() == 2:
        return product(a.unsqueeze(0), b.unsqueeze(0))[0]
    result: Tensor = torch.bmm(a, b, out_dtype=torch.float32, out=out)
    return result


def padded_empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """bf16 of this shape, not filled; in memory every row has zeros behind it up to a multiple of eight columns."""
    n = shape[-1]
    rows = like.new_empty((*shape[:-1], n + -n % ALIGNED), dtype=torch.bfloat16)
    rows[..., n:].zero_()
    rows.untyped_storage().zeros_behind = n  # type: ignore[attr-defined]
    return rows[..., :n]


def padded(t: Tensor) -> Tensor:
    """t with columns of zeros up to a multiple of eight: as it lies, if it is all that :func:`padded_empty` made."""
    n, memory = t.shape[-1], t.untyped_storage()
    shape = (*t.shape[:-1], n + -n % ALIGNED)
    whole = torch.Size(shape).numel() * t.element_size() == memory.nbytes()
    if whole and getattr(memory, "zeros_behind", None) == n and t.stride(-1) == 1:
        return t.as_strided(shape, t.stride())
    return torch.nn.functional.pad(t, (0, shape[-1] - n))


def weighted_product(a: Tensor, g: Tensor, *, parts: int = 3) -> Tensor:
    """aᵀ g with g in fp32 although a may be bf16: g as a sum of bf16 parts, each of which holds 8 bits of it.

    Rounded, the weighted output gradients of one example no longer cancel over its positions where the exact ones do, and
    what is added up would be larger than what was measured; three parts are all of fp32. Two will do where an example has
    one position, and so nothing to cancel.
    """
    if a.dtype != torch.bfloat16:
        return product(a.mT, g)
    part = g.to(torch.bfloat16)
    total = product(a.mT, part)
    for _ in range(parts - 1):
        g = g - part
        part = g.to(torch.bfloat16)
        total += product(a.mT, part)
    return total


def readable(t: Tensor) -> bool:
    """Whether to look at values of t, and do less if they allow it. On a GPU that waits for all work under way."""
    return not t.is_cuda and not capturing()


def launches_cost(t: Tensor) -> bool:
    """Whether an operation on t costs more to launch than small tensors to copy: on a GPU, unless a compiler joins them."""
    return t.is_cuda and not capturing()


def capturing() -> bool:
    """Whether operations are being recorded, in a trace or a CUDA graph, so that no value can be looked at."""
    if now.capturing is not None:
        return now.capturing
    return get_proxy_mode() is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def options(*, again: bool) -> _Options:
    """How a program is compiled. ``again`` lets the compiler compute more a second time: less memory is moved, and a value that
    is measured and summed must then be known to be stored. `tests/programs/where.py` counts that, with kernels for the
    convolutions; elsewhere it is neither counted nor tried."""
    return _OPTIONS | (_AGAIN if again else {})


def compiled(function: _F, device: torch.device, *, again: bool = False) -> _F:
    """The same function; on a GPU compiled for the shapes it is called with, by these :func:`options`.

    Every rounding is kept. Left to itself the compiler computes in fp32 what was asked for in bf16: norms would then be
    taken of other numbers than the ones that matrix products read and add up, and an example could count for more than C.
    """
    if device.type != "cuda":
        return function
    # One process may train many stacks of different sizes; past the limit torch would silently go back to eager.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return cast(_F, torch.compile(function, dynamic=False, options=options(again=again)))
