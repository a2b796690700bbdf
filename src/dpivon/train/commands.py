"""``dpivon train`` and ``dpivon predict``: what people type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from dpivon.errors import bad, check_number, check_whole
from dpivon.methods import METHODS
from dpivon.privacy.accounting import ACCOUNTANTS, DEFAULT
from dpivon.terminal import say, warnings_as_lines

_DATA, _PUBLIC, _MODEL, _RUN = "Data", "What is public", "Model and training", "Running"


def _method_names(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith("dp") and name.startswith(incomplete)]


@dataclass(frozen=True)
class _Flag:
    """An option of ``dpivon train`` besides its name: those that are no field of a configuration have their own code."""

    kind: Any
    panel: str
    help: str
    names: tuple[str, ...] = ()
    complete: Any = None

    def parameter(self, name: str) -> Parameter:
        """As typer reads it: unset is None, or False for a switch without a negation."""
        given = {"help": self.help, "rich_help_panel": self.panel, "autocompletion": self.complete}
        switch = self.kind is bool and not any("/" in name for name in self.names)
        kind: Any = bool if switch else self.kind | None
        annotation: Any = Annotated[kind, typer.Option(*self.names, **given)]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=False if switch else None, annotation=annotation)


_FLAGS = {
    "epsilon": _Flag(float, _PUBLIC, "The privacy budget ε."),
    "delta": _Flag(float, _PUBLIC, "Its δ, below 1/N."),
    "dataset_size": _Flag(int, _PUBLIC, "The public number N of examples, or with --unit of people. Never counted."),
    "classes": _Flag(str, _PUBLIC, "Every class, separated by commas. Of images: the names of the folders."),
    "prior": _Flag(
        list[str], _PUBLIC, "NAME=SHARE of a class, repeated; or count: with noise, charged as a small part of ε."
    ),
    "cost": _Flag(
        list[str], _PUBLIC, "NAME=COST of not recognising a class, 1 by default; or balanced: by the classes' shares."
    ),
    "abstain": _Flag(float, _PUBLIC, "Give no answer where no class reaches this probability."),
    "target": _Flag(
        list[str], _PUBLIC, "The column of a table to predict; repeated: several, each with the two --classes no,yes."
    ),
    "unit": _Flag(
        str, _PUBLIC, "The column that names a row's person: privacy is then per person, and N counts people."
    ),
    "rows_per_unit": _Flag(int, _PUBLIC, "With --unit: most rows of a person per step, drawn afresh; all by default."),
    "target_bounds": _Flag(str, _PUBLIC, "LOW:HIGH of a number to predict, with --task regression."),
    "id": _Flag(str, _PUBLIC, "The column that names a row or its person: never learned from, carried to predictions."),
    "bounds": _Flag(
        list[str],
        _PUBLIC,
        "COLUMN:LOW:HIGH, repeated; LOW:HIGH for arrays, or for all other columns. Known without the data.",
    ),
    "categories": _Flag(list[str], _PUBLIC, "COLUMN:A,B,C, repeated: a column of texts or codes."),
    "schema": _Flag(Path, _PUBLIC, "A YAML file with all of these; --write-schema drafts one."),
    "ignore": _Flag(list[str], _PUBLIC, "A column that is not used; repeat it."),
    "image_size": _Flag(int, _PUBLIC, "Images are resized to this side; 32 by default."),
    "channels": _Flag(int, _PUBLIC, "1 for grey, 3 for RGB (default)."),
    "source": _Flag(str, _PUBLIC, "Where the bounds come from; printed beside them."),
    "test": _Flag(str, _DATA, "Scored at the end, never trained on. Its scores are NOT private."),
    "heldout": _Flag(
        str, _DATA, "Scored after an epoch (of more than 50, at least 25 times), never trained on. NOT private."
    ),
    "calibration": _Flag(str, _DATA, "With --coverage: private rows that are not trained on; charged as a part of ε."),
    "coverage": _Flag(float, _MODEL, "Predict sets of classes that hold the true one so often, such as 0.9."),
    "delimiter": _Flag(str, _DATA, "Of a CSV; a comma by default. tab for a tab."),
    "decimal": _Flag(str, _DATA, "The decimal mark of a CSV: . (default) or ,"),
    "encoding": _Flag(str, _DATA, "Of a CSV, such as cp1252; UTF-8 by default."),
    "write_schema": _Flag(Path, _DATA, "Draft a schema from the names of the columns, train nothing."),
    "public_sample": _Flag(Path, _DATA, "With --write-schema: a PUBLIC table to take ranges from."),
    "check": _Flag(bool, _DATA, "Show, to the owner, what does not fit. NOT private; train nothing.", ("--check",)),
    "proceed": _Flag(bool, _DATA, "Train although the rows do not look as declared.", ("--proceed",)),
    "method": _Flag(
        str,
        _MODEL,
        "By its name in `dpivon methods`; dp-steady unless it is given.",
        complete=_method_names,
    ),
    "option": _Flag(list[str], _MODEL, "NAME=VALUE of the method; repeat it."),
    "network": _Flag(
        str, _MODEL, "auto, mlp, table, ordinal (classes in their order), small, paper, compact or wrn-16-4."
    ),
    "start_from": _Flag(
        str,
        _MODEL,
        "A prior that no one's data is in: images-32, or a file of `dpivon prior learn`. dp-steady trains one layer on its "
        "features, other methods all weights. Or the RUN or published folder of an earlier run; --epsilon is then for both.",
    ),
    "last_layer": _Flag(
        bool,
        _MODEL,
        "From a prior, train one linear layer on its network's features, and a temperature: dp-steady alone can, and does. "
        "--no-last-layer trains all weights from there.",
        ("--last-layer/--no-last-layer",),
    ),
    "hidden": _Flag(
        str, _MODEL, "Widths of an MLP's hidden layers, separated by commas; by default 64, of a table by N·ε."
    ),
    "epochs": _Flag(int, _MODEL, "Passes of ⌈N/b⌉ steps; 40 by default, of a table by N and ε."),
    "batch_size": _Flag(int, _MODEL, "Expected batch b; of a table N, at most 2048, else N/8, 16 to 1024."),
    "lr": _Flag(float, _MODEL, "Step size; by default the method's, smaller under much noise."),
    "max_grad_norm": _Flag(float, _MODEL, "Clip bound C; 1 by default, of a table 2 to 10 by N·ε."),
    "ema": _Flag(float, _MODEL, "Average the iterates with this decay."),
    "samples": _Flag(int, _MODEL, "Posterior draws that a prediction averages."),
    "weighted_loss": _Flag(
        bool, _MODEL, "Weigh losses by --cost; ε stays as it is.", ("--weighted-loss/--no-weighted-loss",)
    ),
    "accountant": _Flag(str, _MODEL, f"One of {', '.join(ACCOUNTANTS)}; {DEFAULT} by default."),
    "task": _Flag(str, _MODEL, "classification (default) or regression."),
    "noise_std": _Flag(str, _MODEL, "Of a regression, as a share of half the range; learned by default."),
    "out": _Flag(str, _RUN, "The RUN folder; dpivon-run by default."),
    "title": _Flag(str, _RUN, "Of the report and the model card."),
    "purpose": _Flag(str, _RUN, "What the model is for; in the report and the card."),
    "responsible": _Flag(str, _RUN, "Who answers for it; likewise."),
    "dataset": _Flag(str, _RUN, "The name of the data; by default that of its file."),
    "config": _Flag(Path, _RUN, "YAML with any of these options; flags override it."),
    "seed": _Flag(int, _RUN, "Decides the noise too: only for public data. Default: a secret."),
    "secure": _Flag(bool, _RUN, "Noise from the operating system; no exact resume.", ("--secure/--no-secure",)),
    "device": _Flag(str, _RUN, "cpu (default) or cuda."),
    "precision": _Flag(str, _RUN, "fp32 (default), or bf16 for forward and backward: faster on a GPU."),
    "physical_batch_size": _Flag(int, _RUN, "Most examples at once; by default 256 on a CPU, and on a GPU what fits."),
    "checkpoint_seconds": _Flag(float, _RUN, "Longest time between checkpoints; 30 by default."),
    "as_json": _Flag(bool, _RUN, "Print the summary as JSON.", ("--json",)),
    "quiet": _Flag(bool, _RUN, "Print nothing.", ("--quiet", "-q")),
}
_DATA_HELP = "A folder with one folder of images per class, .csv or .parquet tables, an .npz, or x.npy,y.npy."


def train(data: list[str] | None = None, **flags: Any) -> None:
    """Train a private model of classes or of a number on your own data. Nothing is learned from the data without privacy.

    Classes, ranges, categories, image size and N are declared by you and become public; values outside a range are clamped.
    Stop it at any time: the same command goes on, to the bit on a CPU, and ε never falls.

    Example: dpivon train patients.csv --schema patients.yaml --epsilon 3 --delta 1e-4 --dataset-size 400 --out run

    Example: dpivon train photos/ --classes cat,dog --start-from images-32 --epsilon 8 --delta 1e-5 --dataset-size 10000

    Example: dpivon train digits.npz --classes 0,1,2,3,4,5,6,7,8,9 --bounds 0:16 --epsilon 4 --delta 1e-4 --dataset-size 1400

    Example: dpivon train patients.csv --target ill --write-schema patients.yaml
    """
    from dpivon.train.config import resolve

    to, sample, config, check, proceed, as_json, quiet = map(
        flags.pop, ("write_schema", "public_sample", "config", "check", "proceed", "as_json", "quiet")
    )
    where = ",".join(data) if data else None
    if to is not None:
        _draft(where, flags, to, sample)
        return
    if sample is not None:
        raise bad("public-sample", str(sample), "was given without --write-schema", "Give --write-schema FILE too")
    option, bounds, categories = map(flags.pop, ("option", "bounds", "categories"))
    given = {**flags, "data": where, "classes": _listed(flags["classes"]), "options": _options(option)}
    given |= {"hidden": _widths(_listed(flags["hidden"])), **_declared(bounds, categories)}
    if flags["target_bounds"] is not None:
        given["target_bounds"] = _range("target-bounds", flags["target_bounds"])
    given |= {
        "prior": _by_class("prior", flags["prior"], "count"),
        "cost": _by_class("cost", flags["cost"], "balanced"),
    }
    with warnings_as_lines():
        settings = resolve(given, config)
        if check:
            _show_look(settings)
            return
        _train(settings, proceed, as_json, quiet)


def _for_typer() -> None:
    """Give ``train`` the signature that typer reads its options from."""
    data = Annotated[list[str] | None, typer.Argument(help=_DATA_HELP)]
    first = Parameter("data", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=data)
    parameters = [first, *(flag.parameter(name) for name, flag in _FLAGS.items())]
    train.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    train.__annotations__ = {p.name: p.annotation for p in parameters}


_for_typer()


def _train(settings: Any, proceed: bool, as_json: bool, quiet: bool) -> None:
    from rich.console import Console

    from dpivon.train.display import Display, conclude
    from dpivon.train.run import train as run

    if settings.seed is not None:
        why = "decides the privacy noise, so whoever knows it can take the noise away"
        say(f"warning: seed={settings.seed}: {why}. Leave it out unless the data is public.", err=True)
    try:
        summary = run(settings, Display(quiet or as_json), proceed=proceed)
    except SystemExit:  # by a signal, after the checkpoint was written
        if not quiet:
            say(f"stopped and saved in {settings.out}; the same command goes on", err=True)
        raise
    if as_json:
        say(json.dumps(summary, allow_nan=False))
    elif not quiet:
        conclude(summary, Path(settings.out), Console(highlight=False))


def predict(
    model: Annotated[Path, typer.Argument(help="The RUN folder of `dpivon train`, or the published model/ of one.")],
    data: Annotated[list[str], typer.Argument(help="Data like that of training; labels are not needed and not read.")],
    out: Annotated[Path, typer.Option(help="Where to write the predictions (.csv).")] = Path("predictions.csv"),
    samples: Annotated[
        int | None, typer.Option(help="Posterior draws to average; by default as trained. 0: the posterior mean.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the posterior draws; the same gives the same predictions.")] = 0,
    abstain: Annotated[
        float | None,
        typer.Option(help="Answer `abstain` where no class reaches this probability; by default as trained."),
    ] = None,
    proceed: Annotated[bool, typer.Option("--proceed", help="Predict although rows do not look as declared.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Predict with a private model: probabilities averaged over its posterior, and two measures of uncertainty.

    entropy is the whole uncertainty in nats; mutual_information is the part that more data would remove. The folder
    model/ is all that is needed, and loading it executes nothing. It spends no privacy.

    Example: dpivon predict run new-patients.csv --out predictions.csv

    Example: dpivon predict model photos/ --samples 100
    """
    from dpivon.predict import ClassPrediction
    from dpivon.train.published import load, predict_file

    fix = "Use a whole number of draws, or 0 for the posterior mean"
    samples = None if samples is None else check_whole("samples", samples, fix)
    if abstain is not None:
        check_number("abstain", abstain, "Use a probability such as 0.7", at_least=0.0, below=1.0)
    if check_whole("seed", seed, "Use a small number such as 0") >= 2**63:
        raise bad("seed", seed, "is too large", "Use a small number such as 0")
    found = predict_file(load(model), ",".join(data), out, samples=samples, seed=seed, abstain=abstain, proceed=proceed)
    stated: dict[str, Any] = {"out": str(out)}
    if isinstance(found, ClassPrediction):
        stated |= {"examples": len(found.probs), "samples": found.samples, "mean_entropy": float(found.entropy.mean())}
        stated["mean_mutual_information"] = float(found.mutual_information.mean())
        how = f", averaged over {found.samples} posterior draws" if found.samples else ", at the posterior mean"
        how += f"; mean entropy {stated['mean_entropy']:.3f} nats"
    else:
        stated |= {"examples": len(found.mean), "mean_std": float(found.variance.sqrt().mean())}
        how = f"; mean standard deviation {stated['mean_std']:.4g}"
    if as_json:
        say(json.dumps(stated))
    elif not quiet:
        say(f"{stated['examples']} predictions in {out}{how}")


