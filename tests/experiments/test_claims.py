"""Verdicts follow the numbers: each flips when the table is bent the other way."""

from __future__ import annotations

import math

import pytest
from experiments.paper.claims import DEPENDS, NOT_SUPPORTED, SUPPORTED, UNTESTED, Claim, Claims, Comparison, regime
from experiments.paper.claims_page import claims_page
from experiments.paper.sentences import SENTENCES

from dpivon.study.plan.plan import Plan, PlannedRun
from study.tables import IVON, paper_like, rows


def verdicts(table, diagnostics=(), averaged=False):
    return {c.number: c.verdict for c in Claims(table, diagnostics, averaged=averaged).all()}


def plan_of(table, **changes):
    keys = ("method", "batch_size", "noise_multiplier", "max_grad_norm", "seed", "lr")
    runs = tuple(PlannedRun(*(row[k] for k in keys)) for row in table)
    facts = {"name": "paper", "dataset": "cifar10", "network": "paper", "split": "final", "epochs": 150}
    return Plan(**facts | {"delta": 1e-5, "mc_samples": 8, "seed": 0, "runs": runs} | changes)


def test_a_table_that_does_what_the_paper_says_supports_it():
    found = verdicts(*rows())
    assert found.keys() == SENTENCES.keys()
    unlike = {number: verdict for number, verdict in found.items() if verdict != SUPPORTED}
    assert unlike == {}


def test_each_claim_flips_with_its_numbers():
    def reversed_roles(method, b, sigma, c):
        other = {IVON: "dp-sgd", "dp-sgd": IVON, "dp-adam": IVON}[method]
        return paper_like(other, b, sigma, c)

    found = verdicts(*rows(reversed_roles, h_end=61.0, share_end=0.3))
    for number in ("A3", "N3", "E1", "E2", "D2", "D3", "D4"):
        assert found[number] == NOT_SUPPORTED, number


