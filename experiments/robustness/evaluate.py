"""Robustness of a study's runs: corrupted images, out-of-distribution (OOD) images and selective prediction.

Everything is computed from the posteriors that `dpivon study run --keep` leaves, for the mean and for the average over draws,
and written to OUT/robustness.csv: one row per run, condition and way of predicting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon import metrics
from dpivon.data import MEAN, STD, Images
from dpivon.data.fashion_mnist import read_idx
from dpivon.data.images import canonical
from dpivon.errors import bad, check_choice, check_whole
from dpivon.posterior import Posterior
from dpivon.predict import ClassPrediction
from dpivon.stacked import AnyNetwork
from dpivon.study.plan.data import StudyData, build_network, load_data
from dpivon.study.plan.plan import Plan, read_plan, sample_seed
from dpivon.study.results import table
from dpivon.study.results.table import SCORES, Row
from dpivon.study.run.evaluation import Predictions, predict_row
from dpivon.yaml_files import read_yaml
from experiments.paper.hooks import posterior_rows
from experiments.robustness.corruptions import CORRUPTIONS, SEVERITIES, as_bytes, corrupt

ROBUSTNESS = "robustness.csv"
CLEAN, SHIFT, OOD, HELD_OUT = "clean", "shift", "ood", "held-out"
FASHION = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where its package dataset-fashion-mnist puts the files
OOD_SCORES = ("confidence", "entropy", "information")
COVERAGES = tuple(range(10, 100, 10))
COLUMNS = (
    "id", "predicts", "kind", "condition", "severity", "images", *SCORES,
    *(f"auroc_{s}" for s in OOD_SCORES), *(f"fpr95_{s}" for s in OOD_SCORES),
    "aurc", *(f"accuracy_at_{c}" for c in COVERAGES),
)  # fmt: skip
_FIX = "Compare it with experiments/robustness/studies/beyond-evaluate.yaml"


@dataclass(frozen=True)
class Evaluation:
    """What to predict beyond the test set: corrupted and OOD images, and selective prediction if ``selective``.

    Every corruption is applied at every severity. ``images`` is the number of images of the test set, and of each OOD set;
    None means all. Corrupted images are those that are scored clean too, so that nothing but the corruption differs.
    """

    corruptions: tuple[str, ...] = ()
    severities: tuple[int, ...] = ()
    ood: tuple[str, ...] = ()
    selective: bool = False
    images: int | None = None

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_choice("corruptions", name, tuple(CORRUPTIONS), "Name corruptions of corruptions.py")
        for name in self.ood:
            check_choice("ood", name, ("fashion-mnist", HELD_OUT), "Name sets of images that are known")
        for severity in self.severities:
            if severity not in SEVERITIES:
                raise bad("severities", severity, "is not from 1 to 5", "Give some of 1, 2, 3, 4 and 5")
        for what in ("corruptions", "severities", "ood"):
            found = getattr(self, what)
            if len(set(found)) < len(found):
                raise bad(what, list(found), "names something twice", "Name each once")
        if bool(self.corruptions) != bool(self.severities):
            fix = "Give both or neither"
            raise bad("corruptions", list(self.corruptions), f"does not go with severities={self.severities}", fix)
        if not isinstance(self.selective, bool):
            raise bad("selective", self.selective, "is neither true nor false", "Say whether to score it")
        if self.images is not None:
            check_whole("images", self.images, "Give how many test images to look at", at_least=20)


def read_evaluation(path: Path) -> Evaluation:
    """What to look at, from a YAML file."""
    raw = read_yaml("evaluation", path, missing=_FIX, fix=_FIX)
    try:
        return Evaluation(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})
    except (TypeError, AttributeError) as error:
        raise bad("evaluation", str(path), f"has or lacks a key ({error})", _FIX) from None


def check_plan(plan: Plan, wanted: Evaluation) -> None:
    """Refuse what cannot be looked at in the results of this plan."""
    if plan.split == "tuning":
        raise bad("out", plan.name, "is a tuning study, which never sees the test set", "Evaluate the final study")
    if plan.data is not None and (wanted.corruptions or wanted.ood):
        raise bad("out", plan.dataset, "is not built in: no corrupted or OOD images are made", "Leave them out")
    if plan.dataset in wanted.ood:
        raise bad("ood", plan.dataset, "is what the study learns", "Name OOD images")
    if HELD_OUT in wanted.ood and not 0 < len(plan.classes) < 10:
        raise bad(
            "ood", HELD_OUT, "but no class is held out", "Evaluate a study with classes, such as classes: [0, 1, 2]"
        )


@dataclass(frozen=True, eq=False)
class Condition:
    """Images to predict: bytes, or normalised as the study's own are. OOD images have no label among those learned."""

    kind: str
    name: str
    severity: int
    images: Tensor
    labels: Tensor | None