def _draft(data: str | None, flags: dict[str, Any], to: Path, sample: Path | None) -> None:
    from dpivon.sources import files_of, kind_of
    from dpivon.sources.columns import CSVFormat
    from dpivon.sources.schema import draft, draft_from_sample, write_draft
    from dpivon.sources.table import check_column, column_names, read_columns
    from dpivon.yaml_files import validated

    if data is None or kind_of(data) != "table":
        raise bad("data", data, "is not a table, and only tables have a schema", "Give a .csv or .parquet")
    given = {name: flags[name] for name in CSVFormat.model_fields if flags[name] is not None}
    form, target = validated(CSVFormat, given, "format", fix="See `dpivon train --help`"), tuple(flags["target"] or ())
    files = [Path(path) for path in files_of(data)]
    names = column_names(files[0], form)
    for name in target:
        check_column("target", name, names)
    if sample is None:
        text = draft(names, target, form)
    else:
        if sample.exists() and any(sample.samefile(path) for path in files):
            fix = "Give a table that is public, or leave it out and fill in the blanks"
            raise bad("public-sample", str(sample), "is the private data itself", fix)
        kind_of(str(sample))
        text = draft_from_sample(read_columns(sample, names, form), target, sample, form)
    write_draft(to, text)
    say(f"{to} has {len(set(names) - {*target})} columns to fill in and check; only their names were read from {data}")


