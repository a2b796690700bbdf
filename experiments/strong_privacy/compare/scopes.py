"""Which cells a bar is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.strong_privacy.compare.cell import Cell
from experiments.strong_privacy.compare.field import Field

TARGETS = (1.0, 3.0, 7.5)
NEAR = 0.03  # an ε within so much of a target is that target
BATCHES, SIGMAS, NORMS = (128, 256, 512), (0.1, 1.0, 5.0, 10.0, 15.0), (10.0, 20.0)  # the paper's


@dataclass(frozen=True)
class Scope:
    """Cells that are judged together; a scope without any is one that was not measured."""

    name: str  # in file names
    title: str
    cells: tuple[Cell, ...]

    @property
    def heading(self) -> str:
        return self.title[0].upper() + self.title[1:]


def scopes(field: Field) -> list[Scope]:
    """The four that have bars of their own, measured or not, and one for every data set that is in none of them.

    Where none of the four is touched the comparison is about something else, and they are left out."""
    groups: dict[str, list[Cell]] = {name: [] for name in TITLES}
    for cell in field.cells:
        groups.setdefault(_name(field, cell), []).append(cell)
    if not any(groups[name] for name in TITLES):
        groups = {name: cells for name, cells in groups.items() if cells}
    return [Scope(name, TITLES.get(name, name), tuple(cells)) for name, cells in groups.items()]


TITLES = {
    "epsilon": "CIFAR-10 at ε = 1, 3 and 7.5",
    "paper": "the paper's grid on CIFAR-10, C = 10 and 20",
    "paper-c1": "the paper's σ and b on CIFAR-10 at another C",
    "fashion-mnist": "Fashion-MNIST, the defaults unchanged",
}


def _name(field: Field, cell: Cell) -> str:
    s = cell.setting
    if s.dataset != "cifar10":
        return s.dataset
    if s.network == "paper" and s.batch_size in BATCHES and cell.noise_multiplier in SIGMAS:
        return "paper" if s.max_grad_norm in NORMS else "paper-c1"
    return "epsilon" if target(field, cell) is not None else "cifar10"


def target(field: Field, cell: Cell) -> float | None:
    """Which of 1, 3 and 7.5 the cell spends, its temperature included where it has one."""
    spent = field.total(cell) or field.epsilon(cell)
    return next((t for t in TARGETS if abs(spent - t) <= NEAR * t), None)


def lacking(field: Field, scope: Scope, compared: Sequence[Cell]) -> list[str]:
    """What the scope asks for and the cells that could be compared do not show, in words."""
    out = []
    if without := len(scope.cells) - len(compared):
        out.append(f"{without} of {len(scope.cells)} cells cannot be compared")
    if scope.name == "epsilon":
        seen = {target(field, cell) for cell in compared}
        out += [f"nothing at ε = {t:g}" for t in TARGETS if t not in seen]
    whole = len(BATCHES) * len(SIGMAS) * len(NORMS)
    if scope.name == "paper" and len(scope.cells) < whole:
        out.append(f"{len(scope.cells)} of the grid's {whole} cells")
    return out
