"""A finished run as a folder that may be published: it predicts by itself, in dpivon and in plain PyTorch, and says what it is.

model.json, decision.json, posterior.safetensors   for `dpivon predict`: tensors and JSON, loading executes nothing
features.safetensors                               for that too, of a last layer: the network before it, and flat coordinates
model.pt2                                          for torch.export.load: encoded rows in, probabilities out
model.safetensors, privacy.json                    the weights after the last step, and what was released
model-card.md, model-card.json                     what it is, for people and for programs
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.durable.files import read_json, replace
from dpivon.errors import bad
from dpivon.predict import RegressionPrediction
from dpivon.privacy.export import export
from dpivon.report.run_folder import SUMMARY
from dpivon.train.published import DECISION, FEATURES, FOLDER, NAME, Published, load

PROGRAM, CARD = "model.pt2", "model-card"
_FIX = "Give the folder of a finished `dpivon train`"


_CARD = """# {title}

Unit of privacy: {unit}.

(ε = {epsilon:.4g}, δ = {delta:g})-differentially private by {by}, against adding or removing one of {size} units; {releases}
releases. Every further use of the same data adds to ε.{started}{seeded}

| | |
|---|---|
{table}

## Use

    dpivon predict FOLDER new.csv --out predictions.csv

In plain PyTorch, for encoded rows `x` of shape [n, {shape}]; model.json says how a column is encoded:

```python
import torch
model = torch.export.load("FOLDER/{program}").module()
{returns} = model(x)
```

`dpivon predict` executes nothing of the folder. `torch.export.load` is torch's own: use it on folders that you trust.

## Results on test data

{tested}

## Assumed to be public

{public}

## Not chosen from the data

