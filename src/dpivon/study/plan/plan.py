"""A study with nothing left open: every run by its numbers. It is a JSON file, read with the standard library."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpivon.durable.files import read_json
from dpivon.durable.files import replace as whole
from dpivon.errors import ArgumentError, bad, check_choice, check_number, check_whole
from dpivon.models import check_network
from dpivon.privacy.augmentation import Augmentation
from dpivon.stacked import Run
from dpivon.stacked.run import estimator_of, stackable

FORMAT = "dpivon-study-1"
DATASETS = ("cifar10", "fashion-mnist", "digits")
SPLITS = ("final", "tuning")
CLASSES = 10  # of each of the built-in data sets
_PAPER = ("cifar10", "paper", ())  # data set, network and classes of the paper's experiment
_FIX = "Write the plan with `dpivon study resolve`"
#: Options of earlier versions: results made with them can be read, and no run can be made with them.
RETIRED = {"jitter"}
#: The curvature that a method had by default when results were first made with it.
_FIRST = {
    "dp-calm": "empirical-bayes-fisher",
    "dp-steady": "empirical-bayes-fisher",
    "dp-ivon-gradsq": "gradsq-corrected",
    "dp-ivon-gradsq-plain": "gradsq",
    "dp-ivon-reparam": "reparam",
}


@dataclass(frozen=True)
class OwnData:
    """A data set that is not built in, as public facts.

    ``declared`` is what the study says of it: its path or import path, and how to read it. ``digest`` is of the examples that
    were there when the study was planned. ``examples`` (without the test set) and ``classes`` are numbers, ``shape`` is that of
    one example.
    """

    declared: Mapping[str, Any]
    digest: str
    examples: int
    classes: int
    shape: list[int]

    def __post_init__(self) -> None:
        _check_kind("declared", self.declared, Mapping)
        _check_kind("digest", self.digest, str)
        check_whole("examples", self.examples, "Give the number of training examples", at_least=1)
        check_whole("classes", self.classes, "Give the number of classes", at_least=2)

    @property
    def identity(self) -> dict[str, Any]:
        """All but where the files are, which may differ between machines."""
        return asdict(self) | {"declared": {k: v for k, v in self.declared.items() if k not in ("path", "test")}}


@dataclass(frozen=True)
class PlannedRun:
    """One run. ``seed`` counts repetitions; the seed of its noise is :func:`noise_seed`'s."""

    method: str
    batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    seed: int
    lr: float
    options: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A name that says what the run is."""
        extra = "".join(f"-{k}={shown(v)}" for k, v in sorted(self.options.items()))
        return (
            f"{self.method}-b{self.batch_size}-sigma{self.noise_multiplier:g}-C{self.max_grad_norm:g}"
            f"-lr{self.lr:g}{extra}-seed{self.seed}"
        )


@dataclass(frozen=True)
class Plan:
    """A resolved study. ``split`` "final" trains on all training data and reports the test set; "tuning" holds out a
    tenth of the training data, reports that, and never sees the test set. ``classes`` are those to learn, all if there are
    none.

    ``temperature_noise`` above 0 is σ of a private temperature, chosen on the training data when a run is done and charged to
    it: the scores "tempered_…" are after it, and cost ``epsilon_tempered``.

    ``augment`` makes views of every drawn image, averaged before clipping. ``arguments`` are the network's, ``architecture`` is
    a digest of one that is named by its import path, and ``data`` is set where ``dataset`` is not built in."""

    name: str
    dataset: str
    network: str
    split: str
    epochs: int
    delta: float
    mc_samples: int
    seed: int
    runs: tuple[PlannedRun, ...]
    assumptions: tuple[str, ...] = ()
    classes: tuple[int, ...] = ()
    temperature_noise: float = 0.0
    augment: Augmentation | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""
    data: OwnData | None = None

    def __post_init__(self) -> None:
        if self.data is None:
            check_choice("dataset", self.dataset, DATASETS, "Name a data set that dpivon reads")
        elif self.dataset in DATASETS:
            raise bad("data", self.dataset, "is built in, and nothing can be declared of it", _FIX)
        check_network(self.network)
        _check_kind("arguments", self.arguments, Mapping)
        check_choice("split", self.split, SPLITS, "Say whether the runs are final or for tuning")
        check_whole("epochs", self.epochs, "Give the passes over the training data", at_least=1)
        check_number("delta", self.delta, "Give δ, well below 1/N", above=0.0, below=1.0)
        check_whole("mc_samples", self.mc_samples, "Give the posterior samples of a prediction", at_least=1)
        check_whole("seed", self.seed, "Give a whole number")
        self._check_classes()
        check_number("temperature_noise", self.temperature_noise, "Give σ, such as 20, or 0 for none", at_least=0.0)
        if not self.runs:
            raise bad("runs", [], "there is nothing to run", "Give at least one method and one cell of the grid")
        seen: set[str] = set()
        for run in self.runs:
            if run.id in seen:
                raise bad("runs", run.id, "is planned twice", "Remove the entry that repeats another")
            seen.add(run.id)
            if not RETIRED & run.options.keys():
                self.stacked(run)  # checks method, numbers and options

    def _check_classes(self) -> None:
        for c in self.classes:
            check_whole("classes", c, "Give classes from 0 to 9")
        if self.classes and (len(set(self.classes)) < max(2, len(self.classes)) or max(self.classes) >= CLASSES):
            problem = "are not two or more different classes from 0 to 9"
            raise bad("classes", list(self.classes), problem, "Give the classes to learn, or none for all")
        if self.data is not None and self.classes:
            fix = "Leave it out, or plan on a data set that has these classes only"
            raise bad("classes", list(self.classes), f"selects classes of {', '.join(DATASETS)} only", fix)

    @property
    def outputs(self) -> int:
        """How many classes the network tells apart."""
        return len(self.classes) or (CLASSES if self.data is None else self.data.classes)

    def stacked(self, run: PlannedRun) -> Run:
        """The run as a stack takes it."""
        seed, options = noise_seed(self, run), dict(run.options)
        return Run(run.method, seed, run.noise_multiplier, run.max_grad_norm, run.lr, run.batch_size, options)

    @property
    def digest(self) -> str:
        """What makes results belong to this plan: all but the words."""
        facts = {k: v for k, v in self._values().items() if k != "assumptions"}
        facts |= {} if self.data is None else {"data": self.data.identity}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def extends(self, other: Plan) -> bool:
        """Whether this is the other plan with more runs, and nothing else changed: its results are then results of this one."""
        return replace(self, runs=other.runs).digest == other.digest and all(run in self.runs for run in other.runs)

    def unlike(self, other: Plan) -> str:
        """What to say where the results of one are given to the other."""
        if self.data and other.data and self.data.digest != other.data.digest:
            return f"holds results on other data (digest {other.data.digest[:8]}, not {self.data.digest[:8]})"
        return "holds the results of another plan"

    @property
    def table(self) -> str:
        """The name of the results table."""
        return "tuning.csv" if self.split == "tuning" else "runs.csv"

    def _values(self) -> dict[str, Any]:
        """As plain values; what a study does not use is left out, so that plans from before it existed stay the same."""
        optional = ("classes", "temperature_noise", "augment", "arguments", "architecture", "data")
        return {k: v for k, v in asdict(self).items() if k not in optional or getattr(self, k)}

    def write(self, path: Path) -> None:
        # One run a line: differences between plans can be read.
        head = {"format": FORMAT} | {k: v for k, v in self._values().items() if k != "runs"}
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
        lines = ",\n".join("  " + json.dumps(asdict(run)) for run in self.runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole(path, f'{text},\n "runs": [\n{lines}\n ]\n}}\n'.encode())


def noise_seed(plan: Plan, run: PlannedRun) -> int:
    """63 bits for the noise, batches and posterior samples of one run.

    They follow from the plan, so that anyone can repeat a run; whoever knows them can subtract the noise. A study
    belongs on public data. They read whatever makes a run another run, so that no two runs that count as independent share
    noise, be they of different plans. δ, prediction samples, evaluation and temperature come after training and change no run.
    """
    text = f"{plan.name}|{plan.split}|{plan.epochs}|{plan.seed}|{run.id}"
    # What the paper's experiment has, and no views, is left out: its plans keep the noise that their results were made with.
    if (plan.dataset, plan.network, plan.classes) != _PAPER:
        text += f"|{plan.dataset}|{plan.network}|{plan.classes}"
    if plan.augment is not None:
        text += f"|{plan.augment}"
    if plan.data is not None or plan.arguments or plan.architecture:
        text += f"|{plan.data and plan.data.digest}|{changed(plan.arguments)}|{plan.architecture}"
    # A run that names no estimator has its method's default, and with another one it is another run.
    own = estimator_of(run.method) if run.method in stackable() else None  # an unknown one is named where it is used
    if own is not None and "curvature" not in run.options and own.name != _FIRST.get(run.method):
        text += f"|{own.name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sample_seed(plan: Plan, run: PlannedRun) -> int:
    """Of the posterior samples that predict: the same for every method and setting of one repetition, in every plan of one
    seed. As with first weights, repetitions are what is counted, and runs within one may share."""
    return plan.seed * 1_000_003 + run.seed


def first_seed(plan: Plan, run: PlannedRun) -> int:
    """Of a run's first weights: the same for every method and setting of one repetition, so that repetitions are pairs.

    Of every plan of one seed, too: a comparison over several studies pairs their runs, and its unit is the repetition, so that
    nothing that is shared within one counts twice. First weights owe nothing to the data. Noise and batches are never shared:
    whoever sees two runs could subtract them.
    """
    text = f"first weights|{plan.seed}|{run.seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def steps_of(run: PlannedRun, epochs: int, examples: int) -> int:
    """An epoch is ⌈N/b⌉ steps."""
    return epochs * math.ceil(examples / run.batch_size)


def read_plan(path: Path) -> Plan:
    """A plan from its file, checked."""
    raw = read_json("study", path, _FIX)
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise bad("study", str(path), f"is not a plan of format {FORMAT}", _FIX)
    try:
        raw["runs"] = tuple(PlannedRun(**run) for run in raw["runs"])
        raw["assumptions"] = tuple(raw["assumptions"])
        raw["classes"] = tuple(raw.get("classes", ()))
        raw.pop("evaluate", None)  # of version 0.1: what to look at beyond the test set
        if raw.get("augment") is not None:
            raw["augment"] = Augmentation(**raw["augment"])
        if raw.get("data") is not None:
            raw["data"] = OwnData(**raw["data"])
        return Plan(**raw)
    except ArgumentError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        problem = f"lacks or has a key or a kind of value it should not ({type(error).__name__}: {error})"
        raise bad("study", str(path), problem, _FIX) from None


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise bad(name, value, f"is not a {'text' if kind is str else 'table of names and values'}", _FIX)


def shown(value: float | str) -> str:
    """An option's value in names and tables."""
    return value if isinstance(value, str) else f"{value:g}"


def changed(values: Any) -> str:
    """Options as they stand in a table."""
    return json.dumps(dict(sorted(values.items()))) if values else ""
