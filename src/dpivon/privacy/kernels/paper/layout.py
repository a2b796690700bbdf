"""Where each parameter of the paper's network lies in a flat vector, and how it is turned for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A :class:`~dpivon.models.PaperCNN` as one row of P numbers: NHWC kernels [tap, in, out], linear weights [in, out]."""

    image: int = 32
    widths: tuple[int, ...] = (32, 64, 128)
    hidden: int = 128
    classes: int = 10
    groups: int = 8

    @cached_property
    def convs(self) -> list[tuple[int, int, int]]:
        """(side of the input image, channels in, channels out) of each block."""
        ins = (3, *self.widths[:-1])
        return [(self.image >> i, c, d) for i, (c, d) in enumerate(zip(ins, self.widths, strict=True))]

    @property
    def flat(self) -> int:
        return (self.image >> len(self.widths)) ** 2 * self.widths[-1]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for i, (_, c, d) in enumerate(self.convs):
            shapes |= {f"w{i}": (9, c, d), f"b{i}": (d,), f"gain{i}": (d,), f"shift{i}": (d,)}
        n = len(self.convs)
        return shapes | {
            f"w{n}": (self.flat, self.hidden),
            f"b{n}": (self.hidden,),
            f"w{n + 1}": (self.hidden, self.classes),
            f"b{n + 1}": (self.classes,),
        }

    @cached_property
    def slices(self) -> dict[str, slice]:
        out, at = {}, 0
        for name, shape in self.shapes.items():
            size = torch.Size(shape).numel()
            out[name] = slice(at, at + size)
            at += size
        return out

    @property
    def size(self) -> int:
        return list(self.slices.values())[-1].stop

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters of K models as views of [K, P]."""
        return {name: rows[:, s].unflatten(1, self.shapes[name]) for name, s in self.slices.items()}

    def pack(self, model: Any) -> Tensor:
        """A model's parameters as one row."""
        parts: list[Tensor] = []
        for block in model.features:
            conv, norm = block.conv, block.norm
            parts += [conv.weight.permute(2, 3, 1, 0), conv.bias, norm.weight, norm.bias]
        first, last = model.head.hidden, model.head.logits
        side = self.image >> len(self.widths)
        # The network flattens channels first, the kernels channels last.
        turned = first.weight.view(-1, self.widths[-1], side, side).permute(2, 3, 1, 0)
        parts += [turned, first.bias, last.weight.T, last.bias]
        return torch.cat([p.detach().reshape(-1) for p in parts])

    def unpack(self, row: Tensor, model: Any) -> Any:
        """Write one row into a model."""
        v = {name: t[0] for name, t in self.views(row.unsqueeze(0)).items()}
        side = self.image >> len(self.widths)
        with torch.no_grad():
            for i, block in enumerate(model.features):
                conv, norm = block.conv, block.norm
                conv.weight.copy_(v[f"w{i}"].reshape(3, 3, *v[f"w{i}"].shape[1:]).permute(3, 2, 0, 1))
                conv.bias.copy_(v[f"b{i}"])
                norm.weight.copy_(v[f"gain{i}"])
                norm.bias.copy_(v[f"shift{i}"])
            n = len(self.convs)
            first, last = model.head.hidden, model.head.logits
            turned = v[f"w{n}"].reshape(side, side, self.widths[-1], self.hidden)
            first.weight.copy_(turned.permute(3, 2, 0, 1).reshape(self.hidden, -1))
            first.bias.copy_(v[f"b{n}"])
            last.weight.copy_(v[f"w{n + 1}"].T)
            last.bias.copy_(v[f"b{n + 1}"])
        return model
