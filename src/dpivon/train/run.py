"""A run from its configuration to a finished RUN folder. Killed anywhere, it goes on; finished, it says so again."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dpivon._version import __version__
from dpivon.durable.files import read_json
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import BudgetSpent, bad
from dpivon.gaussian import GaussianNoise
from dpivon.machine import hardware_name
from dpivon.privacy.accounting.recorded import CONFIG, LEDGER
from dpivon.privacy.people import People
from dpivon.report import build
from dpivon.report.run_folder import PROGRESS, SUMMARY
from dpivon.report.writer import REPORT
from dpivon.sources import Examples, Source, files_of, kind_of
from dpivon.sources.columns import is_missing, label, names_of
from dpivon.sources.owner import Finding, look_at_size, stop_at
from dpivon.sources.table import check_column, column_names, read_columns
from dpivon.train import config as configs
from dpivon.train.artefacts import Line, read_progress, write_json, write_test, write_widths
from dpivon.train.config import COUNT, Config
from dpivon.train.earlier import Earlier, check_ledger, earlier_run, together
from dpivon.train.last_layer import LastLayer, new_features
from dpivon.train.loop import Loop, device_of
from dpivon.train.networks import choose
from dpivon.train.published import FEATURES, FOLDER, Description, load, publish

_NOT_CHOSEN = (
    "No early stopping and no choice among models by held-out or test results.",
    "Network, batch, epochs and step size were given, or follow from declared numbers. If you chose them by trying runs on "
    "this data, ε does not cover that choice: see `dpivon budget --tuning`.",
)
Show = Callable[[Line | None, int], None]


class Watcher:
    """What a run tells while it runs; this one says nothing."""

    def begin(self, config: Config, description: Description, loop: Loop) -> Show:
        return lambda line, step: None

    def end(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def train(config: Config, watcher: Watcher | None = None, *, proceed: bool = False) -> dict[str, Any]:
    """Train within (ε, δ), or go on, or find it finished; the summary.

    Everything wrong with the data is said before step 0. Rows that do not look as declared stop a run that is not begun,
    unless ``proceed``: no option of the run, so that nothing of it shows what was seen.
    """
    watcher = watcher or Watcher()
    folder = Path(config.out)
    _check_folder(folder, config)
    device_of(config.device)
    if (folder / SUMMARY).exists():
        return _again(config, folder, watcher, proceed)
    earlier = earlier_run(config.start_from)
    people = people_of(config, config.data)
    description = describe(config)
    if earlier is not None:
        earlier.check(config, description)
    with torch.random.fork_rng(devices=[]):
        start = config.start_from if earlier is None else earlier.published.posterior
        known = None if earlier is None else earlier.published.features
        # An option that it has not is named before the folder remembers it.
        description.learner(ema=config.ema, start=start, features=known)
    examples = description.inputs.read(config.data, config.targets)
    proceed = proceed or (folder / CONFIG).exists()  # begun: it was looked at then
    if not proceed:
        stop_at("data", config.data, look(config, description.inputs, examples, people))
    heldout = _read("heldout", config.heldout, config, description, proceed)
    test = _read("test", config.test, config, description, proceed)
    calibration = _read("calibration", config.calibration, config, description, proceed)
    held = None if config.calibration is None else people_of(config, config.calibration)
    with torch.random.fork_rng(devices=[]):
        features = new_features(config, description, earlier, watcher.say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bad("out", str(folder), f"cannot be made ({error})", "Give another --out folder") from None
    configs.write(config, folder)
    if earlier is not None:
        earlier.begin(folder / LEDGER)
    if features is not None:
        features.save(folder / FEATURES)
    layer = LastLayer.of(config, description, examples) if config.last_layer else None
    if layer is not None:
        size = (folder / FEATURES).stat().st_size / 1e6
        watcher.say(f"{FEATURES}: {size:.1f} MB, in the published model too.")
        watcher.say(f"Making {layer.features.width} features of each example.")
        examples = layer.seen(examples, watcher.say)
        heldout, calibration = (
            rows if rows is None else layer.seen(rows, watcher.say) for rows in (heldout, calibration)
        )
    with torch.random.fork_rng(devices=[]):
        loop = Loop(config, description, examples, folder, people, earlier, layer)
        try:
            loop.train(heldout, watcher.begin(config, description, loop))
            _calibrate(loop, calibration, held, watcher)
        finally:
            watcher.end()
            loop.close()
    if not (folder / FOLDER).exists():
        publish(folder, description, loop.learner, config.delta, loop.decision)
    return _finish(config, description, loop, folder, test, watcher)


def _calibrate(loop: Loop, rows: Examples | None, people: People | None, watcher: Watcher) -> None:
    """Within the plan it is never refused; after a crash that lost releases it may be."""
    try:
        loop.calibrate(rows, people)
    except BudgetSpent:
        what = "a temperature, shares or prediction sets were not released"
        watcher.say(f"Releases that a crash lost had spent the budget: {what}.")


def look(config: Config, source: Source, examples: Examples, people: People | None) -> list[Finding]:
    """What the owner of the training data sees of it: not private."""
    count, what = (len(examples), "examples") if people is None else (len(people), "people")
    return [*source.look(config.data), look_at_size(count, config.dataset_size, what)]


def describe(config: Config) -> Description:
    """``model.json``, before any row is encoded: a function of what was declared."""
    source = config.reader(config.data)
    if config.task == "regression" and source.kind == "image":
        raise bad("task", config.task, "a folder of images has classes", "Give a table or arrays")
    noise = GaussianNoise.given(config.noise_std)
    outputs = noise.outputs if config.task == "regression" else len(config.labels or config.classes)
    return Description(
        inputs=source,
        classes=config.classes,
        target_bounds=config.target_bounds,
        noise_std=noise.std,
        network=choose(config.network, source.shape, outputs, config.hidden),
        method=config.method,
        options=config.options,
        lr=config.lr,
        dataset_size=config.trained_on,
        last_layer=config.last_layer,
        samples=config.samples,
        source=config.source,
    )


def people_of(config: Config, data: str) -> People | None:
    """Whose each row of ``data`` is, by the column ``unit``; None where the unit of privacy is the row."""
    if config.unit is None:
        return None
    if kind_of(data) != "table":
        raise bad("unit", config.unit, "is the name of a column, and the data is not a table", "Leave it out")
    check_column("unit", config.unit, column_names(Path(files_of(data)[0]), config))
    if config.unit in names_of(config.target):
        raise bad("unit", config.unit, "is the column to predict", "Name the column that says whose a row is")
    cells = [cell for path in files_of(data) for cell in read_columns(Path(path), [config.unit], config)[config.unit]]
    ids = ["" if is_missing(cell) else label(cell) for cell in cells]
    return People.of(ids, rows=config.rows_per_unit, unit=config.unit)


def _check_folder(folder: Path, config: Config) -> None:
    """New, empty, or a run that was begun with this configuration."""
    if folder.exists() and not folder.is_dir():
        raise bad("out", str(folder), "is a file", "Give another --out folder")
    if (folder / CONFIG).exists():
        configs.check_same(config, configs.read(folder), folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise bad("out", str(folder), "is not empty and holds no run", "Give another --out folder")


def _read(name: str, where: str | None, config: Config, description: Description, proceed: bool) -> Examples | None:
    """Examples to score. Never those of training: their scores would be released without any noise."""
    if where is None:
        return None
    if (kind := kind_of(where, name)) != description.inputs.kind:
        raise bad(name, where, f"is of the kind {kind}, and the training data is not", "Give data of the same kind")
    ours, theirs = ({Path(part).resolve() for part in files_of(text)} for text in (config.data, where))
    if ours & theirs:
        raise bad(name, where, "is the training data, and scores on it are not private", "Give rows that are not in it")
    if not proceed:
        stop_at(name, where, description.inputs.look(where, learning=False))
    return description.inputs.read(where, description.targets)


def _again(config: Config, folder: Path, watcher: Watcher, proceed: bool) -> dict[str, Any]:
    """A finished run: its summary, with the scores on test data that was not given before."""
    summary: dict[str, Any] = read_json("out", folder / SUMMARY, "Remove it; the same command then writes it again")
    check_ledger(folder, "out")
    watcher.say(f"The run in {folder} is finished; nothing was trained.")
    if config.test is not None and config.test != configs.read(folder).test:
        published = load(folder)
        test = _read("test", config.test, config, published.description, proceed)
        assert test is not None
        summary |= write_test(published, test, folder)
        write_json(folder / SUMMARY, summary)
        configs.write(config, folder)
        _report(folder, watcher)
    elif not (folder / REPORT).exists():
        _report(folder, watcher)
    return summary


def _finish(
    config: Config, description: Description, loop: Loop, folder: Path, test: Examples | None, watcher: Watcher
) -> dict[str, Any]:
    """All that follows from the published model; the summary last, since it says that the rest is there."""
    published = load(folder)
    if test is not None and config.last_layer:
        watcher.say("Making the features of the test data.")
    tested: dict[str, Any] = {"metrics": None} if test is None else write_test(published, test, folder)
    write_widths(published, folder)
    record = read_ledger(folder / LEDGER)
    spent: dict[str, float] = read_json("out", folder / FOLDER / "privacy.json", "Restore it")["epsilon"]
    lines = read_progress(folder / PROGRESS)
    summary: dict[str, Any] = {
        "format": 1,
        "about": {
            "title": config.title,
            "date": datetime.date.today().isoformat(),
            "purpose": config.purpose,
            "responsible": config.responsible,
            "dataset": config.dataset or Path(files_of(config.data)[0]).name,
        },
        "method": config.method,
        "epsilon": spent[config.accountant],
        "delta": config.delta,
        "target_epsilon": config.epsilon,
        "started_from": together(record, config, spent[config.accountant]),
        "accountant": config.accountant,
        "epsilon_by_accountant": spent,
        "adjacency": "add/remove",
        "unit": config.unit or "",
        "dataset_size": config.dataset_size,
        "sampling_rate": config.expected_batch / config.trained_on,
        "expected_batch_size": config.expected_batch,
        "steps": lines[-1].step if lines else 0,
        "releases": record.releases,
        "noise_multiplier": loop.optimizer.noise_multiplier,
        "max_grad_norm": config.max_grad_norm,
        "learning_rate": config.lr,
        "epochs": config.epochs,
        "seconds": lines[-1].seconds if lines else 0.0,
        "hardware": hardware_name(torch.device(config.device)),
        "path": loop.step.path,
        "versions": {
            "dpivon": __version__,
            "torch": torch.__version__,
            "opacus": version("opacus"),
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
        "task": {
            "kind": description.inputs.kind,
            "classes": list(config.classes),
            "target": ", ".join(names_of(config.target)) or None,
            "inputs": description.inputs.describe(),
            "network": description.trained,
        },
        **tested,
        "decision": published.decision.model_dump(mode="json"),
        "public_inputs": [
            *_public_inputs(config, description, loop.earlier),
            *published.decision.sentences(config.classes, config.labels),
        ],
        "choices_not_made": [*description.inputs.not_chosen(), *_not_chosen(config)],
        "ledger_digest": hashlib.sha256((folder / LEDGER).read_bytes()).hexdigest(),
        "heldout_is_private": False,
        "test_is_private": False,
        "seed_is_secret": config.seed is None,
    }
    write_json(folder / SUMMARY, summary)
    _report(folder, watcher)
    return summary


def _not_chosen(config: Config) -> tuple[str, ...]:
    if config.task == "regression":
        return "No mean or deviation of the target: it is mapped from its declared range to −1 to 1.", *_NOT_CHOSEN
    weighed = "No resampling by class" if config.weighted_loss else "No class weights and no resampling by class"
    counted = (
        "was counted with noise, as a part of ε" if config.prior == COUNT else "stays private unless it was declared"
    )
    return f"{weighed}: how frequent a class is {counted}.", *_NOT_CHOSEN


def _public_inputs(config: Config, description: Description, earlier: Earlier | None) -> list[str]:
    """Facts that the guarantee does not protect, because they were declared."""
    of_each = f" of each of {', '.join(config.labels)}" if config.labels else ""
    said = [
        f"The number of {'people' if config.unit else 'examples'} N = {config.dataset_size}, as declared; the rows were not "
        "counted for it.",
        f"The classes {', '.join(config.classes)}{of_each}."
        if config.target_bounds is None
        else f"The range of the target, {config.target_bounds.describe()}: values outside are clamped.",
        f"Expected batch {config.expected_batch}, {config.epochs} epochs, step size {config.lr:g}, clip bound "
        f"{config.max_grad_norm:g}, method {config.method}, network {description.trained}.",
        description.inputs.public(),
    ]
    if config.unit:
        most = "all rows" if config.rows_per_unit is None else f"at most {config.rows_per_unit} rows"
        said.append(f"A person is a value of the column {config.unit}; {most} of a drawn person are used in a step.")
    if earlier is not None:
        said.append(f"First weights: the released posterior of run {earlier.run}, whose releases are counted in ε.")
    elif config.start_from:
        what = "Network of the features, and images they are flat on" if config.last_layer else "First weights"
        said.append(f"{what}: {config.start_from}, which no row of this data was used for, as declared.")
    if few := config.temperature.held_out:
        said.append(
            f"Of the N rows about {few} were not trained on; the temperature was chosen on them. A hash of each row says which."
        )
    if config.source:
        said.append(f"Where these ranges and categories come from, in the words of who declared them: {config.source}")
    return said


def _report(folder: Path, watcher: Watcher) -> None:
    """``report.html``. The run is finished whatever becomes of its page."""
    try:
        build(folder)
    except Exception as error:
        watcher.say(f"{REPORT} was not written ({error}). The run is finished; the same command tries again.")
