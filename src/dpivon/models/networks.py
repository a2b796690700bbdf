"""The networks that studies, ``dpivon train`` and stacks know by name, and those of a user's own by import path."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from dpivon.errors import bad
from dpivon.import_paths import called, imported, is_import_path
from dpivon.models.cnn import MLP, CompactCNN, OrdinalMLP, PaperCNN, SmallCNN, TableMLP
from dpivon.models.transformer import TextEncoder, VisionTransformer
from dpivon.models.wrn import WideResNet

Shape = Sequence[int]


def _flat(kind: Callable[..., nn.Module], shape: Shape, classes: int, **arguments: Any) -> nn.Module:
    return kind(math.prod(shape), classes, **arguments)


def _text(shape: Shape, classes: int, **arguments: Any) -> nn.Module:
    return TextEncoder(length=shape[0], classes=classes, **arguments)


def _images(kind: Callable[..., nn.Module], shape: Shape, classes: int, *, sized: bool = True, **arguments: Any) -> Any:
    if len(shape) != 3 or shape[1] != shape[2]:
        problem = f"takes square images, not examples of shape {' × '.join(map(str, shape))}"
        raise bad("network", kind.__name__, problem, "Use mlp, or images of shape [channels, side, side]")
    side = {"image_size": shape[-1]} if sized else {}
    return kind(in_channels=shape[0], classes=classes, **side, **arguments)


#: Built-in networks by name: factories of the shape of one example, the number of classes, and the network's own arguments.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": partial(_flat, MLP),
    "table": partial(_flat, TableMLP),
    "ordinal": partial(_flat, OrdinalMLP),
    "small": partial(_images, SmallCNN),
    "paper": partial(_images, PaperCNN),
    "compact": partial(_images, CompactCNN, sized=False),
    "wrn-16-4": partial(_images, WideResNet, sized=False),
    "vit": partial(_images, VisionTransformer),
    "text": _text,
}
_FIX = f"Use one of {', '.join(NETWORKS)}, or package.module:factory of a function that returns a torch.nn.Module"


def check_network(name: str) -> str:
    """``name`` if it is a built-in network or has the form of an import path; nothing is imported."""
    if name not in NETWORKS and not (isinstance(name, str) and is_import_path(name)):
        raise bad("network", name, "is not a known network", _FIX)
    return name


def network(name: str, *, shape: Shape | None = None, classes: int | None = None, **arguments: Any) -> nn.Module:
    """A new network by its built-in name, or by the import path ``package.module:factory``.

    >>> network("small", shape=(1, 8, 8), classes=10)
    >>> network("torchvision.models:resnet18", num_classes=10)

    Args:
        name: a key of :data:`NETWORKS`, or an import path. Importing runs the module's code: never take the path from a file
            that you would not run.
        shape: of one example, such as (channels, height, width); a factory of your own gets it if it has a parameter ``shape``.
        classes: how many logits come out; passed on likewise.
        **arguments: the factory's own.
    """
    check_network(name)
    factory = NETWORKS[name] if name in NETWORKS else imported("network", name, _FIX)
    taken = inspect.signature(factory).parameters if callable(factory) else {}
    public = {"shape": shape, "classes": classes}
    arguments |= {key: value for key, value in public.items() if key in taken and value is not None}
    made = called("network", name, factory, _FIX, arguments)
    if not isinstance(made, nn.Module):
        raise bad("network", name, f"returned a {type(made).__name__}", _FIX)
    return made
