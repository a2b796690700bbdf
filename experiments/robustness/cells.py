"""robustness.csv put together with runs.csv: a score of a method at a setting, mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpivon.methods import METHODS
from dpivon.study.results.table import Row, Value, value

MEAN, AVERAGE = "mean", "average"


@dataclass(frozen=True, order=True)
class Setting:
    """What all methods were given alike; ε is the largest that one of its runs spent. Ordered by ε, strong privacy first."""

    epsilon: float
    batch_size: int
    noise_multiplier: float
    max_grad_norm: float


@dataclass(frozen=True)
class Predictor:
    """A method and how it predicts: at its posterior's mean (or point), or by an average over draws."""

    method: str
    way: str

    @property
    def title(self) -> str:
        return METHODS[self.method].title if self.method in METHODS else self.method


class RobustnessCells:
    """Scores by (predictor, setting, condition)."""

    def __init__(self, rows: Sequence[Row], beyond: Sequence[Row]) -> None:
        self.rows = list(rows)
        by_id = {row["id"]: row for row in rows}
        self.beyond = [row for row in beyond if row["id"] in by_id]
        groups: dict[tuple[int, float, float], list[float]] = {}
        for row in rows:
            groups.setdefault(_key(row), []).append(row["epsilon"])
        self.settings = sorted(Setting(max(spent), *key) for key, spent in groups.items())
        at = {(s.batch_size, s.noise_multiplier, s.max_grad_norm): s for s in self.settings}
        self._by: dict[tuple[Predictor, Setting, str, str, int], list[Row]] = {}
        for row in self.beyond:
            run = by_id[row["id"]]
            key = (Predictor(run["method"], row["predicts"]), at[_key(run)])
            self._by.setdefault((*key, row["kind"], row["condition"], row["severity"]), []).append(row)
        known = {key[0] for key in self._by}
        order = {name: i for i, name in enumerate(METHODS)}
        self.methods = sorted({p.method for p in known}, key=lambda m: (order.get(m, len(order)), m))
        self.predictors = [
            Predictor(m, way) for m in self.methods for way in (MEAN, AVERAGE) if Predictor(m, way) in known
        ]
        self.severities = sorted({key[4] for key in self._by if key[2] == "shift"})
        self.corruptions = list(dict.fromkeys(r["condition"] for r in self.beyond if r["kind"] == "shift"))
        self.foreign = list(dict.fromkeys(r["condition"] for r in self.beyond if r["kind"] == "ood"))

    def label(self, setting: Setting) -> str:
        """ε, and what else differs between the settings."""
        words = [f"ε = {setting.epsilon:.2g}"]
        for name, letter in (("batch_size", "b"), ("max_grad_norm", "C")):
            if len({getattr(s, name) for s in self.settings}) > 1:
                words.append(f"{letter} = {getattr(setting, name):g}")
        return ", ".join(words)

    def best_way(self, method: str) -> Predictor:
        """How a method is meant to predict: by its average, or by its point where that is all it has."""
        return [p for p in self.predictors if p.method == method][-1]

    def clean(self, p: Predictor, s: Setting, measure: str) -> Value | None:
        return self._value([(p, s, "clean", "clean", 0)], measure)

    def shift(self, p: Predictor, s: Setting, measure: str, severity: int | None = None) -> Value | None:
        """Averaged over corruptions, and over severities unless one is given (0 is clean), before seeds are compared."""
        if severity == 0:
            return self.clean(p, s, measure)
        levels = self.severities if severity is None else [severity]
        return self._value([(p, s, "shift", c, k) for c in self.corruptions for k in levels], measure)

    def at(self, p: Predictor, s: Setting, condition: str, severity: int, measure: str) -> Value | None:
        """One corruption at one severity; "clean" has none."""
        if condition == "clean":
            return self.clean(p, s, measure)
        return self._value([(p, s, "shift", condition, severity)], measure)

    def ood(self, p: Predictor, s: Setting, foreign: str, measure: str) -> Value | None:
        return self._value([(p, s, "ood", foreign, 0)], measure)

    def _value(self, keys: Sequence[tuple[Predictor, Setting, str, str, int]], measure: str) -> Value | None:
        runs: dict[str, list[float]] = {}
        for key in keys:
            for row in self._by.get(key, []):
                if row[measure] is not None:
                    runs.setdefault(row["id"], []).append(row[measure])
        return value(sum(found) / len(found) for found in runs.values())


def _key(row: Row) -> tuple[int, float, float]:
    return row["batch_size"], row["noise_multiplier"], row["max_grad_norm"]
