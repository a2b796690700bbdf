"""A field of made-up results, and what the bars say of it."""

from __future__ import annotations

from duels import CHOSEN, tuning
from experiments.strong_privacy.compare.bars import judge
from experiments.strong_privacy.compare.cell import Contender
from experiments.strong_privacy.compare.scopes import TITLES, scopes

SHIPPED, TUNED = Contender("dp-steady", True), Contender("dp-steady")


def bars(field, ours=SHIPPED, scope="epsilon"):
    return {b.number: b for b in judge(field, scopes(field), ours) if b.scope == TITLES.get(scope, scope)}


def published(field, epsilon):
    return {b.number: b for b in judge(field, scopes(field), SHIPPED) if b.scope.endswith(f"ε = {epsilon} in all")}


def preferring(method, margin=0.01):
    """Validation accuracy that chooses CHOSEN everywhere, and likes one baseline best."""
    return tuning(lambda m, sigma, lr: 0.5 + 0.02 * (CHOSEN[m] == lr) + margin * (m == method))


def changed(rows, where, **values):
    return [r | values if where(r) else r for r in rows]


def at(method, sigma, seed, lr=None):
    lr = CHOSEN[method] if lr is None else lr
    return lambda r: (r["method"], r["noise_multiplier"], r["seed"], r["lr"]) == (method, sigma, seed, lr)
