"""The rows of all tables, the arms of the comparison on the test set, and how numbers are written."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from experiments.leaderboard.priors import tables
from experiments.leaderboard.priors.plans import EPSILONS, SCRATCH, Row, same_round
from experiments.strong_privacy.compare.statistics import Interval, interval

RECIPE = "dp-steady"
BASELINES = {"dp-sgd": "DP-SGD", "dp-adam": "DP-Adam"}
METHODS = {RECIPE: "recipe", **BASELINES}
#: Rows of the plan 'final' are arms named by their method; the others are of the plan 'judge'.
ARMS = {
    "scratch": "recipe, scratch",
    "plain": "recipe, prior",
    **{f"plain {method}": f"{title}, prior" for method, title in BASELINES.items()},
    "untuned": "recipe, prior, head first, untuned",
    **{method: f"{title}, prior, head first" for method, title in METHODS.items()},
}
#: A way to predict: predictor, what its map is fitted on, the map, whether it is charged.
Way = tuple[str, str, str, str]
NONE, SEEN = ("", "none", "0"), ("seen", "temperature", "0")
FREE, CHARGED = ("mirrored", "temperature", "0"), ("mirrored", "temperature", "1")
VECTOR, CHARGED_VECTOR = ("mirrored", "vector", "0"), ("mirrored", "vector", "1")


@dataclass(frozen=True)
class Results:
    """Rows of all tables."""

    runs: list[Row]
    predictions: list[Row] = field(default_factory=list)
    probe: list[Row] = field(default_factory=list)
    learning: list[Row] = field(default_factory=list)
    bars: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Results:
        return cls(*(tables.read(folder / f"{name}.csv") for name in cls.__dataclass_fields__))

    @property
    def prior(self) -> str:
        """The prior that the test rows start from."""
        (name,) = {row["start"] for row in self.runs if row["split"] == "test"} - {SCRATCH}
        return name

    def round(self, plan: str) -> list[Row]:
        return same_round(self.runs, plan)

    def arm(self, name: str, epsilon: float) -> list[Row]:
        """Test rows of one arm of the comparison, ordered by seed."""
        return by_seed(
            r
            for r in self.runs
            if r["split"] == "test" and r["plan"] != "board" and float(r["epsilon"]) == epsilon and arm_of(r) == name
        )

    def values(self, name: str, epsilon: float, column: str) -> list[float]:
        return [float(row[column]) for row in self.arm(name, epsilon)]

    def predicted(self, method: str, epsilon: float, way: Way, plan: str = "final") -> list[Row]:
        """Rows of one way to predict from the runs of a method, ordered by seed."""
        wanted = dict(zip(("predictor", "fitted", "map", "charged"), way, strict=True))
        wanted |= {"plan": plan, "method": method, "epsilon": str(epsilon)}
        return by_seed(r for r in self.predictions if all(r[k] == v for k, v in wanted.items()))

    def score(self, method: str, epsilon: float, way: Way, column: str, plan: str = "final") -> float:
        return mean(float(row[column]) for row in self.predicted(method, epsilon, way, plan))

    def difference(self, a: str, b: str, epsilon: float, column: str) -> Interval:
        """Mean of a − b over seeds with its 95 % t interval."""
        return paired_interval(self.arm(a, epsilon), self.arm(b, epsilon), column, f"{a} and {b} at ε={epsilon}")

    def better(self, epsilon: float, kind: str = "") -> str:
        """The arm of the baseline that is more accurate on the test set: with head first, or of another kind."""
        return max((kind + m for m in BASELINES), key=lambda arm: mean(self.values(arm, epsilon, "accuracy")))


def by_seed(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row["seed"]))


def paired_interval(a: Sequence[Row], b: Sequence[Row], column: str, what: str) -> Interval:
    seeds = [[row["seed"] for row in rows] for rows in (a, b)]
    if seeds[0] != seeds[1] or not seeds[0]:
        raise SystemExit(f"{what}: have seeds {seeds[0]} and {seeds[1]}. Run the plan again.")
    return interval([float(x[column]) - float(y[column]) for x, y in zip(a, b, strict=True)])


def arm_of(row: Row) -> str:
    if row["plan"] == "final":
        return row["method"]
    if row["start"] == SCRATCH:
        return "scratch"
    if row["method"] in BASELINES:
        return f"plain {row['method']}"
    return "untuned" if int(row["head_steps"]) else "plain"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float, digits: int) -> str:
    """With a minus sign of its own width."""
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float, digits: int) -> str:
    return f"{'+' if value > 0 else ''}{number(value, digits)}"


def told(found: Interval, digits: int, factor: float = 1.0) -> str:
    low, high = (number(factor * v, digits) for v in (found.low, found.high))
    return f"{signed(factor * found.mean, digits)} [{low}, {high}]"


def wrapped(text: str, first: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def over_epsilons(value: Callable[[float], str]) -> str:
    return " / ".join(value(e) for e in EPSILONS)
