"""The bars, each with a verdict and its numbers.

A verdict is by the mean over repetitions, unless the bar itself names a bound; "within chance" is added where the 95 %
interval holds the bar's threshold. Calibration is counted only where accuracy (1a, 1b, 1c) holds. Accuracy is that of the
prediction as shipped (the average over draws where there is a posterior), in points of per cent; a difference is ours less
theirs in the same repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpivon.study.results.summary import IVON
from experiments.strong_privacy.compare.cell import Cell, Contender
from experiments.strong_privacy.compare.field import MEAN, RAW, TEMPERED, Field
from experiments.strong_privacy.compare.pooled import (
    Differences,
    against_best,
    area_difference,
    begun,
    kept,
    met_by,
    pooled,
)
from experiments.strong_privacy.compare.published import PUBLISHED, published
from experiments.strong_privacy.compare.scopes import NORMS, TITLES, Scope, lacking
from experiments.strong_privacy.compare.statistics import Interval, holm, interval, p_value
from experiments.strong_privacy.compare.verdict import COUNTED, MET, NOT_MEASURED, NOT_MET, Bar, nats, points, verdict

CLOSE, WORST, FAR = -0.5, -2.0, 5.0  # points
CALIBRATED, STRONG, SURE = 0.03, 3.0, 0.05  # ECE, ε, p
NO_WIDTH = '{"trace": 0.0}'


def judge(field: Field, where: Sequence[Scope], ours: Contender) -> list[Bar]:
    """Every bar for one contender of ours."""
    out = []
    for scope in where:
        out += _Judge(field, scope, ours).all()
    if not any(scope.title in TITLES.values() for scope in where):
        return out
    everything = [cell for scope in where for cell in scope.cells]
    return out + [bar for epsilon in PUBLISHED for bar in published(field, everything, ours, epsilon)]


class _Judge:
    def __init__(self, field: Field, scope: Scope, ours: Contender) -> None:
        self.field, self.scope, self.ours = field, scope, ours
        self.cells = [cell for cell, _ in met_by(field, scope.cells, ours)]
        self.accuracy = self._differences(RAW, "accuracy", 100.0)

    def all(self) -> list[Bar]:
        accuracy = [self._close(), self._worst(), self._area("1c", "is above that of each baseline")]
        holds = accuracy[0].holds and not any(bar.fails for bar in accuracy)
        calibration = [self._ece(), self._nll_each(), self._nll_mean()]
        if not holds:
            calibration = [bar.uncounted() for bar in calibration]
        own = [self._area("3a", "is at least that of each baseline"), self._far()] if self.scope.name == "paper" else []
        return [*accuracy, self._wins(), *calibration, self._width(), *own]

    # ---- accuracy

    def _close(self) -> Bar:
        text = "accuracy, mean difference from the best baseline: the 95 % interval begins at −0.5 points or above"
        found = pooled(list(self.accuracy.values()))
        fewer = kept(list(self.accuracy.values()))
        if len(found) < 2:
            return self._bar("1a", text, numbers=fewer)
        i = interval(found)
        return self._bar(
            "1a",
            text,
            MET if i.low >= CLOSE else NOT_MET,
            f"{points(i)} over {self._cells()}{self._strict(RAW, 'accuracy')}{'; ' + fewer if fewer else ''}",
        )

    def _worst(self) -> Bar:
        text = "accuracy: no cell is worse than its best baseline by 2 points"
        worst = self._extreme(self.accuracy, min)
        if worst is None:
            return self._bar("1b", text)
        cell, i = worst
        return self._bar(
            "1b", text, verdict(i, WORST, above=True, strict=True), f"worst {points(i)} at {self.field.place(cell)}"
        )

    def _area(self, number: str, words: str) -> Bar:
        text = f"the area under accuracy over log ε {words}"
        found = {}
        for method in self.field.baselines:
            each = area_difference(self.field, self.scope.cells, self.ours, Contender(method))
            if each is None:
                return self._bar(number, text, numbers=f"no area of {Contender(method).title}" if self.cells else "")
            found[Contender(method).title] = interval([100 * x for x in each])
        least = min(found.values(), key=lambda i: i.mean)
        lowest = replace(least, low=min(i.low for i in found.values()))  # shown only if it is shown of each
        numbers = "; ".join(f"{points(i)} against {title}" for title, i in found.items())
        drawn = begun(self.field, self.scope.cells, self.ours)
        numbers += f" (mean of {len(drawn)} curves)" if len(drawn) > 1 else ""
        alone = len(set(self.cells).difference(*drawn))
        numbers += f"; {alone} of {len(self.cells)} cells lie on no curve" if alone else ""
        return self._bar(number, text, verdict(lowest, 0.0, above=True, strict=number == "1c"), numbers)

    def _wins(self) -> Bar:
        text = "accuracy: cells won and lost, by a paired t-test with Holm's correction over the cells"
        tested = {cell: d for cell, d in self.accuracy.items() if len(d) > 1}
        if not tested:
            return self._bar("1d", text)
        adjusted = holm([p_value(list(d.values())) for d in tested.values()])
        better = [sum(d.values()) > 0 for d in tested.values()]
        won = sum(p <= SURE and up for p, up in zip(adjusted, better, strict=True))
        lost = sum(p <= SURE and not up for p, up in zip(adjusted, better, strict=True))
        undecided = len(tested) - won - lost
        numbers = f"{won} won, {lost} lost, {undecided} undecided; the mean is higher in {sum(better)} of {len(tested)}"
        return self._bar("1d", text, COUNTED, numbers)

    # ---- calibration

    def _ece(self) -> Bar:
        text = "ECE after the private temperature is at most .03 at every ε"
        worst = self._extreme(self._own(TEMPERED, "ece"), max)
        if worst is None:
            return self._bar("2a", text)
        cell, i = worst
        return self._bar(
            "2a", text, verdict(i, CALIBRATED, above=False), f"largest {nats(i)} at {self.field.place(cell)}"
        )

    def _nll_each(self) -> Bar:
        text = "NLL after the private temperature: in no cell is it worse than the best baseline's, beyond chance"
        found = self._differences(TEMPERED, "nll")
        worst = self._extreme(found, max)
        if worst is None:
            return self._bar("2b", text)
        intervals = [interval(list(d.values())) for d in found.values()]
        worse = sum(i.low > 0 for i in intervals)
        cell, i = worst
        numbers = (
            f"worse beyond chance in {worse} of {len(intervals)}, by the mean in {sum(i.mean > 0 for i in intervals)}; "
        )
        return self._bar(
            "2b", text, NOT_MET if worse else MET, numbers + f"worst {nats(i, '+')} at {self.field.place(cell)}"
        )

    def _nll_mean(self) -> Bar:
        text = "NLL after the private temperature is lower than the best baseline's on average"
        cells = list(self._differences(TEMPERED, "nll").values())
        found = pooled(cells)
        if not found:
            return self._bar("2c", text)
        i, fewer = interval(found), kept(cells)
        found_so = verdict(i, 0.0, above=False, strict=True)
        numbers = nats(i, "+") + self._strict(TEMPERED, "nll") + ("; " + fewer if fewer else "")
        return self._bar("2c", text, found_so, numbers)

    def _width(self) -> Bar:
        text = "averaging over the posterior lowers NLL beyond what a temperature does, beyond chance"
        plain = Contender(self.ours.method, self.ours.default, NO_WIDTH)
        found, before = [], []
        for cell, entry in met_by(self.field, self.scope.cells, self.ours):
            averaged, mean = (self.field.scores(entry, kind, "nll") or {} for kind in (RAW, MEAN))
            before += [{seed: averaged[seed] - mean[seed] for seed in averaged}] if averaged else []
            other = self.field.entries[cell].get(plain)
            each = None if other is None else self.field.differences(entry, other, TEMPERED, "nll")
            found += [] if each is None else [each]
        raw = f"before a temperature {nats(interval(pooled(before)), '+')} against the mean" if pooled(before) else ""
        values = pooled(found)
        if not values:
            return self._bar("2d", text, numbers=raw)
        i = interval(values)
        plainly = "" if i.high < 0 else "; it buys nothing that is shown here"
        numbers = f"after it {nats(i, '+')} against runs without width, {len(found)} cells; {raw}{plainly}"
        return self._bar("2d", text, MET if i.high < 0 else NOT_MET, numbers)

    # ---- the paper's own setting

    def _far(self) -> Bar:
        text = "accuracy at ε < 3 is far above the paper's estimator's: by 5 points on average"
        theirs = Contender(IVON)
        found = []
        for cell, entry in met_by(self.field, self.scope.cells, self.ours):
            other = self.field.entries[cell].get(theirs)
            if other is not None and self.field.epsilon(cell) < STRONG and cell.setting.max_grad_norm in NORMS:
                each = self.field.differences(entry, other, RAW, "accuracy")
                found += [] if each is None else [{seed: 100 * d for seed, d in each.items()}]
        values = pooled(found)
        if not values:
            return self._bar("3b", text)
        i = interval(values)
        return self._bar("3b", text, verdict(i, FAR, above=True), f"{points(i)} over {len(found)} cells")

    # ---- shared

    def _strict(self, kind: str, measure: str) -> str:
        """The same against whichever baseline is better on the test set: no method could have known, so it is only told."""
        found = []
        for cell, entry in met_by(self.field, self.scope.cells, self.ours):
            each = [
                d for rival in self.field.rivals(cell) if (d := self.field.differences(entry, rival, kind, measure))
            ]
            pick = min if measure == "accuracy" else max
            found += [pick(each, key=lambda d: math.fsum(d.values()) / len(d))] if each else []
        values = pooled(found)
        if not values:
            return ""
        i = interval([100 * x for x in values] if measure == "accuracy" else values)
        return f"; against the better on the test set {points(i) if measure == 'accuracy' else nats(i, '+')}"

    def _differences(self, kind: str, measure: str, factor: float = 1.0) -> dict[Cell, Differences]:
        found = {cell: against_best(self.field, self.ours, cell, kind, measure) for cell in self.cells}
        return {cell: {s: factor * d for s, d in each.items()} for cell, each in found.items() if each}

    def _own(self, kind: str, measure: str) -> dict[Cell, Differences]:
        met = met_by(self.field, self.scope.cells, self.ours)
        return {cell: scores for cell, entry in met if (scores := self.field.scores(entry, kind, measure))}

    @staticmethod
    def _extreme(
        found: dict[Cell, Differences], pick: Callable[..., tuple[Cell, Interval]]
    ) -> tuple[Cell, Interval] | None:
        each = [(cell, interval(list(d.values()))) for cell, d in found.items()]
        return pick(each, key=lambda pair: pair[1].mean) if each else None

    def _cells(self) -> str:
        return f"{len(self.accuracy)} cells" if len(self.accuracy) > 1 else "one cell"

    def _bar(self, number: str, text: str, found: str = NOT_MEASURED, numbers: str = "") -> Bar:
        """One bar; where a part of the scope was not measured, a verdict of 'met' says 'where measured'."""
        gaps = lacking(self.field, self.scope, list(self.accuracy)) if found != NOT_MEASURED else []
        if gaps and found.startswith(MET):
            found = f"{MET} where measured{found.removeprefix(MET)}"
        return Bar(number, self.scope.title, text, found, "; ".join([*([numbers] if numbers else []), *gaps]))
