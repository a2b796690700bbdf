"""Which network: chosen by the public shape of an example, and rebuilt from the published ``model.json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field
from torch import nn

from dpivon.errors import bad
from dpivon.models import network
from dpivon.sources.columns import Strict

Kind = Literal["mlp", "table", "ordinal", "small", "paper", "compact", "wrn-16-4"]
KINDS: tuple[str, ...] = ("auto", *get_args(Kind))
_BEFORE_0_2 = {"small-cnn": "small", "paper-cnn": "paper"}  # names in files of earlier versions
Width = Annotated[int, Field(ge=1, le=65536)]

FLAT = ("mlp", "table", "ordinal")  # networks of flat rows, with hidden layers to choose
SMALL, PAPER = 16, 48  # sides of an image: below the first the small CNN, up to the second the paper's, then the WRN


def current_name(name: Any) -> Any:
    """The name that a network has now."""
    return _BEFORE_0_2.get(name, name) if isinstance(name, str) else name


class Network(Strict):
    """A network as plain numbers: nothing in it can be code."""

    kind: Annotated[Kind, BeforeValidator(current_name)]
    shape: Annotated[tuple[Width, ...], Field(min_length=1, max_length=3)]
    classes: Annotated[int, Field(ge=1, le=65536)]  # outputs
    hidden: tuple[Width, ...] = (64,)

    def build(self) -> nn.Module:
        own: dict[str, Any] = {"hidden": self.hidden} if self.kind in FLAT else {}
        return network(self.kind, shape=self.shape, classes=self.classes, **own)

    def describe(self) -> str:
        if self.kind not in FLAT:
            return self.kind
        return (
            f"{self.kind} with hidden layers of {', '.join(map(str, self.hidden))}"
            if self.hidden
            else f"{self.kind} without hidden layers"
        )


def choose(wanted: str, shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> Network:
    """``wanted``, or for ``auto`` an MLP for flat rows and a CNN by the side of a square image."""
    square = len(shape) == 3 and shape[1] == shape[2]
    kind = wanted
    if wanted == "auto":
        side = shape[-1]
        by_side = "small" if side < SMALL else "paper" if side <= PAPER else "wrn-16-4"
        kind = by_side if square and side >= 4 else "mlp"
    if kind not in FLAT and (not square or shape[-1] < (8 if kind == "paper" else 4)):
        fix = "Use mlp, or square images of at least 8 × 8"
        raise bad("network", wanted, f"cannot take an example of shape {' × '.join(map(str, shape))}", fix)
    return Network.model_validate({"kind": kind, "shape": shape, "classes": classes, "hidden": hidden})
