"""What a model takes and returns: tensors in nested values, and the model as its caller goes on using it.

An empty batch is run as one made-up example whose output is cut off again, so that every layer can run it. Its gradient is
exactly zero, and the release with its noise still happens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.privacy.gradients.means import stored
from dpivon.privacy.layers.registry import Rule
from dpivon.privacy.layers.uses import Use
from dpivon.privacy.precision import capturing, wide

if TYPE_CHECKING:
    from dpivon.privacy.gradients.bookkeeping import BookKeeper

Uses = Callable[[Tensor], Mapping[Tensor, Use]]
IGNORED = -100  # torch's default ignore_index


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``module.named_modules()``, without its generators, and of a model that has one of its own too."""
    found: dict[nn.Module, str] = {}
    pending = [("", module)]
    while pending:
        name, layer = pending.pop()
        if layer not in found:
            found[layer] = name
            children = [(key, child) for key, child in reversed(layer._modules.items()) if child is not None]
            pending += [(f"{name}.{key}" if name else key, child) for key, child in children]
    return [(name, layer) for layer, name in found.items()]


class Tree:
    """The layers of a model by name: asked several times per step, and walked again only where one was replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: list[tuple[str, nn.Module]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self.attributes: Any = None  # what :func:`dpivon.privacy.forward_watch.marks` knows of them

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The same list as before, unless a layer was replaced, added or taken away."""
        if not self._layers or [layer._modules for _, layer in self._layers] != self._children:
            self._layers = layers_of(self._module)
            self._children = [dict(layer._modules) for _, layer in self._layers]
        return self._layers


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value).values():
            yield from _tensors(part)


def rows_in(batch: Any, dim: int) -> int:
    """How many rows a batch has in this dimension; an error if no tensor of it has one."""
    sizes = [t.shape[dim] for t in _tensors(batch) if t.dim() > dim]
    if not sizes:
        what = f"batch={type(batch).__name__}: holds no tensor with a batch dimension"
        raise PrivacyError(f"{what}. Give a batch as the data loader returns it.")
    return sizes[0]


def others_in(value: Any) -> list[Any]:
    """What a nested value holds besides tensors, containers aside."""
    if isinstance(value, Tensor):
        return []
    parts = _parts(value)
    return [value] if not parts and value not in ((), [], {}) else [o for p in parts.values() for o in others_in(p)]


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nested value with ``fn`` of every tensor. Nothing that is given is changed."""
    if isinstance(value, Tensor):
        return fn(value)
    parts = _parts(value)
    mapped = {key: map_tensors(fn, part) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, tuple | list):
        return type(value)(*mapped.values()) if hasattr(value, "_fields") else type(value)(mapped.values())
    made = copy.copy(value)
    for key, part in mapped.items():
        if isinstance(value, Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key, part)  # also of a frozen dataclass
    return made


def structure(value: Any) -> Any:
    """What two values have in common that differ in numbers and sizes only; it can be compared and hashed."""
    if isinstance(value, Tensor):
        return value.dim(), value.dtype
    parts = _parts(value)
    if not parts:
        return type(value).__name__
    return type(value).__name__, tuple((key, structure(part)) for key, part in parts.items())


def _parts(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    fields = getattr(value, "__dict__", None)  # a dataclass, or an object that holds tensors among other things
    if fields is None or isinstance(value, type) or callable(value):
        return {}
    return {key: part for key, part in fields.items() if isinstance(part, Tensor | Mapping | tuple | list)}


def ignored_in(value: Any) -> list[Tensor]:
    """Whether any integer of a tensor is one that torch's losses leave out of their mean; not read, since a GPU would wait."""
    return [(t == IGNORED).any() for t in tensors_in(value) if t.dtype in (torch.int64, torch.int32)]


