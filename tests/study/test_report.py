"""From committed tables to everything that follows from them, by command."""

from __future__ import annotations

import json
import math

import pytest
from tables import IVON, rows
from typer.testing import CliRunner

from dpivon.cli import app
from dpivon.errors import ArgumentError
from dpivon.privacy.accounting import epsilon
from dpivon.study import table
from dpivon.study.ablations import ablations_page, changes, draw_ablations, is_ablation, variants
from dpivon.study.plan import Plan, PlannedRun
from dpivon.study.report import write_report
from dpivon.study.tuning import candidates, epsilon_with_tuning, pick


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="dpivon")


def tuned(accuracy):
    """Tuning rows: two rates a method at two σ; ``accuracy`` maps (method, lr, σ) to a number."""
    out = []
    for method in ("dp-sgd", IVON):
        for lr in (0.1, 1.0):
            for sigma in (1.0, 5.0):
                run = PlannedRun(method, 512, sigma, 10.0, 0, lr)
                row = dict.fromkeys(table.COLUMNS) | {"id": run.id, "method": method, "lr": lr, "options": ""}
                row |= {"batch_size": 512, "noise_multiplier": sigma, "max_grad_norm": 10.0, "seed": 0, "delta": 1e-5}
                row |= {"accuracy": accuracy(method, lr, sigma), "nll": 1.0, "releases": 50, "train_size": 45_000}
                out.append(row)
    return out


@pytest.fixture
def results(tmp_path):
    """Two cells of a table on disk, as a GPU machine leaves it: without PLD."""
    out = tmp_path / "paper"
    out.mkdir()
    made, diagnostics = rows(seeds=2)
    keep = [r for r in made if r["batch_size"] == 512 and r["noise_multiplier"] in (1.0, 5.0)]
    table.write(out / "runs.csv", keep)
    ids = {r["id"] for r in keep}
    table.write(out / "diagnostics.csv", [d for d in diagnostics if d["id"] in ids], table.DIAGNOSTIC_COLUMNS)
    return out


def test_a_table_comes_back_as_it_was(results):
    made, _ = rows(seeds=2)
    by_id = {r["id"]: r for r in made}
    for row in table.read(results / "runs.csv"):
        for key, value in row.items():
            expected = by_id[row["id"]][key]
            if expected is None:
                assert value in (None, "")
            elif isinstance(expected, float):
                assert value == pytest.approx(expected, rel=1e-6)
            else:
                assert value == expected
        assert row["epsilon"] == by_id[row["id"]]["epsilon"]  # never rounded down


def test_report_rebuilds_everything(results, tmp_path):
    (tmp_path / "tuning").mkdir()
    table.write(tmp_path / "tuning" / "tuning.csv", tuned(lambda m, lr, s: lr / 10))
    done = invoke("study", "report", results, "--tuning", tmp_path / "tuning")
    assert done.exit_code == 0, done.output
    written = [line.rsplit("/", 1)[1] for line in done.stdout.split()]
    assert written[-3:] == ["summary.csv", "claims.md", "tuning.md"]
    assert len(written) == 9
    after = table.read(results / "runs.csv")
    for row in after:
        history = [(row["noise_multiplier"], 512 / 50_000, 100)]
        assert row["epsilon_pld"] == epsilon(history, 1e-5, "pld")
    summary = table.read(results / "summary.csv")
    assert len(summary) == 3 * 2 * 2
    cell = next(r for r in summary if (r["method"], r["noise_multiplier"], r["max_grad_norm"]) == (IVON, 5.0, 20.0))
    members = [r for r in after if (r["method"], r["noise_multiplier"], r["max_grad_norm"]) == (IVON, 5.0, 20.0)]
    assert cell["seeds"] == len(members) == 2
    assert cell["accuracy"] == pytest.approx(sum(r["accuracy"] for r in members) / 2, rel=1e-5)
    assert cell["accuracy_std"] == pytest.approx(0.002 / math.sqrt(2), rel=1e-3)
    assert cell["epsilon_with_tuning"] == epsilon_with_tuning(members[0], tuned(lambda *a: 0.5))
    page = (results / "tuning.md").read_text()
    assert "| dp-ivon-gradsq | 1 | 0.1000 | 1.0000 | chosen |" in page
    assert "| dp-ivon-gradsq | 0.1 | 0.0100 | 1.0000 | used in the grid |" in page
    again = {p.name: p.read_bytes() for p in (results / "figures").iterdir()}
    write_report(results, tmp_path / "tuning")
    assert again == {p.name: p.read_bytes() for p in (results / "figures").iterdir()}


