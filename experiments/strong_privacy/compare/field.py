"""Folders of results as one field of contenders: who ran where, at which rate, with which score in each repetition.

A run that diverged counts as no better than guessing, and no better than the worst run of its cell, whosever it is. A
planned run that has no row counts so too where it is ours; where it is another's, the repetition is left out: no method wins
against a run that was not made. Both are said on the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpivon.errors import bad
from dpivon.methods import METHODS
from dpivon.recipe import WIDTH
from dpivon.stacked.run import FILLED
from dpivon.study.plan.plan import CLASSES, Plan, changed, read_plan
from dpivon.study.results import table
from dpivon.study.results.summary import load
from dpivon.study.results.table import Row, Value, value
from dpivon.study.results.tuning import Candidate
from experiments.strong_privacy.compare.cell import SETTING, Cell, Contender, cell_of
from experiments.strong_privacy.compare.choice import Tuning, Validation

MEAN, RAW, TEMPERED = "mean", "raw", "tempered"  # the posterior's mean; as it predicts; after the private temperature
GUESS = {"accuracy": 1 / CLASSES, "nll": math.log(CLASSES), "ece": 1 - 1 / CLASSES}
_SCORED = ("noise_multiplier", "seed", "lr", "epsilon", "accuracy", "nll", "ece")
NEEDED = (*(name for name in SETTING if name != "augment"), *_SCORED)  # a table without that column has no views
_Key = tuple[str, str, float]  # method, options, lr


@dataclass(frozen=True)
class Entry:
    """One contender in one cell."""

    contender: Contender
    cell: Cell
    lr: float
    rows: dict[int, Row]  # by repetition
    planned: frozenset[int]
    chosen: str  # how its rate was, in words
    candidates: int  # rates that validation data chose among, here
    at_edge: bool  # the chosen one is the largest or the smallest of them
    validation: Validation | None

    @property
    def missing(self) -> list[int]:
        return sorted(self.planned - self.rows.keys())

    @property
    def diverged(self) -> list[int]:
        return sorted(seed for seed, row in self.rows.items() if math.isnan(row["accuracy"]))


class Field:
    """Every entry by cell and contender."""

    def __init__(self, outs: Sequence[Path], tunings: Sequence[Path], ours: str, baselines: Sequence[str]) -> None:
        self.ours, self.baselines, self.outs = ours, tuple(baselines), list(outs)
        self.tuning = Tuning([row for folder in tunings for row in _tuning_rows(folder)])
        self.plans: dict[Cell, Plan] = {}
        self.unfinished: dict[str, tuple[int, int]] = {}  # by folder: runs that have their row, runs that are planned
        self.rows: list[Row] = []
        groups: dict[Cell, dict[_Key, tuple[dict[int, Row], frozenset[int]]]] = {}
        for out in outs:
            for cell, key, found in self._read(out):
                if key in groups.setdefault(cell, {}):
                    raise bad("outs", str(out), f"{key[0]} at {cell.label} stands in two folders", "Give one of them")
                groups[cell][key] = found
        self.cells = sorted(groups)
        self.entries = {cell: self._entries(cell, groups[cell]) for cell in self.cells}
        self.contenders = self._in_order({c for found in self.entries.values() for c in found})
        self._worst = {cell: self._worst_of(cell) for cell in self.cells}

    def _read(self, out: Path) -> Iterable[tuple[Cell, _Key, tuple[dict[int, Row], frozenset[int]]]]:
        rows = load(out).rows
        self.rows += rows
        plan = read_plan(out / "study.json") if (out / "study.json").exists() else None
        cells: dict[Cell, dict[_Key, dict[int, Row]]] = {}
        for row in rows:
            if any(row.get(name) is None for name in NEEDED):
                problem = f"holds a run without one of {', '.join(NEEDED)}"
                raise bad("outs", str(out), problem, "Give what `dpivon study run` wrote")
            found = cells.setdefault(cell_of(row), {})
            key = (row["method"], told(row["method"], row["options"]), row["lr"])
            members = found.setdefault(key, {})
            if row["seed"] in members:
                problem = (
                    f"holds {key[0]} twice at seed {row['seed']}, perhaps once with a default named and once without"
                )
                raise bad("outs", str(out), problem, "Take one of them out of its table")
            members[row["seed"]] = row
        if plan and len(rows) < len(plan.runs):
            self.unfinished[out.name] = (len(rows), len(plan.runs))
        planned = _planned(plan) if plan else {}
        for cell, keys in cells.items():
            if plan:
                self.plans.setdefault(cell, plan)
            everyone = frozenset(seed for members in keys.values() for seed in members)
            place = (cell.setting.batch_size, cell.noise_multiplier, cell.setting.max_grad_norm)
            for key, members in keys.items():
                yield cell, key, (members, planned.get((*key, *place), everyone).union(members))

    # ---- who stands for a method

    def _entries(self, cell: Cell, found: dict[_Key, tuple[dict[int, Row], frozenset[int]]]) -> dict[Contender, Entry]:
        out: dict[Contender, Entry] = {}
        for method in dict.fromkeys(key[0] for key in found):
            kinds = list(dict.fromkeys(options for m, options, _ in found if m == method))
            shipped = changed({"trace": WIDTH})  # alone it fits no other method: a width needs averages
            main = next((kind for kind in (shipped, "") if kind in kinds), kinds[0])
            for options in kinds:
                variant = "" if options == main else options or '{"options": "none"}'
                rates = sorted(lr for m, o, lr in found if (m, o) == (method, options))
                ranked = self.tuning.ranked(
                    method, options, cell, alike=bool(variant)
                )  # a variant was tuned itself, or not at all
                for default, lr, words in self._rates(method, rates, ranked, cell):
                    contender = Contender(method, default, variant)
                    members, planned = found[method, options, lr]
                    tried = [] if default else sorted(c.lr for c in ranked)
                    edge = len(tried) > 2 and any(math.isclose(lr, end, rel_tol=1e-6) for end in (tried[0], tried[-1]))
                    validation = self.tuning.validation(method, options, lr, cell)
                    out[contender] = Entry(contender, cell, lr, members, planned, words, len(tried), edge, validation)
        return out

    def _rates(
        self, method: str, rates: list[float], ranked: Sequence[Candidate], cell: Cell
    ) -> Iterable[tuple[bool, float, str]]:
        """(whether it is the default, the rate, how it was chosen); ours may stand twice, tuned and at its default."""
        shipped = METHODS[method].lr if method == self.ours and method in METHODS else None
        if shipped in rates and shipped is not None:
            yield True, shipped, "the default; nothing was chosen"
        if ranked:
            best = next((lr for lr in rates if math.isclose(lr, ranked[0].lr, rel_tol=1e-6)), None)
            if best is not None:
                yield False, best, f"of {len(ranked)} on validation data of this cell"
                return
        left = [lr for lr in rates if lr != shipped]
        if len(left) > 1:
            problem = f"{method} has the rates {', '.join(f'{r:g}' for r in left)} at {cell.label}, and none is chosen"
            fix = "Give the tuning study of this cell with --tuning" if not ranked else f"Run {ranked[0].lr:g} too"
            raise bad("outs", method, problem, fix)
        if left:
            prefers = f"; validation data of this cell prefer {ranked[0].lr:g}" if ranked else ""
            yield False, left[0], f"the only one in the table{prefers}"

    def _in_order(self, found: set[Contender]) -> list[Contender]:
        order = [*self.baselines, *(m for m in METHODS if m not in self.baselines and m != self.ours), self.ours]
        return sorted(
            found, key=lambda c: (order.index(c.method) if c.method in order else 0, c.variant, c.default, c.method)
        )

    # ---- scores

    def scores(self, entry: Entry, kind: str, measure: str) -> dict[int, float] | None:
        """By repetition; None where this was not measured."""
        found = {seed: _score(row, kind, measure) for seed, row in entry.rows.items()}
        if all(x is None for x in found.values()):
            return None
        penalty = self._worst[entry.cell][measure]
        out = {s: x if math.isfinite(x) else penalty for s, x in found.items() if x is not None}
        if entry.contender.method == self.ours:
            out |= dict.fromkeys(entry.missing, penalty)
        return dict(sorted(out.items()))

    def summary(self, entry: Entry, kind: str, measure: str) -> Value | None:
        found = self.scores(entry, kind, measure)
        return None if found is None else value(found.values())

    def differences(self, a: Entry, b: Entry, kind: str, measure: str) -> dict[int, float] | None:
        """a less b in every repetition that both have; None where there is none."""
        ours, theirs = self.scores(a, kind, measure), self.scores(b, kind, measure)
        if ours is None or theirs is None:
            return None
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs} or None

    def _worst_of(self, cell: Cell) -> dict[str, float]:
        out = {}
        for measure, guess in GUESS.items():
            seen = [
                x
                for entry in self.entries[cell].values()
                for row in entry.rows.values()
                for kind in (MEAN, RAW, TEMPERED)
                if (x := _score(row, kind, measure)) is not None and math.isfinite(x)
            ]
            out[measure] = min([*seen, guess]) if measure == "accuracy" else max([*seen, guess])
        return out

    # ---- ε

    def epsilon(self, cell: Cell) -> float:
        """Of training: the largest that one of the cell's runs spent."""
        return max(row["epsilon"] for entry in self.entries[cell].values() for row in entry.rows.values())

    def total(self, cell: Cell) -> float | None:
        """Of training and temperature."""
        spent = [row.get("epsilon_tempered") for e in self.entries[cell].values() for row in e.rows.values()]
        return max((x for x in spent if x is not None), default=None)

    def place(self, cell: Cell) -> str:
        """A cell in few words, its ε first: with the temperature where it has one."""
        s, spent = cell.setting, self.total(cell) or self.epsilon(cell)
        several = len({c.setting.network for c in self.cells if c.setting.dataset == s.dataset}) > 1
        return f"ε = {short(spent)}, b = {s.batch_size}, C = {s.max_grad_norm:g}" + (
            f", {s.network}" if several else ""
        )

    # ---- the best baseline

    def rivals(self, cell: Cell) -> list[Entry]:
        """The baselines' entries in a cell."""
        found = (self.entries[cell].get(Contender(method)) for method in self.baselines)
        return [entry for entry in found if entry is not None]

    def best(self, cell: Cell, measure: str) -> tuple[Entry, str] | None:
        """The baseline that validation data prefer, and how that was found; by its accuracy, or by its NLL after the
        temperature. Without validation data it is the one that is better on the test set, which favours it."""
        rivals = self.rivals(cell)
        seen = [(entry, entry.validation) for entry in rivals if entry.validation is not None]
        if not rivals:
            return None
        if len(seen) == len(rivals):
            where = "validation data" if all(v.here for _, v in seen) else "validation data of other cells with this σ"
            if measure == "accuracy":
                return max(seen, key=lambda pair: _by_accuracy(pair[1]))[0], where
            tempered = all(v.tempered_nll is not None for _, v in seen)
            return min(seen, key=lambda pair: _by_nll(pair[1], tempered))[0], where
        kind = RAW if measure == "accuracy" or not all(self.scores(e, TEMPERED, "nll") for e in rivals) else TEMPERED
        scored = [(v.mean, entry) for entry in rivals if (v := self.summary(entry, kind, measure)) is not None]
        pick = max if measure == "accuracy" else min
        return pick(scored, key=lambda pair: pair[0])[1], "the test set, for want of validation data: in its favour"


