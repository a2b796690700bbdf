"""Per-layer rules for book-keeping gradients. Importing this package registers them."""

from dpivon.privacy.layers import attention, conv, linear, norm, variational
from dpivon.privacy.layers.registry import register_forward, register_rule
from dpivon.privacy.layers.uses import Dense, Outer, Rows, Use

__all__ = [
    "Dense",
    "Outer",
    "Rows",
    "Use",
    "attention",
    "conv",
    "linear",
    "norm",
    "register_forward",
    "register_rule",
    "variational",
]