def test_a_rate_for_each_cell_is_no_choice_for_all(results, tmp_path):
    (tmp_path / "tuning").mkdir()
    table.write(tmp_path / "tuning" / "tuning.csv", tuned(lambda m, lr, s: lr / 10))
    rates = {1.0: 1.0, 5.0: 0.1}
    by_cell = [
        r | {"lr": rates[r["noise_multiplier"]]} if r["method"] == IVON else r for r in table.read(results / "runs.csv")
    ]
    table.write(results / "runs.csv", by_cell)
    write_report(results, tmp_path / "tuning")
    page = (results / "tuning.md").read_text()
    for lr, accuracy in ((1, "0.1000"), (0.1, "0.0100")):
        assert f"| dp-ivon-gradsq | {lr} | {accuracy} | 1.0000 | used in a part of the grid |" in page
    assert "| dp-sgd | 1 | 0.1000 | 1.0000 | chosen |" in page


def test_tuning_is_composed_with_the_run_it_served(results):
    row = next(r for r in table.read(results / "runs.csv") if r["method"] == "dp-sgd")
    mine = [r for r in tuned(lambda *a: 0.5) if r["method"] == "dp-sgd"]
    spent = [(row["noise_multiplier"], 512 / 50_000, 100)]
    spent += [(r["noise_multiplier"], 512 / 45_000, 50) for r in mine]
    assert epsilon_with_tuning(row, tuned(lambda *a: 0.5)) == epsilon(spent, 1e-5)
    assert epsilon_with_tuning(row, []) == epsilon(spent[:1], 1e-5)


def test_the_winner_is_best_on_average_and_a_divergence_loses(tmp_path):
    def accuracy(method, lr, sigma):
        if method == IVON:
            return math.nan if (lr, sigma) == (1.0, 5.0) else 0.1 if lr == 0.1 else 0.9
        return {(0.1, 1.0): 0.5, (0.1, 5.0): 0.3, (1.0, 1.0): 0.6, (1.0, 5.0): 0.1}[lr, sigma]

    table.write(tmp_path / "tuning.csv", tuned(accuracy))
    assert [c.lr for c in candidates(tuned(accuracy))["dp-sgd"]] == [0.1, 1.0]
    done = invoke("study", "pick", tmp_path, "--to", tmp_path / "lr.json")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "lr.json").read_text())["lr"] == {"dp-sgd": 0.1, IVON: 0.1}
    assert "dp-sgd: 0.1, of 0.1 (0.400), 1 (0.350)" in done.stdout
    table.write(tmp_path / "tuning.csv", tuned(accuracy)[:-1])
    with pytest.raises(ArgumentError, match="not all run"):
        pick(tmp_path, tmp_path / "lr.json")
    with pytest.raises(ArgumentError, match=r"holds no tuning\.csv"):
        pick(tmp_path / "none", tmp_path / "lr.json")


def test_commands(tmp_path):
    study = tmp_path / "s.yaml"
    study.write_text(
        "{name: s, dataset: digits, network: small, epochs: 1, delta: 1e-4, mc_samples: 2, split: tuning,"
        " grid: {batch_size: [256], noise_multiplier: [1], max_grad_norm: [1]}, methods: [{method: dp-sgd, lr: 0.1}]}"
    )
    done = invoke("study", "resolve", study, tmp_path / "plan.json")
    assert "1 runs of 1 epochs" in done.stdout
    out = tmp_path / "out"
    stopped = invoke("study", "run", tmp_path / "plan.json", "--out", out, "--minutes", "1e-9", "--block", "1", "-q")
    assert stopped.exit_code == 75
    assert "0 of 1 runs finished" in stopped.stdout
    assert "under way" in invoke("study", "status", out).stdout
    finished = invoke("study", "run", study, "--out", out, "-q", "--keep")
    assert finished.exit_code == 0, finished.output
    rows = table.read(out / "tuning.csv")
    assert [(r["split"], r["train_size"]) for r in rows] == [("tuning", 1297)]
    assert len(list((out / "posteriors").iterdir())) == 1
    for command in (
        ("figures", out),
        ("report", out),
        ("status", tmp_path),
        ("run", study, "--out", out, "--stack", "0"),
    ):
        refused = invoke("study", *command)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
    assert "imagenet" in invoke("data", "fetch", "imagenet", "--to", tmp_path).stderr