def told(method: str, options: str) -> str:
    """Options without those that only name the method's default: what is left makes it another contender. What a stack fills in
    where nothing is said, as the plan's T, is no default: ``steps: 0`` is a run that does not know T."""
    if not options or method not in METHODS:
        return options
    defaults = {k: v for k, v in METHODS[method].defaults.items() if k not in (*FILLED, "steps")}
    return changed({k: v for k, v in json.loads(options).items() if k not in defaults or defaults[k] != v})


def short(epsilon: float) -> str:
    """Two digits, and thousands in full."""
    return f"{epsilon:.2g}" if epsilon < 100 else f"{epsilon:,.0f}"


def _by_accuracy(v: Validation) -> tuple[float, float]:
    return (-math.inf, 0.0) if math.isnan(v.accuracy) else (v.accuracy, -v.nll)


def _by_nll(v: Validation, tempered: bool) -> float:
    found = v.tempered_nll if tempered and v.tempered_nll is not None else v.nll
    return math.inf if math.isnan(found) else found


def _score(row: Row, kind: str, measure: str) -> float | None:
    """As the run predicts: the average over draws where it has a posterior, else its point."""
    if kind == TEMPERED:
        return row.get(f"tempered_{measure}")
    averaged = row[f"mc_{measure}"] if kind == RAW else None
    return row[measure] if averaged is None else averaged


def _planned(plan: Plan) -> dict[tuple[str, str, float, int, float, float], frozenset[int]]:
    out: dict[tuple[str, str, float, int, float, float], frozenset[int]] = {}
    for run in plan.runs:
        numbers = (run.batch_size, _seven(run.noise_multiplier), _seven(run.max_grad_norm))
        key = (run.method, told(run.method, changed(run.options)), _seven(run.lr), *numbers)
        out[key] = out.get(key, frozenset()) | {run.seed}
    return out


def _seven(x: float) -> float:
    """As a table holds it."""
    return float(f"{x:.7g}")


def _tuning_rows(folder: Path) -> list[Row]:
    rows = table.read(folder / "tuning.csv")
    if not rows:
        raise bad("tuning", str(folder), "holds no tuning.csv", "Give what `dpivon study run` wrote for a tuning study")
    return [row | {"options": told(row["method"], row["options"])} for row in rows]