def make_conditions(plan: Plan, wanted: Evaluation, data: StudyData, root: Path) -> list[Condition]:
    """All that is wanted, the clean images first; on the data's device, made once for all runs."""
    clean, labels = data.eval_images[: wanted.images], data.eval_labels[: wanted.images]
    out = [Condition(CLEAN, CLEAN, 0, clean, labels)]
    raw = (clean * STD + MEAN).clamp(0, 1)
    out += [
        Condition(SHIFT, name, severity, corrupt(raw, name, severity, seed=plan.seed), labels)
        for name in wanted.corruptions
        for severity in wanted.severities
    ]
    for name in wanted.ood:
        ood = _held_out(plan, root, clean.device) if name == HELD_OUT else _fashion(root, clean)
        out.append(Condition(OOD, name, 0, ood[: wanted.images], None))
    return out


def _held_out(plan: Plan, root: Path, device: torch.device) -> Tensor:
    """Test images of the classes that the study does not learn."""
    everything = load_data(replace(plan, classes=()), root, device)
    return everything.eval_images[~torch.isin(everything.eval_labels.cpu(), torch.tensor(plan.classes)).to(device)]


def _fashion(root: Path, like: Tensor) -> Tensor:
    """Fashion-MNIST's test images as bytes, in the size and channels of ``like``."""
    grey = torch.from_numpy(_fashion_test(root).pixels).permute(0, 3, 1, 2).to(like.device).float() / 255
    _, channels, side, _ = like.shape
    sized = F.interpolate(grey, (side, side), mode="bilinear", antialias=True, align_corners=False)
    return as_bytes(sized.expand(-1, channels, -1, -1))


def _fashion_test(root: Path) -> Images:
    fix = "Give the folder with the files of Fashion-MNIST (Debian packages them as dataset-fashion-mnist)"
    parts = []
    for name in FASHION:
        places = [f / f"{name}{end}" for f in (root, root / "fashion-mnist", DEBIAN) for end in ("", ".gz")]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise bad("data", str(root), f"lacks {name}", fix)
        parts.append(read_idx(path, fix))
    return canonical(Images(parts[0][..., None], parts[1]))[0]


def evaluate(out: Path, wanted: Evaluation, root: Path, say: Callable[[str], None] = print) -> Path:
    """Score the kept posteriors of a finished study; rows of a run that is there already are replaced."""
    plan = read_plan(out / "study.json")
    check_plan(plan, wanted)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data(plan, root, device)
    network, conditions = build_network(plan, data), make_conditions(plan, wanted, data, root)
    assert isinstance(network, AnyNetwork)
    for run in plan.runs:
        kept = out / "posteriors" / f"{run.id}.safetensors"
        if not kept.is_file():
            raise bad("out", str(out), f"keeps no posterior of {run.id}", "Run the study with --keep")
        mean, std = posterior_rows(network, Posterior.load(kept), device)
        images, seed = [condition.images for condition in conditions], sample_seed(plan, run)
        found = predict_row(network, mean, std, images, samples=plan.mc_samples, seed=seed)
        table.add(out / ROBUSTNESS, robustness_rows(run.id, found, conditions, selective=wanted.selective), COLUMNS)
        say(run.id)
    return out / ROBUSTNESS


def robustness_rows(name: str, found: Predictions, conditions: Sequence[Condition], *, selective: bool) -> list[Row]:
    """Rows of a run, whose id is ``name``, from its predictions under every condition."""
    out: list[Row] = []
    for way, answers in found.items():
        for condition, answer in zip(conditions, answers, strict=True):
            row: Row = {"id": name, "predicts": way, "kind": condition.kind, "condition": condition.name}
            row |= {"severity": condition.severity, "images": len(condition.images)}
            if condition.labels is None:
                out.append(row | ood_scores(answers[0], answer))
                continue
            row |= metrics.batch_scores(answer.probs.unsqueeze(0), condition.labels)[0]
            out.append(row | (selective_scores(answer.probs, condition.labels) if selective else {}))
    return out


def selective_scores(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """AURC, and the accuracy on the most confident share of the images; NaN where the run has diverged."""
    names = ["aurc", *(f"accuracy_at_{c}" for c in COVERAGES)]
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(names, math.nan)
    shares = (metrics.accuracy_at_coverage(probs, labels, c / 100) for c in COVERAGES)
    return dict(zip(names, (metrics.aurc(probs, labels), *shares), strict=True))


def ood_scores(ordinary: ClassPrediction, other: ClassPrediction) -> dict[str, float]:
    """AUROC and FPR95 by low confidence, by entropy, and by mutual information where there is one."""
    out: dict[str, float] = {}
    for name, a, b in zip(OOD_SCORES, _suspicions(ordinary), _suspicions(other), strict=False):
        lost = not bool(torch.isfinite(a).all() and torch.isfinite(b).all())
        out[f"auroc_{name}"] = math.nan if lost else metrics.ood_auroc(a, b)
        out[f"fpr95_{name}"] = math.nan if lost else metrics.ood_fpr(a, b)
    return out


def _suspicions(p: ClassPrediction) -> list[Tensor]:
    """Scores that are high where an image looks out of distribution, in the order of their names."""
    found = [-p.confidence.double(), p.entropy]
    return [*found, p.mutual_information] if p.samples else found
