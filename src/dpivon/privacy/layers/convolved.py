"""Uses whose norms and sums come from GPU kernels: weights of convolutions and linear layers, and their biases.

The kernels read a layer's input and its output's gradient as they lie; nothing is unfolded or materialised. A linear layer
over several positions is a convolution of one tap. Formulas: :mod:`dpivon.privacy.kernels.convs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from dpivon.models.standardised import directions, pull_back
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry, position_sums
from dpivon.privacy.layers.bounded import Bounded, bounds_pay
from dpivon.privacy.layers.made import mapped
from dpivon.privacy.layers.unsummed import Unsummed, left_unsummed
from dpivon.privacy.layers.uses import Dense, Use, materialises, outer_or_dense
from dpivon.privacy.precision import capturing, wide_dtype

_ROUNDING = 1e-5  # of S: more than its own rounding and that of q² can be, so that a norm is never too small
_SHORT = 1.01 * 2.0**-9  # of a direction's length: what rounding it to bf16 changes, at most
_LEAST = 1 / 16  # of S: a smaller rest is rounded off in the sum, so such an example is clipped as if it had this much
_ONE_TAP = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
_FEW = 256  # positions up to which making a gradient a second time is faster than to write it and read it twice


def kernels_take(x: Tensor, g: Tensor) -> bool:
    """Whether the kernels are there, wanted, and made for tensors like these."""
    return (
        conv_ops.enabled
        and g.dtype in (torch.bfloat16, torch.float32)
        and conv_ops.device_takes(g.device)
        and conv_ops.shapes_fit(x, g)
    )


def convolved(layer: _ConvNd, x: Tensor, g: Tensor, unfolded: Callable[[], Use]) -> Use:
    """The use of a 2-D convolution's weight, by kernels where there are any; ``unfolded`` makes the ordinary one."""
    if layer.groups != 1 or layer.padding_mode != "zeros" or not kernels_take(x, g):
        return unfolded()
    left, _, top, _ = layer._reversed_padding_repeated_twice
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    geometry = Geometry((kh, kw), (sh, sw), (top, left), (dh, dw))
    # One rounding of both operands, before norms and sums; no copy of what is channels last already.
    x, g = (t.to(g.dtype).contiguous(memory_format=torch.channels_last) for t in (x, g))
    return Convolved(x, g, geometry, layer.weight.shape, unfolded)


def projected(a: Tensor, g: Tensor, shape: torch.Size, transposed: bool = False) -> Use:
    """The use of a linear layer's weight, of which g_i = Σ_t G_it ⊗ A_it; by kernels where there are any.

    Args:
        a: the layer's input, [B, T, d].
        g: its output's gradient, [B, T, p].
        shape: of the weight: [p, d], or [d, p] if ``transposed``.
        transposed: whether the weight is stored the other way round.
    """
    if _in_eager_bf16(g) or not conv_ops.enabled or not conv_ops.device_takes(g.device):
        return outer_or_dense(a, g, shape, transposed)
    left, right = (g, a) if transposed else (a, g)
    x, out = left.mT.unsqueeze(3), right.mT.unsqueeze(3)  # images of one column, channels last
    if not kernels_take(x, out) or not _worth(a, g):
        return outer_or_dense(a, g, shape, transposed)
    kind = ByGrams if bounds_pay(a, g) else Convolved
    return kind(x, out, _ONE_TAP, shape, lambda: outer_or_dense(a, g, shape, transposed))


def _in_eager_bf16(g: Tensor) -> bool:
    """Where launching the kernels takes longer than they save: torch's own products know bf16."""
    return g.dtype == torch.bfloat16 and not capturing()


def _worth(a: Tensor, g: Tensor) -> bool:
    """Whether reading A and G once more, and multiplying them again, costs less than gradients in memory."""
    _, t, d = a.shape
    p = g.shape[2]
    return not materialises(g, d, p) or (t <= _FEW and g.element_size() * t * (p + d) < 3 * 4 * p * d)


