"""Parts of a plan from several machines."""

from __future__ import annotations

import hashlib
import os

import pytest
from tables import IVON, rows

from dpivon.durable.ledger import _sealed, read
from dpivon.errors import ArgumentError
from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.results.folder import Results, merge, record, retire


def plan(epochs=1):
    return Plan("p", "digits", "small", "final", epochs, 1e-4, 2, 0, (PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5),))


@pytest.fixture
def machines(tmp_path):
    """One finished b = 128 and 256, the other 256 and 512, where a crash had it charge more."""
    made, diagnostics = rows(seeds=1)
    folders = []
    for name, batches, releases in (("a", (128, 256), 100), ("b", (256, 512), 120)):
        folder = tmp_path / name
        folder.mkdir()
        plan().write(folder / "study.json")
        cost = {"releases": releases, "epsilon": releases / 10, "epsilon_tempered": releases / 8}
        mine = [r | cost for r in made if r["batch_size"] in batches]
        ids = {r["id"] for r in mine}
        table.write(folder / "runs.csv", mine)
        table.write(folder / "diagnostics.csv", [d for d in diagnostics if d["id"] in ids], table.DIAGNOSTIC_COLUMNS)
        (folder / "ledgers" / f"id-{name}").mkdir(parents=True)
        (folder / "ledgers" / f"id-{name}" / "ledger.jsonl").write_text(name)
        folders.append(folder)
    return folders


def test_every_run_once_with_the_larger_epsilon(machines, tmp_path):
    out = tmp_path / "all"
    assert list(merge(out, machines).values()) == [60, 30]
    found = table.read(out / "runs.csv")
    assert len({r["id"] for r in found}) == len(found) == 90
    assert {r["batch_size"]: r["epsilon"] for r in found} == {128: 10.0, 256: 12.0, 512: 12.0}
    assert {r["batch_size"]: r["epsilon_tempered"] for r in found} == {128: 12.5, 256: 15.0, 512: 15.0}
    diagnostics = table.read(out / "diagnostics.csv")
    assert len(diagnostics) == 3 * sum(r["method"] == IVON for r in found)
    assert {p.parent.name: p.read_text() for p in out.glob("ledgers/*/*")} == {"id-a": "a", "id-b": "b"}
    assert list(merge(out, machines).values()) == [0, 0]
    assert len(table.read(out / "runs.csv")) == 90
    assert sorted(p.name for p in (out / "ledgers").iterdir()) == ["id-a", "id-b"]


def test_a_stack_that_is_evaluated_again_takes_no_cost_back(machines):
    """After a merge the rows of a stack under way say what two machines charged; recorded anew, they said what one did."""
    here, elsewhere = machines
    own = table.read(here / "runs.csv")
    merge(here, [elsewhere])
    record(here, plan(), Results([row | {"accuracy": 0.5} for row in own], []))
    found = [row for row in table.read(here / "runs.csv") if row["id"] in {r["id"] for r in own}]
    assert {r["batch_size"]: (r["epsilon"], r["epsilon_tempered"], r["releases"]) for r in found} == {
        128: (10.0, 12.5, 100),
        256: (12.0, 15.0, 120),
    }
    assert {r["accuracy"] for r in found} == {0.5}


def test_a_table_from_before_a_column_takes_nothing_away(machines, tmp_path):
    """The dearer machine's table knows no temperature: what was charged for it elsewhere stays."""
    columns = tuple(c for c in table.COLUMNS if c != "epsilon_tempered")
    old = [{k: r[k] for k in columns} for r in table.read(machines[1] / "runs.csv")]
    table.write(machines[1] / "runs.csv", old, columns)
    merge(tmp_path / "all", machines)
    found = table.read(tmp_path / "all" / "runs.csv")
    assert {(r["epsilon"], r["epsilon_tempered"]) for r in found if r["batch_size"] == 256} == {(12.0, 12.5)}


