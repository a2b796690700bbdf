"""Run a plan: stacks of runs one after the other, each continued from its checkpoint, none repeated.

OUT/study.json           the plan that the results belong to
OUT/runs.csv             a row a finished run (tuning.csv for tuning)
OUT/diagnostics.csv      IVON's curvature over training
OUT/stacks/NAME/         of stacks under way: their runs, ledger and checkpoints; gone when they are done
OUT/ledgers/ID/          of finished ones: the ledger, and the ids of its runs in order
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpivon._version import __version__
from dpivon.durable.files import Lock, replace
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError, bad, check_number, check_whole
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.stacked import Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.study import table
from dpivon.study.datasets import StudyData, build_network, load_data
from dpivon.study.evaluate import scores, tempered_scores
from dpivon.study.plan import Plan, PlannedRun, changed, read_plan, sample_seed, steps_of
from dpivon.study.progress import Progress
from dpivon.study.watch import Watch, points

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """How to run, none of which changes what is run.

    Attributes:
        device: "cuda", "cpu", or None for what there is.
        stack: runs to train at once; by default 90 on a GPU and 1 elsewhere.
        precision: "float32" or "bfloat16"; by default the latter on a GPU. Norms and sums are in fp32 and fp64 always.
        minutes: stop at a checkpoint when so much time has passed.
        checkpoint_seconds: about how much work a crash may lose, and how many releases it charges again.
        block: steps that a stack draws and charges at once.
        keep: save the posterior of every finished run under OUT/posteriors.
        only: run only what has this in its id, such as "-b512-": several machines can share a plan.
    """

    data: Path = Path("data")
    device: str | None = None
    stack: int | None = None
    precision: str | None = None
    minutes: float | None = None
    checkpoint_seconds: float = 60.0
    block: int = 32
    keep: bool = False
    quiet: bool = False
    only: str = ""


@dataclass(frozen=True)
class Outcome:
    """How many of the plan's runs are finished, and which signal stopped the others."""

    finished: int
    planned: int
    signal: int = 0

    @property
    def exit_code(self) -> int:
        """128 + the signal; otherwise 75 (EX_TEMPFAIL: run it again to go on) or 0."""
        if self.finished == self.planned:
            return 0
        return 128 + self.signal if self.signal else 75


def run_study(plan: Plan, out: Path, settings: Settings) -> Outcome:
    """Run what is not finished yet. SIGINT or SIGTERM stop at the next block, with a checkpoint."""
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if settings.stack is not None:
        check_whole("stack", settings.stack, "Give the number of runs to train at once", at_least=1)
    if settings.minutes is not None:
        check_number("minutes", settings.minutes, "Give the time after which to stop", above=0.0)
    out.mkdir(parents=True, exist_ok=True)
    with alone(out), _stop_signals() as stopped:
        deadline = time.monotonic() + 60 * settings.minutes if settings.minutes else float("inf")
        claim(out, plan)
        if len(finished(out, plan)) == len(plan.runs):
            return Outcome(len(plan.runs), len(plan.runs))
        data = load_data(plan, settings.data, device)
        size = settings.stack or (90 if device.type == "cuda" else 1)
        stacks = group(plan, out, size, settings.only)
        wanted = [r for r in plan.runs if settings.only in r.id]
        total = float(sum(steps_of(r, plan.epochs, data.size) * r.batch_size for r in wanted))
        left = float(sum(steps_of(r, plan.epochs, data.size) * r.batch_size for _, runs in stacks for r in runs))

        def stop() -> bool:
            return bool(stopped()) or time.monotonic() > deadline

        with Progress(total, total - left, quiet=settings.quiet) as progress:
            for number, (folder, runs) in enumerate(stacks, 1):
                if number > 1 and stop():  # the first makes at least one block: every call gets on
                    break
                title = f"{plan.name} {number}/{len(stacks)}: {len(runs)}×b{runs[0].batch_size}"
                try:
                    work = _Work(plan, runs, folder, out, data, settings, device, progress, title)
                    with closing(work.kept):
                        if not work.train(stop):
                            break
                        work.finish()
                except torch.OutOfMemoryError:
                    raise DpivonError(
                        f"{len(runs)} runs of b={runs[0].batch_size} do not fit on the GPU at once. "
                        f"Delete {folder}, which keeps them together (and at most {read(folder / LEDGER).releases} releases "
                        "of each, which you then must count yourself), and give a smaller --stack."
                    ) from None
                del work
                _clear(device)
    return Outcome(len(finished(out, plan)), len(plan.runs), stopped())


