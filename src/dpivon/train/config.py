"""Everything that decides a run: a YAML file, overridden by flags, validated, and kept as RUN/config.yaml."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from dpivon.decisions import Decision, Positive, Share, check_names, complete_prior, shares_of
from dpivon.defaults import COUNTED_FROM, FROM_PRIOR, METHOD, OF_NUMBERS, table_defaults
from dpivon.durable.files import SECRET, replace
from dpivon.errors import DpivonError, bad, check_choice
from dpivon.methods import METHODS
from dpivon.privacy.accounting import ACCOUNTANTS, DEFAULT, budget
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import CONFIG
from dpivon.privacy.counting import sets_cost, shares_cost
from dpivon.recipe import HELD_OUT, Calibration
from dpivon.sources import Declaration, kind_of
from dpivon.sources.base import Targets
from dpivon.sources.columns import Label, Numeric
from dpivon.sources.schema import with_schema
from dpivon.train.earlier import is_prior, network_of
from dpivon.train.networks import KINDS, Width, current_name
from dpivon.yaml_files import read_yaml, validated

Whole = Annotated[int, Field(ge=1, le=10**9)]
COUNT: Literal["count"] = "count"  # the prior that is counted with noise, and charged
EPOCHS = 40
AT_ONCE = 4096  # rows of a table, which are short
_LARGEST, _WANDER = 0.5, 0.5  # of the share of IVON's step size: set on public data at ε from 0.5 to 8
PRIVATE_METHODS = tuple(name for name in METHODS if name.startswith("dp"))

#: What may be different when a run goes on: none of it changes what is released, or what a release costs.
FREE = frozenset({"data", "out", "test", "heldout", "device", "physical_batch_size", "checkpoint_seconds", "source"})
FREE |= {"title", "purpose", "responsible", "dataset"}


def _check_accountant(name: str) -> str:
    if name not in ACCOUNTANTS:
        raise ValueError(f"is not one of {', '.join(ACCOUNTANTS)}")
    return name


class Config(Declaration):
    """One run. All of it is public, except a seed."""

    data: Annotated[str, Field(min_length=1)]
    out: Annotated[str, Field(min_length=1)] = "dpivon-run"
    heldout: str | None = None
    test: str | None = None
    calibration: str | None = None

    title: str = ""
    purpose: str = ""
    responsible: str = ""
    dataset: str = ""

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    dataset_size: Whole
    unit: str | None = None
    rows_per_unit: Whole | None = None
    accountant: Annotated[str, AfterValidator(_check_accountant)] = DEFAULT

    task: Literal["classification", "regression"] = "classification"
    classes: tuple[Label, ...] = ()
    target_bounds: Numeric | None = None
    noise_std: Positive | Literal["learned"] = "learned"
    prior: Literal["count"] | dict[str, Share] | None = None
    cost: Literal["balanced"] | dict[str, Positive] = Field(default_factory=dict)
    weighted_loss: bool = False
    abstain: Annotated[float, Field(ge=0, lt=1)] = 0.0
    coverage: Annotated[float, Field(ge=0.5, lt=1)] | None = None

    method: str = METHOD
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    network: Annotated[str, BeforeValidator(current_name)] = "auto"
    hidden: tuple[Width, ...] = (64,)
    batch_size: Whole
    epochs: Whole
    lr: Positive
    start_from: str | None = None
    last_layer: bool = False
    max_grad_norm: Positive = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    samples: Annotated[int, Field(ge=0, le=10_000)] = 32

    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    secure: bool = False
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    physical_batch_size: Whole | None = None
    checkpoint_seconds: Positive = 30.0

    @property
    def targets(self) -> Targets:
        """What the targets may be: classes, or a range."""
        return self.classes if self.target_bounds is None else self.target_bounds

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of yes and no to predict, if there are several."""
        return () if self.target is None or isinstance(self.target, str) else self.target

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.labels:
            self._check_labels()
        if self.task == "regression":
            self._check_regression()
        elif self.target_bounds is not None:
            raise ValueError("target_bounds: is the range of a number to predict, which needs --task regression")
        elif len(self.classes) < 2:
            raise ValueError("classes: at least two are needed")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("classes: one is named twice")
        if self.delta >= 1 / self.dataset_size:
            raise ValueError(
                f"delta: {self.delta:g} is not below 1/N = {1 / self.dataset_size:.3g}, so publishing one example outright "
                "would be allowed"
            )
        if self.batch_size > self.dataset_size:
            raise ValueError(f"batch_size: {self.batch_size} is larger than N = {self.dataset_size}")
        if self.method not in PRIVATE_METHODS:
            raise ValueError(f"method: {self.method!r} is not one of {', '.join(PRIVATE_METHODS)}")
        if self.last_layer:
            self._check_last_layer()
        if self.rows_per_unit is not None and self.unit is None:
            raise ValueError("rows_per_unit: says nothing without unit, the column that names a row's person")
        if self.network not in KINDS:
            raise ValueError(f"network: {self.network!r} is not one of {', '.join(KINDS)}")
        if (self.coverage is None) != (self.calibration is None):
            raise ValueError(
                "coverage: of prediction sets needs --calibration, rows that are not trained on, and the reverse"
            )
        if self.weighted_loss and not self.cost:
            raise ValueError("weighted_loss: needs --cost, by which losses are weighted")
        self.decision([1.0] * max(1, len(self.labels)) * len(self.classes) if self.prior == COUNT else None)
        return self

    def _check_last_layer(self) -> None:
        others = "--no-last-layer trains all weights"
        if self.start_from is None:
            raise ValueError("last_layer: needs --start-from, a prior on whose features it is trained")
        if self.method != METHOD:
            raise ValueError(f"last_layer: is trained by {METHOD}, and the method is {self.method}; {others}")
        if self.task == "regression" or self.labels:
            raise ValueError(f"last_layer: is of one column of classes; {others}")
        if self.unit is not None:
            raise ValueError("last_layer: has a temperature, whose guarantee is for rows, and --unit is given")

    def _check_labels(self) -> None:
        if self.task == "regression" or len(self.classes) != 2:
            raise ValueError(
                "target: several columns are each no or yes: declare the two classes that they share, as no,yes"
            )
        for name in ("weighted_loss", "coverage"):
            if getattr(self, name):
                raise ValueError(f"{name}: is of one column to predict, and there are {len(self.labels)}; leave it out")
        if self.network == "ordinal":
            raise ValueError("network: 'ordinal' is of one column of ordered classes; use mlp or table")

    def _check_regression(self) -> None:
        if self.target_bounds is None:
            raise ValueError("target_bounds: is needed, the range of the target, since nothing is read off the data")
        for name in ("classes", "prior", "cost", "weighted_loss", "abstain", "coverage"):
            if getattr(self, name):
                raise ValueError(f"{name}: is of classes, and has no meaning for a number to predict; leave it out")
        if self.network == "ordinal":
            raise ValueError("network: 'ordinal' is of ordered classes; use mlp or table for a number to predict")

    def decision(self, counts: list[float] | None) -> Decision:
        """How the model answers, by what was declared and the noisy ``counts`` of the classes, one label after the other."""
        start = Decision(counted=counts is not None, abstain=self.abstain, coverage=self.coverage)
        if self.labels:
            return Decision(each=tuple(self._of_label(k, counts, start) for k in range(len(self.labels))))
        prior = complete_prior(self.prior, self.classes) if isinstance(self.prior, dict) else shares_of(counts or ())
        found = start.with_prior(prior, self.cost, self.classes)
        weights = found.loss_weights(len(self.classes)) if self.weighted_loss else ()
        return found.model_copy(update={"weights": weights})

    def _of_label(self, k: int, counts: list[float] | None, start: Decision) -> Decision:
        """The same of one label: ``--prior`` is its share of yes, and ``--cost`` that of missing a yes."""
        name, (no, yes) = self.labels[k], self.classes
        prior = shares_of(counts[2 * k : 2 * k + 2]) if counts is not None else ()
        cost: Any = self.cost
        if isinstance(self.prior, dict):
            check_names("prior", self.prior, self.labels)
            if name not in self.prior:
                raise bad("prior", None, f"gives no share of {name}", "Give the share of yes of every label, or count")
            prior = (1 - self.prior[name], self.prior[name])
        if isinstance(cost, dict):
            check_names("cost", cost, self.labels)
            cost = {no: 1.0, yes: cost[name]} if name in cost else {}
        return start.with_prior(prior, cost, self.classes)

    @cached_property
    def temperature(self) -> Calibration:
        """How the temperature of a last layer is chosen, as :func:`dpivon.steady` does; all weights have none."""
        if not self.last_layer:
            return Calibration()
        known = self.dataset_size, self.epsilon, self.delta
        return Calibration.planned(*known, held_out=HELD_OUT, accountant=self.accountant)

    @property
    def trained_on(self) -> int:
        """N less the examples that are held out for the temperature, on average."""
        return self.dataset_size - self.temperature.held_out

    @property
    def expected_batch(self) -> int:
        """b, of the examples that are trained on."""
        return min(self.batch_size, self.trained_on)

    @property
    def also(self) -> History:
        """Releases besides the gradients: rows of the account that σ is calibrated with."""
        budget = self.epsilon, self.delta
        shares = [shares_cost(*budget, counted=self.prior == COUNT)] if self.prior is not None else []
        return [*self.temperature.cost, *shares, *([sets_cost(*budget)] if self.coverage is not None else [])]


