"""The folder ``model/``: all that prediction needs and that may be given away. Tensors and JSON; loading executes nothing."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from dpivon._version import __version__
from dpivon.bounds import Bounds
from dpivon.decisions import Decision
from dpivon.durable.files import check_parent, read_json, replace, replacing, sync_folder
from dpivon.errors import DpivonError, bad, check_number
from dpivon.gaussian import GaussianNoise, interval, unscaled
from dpivon.methods import Learner, describe
from dpivon.methods import method as make_method
from dpivon.posterior import Posterior, SampledPosterior
from dpivon.predict import ClassPrediction, RegressionPrediction, entropy
from dpivon.priors.features import Features
from dpivon.priors.start import check_free, start_from
from dpivon.privacy.accounting.recorded import CONFIG
from dpivon.privacy.export import export
from dpivon.sources import AnySource, Examples, kind_of
from dpivon.sources.base import Targets
from dpivon.sources.columns import Label, Numeric
from dpivon.sources.owner import stop_at
from dpivon.sources.table import Table
from dpivon.terminal import cell
from dpivon.train.networks import Network
from dpivon.yaml_files import validated

FOLDER, NAME, DECISION, FEATURES = "model", "model.json", "decision.json", "features.safetensors"
ABSTAIN = "abstain"  # in place of an answer
_FIX = "Give the folder that `dpivon train` made, or the model/ in it"


class Description(BaseModel):
    """``model.json``: how to rebuild preprocessing and network. A function of the configuration, never of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    dpivon: str = __version__
    inputs: Annotated[AnySource, Field(discriminator="kind")]
    classes: tuple[Label, ...] = ()
    target_bounds: Numeric | None = None
    noise_std: Annotated[float, Field(gt=0)] | None = None
    network: Network
    method: str
    options: dict[str, bool | int | float | str]
    lr: float
    dataset_size: Annotated[int, Field(ge=1)]
    last_layer: bool = False  # one linear layer is trained, on features of the network: those in features.safetensors
    samples: Annotated[int, Field(ge=0, le=10_000)]
    source: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Description:
        outputs = len(self.labels or self.classes) if self.noise is None else self.noise.outputs
        if outputs != self.network.classes or (self.classes and self.noise is not None):
            raise ValueError(f"network: has {self.network.classes} outputs, which is not what is to be predicted")
        return self

    @property
    def targets(self) -> Targets:
        """What the targets may be: classes, or a range."""
        return self.classes if self.target_bounds is None else self.target_bounds

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of yes and no to predict, if there are several; the second class is yes."""
        target = self.inputs.target if isinstance(self.inputs, Table) else ""
        return () if isinstance(target, str) else target

    @property
    def noise(self) -> GaussianNoise | None:
        """The likelihood of a number to predict; None for classes."""
        return None if self.target_bounds is None else GaussianNoise(self.noise_std)

    @property
    def _range(self) -> Bounds:
        assert self.target_bounds is not None
        return Bounds.check("target_bounds", self.target_bounds.range, 1)

    def in_units(self, found: RegressionPrediction) -> RegressionPrediction:
        """A prediction on [−1, 1] in the units of the target."""
        return unscaled(found, self._range)

    def target_values(self, examples: Examples) -> Tensor:
        """The numbers to predict in their own units, clamped to the declared range."""
        assert examples.targets is not None
        return torch.from_numpy(self._range.unscale(examples.targets.numpy()))

    @property
    def trained(self) -> str:
        """What is trained, in words."""
        network = self.network.describe()
        return f"one linear layer on features of {network}" if self.last_layer else network

    def learner(
        self,
        generator: torch.Generator | None = None,
        ema: float | None = None,
        start: str | Posterior | SampledPosterior | None = None,
        features: Features | None = None,
        trace: float | None = None,
    ) -> Learner:
        """The method at work on a new network of this kind, or on a last layer of zero where there are ``features``.

        Its first weights may be those of a prior by its name or file, or the mean of an earlier posterior of this very network.
        Such a posterior is then the prior, if it has a width and the method takes one.
        """
        options: dict[str, Any] = {**({} if trace is None else {"trace": trace}), **self.options}
        network = self.network.build() if features is None else features.last_layer(self.network.classes)
        if isinstance(start, Posterior | SampledPosterior):
            start = start.for_model(network)
            network.load_state_dict({**network.state_dict(), **start.mean})
        elif start is not None and features is None:
            found = start_from(network, start, input_mean=0.5, input_std=0.5)  # sources map pixels to [−1, 1]
            check_free(found, start, "Give the folder of that run, which says what it released")
        learner = make_method(
            self.method,
            network,
            dataset_size=self.dataset_size,
            lr=self.lr,
            ema=ema,
            generator=generator,
            **options,
        )
        if isinstance(start, Posterior) and start.has_width and learner.takes_prior:
            learner._take_prior(start if features is None else _as_prior(start))
        return learner


@dataclass(frozen=True, eq=False)
class Published:
    """A model as it was published: how to read examples, and the posterior to predict from.

    Where there are ``features``, examples go through these before the model, which is a last layer.
    """

    description: Description
    model: nn.Module
    posterior: Posterior | SampledPosterior
    decision: Decision
    features: Features | None = None

    def predict(self, inputs: Tensor, samples: int | None = None, seed: int = 0) -> ClassPrediction:
        """Class probabilities averaged over the posterior; the same for the same seed. 0 samples is the posterior mean."""
        likelihood = "multilabel" if self.description.labels else "categorical"
        found = self._predict(inputs, samples, seed, likelihood=likelihood)
        own = self.decision
        if not (own.weights or own.factors or own.each) and own.temperature == 1:
            return found
        probs = self.decision.probabilities(found.probs)
        return changed(found, probs=probs, entropy=entropy(probs).to(found.entropy.dtype))

    def regress(self, inputs: Tensor, samples: int | None = None, seed: int = 0) -> RegressionPrediction:
        """The number to predict, in its own units, with the variance of the posterior and of the noise."""
        noise = self.description.noise
        assert noise is not None
        found = self._predict(inputs, samples, seed, likelihood="gaussian", noise_variance=noise.moments)
        return self.description.in_units(found)

    def _predict(self, inputs: Tensor, samples: int | None, seed: int, **options: Any) -> Any:
        samples = self.description.samples if samples is None else samples
        generator = torch.Generator().manual_seed(seed)
        inputs = inputs if self.features is None else self.features(inputs)
        method = describe(self.description.method)
        return method.predict(self.model, self.posterior, inputs, samples, generator=generator, **options)


def _as_prior(posterior: Posterior) -> Posterior:
    """As wide as its iterates were, of which a last layer with a temperature has a quarter to predict with."""
    trace = check_number("trace", posterior.metadata.get("trace", 1.0), _FIX, above=0.0)
    return changed(posterior, variance={name: v / trace for name, v in posterior.variance.items()})


def publish(run: Path, description: Description, learner: Learner, delta: float, decision: Decision) -> Path:
    """Write RUN/model from the newest checkpoint's model, the learner's posterior and the description; whole or not at all.

    ``decision.json`` is beside ``model.json`` since it may hold what was released with noise.
    """
    out, making = run / FOLDER, run / ".model.tmp"
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed while it wrote
    export(run, making, delta, posterior=learner.posterior())
    for name, value in ((NAME, description), (DECISION, decision)):
        text = json.dumps(value.model_dump(mode="json"), indent=1, ensure_ascii=False)
        replace(making / name, (text + "\n").encode())
    if description.last_layer:
        with replacing(making / FEATURES) as temporary:  # on disk before the folder has its name
            shutil.copyfile(run / FEATURES, temporary)
    making.rename(out)
    sync_folder(run)
    return out


def describe_folder(where: Path, name: str = "model") -> tuple[Path, Description]:
    """The folder of a published model, which is its own or in that of a run, and its ``model.json``."""
    folder = where / FOLDER if (where / FOLDER / NAME).exists() else where
    path = folder / NAME
    if not path.exists():
        if (where / CONFIG).exists():
            fix = "Start the same `dpivon train` again to finish it"
            raise bad(name, str(where), "is a run that is not finished", fix)
        raise bad(name, str(where), "holds no published model", _FIX)
    return folder, validated(Description, read_json(name, path, _FIX), name, fix=_FIX, place=str(path))


def load(where: Path, name: str = "model") -> Published:
    """A published model, from its own folder or from that of a run. ``name`` is the argument it was given as."""
    folder, description = describe_folder(where, name)
    own = folder / DECISION
    answers = read_json(name, own, _FIX) if own.exists() else {}
    decision = validated(Decision, answers, name, fix=_FIX, place=str(own))
    sampled = folder / "samples.safetensors"
    kind: type[Posterior] | type[SampledPosterior] = SampledPosterior if sampled.exists() else Posterior
    posterior = kind.load(sampled if sampled.exists() else folder / "posterior.safetensors")
    features = load_features(folder, description) if description.last_layer else None
    with torch.device("meta"):  # sizes only: a description may ask for more memory than there is
        trained = description.network.build() if features is None else features.last_layer(description.network.classes)
        size = sum(p.numel() for p in trained.parameters())
    if posterior.num_parameters != size:
        problem = f"describes a network of {size} weights, and its posterior has {posterior.num_parameters}"
        raise bad(name, str(folder), problem, _FIX)
    return assembled(description, posterior, decision, features)


def load_features(folder: Path, description: Description) -> Features:
    """The features that a folder holds: of this network, and of examples as they are described."""
    path = folder / FEATURES
    with torch.device("meta"):  # sizes only, as in load
        network = description.network.build()
    features = Features.load(path, network)
    try:
        features(torch.zeros(1, *description.inputs.shape))
    except (DpivonError, RuntimeError) as error:
        raise bad("path", str(path), f"cannot take an example of this model ({error})", _FIX) from None
    return features


def assembled(
    description: Description,
    posterior: Posterior | SampledPosterior,
    decision: Decision,
    features: Features | None = None,
) -> Published:
    """A model in memory as it is, or will be, published."""
    with torch.random.fork_rng(devices=[]):  # first weights, all of them replaced by the posterior's
        model = description.learner(features=features).model
    posterior.for_model(model)
    return Published(description, model, posterior, decision, features)


def predict_file(
    published: Published,
    where: str,
    out: Path,
    *,
    samples: int | None = None,
    seed: int = 0,
    abstain: float | None = None,
    proceed: bool = False,
) -> ClassPrediction | RegressionPrediction:
    """Read and encode ``where`` as the model's own data was, predict, and write a CSV. Spends no privacy.

    Rows that do not look as declared stop it, unless ``proceed``.

    One line per example: the answer (``abstain`` where there is none), the set of classes if the model predicts sets, the
    probability of every class, and how uncertain the model is. Of several labels: the answer to each, its probability of yes,
    and how uncertain the model is on average over them. Of a number: the mean, its 95 % interval, and its standard
    deviation, whole and the part of it that more data would remove. Names of files and classes that a spreadsheet would
    execute stand after an apostrophe.
    """
    source = published.description.inputs
    if (kind := kind_of(where)) != source.kind:
        raise bad("data", where, f"is of the kind {kind}, and the model takes {source.describe()}", "Give data like it")
    check_parent("out", out)
    if not proceed:
        stop_at("data", where, source.look(where, learning=False))
    examples = source.read(where, None)
    first = ["file" if kind == "image" else "row"]
    names = [[name] for name in examples.names]
    if examples.ids is not None and isinstance(source, Table):
        first = [*first, str(source.id)]
        names = [[*name, own] for name, own in zip(names, examples.ids, strict=True)]
    found: ClassPrediction | RegressionPrediction
    if published.description.noise is not None:
        found = published.regress(examples.inputs, samples, seed)
        header, lines = ["predicted", "low_95", "high_95", "std", "epistemic_std"], _number_lines(found)
    else:
        found = published.predict(examples.inputs, samples, seed)
        lines_of = _label_lines if published.description.labels else _class_lines
        header, lines = lines_of(published, found, abstain)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(cell, first), *header])
    writer.writerows([*map(cell, name), *line] for name, line in zip(names, lines, strict=True))
    replace(out, text.getvalue().encode())
    return found


def _number_lines(found: RegressionPrediction) -> list[list[str]]:
    columns = (found.mean, *interval(found), found.variance.sqrt(), found.epistemic.sqrt())
    return [[f"{value:.9g}" for value in row] for row in torch.stack(columns, 1).tolist()]


def _class_lines(
    published: Published, found: ClassPrediction, abstain: float | None
) -> tuple[list[str], list[list[str]]]:
    classes, decision = published.description.classes, published.decision
    if abstain is not None:
        decision = decision.model_copy(update={"abstain": abstain})
    with_sets = ["set"] if decision.thresholds else []
    header = ["predicted", *with_sets, *(f"p({name})" for name in classes), "entropy", "mutual_information"]
    sets = decision.sets(found.probs).tolist() if with_sets else [[]] * len(found.probs)
    columns = (decision.labels(found.probs), found.probs, found.entropy, found.mutual_information)
    lines = []
    for inside, label, probs, uncertainty, information in zip(sets, *(c.tolist() for c in columns), strict=True):
        numbers = (f"{value:.9g}" for value in (*probs, uncertainty, information))
        held = [cell(" ".join(c for c, there in zip(classes, inside, strict=True) if there))] if with_sets else []
        lines.append([cell(ABSTAIN if label < 0 else classes[label]), *held, *numbers])
    return header, lines


def _label_lines(
    published: Published, found: ClassPrediction, abstain: float | None
) -> tuple[list[str], list[list[str]]]:
    names, classes, decision = published.description.labels, published.description.classes, published.decision
    if abstain is not None:
        each = tuple(own.model_copy(update={"abstain": abstain}) for own in decision.each)
        decision = decision.model_copy(update={"each": each})
    header = [text for name in names for text in (cell(name), f"p({name})")]
    uncertain = torch.stack([found.entropy.mean(1), found.mutual_information.mean(1)], 1).tolist()
    lines = []
    for labels, probs, last in zip(
        decision.labels(found.probs).tolist(), found.probs[..., 1].tolist(), uncertain, strict=True
    ):
        own = ((cell(ABSTAIN if k < 0 else classes[k]), f"{p:.9g}") for k, p in zip(labels, probs, strict=True))
        lines.append([text for pair in own for text in pair] + [f"{value:.9g}" for value in last])
    return [*header, "entropy", "mutual_information"], lines
