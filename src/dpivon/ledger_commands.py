"""``dpivon ledger show``, ``ledger verify`` and ``export``: what a run released, what it cost, what may be published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpivon.durable.ledger import PROVES, PROVES_NOT, Record, read
from dpivon.errors import PrivacyError, bad
from dpivon.privacy.accounting.accountant import check_delta
from dpivon.privacy.accounting.history import History, merged
from dpivon.privacy.accounting.recorded import (
    DELTA,
    LEDGER,
    drawn,
    epsilons,
    find,
    history,
    own_delta,
    seeded,
    started_from,
)
from dpivon.study.results.folder import run_names
from dpivon.terminal import say, warnings_as_lines

ledger = typer.Typer(help="The record of what was released.", no_args_is_help=True)

_Run = Annotated[Path, typer.Argument(help="A ledger, or a folder with ledgers in it: of a run or of a study.")]
_Delta = Annotated[
    float | None,
    typer.Option(help="δ, well below 1/N.", show_default="the run's own; 1e-5 where its folder does not say"),
]


@ledger.callback()
def _ledger() -> None:
    pass


@ledger.command()
def show(
    run: _Run,
    delta: _Delta = None,
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON. An infinite ε is the text "inf".')] = False,
) -> None:
    """Check a ledger and compute ε from it, with every accountant.

    Each is an upper bound on the true ε, so the least of them holds.

    Example: dpivon ledger show run --delta 1e-5
    """
    if delta is not None:
        check_delta(delta)
    with warnings_as_lines():
        found = [_described(path, *_delta(path, delta)) for path in _ledgers(run)]
    if as_json:
        say(json.dumps(found, allow_nan=False))
        return
    for one in found:
        say(f"{one['ledger']}: {one['releases']} releases of each of {len(one['runs'])} runs, every digest right")
        if one["torn"]:
            say("  its last line was torn by a crash, and is counted as the largest block before it")
        if one["unit"] != "example":
            say(f"  the unit of privacy is a person with all their rows, by {one['unit']}")
        for account in one["runs"]:
            say(f"  {account['run']}:")
            for row in account["rows"]:
                stated = (
                    "ε = inf, not private" if row["noise_multiplier"] == 0 else f"σ = {row['noise_multiplier']:.6g}"
                )
                say(f"    {row['steps']} × {stated}, q = {row['sample_rate']:.6g}")
            for name, releases in account["earlier"].items():
                say(f"    {releases} × of the earlier run {name}")
            for text, releases in account["drawn_by"].items():
                say(f"    {releases} × {text}")
            proved = sorted((value, name) for name, value in account["epsilon"].items() if value != "inf")
            spent = ", ".join(f"{name} {value:.6g}" for value, name in proved)
            say(f"    ε at δ = {one['delta']:g}{one['delta_from']}: {spent or 'inf'}")


@ledger.command()
def verify(run: _Run) -> None:
    """Check every line of a ledger against the digest chain, and say what that proves.

    Exits 1 if a ledger was changed or damaged.

    Example: dpivon ledger verify run
    """
    failed = 0
    for path in _ledgers(run):
        try:
            record = read(path)
            names = run_names(path, record)
            for i in range(record.runs):
                history(record, i)  # the terms are those of releases
        except PrivacyError as error:
            failed += 1
            say(f"FAILED {error}")
            continue
        runs = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
        say(f"{path}: the chain holds; {record.releases} releases of each of {runs}; last digest {record.head}")
        if record.torn:
            say("  its last line was torn by a crash, and is counted as the largest block before it")
    say(f"Proved: {PROVES}" if not failed else f"{failed} ledgers were changed or damaged: their ε is not known.")
    say(f"Not proved: {PROVES_NOT}")
    if failed:
        raise typer.Exit(1)


def export(
    run: Annotated[Path, typer.Argument(help="The folder of `dpivon train`, or that was given to dpivon.Checkpoints.")],
    out: Annotated[Path, typer.Option(help="A new folder for what may be published.")],
    delta: _Delta = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the results on test data into the model card. They are NOT private.")
    ] = False,
) -> None:
    """Write the model of a run for publication: no generators, no seeds, no gradients in it.

    Of a `dpivon train` run the folder predicts by itself: `dpivon predict published new.csv`. It holds a model card.

    Example: dpivon export run --out published
    """
    delta, why = _delta(run / LEDGER, delta)
    if (run / "model" / "model.json").exists():
        from dpivon.train.publication import export_run

        spent = export_run(run, out, delta, scores)
    else:
        from dpivon.privacy.export import export as write

        if scores:
            raise bad("scores", True, "but the folder is not of `dpivon train`", "Leave it out")
        spent = write(run, out, delta)
    least = min(spent, key=lambda name: spent[name])
    others = ", ".join(f"{name} {value:.6g}" for name, value in spent.items() if name != least)
    say(f"model in {out}; ε = {spent[least]:.6g} at δ = {delta:g}{why} by {least} ({others})")
    if removable := seeded(read(run / LEDGER), 0):
        say(
            f"warning: {removable} releases have noise of a seeded generator: publish this only if the data is public or "
            "the seed is a secret that no script, log or plan holds.",
            err=True,
        )


def _ledgers(run: Path) -> list[Path]:
    paths = find(run)
    if not paths:
        raise bad("run", str(run), "holds no ledger", "Give the folder of a run or of a study, or the ledger itself")
    return paths


def _delta(path: Path, given: float | None) -> tuple[float, str]:
    """δ, and a word about it where it was not chosen."""
    if given is not None:
        return given, ""
    own = own_delta(path)
    return (DELTA, " (the folder names no δ)") if own is None else (own, "")


def _described(path: Path, delta: float, delta_from: str) -> dict[str, Any]:
    record = read(path)
    known: dict[str, dict[str, Any]] = {}  # many runs of a study cost the same
    runs = []
    for i, name in enumerate(run_names(path, record)):
        rows = history(record, i)
        key = repr(rows)
        if key not in known:
            known[key] = {k: v if math.isfinite(v) else "inf" for k, v in epsilons(rows, delta).items()}
        stated = {"drawn_by": drawn(record, i), "earlier": started_from(record, i), "epsilon": known[key]}
        runs.append({"run": name, "rows": _rows(rows), "terms": _terms(record, i), **stated})
    about = {"ledger": str(path), "releases": record.releases, "torn": record.torn, "unit": record.unit or "example"}
    return {**about, "delta": delta, "delta_from": delta_from, "runs": runs}


def _rows(rows: History) -> list[dict[str, Any]]:
    return [{"noise_multiplier": s, "sample_rate": q, "steps": n} for (s, q), n in merged(rows).items()]


def _terms(record: Record, run: int) -> list[dict[str, Any]]:
    return [{**terms[run], "releases": n} for terms, n in record.rows]
