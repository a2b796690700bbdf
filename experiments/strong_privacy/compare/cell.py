"""Where methods meet: a cell is all that they were given alike, and a contender is one of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dpivon.methods import METHODS
from dpivon.study.plan.plan import shown
from dpivon.study.results.table import Row

#: Columns, in the order of Setting's fields.
SETTING = ("dataset", "network", "epochs", "train_size", "delta", "batch_size", "max_grad_norm", "augment")


@dataclass(frozen=True, order=True)
class Setting:
    """All but the noise: cells of one setting are points of one curve over ε."""

    dataset: str
    network: str
    epochs: int
    train_size: int
    delta: float
    batch_size: int
    max_grad_norm: float
    augment: str = ""  # as in a table; who sees other views of the images learns from other data

    @property
    def label(self) -> str:
        words = f"{self.dataset}, {self.network} network, b = {self.batch_size}, C = {self.max_grad_norm:g}"
        views = [f"{k} = {v}" for k, v in json.loads(self.augment).items()] if self.augment else []
        return ", ".join([words, f"{self.epochs} epochs", *views])


@dataclass(frozen=True, order=True)
class Cell:
    """A setting and its noise: the same model, data and budget for everyone."""

    setting: Setting
    noise_multiplier: float

    @property
    def label(self) -> str:
        return f"{self.setting.label}, σ = {self.noise_multiplier:g}"


def cell_of(row: Row) -> Cell:
    known = {"augment": "", **row}  # tables from before there were views have no such column
    return Cell(Setting(*(known[name] for name in SETTING)), row["noise_multiplier"])


@dataclass(frozen=True, order=True)
class Contender:
    """A method at the rate that was chosen for it, or (``default``) at the one it is shipped with; ``variant`` are options
    that set it apart from the method's main entry in the same cell."""

    method: str
    default: bool = False
    variant: str = ""

    @property
    def title(self) -> str:
        name = METHODS[self.method].title if self.method in METHODS else self.method
        changes = [f"{k} = {shown(v)}" for k, v in json.loads(self.variant).items()] if self.variant else []
        return ", ".join([name, *changes, *(["default rate"] if self.default else [])])
