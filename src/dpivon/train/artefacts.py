"""The files of a RUN folder besides ledger, checkpoints and model: progress, test results, widths, summary."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpivon.durable.files import replace, replacing
from dpivon.errors import StorageError
from dpivon.gaussian import regression_scores
from dpivon.metrics import class_scores, evaluate
from dpivon.multilabel import label_scores, macro
from dpivon.report.run_folder import POSTERIOR, PROGRESS, TEST
from dpivon.report.testset import findings, label_findings
from dpivon.sources import Examples
from dpivon.sources.columns import Array
from dpivon.train.published import Published

SHOWN = 16  # images of the test data that are kept: the surest, and as many of the least sure


@dataclass(frozen=True)
class Line:
    """One evaluation. The held-out numbers are computed from rows without any noise: they are not private."""

    step: int
    steps: int
    epoch: int
    epsilon: float
    delta: float
    seconds: float
    heldout_nll: float | None = None
    heldout_accuracy: float | None = None
    not_private: dict[str, float] | None = None  # what a caller of fit evaluated


class Progress:
    """``progress.jsonl``: one line per evaluation; lines of steps that a crash lost are removed, since they are made again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        self.last: Line | None = None

    def resume(self, steps: int) -> float:
        """Keep the lines up to this step; the seconds that were spent until then."""
        kept = [line for line in read_progress(self._path) if line.step <= steps]
        replace(self._path, "".join(json.dumps(asdict(line)) + "\n" for line in kept).encode())
        self.last = kept[-1] if kept else None
        return 0.0 if self.last is None else self.last.seconds

    def add(self, line: Line) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(line)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written ({error}). Make room and resume.") from error
        self.last = line


def read_progress(path: Path) -> list[Line]:
    """The whole lines of the file; none if there is no file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(Line(**json.loads(text)))
        except (ValueError, TypeError):  # the last one, torn by a crash
            break
    return lines


def write_test(published: Published, test: Examples, folder: Path) -> dict[str, Any]:
    """``test.npz``; and the ``metrics``, ``findings`` and ``warnings`` of a summary. Not private.

    Scores are at the posterior mean, and as ``mc_…`` averaged over the posterior. ``recall(NAME)`` is of the model's answers;
    so are those named ``decided_…``, where answers are not the most probable class. None is a score that is not defined.
    """
    if published.features is not None:  # made once for all predictions
        test = replaced(test, inputs=published.features(test.inputs))
        published = replaced(published, features=None)
    assert test.targets is not None
    if published.description.noise is not None:
        return _regression(published, test)
    if published.description.labels:
        return _several(published, test)
    averaged = published.predict(test.inputs)
    mean = published.predict(test.inputs, samples=0)
    arrays: dict[str, Array] = {
        "probabilities": averaged.probs.float().numpy(),
        "mean_probabilities": mean.probs.float().numpy(),
        "targets": test.targets.numpy(),
    }
    if test.images is not None:
        shown = _most_and_least_certain(averaged.entropy)
        arrays |= {"images": test.images[shown], "image_index": shown.astype(np.int64)}
    with replacing(folder / TEST) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its own flag comes by keyword too
    scores = evaluate(mean.probs, test.targets)
    scores |= {f"mc_{name}": value for name, value in evaluate(averaged.probs, test.targets).items()}
    scores |= _answers(published, averaged.probs, test.targets)
    metrics = {name: value if math.isfinite(value) else None for name, value in scores.items()}
    said = findings(averaged.probs, test.targets, published.decision, published.description.classes)
    return {"metrics": metrics, **said}


def _regression(published: Published, test: Examples) -> dict[str, Any]:
    """The same of numbers to predict; their predictions are not kept."""
    targets = published.description.target_values(test)
    scores = regression_scores(published.regress(test.inputs, samples=0), targets)
    averaged = regression_scores(published.regress(test.inputs), targets)
    metrics = scores | {f"mc_{name}": value for name, value in averaged.items()}
    spread = float(targets.std(correction=0))
    found = [
        f"R² = {averaged['r2']:.3f}: RMSE {averaged['rmse']:.4g}, and {spread:.4g} for predicting the mean of these rows.",
        f"95 % intervals hold {averaged['coverage_95']:.1%} of the targets; their mean width is "
        f"{averaged['interval_width']:.4g}.",
    ]
    poor = ["The model predicts no better than the mean of the test data."] if not averaged["r2"] > 0 else []
    return {
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "findings": found,
        "warnings": poor,
    }


def _several(published: Published, test: Examples) -> dict[str, Any]:
    """The same of several labels: means over them, and ``by_label``; their predictions are not kept."""
    assert test.targets is not None
    names, (_, yes) = published.description.labels, published.description.classes
    found = {samples: published.predict(test.inputs, samples=samples).probs for samples in (0, None)}
    mean, averaged = (label_scores(p, test.targets, published.decision.labels(p)) for p in found.values())
    metrics = macro(mean) | {f"mc_{name}": value for name, value in macro(averaged).items()}
    own = label_findings(averaged, test.targets, published.decision.labels(found[None]), names, yes)
    return {
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "by_label": {
            name: {key: value if math.isfinite(value) else None for key, value in scores.items()}
            for name, scores in zip(names, averaged, strict=True)
        },
        **own,
    }


def _answers(published: Published, probs: Tensor, targets: Tensor) -> dict[str, float]:
    decision, classes = published.decision, published.description.classes
    given = decision.labels(probs)
    recall = class_scores(probs, targets, given).recall
    found = {f"recall({name})": value for name, value in zip(classes, recall.tolist(), strict=True)}
    if not decision.plain:
        answered = given >= 0
        found |= {"answered": float(answered.double().mean()), "decided_balanced_accuracy": float(recall.nanmean())}
        found["decided_accuracy"] = float((given == targets)[answered].double().mean())
    if decision.thresholds:
        sets = decision.sets(probs)
        found["set_coverage"] = float(sets.gather(1, targets.unsqueeze(1)).double().mean())
        found["set_size"] = float(sets.sum(1).double().mean())
    return found


def _most_and_least_certain(entropy: Tensor) -> Array:
    order = torch.argsort(entropy, stable=True).numpy()
    return order if len(order) <= 2 * SHOWN else np.concatenate([order[:SHOWN], order[-SHOWN:]])


def write_widths(published: Published, folder: Path) -> None:
    """``posterior.json``: how wide the posterior is, layer by layer; no file for a point estimate."""
    layers = []
    for name, std in published.posterior.std.items():
        low, middle, high = np.quantile(std.double().numpy(), [0.05, 0.5, 0.95]).tolist()
        layers.append({"name": name, "numel": std.numel(), "sd_q05": low, "sd_median": middle, "sd_q95": high})
    if any(layer["sd_q95"] > 0 for layer in layers):
        write_json(folder / POSTERIOR, {"layers": layers})


def write_json(path: Path, value: Any) -> None:
    replace(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
