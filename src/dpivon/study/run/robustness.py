"""Robustness of a study's runs: corrupted images, out-of-distribution (OOD) images and selective prediction.

Everything is computed from a run's final posterior, for its mean and for the average over draws, and written to
OUT/robustness.csv: one row per run, condition and way of predicting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon.data import MEAN, STD, load_fashion_mnist_test
from dpivon.data.corruptions import as_bytes, corrupt
from dpivon.metrics import batch_ood_scores, batch_scores
from dpivon.predict import ClassPrediction
from dpivon.stacked import Stack
from dpivon.study.plan.data import StudyData
from dpivon.study.plan.plan import HELD_OUT, Evaluation, Plan
from dpivon.study.results.table import COVERAGES, OOD_SCORES, Row
from dpivon.study.run.predict import Passes, posterior_row, predict_row

ROBUSTNESS = "robustness.csv"
CLEAN, SHIFT, OOD = "clean", "shift", "ood"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where its package dataset-fashion-mnist puts the files


@dataclass(frozen=True, eq=False)
class Condition:
    """Images to predict: bytes, or normalised as the study's own are. OOD images have no label among those learned."""

    kind: str
    name: str
    severity: int
    images: Tensor
    labels: Tensor | None


def make_conditions(plan: Plan, data: StudyData, root: Path) -> list[Condition]:
    """All that the plan asks for, the clean images first; on the data's device, made once for all runs."""
    wanted = plan.evaluate
    if wanted is None:
        return []
    clean, labels = data.eval_images[: wanted.images], data.eval_labels[: wanted.images]
    out = [Condition(CLEAN, CLEAN, 0, clean, labels)]
    raw = (clean * STD + MEAN).clamp(0, 1)
    out += [
        Condition(SHIFT, name, severity, corrupt(raw, name, severity, seed=plan.seed), labels)
        for name in wanted.corruptions
        for severity in wanted.severities
    ]
    for name in wanted.ood:
        ood = data.ood if name == HELD_OUT else _fashion(root, clean)
        assert ood is not None  # the plan was checked
        out.append(Condition(OOD, name, 0, ood[: wanted.images], None))
    return out


def _fashion(root: Path, like: Tensor) -> Tensor:
    """Fashion-MNIST's test images as bytes, in the size and channels of ``like``."""
    names = ("t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz")
    folders = [root, root / "fashion-mnist", DEBIAN]
    folder = next((f for f in folders if any((f / name).is_file() for name in names)), root)
    grey = torch.from_numpy(load_fashion_mnist_test(folder).pixels).permute(0, 3, 1, 2).to(like.device).float() / 255
    _, channels, side, _ = like.shape
    sized = F.interpolate(grey, (side, side), mode="bilinear", antialias=True, align_corners=False)
    return as_bytes(sized.expand(-1, channels, -1, -1))


@torch.no_grad()
def robustness_rows(
    stack: Stack,
    i: int,
    name: str,
    conditions: Sequence[Condition],
    wanted: Evaluation,
    *,
    samples: int,
    seed: int,
    passes: Passes | None = None,
) -> list[Row]:
    """Rows of run i, whose id is ``name``; the rest as in :func:`dpivon.study.run.predict.predict_row`."""
    images = [condition.images for condition in conditions]
    found = predict_row(stack.network, *posterior_row(stack, i), images, samples=samples, seed=seed, passes=passes)
    labelled = [
        j for j, condition in enumerate(conditions) if condition.labels is not None
    ]  # the same images, corrupted
    labels = torch.stack([y for condition in conditions if (y := condition.labels) is not None])
    out: list[Row] = []
    for way, answers in found.items():
        probs = torch.stack([answers[j].probs for j in labelled])
        known = batch_scores(probs, labels, coverages=COVERAGES if wanted.selective else ())
        scores = dict(zip(labelled, known, strict=True))
        for j, (condition, answer) in enumerate(zip(conditions, answers, strict=True)):
            row: Row = {"id": name, "predicts": way, "kind": condition.kind, "condition": condition.name}
            row |= {"severity": condition.severity, "images": len(condition.images)}
            out.append(row | (scores[j] if j in scores else ood_scores(answers[0], answer)))
    return out


def ood_scores(ordinary: ClassPrediction, other: ClassPrediction) -> dict[str, float]:
    """AUROC and FPR95 by low confidence, by entropy, and by mutual information where there is one."""
    a, b = (torch.stack(_suspicions(p)) for p in (ordinary, other))
    out: dict[str, float] = {}
    for name, (auroc, fpr) in zip(OOD_SCORES[: len(a)], batch_ood_scores(a, b), strict=True):
        out |= {f"auroc_{name}": auroc, f"fpr95_{name}": fpr}
    return out


def _suspicions(p: ClassPrediction) -> list[Tensor]:
    """Scores that are high where an image looks out of distribution, in the order of their names."""
    found = [-p.confidence.double(), p.entropy]
    return [*found, p.mutual_information] if p.samples else found