def test_batch_size_claims_flip_when_small_batches_win():
    def upside_down(method, b, sigma, c):
        return paper_like(method, 128 * 512 // b, sigma, 200 / c)

    found = verdicts(*rows(upside_down))
    for number in ("A4", "A5", "N4", "N5", "N2", "E3"):
        assert found[number] == NOT_SUPPORTED, number


def test_the_average_is_judged_apart_from_the_mean():
    table, diagnostics = rows()
    for row in table:
        if row["method"] == IVON:
            row["mc_accuracy"] = 0.1
    assert verdicts(table, diagnostics)["A1"] == SUPPORTED
    assert verdicts(table, diagnostics, averaged=True)["A1"] == NOT_SUPPORTED


def test_a_run_that_diverged_counts_against_its_method():
    table, diagnostics = rows()
    for row in table:
        if row["method"] == IVON and row["seed"] == 0 and row["noise_multiplier"] == 0.1:
            row |= dict.fromkeys(("accuracy", "nll", "ece", "brier"), math.nan)
    found = verdicts(table, diagnostics)
    assert found["A1"] == NOT_SUPPORTED
    assert found["N1"] == NOT_SUPPORTED


def test_cost_is_only_judged_where_stacks_held_one_method():
    slow, _ = rows()
    for row in slow:
        row["seconds"] = 20.0 if row["method"] == IVON else 10.0
    assert verdicts(slow)["D1"] == NOT_SUPPORTED
    mixed, diagnostics = rows(stack_methods=3)
    assert verdicts(mixed)["D1"] == UNTESTED
    alone = [r | {"stack_methods": 1, "stack_size": 1, "seconds": 10.0, "steps": 50} for r in mixed]
    (cost,) = [c for c in Claims(mixed, diagnostics, averaged=False, timed=alone).all() if c.number == "D1"]
    assert cost.verdict == SUPPORTED
    assert {(c.where, c.numbers) for c in cost.comparisons} == {
        (f"b = {b}, one by one", "200 against 200 ms a step") for b in (128, 256, 512)
    }


def test_cost_is_not_judged_across_loops_or_machines():
    """IVON is twice as slow wherever both were timed, but was timed more often where everything is fast."""
    mixed, diagnostics = rows(stack_methods=3)
    runs = [r | {"stack_methods": 1, "stack_size": 1, "steps": 1} for r in mixed if r["batch_size"] == 128]
    mine = [r for r in runs if r["method"] == IVON]
    theirs = next(r for r in runs if r["method"] == "dp-adam")
    slow = [mine[0] | {"seconds": 40.0, "hardware": "old"}, theirs | {"seconds": 20.0, "hardware": "old"}]
    fast = [*(r | {"seconds": 2.0, "hardware": "new"} for r in mine), theirs | {"seconds": 1.0, "hardware": "new"}]
    loop = [*(r | {"seconds": 4.0, "hardware": "new"} for r in mine), theirs | {"seconds": 2.0, "hardware": "new"}]
    (cost,) = [c for c in Claims([*slow, *fast], diagnostics, averaged=False, timed=loop).all() if c.number == "D1"]
    assert {(c.where.removeprefix("b = 128, one by one, "), c.numbers) for c in cost.comparisons} == {
        ("new", "2e+03 against 1e+03 ms a step"),
        ("new, in the ordinary loop", "4e+03 against 2e+03 ms a step"),
        ("old", "4e+04 against 2e+04 ms a step"),
    }
    assert not any(c.holds for c in cost.comparisons)


def test_verdicts_count_comparisons():
    def claim(held, of):
        return Claim("A1", "", tuple(Comparison("", i < held, "") for i in range(of))).verdict

    assert [claim(h, 6) for h in range(7)] == [NOT_SUPPORTED] * 2 + [DEPENDS] * 3 + [SUPPORTED] * 2
    assert claim(0, 0) == UNTESTED
    assert [regime(s) for s in (0.1, 1, 5)] == ["weak", "medium", "strong"]


def test_the_page_names_what_fails_with_its_numbers():
    def one_bad_cell(method, b, sigma, c):
        a, n, e = paper_like(method, b, sigma, c)
        return (a - 0.3 if (method, b, sigma, c) == (IVON, 128, 0.1, 20.0) else a), n, e

    table, diagnostics = rows(one_bad_cell)
    page = claims_page(
        table, diagnostics, title="paper", plan=plan_of(table, assumptions=("N_ess = N",)), command="test"
    )
    assert "| A1 | DP-IVON-Gradsq is able to achieve competitive accuracy in the weak-privacy regime | " in page
    assert "supported (5 of 6)" in page
    line = next(x for x in page.splitlines() if x.startswith("| b = 128, σ = 0.1, C = 20 | fails"))
    assert "against 0.7" in line
    assert "(DP-SGD)" in line
    assert "- N_ess = N" in page
    assert "weak privacy: ε from" in page
    assert "not the paper's experiment" not in page
    assert "missing" not in page
    assert "This is digits" in claims_page(
        table, diagnostics, title="quick", plan=plan_of(table, dataset="digits"), command="t"
    )


def test_a_page_says_which_planned_runs_it_lacks():
    table, diagnostics = rows()
    plan = plan_of(table)
    some = [row for row in table if row["batch_size"] != 128]
    page = claims_page(some, diagnostics, title="paper", plan=plan, command="test")
    assert "**90 of 270 planned runs are missing: all with b = 128.**" in page
    one = claims_page(table[1:], diagnostics, title="paper", plan=plan, command="test")
    assert "**1 of 270 planned runs are missing.**" in one


@pytest.mark.parametrize("method", ["dp-sgd", IVON])
def test_a_table_with_holes_is_judged_by_what_it_has(method):
    table, diagnostics = rows()
    found = verdicts([row for row in table if row["method"] != method], diagnostics)
    assert found["A1"] in (SUPPORTED, UNTESTED)
    assert verdicts([table[0]]) == dict.fromkeys(SENTENCES, UNTESTED)