_FIX = "`dpivon train --help` explains every option"
_NEEDED = {
    "data": "Name the data: a folder of images, a table, or arrays",
    "epsilon": "State the budget you may spend, such as --epsilon 3",
    "delta": "State a probability well below 1/N, such as --delta 1e-5",
    "dataset_size": "State the number of examples N that may be public; it is never counted. --dataset-size 1000",
}
_TARGETS = {
    "classification": (
        "classes",
        "Name every class, such as --classes benign,malignant: which of them occur is private",
    ),
    "regression": ("target_bounds", "State the target's range, known without the data, such as --target-bounds 0:500"),
}


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> Config:
    """The configuration of a run. Flags override the file, both override the schema, and the rest are defaults.

    The defaults of batch, epochs and step size are functions of public numbers, those of ``defaults``.
    """
    given = _read(file) if file is not None else {}
    given = {**given, **{name: value for name, value in flags.items() if value is not None}}
    given = with_schema(given)
    task = given.get("task") or "classification"
    check_choice("task", task, tuple(_TARGETS), "Predict classes or a number")
    if (unit := given.get("unit")) is not None and unit not in (given.get("id"), *(given.get("ignore") or ())):
        given["ignore"] = [*(given.get("ignore") or ()), unit]  # who a row is of is never learned from
    for name, fix in (*_NEEDED.items(), _TARGETS[task]):
        if given.get(name) is None:
            raise bad(name, None, "is needed", fix)
    given = {**defaults(given), **network_of(given), **given}
    return validated(Config, given, "config", fix=_FIX, place=str(file) if file is not None else "")


