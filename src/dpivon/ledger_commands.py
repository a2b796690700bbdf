"""``dpivon ledger show`` and ``dpivon export``: what a run released, what it cost, and what of it may be published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpivon.durable.ledger import Record, read
from dpivon.errors import bad
from dpivon.privacy.accounting.accountant import check_delta
from dpivon.privacy.accounting.history import History, merged
from dpivon.privacy.accounting.recorded import LEDGER, drawn, epsilons, find, history, seeded
from dpivon.terminal import warnings_as_lines

ledger = typer.Typer(help="The record of what was released.", no_args_is_help=True)

_Delta = Annotated[float, typer.Option(help="δ, well below 1/N.")]


@ledger.callback()
def _ledger() -> None:
    pass


@ledger.command()
def show(
    run: Annotated[Path, typer.Argument(help="A ledger, or a folder with ledgers in it: of a run or of a study.")],
    delta: _Delta = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON. An infinite ε is the text "inf".')] = False,
) -> None:
    """Check a ledger and compute ε from it, with every accountant.

    Each is an upper bound on the true ε, so the least of them holds.

    Example: dpivon ledger show run --delta 1e-5
    """
    check_delta(delta)
    paths = find(run)
    if not paths:
        raise bad("run", str(run), "holds no ledger", "Give the folder of a run or of a study, or the ledger itself")
    with warnings_as_lines():
        found = [_described(path, delta) for path in paths]
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False, ensure_ascii=False))
        return
    for one in found:
        typer.echo(
            f"{one['ledger']}: {one['releases']} releases of each of {len(one['runs'])} runs, every checksum right"
        )
        if one["torn"]:
            typer.echo("  its last line was torn by a crash, and is counted as the largest block before it")
        for account in one["runs"]:
            typer.echo(f"  {account['run']}:")
            for row in account["rows"]:
                told = "ε = inf, not private" if row["noise_multiplier"] == 0 else f"σ = {row['noise_multiplier']:.6g}"
                typer.echo(f"    {row['steps']} × {told}, q = {row['sample_rate']:.6g}")
            for text, releases in account["drawn_by"].items():
                typer.echo(f"    {releases} × {text}")
            spent = ", ".join(f"{name} {value:.6g}" for name, value in account["epsilon"].items() if value != "inf")
            typer.echo(f"    ε at δ = {delta:g}: {spent or 'inf'}")


def export(
    run: Annotated[Path, typer.Argument(help="The folder that was given to dpivon.Checkpoints.")],
    out: Annotated[Path, typer.Option(help="A new folder for what may be published.")],
    delta: _Delta = 1e-5,
) -> None:
    """Write the model of a run for publication: no generators, no seeds, no gradients in it.

    Example: dpivon export run --out published
    """
    from dpivon.privacy.export import export as write

    spent = write(run, out, delta)
    told = ", ".join(f"{name} {value:.6g}" for name, value in spent.items())
    typer.echo(f"model in {out}; ε at δ = {delta:g}: {told}")
    if removable := seeded(read(run / LEDGER), 0):
        typer.echo(
            f"warning: {removable} releases have noise of a seeded generator: publish this only if the data is public or "
            "the seed is a secret that no script, log or plan holds.",
            err=True,
        )


def _described(path: Path, delta: float) -> dict[str, Any]:
    record = read(path)
    names = _names(path, record)
    known: dict[str, dict[str, Any]] = {}  # many runs of a study cost the same
    runs = []
    for i, name in enumerate(names):
        rows = history(record, i)
        key = repr(rows)
        if key not in known:
            known[key] = {k: v if math.isfinite(v) else "inf" for k, v in epsilons(rows, delta).items()}
        told = {"drawn_by": drawn(record, i), "epsilon": known[key]}
        runs.append({"run": name, "rows": _rows(rows), "terms": _terms(record, i), **told})
    return {"ledger": str(path), "releases": record.releases, "torn": record.torn, "delta": delta, "runs": runs}


def _names(path: Path, record: Record) -> list[str]:
    beside = path.with_name("runs.json")
    names = json.loads(beside.read_text()) if beside.exists() else []
    return names if len(names) == record.runs else [f"run {i}" for i in range(record.runs)]


def _rows(rows: History) -> list[dict[str, Any]]:
    return [{"noise_multiplier": s, "sample_rate": q, "steps": n} for (s, q), n in merged(rows).items()]


def _terms(record: Record, run: int) -> list[dict[str, Any]]:
    return [{**terms[run], "releases": n} for terms, n in record.rows]
