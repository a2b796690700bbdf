"""The evaluation of a trained stack: run after run, and handed over in groups, so that a kill repeats one group at most.

A group is what is evaluated in about ``checkpoint_seconds``, by default a minute: how much work a crash may lose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dpivon.study.plan.plan import sample_seed
from dpivon.study.results import table
from dpivon.study.results.folder import Results
from dpivon.study.run.predict import (
    EagerPasses,
    Passes,
    chosen,
    draw_rows,
    eager_will_do,
    posterior_row,
    predict_row,
    scores,
)
from dpivon.study.run.progress import Left, Pace
from dpivon.study.run.robustness import robustness_rows
from dpivon.study.run.temperature_queries import RunPredictions, TemperatureQueries, tempered_scores

if TYPE_CHECKING:
    from dpivon.study.run.work import Work

Keep = Callable[[Results], None]


@dataclass
class _Group:
    """Runs that are evaluated and not handed over yet."""

    began: float
    places: list[int] = field(default_factory=list)
    rows: list[table.Row] = field(default_factory=list)
    robustness: list[table.Row] = field(default_factory=list)
    predictions: dict[str, RunPredictions] = field(default_factory=dict)


class StackEvaluation:
    """``places`` are the runs of the stack to evaluate. What a run's row says does not depend on its group."""

    def __init__(self, work: Work, places: Sequence[int]) -> None:
        self.work, self.places = work, list(places)
        plan, data = work.plan, work.data
        self.sets = [data.eval_images, *([data.images] if plan.temperature_noise else [])]
        each = sum(map(len, [*self.sets, *(condition.images for condition in work.conditions)]))
        self.wide = (work.stack.std > 0).any(1).tolist()
        rows = [1 + plan.mc_samples * wide for wide in self.wide]
        self.passes = [each * rows[work.stack._row(i)] for i in range(len(work.runs))]  # of every run of the stack
        self.pace = Pace()
        self.queries = TemperatureQueries(work.folder, work.stack.mechanism, plan.temperature_noise, work.custody.ahead)

    def evaluate(self, keep: Keep, stop: Callable[[], bool]) -> bool:
        """Hand every group to ``keep``, until ``stop`` says so between two runs; True when all are evaluated."""
        way = self._way()
        self.work.progress.say(f"{self.work.title}: evaluating with {way.name}")
        self._tell(0)
        group, stopped = _Group(time.monotonic()), False
        for done, i in enumerate(self.places):
            if stopped := stop():
                break
            began = time.monotonic()
            self._evaluate_run(i, way, group)
            self.pace.add(self.passes[i], time.monotonic() - began)
            self._tell(done + 1)
            if time.monotonic() - group.began >= self.work.settings.checkpoint_seconds:
                self._hand_over(group, keep)
                group = _Group(time.monotonic())
        self._hand_over(group, keep)
        return not stopped

    def _evaluate_run(self, i: int, way: Passes, group: _Group) -> None:
        work, run = self.work, self.work.runs[i]
        draws = {"samples": work.plan.mc_samples, "seed": sample_seed(work.plan, run)}
        mean, std = posterior_row(work.stack, i)
        found = predict_row(work.stack.network, mean, std, self.sets, passes=way, **draws)
        row = scores(found, work.data.eval_labels)
        if work.plan.temperature_noise:
            test, training = (each.probs for each in found.get("average", found["mean"]))
            group.predictions[run.id] = RunPredictions(test, training, work.stack.runs[work.stack._row(i)].seed)
        if work.plan.evaluate is not None:
            group.robustness += robustness_rows(
                work.stack, i, run.id, work.conditions, work.plan.evaluate, passes=way, **draws
            )
        work.evaluated += 1
        group.places.append(i)
        group.rows.append(work.facts(i) | work.last_diagnostics(run.id) | row)

    def _hand_over(self, group: _Group, keep: Keep) -> None:
        work = self.work
        if not group.rows:
            return
        if group.predictions:  # last, since it is a release: what was scored before cost what it says
            work.progress.say(f"{work.title}: choosing {len(group.predictions)} temperatures")
            noise = work.plan.temperature_noise
            found = tempered_scores(self.queries, work.data, group.predictions, noise_multiplier=noise)
            for i, row in zip(group.places, group.rows, strict=True):
                row |= found[row["id"]] | {"epsilon_tempered": work.stack.epsilon(i, work.plan.delta)}
        ids = {row["id"] for row in group.rows}
        diagnostics = [d for d in work.diagnostics if d["id"] in ids]
        posteriors = {work.runs[i].id: work.posterior(i) for i in group.places} if work.settings.keep else {}
        keep(Results(group.rows, diagnostics, group.robustness, posteriors))

    def _way(self) -> Passes:
        """How to make the forward passes: tried on a run that is finite and has width, if there is one. It is chosen for the
        whole stack, whatever is left of it, so that an interrupted evaluation goes on as it began."""
        stack, device = self.work.stack, self.work.device
        if eager_will_do(device, sum(self.passes)):
            return EagerPasses(stack.network, device)
        mean, std = stack.average, stack.std
        finite = (torch.isfinite(mean) & torch.isfinite(std)).all(1).tolist()
        best = max(range(len(mean)), key=lambda i: (finite[i], self.wide[i]))
        rows = draw_rows(mean[best], std[best], samples=self.work.plan.mc_samples, seed=0)
        return chosen(stack.network, rows, self.work.data.eval_images, self.work.progress.say)

    def _tell(self, done: int) -> None:
        """How far it is, of all runs of the stack."""
        work, total = self.work, len(self.work.runs)
        left = Left(sum(self.passes[i] for i in self.places[done:]), len(self.places) - done, self.pace)
        number = min(total, total - left.runs + 1)
        words = f"evaluating run {number} of {total}"
        work.progress.evaluating(left, lambda: f"{work.title} · {words}")
        work.note(words + left.words)
