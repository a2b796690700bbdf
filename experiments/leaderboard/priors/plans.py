"""What is run: plain descriptions of private runs, and the choices that earlier rows make for later plans.

Choices are made on rows of the validation split alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import mean

EPSILONS = (1.0, 3.0, 7.5)
SCRATCH = "scratch"
Row = dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One private run on CIFAR-10.

    Attributes:
        start: the name of a prior, or ``"scratch"``.
        epsilon: of the whole run, both phases.
        lr: the method's rate; r for ``dp-steady``.
        views: augmentation multiplicity; above 1 with flips and crops.
        head_steps: steps of the first phase, in which the logits alone are trained on the prior's hidden units.
        body: factor on the convolutions' weights. GroupNorm undoes it, so the function stays the same; but a step of the same
            size moves the function less, as under a prior of body² times the precision.
        features: factor on the hidden units, whose incoming weights are scaled; the logits learn faster by its square.
        keep: ``"all"``, or ``"body"`` to keep the prior's convolutions and draw the hidden layer afresh.
    """

    start: str
    epsilon: float
    method: str = "dp-steady"
    lr: float = 1.75
    seed: int = 0
    batch: int = 4096
    epochs: int = 90
    views: int = 1
    head_steps: int = 0
    body: float = 1.0
    features: float = 1.0
    keep: str = "all"

    def stream(self, what: str) -> int:
        """A seed of its own for every cell, split and phase: no two share their noise."""
        return int(hashlib.sha256(f"{self} {what}".encode()).hexdigest()[:15], 16)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(value) for value in asdict(self).values())


NAMES = tuple(field.name for field in fields(Cell))
#: What a setting is besides its ε and seed.
SETTING = tuple(name for name in NAMES if name not in ("epsilon", "seed"))


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in NAMES)


def cell_of(row: Row) -> Cell:
    types = {field.name: type(getattr(Cell("", 1.0), field.name)) for field in fields(Cell)}
    return Cell(**{name: types[name](row[name]) for name in NAMES})


def validated(rows: Iterable[Row], **wanted: str) -> list[Row]:
    """Rows of the validation split with these values."""
    return [r for r in rows if r["split"] == "validation" and all(r[k] == v for k, v in wanted.items())]


def score(rows: Sequence[Row]) -> float:
    return mean(float(row["accuracy"]) for row in rows)


def best_prior(rows: Sequence[Row]) -> str:
    """The prior with the best mean over ε of its best validation accuracy."""
    priors = sorted({row["start"] for row in validated(rows)} - {SCRATCH})
    if not priors:
        raise SystemExit("No prior has rows of the validation split yet: run the plan 'compare' first.")

    def quality(prior: str) -> float:
        found = [validated(rows, start=prior, epsilon=str(epsilon)) for epsilon in EPSILONS]
        return mean(max((float(row["accuracy"]) for row in each), default=0.0) for each in found)

    return max(priors, key=quality)


def best_default(rows: Sequence[Row], start: str) -> Cell:
    """The one setting of ``dp-steady`` without augmentations that has the best mean validation accuracy over all ε."""
    settings: dict[tuple[str, ...], list[Row]] = {}
    for row in validated(rows, start=start, method="dp-steady", views="1"):
        settings.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    whole = [each for each in settings.values() if {row["epsilon"] for row in each} >= {str(e) for e in EPSILONS}]
    return cell_of(max(whole, key=score)[0])


def best_rate(rows: Sequence[Row], start: str, method: str, epsilon: float, like: Cell | None = None) -> float:
    """The rate with the best validation accuracy at this ε, in the plain setting or in that of another cell."""
    like = like or Cell("", 1.0)
    fixed = {name: str(getattr(like, name)) for name in SETTING if name not in ("start", "method", "lr")}
    found = validated(rows, start=start, method=method, epsilon=str(epsilon), **fixed)
    return float(max(found, key=lambda row: float(row["accuracy"]))["lr"])