def _read(file: Path) -> dict[str, Any]:
    raw = read_yaml("config", file, missing="Give the path of a YAML file", fix=_FIX)
    if raw is not None and not isinstance(raw, dict):
        raise bad("config", str(file), "holds no options", _FIX)
    return {str(name): value for name, value in (raw or {}).items()}


def write(config: Config, folder: Path) -> None:
    """Readable by its owner only: a seed, if there is one, takes the noise away from whoever knows it."""
    import yaml

    text = "# The resolved configuration of this run, as `dpivon train --config` takes it.\n"
    text += yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    replace(folder / CONFIG, text.encode(), SECRET)


def read(folder: Path) -> Config:
    """What a run was begun with."""
    fix = "Put the file back, or begin another run in another folder"
    raw = read_yaml("config", folder / CONFIG, missing=fix, fix=fix)
    return validated(Config, raw, "config", fix=fix, place=str(folder / CONFIG))


def check_same(ours: Config, theirs: Config, folder: Path) -> None:
    """An error that names the first option with which the run was not begun."""
    for name in type(ours).model_fields:
        mine, begun = getattr(ours, name), getattr(theirs, name)
        if name not in FREE and mine != begun:
            if isinstance(mine, dict) and isinstance(begun, dict):  # the first entry that differs, not all of them
                key = next(key for key in [*mine, *begun] if mine.get(key) != begun.get(key))
                name, mine, begun = f"{name}.{key}", mine.get(key), begun.get(key)
            fix = "Go on with what it was begun with, or begin another run with another --out"
            raise bad(name, _plain(mine), f"but the run in {folder} was begun with {_plain(begun)!r}", fix)