def finished(out: Path, plan: Plan) -> set[str]:
    """Ids of the plan's runs that have their row."""
    return {row["id"] for row in table.read(out / plan.table)} & {run.id for run in plan.runs}


def claim(out: Path, plan: Plan) -> None:
    """Results of two plans never meet in one folder."""
    path = out / "study.json"
    if not path.exists():
        plan.write(path)
    elif read_plan(path).digest != plan.digest:
        raise bad("out", str(out), "holds the results of another plan", "Give another folder, or remove this one")


def group(plan: Plan, out: Path, size: int, only: str = "") -> list[tuple[Path, list[PlannedRun]]]:
    """Stacks to run: those under way as they were begun, then what is left, in stacks of equal batch size,
    the largest first, which take the fewest steps."""
    done = finished(out, plan)
    known = {run.id: run for run in plan.runs}
    waiting = {i: run for i, run in known.items() if i not in done}
    stacks: list[tuple[Path, list[PlannedRun]]] = []
    folders = out / "stacks"
    for folder in sorted(folders.iterdir()) if folders.exists() else ():
        ids = json.loads((folder / "runs.json").read_text()) if (folder / "runs.json").exists() else []
        if any(
            i in waiting for i in ids
        ):  # whatever is asked for now, and even if others of its runs came in from elsewhere: their charges are one
            stacks.append((folder, [known[i] for i in ids]))
            waiting = {i: run for i, run in waiting.items() if i not in ids}
        else:
            retire(folder, out)  # its rows are in the table: it was killed between writing them and clearing up
    by_batch: dict[int, list[PlannedRun]] = {}
    for run in (run for run in waiting.values() if only in run.id):
        by_batch.setdefault(run.batch_size, []).append(run)
    taken = {int(folder.name) for folder, _ in stacks}
    for batch_size in sorted(by_batch, reverse=True):
        runs = by_batch[batch_size]
        for start in range(0, len(runs), size):
            number = next(n for n in range(len(plan.runs) + len(taken) + 1) if n not in taken)
            taken.add(number)
            stacks.append((folders / f"{number:04}", runs[start : start + size]))
    return stacks


def retire(folder: Path, out: Path) -> None:
    """A stack is finished: its ledger, which says what its ε came from, is kept; the rest goes."""
    if (folder / LEDGER).exists():
        kept = out / "ledgers" / read(folder / LEDGER).id
        kept.mkdir(parents=True, exist_ok=True)
        if (folder / "runs.json").exists():
            shutil.copy(folder / "runs.json", kept / "runs.json")
        os.replace(folder / LEDGER, kept / LEDGER)
    shutil.rmtree(folder)