@dataclass(frozen=True)
class Convolved:
    """g_i = Σ_t G_it ⊗ patch_it, of x [B · rows, in, H, W] and g [B · rows, out, H', W'].

    It is pulled back if ``weight`` is there, a copy of the weights that were standardised. Dropped examples contribute zero,
    whatever they hold.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry
    shape: torch.Size
    ordinary: Callable[[], Use]
    weight: Tensor | None = None
    rows: int = 1
    dropped: Tensor | None = None

    @cached_property
    def _statistics(self) -> Tensor:
        unit = None
        if self.weight is not None:
            by_row = directions(self.weight.double())[0].to(self.g.dtype).view(self.shape)
            unit = by_row.permute(2, 3, 1, 0).reshape(-1, self.shape[0])
        found: Tensor = torch.ops.dpivon.conv_statistics(self.x, self.g, unit, self.geometry.flat(), self.rows)
        return found

    def squared_norm(self) -> Tensor:
        found = self._statistics.double()
        if self.weight is None:
            return found.sum((1, 2))
        spread, along = found[:, 1], found[:, 2]
        if self.g.dtype == torch.bfloat16:  # so are the directions: along the exact ones there is at least the rest
            along = (along.abs() - _SHORT * spread.sqrt()).clamp(min=0.0)
        rest = torch.maximum(spread * (1 + _ROUNDING) - along.square(), spread * _LEAST)  # NaN stays NaN
        return (rest * directions(self.weight.double())[1].square().T).sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        c = c if self.dropped is None else c.masked_fill(self.dropped, 0.0)
        found = None if self.weight is None else self._statistics
        chunks = torch.ops.dpivon.conv_sums(self.x, self.g, c.float(), found, self.geometry.flat(), self.rows)
        (kh, kw), into, out = self.geometry.kernel, self.x.shape[1], self.g.shape[1]
        total = _added_up(chunks).view(kh, kw, into, out).permute(3, 2, 0, 1).reshape(self.shape)
        return total if self.weight is None else pull_back(self.weight, total)

    def materialise(self) -> Tensor:
        return self.unfolded().materialise()

    def unfolded(self) -> Use:
        """The ordinary use, for what the kernels cannot do."""
        plain = self.ordinary()
        plain = plain.grouped(self.rows) if self.rows > 1 else plain
        plain = plain if self.weight is None else pulled_back(plain, self.weight)
        return plain if self.dropped is None else plain.without(self.dropped)

    def without(self, dropped: Tensor) -> Convolved:
        without = replace(self, dropped=dropped if self.dropped is None else dropped | self.dropped)
        if "_statistics" in vars(self):  # they are the same, and cost as much as the sum
            vars(without)["_statistics"] = self._statistics
        return without

    def grouped(self, rows: int) -> Convolved:
        return replace(self, rows=self.rows * rows)


class ByGrams(Convolved):
    """Of a large linear layer in bf16: its norms are bounded from Gram matrices, which takes less than to make its gradients.

    The kernels add up an example's gradient in fp32 before they weight it. That loses what the bound allows for
    (:mod:`dpivon.privacy.layers.bounded`).
    """

    def squared_norm(self) -> Tensor:
        return self.measured([self])[0]

    @staticmethod
    def measured(uses: Sequence[ByGrams]) -> list[Tensor]:
        """The squared norms of several, by one operator."""
        each = [use.of_examples() for use in uses]
        found: Tensor = torch.ops.dpivon.gram_bounds([x for x, _ in each], [g for _, g in each])
        return list(found.unbind())

    def of_examples(self) -> tuple[Tensor, Tensor]:
        """x and g with all rows of an example in one."""
        if self.rows == 1:
            return self.x, self.g
        x, g = (t.unflatten(0, (-1, self.rows)).transpose(1, 2).flatten(2, 3) for t in (self.x, self.g))
        return x, g


def pulled_back(plain: Use, weight: Tensor) -> Use:
    """The use of ``weight`` of which ``plain`` is a use of the standardised weights.

    ``weight`` is a copy: by the time of the sum the layer's may be another sample of the posterior.
    """
    if isinstance(plain, Convolved):
        return replace(plain, weight=weight)
    return mapped(plain, partial(pull_back, weight), 3)  # the gradient, the other one, and one more on the way


def _added_up(chunks: Tensor) -> Tensor:
    """Σ of the chunks in double. A compiler makes too few programs of so few numbers: recorded, they are ours to add."""
    if not capturing():
        return chunks.sum(0, dtype=torch.float64)
    total: Tensor = position_sums([chunks.flatten(1).unsqueeze(0)], True)
    return total


def summed(g: Tensor, weight: Use | None) -> Use:
    """The use of a bias over several positions, g_i = Σ_t G_it, of g [B, T, p].

    Where kernels take the norms and sums of the layer's ``weight``, G is kept until backward is over. There the biases wait
    too, and a recorded program adds them all up by one operator (:mod:`dpivon.privacy.kernels.conv_ops`). A weight in bf16 may
    keep G too.
    """
    if type(weight) is Bounded and left_unsummed(g):
        return Unsummed(g)
    return Summed(g) if isinstance(weight, Convolved) and waits(g) else Dense(g.sum(1, dtype=wide_dtype(g)))


def waits(g: Tensor) -> bool:
    """Whether sums over positions are taken when backward is over, by an operator of a recorded program."""
    return capturing() and conv_ops.enabled and conv_ops.device_takes(g.device)


@dataclass(frozen=True)
class Summed:
    """Gradients that are not added up yet, or only ``partly``. ``g`` is [B, T, p]."""

    g: Tensor
    partly: bool = False

    @cached_property
    def _made(self) -> Dense:
        return one_matrix([self])

    def squared_norm(self) -> Tensor:
        return self._made.squared_norm()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self._made.weighted_sum(c)

    def materialise(self) -> Tensor:
        return self._made.materialise()

    def unfolded(self) -> Dense:
        return self._made

    def without(self, dropped: Tensor) -> Dense:
        return self._made.without(dropped)

    def grouped(self, rows: int) -> Summed:
        return replace(self, g=self.g.unflatten(0, (-1, rows)).flatten(1, 2))


def one_matrix(biases: Sequence[Summed]) -> Dense:
    """All of them side by side."""
    return Dense(position_sums([bias.g for bias in biases], False))
