"""One stack of a study, from its checkpoint to its rows, wherever it is run."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dpivon._version import __version__
from dpivon.durable.ledger import Record, Terms, read
from dpivon.errors import ArgumentError, bad
from dpivon.privacy.accounting import Accountant
from dpivon.privacy.accounting.recorded import LEDGER, replay
from dpivon.privacy.temperature import for_temperature, temperature_releases
from dpivon.stacked import Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.stacked.run import defaults_of
from dpivon.study.plan.data import StudyData, build_network
from dpivon.study.plan.plan import Plan, PlannedRun, changed, first_seed, steps_of
from dpivon.study.results import table
from dpivon.study.results.folder import Note, open_stack
from dpivon.study.results.table import CELL, QUANTILES, code, commit
from dpivon.study.run.evaluation import Keep, StackEvaluation
from dpivon.study.run.progress import Left
from dpivon.study.run.settings import PRECISIONS, Settings

_AT = (0.05, 0.5, 0.95)


def points(steps: int, number: int = 50) -> list[int]:
    """About so many steps from the first to the last, evenly spaced in their logarithm."""
    exponents = (math.log(steps) * k / (number - 1) for k in range(number))
    return sorted({min(steps, max(1, round(math.exp(e)))) for e in exponents})


class Watch:
    """What the paper's discussion conjectures about, read off a stack before and after one step.

    Only released values are read. A stack does not keep g_dp, but the momentum before and after a step gives it back,
    s′ = β₁ s + (1 − β₁) g_dp: a share of targets projected to zero costs no look behind the boundary.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._before: list[tuple[Tensor, Tensor]] = []

    @property
    def useful(self) -> bool:
        return any(True for _ in self._parts())

    def before(self) -> None:
        self._before = [(part.state["momentum"].clone(), part.hyper["noise_variance"]) for part in self._parts()]

    def after(self) -> list[dict[str, Any]]:
        """One row per run that has a posterior: ``run`` in the caller's numbering, the share and the quantiles."""
        out, widths = [], self.stack.std
        for part, (before, variance) in zip(self._parts(), self._before, strict=True):
            beta1 = part.hyper["beta1"]
            g = (part.state["momentum"] - beta1 * before) / (1.0 - beta1)
            share = (g.square() < variance).double().mean(1)
            at = torch.tensor(_AT, device=g.device)
            for j, row in enumerate(range(part.rows.start, part.rows.stop)):
                h, width = _quantiles(part.state["hess"][j], at), _quantiles(widths[row], at)
                found = dict(zip((f"h_{q}" for q in QUANTILES), h.tolist(), strict=True))
                found |= dict(zip((f"std_{q}" for q in QUANTILES), width.tolist(), strict=True))
                out.append({"run": self.stack.order[row], "projected_share": float(share[j])} | found)
        return out

    def _parts(self) -> Iterator[Any]:
        for part in self.stack.parts:
            if {"momentum", "hess"} <= part.state.keys() and {"beta1", "ess"} <= part.hyper.keys():
                yield part


def _quantiles(values: Tensor, at: Tensor) -> Tensor:
    """Of finite or infinite values; NaN counts as the largest."""
    ordered = values.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).sort().values
    return ordered[((len(ordered) - 1) * at).round().long()]


class Shown(Protocol):
    """Where a stack says how far it is: :class:`~dpivon.study.run.progress.Progress`, or what stands for it elsewhere."""

    def skip(self, examples: float) -> None: ...

    def advance(self, examples: float, where: Callable[[], str]) -> None: ...

    def evaluating(self, left: Left, where: Callable[[], str]) -> None: ...

    def say(self, line: str) -> None: ...


class Custody:
    """Who else keeps what a stack must not lose. Here nothing: its folder is enough."""

    def ahead(self, terms: Terms, upto: int) -> None:
        """Called before the releases up to number ``upto`` are made; they may be made when it returns."""

    def saved(self, checkpoint: Path, charged: int) -> None:
        """Called when a checkpoint is on disk, and no more than ``charged`` releases were made."""