class Kept:
    """Tensors that uses hold, and that must not change until they are read again."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self) -> None:
        self._tensors, self._versions = list[Tensor](), list[int | None]()

    def add(self, uses: Iterable[Use]) -> None:
        """Also keep those of these uses, as they are now."""
        found = [t for use in uses for t in _reader(type(use))(use) if isinstance(t, Tensor)]
        self._tensors += found
        self._versions += _versions_of(found)

    def check(self) -> None:
        _check_unchanged(self._tensors, self._versions)


@functools.cache
def _reader(kind: type) -> Callable[[Any], Iterable[Any]]:
    """What reads the fields of a kind of use. Not vars(), which makes one more object for every use."""
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else []
    return attrgetter(*(names if len(names) > 1 else 2 * names)) if names else lambda use: vars(use).values()


def _versions_of(given: Sequence[Any]) -> list[int | None]:
    """How often each was written to; None of what is no tensor, and of an inference tensor."""
    try:
        return [t._version for t in given]
    except (AttributeError, RuntimeError):
        return [t._version if isinstance(t, Tensor) and not t.is_inference() else None for t in given]


def _check_unchanged(given: Sequence[Any], versions: Sequence[int | None]) -> None:
    """Autograd would notice a saved input that was overwritten; it does not save what only detached weights need."""
    if (now := _versions_of(given)) != versions:
        shape = next(tuple(t.shape) for t, a, b in zip(given, now, versions, strict=True) if a != b)
        raise PrivacyError(
            f"A layer's input of shape {shape} was changed in place before its gradient was used: its per-example gradients "
            "would be wrong. Use the operation that returns a new tensor (such as inplace=False)."
        )


# What is kept of a layer's output until its gradient arrives: one of each for every layer, with slots. With closures and pairs
# Python's garbage collector, which counts objects that live on, would start about half as often again.


class OfRule:
    """The uses of a layer's parameters by its rule. ``widens``: the rule takes gradients in fp32 or better."""

    __slots__ = ("_inputs", "_layer", "_rows", "_rule", "_widens")

    def __init__(self, rule: Rule, layer: nn.Module, inputs: tuple[Any, ...], rows: RowsOfBatch, widens: bool) -> None:
        self._rule, self._layer, self._inputs, self._rows, self._widens = rule, layer, inputs, rows, widens

    def __call__(self, g: Tensor) -> Mapping[Tensor, Use]:
        inputs = self._inputs if self._rows.batch_first else self._rows._batch_major(self._inputs)
        return self._rule(self._layer, inputs, wide(g) if self._widens else g)


class Arrival:
    """A hook on an output: its gradient becomes uses, once, and in the pass that made the output."""

    __slots__ = (
        "_alone",
        "_batch_major",
        "_first",
        "_generation",
        "_keeper",
        "_layer",
        "_pass",
        "_saved",
        "_seen",
        "_uses",
        "_versions",
    )

    def __init__(
        self, keeper: BookKeeper, uses: Uses, saved: Sequence[Any], *, first: bool, batch_major: bool, layer: str
    ) -> None:
        self._keeper, self._uses, self._layer = keeper, uses, layer
        self._saved, self._versions = saved, _versions_of(saved)
        self._first, self._batch_major, self._seen = first, batch_major, False
        self._generation, self._pass = keeper._generation, keeper._pass
        # And not recomputed by a checkpoint.
        self._alone = not keeper._running and torch._C._current_graph_task_id() == -1

    def __call__(self, g: Tensor) -> None:
        keeper = self._keeper
        if self._generation != keeper._generation or self._seen:
            raise PrivacyError(
                "A second backward through one forward, or one through the forward of an earlier batch: its examples would "
                "be clipped twice. Run forward and backward once for every step()."
            )
        if self._alone:
            raise PrivacyError(
                f"{self._layer} was called outside the forward of its model, where two batches in one step would go unnoticed. "
                "Call the model that was made private."
            )
        self._seen = True
        _check_unchanged(self._saved, self._versions)
        if self._pass != keeper._passes.recorded:
            keeper._note_pass(self._pass)
        g = g if self._batch_major or keeper.batch_first else keeper._batch_major((g,))[0]
        if self._first and g.dtype == torch.bfloat16 and capturing():
            g = stored(g)
        if not torch.is_grad_enabled():
            keeper._record(self._uses, g, self._layer)
            return
        with torch.no_grad():  # with create_graph=True
            keeper._record(self._uses, g, self._layer)


class Unattributed(PrivacyError):
    """A parameter whose gradient could not be split into those of examples, in the way that ``layer`` was watched.

    Attributes:
        layer: how errors call the module.
        outside: whether a parameter of it was used where nothing watched.
    """

    def __init__(self, message: str, layer: str, *, outside: bool = False) -> None:
        super().__init__(message)
        self.layer, self.outside = layer, outside