class _Work:
    """One stack, from its checkpoint to its rows."""

    def __init__(
        self,
        plan: Plan,
        runs: Sequence[PlannedRun],
        folder: Path,
        out: Path,
        data: StudyData,
        settings: Settings,
        device: torch.device,
        progress: Progress,
        title: str,
    ) -> None:
        self.plan, self.runs, self.folder, self.out, self.data = plan, list(runs), folder, out, data
        self.settings, self.device, self.progress, self.title = settings, device, progress, title
        default = "bfloat16" if device.type == "cuda" else "float32"
        self.precision = settings.precision or default
        if self.precision not in PRECISIONS:
            raise bad("precision", self.precision, "is not known", f"Use one of {', '.join(PRECISIONS)}")
        self.total = steps_of(runs[0], plan.epochs, data.size)
        self.stack = Stack(
            [plan.stacked(run) for run in runs],
            build_network(plan, data),
            data.images,
            data.labels,
            dtype=PRECISIONS[self.precision],
            block=settings.block,
            steps=self.total,
        )
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "runs.json", json.dumps([run.id for run in runs]).encode())
        self.kept = StackCheckpoints(self.stack, folder)
        extra = self.kept.restore()
        self.seconds = float(extra.get("seconds", 0.0))
        self.diagnostics: list[dict[str, Any]] = extra.get("diagnostics", [])
        self.watch = Watch(self.stack)
        self._blocks = 1  # the first interval is short; then its length follows the clock
        self._advanced = self.stack.steps_done
        progress.skip(self._advanced * sum(run.batch_size for run in runs))

    def train(self, stop: Callable[[], bool]) -> bool:
        """Go on to the end, or to the block at which ``stop`` says so; True when the end is reached."""
        probes = [p for p in points(self.total) if p > self.stack.steps_done] if self.watch.useful else []
        while self.stack.steps_done < self.total:
            began, first = time.monotonic(), self.stack.steps_done
            end = min(self.total, first + self._blocks * self.stack.block)
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
            self._synchronize()
            took = time.monotonic() - began
            self.seconds += took
            self.save()
            if halted or stop():
                return self.stack.steps_done >= self.total
            done = self.stack.steps_done - first
            wanted = self.settings.checkpoint_seconds / max(took / done, 1e-9) / self.stack.block
            self._blocks = max(1, min(round(wanted), 4 * self._blocks))
        return True

    def save(self) -> None:
        extra = {"seconds": self.seconds, "diagnostics": self.diagnostics}
        self.kept.save(extra)
        self.kept.settle()  # after the checkpoint: a crash in between charges more, not less

    def finish(self) -> None:
        """Evaluate, write the rows, and forget the checkpoint."""
        self.progress.say(f"{self.title}: evaluating")
        last = {d["id"]: d for d in self.diagnostics}
        rows = []
        for i, run in enumerate(self.runs):
            found = scores(
                self.stack,
                i,
                self.data.eval_images,
                self.data.eval_labels,
                samples=self.plan.mc_samples,
                seed=sample_seed(self.plan, run),
            )
            seen = {k: v for k, v in last.get(run.id, {}).items() if k in table.COLUMNS}
            rows.append(self._facts(i, run) | seen | found)
            if self.settings.keep:
                target = self.out / "posteriors" / f"{run.id}.safetensors"
                target.parent.mkdir(exist_ok=True)
                self.stack.posterior(i).save(target)
        if self.plan.temperature_noise:
            self._temper(rows)
        table.add(self.out / "diagnostics.csv", self.diagnostics, table.DIAGNOSTIC_COLUMNS)
        table.add(self.out / self.plan.table, rows)
        self.kept.close()
        retire(self.folder, self.out)

    def _temper(self, rows: list[dict[str, Any]]) -> None:
        """Last, since it is a release: what was scored before cost what it says."""
        self.progress.say(f"{self.title}: choosing temperatures")
        found = tempered_scores(
            self.stack,
            self.data,
            noise_multiplier=self.plan.temperature_noise,
            samples=self.plan.mc_samples,
            seeds=[sample_seed(self.plan, run) for run in self.runs],
        )
        for i, (row, scored) in enumerate(zip(rows, found, strict=True)):
            row.update(scored | {"epsilon_tempered": self.stack.epsilon(i, self.plan.delta)})

    def _facts(self, i: int, run: PlannedRun) -> dict[str, Any]:
        return facts(self.plan, run, self.data.size, self.device) | {
            "epsilon": self.stack.epsilon(i, self.plan.delta),
            "steps": self.stack.steps_done,
            "releases": self.stack.mechanism.charged,
            "seconds": self.seconds / len(self.runs),
            "stack_size": len(self.runs),
            "stack_methods": len({r.method for r in self.runs}),
            "precision": self.precision,
        }

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

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def facts(plan: Plan, run: PlannedRun, examples: int, device: torch.device) -> dict[str, Any]:
    """What a row says before anything has run."""
    return {
        "id": run.id,
        "method": run.method,
        "batch_size": run.batch_size,
        "noise_multiplier": run.noise_multiplier,
        "max_grad_norm": run.max_grad_norm,
        "seed": run.seed,
        "lr": run.lr,
        "options": changed(run.options),
        "epochs": plan.epochs,
        "delta": plan.delta,
        "train_size": examples,
        "dataset": plan.dataset,
        "network": plan.network,
        "split": plan.split,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "version": __version__,
    }


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _clear(device: torch.device) -> None:
    """A stack holds tens of gigabytes of a GPU, and compiled code may keep hold of it: the next begins afresh."""
    if device.type == "cuda":
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Two processes on one folder would repeat each other's runs."""
    lock = Lock(out / ".lock", str(out))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stop_signals() -> Iterator[Callable[[], int]]:
    """The first SIGINT or SIGTERM asks to stop at the next block; the second SIGINT interrupts as usual."""
    asked = [0]
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return

    def ask(number: int, frame: Any) -> None:
        if asked[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked[0] = asked[0] or number

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
