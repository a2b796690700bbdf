"""The paper's sentences as statements that a table can support or not.

A statement is a set of comparisons, one per cell. It is *supported* where at least five sixths of them hold, *not
supported* where at most one sixth does, and *depends* otherwise; exactly five sixths (10 of 12) is just supported. The
comparisons that fail are named. The thresholds are ours: the paper states none. Only A7 leaves comparisons out: those
in which a method moves by at most two standard errors. A regime is a range of σ: weak privacy σ ≤ .5, medium
.5 < σ ≤ 2, strong σ > 2. Four statements were widened when the first table was known: A7 by DP-Adam, N2, E3 and E4
by batch sizes. Of their verdicts on that table only A7's changed: against DP-SGD alone it depends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dpivon.study.results.summary import IVON, TITLES
from dpivon.study.results.table import Cells, Row, Value
from experiments.paper.figures import NOISE_ONLY
from experiments.paper.sentences import SENTENCES

SUPPORTED, NOT_SUPPORTED, DEPENDS, UNTESTED = "supported", "not supported", "depends", "not tested"
BASELINES = ("dp-sgd", "dp-adam")
CLOSE = {"accuracy": 0.02, "nll": 0.05, "ece": 0.01}  # what counts as comparable
MARKED = {"accuracy": 0.02, "nll": 0.05, "ece": 0.01}  # what counts as a difference
CHANCE = 0.15  # an accuracy of at most this is a collapse: ten classes, a tenth by chance


@dataclass(frozen=True)
class Comparison:
    """One cell's answer, with its numbers in words."""

    where: str
    holds: bool
    numbers: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what we take it to say, and what the table says."""

    number: str
    statement: str
    comparisons: tuple[Comparison, ...]

    @property
    def sentence(self) -> str:
        return SENTENCES[self.number]

    @property
    def share(self) -> float:
        return sum(c.holds for c in self.comparisons) / len(self.comparisons)

    @property
    def verdict(self) -> str:
        if not self.comparisons:
            return UNTESTED
        return SUPPORTED if self.share >= 5 / 6 else NOT_SUPPORTED if self.share <= 1 / 6 else DEPENDS


def regime(sigma: float) -> str:
    return "weak" if sigma <= 0.5 else "medium" if sigma <= 2 else "strong"


class Claims:
    """All claims for one way of predicting with IVON: by its posterior's mean, or averaged over samples.

    ``timed`` are runs of the same methods in the ordinary loop, if there are any: they know what a method costs.
    """

    def __init__(
        self, rows: Sequence[Row], diagnostics: Sequence[Row], *, averaged: bool, timed: Sequence[Row] = ()
    ) -> None:
        self.cells, self.rows, self.diagnostics = Cells(rows), list(rows), list(diagnostics)
        self.timed = list(timed)
        self.prefix = "mc_" if averaged else ""
        self.batches, self.sigmas, self.norms = (
            self.cells.axis(k) for k in ("batch_size", "noise_multiplier", "max_grad_norm")
        )

    def all(self) -> list[Claim]:
        return [
            self._competitive("A1", "accuracy", ("weak",)),
            self._competitive("A2", "accuracy", ("weak", "medium")),
            self._falls_faster("A3", "accuracy"),
            self._worse_when_small("A4", "accuracy"),
            self._larger_batches("A5", "accuracy", ("medium",)),
            self._collapse_later("A6"),
            self._same_dependence("A7"),
            self._competitive("N1", "nll", ("weak",)),
            self._norm_hurts("N2", "nll"),
            self._falls_faster("N3", "nll", against=("dp-sgd",)),
            self._larger_batches("N4", "nll", ("medium", "strong"), everyone=True),
            self._less_growth("N5"),
            self._best("E1", "ece", ("weak", "medium")),
            self._falls_faster("E2", "ece"),
            self._norm_hurts("E3", "ece"),
            self._rises("E4", "ece"),
            self._cost("D1"),
            self._projected("D2"),
            self._more_at_the_end("D3"),
            self._decays("D4"),
            self._uninformative("D5"),
        ]

    # ---- reading the table

    def score(self, method: str, b: int, sigma: float, c: float, measure: str) -> Value | None:
        """The measure of a cell; IVON's as asked. A diverged cell is worse than anything."""
        column = self.prefix + measure if method == IVON else measure
        found = self.cells.get(method, b, sigma, c, column)
        if found is not None and math.isnan(found.mean):
            return Value(0.0 if measure == "accuracy" else math.inf, 0.0, found.n)
        return found

    def loss(self, method: str, b: int, sigma: float, c: float, measure: str) -> float | None:
        """The measure turned so that smaller is better."""
        found = self.score(method, b, sigma, c, measure)
        return None if found is None else -found.mean if measure == "accuracy" else found.mean

    def cells_in(self, regimes: Sequence[str]) -> Iterator[tuple[int, float, float]]:
        for b in self.batches:
            for sigma in self.sigmas:
                for c in self.norms:
                    if regime(sigma) in regimes:
                        yield b, sigma, c

    def best_baseline(self, b: int, sigma: float, c: float, measure: str) -> tuple[str, float] | None:
        found = [(v, m) for m in BASELINES if (v := self.loss(m, b, sigma, c, measure)) is not None]
        return (min(found)[1], min(found)[0]) if found else None

    def _compare(
        self, regimes: Sequence[str], measure: str, holds: Callable[[float, float], bool]
    ) -> tuple[Comparison, ...]:
        """IVON against the best baseline, cell by cell."""
        out = []
        for b, sigma, c in self.cells_in(regimes):
            ours, best = self.loss(IVON, b, sigma, c, measure), self.best_baseline(b, sigma, c, measure)
            if ours is not None and best is not None:
                numbers = f"{abs(ours):.3g} against {abs(best[1]):.3g} ({TITLES[best[0]]})"
                out.append(Comparison(_cell(b, sigma, c), holds(ours, best[1]), numbers))
        return tuple(out)

    # ---- the kinds of claim

    def _competitive(self, number: str, measure: str, regimes: Sequence[str]) -> Claim:
        tolerance = CLOSE[measure]
        text = f"{measure} is at most {tolerance:g} worse than the best baseline's at {' and '.join(regimes)} privacy"
        found = self._compare(regimes, measure, lambda ours, best: ours <= best + tolerance)
        return Claim(number, text, found)

    def _best(self, number: str, measure: str, regimes: Sequence[str]) -> Claim:
        text = f"{measure} is lower than both baselines' at {' and '.join(regimes)} privacy"
        return Claim(number, text, self._compare(regimes, measure, lambda ours, best: ours < best))

    def _change(self, method: str, b: int, c: float, measure: str) -> float | None:
        """How much the loss grows from the least to the most noise."""
        ends = [self.loss(method, b, sigma, c, measure) for sigma in (self.sigmas[0], self.sigmas[-1])]
        return None if ends[0] is None or ends[1] is None else ends[1] - ends[0]

    def _falls_faster(self, number: str, measure: str, against: Sequence[str] = BASELINES) -> Claim:
        low, high = self.sigmas[0], self.sigmas[-1]
        text = (
            f"from σ = {low:g} to σ = {high:g}, {measure} worsens more, by at least {MARKED[measure]:g}, than that of "
            + (TITLES[against[0]] if len(against) == 1 else f"the baseline that is best at σ = {high:g}")
        )
        out = []
        for b in self.batches:
            for c in self.norms:
                if len(against) == 1:
                    rival: str | None = against[0]
                else:
                    best = self.best_baseline(b, high, c, measure)
                    rival = best[0] if best else None
                ours = self._change(IVON, b, c, measure)
                theirs = self._change(rival, b, c, measure) if rival else None
                if ours is not None and theirs is not None and rival is not None:
                    numbers = f"worse by {ours:.3g} against {theirs:.3g} ({TITLES[rival]})"
                    out.append(Comparison(_cell(b, None, c), ours >= theirs + MARKED[measure], numbers))
        return Claim(number, text, tuple(out))

    def _gap(self, b: int, c: float, measure: str) -> float | None:
        """How much more IVON's loss grows than the best baseline's, at the strongest privacy."""
        best = self.best_baseline(b, self.sigmas[-1], c, measure)
        ours = self._change(IVON, b, c, measure)
        theirs = self._change(best[0], b, c, measure) if best else None
        return None if ours is None or theirs is None else ours - theirs

    def _worse_when_small(self, number: str, measure: str) -> Claim:
        small, large = self.batches[0], self.batches[-1]
        text = f"what {measure} loses more than the best baseline's is larger at b = {small} than at b = {large}"
        out = []
        for c in self.norms if small != large else ():
            a, z = self._gap(small, c, measure), self._gap(large, c, measure)
            if a is not None and z is not None:
                out.append(Comparison(f"C = {c:g}", a > z, f"{a:.3g} at b = {small}, {z:.3g} at b = {large}"))
        return Claim(number, text, tuple(out))

    def _larger_batches(self, number: str, measure: str, regimes: Sequence[str], *, everyone: bool = False) -> Claim:
        """At equal σ: that is how the paper's mechanism argues, though ε differs."""
        small, large = self.batches[0], self.batches[-1]
        text = f"at equal σ, {measure} is better at b = {large} than at b = {small}, {' and '.join(regimes)} privacy"
        out = []
        for method in (*BASELINES, IVON) if everyone else (IVON,):
            for _, sigma, c in (cell for cell in self.cells_in(regimes) if cell[0] == small and small != large):
                a, z = (self.loss(method, b, sigma, c, measure) for b in (small, large))
                if a is not None and z is not None:
                    where = f"{TITLES[method]}, σ = {sigma:g}, C = {c:g}"
                    out.append(Comparison(where, z < a, f"{abs(z):.3g} against {abs(a):.3g}"))
        return Claim(number, text, tuple(out))

    def _collapse_later(self, number: str) -> Claim:
        small, large = self.batches[0], self.batches[-1]
        text = (
            f"the smallest σ of the grid with accuracy at most {CHANCE:g} is larger at b = {large} than at b = {small}"
        )
        out = []
        for c in self.norms if small != large else ():
            first = []
            for b in (small, large):
                found = [(s, self.score(IVON, b, s, c, "accuracy")) for s in self.sigmas]
                first.append(next((s for s, v in found if v is not None and v.mean <= CHANCE), math.inf))
            if first != [math.inf, math.inf]:
                words = ["never" if math.isinf(s) else f"σ = {s:g}" for s in first]
                out.append(
                    Comparison(f"C = {c:g}", first[1] > first[0], f"b = {small}: {words[0]}, b = {large}: {words[1]}")
                )
        return Claim(number, text, tuple(out))

    def _same_dependence(self, number: str) -> Claim:
        """The sign of what doubling C, or going from the smallest to the largest batch, does to accuracy."""
        text = (
            "going from the smallest to the largest b, or C, moves IVON's accuracy the way it moves DP-SGD's, and DP-Adam's, "
            "where both move by more than two standard errors"
        )
        out = []
        for rival, sigma in ((m, s) for m in BASELINES for s in self.sigmas):
            ends = [("b", [(b, c) for b in (self.batches[0], self.batches[-1])]) for c in self.norms]
            ends += [("C", [(b, c) for c in (self.norms[0], self.norms[-1])]) for b in self.batches]
            for name, ((b0, c0), (b1, c1)) in ends:
                moves = []
                for method in (IVON, rival):
                    a, z = self.score(method, b0, sigma, c0, "accuracy"), self.score(method, b1, sigma, c1, "accuracy")
                    if a is not None and z is not None and (b0, c0) != (b1, c1):
                        known = min(a.n, z.n) > 1  # one run does not tell how far seeds are apart
                        moves.append((z.mean - a.mean, 2 * math.hypot(a.error, z.error) if known else math.inf))
                if len(moves) < 2 or any(abs(move) <= noise for move, noise in moves):
                    continue  # one of them does not move beyond its seeds: there is no sign to compare
                numbers = f"{moves[0][0]:+.3f} against {moves[1][0]:+.3f} ({TITLES[rival]})"
                fixed = f"C = {c0:g}" if name == "b" else f"b = {b0}"
                out.append(Comparison(f"{name}, σ = {sigma:g}, {fixed}", moves[0][0] * moves[1][0] > 0, numbers))
        return Claim(number, text, tuple(out))

    def _norm_hurts(self, number: str, measure: str) -> Claim:
        small_b, low_c, high_c = self.batches[0], self.norms[0], self.norms[-1]
        large_b = self.batches[-1]
        text = (
            f"at b = {small_b} and strong privacy, {measure} is worse at C = {high_c:g} than at C = {low_c:g}; and from the "
            f"least to the most noise it worsens more at b = {small_b} than at b = {large_b}"
        )
        out = []
        for sigma in self.sigmas:
            if regime(sigma) != "strong" or low_c == high_c:
                continue
            a, z = (self.loss(IVON, small_b, sigma, c, measure) for c in (low_c, high_c))
            if a is not None and z is not None:
                out.append(Comparison(f"b = {small_b}, σ = {sigma:g}, C", z > a, f"{z:.3g} against {a:.3g}"))
        return Claim(number, text, (*out, *self._worsens_more(small_b, measure)))

    def _worsens_more(self, b: int, measure: str) -> Iterator[Comparison]:
        """IVON's growth from the least to the most noise, at this b against the largest."""
        large = self.batches[-1]
        for c in self.norms if b != large else ():
            a, z = self._change(IVON, b, c, measure), self._change(IVON, large, c, measure)
            if a is not None and z is not None:
                yield Comparison(_cell(b, None, c), a > z, f"worse by {a:.3g} against {z:.3g} (b = {large})")

    def _less_growth(self, number: str) -> Claim:
        small, large = self.batches[0], self.batches[-1]
        text = (
            f"the growth of IVON's nll from the least to the most noise at b = {large} is at most half of b = {small}'s"
        )
        out = []
        for c in self.norms if small != large else ():
            a, z = self._change(IVON, small, c, "nll"), self._change(IVON, large, c, "nll")
            if a is not None and z is not None:
                out.append(Comparison(f"C = {c:g}", z <= a / 2, f"{z:.3g} against {a:.3g}"))
        return Claim(number, text, tuple(out))

    def _rises(self, number: str, measure: str) -> Claim:
        text = (
            f"at b below the largest, {measure} at the most noise is at least {MARKED[measure]:g} above that at the least; and "
            f"it rises more there than at b = {self.batches[-1]}"
        )
        out: list[Comparison] = []
        for b in self.batches[:-1]:
            for c in self.norms:
                change = self._change(IVON, b, c, measure)
                if change is not None:
                    out.append(Comparison(_cell(b, None, c), change >= MARKED[measure], f"{change:+.3g}"))
            out += self._worsens_more(b, measure)
        return Claim(number, text, tuple(out))

    def _cost(self, number: str) -> Claim:
        """Only where a run was alone, or its stack held one method: in a mixed stack no method's time is known."""
        text = "a run takes at most a tenth more time than DP-Adam's, alone or in stacks of one method and equal size"
        times: dict[tuple[int, int, str, str], dict[str, list[float]]] = {}
        for loop, rows in (("", self.rows), (", in the ordinary loop", self.timed)):
            for row in rows:
                if row["stack_methods"] == 1:  # on other hardware, or in another loop, a step takes another time
                    same = times.setdefault((row["batch_size"], row["stack_size"], row["hardware"], loop), {})
                    same.setdefault(row["method"], []).append(row["seconds"] / row["steps"])
        out = []
        for (b, size, hardware, loop), by in sorted(times.items()):
            if IVON in by and "dp-adam" in by:
                ours, theirs = (sum(by[m]) / len(by[m]) for m in (IVON, "dp-adam"))
                alike = [at for at in times if at[:2] == (b, size)]  # what tells this one from those is said
                told = [at for k, at in ((2, f", {hardware}"), (3, loop)) if len({a[k] for a in alike}) > 1]
                where = f"b = {b}, {'one by one' if size == 1 else f'stacks of {size}'}{''.join(told)}"
                numbers = f"{1e3 * ours:.3g} against {1e3 * theirs:.3g} ms a step"
                out.append(Comparison(where, ours <= 1.1 * theirs, numbers))
        return Claim(number, text, tuple(out))

    def _projected(self, number: str) -> Claim:
        text = (
            f"at strong privacy at least half of ĥ is zero at the end (a weak bar: pure noise gives {NOISE_ONLY:.3f})"
        )
        return Claim(number, text, self._ends("projected_share", ("strong",), lambda x: x >= 0.5))

    def _more_at_the_end(self, number: str) -> Claim:
        text = "the share of ĥ that is zero is larger by .01 at the end of training than in its first epoch"
        return Claim(number, text, self._trend("projected_share", lambda first, last: last >= first + 0.01))

    def _decays(self, number: str) -> Claim:
        text = "at strong privacy the median of h is lower at the end than at the beginning"
        strong = self._trend("h_median", lambda first, last: last < first, regimes=("strong",), opening=True)
        return Claim(number, text, strong)

    def _uninformative(self, number: str) -> Claim:
        text = "at strong privacy 90 % of the weights have a standard deviation within a factor 2 of each other"
        out = []
        for b, sigma, c in self.cells_in(("strong",)):
            low, high = (self.cells.get(IVON, b, sigma, c, k) for k in ("std_q05", "std_q95"))
            if low is not None and high is not None and low.mean > 0:
                ratio = high.mean / low.mean
                out.append(Comparison(_cell(b, sigma, c), ratio <= 2, f"factor {ratio:.2f}"))
        return Claim(number, text, tuple(out))

    def _ends(self, column: str, regimes: Sequence[str], holds: Callable[[float], bool]) -> tuple[Comparison, ...]:
        out = []
        for b, sigma, c in self.cells_in(regimes):
            found = self.cells.get(IVON, b, sigma, c, column)
            if found is not None:
                out.append(Comparison(_cell(b, sigma, c), holds(found.mean), f"{found.mean:.3f}"))
        return tuple(out)

    def _trend(
        self,
        column: str,
        holds: Callable[[float, float], bool],
        *,
        regimes: Sequence[str] = ("weak", "medium", "strong"),
        opening: bool = False,
    ) -> tuple[Comparison, ...]:
        """The first epoch's mean (or the very first value) against the last value, cell by cell."""
        by_id = {row["id"]: row for row in self.rows if row["method"] == IVON}
        runs: dict[str, list[Row]] = {}
        for d in self.diagnostics:
            if d["id"] in by_id and d[column] is not None:
                runs.setdefault(d["id"], []).append(d)
        cells: dict[tuple[int, float, float], list[tuple[float, float]]] = {}
        for name, points in runs.items():
            points.sort(key=lambda d: d["step"])
            early = points[:1] if opening else [d for d in points if d["epoch"] <= 1.0] or points[:1]
            first = sum(d[column] for d in early) / len(early)
            row = by_id[name]
            key = (row["batch_size"], row["noise_multiplier"], row["max_grad_norm"])
            cells.setdefault(key, []).append((first, points[-1][column]))
        out = []
        for b, sigma, c in self.cells_in(regimes):
            if pairs := cells.get((b, sigma, c)):
                first, last = (sum(p[k] for p in pairs) / len(pairs) for k in (0, 1))
                out.append(Comparison(_cell(b, sigma, c), holds(first, last), f"{first:.3g} → {last:.3g}"))
        return tuple(out)


def _cell(b: int, sigma: float | None, c: float) -> str:
    return f"b = {b}, C = {c:g}" if sigma is None else f"b = {b}, σ = {sigma:g}, C = {c:g}"
