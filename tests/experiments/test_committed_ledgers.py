"""Every committed ε again, from the ledger of the run whose row it is in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpivon.durable.ledger import Record, read
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.temperature import for_temperature
from dpivon.study.plan.plan import read_plan
from dpivon.study.results import table
from dpivon.study.results.folder import run_names

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RESULTS = {path.parent.name: path.parent for path in EXPERIMENTS.glob("*/results/*/study.json")}
STUDIES = sorted(RESULTS)
#: Studies whose ledgers were not kept, and their rows. ε then follows from what a row says of its own releases.
WITHOUT_LEDGERS = {
    "beyond-quick": 104,  # committed without them
    "beyond-quick-tuning": 94,  # committed without them
    "paper-tuning": 45,  # committed without them
}


WITHOUT_COMMIT = {"beyond-quick", "beyond-quick-tuning"}  # made before rows had one, and no page says it


def rows_of(study: str) -> tuple[float, dict[str, Any]]:
    plan = read_plan(RESULTS[study] / "study.json")
    return plan.delta, {row["id"]: row for row in table.read(RESULTS[study] / plan.table)}


def ledgers_of(study: str) -> list[Path]:
    return sorted((RESULTS[study] / "ledgers").glob("*/ledger.jsonl"))


def accounts(study: str) -> Iterator[tuple[str, History, History]]:
    """Every run of a study's ledgers by its id: what training released, and what was released in all."""
    for path in ledgers_of(study):
        record = read(path)
        training = Record(record.id, [row for row in record.rows if not for_temperature(row[0])])
        for i, name in enumerate(run_names(path, record)):
            yield name, history(training, i), history(record, i)


@cache
def cost(rows: tuple[Any, ...], delta: float, accountant: str) -> float:
    return epsilon(list(rows), delta, accountant)


@pytest.mark.parametrize("study", [s for s in STUDIES if s not in WITHOUT_LEDGERS])
def test_every_row_costs_what_its_own_ledger_says(study: str) -> None:
    delta, rows = rows_of(study)
    seen = set()
    for name, training, whole in accounts(study):
        if (row := rows.get(name)) is None:
            continue  # its row was removed from the table; what it released stays in the ledger
        seen.add(name)
        assert row["noise_multiplier"] == training[0][0], name
        assert row["epsilon"] == pytest.approx(cost(tuple(training), delta, "rdp"), rel=1e-9), name
        if row.get("epsilon_tempered") is not None:
            assert row["epsilon_tempered"] == pytest.approx(cost(tuple(whole), delta, "rdp"), rel=1e-9), name
        assert row["releases"] == sum(n for _, _, n in training), name
    assert seen == set(rows)


@pytest.mark.slow
@pytest.mark.parametrize("study", [s for s in STUDIES if s not in WITHOUT_LEDGERS])
def test_every_row_costs_by_pld_what_its_own_ledger_says(study: str) -> None:
    delta, rows = rows_of(study)
    for name, training, _ in accounts(study):
        if name in rows and rows[name]["epsilon_pld"] is not None:
            assert rows[name]["epsilon_pld"] == pytest.approx(cost(tuple(training), delta, "pld"), rel=1e-7), name


def test_the_rows_without_a_ledger_are_these_and_cost_what_they_say() -> None:
    without = {s: len(rows_of(s)[1]) for s in STUDIES if not ledgers_of(s)}
    assert without == WITHOUT_LEDGERS
    for study in without:
        delta, rows = rows_of(study)
        for row in rows.values():
            releases = (row["noise_multiplier"], row["batch_size"] / row["train_size"], row["releases"])
            assert row["epsilon"] == pytest.approx(cost((releases,), delta, "rdp"), rel=1e-9), row["id"]


def test_every_row_names_its_commit_but_where_it_is_not_known() -> None:
    without = {s for s in STUDIES if not all(row.get("commit") for row in rows_of(s)[1].values())}
    assert without == WITHOUT_COMMIT


@pytest.mark.parametrize("path", [p for s in STUDIES for p in ledgers_of(s)], ids=lambda p: p.parent.name)
def test_the_ids_beside_a_ledger_are_in_its_order(path: Path) -> None:
    """Those of 87 runs were not: paired by place they gave another run's σ. A newer ledger names its runs itself."""
    names = run_names(path, read(path))
    beside = path.with_name("runs.json")
    assert json.loads(beside.read_text()) == names if beside.exists() else read(path).names == tuple(names)


def test_a_ledger_without_names_pairs_by_what_an_id_says_and_not_by_place(tmp_path: Path) -> None:
    (source,) = [p for p in ledgers_of("strong-fashion") if p.parent.name == "48c9f35ff2c389d4"]
    ids = json.loads((source.parent / "runs.json").read_text())
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(source.read_bytes())
    record = read(path)
    (tmp_path / "runs.json").write_text(json.dumps(ids[::-1]))
    for name, terms in zip(run_names(path, record), record.rows[0][0], strict=True):
        assert f"-sigma{terms['noise_multiplier']:g}-C{terms['max_grad_norm']:g}-" in name
    for spoilt in (json.dumps(ids[1:]), json.dumps(["x", *ids[1:]]), '{"a": 1}', "no JSON", "[1, 2]", None):
        (tmp_path / "runs.json").unlink()
        if spoilt is not None:
            (tmp_path / "runs.json").write_text(spoilt)
        assert run_names(path, record) == [f"run {i}" for i in range(25)]
        (tmp_path / "runs.json").write_text("")
