"""Every committed row says by what it was made; and ε of rows without a ledger follows from the releases that they state."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from experiments.leaderboard.priors.predictions import RESERVE
from experiments.posterior import run as posterior
from experiments.tables.run import ROWS, delta

from dpivon.data import load_digits
from dpivon.demo import BATCH_SIZE, DELTA, EPOCHS
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.temperature import temperature_cost, temperature_noise

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
#: Which columns say when, where and by which code; one of each is enough.
MADE = (("seed",), ("device", "hardware"), ("torch", "software"), ("commit",))
#: Of other rows (their ids are there), of priors without a private run, and what was aimed at.
DERIVED = {"summary", "diagnostics", "comparison", "bars", "robustness", "learning", "wide-learning", "probe"}
#: Made before rows had a commit; their pages say up to which one.
WITHOUT_COMMIT = {"beyond-quick/runs.csv", "beyond-quick-tuning/tuning.csv"}
#: Their runs were made through a front door, and the rows keep ε alone.
BUDGET_ALONE = {"tables/results/doors.csv", "leaderboard/priors/results/digits.csv", "tables/results/references.csv"}
Row = dict[str, str]
Releases = tuple[tuple[float, float, int], ...]


def read(path: str) -> list[Row]:
    with (EXPERIMENTS / path).open(newline="") as file:
        return list(csv.DictReader(file))


def tables() -> list[str]:
    found = (p for p in EXPERIMENTS.rglob("results/**/*.csv") if p.stem not in DERIVED)
    return sorted(p.relative_to(EXPERIMENTS).as_posix() for p in found)


@pytest.mark.parametrize("path", tables())
def test_every_row_says_by_what_it_was_made(path: str) -> None:
    without = path.removeprefix(path.rsplit("/", 2)[0] + "/") in WITHOUT_COMMIT
    for row in read(path):
        missing = [names for names in MADE if not any(row.get(name) for name in names)]
        assert missing == ([("commit",)] if without else []), row


@cache
def cost(releases: Releases, at: float, accountant: str) -> float:
    return epsilon(list(releases), at, accountant)


def of_posterior(row: Row) -> tuple[Releases, float, str]:
    steps = math.ceil(50_000 / posterior.BATCH) * posterior.EPOCHS
    many = posterior.MEMBERS if row["predictor"] == "ensemble" else 1
    sigma = float(row["noise_multiplier"])
    return ((sigma, posterior.BATCH / 50_000, many * steps), RESERVE), posterior.DELTA, "rdp"


def of_priors(row: Row) -> tuple[Releases, float, str]:
    own = (float(row["noise_multiplier"]), int(row["batch"]) / int(row["train_size"]), int(row["steps"]))
    first = row["commit"] == "27c9fc3"  # the first round, in which no map was charged
    return (own,) if first else (own, RESERVE), float(row["delta"]), "rdp"


def of_wide(row: Row) -> tuple[Releases, float, str]:
    rate = int(row["batch"]) / int(row["train_size"])
    head = (float(row["head_noise_multiplier"]), 1.0, int(row["head_steps"]))
    own = (float(row["noise_multiplier"]), rate, int(row["steps"]))
    return (own, head, RESERVE), float(row["delta"]), row["accountant"]


def of_heads(row: Row) -> tuple[Releases, float, str]:
    return ((float(row["noise_multiplier"]), 1.0, int(row["steps"])), RESERVE), float(row["delta"]), row["accountant"]


def of_linear(row: Row) -> tuple[Releases, float, str]:
    at, rate = float(row["delta"]), int(row["batch"]) / int(row["train_size"])
    own = (float(row["noise_multiplier"]), rate, int(row["steps"]))
    temperature = temperature_cost(temperature_noise(0.1 * float(row["epsilon"]), at))
    return (own, temperature) if row["method"] == "dp-steady" else (own,), at, "pld"


def of_flat(row: Row) -> tuple[Releases, float, str]:
    own = (float(row["noise_multiplier"]), int(row["batch"]) / int(row["train_size"]), int(row["steps"]))
    return (own, (float(row["head_noise_multiplier"]), 1.0, 160), RESERVE), float(row["delta"]), row["accountant"]


def of_small(row: Row) -> tuple[Releases, float, str]:
    rate = min(1.0, int(row["batch"]) / int(row["train_size"]))
    return ((float(row["noise_multiplier"]), rate, int(row["steps"])),), float(row["delta"]), "rdp"


def of_tables(row: Row) -> tuple[Releases, float, str]:
    n = ROWS[row["table"]]
    return ((float(row["sigma"]), min(1.0, int(row["batch"]) / n), int(row["steps"])),), delta(n), "pld"


def of_default(row: Row) -> tuple[Releases, float, str]:
    rate = min(1.0, int(row["batch_size"]) / int(row["examples"]))
    return ((float(row["noise_multiplier"]), rate, int(row["steps"])),), float(row["delta"]), "pld"


def of_digits(row: Row) -> tuple[Releases, float, str]:
    n = len(load_digits().train)
    steps = EPOCHS * math.ceil(n / BATCH_SIZE)
    accountant = "pld" if row.get("part") == "ensemble" else "rdp"
    return ((float(row["noise_multiplier"]), BATCH_SIZE / n, steps),), DELTA, accountant


STATED = {
    "posterior/results/rows.csv": of_posterior,
    "posterior/results/small.csv": of_small,
    "leaderboard/priors/results/runs.csv": of_priors,
    "leaderboard/wide/results/wide-runs.csv": of_wide,
    "leaderboard/wide/results/wide-heads.csv": of_heads,
    "leaderboard/results/linear.csv": of_linear,
    "leaderboard/results/flat.csv": of_flat,
    "tables/results/final.csv": of_tables,
    "tables/results/networks.csv": of_tables,
    "tables/results/default.csv": of_default,
    "digits/results/rows.csv": of_digits,
    "leaderboard/priors/results/digits-worth.csv": of_digits,
}
#: Rows of a run whose own row is in another table.
SECOND = {
    "leaderboard/priors/results/predictions.csv",
    "posterior/results/sets.csv",
    "posterior/results/small-sets.csv",
    "paper/results/paper-check/hooks.csv",
}


def budgets(path: str) -> Iterator[tuple[float, tuple[Releases, float, str]]]:
    """What each row says it spent (its target, where that is all it says), and its releases; equal ones once."""
    seen = {(float(row.get("epsilon_spent") or row["epsilon"]), STATED[path](row)) for row in read(path)}
    yield from sorted(seen, key=repr)


BY_PLD = pytest.param("tables/results/default.csv", marks=pytest.mark.slow)  # which takes its time


@pytest.mark.parametrize("path", [*(p for p in STATED if STATED[p] not in (of_tables, of_default)), BY_PLD])
def test_every_row_spent_what_its_releases_cost(path: str) -> None:
    for said, (releases, at, accountant) in budgets(path):
        assert cost(releases, at, accountant) == pytest.approx(said, rel=1e-3), releases


@pytest.mark.slow
@pytest.mark.parametrize(("path", "by_rdp"), [("tables/results/final.csv", 17), ("tables/results/networks.csv", 0)])
def test_every_row_of_a_table_spent_its_target_by_pld_or_by_rdp(path: str, by_rdp: int) -> None:
    """By RDP it has more noise than its ε asks for. The page says how many have."""
    below = 0
    for said, (releases, at, _) in budgets(path):
        if cost(releases, at, "pld") != pytest.approx(said, rel=2e-3):
            assert cost(releases, at, "rdp") == pytest.approx(said, rel=2e-3), releases
            below += len({row["table"] for row in read(path) if STATED[path](row)[0] == releases})
    assert below == by_rdp


def test_no_table_of_runs_is_left_out() -> None:
    studies = {p for p in tables() if (EXPERIMENTS / p).with_name("study.json").is_file()}  # test_committed_ledgers.py
    assert set(tables()) == studies | STATED.keys() | BUDGET_ALONE | (SECOND & set(tables()))