def _show_look(settings: Any) -> None:
    from dpivon.sources.owner import NOT_PRIVATE
    from dpivon.train.run import describe, look, people_of

    inputs, people = describe(settings).inputs, people_of(settings, settings.data)
    findings = look(settings, inputs, inputs.read(settings.data, settings.targets), people)
    say(f"NOT PRIVATE: {NOT_PRIVATE}.", err=True)
    for finding in findings:
        say(finding.line)
    for finding in findings:
        if finding.problem:
            say(f"does not look as declared: {finding.problem}")


def _declared(bounds: Sequence[str] | None, categories: Sequence[str] | None) -> dict[str, Any]:
    """--bounds and --categories as columns, and the range of all others."""
    columns: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for text in bounds or ():
        parts = text.rsplit(":", 2)
        try:
            low, high = float(parts[-2]), float(parts[-1])
        except (IndexError, ValueError):
            raise bad("bounds", text, "is not COLUMN:LOW:HIGH or LOW:HIGH", "Write --bounds age:0:120") from None
        if len(parts) == 3:
            columns[parts[0]] = {"min": low, "max": high}
        else:
            out["value_bounds"] = {"min": low, "max": high}
    for text in categories or ():
        name, separator, values = text.rpartition(":")
        if not separator or not values:
            raise bad("categories", text, "is not COLUMN:A,B,C", "Write --categories sex:f,m")
        columns[name] = {"categories": _listed(values)}
    if columns:
        out["columns"] = columns
    return out


def _by_class(option: str, given: Sequence[str] | None, word: str) -> dict[str, Any] | str | None:
    """``word``, or NAME=NUMBER by name."""
    if not given or list(given) == [word]:
        return word if given else None
    out = {}
    for text in given:
        name, separator, number = text.rpartition("=")
        try:
            out[name] = float(number)
        except ValueError:
            separator = ""
        if not separator:
            raise bad(
                option, text, f"is neither NAME=NUMBER nor {word}", f"Write --{option} yes=0.1, or --{option} {word}"
            )
    return out


def _range(name: str, text: str) -> dict[str, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise bad(name, text, "is not LOW:HIGH", f"Write --{name} 0:500") from None
    return {"min": low, "max": high}


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _widths(texts: list[str] | None) -> list[int] | None:
    fix = "Use the widths of the hidden layers, such as 64,32"
    return None if texts is None else [check_whole("hidden", text, fix, at_least=1) for text in texts]


def _options(given: Sequence[str] | None) -> dict[str, Any] | None:
    if not given:
        return None
    out: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise bad("option", text, "is not NAME=VALUE", "Write --option hess_init=0.5")
        out[name] = _value(value)
    return out


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
