"""Start from an earlier run: its released posterior is the prior, and all that it released counts towards ε.

Someone whose data is in both runs is protected by both together. So the releases of the earlier run, and of the runs that it
started from, are in the account when σ is calibrated, and in the new ledger before its first release, each with the id of its
run. Someone who is only in the new data is touched by the new releases alone: the earlier posterior is a constant for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpivon.durable.files import read_json
from dpivon.durable.ledger import Ledger, Record, Terms, unit
from dpivon.durable.ledger import read as read_ledger
from dpivon.errors import DpivonError, bad, check_number, check_whole
from dpivon.priors.start import BUILT_IN
from dpivon.privacy.accounting import budget, epsilon
from dpivon.privacy.accounting.accountant import check_delta
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import LEDGER, history, started_from
from dpivon.report.privacy import shown
from dpivon.report.run_folder import SUMMARY
from dpivon.train.networks import FLAT
from dpivon.train.published import FOLDER, NAME, Description, Published, describe_folder, load

if TYPE_CHECKING:
    from dpivon.train.config import Config

Rows = tuple[tuple[Terms, int], ...]
_NAME = "start_from"
_READ_AS = ("delimiter", "decimal", "encoding", "id")  # of a table: how its file is written, not what a row is
_SLACK = 1e-6  # relative: accountants on two machines differ in the last digits


@dataclass(frozen=True, eq=False)
class Earlier:
    """A finished run to start from.

    Attributes:
        where: its folder, as it was given.
        run: its id, that of its ledger.
        published: what it published.
        rows: all of its releases, and of the runs that it started from, as a new ledger begins with them.
    """

    where: str
    run: str
    published: Published
    rows: Rows

    @property
    def history(self) -> History:
        """Rows (σ, q, steps) of all these releases."""
        return history(Record(self.run, list(self.rows)), 0)

    def spent(self, config: Config) -> float:
        """ε of these releases, at the δ and by the accountant of the new run."""
        return epsilon(self.history, config.delta, config.accountant)

    def check(self, config: Config, description: Description) -> None:
        """Refuse another network, other inputs or another unit of privacy, and a budget that is spent already."""
        for name, ours, theirs in _differences(description, self.published.description):
            whose = f"but the run in {self.where}, which this one starts from, has {theirs!r}"
            raise bad(name, ours, whose, "Declare it as there, or leave --start-from out")
        own, theirs = config.unit or "", unit(self.rows[0][0])
        if own != theirs:
            problem = (
                f"but the run in {self.where} bounds the part of {_whom(theirs)}, so ε of both would be that of neither"
            )
            fix = f"Give --unit {theirs}, or leave --start-from out" if theirs else "Leave --unit or --start-from out"
            raise bad("unit", config.unit, problem, fix)
        before = self.spent(config)
        said = f"run {self.run} in {self.where} has spent ε = {shown(before)} at δ = {config.delta:g}"
        if not before < config.epsilon:
            fix = f"Give an --epsilon for both runs together, above {shown(before)}, or leave --start-from out"
            raise bad("epsilon", config.epsilon, f"is for both runs together, and {said} already", fix)
        try:
            budget(
                dataset_size=config.trained_on,
                batch_size=config.expected_batch,
                epochs=config.epochs,
                delta=config.delta,
                target_epsilon=config.epsilon,
                accountant=config.accountant,
                also=[*self.history, *config.also],
            )
        except DpivonError as error:
            others = " with a temperature, --prior or --coverage" if config.also else ""
            problem = f"is for both runs together, and {said}: too little is left for a run{others} ({error})"
            raise bad(
                "epsilon", config.epsilon, problem, "Give a larger --epsilon, or leave --start-from out"
            ) from None

    def begin(self, ledger: Path) -> None:
        """Begin the ledger with the earlier releases; one that is begun must have begun with these."""
        begin(ledger, self.rows, _NAME, self.where)


def marked(record: Record, start: str) -> Rows:
    """The releases of a run as the ledger of the next one begins with them; ``start`` is the digest of its posterior."""
    mark = {"start": start}
    return tuple(
        (({**terms[0], "earlier": terms[0].get("earlier", record.id), **mark},), n) for terms, n in record.rows if n
    )


def begin(ledger: Path, rows: Rows, name: str, where: str) -> None:
    """Begin a ledger with the releases of the run in ``where``; one that is begun must have begun with these."""
    if not ledger.exists():
        Ledger(ledger, rows).close()
        return
    counts, begun = read_ledger(ledger).counts(), Record("")
    for terms, n in rows:
        begun.add(terms, n)
    if any(counts.get(terms, 0) < n for terms, n in begun.counts().items()):
        fix = "Put that folder back as it was, or begin another run in another folder"
        raise bad(name, where, f"has changed since the run in {ledger.parent} was begun", fix)


def check_ledger(folder: Path, name: str) -> None:
    """Refuse a finished run whose ledger is gone or an older copy: what it lacks would count towards no ε."""
    path, least = folder / LEDGER, int(read_json(name, folder / SUMMARY, "Remove it").get("releases", 0))
    found = read_ledger(path).releases if path.exists() else None
    if found is None or found < least:
        has = "no ledger" if found is None else f"a ledger of {found}"
        fix = f"Put its {LEDGER} back as it was, or give another folder"
        raise bad(name, str(folder), f"holds a finished run of {least} releases and {has}", fix)


def is_prior(start_from: Any) -> bool:
    """Whether ``--start-from`` is a prior by name or in a file."""
    return isinstance(start_from, str) and (start_from in BUILT_IN or Path(start_from).is_file())


def is_run(start_from: Any) -> bool:
    """Whether ``--start-from`` is the folder of a run, not a prior by name or in a file."""
    return isinstance(start_from, str) and start_from not in BUILT_IN and Path(start_from).is_dir()


def earlier_run(start_from: str | None) -> Earlier | None:
    """The run to start from, with its complete history; None where the first weights are no one's, or new."""
    if start_from is None or not is_run(start_from):
        return None
    where, published = Path(start_from), load(Path(start_from), _NAME)
    ledger = next((p for p in (where / LEDGER, where.parent / LEDGER) if _beside(p, where)), None)
    if ledger is not None and (ledger.parent / SUMMARY).exists():
        check_ledger(ledger.parent, _NAME)
    record = _stated(where) if ledger is None else read_ledger(ledger)
    if record.runs != 1:
        fix = "Give the folder of a finished `dpivon train`"
        raise bad(_NAME, start_from, f"has a ledger of {record.runs} runs, not of one", fix)
    found = Earlier(start_from, record.id, published, marked(record, published.posterior.digest))
    found.history  # noqa: B018  # its terms are those of releases
    return found