class Work:
    """One stack. ``folder`` keeps its ledger and its checkpoints; where they are, it goes on. ``known`` are the runs that have
    their rows, with the releases of training before them: where that is all there were, a row holds."""

    def __init__(
        self,
        plan: Plan,
        runs: Sequence[PlannedRun],
        folder: Path,
        data: StudyData,
        settings: Settings,
        device: torch.device,
        progress: Shown,
        title: str,
        custody: Custody | None = None,
        known: Mapping[str, int] | None = None,
    ) -> None:
        self.plan, self.runs, self.folder, self.data = plan, list(runs), folder, data
        self.settings, self.device, self.progress, self.title = settings, device, progress, title
        self.custody, self.known = custody or Custody(), known or {}
        self.note = Note(folder).write
        self.evaluated = 0  # runs, here
        self.precision = settings.precision or ("bfloat16" if device.type == "cuda" else "float32")
        if self.precision not in PRECISIONS:
            raise bad("precision", self.precision, "is not known", f"Use one of {', '.join(PRECISIONS)}")
        self.total = steps_of(runs[0], plan.epochs, data.size)
        network = build_network(plan, data)
        self.stack = Stack(
            [plan.stacked(run) for run in runs],
            network,
            data.images,
            data.labels,
            start=torch.stack([network.initial(first_seed(plan, run)) for run in runs]),
            dtype=PRECISIONS[self.precision],
            block=settings.block,
            steps=self.total,
            augment=plan.augment,
            accountant="rdp",
        )
        if plan.network == "paper" and plan.augment is not None and device.type == "cuda":
            progress.say(f"{title}: the paper's network without its kernels, which make no views")
        open_stack(folder, runs)
        self.kept = StackCheckpoints(self.stack, folder, [run.id for run in runs])
        extra = self.kept.restore()
        self.seconds = float(extra.get("seconds", 0.0))
        self.diagnostics: list[dict[str, Any]] = extra.get("diagnostics", [])
        self.watch = Watch(self.stack)
        self._blocks = 1  # the first interval is short; then its length follows the clock
        self._advanced = self._restored = self.stack.steps_done
        progress.skip(self._advanced * sum(run.batch_size for run in runs))

    def train(self, stop: Callable[[], bool]) -> bool:
        """Go on to the end, or to the block at which ``stop`` says so; True when the end is reached."""
        probes = [p for p in points(self.total) if p > self.stack.steps_done] if self.watch.useful else []
        while self.stack.steps_done < self.total:
            began, first = time.monotonic(), self.stack.steps_done
            end = min(self.total, first + self._blocks * self.stack.block)
            self.custody.ahead(self.stack.mechanism.terms, self.stack.mechanism.charged + end - first)
            self.stack.mechanism.write_ahead(end - first)  # on disk before any of it is made
            halted = False
            while self.stack.steps_done < end and not halted:
                at = self.stack.steps_done
                if probes and probes[0] == at + 1:
                    self._probe(probes.pop(0))
                    continue
                target = min(end, probes[0] - 1) if probes else end
                for _ in self.stack.train(target - at):
                    self._advance(self.stack.steps_done)
                    if stop():
                        halted = True
                        break
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            took = time.monotonic() - began
            self.seconds += took
            self.save()
            if halted or stop():
                return self.stack.steps_done >= self.total
            done = self.stack.steps_done - first
            wanted = self.settings.checkpoint_seconds / max(took / done, 1e-9) / self.stack.block
            self._blocks = max(1, min(round(wanted), 4 * self._blocks))
        return True

    @property
    def got_on(self) -> bool:
        """Whether steps were made here, or runs evaluated. Who did neither may not stop yet: else it never would get on."""
        return self.stack.steps_done > self._restored or self.evaluated > 0

    def save(self) -> None:
        extra = {"seconds": self.seconds, "diagnostics": self.diagnostics}
        checkpoint = self.kept.save(extra)
        self.kept.settle()  # after the checkpoint: a crash in between charges more, not less
        self.custody.saved(checkpoint, self.stack.mechanism.charged)
        self.note(f"training, {self.stack.steps_done:,} of {self.total:,} steps are saved")

    def evaluate(self, keep: Keep, stop: Callable[[], bool] = lambda: False) -> bool:
        """Hand every run that lacks its row to ``keep``, a group at a time; True when none is left, False where ``stop`` said
        so between two runs. Nothing is lost but a group: the stack was saved when it was trained."""
        left = [i for i, run in enumerate(self.runs) if self.known.get(run.id) != self.releases]
        try:
            return not left or StackEvaluation(self, left).evaluate(keep, stop)
        except torch.OutOfMemoryError:  # no reason to train again
            raise ArgumentError(
                f"{self.folder}: the evaluation does not fit on the GPU beside its stack, which is trained and kept there. "
                "Give the same command when more of the GPU is free."
            ) from None

    @property
    def releases(self) -> int:
        """Of training, charged to every run: temperatures come on top."""
        return self.stack.mechanism.charged - temperature_releases(self.kept.ledger.record)

    def epsilon(self, i: int) -> float:
        """What training run i cost."""
        record, account = self.kept.ledger.record, Accountant("rdp")
        training = Record(record.id, [row for row in record.rows if not for_temperature(row[0])])
        replay(training, self.stack._row(i), account)
        return account.get_epsilon(self.plan.delta)

    def posterior(self, i: int) -> bytes:
        path = self.folder / "posterior.safetensors"
        self.stack.posterior(i, averaged=self.plan.stacked(self.runs[i]).averaged).save(path)
        return path.read_bytes()

    def facts(self, i: int) -> dict[str, Any]:
        return facts(self.plan, self.runs[i], self.data.size, self.device) | {
            "epsilon": self.epsilon(i),
            "steps": self.stack.steps_done,
            "releases": self.releases,
            "seconds": self.seconds / len(self.runs),
            "stack_size": len(self.runs),
            "stack_methods": len({r.method for r in self.runs}),
            "precision": self.precision,
            "settings": self.stack.mechanism.specs[self.stack._row(i)].digest,
        }

    def last_diagnostics(self, run: str) -> dict[str, Any]:
        """Of those that the table of runs has a column for."""
        last: dict[str, Any] = next((d for d in reversed(self.diagnostics) if d["id"] == run), {})
        return {k: v for k, v in last.items() if k in table.COLUMNS and k != "id"}

    def _probe(self, step: int) -> None:
        self.watch.before()
        for _ in self.stack.train(1):
            self._advance(self.stack.steps_done)
        epoch = step * self.runs[0].batch_size / self.data.size
        for row in self.watch.after():
            self.diagnostics.append({"id": self.runs[row.pop("run")].id, "step": step, "epoch": epoch} | row)

    def _advance(self, steps: int) -> None:
        examples = (steps - self._advanced) * sum(run.batch_size for run in self.runs)
        self._advanced = steps
        self.progress.advance(examples, lambda: f"{self.title} · {steps:,}/{self.total:,} steps · {self._live()}")

    def _live(self) -> str:
        """ε so far, from the least to the most private run of the stack."""
        order = sorted(range(len(self.runs)), key=lambda i: self.runs[i].noise_multiplier)
        low, high = (self.stack.epsilon(i, self.plan.delta) for i in (order[-1], order[0]))
        return f"ε {low:.3g}" if low == high else f"ε {low:.3g} … {high:.3g}"


