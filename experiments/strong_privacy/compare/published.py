"""The small-model leaderboard: the recipe against published numbers.

They are Morsbach, Reubold and Strufe, "R+R: Understanding Hyperparameter Effects in DP-SGD" (ACSAC 2024,
arXiv:2411.02051; `data/image_simple.csv` of its repository): DP-SGD with 550,570 weights, the best of about 125 random
configurations per ε *by test accuracy*, with the NLL of that run. So they flatter, and lower NLLs are in the same table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dpivon.study.plan.data import StudyData, build_network
from experiments.strong_privacy.compare.cell import Cell, Contender
from experiments.strong_privacy.compare.field import RAW, TEMPERED, Entry, Field
from experiments.strong_privacy.compare.pooled import met_by
from experiments.strong_privacy.compare.scopes import target
from experiments.strong_privacy.compare.statistics import interval
from experiments.strong_privacy.compare.verdict import Bar, between, nats, verdict

PUBLISHED = {3.0: (0.645, 1.31), 7.5: (0.716, 1.10)}  # accuracy and NLL by ε at δ = 1e-5; head of this file
MOST_WEIGHTS = 550_000
SOURCE = "Morsbach et al. 2024, the best of about 125 by test accuracy"


def published(field: Field, cells: Iterable[Cell], ours: Contender, epsilon: float) -> list[Bar]:
    """Against the published small models, at the cell that validation data prefer of those within ε; where they cannot tell,
    since nothing was chosen for ours there, at every such cell."""
    accuracy, nll = PUBLISHED[epsilon]
    texts = {
        "accuracy": (
            f"accuracy is at least the published {100 * accuracy:g} % ({SOURCE}), with at most {MOST_WEIGHTS:,} weights"
        ),
        "nll": f"NLL is below the published {nll:.2f} of that run",
    }
    where = f"small models on CIFAR-10, ε = {epsilon:g} in all"
    found: list[tuple[float | None, Entry, int]] = []
    for cell, entry in met_by(field, [c for c in cells if c.setting.dataset == "cifar10"], ours):
        spent = field.total(cell) or field.epsilon(cell)
        size = weights(field, cell)
        if target(field, cell) == epsilon and spent <= epsilon and size is not None and size <= MOST_WEIGHTS:
            found.append((entry.validation.accuracy if entry.validation else None, entry, size))
    if not found:
        return [Bar(number, where, text) for number, text in zip(("4a", "4b"), texts.values(), strict=True)]
    known = [(score, entry, size) for score, entry, size in found if score is not None]
    chosen = [max(known, key=lambda each: each[0])] if len(known) == len(found) else found
    return [bar for _, entry, size in chosen for bar in _at(field, entry, size, epsilon, where, texts)]


def _at(field: Field, entry: Entry, size: int, epsilon: float, where: str, texts: dict[str, str]) -> list[Bar]:
    accuracy, nll = PUBLISHED[epsilon]
    kind = TEMPERED if field.scores(entry, TEMPERED, "nll") else RAW
    scores = {m: field.scores(entry, RAW if m == "accuracy" else kind, m) or {} for m in texts}
    a, n = interval([100 * x for x in scores["accuracy"].values()]), interval(list(scores["nll"].values()))
    place = f"{field.place(entry.cell)}; {size:,} weights"
    tempered = "after the temperature" if kind == TEMPERED else "without a temperature"
    return [
        Bar(
            "4a",
            where,
            texts["accuracy"],
            verdict(a, 100 * accuracy, above=True),
            f"{a.mean:.1f} {between(a, 1)} at {place}",
        ),
        Bar("4b", where, texts["nll"], verdict(n, nll, above=False, strict=True), f"{nats(n)}, {tempered}, at {place}"),
    ]


def weights(field: Field, cell: Cell) -> int | None:
    """Of the cell's network, counted on a network; None where no plan says what it is."""
    plan = field.plans.get(cell)
    if plan is None:
        return None
    side, channels = {"cifar10": (32, 3), "fashion-mnist": (28, 1)}.get(plan.dataset, (8, 1))
    blank, none = torch.zeros(1, channels, side, side), torch.zeros(1, dtype=torch.long)
    return build_network(plan, StudyData(blank, none, blank, none)).size