def _beside(ledger: Path, where: Path) -> bool:
    """A run's own, or for its model/ that of the folder around it."""
    return ledger.exists() and (ledger.parent == where or where.name == FOLDER)


def _stated(where: Path) -> Record:
    """The releases of a published folder, from its privacy.json; an error where they are not all of them."""
    fix = "Give the folder of the run itself, which has the ledger"
    path = where / "privacy.json"
    stated = read_json(_NAME, path, fix)
    try:
        rows: list[tuple[Terms, int]] = []
        for row in stated["releases"]:
            terms = {key: value for key, value in row.items() if key != "steps"}
            rows.append(((terms,), check_whole("steps", row["steps"], fix, at_least=1)))
        record, by = Record(str(stated["run"]), rows), stated["epsilon"]
        if len({unit(terms) for terms, _ in rows}) != 1:
            raise ValueError("its releases are for no unit of privacy, or for several")
        found = epsilon(history(record, 0), check_delta(stated["delta"]), "rdp")
        least = check_number("epsilon", float(by["rdp"]), fix, at_least=0.0)
    except (DpivonError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise bad(_NAME, str(path), f"holds no complete history of releases ({error!r})", fix) from None
    if found < least * (1 - _SLACK):
        problem = f"lists releases of ε = {found:.6g} and states {least:.6g}, so some are missing"
        raise bad(_NAME, str(path), problem, fix)
    return record


def network_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The network of the run to start from, for where none is given; of a finished run that is there no more, its own."""
    start, out = given.get("start_from"), Path(str(given.get("out")))
    if is_run(start):
        where = Path(str(start))
    elif (
        isinstance(start, str) and not Path(start).exists() and (out / FOLDER / NAME).exists() and start not in BUILT_IN
    ):
        where = out
    else:
        return {}
    found = describe_folder(where, _NAME)[1]
    return {"network": found.network.kind, "hidden": found.network.hidden, "last_layer": found.last_layer}


def _differences(ours: Description, theirs: Description) -> Iterator[tuple[str, Any, Any]]:
    """What is declared otherwise: its name, and what it is here and there."""
    return _unlike(_declared(ours), _declared(theirs))


def _declared(description: Description) -> dict[str, Any]:
    """What makes a row, its target and the network."""
    inputs, network = description.inputs.model_dump(mode="json"), description.network
    own = {name: value for name, value in inputs.items() if name not in _READ_AS}
    own |= description.model_dump(mode="json", include={"classes", "target_bounds", "noise_std"})
    own |= {"network": network.kind, "last_layer": description.last_layer, "outputs": network.classes}
    return own | ({"hidden": network.hidden} if network.kind in FLAT else {})


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*ours, *theirs]):
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            yield from _unlike(mine, other, f"{of}{name}.")
            if list(mine) != list(other):  # columns in another order are encoded otherwise
                yield f"{of}{name}", list(mine), list(other)
        elif mine != other:
            yield f"{of}{name}", mine, other


def _whom(of: str) -> str:
    return f"a person with all their rows (column {of})" if of else "one row"


def together(record: Record, config: Config, total: float) -> dict[str, Any] | None:
    """What a ledger says of the run that this one started from, with one sentence; None where there was none."""
    runs = started_from(record, 0)
    if not runs:
        return None
    run, who = list(runs)[-1], "people" if config.unit else "rows"
    before, own = (epsilon(history(record, 0, earlier=part), config.delta, config.accountant) for part in (True, False))
    said = (
        f"The run started from run {run}, which had spent ε = {shown(before)}; together ε = {shown(total)} at "
        f"δ = {config.delta:g}, and {who} that are only in this run's data have at most this run's own ε = {shown(own)}."
    )
    return {"run": run, "releases": sum(runs.values()), "epsilon": before, "own_epsilon": own, "sentence": said}