def fixed(config: Config) -> dict[str, Any]:
    """What must stay the same as long as the run lasts, as JSON."""
    found = {name: value for name, value in config.model_dump(mode="json").items() if name not in FREE}
    later = {"start_from": None, "last_layer": False, "precision": "fp32"}  # runs of earlier versions do not have them
    for name, usual in later.items():
        if found[name] == usual:
            del found[name]
    return found


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


# ---- what the user does not say: rules of public numbers, never of a row


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is not given yet. Of values that cannot be used something is returned too: validation will name them."""
    method = METHODS.get(str(given.get("method") or METHOD), METHODS[METHOD])
    try:
        n = max(1, int(given["dataset_size"]))
    except (TypeError, ValueError, OverflowError):
        n = 1
    ruled = given.get("network") in (None, "table", "ordinal")
    if ruled and _is_table(given) and given.get("method") is None and given.get("lr") is None:
        try:
            b = None if given.get("batch_size") is None else int(given["batch_size"])
            rule = table_defaults(n, float(given["epsilon"]), b)
            some = {"samples": METHODS[rule.method].samples, "physical_batch_size": AT_ONCE}
            return {**asdict(rule), **some, **_answers(given, n)}
        except (DpivonError, TypeError, ValueError):
            pass
    found: dict[str, Any] = {
        "batch_size": min(n, max(16, min(1024, n // 8))),
        "epochs": EPOCHS,
        "samples": method.samples,
    }
    found |= {"method": method.name} if given.get("method") is None else {}
    found |= {"last_layer": last} if (last := _last_layer(given, method.name)) else {}
    if given.get("lr") is not None:
        return found
    share = _calm({**found, **given}) if method.name.startswith("dp-ivon") else 1.0
    share *= OF_NUMBERS if given.get("task") == "regression" else 1.0
    start, lr = given.get("start_from"), method.lr
    if method.name == METHOD and is_prior(start) and not last:
        lr = FROM_PRIOR.get(str(start), lr / 2)
    return {**found, "lr": lr * share}


def _last_layer(given: Mapping[str, Any], method: str) -> bool:
    """Where the recipe from a prior can be trained: by its method, on classes that are no table's."""
    if given.get("last_layer") is not None:
        return bool(given["last_layer"])
    classes = given.get("task") in (None, "classification") and not _is_table(given)
    return method == METHOD and classes and is_prior(given.get("start_from"))


def _answers(given: Mapping[str, Any], n: int) -> dict[str, Any]:
    """A class is answered where it is likelier than usual, by counted shares: else a rare one would hardly ever be."""
    target = given.get("target")
    labels = 1 if target is None or isinstance(target, str) else len(target)
    enough = n * float(given["epsilon"]) >= COUNTED_FROM * len(given["classes"]) * math.sqrt(labels)
    decided = any(given.get(name) is not None for name in ("prior", "cost"))
    return {"prior": COUNT, "cost": "balanced"} if enough and not decided else {}


def _is_table(given: Mapping[str, Any]) -> bool:
    try:
        return given.get("task", "classification") == "classification" and kind_of(str(given["data"])) == "table"
    except DpivonError:
        return False


def _calm(given: Mapping[str, Any]) -> float:
    """The share of IVON's step size that noise leaves room for.

    T steps of noise σC/b walk a weight by about lr·√T·σC/b; that is held to half a unit, and the share to 0.5.
    """
    try:
        b = int(given["batch_size"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to warn of is said when the run is planned
            plan = budget(
                dataset_size=int(given["dataset_size"]),
                batch_size=b,
                epochs=int(given["epochs"]),
                delta=float(given["delta"]),  # YAML reads 1e-5 as a text
                target_epsilon=float(given["epsilon"]),
                accountant="rdp",  # the fastest: here σ decides a step size alone
            )
        walk = math.sqrt(plan.steps) * plan.noise_multiplier * float(given.get("max_grad_norm", 1.0)) / b
        return min(_LARGEST, _WANDER / walk)
    except (DpivonError, KeyError, TypeError, ValueError, ArithmeticError):
        return _LARGEST