def test_variants_are_compared_not_averaged(results):
    made = table.read(results / "runs.csv")
    ivon = [r for r in made if r["method"] == IVON]
    other = [r | {"options": '{"ess": 500.0}', "id": "x" + r["id"], "mc_nll": r["mc_nll"] - 0.25} for r in ivon]
    table.write(results / "runs.csv", ivon + other)
    written = [p.name for p in write_report(results)]
    assert written == ["ablations.png", "summary.csv", "ablations.md"]
    page = (results / "ablations.md").read_text()
    lines = [x for x in page.splitlines() if x.startswith("| DP-IVON-Gradsq, ess = 500, lr 0.1 |")]
    assert len(lines) == 4  # two σ, two C
    assert all(x.split(" | ")[5].endswith("(-0.25)") and x.split(" | ")[1].endswith("(+0)") for x in lines)
    assert len(table.read(results / "summary.csv")) == 8
    figure = draw_ablations(ivon + other)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["ess = 500"]
    nll = [x for dots in figure.axes[1].containers for x in dots[0].get_xdata()]
    assert len(nll) == 4
    assert nll == pytest.approx([-0.25] * len(nll))
    refused = invoke("study", "figures", results)
    assert refused.exit_code == 2
    assert "several variants" in refused.stderr


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (("dp-adam", '{"ema": 0.5, "beta1": 0.8}', 0.1), "beta1 = 0.8"),
        (("dp-adam", '{"beta1": 0.9}', 0.3), "beta1 = 0.9, ema as by default, lr 0.3"),
        (("dp-adam", '{"ema": 0.5}', None), "a rate for each cell"),
        (("dp-adam", '{"ema": 0.50}', 0.1), "DP-Adam, ema = 0.5, lr 0.1"),  # written in another way
        (("dp-sgd", "", 0.1), "DP-SGD, lr 0.1"),
    ],
)
def test_what_a_variant_changes(variant, words):
    assert changes(variant, ("dp-adam", '{"ema": 0.5}', 0.1)) == words


def test_variants_are_held_against_what_the_plan_names_first(results):
    """Whichever was finished first; and after a temperature, where all have one."""
    made = [r for r in table.read(results / "runs.csv") if r["method"] == "dp-adam"]
    kept = ("method", "batch_size", "noise_multiplier", "max_grad_norm", "seed", "lr")
    runs = [PlannedRun(**{k: r[k] for k in kept}, options={"ema": ema}) for ema in (0.5, 0.25) for r in made]
    plan = Plan("order", "cifar10", "paper", "final", 1, 1e-5, 1, 0, tuple(runs))
    plan.write(results / "study.json")
    scores = {"tempered_accuracy": 0.5, "tempered_ece": 0.02}
    rows = [
        r | scores | {"options": json.dumps(dict(run.options)), "id": run.id, "tempered_nll": run.options["ema"]}
        for r, run in zip(made * 2, runs, strict=True)
    ]
    table.write(results / "runs.csv", rows[::-1])
    write_report(results)
    assert "difference from DP-Adam, ema = 0.5, lr 0.1." in (results / "ablations.md").read_text()
    nll = [x for dots in draw_ablations(rows).axes[1].containers for x in dots[0].get_xdata()]
    assert nll == pytest.approx([-0.25] * 4)


def test_what_lies_beside_a_study_goes_with_it(results, tmp_path):
    """The tuning that chose its rates, and the same methods in the ordinary loop; unless others are given."""
    alone = [r | {"stack_methods": 1, "stack_size": 1} for r in table.read(results / "runs.csv")]
    beside = results.with_name(f"{results.name}-check")
    beside.mkdir()
    mixed = [r | {"stack_methods": 3} for r in alone]
    table.write(results / "runs.csv", mixed)
    write_report(results)
    assert "| not tested | not tested |" in (results / "claims.md").read_text()
    table.write(beside / "hooks.csv", alone)
    write_report(results)
    assert "one by one" in (results / "claims.md").read_text()
    with pytest.raises(ArgumentError, match="holds no tuning"):
        write_report(results, tuning=beside)
    chosen = results.with_name(f"{results.name}-tuning")
    chosen.mkdir()
    table.write(chosen / "tuning.csv", tuned(lambda method, lr, sigma: lr))
    assert [p.name for p in write_report(results)][-1] == "tuning.md"


def test_plan_of_an_empty_study_is_refused():
    with pytest.raises(ArgumentError, match="nothing to run"):
        Plan("a", "digits", "small", "final", 1, 1e-5, 1, 0, ())


def test_a_rate_for_each_cell_makes_no_variants():
    """A method tuned cell by cell is one method; only several rates in one cell set variants apart."""
    base = [r for r in rows()[0] if r["seed"] == 0]
    by_cell = [r | {"lr": r["noise_multiplier"]} if r["method"] == "dp-sgd" else r for r in base]
    assert not is_ablation(by_cell)
    assert ("dp-sgd", "", None) in variants(by_cell)
    again = [r | {"options": '{"ema": 0.9}'} for r in by_cell if r["method"] == "dp-sgd"]
    again = [r | {"accuracy": r["accuracy"] + 0.1, "tempered_nll": 1.25} for r in again]
    page = ablations_page(by_cell + again, title="mixed", plan=None)
    assert page.count("| DP-SGD, ema = 0.9, a rate for each cell |") == len({cell(r) for r in base})
    assert "NLL, tempered" in page
    assert "1.25" in page
    two = by_cell + [r | {"lr": 77.0} for r in by_cell if r["method"] == "dp-sgd" and r["noise_multiplier"] == 1.0]
    assert is_ablation(two)
    assert {lr for m, _, lr in variants(two) if m == "dp-sgd"} == {77.0, *(r["noise_multiplier"] for r in base)}


def cell(row):
    return row["batch_size"], row["noise_multiplier"], row["max_grad_norm"]