class RowsOfBatch:
    """The rows of the batch that a model sees, and what its layers may make of them.

    Args:
        batch_first: whether the batch is dimension 0 or 1.
        tried: whether made-up inputs will show that rows are examples. Without that, rows that are not those of the batch
            are refused.
    """

    def __init__(self, *, batch_first: bool, tried: bool) -> None:
        self.batch_first = batch_first
        self.dim = 0 if batch_first else 1
        self.rows: int | None = None  # of the batch, as the model saw it
        self.positions: set[int] = set()  # how many an example of it may have
        self._tried = tried

    def one_for_all(self, *given: Any) -> bool:
        """Whether all tensors of these have one row for the whole batch, such as its positions."""
        found, dim = False, self.dim
        for t in given if self._tried and self.rows not in (None, 0, 1) else ():
            if isinstance(t, Tensor):
                if t.ndim <= dim or t.shape[dim] != 1:
                    return False
                found = True
        return found

    def one_each(self, t: Tensor) -> Tensor:
        """One row made one for every example."""
        assert self.rows is not None
        return t.expand(*t.shape[: self.dim], self.rows, *t.shape[self.dim + 1 :])

    def positions_of(self, args: Any, kwargs: Any) -> set[int]:
        """How many positions the examples of these inputs may have: S, and S · T, of an input [batch, S, T]."""
        shapes = [t.shape[1:] for t in tensors_in((args, kwargs)) if self.batch_first and t.dim() > 1]
        return {shape[:last].numel() for shape in shapes for last in range(1, len(shape) + 1)} if self._tried else set()

    def rows_of_each(self, rows: int, layer: str) -> int:
        """How many rows of a layer are one row of the batch: one, or all its positions, [batch · positions, …].

        Only a number of positions that the inputs have by their shape: where a model picks positions by their values, as many
        as are divisible by the batch would not be an example's own.
        """
        if self.rows is None or rows == self.rows:
            return 1
        if self.rows and rows % self.rows == 0 and rows // self.rows in self.positions:
            return rows // self.rows
        raise self.wrong_rows(rows, layer)

    def wrong_rows(self, rows: int, layer: str) -> Unattributed:
        return Unattributed(
            f"{layer or 'A layer'} saw {rows} rows in a batch of {self.rows}: its rows are not examples, so clipping them "
            "would not bound an example. Keep the batch as the first dimension of every layer's input, "
            "[batch, tokens, features] instead of [batch · tokens, features].",
            layer,
        )

    def _batch_major(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.batch_first:
            return tensors
        return tuple(t.transpose(0, 1) if isinstance(t, Tensor) and t.dim() > 1 else t for t in tensors)


class _EmptyBatch:
    keeper: BookKeeper

    def _fill(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The inputs with one made-up example, or None if the batch is not empty."""
        dim, rows = self.keeper.dim, self.keeper.augmentations
        if not any(t.dim() > dim and t.shape[dim] == 0 for t in tensors_in((args, kwargs))):
            return None
        filled: tuple[Any, Any] = map_tensors(lambda t: _with_rows(t, dim, rows), (args, kwargs))
        return filled

    def _cut(self, output: Any) -> Any:
        dim = self.keeper.dim
        return map_tensors(lambda t: t.narrow(dim, 0, 0) if t.dim() > dim else t, output)


class BookKeepingModule(_EmptyBatch, AbstractGradSampleModule):  # type: ignore[misc]
    """The model, wrapped."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        super().__init__(m, batch_first=keeper.batch_first, loss_reduction=keeper.loss_reduction)
        self.keeper = keeper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        filled = self._fill(args, kwargs)
        if filled is None:
            return super().forward(*args, **kwargs)
        return self._cut(super().forward(*filled[0], **filled[1]))

    def forbid_grad_accumulation(self) -> None:
        self.keeper.accumulates = False

    def allow_grad_accumulation(self) -> None:
        self.keeper.accumulates = True

    def remove_hooks(self) -> None:
        self.keeper.detach_from_model()


class BookKeepingHooks(_EmptyBatch):
    """A model that is not wrapped: forward hooks on it do the same.

    A model that is itself a single layer is left alone: its own backward hook would see the output after it was cut.
    """

    _was_empty = False

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        self._module, self.batch_first, self.keeper = m, keeper.batch_first, keeper
        if not has_trainable_params(m):
            # Functions, which a deep copy of the model shares; and first of all, so that rows of the filled batch are counted.
            m.register_forward_pre_hook(lambda *given: self._before(*given), with_kwargs=True, prepend=True)
            m.register_forward_hook(lambda *given: self._after(*given))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.keeper.rehearses:
            return None
        filled = self._fill(args, kwargs)
        self._was_empty = filled is not None
        return filled

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._cut(output) if self._was_empty and not self.keeper.rehearses else output

    def cleanup(self) -> None:
        self.keeper.detach_from_model()


def _with_rows(t: Tensor, dim: int, rows: int) -> Tensor:
    if t.dim() <= dim or t.shape[dim] != 0:
        return t
    shape = list(t.shape)
    shape[dim] = rows
    return torch.zeros(shape, dtype=t.dtype, device=t.device)
