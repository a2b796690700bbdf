"""``nn.MultiheadAttention``, whose projections are no layers that could be watched: its forward, spelled out.

q, k and v are linear in the packed ``in_proj_weight``; the output projection is an ordinary linear layer. The rest has no
parameters. Used for training only; in evaluation the layer's own forward runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.privacy.layers.convolved import projected, summed
from dpivon.privacy.layers.linear import linear
from dpivon.privacy.layers.registry import Observe, register_forward
from dpivon.privacy.layers.uses import Outer, Use
from dpivon.privacy.precision import as_multiplied


@register_forward(nn.MultiheadAttention, bf16=True)
def attention(
    layer: nn.MultiheadAttention,
    observe: Observe,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if layer.bias_k is not None or layer.add_zero_attn or not layer._qkv_same_embed_dim or query.dim() != 3:
        fix = "Use batched queries, without add_bias_kv, add_zero_attn, kdim or vdim"
        raise bad("nn.MultiheadAttention", "this form", "has no per-example rule", fix)
    if not layer.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    (b, t, e), s, heads = query.shape, key.shape[1], layer.num_heads
    _check_masks(attn_mask, key_padding_mask, (b, heads, t, s), is_causal=is_causal)
    q, k, v = _project(layer, observe, query, key, value)
    q, k, v = (x.reshape(b, -1, heads, e // heads).transpose(1, 2) for x in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, (b, heads, t, s), q)
    weights: Tensor | None = None
    if need_weights or (layer.dropout and layer.training):
        scores = q @ k.mT / math.sqrt(e // heads)
        weights = F.dropout(
            torch.softmax(scores if mask is None else scores + mask, dim=-1), layer.dropout, layer.training
        )
        heard = weights @ v
    else:  # as the layer itself: one kernel, and no weights in memory
        heard = F.scaled_dot_product_attention(q, k, v, mask)
    mixed = heard.transpose(1, 2).reshape(b, t, e)
    mixed, projection = as_multiplied(mixed), layer.out_proj
    out = F.linear(mixed, projection.weight.detach(), None if projection.bias is None else projection.bias.detach())
    out = observe(out, lambda g: linear(projection, (mixed.detach(),), g))
    if not layer.batch_first:
        out = out.transpose(0, 1)
    if not need_weights or weights is None:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


def _project(
    layer: nn.MultiheadAttention, observe: Observe, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = layer.in_proj_weight.detach(), layer.in_proj_bias
    free_bias = None if bias is None else bias.detach()
    e = layer.embed_dim
    if query is key and key is value:
        query = as_multiplied(query)
        packed = observe(F.linear(query, weight, free_bias), lambda g: _uses(layer, query.detach(), g, projected))
        q, k, v = packed.chunk(3, dim=-1)
        return q, k, v
    outs = []
    for i, x in enumerate((query, key, value)):
        part = slice(i * e, (i + 1) * e)
        z = F.linear(x, weight[part], None if free_bias is None else free_bias[part])

        def uses(g: Tensor, x: Tensor = x, i: int = i) -> Mapping[Tensor, Use]:
            # A third of the packed gradient: left unmade, because the three are added up.
            return _uses(layer, x.detach(), F.pad(g, (i * e, (2 - i) * e)), Outer)

        outs.append(observe(z, uses))
    return outs[0], outs[1], outs[2]


def _uses(
    layer: nn.MultiheadAttention, x: Tensor, g: Tensor, use: Callable[[Tensor, Tensor, torch.Size], Use]
) -> Mapping[Tensor, Use]:
    uses: dict[Tensor, Use] = {}
    if layer.in_proj_weight.requires_grad:
        uses[layer.in_proj_weight] = use(x.to(g.dtype), g, layer.in_proj_weight.shape)
    if layer.in_proj_bias is not None and layer.in_proj_bias.requires_grad:
        uses[layer.in_proj_bias] = summed(g, uses.get(layer.in_proj_weight))
    return uses


def _check_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, int, int, int], *, is_causal: bool
) -> None:
    """As strict as the layer. A mask of another shape that happens to fit would hide one example's keys from the others."""
    b, heads, t, s = shape
    if is_causal and attn_mask is None:
        fix = "Give the causal mask as attn_mask"
        raise bad("is_causal", is_causal, "is a hint about attn_mask, and there is none: nothing would be hidden", fix)
    known = (("attn_mask", attn_mask, ((t, s), (b * heads, t, s))), ("key_padding_mask", key_padding_mask, ((b, s),)))
    for name, mask, shapes in known:
        if mask is None:
            continue
        if tuple(mask.shape) not in shapes:
            raise bad(
                name, tuple(mask.shape), "is no shape that this layer takes", f"Use {' or '.join(map(str, shapes))}"
            )
        if mask.dtype != torch.bool and not mask.is_floating_point():
            fix = "Use booleans, True for what is hidden, or what is to be added to the scores"
            raise bad(name, mask.dtype, "is neither boolean nor floating point", fix)


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    like: Tensor,
) -> Tensor | None:
    """Both masks as one summand of the scores."""
    b, heads, t, s = shape
    total: Tensor | None = None
    if attn_mask is not None:
        total = (
            _additive(attn_mask, like).reshape(b, heads, t, s) if attn_mask.dim() == 3 else _additive(attn_mask, like)
        )
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, like).reshape(b, 1, 1, s)
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
