"""How many examples a program that is captured whole may take at once.

A captured step cannot try and halve when memory is short, so it must know before. What a forward pass makes is counted on one
example of zeros; the rest is a generous factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.privacy.layers.uses import MEMORY_CAP, MEMORY_CAP_CUDA

CPU_MEMORY = 2 * 2**30
#: Tensors of an activation's size that live at once: the output itself, a wider copy, its gradient, and one on the way.
COPIES = 4
#: Below so many examples a pass is too small to fill a GPU, and large gradients are better left unmade.
WORTH_IT = 256


@dataclass
class Footprint:
    """Elements that one view of an example makes in a pass, and the largest weight with several positions."""

    activations: int = 0
    unfolded: int = 0
    largest: int = 0


def examples_at_once(model: nn.Module, inputs: Tensor, views: int) -> int:
    """As many as fit into a quarter of the device's memory; and where that is still plenty, so few that every layer's
    per-example gradients are kept: norms and sums then come from one product in place of four."""
    counted = footprint(model, inputs, views)
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    each = 4 * (views * (COPIES * counted.activations + counted.unfolded) + 2 * weights)
    fit = _memory(inputs.device) // each
    kept = (MEMORY_CAP_CUDA if inputs.is_cuda else MEMORY_CAP) // (4 * max(1, counted.largest))
    return int(max(1, min(fit, kept) if kept >= WORTH_IT else fit))


def footprint(model: nn.Module, inputs: Tensor, views: int = 1) -> Footprint:
    """Counted at the model's layers, on one example of zeros of the inputs' shape."""
    found = Footprint()

    def count(layer: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        found.activations += output.numel()
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            positions = output.numel() // weight.shape[0]
            found.unfolded += positions * weight[0].numel()
            if views * positions > 1:
                found.largest = max(found.largest, weight.numel())

    handles = [layer.register_forward_hook(count) for layer in model.modules() if not any(layer.children())]
    device = inputs.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            model(inputs.new_zeros(1, *inputs.shape[1:]))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_MEMORY
    return int(torch.cuda.get_device_properties(device).total_memory) // 4