def facts(plan: Plan, run: PlannedRun, examples: int, device: torch.device) -> dict[str, Any]:
    """What a row says before anything has run."""
    row: dict[str, Any] = {k: getattr(run, k) for k in ("id", "method", *CELL, "seed", "lr")}
    row |= {k: getattr(plan, k) for k in ("epochs", "delta", "dataset", "split")}
    return row | {
        "options": changed(run.options),
        "defaults": changed({k: v for k, v in defaults_of(run.method).items() if k not in run.options}),
        "train_size": examples,
        "network": " ".join(filter(None, (plan.network, changed(plan.arguments)))),
        "augment": changed(asdict(plan.augment)) if plan.augment else "",
        "hardware": hardware(device),
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
        "code": code(),
    }


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


@contextmanager
def fitting(runs: Sequence[PlannedRun], folder: Path) -> Iterator[None]:
    """A stack that is too large for the GPU says so, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ArgumentError(
            f"{len(runs)} runs of b={runs[0].batch_size} do not fit on the GPU at once. "
            f"Delete {folder}, which keeps them together (and at most {read(folder / LEDGER).releases} releases "
            "of each, which you then must count yourself), and give a smaller --stack."
        ) from None


def clear(device: torch.device) -> None:
    """A stack holds tens of gigabytes of a GPU, and compiled code may keep hold of it: the next begins afresh."""
    if device.type == "cuda":
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
