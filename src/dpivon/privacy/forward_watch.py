"""Watches every training forward: nothing but the clipped gradient may carry data away from it."""

from __future__ import annotations

import copy
import ctypes
import functools
import zlib
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import IGNORED, Tree, ignored_in, tensors_in
from dpivon.privacy.losses import LossWatch
from dpivon.shards import local

_OWN = set(vars(nn.Module())) | {"forward"}  # of torch's, and what a book-keeper puts there
IGNORED_LABELS = (
    f"Labels of {IGNORED}: the loss divides by the number of all others in the batch, so one example rescales the gradients of "
    "all. Use dpivon.PerExampleLoss outside the model, or remove such labels."
)
Recheck = Callable[[BookKeeper, Any, Any], None]


class ForwardWatch:
    """Which batch a forward saw, whether it changed a tensor of the model, and by which loss its gradient comes back.

    Parameters, buffers and attributes are neither clipped nor noised where a forward writes to them (running statistics,
    ``max_norm``, counters). Writes that torch counts are seen by a tensor's version, others (through ``.data``) by its values,
    in every pass. Attributes may change, as long as that has no effect on later passes: ``recheck`` is asked about every new
    one.
    """

    def __init__(self, keeper: BookKeeper, recheck: Recheck | None = None) -> None:
        self.module = keeper.module
        self.batch: list[Tensor] = []
        self.losses = LossWatch(keeper.loss_reduction)
        self._keeper, self._recheck = keeper, recheck
        self._held: dict[str, Tensor] = {}
        self._found: tuple[Any, dict[str, Tensor]] = None, {}  # the tensors of the model, and where they were
        self._versions: list[int] = []
        self._values: Any = None
        self._marks: Marks = [], []
        self._harmless: set[tuple[str, str]] = set()
        self._changed: list[str] = []
        self._reported: Tensor | None = None  # whether values have changed, on its way from the device

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is self.module:  # and not a deep copy, which has this function too
                self._before(args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is self.module:
                self._after(args, kwargs, output)

        self.module.register_forward_pre_hook(before, with_kwargs=True)
        self.module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardWatch:
        new = ForwardWatch(copy.deepcopy(self._keeper, memo), self._recheck)
        memo[id(self)] = new
        return new

    def _before(self, args: Any, kwargs: Any) -> None:
        if not self.module.training or self._keeper.rehearses:
            return
        if torch.is_grad_enabled():
            self.batch = tensors_in((args, kwargs))
        self._held = self._tensors()
        parts = self._parts(self._held)
        self._versions = [t._version for t in parts]
        self._values = _values(parts)
        self._marks = marks(self._keeper.tree) if self._recheck is not None else ([], [])

    def _after(self, args: Any, kwargs: Any, output: Any) -> None:
        if self._keeper.rehearses:
            return
        if self._held:
            self._compare()
        if output is None:  # forward has failed
            return
        if self.module.training and torch.is_grad_enabled():
            if self._keeper.breaks_with_ignored and any(map(bool, ignored_in(self.batch))):
                raise PrivacyError(IGNORED_LABELS)
            self._check_attributes(args, kwargs)
            self.losses.watch(output)

    def _compare(self) -> None:
        held, self._held = self._held, {}
        now, parts = self._tensors(), self._parts(held)
        versions = [t._version for t in parts]
        if now is not held or versions != self._versions:
            each = zip(held.items(), versions, self._versions, strict=True)
            self._changed += [name for (name, t), a, b in each if now.get(name) is not t or a != b]
        before, after = self._values, _values(parts)
        if isinstance(
            after, Tensor
        ):  # a GPU is not waited for: such a release is noise alone, and the error comes later
            changed = (before.view(torch.int64) != after.view(torch.int64)).any()  # bits, so that NaN equals itself
            self._keeper.doubt = changed if self._keeper.doubt is None else self._keeper.doubt | changed
            self._reported = torch.zeros(1, dtype=torch.bool, pin_memory=True).copy_(
                self._keeper.doubt, non_blocking=True
            )
        else:
            if before != after:
                self._changed += [name for name, a, b in zip(held, before, after, strict=True) if a != b]

    def _tensors(self) -> dict[str, Tensor]:
        """What a forward must leave as it is: the same dict as before, unless one was replaced, added or renamed."""
        layers = self._keeper.tree.layers()
        held: list[dict[str, Any]] = [own for _, layer in layers for own in (layer._parameters, layer._buffers)]
        tensors = [*map(id, chain.from_iterable(map(dict.values, held)))]  # which live on in what was found
        state = layers, [*map(len, held)], [*chain.from_iterable(held)], tensors
        if state != self._found[0]:
            self._found = state, self._find(layers)
        return self._found[1]

    def _find(self, layers: list[tuple[str, nn.Module]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        seen: set[int] = set()  # by identity, which is what a tensor's own hash computes at length
        for name, layer in layers:
            owners = self._keeper.owners.get(layer) if self._keeper.owners else None
            for held in (layer._parameters, layer._buffers):
                for key, t in held.items():
                    if t is None:
                        continue
                    t = t if owners is None else owners.get(key, t)
                    if id(t) not in seen:
                        seen.add(id(t))
                        found[f"{name}.{key}" if name else key] = t
        return found

    def _parts(self, held: dict[str, Tensor]) -> list[Tensor]:
        """What this rank keeps of them; a forward of a sharded model has whole copies."""
        return [local(t) for t in held.values()] if self._keeper.sharded else list(held.values())

    def _check_attributes(self, args: Any, kwargs: Any) -> None:
        if self._recheck is None:
            return
        new = _changed(self._marks, marks(self._keeper.tree)) - self._harmless
        if new:
            self._recheck(self._keeper, args, kwargs)
            self._harmless |= new

    def check_tensors(self) -> None:
        """An error if a forward since the last call has changed a parameter or buffer; on a GPU, since the one before."""
        changed, self._changed = self._changed, []
        if self._reported is not None and self._reported.numpy()[0]:
            changed.append("a tensor of the model")
        if changed:
            raise PrivacyError(
                f"{changed[0]!r} was changed by forward: it would carry private data around the mechanism. "
                "Remove what writes to it, such as running statistics, or compute it from public data and freeze it."
            )

    def same_batch(self, earlier: list[Tensor]) -> bool:
        """Whether the last forward saw bit for bit the same tensors as an earlier one."""
        return len(earlier) == len(self.batch) and all(
            a is b or _bits_equal(a, b) for a, b in zip(earlier, self.batch, strict=True)
        )


def _values(tensors: list[Tensor]) -> list[int] | Tensor:
    """A checksum of each tensor; on a GPU the norms of all of them, in few operations."""
    if True in [t.is_cuda for t in tensors]:
        return _norms(tensors)
    return [_checksum(t) for t in tensors]


@torch.no_grad()
def _norms(tensors: list[Tensor]) -> Tensor:
    """In double, where a small write to a large tensor shows: rounded to bf16, most would not. Those of one dtype after the
    other: of a list with several, torch would launch a norm for every tensor."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        if not t.dtype.is_floating_point:
            t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.double()
        kinds.setdefault(t.dtype, []).append(t)
    return torch.stack([n for alike in kinds.values() for n in torch._foreach_norm(alike, dtype=torch.float64)])


def _checksum(t: Tensor) -> int:
    """Of the tensor's memory, without an operation of torch's."""
    if not (t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)):
        t = t.detach().contiguous()
    size = t.nbytes
    return zlib.crc32((ctypes.c_char * size).from_address(t.data_ptr())) if size else 0


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As bytes: a NaN equals itself here, or a bad record would show as an error.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)


# What a model keeps beside parameters and buffers: tensors, numbers and containers of them, as plain attributes.


class Attributes:
    """The plain attributes of every layer as they are now, to be compared and put back."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = dict(module.named_modules())
        self._before = {
            name: {key: (value, _copy(value)) for key, value in _held(layer).items()}
            for name, layer in self._layers.items()
        }

    def state(self) -> dict[tuple[str, str], Any]:
        """Copies of all of them as they are now."""
        return {(n, key): _copy(v) for n, layer in self._layers.items() for key, v in _held(layer).items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Make them what they were."""
        for name, key, before in self._changes():
            held = self._layers[name].__dict__
            if before is None:
                del held[key]
                continue
            value, copy = before
            if isinstance(value, Tensor):
                value.detach().copy_(copy)
                held[key] = value
            else:
                held[key] = _copy(copy)

    def _changes(self) -> list[tuple[str, str, tuple[Any, Any] | None]]:
        found: list[tuple[str, str, tuple[Any, Any] | None]] = []
        for name, layer in self._layers.items():
            now, before = _held(layer), self._before[name]
            found += [(name, key, None) for key in now.keys() - before.keys()]
            found += [(name, key, was) for key, was in before.items() if not _same(now.get(key), was[1])]
        return found


def different(a: dict[tuple[str, str], Any], b: dict[tuple[str, str], Any]) -> list[str]:
    """The names of attributes in which two states differ."""
    return [".".join(at).lstrip(".") for at in a.keys() | b.keys() if not _same(a.get(at), b.get(at))]


#: For every attribute of every layer: where it is, and what changes when it does (None of what is not looked at).
Marks = tuple[list[tuple[str, str]], list[Any]]


def marks(tree: Tree) -> Marks:
    """Of every attribute that is a tensor, a number or a container, what changes when it does; quickly."""
    layers = tree.layers()
    held = [layer.__dict__ for _, layer in layers]
    state = layers, [*map(len, held)], [*chain.from_iterable(held)]
    if tree.attributes is None or tree.attributes[0] != state:
        names = [[key for key in own if key not in _OWN] for own in held]
        places = [(name, key) for (name, _), own in zip(layers, names, strict=True) for key in own]
        tree.attributes = state, names, places
    _, names, places = tree.attributes
    values = [own[key] for own, keys in zip(held, names, strict=True) for key in keys]
    known = {kind: _mark_of(kind) for kind in {*map(type, values)}}
    return places, [v if (mark := known[type(v)]) is _itself else mark and mark(v) for v in values]


def _changed(before: Marks, now: Marks) -> set[tuple[str, str]]:
    if before == now:
        return set()
    was, is_ = (dict(zip(*marked, strict=True)) for marked in (before, now))
    return {at for at in was.keys() | is_.keys() if was.get(at) != is_.get(at)}


def _itself(value: Any) -> Any:
    return value


def _of_tensor(t: Tensor) -> tuple[int, int]:
    return id(t), t._version


@functools.cache
def _mark_of(kind: type) -> Callable[[Any], Any] | None:
    """What changes when a value of this type does; None of what is not looked at."""
    if issubclass(kind, dict | list | set):
        return len
    if issubclass(kind, Tensor):
        return _of_tensor
    return _itself if issubclass(kind, int | float) else None


def _held(layer: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(layer).items() if key not in _OWN and _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(v) for v in value.values())
    if isinstance(value, list | tuple | set):
        return not hasattr(value, "_fields") and all(_plain(v) for v in value)
    return value is None or isinstance(value, Tensor | bool | int | float | complex | str)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copy(v) for key, v in value.items()}
    return type(value)(_copy(v) for v in value) if type(value) in (list, tuple, set) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