def compare(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Which prior, at which of two rates; and what training from scratch has."""
    cells = [Cell(p, e, lr=r) for p in priors for e in EPSILONS for r in (1.75, 0.9)]
    return cells + [Cell(SCRATCH, e, lr=3.5) for e in EPSILONS]


def rates(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The best prior under other rates and other methods."""
    p = best_prior(rows)
    cells = [Cell(p, e, lr=r) for e in EPSILONS for r in (0.45, 3.5)]
    cells += [Cell(p, e, "dp-sgd", lr) for e in EPSILONS for lr in (0.1, 0.3, 1.0)]
    return cells + [Cell(p, e, "dp-adam", lr) for e in EPSILONS for lr in (0.001, 0.003)]


def phases(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Head first, for 100 of 990 steps."""
    base = _plain(rows)
    return [replace(base, epsilon=e, head_steps=100, lr=r) for e in EPSILONS for r in (1.75, 0.9)]


def geometry(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """How much the body may move against the head, and whether the hidden layer is worth keeping."""
    base = _plain(rows)
    # Self-supervised training enlarges the hidden units, about eightfold after 100 steps: an eighth brings them back.
    changes = [{"body": 0.5}, {"body": 2.0}, {"features": 0.5}, {"features": 0.125}, {"keep": "body"}]
    return [replace(base, epsilon=e, **change) for change in changes for e in EPSILONS]  # type: ignore[arg-type]


def longer(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Larger batches for longer."""
    base, sizes = _plain(rows), ((8192, 150), (16384, 300))
    return [replace(base, epsilon=e, batch=b, epochs=n) for b, n in sizes for e in EPSILONS]


def views(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Four augmentations of every drawn image."""
    return [replace(_plain(rows), epsilon=e, views=4) for e in EPSILONS]


def joint(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The changes that helped, each by itself, put together: they were tried on the plain setting alone."""
    start = best_prior(rows)
    plain, found = _plain(rows), {}
    for name in ("head_steps", "body", "features", "keep"):
        default = str(getattr(plain, name))
        options = {row[name] for row in validated(rows, start=start, method="dp-steady", batch="4096")}
        means = {o: _mean_with(rows, plain, name, o) for o in options | {default}}
        best = max(means, key=means.__getitem__)
        if best != default and means[best] > means[default] + 0.002:  # less is noise: 5,000 images, one seed
            found[name] = type(getattr(plain, name))(best)
    long = best_default([r for r in rows if r["batch"] != "4096"] or rows, start)
    return [replace(long, epsilon=e, **found) for e in EPSILONS]


def _mean_with(rows: Sequence[Row], plain: Cell, name: str, option: str) -> float:
    """Mean over ε of the best validation accuracy over r of the plain setting with one change."""
    fixed = {n: str(getattr(plain, n)) for n in SETTING if n != "lr"} | {name: option}
    found = [[float(r["accuracy"]) for r in validated(rows, epsilon=str(e), **fixed)] for e in EPSILONS]
    return mean(max(each, default=0.0) for each in found)


def _plain(rows: Sequence[Row]) -> Cell:
    """The best prior in the setting of the plan 'compare', at the better of its rates."""
    prior, default = best_prior(rows), Cell("", 1.0)
    untouched = [r for r in rows if all(r[n] == str(getattr(default, n)) for n in SETTING[3:])]
    return best_default(untouched, prior)


def judge(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Three seeds: the default that validation chose; and at the plain length, where all rates were tuned, the recipe, the
    same from scratch, and the two other methods at their best rates."""
    prior, plain = best_prior(rows), _plain(rows)
    cells = []
    for seed in (1, 2, 3):
        for e in EPSILONS:
            cells += [replace(cell, epsilon=e, seed=seed) for cell in (best_default(rows, prior), plain)]
            cells.append(replace(plain, start=SCRATCH, lr=3.5, epsilon=e, seed=seed))
            tuned = [(method, best_rate(rows, prior, method, e)) for method in ("dp-sgd", "dp-adam")]
            cells += [replace(plain, method=m, lr=lr, epsilon=e, seed=seed) for m, lr in tuned]
    return list(dict.fromkeys(cells))


#: The first phase of the plans below, and the rates around the recipe's own.
HEAD_STEPS, RATES = 100, (1.25, 1.75, 2.5, 3.5)
#: A factor of about three for DP-SGD, of two for DP-Adam; 'widen' goes on where the best is an end.
RIVALS = {"dp-sgd": (0.03, 0.1, 0.3, 1.0, 3.0), "dp-adam": (0.0005, 0.001, 0.002, 0.004, 0.008)}


def starts(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Which prior, with head first."""
    return [Cell(p, e, head_steps=HEAD_STEPS, features=0.5) for p in priors for e in EPSILONS]


def tune(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The best prior with head first: the size of its hidden units, and the rate."""
    base = Cell(best_prior(rows), 1.0, head_steps=HEAD_STEPS)
    return [replace(base, epsilon=e, features=f, lr=r) for f in (1.0, 0.5, 0.25) for r in RATES for e in EPSILONS]


def rivals(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The other methods in the recipe's setting, first phase included, at rates over two decades and more than one."""
    base = best_default(rows, best_prior(rows))
    return [
        replace(base, method=m, lr=lr, epsilon=e, seed=0) for m, each in RIVALS.items() for lr in each for e in EPSILONS
    ]


def widen(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """One more rate for every method whose best rate at some ε is an end of its grid."""
    base = best_default(rows, best_prior(rows))
    fixed = {name: str(getattr(base, name)) for name in SETTING if name not in ("method", "lr")}
    cells = []
    for method, factor in (("dp-sgd", 3.0), ("dp-adam", 2.0), ("dp-steady", 1.4)):
        for e in EPSILONS:
            tried = sorted(float(r["lr"]) for r in validated(rows, method=method, epsilon=str(e), **fixed))
            best = best_rate(rows, base.start, method, e, base)
            if best in (tried[0], tried[-1]):
                lr = float(f"{best * factor if best == tried[-1] else best / factor:.3g}")
                cells.append(replace(base, method=method, lr=lr, epsilon=e, seed=0))
    return cells


def settle(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The chosen default with another seed, predicted from in every way: what is chosen at prediction time is chosen here."""
    return [replace(best_default(rows, best_prior(rows)), epsilon=e, seed=4) for e in EPSILONS]


def final(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Three seeds of the chosen default, and of the other methods in the same setting at their best rates."""
    base, cells = best_default(rows, best_prior(rows)), []
    for e in EPSILONS:
        tuned = [("dp-steady", base.lr)] + [(m, best_rate(rows, base.start, m, e, base)) for m in RIVALS]
        cells += [replace(base, method=m, lr=lr, epsilon=e, seed=s) for m, lr in tuned for s in (1, 2, 3)]
    return cells


#: The leaderboard's ε and methods. Rates from scratch are those of experiments/strong_privacy.
BOARD, IVON = (1.0, 2.0, 3.0, 4.0, 8.0), "dp-ivon-gradsq"
SCRATCH_RATES = {
    "dp-steady": dict.fromkeys(EPSILONS, 3.5),
    "dp-sgd": {1.0: 0.1, 3.0: 0.3, 7.5: 0.3},
    "dp-adam": dict.fromkeys(EPSILONS, 0.003),
    IVON: {1.0: 1.0, 3.0: 3.0, 7.5: 3.0},
}


def ivon(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The paper's method in the recipe's setting."""
    base = best_default(of_plans(rows, SECOND), "filters")
    return [replace(base, method=IVON, lr=lr, epsilon=e, seed=0) for lr in (0.3, 1.0, 3.0) for e in EPSILONS]


def board(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """Three seeds of four methods, from scratch and from the prior, at the rates of the nearest ε that was tuned. Runs from
    scratch at the ε that were tuned are those of experiments/posterior."""
    base, cells = best_default(of_plans(rows, SECOND), "filters"), []
    for e in BOARD:
        near = min(EPSILONS, key=lambda tuned: abs(math.log(tuned / e)))
        for method, scratch in SCRATCH_RATES.items():
            lr = base.lr if method == base.method else best_rate(of_plans(rows, THIRD), base.start, method, near, base)
            both = [replace(base, method=method, lr=lr), Cell(SCRATCH, e, method, scratch[near])]
            for cell in both[: 1 if e in EPSILONS else 2]:
                cells += [replace(cell, epsilon=e, seed=seed) for seed in (1, 2, 3)]
    return cells


def fashion(rows: Sequence[Row], priors: Sequence[str]) -> list[Cell]:
    """The recipe on a data set that had no part in any choice, from scratch and from the prior."""
    base = best_default(of_plans(rows, SECOND), "filters")
    both = base, Cell(SCRATCH, 1.0, lr=SCRATCH_RATES[base.method][1.0])
    return [replace(cell, epsilon=e, seed=seed) for cell in both for e in (1.0, 3.0, 8.0) for seed in (1, 2, 3)]


#: Plans that are scored on the test set.
JUDGED = ("judge", "final", "board", "fashion")
#: Three rounds: a plan chooses by rows of its own. Charged maps are part of σ from the second on; the third adds to it.
FIRST = (compare, rates, phases, geometry, longer, views, joint, judge)
SECOND = (starts, tune, rivals, widen, settle, final)
THIRD = (*SECOND, ivon, board, fashion)
Plan = Callable[[Sequence[Row], Sequence[str]], list[Cell]]
PLANS: dict[str, Plan] = {p.__name__: p for p in (*FIRST, *THIRD)}


def of_plans(rows: Iterable[Row], plans: Iterable[Plan]) -> list[Row]:
    names = {plan.__name__ for plan in plans}
    return [row for row in rows if row["plan"].removeprefix("toy ") in names]


def same_round(rows: Iterable[Row], plan: str) -> list[Row]:
    """Rows of the plans that are in one round with this one."""
    return of_plans(rows, next(each for each in (FIRST, SECOND, THIRD) if PLANS[plan] in each))