{not_chosen}
"""


def export_run(run: Path, out: Path, delta: float | None, scores: bool = False) -> dict[str, float]:
    """Write the folder ``out``, whole or not at all; ε by every accountant.

    ``scores`` puts the results on the test data into the card. They were computed without noise: no ε covers those rows.
    """
    published, summary = load(run), read_json("run", run / SUMMARY, _FIX)
    if scores and not summary.get("metrics"):
        raise bad("scores", True, f"but {run} was not tested", "Start the same `dpivon train` again with --test")
    if out.exists():
        raise bad("out", str(out), "exists", "Give a new folder")
    making = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        spent = export(run, making, delta, posterior=published.posterior)
        for name in (NAME, DECISION, FEATURES):
            if (run / FOLDER / name).exists():
                shutil.copyfile(run / FOLDER / name, making / name)
        save_program(published, making / PROGRAM)
        facts = card(summary, read_json("run", making / "privacy.json", _FIX), published, scores)
        replace(making / f"{CARD}.json", (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())
        replace(making / f"{CARD}.md", markdown(facts).encode())
        for path in making.iterdir():
            path.chmod(0o644)  # of what may be published nothing is a secret
        making.rename(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return spent


class Program(nn.Module):
    """Probabilities of the network at the posterior mean, as ``dpivon predict --samples 0`` gives them.

    Of several labels: probabilities of yes, [n, labels]. Of a number to predict: its mean and standard deviation, [n] each.
    """

    def __init__(self, published: Published) -> None:
        super().__init__()
        self.description, self.decision = published.description, published.decision
        self.features = copy.deepcopy(published.features)
        network = self.description.network
        self.network = network.build() if self.features is None else self.features.last_layer(network.classes)
        mean = published.posterior.for_model(self.network).mean
        self.network.load_state_dict({name: t.float() for name, t in mean.items()}, strict=False)
        if self.features is not None:  # both matrices are one
            layer: Any = self.network
            layer.weight = nn.Parameter((layer.weight.double() @ self.features.matrix.double().T).float())
            del self.features.matrix

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x if self.features is None else self.features.together(x)
        if self.description.noise is not None:
            mean, variance = self.description.noise.moments(self.network(x))
            found = self.description.in_units(RegressionPrediction(mean, variance, variance, variance))
            return found.mean.float(), found.variance.sqrt().float()
        logits = self.network(x)
        if self.description.labels:
            return self.decision.probabilities(torch.stack([-logits, logits], -1).sigmoid())[..., 1]
        return self.decision.probabilities(logits.softmax(-1))


def save_program(published: Published, path: Path) -> None:
    """The network as torch's own exported program, which needs none of our code; rows of any number."""
    with torch.random.fork_rng(devices=[]):  # first weights, all of them replaced
        program = Program(published).eval()
    rows = torch.zeros(2, *published.description.inputs.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.export.export(program, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        for node in made.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(made, path)


def card(summary: dict[str, Any], privacy: dict[str, Any], published: Published, scores: bool) -> dict[str, Any]:
    """What the model is, as JSON."""
    description, about = published.description, summary.get("about", {})
    epsilon = privacy["epsilon"]
    least = min(epsilon, key=lambda name: float(epsilon[name]))
    unit = summary.get("unit") or ""
    inputs = description.inputs
    return {
        "title": about.get("title") or about.get("dataset") or "A private model",
        **{key: about.get(key, "") for key in ("purpose", "responsible", "dataset", "date")},
        "unit_of_privacy": f"one person, with all their rows (column {unit})" if unit else "one row of the data",
        "epsilon": epsilon[least],
        "delta": privacy["delta"],
        "accountant": least,
        "epsilon_by_accountant": epsilon,
        "adjacency": summary["adjacency"],
        "dataset_size": summary["dataset_size"],
        "releases": summary["releases"],
        "seed_is_secret": summary["seed_is_secret"],
        "started_from": summary.get("started_from"),
        "predicts": {"target": summary["task"].get("target"), "classes": list(description.classes)}
        | ({} if description.target_bounds is None else {"range": list(description.target_bounds.range)})
        | ({"labels": list(description.labels)} if description.labels else {}),
        "inputs": {
            "example": inputs.describe(),
            "shape": list(inputs.shape),
            "declared": inputs.model_dump(mode="json"),
        },
        "model": {
            "network": description.trained,
            "method": description.method,
            "dpivon": description.dpivon,
        },
        "public_inputs": summary["public_inputs"],
        "choices_not_made": summary["choices_not_made"],
        "scores": {"not_private": True, **summary["metrics"]} if scores else None,
        "findings": [*summary.get("warnings", ()), *summary.get("findings", ())] if scores else [],
    }


def markdown(facts: dict[str, Any]) -> str:
    """The card for people."""
    model, predicts = facts["model"], facts["predicts"]
    each = "each " if predicts.get("labels") else ""
    number = "a number from {:g} to {:g}".format(*predicts.get("range", (0, 0)))
    table = {
        **{name: facts[name.lower()] or "not stated" for name in ("Purpose", "Dataset", "Responsible", "Date")},
        "Predicts": f"{predicts['target'] or 'a class'}: {each}{', '.join(predicts['classes']) or number}",
        "Model": f"{model['network']}, {model['method']}, dpivon {model['dpivon']}",
    }
    seeded = "" if facts["seed_is_secret"] else "\n\n**The seed was set: whoever knows it can subtract the noise.**"
    tested = ["Not published: scores on test data are not private."]
    if facts["scores"] is not None:
        tested = ["Computed without noise: no ε covers those rows.", "", _listed(facts["findings"])]
    rows = "\n".join(f"| {name} | {_line(value)} |" for name, value in table.items())
    return _CARD.format(
        title=_line(facts["title"]),
        unit=_line(facts["unit_of_privacy"]),
        epsilon=float(facts["epsilon"]),
        delta=facts["delta"],
        by=facts["accountant"].upper(),
        size=facts["dataset_size"],
        releases=facts["releases"],
        started="" if facts["started_from"] is None else f"\n\n{_line(facts['started_from']['sentence'])}",
        seeded=seeded,
        table=rows,
        shape=", ".join(map(str, facts["inputs"]["shape"])),
        program=PROGRAM,
        returns="mean, standard_deviation" if not predicts["classes"] else "of_yes" if each else "probabilities",
        tested="\n".join(tested),
        public=_listed(facts["public_inputs"]),
        not_chosen=_listed(facts["choices_not_made"]),
    )


def _listed(sentences: list[str]) -> str:
    return "\n".join(f"- {_line(text)}" for text in sentences)


def _line(text: Any) -> str:
    """On one line of a table; what a reader of Markdown would obey is escaped."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
