"""Beyond the test set: pictures made worse, pictures of something else, and answers withheld.

Everything is computed from a run's final posterior, for its mean and for the average over draws, and written to
OUT/beyond.csv: a row a run, condition and way of predicting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon import metrics
from dpivon.data import MEAN, STD, load_fashion_mnist_test
from dpivon.data.corruptions import as_bytes, corrupt
from dpivon.stacked import Stack
from dpivon.study.datasets import StudyData
from dpivon.study.evaluate import Predicted, entropy, gaussian, label_scores, predicted
from dpivon.study.evaluation import HELD_OUT, Evaluation
from dpivon.study.passes.way import Passes
from dpivon.study.plan import Plan
from dpivon.study.table import COVERAGES, OOD_SCORES, SELECTIVE, Row

BEYOND = "beyond.csv"
CLEAN, SHIFT, FOREIGN = "clean", "shift", "ood"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where its package dataset-fashion-mnist puts the files


@dataclass(frozen=True, eq=False)
class Condition:
    """Pictures to predict: bytes, or normalised as the study's own are. Foreign ones have no label among those learned."""

    kind: str
    name: str
    severity: int
    pictures: Tensor
    labels: Tensor | None


def conditions(plan: Plan, data: StudyData, root: Path) -> list[Condition]:
    """All that the plan asks for, the clean pictures first; on the data's device, made once for all runs."""
    wanted = plan.evaluate
    if wanted is None:
        return []
    clean, labels = data.eval_images[: wanted.pictures], data.eval_labels[: wanted.pictures]
    out = [Condition(CLEAN, CLEAN, 0, clean, labels)]
    raw = (clean * STD + MEAN).clamp(0, 1)
    out += [
        Condition(SHIFT, name, severity, corrupt(raw, name, severity, seed=plan.seed), labels)
        for name in wanted.corruptions
        for severity in wanted.severities
    ]
    for name in wanted.ood:
        foreign = data.foreign if name == HELD_OUT else _fashion(root, clean)
        assert foreign is not None  # the plan was checked
        out.append(Condition(FOREIGN, name, 0, foreign[: wanted.pictures], None))
    return out


def _fashion(root: Path, like: Tensor) -> Tensor:
    """Fashion-MNIST's test pictures as bytes, in the size and channels of ``like``."""
    names = ("t10k-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz")
    folders = [root, root / "fashion-mnist", DEBIAN]
    folder = next((f for f in folders if any((f / name).is_file() for name in names)), root)
    grey = torch.from_numpy(load_fashion_mnist_test(folder).pixels).permute(0, 3, 1, 2).to(like.device).float() / 255
    _, channels, side, _ = like.shape
    sized = F.interpolate(grey, (side, side), mode="bilinear", antialias=True, align_corners=False)
    return as_bytes(sized.expand(-1, channels, -1, -1))


@torch.no_grad()
def beyond_rows(
    stack: Stack,
    i: int,
    name: str,
    made: Sequence[Condition],
    wanted: Evaluation,
    *,
    samples: int,
    seed: int,
    passes: Passes | None = None,
) -> list[Row]:
    """Rows of run i, whose id is ``name``; the rest as in :func:`dpivon.study.evaluate.predicted`."""
    pictures = [condition.pictures for condition in made]
    found = predicted(stack.network, *gaussian(stack, i), pictures, samples=samples, seed=seed, passes=passes)
    out: list[Row] = []
    for way, answers in found.items():
        ordinary = answers[0]
        for condition, answer in zip(made, answers, strict=True):
            row: Row = {"id": name, "predicts": way, "kind": condition.kind, "condition": condition.name}
            row |= {"severity": condition.severity, "pictures": len(condition.pictures)}
            if condition.labels is None:
                row |= ood_scores(ordinary, answer)
            else:
                row |= label_scores(answer.probs, condition.labels)
                row |= selective_scores(answer.probs, condition.labels) if wanted.selective else {}
            out.append(row)
    return out


def ood_scores(ordinary: Predicted, other: Predicted) -> dict[str, float]:
    """AUROC and FPR95 by low confidence, by entropy, and by mutual information where there is one."""
    pairs = zip(OOD_SCORES, _suspicions(ordinary), _suspicions(other), strict=True)
    out: dict[str, float] = {}
    for name, a, b in pairs:
        if a is None or b is None:
            continue
        finite = bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
        out[f"auroc_{name}"] = metrics.ood_auroc(a, b) if finite else math.nan
        out[f"fpr95_{name}"] = metrics.ood_fpr(a, b) if finite else math.nan
    return out


def _suspicions(p: Predicted) -> Iterable[Tensor | None]:
    """Scores that are high where a picture looks foreign, in the order of their names."""
    return -p.probs.amax(-1), entropy(p.probs), p.information


def selective_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """AURC, and the accuracy on the 10, 20, … 90 % that are answered with most confidence."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(SELECTIVE, math.nan)
    risk = metrics.risk_coverage(probs, labels)[1].tolist()  # sorted once for all of them
    answered = {c: -(-c * len(risk) // 100) for c in COVERAGES}  # rounded up
    return {"aurc": sum(risk) / len(risk)} | {f"accuracy_at_{c}": 1.0 - risk[k - 1] for c, k in answered.items()}
