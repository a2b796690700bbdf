"""The largest physical batch: how many examples a forward, a backward and their clipped sum have memory for.

Passes are made on made-up inputs (:mod:`dpivon.privacy.made_up`), of which a batch gives shapes and types only. None of it is
anyone's data, nothing is released, and model, optimizer and generators are afterwards what they were.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpivon.errors import DpivonError, PrivacyError, bad, check_number, check_whole
from dpivon.optim.ivon import IVON
from dpivon.privacy.forward_watch import Attributes
from dpivon.privacy.gradients.model_io import map_tensors, rows_in, tensors_in
from dpivon.privacy.handed_over import as_called
from dpivon.privacy.layers.memory import Pool
from dpivon.privacy.made_up import NotTried, kinds, made_up, randomness_kept, same_for_every_row, some_rows
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.precision import full_precision, without_autocast

_ROWS = 3  # that are made up; a larger batch repeats them


class Fits:
    """An engine's :meth:`largest_physical_batch`."""

    _last: tuple[Any, DPOptimizer] | None
    check: Callable[..., None]

    def largest_physical_batch(
        self, loss_fn: Callable[..., Any], batch: Any, *, at_most: int | None = None, memory: float | None = None
    ) -> int:
        """How many examples fit into memory at once: ``max_physical_batch_size`` of a :class:`BatchMemoryManager`.

        >>> size = engine.largest_physical_batch(lambda model, batch: my_loss(model(batch["x"]), batch["y"]), batch)

        Sizes are doubled, then bisected, each with a forward, a backward and a clipped sum on made-up inputs. Call it after
        ``make_private``, with ``autocast`` and activation checkpointing as you train.

        Args:
            loss_fn: as that of :meth:`dpivon.PrivacyEngine.check`, which is asked first.
            batch: what a batch looks like, padded to the longest input: of its tensors, shapes and types are used.
            at_most: the largest size that is tried; by default that of a Poisson batch that is six deviations too large.
            memory: bytes that the model, its optimizer and a step may hold together. By default all that a GPU has; a CPU
                needs a number.
        """
        if self._last is None:
            raise PrivacyError(
                "largest_physical_batch() before make_private: there is no private model yet. Call it after."
            )
        _, optimizer = self._last
        device = optimizer.params[0].device
        if memory is not None:
            memory = check_number("memory", memory, "Use a number of bytes such as 8e9", above=0.0)
        elif device.type != "cuda":
            fix = "Give the bytes that a step may hold, such as memory=8e9"
            raise bad("memory", None, f"on {device.type} a process that takes too much is ended, not refused", fix)
        if optimizer.together.sharded:
            fix = "Try a BatchMemoryManager with a small max_physical_batch_size"
            raise bad(
                "module", type(optimizer.module).__name__, "is sharded: ranks would wait for one that failed", fix
            )
        b = optimizer.expected_batch_size
        fix = "Use the largest size that is worth trying, such as 1024"
        most = math.ceil(b + 6 * math.sqrt(b)) if at_most is None else check_whole("at_most", at_most, fix, at_least=1)
        if optimizer.source.on_first is not None:
            self.check(loss_fn, batch)
        return _search(_Passes(optimizer, loss_fn, batch, memory).fits, most)


def _search(fits: Callable[[int], bool], most: int) -> int:
    """The largest n ≤ most that fits, where all smaller ones do."""
    if not fits(1):
        raise _nothing_fits()
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _nothing_fits() -> Exception:
    fix = "Turn on activation checkpointing, train fewer parameters (LoRA), or use another device"
    return bad("batch", 1, "not even one example fits into memory", fix)


