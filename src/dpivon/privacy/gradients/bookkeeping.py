"""Clipped sums by book-keeping: one forward, one backward, per-example norms, one weighted contraction.

Every layer's weights are detached while it runs, so autograd computes output gradients only; the layer's rule turns its input
and its output's gradient into a *use* of each parameter. When backward is done the uses know every example's norm, and one
weighted contraction gives the clipped sum. Ordinary weight gradients are never computed. (Bu et al., *Differentially Private
Optimization on Large Model at Small Cost*, 2023.)

A parameter that is also used outside its layer's forward is not detached there, so it gets a ``p.grad``, and
``step()`` refuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError
from dpivon.optim.metric import Factors
from dpivon.privacy.clipping import Clipping, struck_examples
from dpivon.privacy.gradients.saved import check_unchanged, stored, version_of
from dpivon.privacy.gradients.side_by_side import dtype_of_sums, in_blocks, neighbours, split
from dpivon.privacy.gradients.watching import LayerWatch, Uses, has_rules
from dpivon.privacy.layers.memory import Pool, settle_allocator
from dpivon.privacy.layers.scaled import scaled
from dpivon.privacy.layers.uses import Dense, Use, merge, settled, views_of_examples
from dpivon.privacy.precision import capturing, without_autocast

__all__ = ["BookKeeper", "has_rules"]


class BookKeeper(LayerWatch):
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
        super().__init__(module, batch_first=batch_first, scatter=scatter)
        self.loss_reduction = loss_reduction
        self.samples, self.augmentations = samples, augmentations
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
        self._attach_to_model()
        self._handles.append(module.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(self._end_forward, always_call=True))

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
        first = not z.requires_grad  # no product of the backward pass will read its gradient
        if first:
            seed = torch.zeros((), device=z.device, requires_grad=True)
            z = _Seed.apply(z, seed)  # type: ignore[no-untyped-call]
        generation, origin, seen = self._generation, self._pass, [False]
        alone = not self._running and torch._C._current_graph_task_id() == -1  # and not recomputed by a checkpoint
        kept = [(t, version_of(t)) for t in saved if isinstance(t, Tensor)]

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
            check_unchanged(kept)
            # Rows of two forwards are different examples: clipped as one, each could move the sum by 2C.
            self._second_pass |= self._recorded not in (None, origin)
            self._recorded = origin
            g = g if batch_major else self._batch_major((g,))[0]
            if first and capturing() and g.dtype == torch.bfloat16:
                g = stored(g)
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
            self._kept += [(t, version_of(t)) for t in vars(use).values() if isinstance(t, Tensor)]

    # ---- the gradient source

    @torch.no_grad()
    def clipped_sums(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> list[Tensor]:
        sums: list[Any] = [None] * len(params)
        for members, total in self._sums_of_blocks(params, clipping, metric):
            for i, part in zip(members, split(total, [params[i].shape for i in members]), strict=True):
                sums[i] = part if self._scatter is None else self._scatter(params[i], part)
        return sums

    @torch.no_grad()
    def clipped_row(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None = None
    ) -> Tensor:
        """The same sums one after the other, as a program wants them. What lies side by side in a block and in the row
        is moved there together: a compiler launches a copy for each part of a row."""
        pieces: dict[int, Tensor] = {}
        for members, total in self._sums_of_blocks(params, clipping, metric):
            runs = neighbours(members)
            sizes = [sum(params[i].numel() for i in run) for run in runs]
            pieces |= {run[0]: part for run, part in zip(runs, total.flatten().split(sizes), strict=True)}
        return torch.cat([pieces[first] for first in sorted(pieces)])

    def _sums_of_blocks(
        self, params: Sequence[Tensor], clipping: Clipping, metric: Sequence[Factors] | None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Which parameters are summed as one, by their place, and their sum: of several, one after the other."""
        self._check(params)
        check_unchanged(self._kept)
        recorded = [self._uses.get(p) for p in params]
        uses = [None if found is None else merge(found) for found in recorded]
        if metric is not None:
            uses = [None if use is None else scaled(use, d) for use, d in zip(uses, metric, strict=True)]
        scale = self._scale or 1.0
        self._uses.clear()
        self._kept.clear()
        self._scale = None
        # Sharded, every rank must scatter in one order, whatever its batch.
        blocks = in_blocks(params, uses, joint=clipping.joint and self._scatter is None)
        del uses, recorded  # what was put side by side need not be kept twice
        norms = [None if use is None else use.squared_norm().double() for _, use in blocks]
        known = next(n for n in norms if n is not None)
        table = (
            torch.stack([torch.zeros_like(known) if n is None else n for n in norms]).clamp_(min=0.0).sqrt_() * scale
        )
        factors = clipping.factors(table)
        struck, recording = struck_examples(factors), capturing()
        weights = (factors * scale).to(dtype_of_sums(blocks))
        for (members, use), c in zip(blocks, weights.unbind(), strict=True):
            if use is None:
                (i,) = members
                yield members, torch.zeros(params[i].shape, dtype=torch.float64, device=params[i].device)
                continue
            # While recording, sums over materialised gradients pass over struck rows by themselves.
            if struck is not None and not (recording and isinstance(use, Dense)):
                use = use.without(struck)
            yield members, use.weighted_sum(c)
        self._pool.take_back()

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
