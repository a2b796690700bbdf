"""What one would like to be true beyond the paper's axes, as statements that the tables can support or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from dpivon.study.results.summary import IVON
from dpivon.study.results.table import Value
from experiments.paper.claims import BASELINES, Claim, Comparison
from experiments.robustness.cells import AVERAGE, MEAN, Predictor, RobustnessCells, Setting

GAIN = 0.02  # what withholding a fifth of the answers has to add to the accuracy of the others
_Score = Callable[[Predictor, Setting], Value | None]


class RobustnessClaims:
    """Statements about one table. A run that diverged makes its comparisons fail: a NaN is neither lower nor higher."""

    def __init__(self, cells: RobustnessCells) -> None:
        self.cells = cells

    def all(self) -> list[Claim]:
        cells = self.cells
        worst = max(cells.severities, default=0)
        level = f"severity {worst}" if worst else "the greatest severity"

        def shifted(measure: str) -> _Score:
            return lambda p, s: cells.shift(p, s, measure)

        def lost(p: Predictor, s: Setting) -> Value | None:
            before, after = cells.clean(p, s, "accuracy"), cells.shift(p, s, "accuracy", worst)
            if before is None or after is None or not worst:
                return None
            return Value(before.mean - after.mean, math.hypot(before.std, after.std), before.n)

        return [
            Claim("B1", "averaging over the posterior lowers ECE under shift", self._averaging(shifted("ece"))),
            Claim("B2", "averaging over the posterior lowers NLL under shift", self._averaging(shifted("nll"))),
            Claim(
                "B3",
                "DP-IVON-Gradsq, averaged, has a lower ECE under shift than DP-SGD and DP-Adam",
                self._against(shifted("ece"), lower=True),
            ),
            Claim(
                "B4",
                "DP-IVON-Gradsq, averaged, has a lower NLL under shift than DP-SGD and DP-Adam",
                self._against(shifted("nll"), lower=True),
            ),
            Claim("B5", f"ECE at {level} is higher than on clean images", self._severity(worst)),
            Claim(
                "B6",
                "ECE under shift is higher at the smallest ε than at the largest",
                self._privacy(shifted("ece"), lower=False),
            ),
            Claim(
                "B7",
                f"more accuracy is lost from clean images to {level} at the smallest ε than at the largest",
                self._privacy(lost, lower=False),
            ),
            Claim(
                "B8",
                "the AUROC of OOD images by entropy is lower at the smallest ε than at the largest",
                self._privacy_ood(),
            ),
            Claim(
                "B9",
                "mutual information detects OOD images better than entropy does (AUROC)",
                self._information(),
            ),
            Claim(
                "B10",
                "DP-IVON-Gradsq, averaged, detects OOD images by entropy better than DP-SGD and DP-Adam (AUROC)",
                self._ivon_ood(),
            ),
            Claim(
                "B11",
                "averaging over the posterior lowers AURC on clean images",
                self._averaging(lambda p, s: cells.clean(p, s, "aurc")),
            ),
            Claim(
                "B12",
                f"leaving the least confident fifth unanswered raises the accuracy on clean images by at least {GAIN:g}",
                self._withholding(),
            ),
        ]

    def _cells(self) -> Iterator[tuple[Predictor, Setting]]:
        for p in self.cells.predictors:
            for s in self.cells.settings:
                yield p, s

    def _where(self, p: Predictor, s: Setting | None = None, *more: str) -> str:
        both = Predictor(p.method, AVERAGE) in self.cells.predictors
        way = ("averaged" if p.way == AVERAGE else "posterior mean") if both else ""
        return ", ".join(filter(None, (p.title, way, self.cells.label(s) if s else "", *more)))

    def _averaging(self, score: _Score) -> tuple[Comparison, ...]:
        out = []
        for p, s in self._cells():
            if p.way == AVERAGE:
                a, b = score(p, s), score(Predictor(p.method, MEAN), s)
                if a is not None and b is not None:
                    out.append(Comparison(f"{p.title}, {self.cells.label(s)}", a.mean < b.mean, f"{a} against {b}"))
        return tuple(out)

    def _against(self, score: _Score, *, lower: bool, extra: str = "") -> tuple[Comparison, ...]:
        """DP-IVON-Gradsq against the better of the baselines, setting by setting."""
        ours, out = Predictor(IVON, AVERAGE), []
        for s in self.cells.settings:
            mine = score(ours, s)
            found = [(v, b) for b in BASELINES if (v := score(Predictor(b, MEAN), s)) is not None]
            if mine is None or not found:
                continue
            best, name = (min if lower else max)(found, key=lambda pair: pair[0].mean)
            holds = mine.mean < best.mean if lower else mine.mean > best.mean
            where = ", ".join(filter(None, (self.cells.label(s), extra)))
            out.append(Comparison(where, holds, f"{mine} against {best} ({Predictor(name, MEAN).title})"))
        return tuple(out)

    def _severity(self, worst: int) -> tuple[Comparison, ...]:
        out = []
        for p, s in self._cells():
            a, b = self.cells.clean(p, s, "ece"), self.cells.shift(p, s, "ece", worst)
            if a is not None and b is not None and worst:
                out.append(Comparison(self._where(p, s), b.mean > a.mean, f"{b} against {a}"))
        return tuple(out)

    def _privacy(self, score: _Score, *, lower: bool, extra: str = "") -> tuple[Comparison, ...]:
        """The least ε against the greatest, among settings that differ in nothing else."""
        out = []
        groups: dict[tuple[int, float], list[Setting]] = {}
        for s in self.cells.settings:
            groups.setdefault((s.batch_size, s.max_grad_norm), []).append(s)
        for p in self.cells.predictors:
            for members in groups.values():
                strong, weak = score(p, members[0]), score(p, members[-1])
                if strong is None or weak is None or len(members) < 2:
                    continue
                holds = strong.mean < weak.mean if lower else strong.mean > weak.mean
                labels = [self.cells.label(members[i]) for i in (0, -1)]
                numbers = f"{strong} at {labels[0]}, {weak} at {labels[1]}"
                out.append(Comparison(self._where(p, None, extra), holds, numbers))
        return tuple(out)

    def _privacy_ood(self) -> tuple[Comparison, ...]:
        found = [self._privacy(self._auroc(f, "entropy"), lower=True, extra=f) for f in self.cells.foreign]
        return tuple(c for each in found for c in each)

    def _ivon_ood(self) -> tuple[Comparison, ...]:
        found = [self._against(self._auroc(f, "entropy"), lower=False, extra=f) for f in self.cells.foreign]
        return tuple(c for each in found for c in each)

    def _auroc(self, foreign: str, by: str) -> _Score:
        return lambda p, s: self.cells.ood(p, s, foreign, f"auroc_{by}")

    def _information(self) -> tuple[Comparison, ...]:
        out = []
        for p, s in self._cells():
            for f in self.cells.foreign:
                a, b = (self.cells.ood(p, s, f, f"auroc_{by}") for by in ("information", "entropy"))
                if a is not None and b is not None:
                    where = f"{p.title}, {self.cells.label(s)}, {f}"
                    out.append(Comparison(where, a.mean > b.mean, f"{a} against {b}"))
        return tuple(out)

    def _withholding(self) -> tuple[Comparison, ...]:
        out = []
        for p, s in self._cells():
            a, b = self.cells.clean(p, s, "accuracy_at_80"), self.cells.clean(p, s, "accuracy")
            if a is not None and b is not None:
                out.append(Comparison(self._where(p, s), a.mean >= b.mean + GAIN, f"{a} against {b}"))
        return tuple(out)
