"""Which network: chosen by the public shape of an example, and rebuilt from the published ``model.json``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from dpivon.errors import bad
from dpivon.models import MLP, PaperCNN, SmallCNN, WideResNet
from dpivon.train.columns import Strict

Kind = Literal["mlp", "small-cnn", "paper-cnn", "wrn-16-4"]
KINDS: tuple[str, ...] = ("auto", "mlp", "small-cnn", "paper-cnn", "wrn-16-4")
Width = Annotated[int, Field(ge=1, le=65536)]

SMALL, PAPER = 16, 48  # sides of an image: below the first the small CNN, up to the second the paper's, then the WRN


class Network(Strict):
    """A network as plain numbers: nothing in it can be code."""

    kind: Kind
    shape: Annotated[tuple[Width, ...], Field(min_length=1, max_length=3)]
    classes: Annotated[int, Field(ge=2, le=65536)]
    hidden: tuple[Width, ...] = (64,)

    def build(self) -> nn.Module:
        make: dict[str, Callable[[], nn.Module]] = {
            "mlp": lambda: MLP(math.prod(self.shape), self.classes, self.hidden),
            "small-cnn": lambda: SmallCNN(self.shape[0], self.classes, image_size=self.shape[-1]),
            "paper-cnn": lambda: PaperCNN(self.shape[0], self.classes, image_size=self.shape[-1]),
            "wrn-16-4": lambda: WideResNet(16, 4, self.classes, self.shape[0]),
        }
        return make[self.kind]()

    def told(self) -> str:
        if self.kind != "mlp":
            return self.kind
        return (
            f"mlp with hidden layers of {', '.join(map(str, self.hidden))}"
            if self.hidden
            else "mlp without hidden layers"
        )


def choose(wanted: str, shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> Network:
    """``wanted``, or for ``auto`` an MLP for flat rows and a CNN by the side of a square image."""
    square = len(shape) == 3 and shape[1] == shape[2]
    kind = wanted
    if wanted == "auto":
        side = shape[-1]
        by_side = "small-cnn" if side < SMALL else "paper-cnn" if side <= PAPER else "wrn-16-4"
        kind = by_side if square and side >= 4 else "mlp"
    if kind != "mlp" and (not square or shape[-1] < (8 if kind == "paper-cnn" else 4)):
        fix = "Use mlp, or square images of at least 8 × 8"
        raise bad("network", wanted, f"cannot take an example of shape {' × '.join(map(str, shape))}", fix)
    return Network.model_validate({"kind": kind, "shape": shape, "classes": classes, "hidden": hidden})
