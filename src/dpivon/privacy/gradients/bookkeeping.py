"""Clipped sums by book-keeping: one forward, one backward, per-example norms, one weighted contraction.

Every layer's weights are detached while it runs, so autograd computes output gradients only; the layer's rule turns its input
and its output's gradient into a *use* of each parameter. When backward is done the uses know every example's norm, and one
weighted contraction gives the clipped sum. Ordinary weight gradients are never computed. (Bu et al., *Differentially Private
Optimization on Large Model at Small Cost*, 2023.)

A parameter that is also used outside its layer's forward is not detached there, so it gets a ``p.grad``, and
``step()`` refuses.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.layers.dp_rnn import DPRNNBase
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.optim.metric import Factors
from dpivon.privacy.clipping import Clipping, struck_examples
from dpivon.privacy.gradients.collect import EmptyBatchInForward, EmptyBatchInHooks
from dpivon.privacy.layers.fallback import opacus_rule
from dpivon.privacy.layers.memory import Pool, settle_allocator
from dpivon.privacy.layers.registry import Rule, forward_for, rule_for, takes_bf16
from dpivon.privacy.layers.scaled import scaled
from dpivon.privacy.layers.uses import Dense, Outer, Rows, Use, merge, settled, views_of_examples
from dpivon.privacy.precision import capturing, launches_cost, wide, wide_dtype, without_autocast

Uses = Callable[[Tensor], Mapping[Tensor, Use]]
_SMALL = 4096  # elements of a parameter that is not worth kernels of its own
_TRAY = 64 * 2**20  # bytes of gradients that are put side by side on a GPU: the copy takes less than launching for each


class BookKeeper:
    """Watches the layers of a model and keeps the uses of their parameters. It is the optimizer's gradient source."""

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool,
        loss_reduction: str,
        samples: int = 1,
        augmentations: int = 1,
        scatter: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.batch_first, self.loss_reduction = batch_first, loss_reduction
        self.samples, self.augmentations = samples, augmentations
        self.rows: int | None = None  # of the batch, as the model saw it
        self._scatter = scatter  # of a sharded model: from the sum of a whole parameter to the part that is kept here
        self._uses: dict[Tensor, list[Use]] = defaultdict(list)
        self._scale: float | None = None
        self._pool = Pool()
        settle_allocator()
        self._generation = 0
        self._running = False  # inside the model's forward
        self._pass = 0  # the forward that is running, or ran last
        self._recorded: int | None = None  # the forward whose gradients arrived
        self._kept: list[tuple[Tensor, int | None]] = []  # what the uses hold, as it was
        self._arrived = False
        self._second_pass = False
        self._handles: list[Any] = []
        self._patched: list[nn.Module] = []
        self._detached: list[list[Tensor]] = []
        self._owners = {layer: dict(layer.named_parameters()) for layer in module.modules()} if scatter else {}
        module.autograd_grad_sample_hooks = self._handles  # type: ignore[assignment]  # Opacus's mark of a private model
        try:
            self._watch(module)
        except BaseException:
            self.detach_from_model()
            raise
        self._handles.append(module.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(self._end_forward, always_call=True))

    # ---- watching layers

    def _watch(self, module: nn.Module) -> None:
        if not any(p.requires_grad for p in module.parameters()):
            return
        forward, rule = forward_for(module), rule_for(module)
        if forward is not None and (rule is None or self.batch_first):  # a forward puts the batch first
            self._replace_forward(module, forward)
        elif rule is not None:
            self._hook(module, rule)
        elif has_trainable_params(module) and not isinstance(module, DPRNNBase):
            bare = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            if all(p.dim() > 1 and p.shape[0] == 1 for p in bare.values()):
                self._expand_bare(module, bare)
                for child in module.children():
                    self._watch(child)
            else:
                self._hook(module, opacus_rule(module))
        else:
            for child in module.children():
                self._watch(child)

    def _hook(self, layer: nn.Module, rule: Rule) -> None:
        in_precision = _precision_for(layer)

        def before(layer: nn.Module, args: Any) -> None:
            self._detached.append(self._detach(layer) if self._recording(layer) else [])

        def after(layer: nn.Module, args: Any, output: Any) -> Any:
            weights = self._detached.pop()
            for p in weights:
                p.requires_grad = True
            if not weights or output is None:
                return output
            if not isinstance(output, Tensor):
                raise PrivacyError(
                    f"{type(layer).__name__} returned a {type(output).__name__}: book-keeping needs one tensor. "
                    "Use grad_sample_mode='functorch', or register a rule for the layer."
                )
            if any(output is t for t in args):
                output = output.view_as(output)  # else a gradient of the input's other uses would count as this layer's
            inputs = tuple(t.detach() if isinstance(t, Tensor) else t for t in args)
            uses = in_precision(lambda g: rule(layer, self._batch_major(inputs), g))
            return self._observe(output, self._of_owner(layer, uses), inputs)

        self._handles.append(layer.register_forward_pre_hook(before))
        self._handles.append(
            layer.register_forward_hook(after, always_call=True, prepend=True)
        )  # before a hook changes z

    def _replace_forward(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        original: Any = layer.forward
        in_precision = _precision_for(layer)
        own = getattr(original, "__self__", None) is layer

        def watched(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._recording(layer):
                # Of the layer that is called: a deep copy has this function too, and weights of its own.
                return original.__func__(layer, *args, **kwargs) if own else original(*args, **kwargs)
            # Attention says itself where its batch is, and always observes with the batch first.
            saved = [t.detach() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]

            def observe(z: Tensor, uses: Uses) -> Tensor:
                return self._observe(z, self._of_owner(layer, in_precision(uses)), saved, batch_major=True)

            return forward(layer, observe, *args, **kwargs)

        layer.forward = types.MethodType(watched, layer)
        self._patched.append(layer)

    def _expand_bare(self, module: nn.Module, bare: dict[str, nn.Parameter]) -> None:
        """A bare parameter of shape [1, …] is shared along the batch: give every example its own copy, and see its gradient."""

        def before(module: nn.Module, args: Any) -> None:
            if self._recording(module) and self.rows is not None:
                for name, p in bare.items():
                    value = module._parameters[name]  # p itself, or what a functional call put in its place
                    assert value is not None
                    copies = value.detach().expand(self.rows, *p.shape[1:])
                    module.__dict__[name] = self._observe(copies, _whole(value), batch_major=True)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for name in bare:
                module.__dict__.pop(name, None)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _of_owner(self, layer: nn.Module, uses: Uses) -> Uses:
        """The uses of a sharded layer under the parameters that the optimizer holds, not the whole ones of this pass."""
        if self._scatter is None:
            return uses
        owners = self._owners[layer]

        def renamed(g: Tensor) -> Mapping[Tensor, Use]:
            names: dict[Tensor, str] = {p: name for name, p in layer.named_parameters()}
            return {owners[names[p]]: use for p, use in uses(g).items()}

        return renamed

    def _recording(self, layer: nn.Module) -> bool:
        return layer.training and torch.is_grad_enabled()

    def _detach(self, layer: nn.Module) -> list[Tensor]:
        # Of a layer without children its own are all of them, and known without a walk.
        own = layer.parameters() if layer._modules else layer._parameters.values()
        weights: list[Tensor] = []
        for p in own:
            if p is not None and p.requires_grad:
                p.requires_grad = False
                weights.append(p)
        return weights

    # ---- recording uses

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = True
        if not self._recording(module):
            return
        if self._arrived:
            self._second_pass = True
        self._pass += 1
        dim = 0 if self.batch_first else 1
        shapes = [t.shape for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > dim]
        self.rows = shapes[0][dim] if shapes else None

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running = False

    def _observe(self, z: Tensor, uses: Uses, saved: Sequence[Any] = (), *, batch_major: bool = False) -> Tensor:
        """Arrange that the gradient of z becomes uses when backward reaches it. ``saved`` must not change until then.

        A checkpoint that recomputes a forward inside backward comes here again; of the two z's only one gets a gradient.
        """
        if not z.requires_grad:
            seed = torch.zeros((), device=z.device, requires_grad=True)
            z = _Seed.apply(z, seed)  # type: ignore[no-untyped-call]
        generation, origin, seen = self._generation, self._pass, [False]
        alone = not self._running and torch._C._current_graph_task_id() == -1  # and not recomputed by a checkpoint
        kept = [(t, _version(t)) for t in saved if isinstance(t, Tensor)]

        def arrived(g: Tensor) -> None:
            if generation != self._generation or seen[0]:
                raise PrivacyError(
                    "A second backward through one forward, or one through the forward of an earlier batch: its examples would "
                    "be clipped twice. Run forward and backward once for every step()."
                )
            if alone:
                raise PrivacyError(
                    "A layer was called outside the forward of its model, where two batches in one step would go unnoticed: "
                    "call the model that was made private."
                )
            seen[0] = True
            _check_unchanged(kept)
            # Rows of two forwards are different examples: clipped as one, each could move the sum by 2C.
            self._second_pass |= self._recorded not in (None, origin)
            self._recorded = origin
            g = g if batch_major else self._batch_major((g,))[0]
            if torch.is_grad_enabled():  # with create_graph=True
                with torch.no_grad():
                    self._record(uses, g)
            else:
                self._record(uses, g)

        z.register_hook(arrived)
        return z

    def _record(self, uses: Uses, g: Tensor) -> None:
        self._arrived = True
        rows = g.shape[0]
        if self.rows is not None and rows != self.rows:
            raise PrivacyError(
                f"A layer saw {rows} rows in a batch of {self.rows}: its rows are not examples, so clipping them "
                "would not bound "
                "an example. Keep the batch as the first dimension of every layer's input."
            )
        # A mean divides every example's gradient by the rows of the batch; undone at the end, on norms and sums.
        scale = (rows if self.loss_reduction == "mean" else 1.0) / (self.samples * self.augmentations)
        if self._scale not in (None, scale):
            raise PrivacyError(
                f"Layers saw batches of different sizes in one step (scales {self._scale} and {scale}): call zero_grad() "
                "and run forward and backward on one batch."
            )
        self._scale = scale
        # Inside the caller's autocast a product of fp32 would come out in bf16, and its norm be taken in bf16.
        with self._pool, views_of_examples(self.augmentations), without_autocast(g.device.type):
            found = uses(g.detach() if g.requires_grad else g)
        for p, use in found.items():
            use = settled(use.grouped(self.augmentations)) if self.augmentations > 1 else use
            self._uses[p].append(use)
            self._kept += [(t, _version(t)) for t in vars(use).values() if isinstance(t, Tensor)]

    def _batch_major(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.batch_first:
            return tensors
        return tuple(t.transpose(0, 1) if isinstance(t, Tensor) and t.dim() > 1 else t for t in tensors)

    # ---- the gradient source

    @torch.no_grad()
    def clipped_sums(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> list[Tensor]:
        self._check(params)
        _check_unchanged(self._kept)
        recorded = [self._uses.get(p) for p in params]
        uses = [None if found is None else merge(found) for found in recorded]
        if metric is not None:
            uses = [None if use is None else scaled(use, d) for use, d in zip(uses, metric, strict=True)]
        scale = self._scale or 1.0
        self._uses.clear()
        self._kept.clear()
        self._scale = None
        # Sharded, every rank must scatter in one order, whatever its batch.
        blocks = _blocks(params, uses, joint=clipping.joint and self._scatter is None)
        del uses, recorded  # what was put side by side need not be kept twice
        norms = [None if use is None else use.squared_norm().double() for _, use in blocks]
        known = next(n for n in norms if n is not None)
        table = (
            torch.stack([torch.zeros_like(known) if n is None else n for n in norms]).clamp_(min=0.0).sqrt_() * scale
        )
        factors = clipping.factors(table)
        struck, recording = struck_examples(factors), capturing()
        weights = (factors * scale).to(_dtype_of_sums(blocks))
        sums: list[Any] = [None] * len(params)
        for (members, use), c in zip(blocks, weights.unbind(), strict=True):
            if use is None:
                found = [torch.zeros(params[i].shape, dtype=torch.float64, device=params[i].device) for i in members]
            else:
                # While recording, sums over materialised gradients pass over struck rows by themselves.
                if struck is not None and not (recording and isinstance(use, Dense)):
                    use = use.without(struck)
                found = _split(use.weighted_sum(c), [params[i].shape for i in members])
            for i, total in zip(members, found, strict=True):
                sums[i] = total if self._scatter is None else self._scatter(params[i], total)
        self._pool.take_back()
        return sums

    def _check(self, params: Sequence[Tensor]) -> None:
        if self._second_pass:
            raise PrivacyError(
                "A second forward and backward before step(): an example could be clipped twice in one release. Call "
                "step() after "
                "every backward; use dpivon.BatchMemoryManager for large batches."
            )
        if not self._uses:
            raise PrivacyError(
                "step() without per-example gradients: gradients were cleared or never computed. Run forward through "
                "the model that "
                "make_private returned, then loss.backward(), then step(), then zero_grad()."
            )
        for p in params:
            if p.grad is not None:
                raise PrivacyError(
                    f"A parameter of shape {tuple(p.shape)} was used outside its layer's forward, where it cannot be clipped. "
                    "Use it through its layer only, or choose grad_sample_mode='functorch'."
                )

    def begin_sample(self, params: Sequence[Tensor]) -> None:
        self._arrived, self._recorded = False, None

    def end_of_sample(self, params: Sequence[Tensor], samples: int) -> None:
        self._arrived, self._recorded = False, None

    def batches(self, params: Sequence[Tensor]) -> int:
        return 1

    def clear(self, params: Sequence[Tensor]) -> None:
        self._uses.clear()
        self._kept.clear()
        self._pool.take_back()
        self._scale = self._recorded = None
        self._arrived = self._second_pass = False

    def forget_passes(self) -> None:
        self._generation += 1

    def detach_from_model(self) -> None:
        if hasattr(self.module, "autograd_grad_sample_hooks"):
            del self.module.autograd_grad_sample_hooks
        for handle in self._handles:
            handle.remove()
        for layer in self._patched:
            del layer.forward


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _check_unchanged(kept: Sequence[tuple[Tensor, int | None]]) -> None:
    """Autograd would notice a saved input that was overwritten; it does not save what only detached weights need."""
    for t, version in kept:
        if _version(t) != version:
            raise PrivacyError(
                f"A layer's input of shape {tuple(t.shape)} was changed in place before its gradient was used: its per-example "
                "gradients would be wrong. Use the operation that returns a new tensor (such as inplace=False)."
            )


def _whole(p: Tensor) -> Uses:
    """The gradient of an example's own copy of p is its per-example gradient."""
    return lambda g: {p: Dense(wide(g).unsqueeze(1))}


def _precision_for(layer: nn.Module) -> Callable[[Uses], Uses]:
    """How uses are given their gradients: in fp32 or better, unless the layer's rule asks for bf16 as it comes."""
    return (lambda uses: uses) if takes_bf16(layer) else (lambda uses: lambda g: uses(wide(g)))


def _blocks(params: Sequence[Tensor], uses: Sequence[Use | None], *, joint: bool) -> list[tuple[list[int], Use | None]]:
    """Which parameters, by their place, and their use. Where one factor clips all, the many small ones are put side by side."""
    small = _beside(params, uses) if joint else []
    if len(small) < 2:
        return [([i], use) for i, use in enumerate(uses)]
    together = torch.cat([_rows(uses[i]) for i in small], 1)
    taken = set(small)
    return [(small, Dense(together)), *(([i], use) for i, use in enumerate(uses) if i not in taken)]


def _beside(params: Sequence[Tensor], uses: Sequence[Use | None]) -> list[int]:
    """Which are put side by side: small ones; where launches cost, beginning with the smallest as many as a tray holds."""
    dense = [(i, use.g) for i, use in enumerate(uses) if isinstance(use, Dense)]
    if not dense or not launches_cost(dense[0][1]):
        return [i for i, _ in dense if params[i].numel() <= _SMALL]
    room, chosen = _TRAY, []
    for i, g in sorted(dense, key=lambda place: place[1].numel()):
        room -= g.numel() * g.element_size()
        if room < 0:
            break
        chosen.append(i)
    return sorted(chosen)


def _rows(use: Any) -> Tensor:
    """Per-example gradients as rows of a matrix."""
    made: Tensor = use.materialise()
    return made if made.dim() == 2 else made.flatten(1)


def _dtype_of_sums(blocks: Sequence[tuple[list[int], Use | None]]) -> torch.dtype:
    """What the clip factors are cast to, once for all blocks: that of every sum, or else double, and each casts its own."""
    kinds = {
        wide_dtype(use.g) if isinstance(use, Dense | Outer | Rows) else torch.float64
        for _, use in blocks
        if use is not None
    }
    return kinds.pop() if len(kinds) == 1 else torch.float64


def _split(total: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The sum of parameters that were put side by side, each contiguous in its own shape."""
    parts = [total] if len(shapes) == 1 else total.split_with_sizes([shape.numel() for shape in shapes])
    return [
        part if part.shape == shape and part.is_contiguous() else part.reshape(shape).contiguous()
        for part, shape in zip(parts, shapes, strict=True)
    ]


class _Seed(torch.autograd.Function):
    """The first layer's output, made to ask for a gradient although nothing before it does. No copy."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, seed: Tensor) -> Tensor:
        if z._is_view() or z.stride().count(0):
            return z.clone()
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        return None, None


class BookKeepingModule(EmptyBatchInForward, AbstractGradSampleModule):  # type: ignore[misc]
    """Mode ``"bookkeeping"``: the model, watched."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        super().__init__(m, batch_first=keeper.batch_first, loss_reduction=keeper.loss_reduction)
        self.keeper = keeper

    def remove_hooks(self) -> None:
        self.keeper.detach_from_model()


class BookKeepingHooks(EmptyBatchInHooks):
    """Mode ``"bookkeeping"`` on a model that is not to be wrapped."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        self._module, self.batch_first, self.keeper = m, keeper.batch_first, keeper
        self.attach(m)

    def forbid_grad_accumulation(self) -> None:
        pass

    def cleanup(self) -> None:
        self.keeper.detach_from_model()


def has_rules(module: nn.Module) -> bool:
    """Whether every trainable layer has a rule of ours, so that book-keeping needs no fallback."""
    if not any(p.requires_grad for p in module.parameters()):
        return True
    if forward_for(module) is not None or rule_for(module) is not None:
        return True
    bare = [p for p in module.parameters(recurse=False) if p.requires_grad and not isinstance(module, DPRNNBase)]
    return all(p.dim() > 1 and p.shape[0] == 1 for p in bare) and all(has_rules(child) for child in module.children())
