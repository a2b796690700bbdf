"""Every layer of a model is watched: its weights are detached while it runs, and its output is observed.

What becomes of an output's gradient is the book-keeper's: :mod:`dpivon.privacy.gradients.bookkeeping`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from dpivon.errors import PrivacyError
from dpivon.privacy.gradients.functional import Functions
from dpivon.privacy.gradients.model_io import OfRule, RowsOfBatch, Tree, Unattributed, Uses, map_tensors, tensors_in
from dpivon.privacy.layers.fallback import Alone
from dpivon.privacy.layers.linear import head, is_head
from dpivon.privacy.layers.registry import Rule, by_name, forward_for, plain_type, rule_for, takes_bf16
from dpivon.privacy.layers.uses import Dense, Use
from dpivon.privacy.precision import as_multiplied, wide

#: Layers that do nothing with their input but multiply it.
_PRODUCTS = {nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, "transformers.Conv1D"}


class LayerWatch(RowsOfBatch):
    """What :class:`~dpivon.privacy.gradients.bookkeeping.BookKeeper` is made on: hooks on the layers, put on and taken off.

    Layers with a rule are observed, and so are matrices that a module uses through ``F.linear`` or ``F.embedding``. What serves
    the whole batch is expanded to one per example: an input of one row, a bare parameter of shape [1, …] or [n]. Where that
    is not what a batch of one gives, and for whatever is left, a module runs example by example
    (:class:`~dpivon.privacy.layers.fallback.Alone`).

    Args:
        module: the model.
        batch_first: whether the batch is dimension 0 or 1.
        scatter: see :class:`~dpivon.privacy.gradients.bookkeeping.BookKeeper`.
        tried: whether made-up inputs will show that rows are examples. Without that, rows that are not those of the batch
            are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool,
        scatter: Callable[[Tensor, Tensor], Tensor] | None,
        tried: bool = False,
    ) -> None:
        self.module, self.tree = module, Tree(module)
        super().__init__(batch_first=batch_first, tried=tried)
        self._ignores = False  # whether layers run unwatched
        self._unwatched: list[nn.Module] = []  # modules that run example by example, and their children with them
        self._expanded: set[nn.Module] = set()  # modules whose bare parameters are expanded to one copy per example
        self._one_row: set[nn.Module] = set()  # layers whose input of one row was expanded
        self.alone_now: set[nn.Module] = set()  # modules that run example by example
        self.ran_alone = False  # whether any does, as far as passes have shown
        self._functions = False  # whether functions that the model calls by itself are watched
        self._scatter = scatter  # of a sharded model: from the sum of a whole parameter to the part that is kept here
        self._handles: list[Any] = []
        self._watched: dict[nn.Module, Callable[..., Any]] = {}  # what runs instead of a forward, while recorded
        self._detached: list[list[Tensor]] = []
        self._names = {layer: name for name, layer in module.named_modules()}
        self.owners = {layer: dict(layer.named_parameters()) for layer in module.modules()} if scatter else {}

    @property
    def sharded(self) -> bool:
        """Whether parameters are whole only while their layer runs."""
        return self._scatter is not None

    def _observe(
        self, z: Tensor, uses: Uses, saved: Sequence[Any] = (), *, batch_major: bool = False, layer: str = ""
    ) -> Tensor:
        """Arrange that the gradient of z becomes uses when backward reaches it. ``saved`` must not change until then."""
        raise NotImplementedError

    def _attach_to_model(self) -> None:
        self.module.autograd_grad_sample_hooks = self._handles  # type: ignore[assignment]  # Opacus's mark of a private model
        try:
            self._watch(self.module)
            for layer in () if self.sharded else filter(is_head, self.module.modules()):
                self._patch(layer, head)
        except BaseException:
            self.detach_from_model()
            raise

    def _hook_root(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        """A hook on the model itself, as a function: a deep copy of the model has it too, and is not watched by it."""

        def of_this_model(module: nn.Module, *args: Any) -> Any:
            return hook(module, *args) if module is self.module else None

        self._handles.append(register(of_this_model, **options))

    def detach_from_model(self) -> None:
        if hasattr(self.module, "autograd_grad_sample_hooks"):
            del self.module.autograd_grad_sample_hooks
        for handle in self._handles:
            handle.remove()
        for layer in self._watched:
            vars(layer).pop("forward", None)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, layers run unwatched."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def watch_more_closely(self, error: Exception) -> bool:
        """After a pass on made-up inputs failed, let more of the model run example by example. False if nothing changes."""
        if self.sharded:
            return False
        if isinstance(error, Unattributed) and error.outside and not self._functions:
            self._functions = True  # where a parameter that was used outside its layer is looked for first
            self._patch(self.module, self._by_function(self.module))
            return True
        modules = set(self._one_row)
        if isinstance(error, Unattributed):
            modules = {layer for layer in self._names if self.named(layer) == error.layer}
        if not getattr(error, "outside", False) or modules & self.alone_now:
            modules = set(map(self._around, modules)) - self.alone_now - {self.module}  # which would be no batch at all
        changed = bool(self._expanded or modules)
        self._expanded.clear()
        self._one_row.clear()
        for module in modules:
            self._run_alone(module)
        return changed

    def _around(self, layer: nn.Module) -> nn.Module:
        """The next module around a layer that is called itself."""
        module = self.module.get_submodule(self._names[layer].rpartition(".")[0])
        return self._around(module) if isinstance(module, nn.ModuleList | nn.ModuleDict) else module

    def _watch(self, module: nn.Module) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            return
        forward, rule = forward_for(module), rule_for(module)
        # Weights that are computed from other parameters: at every look, or by a variant of LoRA such as DoRA.
        computed = is_parametrized(module) or getattr(module, "lora_variant", None)
        if computed or getattr(module, "runs_alone", False):
            self._run_alone(module)
        elif forward is not None and (rule is None or self.batch_first):  # a forward puts the batch first
            self._replace_forward(module, forward)
        elif rule is not None:
            self._hook(module, rule)
        else:
            bare = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            if bare and not isinstance(module, DPRNNBase):
                if self.batch_first and all(_expands(p, self._tried) for p in bare.values()):
                    self._expand_bare(module, list(bare))
                elif self._tried and not self.sharded and all(p.dim() in (1, 2) for p in bare.values()):
                    self._patch(module, self._by_function(module))
                else:
                    self._run_alone(module)
                    return
            for child in module.children():
                self._watch(child)

    def _hook(self, layer: nn.Module, rule: Rule) -> None:
        widens, multiplies = not takes_bf16(layer), bool({plain_type(layer), by_name(layer)} & _PRODUCTS)
        name = self.named(layer)

        def before(layer: nn.Module, args: Any, kwargs: Any) -> Any:
            weights = self._detach(layer) if self._recording(layer) else []
            self._detached.append(weights)
            if not weights:
                return None
            if self.one_for_all(*args, *kwargs.values()) if kwargs else self.one_for_all(*args):
                self._one_row.add(layer)
                args, kwargs = map_tensors(self.one_each, (args, kwargs))
            rounds = multiplies and args and isinstance(args[0], Tensor)
            return ((as_multiplied(args[0]), *args[1:]) if rounds else args), kwargs

        def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            weights = self._detached.pop()
            for p in weights:
                p.requires_grad = True
            if not weights or output is None:
                return output
            if not isinstance(output, Tensor):
                raise PrivacyError(
                    f"{name} returned a {type(output).__name__} where a rule needs one tensor, so its gradients cannot be "
                    "formed. Return one tensor from the layer."
                )
            given = (*args, *kwargs.values()) if kwargs else args
            for t in given:
                if output is t:
                    output = output.view_as(t)  # else a gradient of the input's other uses would count as this layer's
                    break
            inputs = tuple([t.detach() if isinstance(t, Tensor) else t for t in given])
            uses: Uses = OfRule(rule, layer, inputs, self, widens)
            uses = uses if self._scatter is None else self._of_owner(layer, uses)
            return self._observe(output, uses, inputs, layer=name)

        self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        # Before a hook of the caller's changes z.
        self._handles.append(layer.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True))

    def _by_function(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward, inside which functions that are given its parameters are watched."""
        before, name = self._watched.get(module), self.named(module)
        own = module.forward if before is None else partial(before, module)

        def observe(z: Tensor, uses: Uses, saved: list[Tensor]) -> Tensor:
            return self._observe(z, uses, saved, layer=name)

        def expand(t: Tensor) -> Tensor:
            return self.one_each(t) if self.one_for_all(t) else t

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with Functions(module, observe, expand):
                return own(*args, **kwargs)

        return watched

    def _replace_forward(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        in_precision, name = _precision_for(layer), self.named(layer)

        def watched(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Attention says itself where its batch is, and always observes with the batch first.
            saved = [t.detach() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]

            def observe(z: Tensor, uses: Uses) -> Tensor:
                uses = self._of_owner(layer, in_precision(uses))
                return self._observe(z, uses, saved, batch_major=True, layer=name)

            return forward(layer, observe, *args, **kwargs)

        self._patch(layer, watched)

    def _run_alone(self, module: nn.Module) -> None:
        """Run a module example by example: no rule is known for the parameters it holds."""
        if self._scatter is not None:
            raise PrivacyError(
                f"{self.named(module)} has parameters without a per-example rule, and the model is sharded. Register a rule "
                "with dpivon.privacy.layers.register_rule, or freeze them."
            )
        self._patch(module, self._alone(module))
        self.alone_now.add(module)
        self.ran_alone = True

    def _alone(self, module: nn.Module) -> Callable[..., Any]:
        alone, name = Alone(module, module.forward, self.dim), self.named(module)

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.rows is None:
                raise PrivacyError(f"{name} was called outside the forward of its model. Call the private model.")
            sizes = {t.shape[self.dim] for t in tensors_in((args, kwargs)) if t.dim() > self.dim}
            if self.rows > 1 and self.rows not in sizes and sizes & {self.rows * n for n in self.positions if n > 1}:
                raise self.wrong_rows(max(sizes), name)  # an example would be run with everyone's positions

            def observe(z: Tensor, uses: Uses) -> Tensor:
                return self._observe(z, uses, batch_major=True, layer=name)

            self.ran_alone = True
            self._unwatched.append(module)  # its children are part of it
            try:
                return alone(observe, self.rows, args, kwargs)
            finally:
                self._unwatched.pop()

        return watched

    def _expand_bare(self, module: nn.Module, bare: list[str]) -> None:
        """A bare parameter of shape [1, …] or [n] is shared along the batch: give every example its own, and see its gradient.

        Where that is found not to be what a batch of one gives, the module runs example by example.
        """
        original, alone, name = module.forward, self._alone(module), self.named(module)

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in self._expanded:
                return alone(module, *args, **kwargs)
            assert self.rows is not None
            values = {key: module._parameters[key] for key in bare}  # what a functional call put there, if there is one
            dims = [
                t.dim()
                for t in (*args, *kwargs.values())
                if isinstance(t, Tensor) and t.dim() > 1 and len(t) == self.rows
            ]
            if not dims and any(value is not None and value.dim() == 1 for value in values.values()):
                return alone(module, *args, **kwargs)
            for key, value in values.items():
                assert value is not None
                shape = value.shape[1:] if value.dim() > 1 else (*[1] * (dims[0] - 2), len(value))
                copies = value.detach().expand(self.rows, *shape)
                module.__dict__[key] = self._observe(copies, _whole(value), batch_major=True, layer=name)
            try:
                return original(*args, **kwargs)
            finally:
                for key in bare:
                    module.__dict__.pop(key, None)

        self._patch(module, watched)
        self._expanded.add(module)

    def _patch(self, layer: nn.Module, watched: Callable[..., Any]) -> None:
        """Let the layer run ``watched`` while it is recorded, else its own forward. If it is being called, that call too."""
        known, self._watched[layer] = layer in self._watched, watched
        if known:
            return
        original: Any = layer.forward
        own = getattr(original, "__self__", None) is layer

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._recording(layer):
                return self._watched[layer](layer, *args, **kwargs)
            # Of the layer that is called: a deep copy has this function too, and weights of its own.
            return original.__func__(layer, *args, **kwargs) if own else original(*args, **kwargs)

        layer.forward = types.MethodType(forward, layer)

    def _of_owner(self, layer: nn.Module, uses: Uses) -> Uses:
        """The uses of a sharded layer under the parameters that the optimizer holds, not the whole ones of this pass."""
        if self._scatter is None:
            return uses
        owners = self.owners[layer]

        def renamed(g: Tensor) -> Mapping[Tensor, Use]:
            names: dict[Tensor, str] = {p: name for name, p in layer.named_parameters()}
            return {owners[names[p]]: use for p, use in uses(g).items()}

        return renamed

    def named(self, layer: nn.Module) -> str:
        """How an error calls a layer."""
        name = self._names.get(layer)
        return f"{type(layer).__name__} {name!r}" if name else f"The model {type(layer).__name__}"

    def _recording(self, layer: nn.Module) -> bool:
        # A deep copy of a watched layer has its hooks too, and is no layer of this model.
        watched = not self._ignores and not self._unwatched and layer in self._names
        return watched and layer.training and torch.is_grad_enabled()

    def _detach(self, layer: nn.Module) -> list[Tensor]:
        # Of a layer without children its own are all of them, and known without a walk.
        own = layer.parameters() if layer._modules else layer._parameters.values()
        weights: list[Tensor] = [p for p in own if p is not None and p.requires_grad]
        for p in weights:
            p.requires_grad = False
        return weights


def has_rules(module: nn.Module) -> bool:
    """Whether no trainable layer has to run example by example."""
    if not any(p.requires_grad for p in module.parameters()):
        return True
    if is_parametrized(module):
        return False
    if forward_for(module) is not None or rule_for(module) is not None:
        return True
    bare = [p for p in module.parameters(recurse=False) if p.requires_grad and not isinstance(module, DPRNNBase)]
    return all(p.dim() > 1 and p.shape[0] == 1 for p in bare) and all(has_rules(child) for child in module.children())


def _expands(p: Tensor, tried: bool) -> bool:
    """Whether a bare parameter is given to every example by broadcasting; a vector only where it is tried that this is so."""
    return p.shape[0] == 1 if p.dim() > 1 else tried and p.dim() == 1


def _whole(p: Tensor) -> Uses:
    """The gradient of an example's own copy of p is its per-example gradient."""
    return lambda g: {p: Dense(wide(g).reshape(len(g), *p.shape))}


def _precision_for(layer: nn.Module) -> Callable[[Uses], Uses]:
    """How uses are given their gradients: in fp32 or better, unless the layer's rule asks for bf16 as it comes."""
    return (lambda uses: uses) if takes_bf16(layer) else (lambda uses: lambda g: uses(wide(g)))