class _Passes:
    """Passes of any size on made-up inputs, as the model makes them when it trains."""

    def __init__(self, optimizer: DPOptimizer, loss_fn: Callable[..., Any], batch: Any, memory: float | None) -> None:
        self._optimizer, self._keeper, self._memory = optimizer, optimizer.source, memory
        self._device = optimizer.params[0].device
        batch = map_tensors(lambda t: t.to(self._device), batch)
        rows = rows_in(batch, self._keeper.dim)
        self._function, self._value = self._way(
            (function, self._made_up(batch, rows, kind))
            for function in as_called(loss_fn, batch)
            for kind in kinds(self._keeper.module)
        )

    def _made_up(self, batch: Any, rows: int, kind: Any) -> Any:
        """Three examples, in the types of the batch."""
        types = iter([t.dtype for t in tensors_in(batch)])
        made = made_up(batch, _ROWS * self._keeper.augmentations, rows, self._keeper.dim, kind, torch.float32)
        return map_tensors(lambda t: t.to(next(types)), made)

    def _way(self, ways: Iterable[tuple[Callable[..., Any], Any]]) -> tuple[Callable[..., Any], Any]:
        """The first way in which the model takes made-up inputs. A label that is no class would end a GPU's use, so that
        indices are looked at first."""
        found: str = ""
        for function, value in ways:
            try:
                for i in range(_ROWS):
                    with self._unchanged(), same_for_every_row(self._device, self._keeper.dim):
                        self._pass(function, self._examples(value, [i]))
                return function, value
            except DpivonError:
                raise
            except Exception as error:
                if out_of_memory(error):
                    raise _nothing_fits() from None
                found = found or f"{type(error).__name__}: {error}"
        raise NotTried(
            f"loss_fn could not be tried on made-up inputs ({found}). Make it run on any numbers of the batch's shapes."
        )

    def fits(self, examples: int) -> bool:
        """Whether a pass over so many examples does."""
        try:
            with self._unchanged(), self._limited():
                self._pass(self._function, self._examples(self._value, [i % _ROWS for i in range(examples)]))
            return True
        except DpivonError:
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise
        gc.collect()  # what the error held
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _examples(self, value: Any, chosen: list[int]) -> Any:
        each = self._keeper.augmentations
        return some_rows(value, [i * each + j for i in chosen for j in range(each)], _ROWS * each, self._keeper.dim)

    def _pass(self, function: Callable[..., Any], value: Any) -> None:
        """As a micro-batch of a logical batch that others went before."""
        keeper, optimizer = self._keeper, self._optimizer
        held = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in optimizer.params]
        held += self._state_to_come()
        for _ in range(keeper.samples):
            loss = function(keeper.module, value)
            (loss.mean() if keeper.loss_reduction == "mean" else loss.sum()).backward()
            keeper.between_samples()
        with full_precision(), without_autocast(self._device.type):
            sums = keeper.clipped_sums(optimizer.params, optimizer.first_clipping)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        del held, sums

    def _state_to_come(self) -> list[Tensor]:
        """Two moments of every weight, and for IVON its mean and its perturbation, less what the optimizer holds already."""
        inner, found = self._optimizer.original_optimizer, []
        for p in self._optimizer.params:
            has = sum(isinstance(t, Tensor) and t.shape == p.shape for t in inner.state.get(p, {}).values())
            copies = (4 if isinstance(inner, IVON) else 2) - has
            found += [torch.zeros_like(p, requires_grad=False) for _ in range(copies)]
        return found

    def _limited(self) -> AbstractContextManager[Any]:
        if self._memory is None:
            return nullcontext()
        inner, module = self._optimizer.original_optimizer, self._keeper.module
        state = [t for own in inner.state.values() for t in own.values() if isinstance(t, Tensor)]
        return _Limit(self._memory, [*module.parameters(), *module.buffers(), *state])

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Inside, passes are made whose traces are gone afterwards."""
        keeper, module = self._keeper, self._keeper.module
        modes = [(layer, layer.training) for layer in module.modules()]
        kept = [(p, p.grad, p.requires_grad, getattr(p, "grad_sample", None)) for p in module.parameters()]
        buffers = [(t, t.detach().clone()) for t in module.buffers()]
        attributes, pool, keeper.pool = Attributes(module), keeper.pool, Pool()
        try:
            with randomness_kept(self._device), keeper.aside(), torch.enable_grad():
                for p, *_ in kept:
                    p.grad = None
                module.train()
                yield
        finally:
            keeper.pool = pool
            attributes.restore()
            for t, was in buffers:
                if not torch.equal(t, was):
                    t.detach().copy_(was)
            for layer, training in modes:
                layer.training = training
            for p, grad, trained, sample in kept:
                p.grad = grad
                p.requires_grad_(trained)
                if hasattr(p, "grad_sample"):
                    p.grad_sample = sample


class _Limit(TorchDispatchMode):
    """Raises ``torch.OutOfMemoryError`` where the tensors that are alive take more bytes than there shall be."""

    def __init__(self, most: float, before: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._alive = most, 0
        self._seen: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        for t in before:
            self._count(t)

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage not in self._seen:
            size = storage.nbytes()
            self._seen[storage] = weakref.finalize(storage, self._freed, size)
            self._alive += size

    def _freed(self, size: int) -> None:
        self._alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tensors_in(out if isinstance(out, tuple | list) else [out]):
            self._count(t)
        if self._alive > self._most:
            raise torch.OutOfMemoryError(f"{self._alive} bytes of {self._most:.0f} that were stated")
        return out


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)  # of cuBLAS and cuDNN