def test_a_ledger_that_was_half_copied_is_copied_again(machines, tmp_path):
    (tmp_path / "all" / "ledgers" / ".id-a").mkdir(parents=True)
    (tmp_path / "all" / "ledgers" / ".id-a" / "ledger.jsonl").write_text("ha")
    merge(tmp_path / "all", machines)
    assert [p.read_text() for p in (tmp_path / "all").glob("ledgers/*id-a/*")] == ["a"]
    (machines[0] / "ledgers" / ".id-c").mkdir()  # half copied there: no ledger yet
    merge(tmp_path / "all", machines)
    assert sorted(p.name for p in (tmp_path / "all" / "ledgers").iterdir()) == ["id-a", "id-b"]


def test_two_ledgers_of_one_id_are_both_kept(machines, tmp_path):
    """A stack's folder was copied, and went on here and there: the row's ε is the larger, and so must a ledger say."""
    for folder, text in zip(machines, ("begun, then a", "begun, then b and more"), strict=True):
        (folder / "ledgers" / "shared").mkdir()
        (folder / "ledgers" / "shared" / "ledger.jsonl").write_text(text)
    out = tmp_path / "all"
    for _ in range(2):
        merge(out, machines)
        kept = {p.parent.name: p.read_text() for p in out.glob("ledgers/*/*")}
        assert kept == {
            "id-a": "a", "id-b": "b", "shared": "begun, then a", "shared-2": "begun, then b and more",
        }  # fmt: skip


def test_another_plan_is_refused_before_anything_changes(machines, tmp_path):
    plan(epochs=2).write(machines[1] / "study.json")
    with pytest.raises(ArgumentError, match="another plan"):
        merge(tmp_path / "all", machines)
    assert not (tmp_path / "all").exists()
    with pytest.raises(ArgumentError, match="holds no study"):
        merge(tmp_path / "all", [tmp_path])


@pytest.mark.parametrize(
    "name", ["study.json", "runs.csv", "diagnostics.csv", "ledgers/id-b/ledger.jsonl", "ledgers/id-b", "ledgers"]
)
def test_a_link_in_a_folder_from_elsewhere_is_refused_before_anything_changes(machines, tmp_path, name):
    """It may name any file of whoever merges."""
    path, elsewhere = machines[1] / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ArgumentError, match=f"{path.name}'.*link"):
        merge(tmp_path / "all", machines)
    assert not (tmp_path / "all").exists()


def test_a_pipe_is_not_waited_for_and_only_ledgers_are_copied(machines, tmp_path):
    (machines[1] / "ledgers" / "id-b" / "more").write_text("more")
    merge(tmp_path / "all", machines)
    assert {p.name for p in (tmp_path / "all").glob("ledgers/*/*")} == {"ledger.jsonl"}
    os.mkfifo(machines[1] / "tuning.csv")
    with pytest.raises(ArgumentError, match="not a plain file"):
        merge(tmp_path / "more", machines)


@pytest.mark.parametrize("text", ['=HYPERLINK("http://x")', "@SUM(A1)", "\t=1+1", "-2+3"])
def test_a_row_that_a_spreadsheet_would_execute_is_refused(machines, tmp_path, text):
    table.write(machines[1] / "runs.csv", [r | {"hardware": text} for r in table.read(machines[1] / "runs.csv")])
    with pytest.raises(ArgumentError, match=r"hardware=.*is a formula"):
        merge(tmp_path / "all", machines)
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("name", ["../../b/ledgers/id-b", "id-b", ".."])
def test_a_finished_ledger_goes_where_its_content_says_and_never_where_its_id_does(machines, name):
    """A received folder could put its own ledger in the place of another run's."""
    folder, out = machines[0] / "stacks" / "0000", machines[0]
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_bytes(_sealed([{"dpivon_ledger": 2, "id": name}], "")[0])
    (out / "ledgers" / "id-b").mkdir()
    (out / "ledgers" / "id-b" / "ledger.jsonl").write_text("mine")
    content = (folder / "ledger.jsonl").read_bytes()
    assert read(folder / "ledger.jsonl").id == name
    retire(folder, out)
    kept = out / "ledgers" / hashlib.sha256(content).hexdigest()[:16] / "ledger.jsonl"
    assert kept.read_bytes() == content
    assert (out / "ledgers" / "id-b" / "ledger.jsonl").read_text() == "mine"
    assert (machines[1] / "ledgers" / "id-b" / "ledger.jsonl").read_text() == "b"
