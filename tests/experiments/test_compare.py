"""The judge on made-up tables whose differences are known."""

from __future__ import annotations

import json
import math

import pytest
from duels import CHOSEN, DEFAULT, JITTER, SIGMAS, final, folder, plain, row, tuning
from experiments.strong_privacy.compare.cell import Contender
from experiments.strong_privacy.compare.field import RAW, Field
from experiments.strong_privacy.compare.remarks import remarks
from fields import SHIPPED, TUNED, at, bars, changed, preferring
from scipy import stats

from dpivon.errors import ArgumentError
from dpivon.methods import METHODS
from dpivon.recipe import WIDTH


def test_differences_are_paired_and_from_the_baseline_that_validation_prefers(field):
    """DP-SGD is a point below DP-Adam on the test set; validation prefers it, so that is what ours is held against."""
    found = field(final(), tuned=preferring("dp-sgd"))
    for cell in found.cells:
        best, by = found.best(cell, "accuracy")
        assert (best.contender.method, by) == ("dp-sgd", "validation data")
    bar = bars(found)["1a"]
    theirs = stats.ttest_rel([0.015 + 0.5 * j for j in JITTER], list(JITTER)).confidence_interval(0.95)
    assert bar.verdict == "met"
    assert bar.numbers.startswith(f"+1.50 [{100 * theirs.low:+.2f}, {100 * theirs.high:+.2f}] points over 3 cells")
    # DP-Adam's jitter is ours, so its pairs differ by exactly half a point, and this is told beside the verdict.
    assert "against the better on the test set +0.50 [+0.50, +0.50] points" in bar.numbers
    adam = bars(field(final(), tuned=preferring("dp-adam")))["1a"]
    assert adam.numbers.startswith("+0.50 [+0.50, +0.50] points")


def test_calibrations_best_baseline_is_by_validation_nll(field):
    """After the temperature, which may be another method than the one with the best accuracy."""
    rows = changed(preferring("dp-sgd"), lambda r: r["method"] == "dp-adam", tempered_nll=1.4)
    found = field(final(), tuned=rows)
    for cell in found.cells:
        assert found.best(cell, "accuracy")[0].contender.method == "dp-sgd"
        assert found.best(cell, "nll")[0].contender.method == "dp-adam"
    # NLL is 2.2 − 1.5 accuracy without the jitter: half a point of accuracy is .0075.
    assert bars(found)["2c"].numbers.startswith("-0.0075 [-0.0075, -0.0075]")


def test_without_validation_the_baseline_is_the_better_on_the_test_set(field):
    rows = final(rates={m: r for m, r in CHOSEN.items() if m != "dp-steady"})
    rows += [row("dp-steady", s, i, DEFAULT, plain("dp-steady", s, 3.5)) for s in SIGMAS for i in range(5)]
    found = field(rows)
    best, by = found.best(found.cells[0], "accuracy")
    assert best.contender.method == "dp-adam"
    assert "in its favour" in by
    assert TUNED not in found.contenders
    assert bars(found)["1a"].verdict == "met"


def test_validation_of_other_cells_with_the_same_noise_stands_in(field):
    """As for the paper's grid, which is tuned at one b and C."""
    found = field(final(b=512), tuned=preferring("dp-sgd"))
    best, by = found.best(found.cells[0], "accuracy")
    assert (best.contender.method, by) == ("dp-sgd", "validation data of other cells with this σ")
    assert found.entries[found.cells[0]][Contender("dp-adam")].chosen == "the only one in the table"


def test_a_tuning_study_at_the_same_epsilon_has_a_larger_sigma(field):
    rows = [r | {"noise_multiplier": 1.05 * r["noise_multiplier"]} for r in preferring("dp-sgd")]
    found = field(final(), tuned=rows)
    assert all(e.candidates == 3 for cell in found.cells for c, e in found.entries[cell].items() if not c.default)
    far = [r | {"noise_multiplier": 1.2 * r["noise_multiplier"]} for r in preferring("dp-sgd")]
    assert field(final(), tuned=far).best(found.cells[0], "accuracy")[1].startswith("the test set")


def test_of_several_rates_validation_chooses_for_each_cell(field):
    """The final table has them all; accuracy on the test set would have chosen another. Ties go to the lower NLL."""

    def validation(method, sigma, lr):
        return {"dp-sgd": {11.5: 0.3, 4.3: 1.0, 2.05: 3.0}[sigma], "dp-adam": 0.01, "dp-steady": 2.5}[method] == lr

    rows = []
    for method, rates in (
        ("dp-sgd", (0.3, 1.0, 3.0)),
        ("dp-adam", (0.001, 0.003, 0.01)),
        ("dp-steady", (2.5, 3.5, 10.0)),
    ):
        for lr in rates:
            for sigma in SIGMAS:
                scores = plain(method, sigma, lr)
                scores["accuracy"] += 0.05 * (lr == rates[1])
                rows += [row(method, sigma, seed, lr, scores) for seed in range(2)]
    found = field(rows, tuned=tuning(lambda *a: float(validation(*a))))
    chosen = {cell.noise_multiplier: found.entries[cell] for cell in found.cells}
    assert {s: e[Contender("dp-sgd")].lr for s, e in chosen.items()} == {11.5: 0.3, 4.3: 1.0, 2.05: 3.0}
    assert {(e[TUNED].lr, e[SHIPPED].lr) for e in chosen.values()} == {(2.5, 3.5)}
    tied = changed(tuning(lambda *a: 0.5), lambda r: r["lr"] == 0.3, nll=1.4)
    assert {found.tuning.ranked("dp-sgd", "", c)[0].lr for found in [field(rows, tuned=tied)] for c in found.cells} == {
        0.3
    }
    with pytest.raises(ArgumentError, match=r"has the rates 0\.3, 1, 3 at cifar10.*Give the tuning study"):
        field(rows)
    with pytest.raises(ArgumentError, match=r"none is chosen\. Run 3 too"):
        field([r for r in rows if r["lr"] != 3.0], tuned=tuning(lambda m, s, lr: lr))


def test_tuned_and_shipped_are_two_contenders_and_may_be_the_same_runs(field):
    found = field(final(), tuned=preferring("dp-sgd"))
    entries = found.entries[found.cells[0]]
    assert (entries[TUNED].lr, entries[SHIPPED].lr) == (10.0, DEFAULT)
    assert (entries[TUNED].candidates, entries[SHIPPED].candidates) == (3, 0)
    same = field(
        [r for r in final() if r["lr"] != 10.0],
        tuned=tuning(lambda m, s, lr: 0.5 + (lr == DEFAULT if m == "dp-steady" else lr == CHOSEN[m])),
    )
    entries = same.entries[same.cells[0]]
    assert entries[TUNED].rows == entries[SHIPPED].rows


def test_a_variant_is_not_tuned_by_the_methods_own_candidates(field):
    """Validation prefers the default, which the variant has too: it stays one contender, at its default."""
    bare = [row("dp-steady", s, 0, DEFAULT, plain("dp-steady", s, 3.5), options='{"trace": 0.0}') for s in SIGMAS]
    likes = tuning(lambda m, s, lr: 0.5 + (lr == DEFAULT if m == "dp-steady" else lr == CHOSEN[m]))
    found = field([r for r in final() if r["lr"] != 10.0] + bare, tuned=likes)
    assert [c for c in found.contenders if c.variant] == [Contender("dp-steady", True, '{"trace": 0.0}')]


def test_an_option_that_names_a_default_makes_no_other_contender(field):
    """The recipe is what has its width, whatever else the table holds of its method and in which order."""
    own = METHODS["dp-steady"].defaults["curvature"]
    theirs = [r for r in final() if r["method"] != "dp-steady"]

    def ours(options):
        return [row("dp-steady", s, 0, DEFAULT, plain("dp-steady", s, DEFAULT), options=options) for s in SIGMAS]

    bare, shipped = (json.dumps({"curvature": own, "trace": trace}) for trace in (0.0, WIDTH))
    found = field(theirs + ours(bare) + ours(shipped) + ours(""), tuned=preferring("dp-sgd"))
    assert {c.variant for c in found.contenders if c.method == "dp-steady"} == {
        "",
        '{"trace": 0.0}',
        '{"options": "none"}',
    }
    assert found.entries[found.cells[0]][SHIPPED].rows[0]["options"] == shipped
    with pytest.raises(ArgumentError, match="holds dp-steady twice at seed 0, perhaps once with a default"):
        field(theirs + ours(bare) + ours('{"trace": 0.0}'), tuned=preferring("dp-sgd"))


def test_a_run_that_does_not_know_its_steps_is_another_contender(field):
    """``steps`` is 0 by default, and then a stack fills in its plan: a run that says 0 is the ablation without it."""
    theirs = [r for r in final() if r["method"] != "dp-steady"]

    def ours(options):
        return [row("dp-steady", s, 0, DEFAULT, plain("dp-steady", s, DEFAULT), options=options) for s in SIGMAS]

    blind = json.dumps({"curvature": METHODS["dp-steady"].defaults["curvature"], "steps": 0.0, "trace": WIDTH})
    found = field(theirs + ours(json.dumps({"trace": WIDTH})) + ours(blind), tuned=preferring("dp-sgd"))
    assert {c.variant for c in found.contenders if c.method == "dp-steady"} == {"", '{"steps": 0.0, "trace": 0.25}'}


def test_a_table_that_lacks_something_is_refused(field):
    with pytest.raises(ArgumentError, match="holds a run without one of dataset"):
        field(changed(final(), at("dp-sgd", 4.3, 1), accuracy=None), tuned=preferring("dp-sgd"))


def test_effort_is_checked_and_edges_are_told(field):
    told = remarks(field(final(), tuned=preferring("dp-sgd")), [])
    assert told[0].startswith(
        "Equal numbers of candidates, checked: 3 learning rates for every method in each of 3 cells"
    )
    assert any(t.startswith("DP-Steady: the rate chosen is the largest or smallest") and "3 of 3" in t for t in told)
    assert not any(t.startswith("DP-SGD: the rate") for t in told)
    fewer = [r for r in preferring("dp-sgd") if (r["method"], r["lr"]) != ("dp-adam", 0.01)]
    told = remarks(field(final(), tuned=fewer), [])
    assert "Unequal tuning effort" in told[0]
    assert "DP-Adam 2, DP-SGD 3, DP-Steady 3" in told[0]


def test_a_diverged_run_counts_as_guessing_and_is_told(field):
    gone = dict.fromkeys(("accuracy", "mc_accuracy", "nll", "mc_nll", "tempered_nll", "tempered_accuracy"), math.nan)
    rows = changed(final(), at("dp-steady", 4.3, 2, DEFAULT), **gone)
    found = field(rows, tuned=preferring("dp-adam"))
    cell = next(c for c in found.cells if c.noise_multiplier == 4.3)
    entry = found.entries[cell][SHIPPED]
    scores = found.scores(entry, RAW, "accuracy")
    assert scores[2] == 0.1
    assert found.scores(entry, RAW, "nll")[2] == math.log(10)
    mean = (sum(scores[s] - (0.56 + 0.5 * JITTER[s]) for s in range(5))) / 5
    assert mean < -0.08
    bar = bars(found)["1b"]
    assert bar.verdict.startswith("not met")
    assert f"worst {100 * mean:+.2f}" in bar.numbers
    assert any("**Diverged**: DP-Steady, default rate" in t and "repetition 2" in t for t in remarks(found, []))
    # A baseline that diverges is held to the same, and a run far worse than guessing is not better off by diverging.
    worse = changed(rows, at("dp-sgd", 4.3, 0), nll=7.0)
    found = field(worse, tuned=preferring("dp-adam"))
    assert found.scores(found.entries[cell][SHIPPED], RAW, "nll")[2] == 7.0


def test_a_missing_run_of_ours_counts_and_one_of_theirs_leaves_the_pair_out(field, tmp_path):
    rows = final()
    found = field(rows, tuned=preferring("dp-adam"))  # the plan knows all runs
    lost = (at("dp-steady", 4.3, 1, DEFAULT), at("dp-adam", 4.3, 3))
    kept = [r for r in rows if not any(where(r) for where in lost)]
    folder(tmp_path / "out-0", kept, plan=False)  # the plan stays
    found = Field([tmp_path / "out-0"], [tmp_path / "tuning"], "dp-steady", ("dp-sgd", "dp-adam"))
    cell = next(c for c in found.cells if c.noise_multiplier == 4.3)
    ours, theirs = found.entries[cell][SHIPPED], found.entries[cell][Contender("dp-adam")]
    assert (ours.missing, theirs.missing) == ([1], [3])
    differences = found.differences(ours, theirs, RAW, "accuracy")
    assert sorted(differences) == [0, 1, 2, 4]
    assert differences[1] == pytest.approx(0.1 - (0.56 + 0.5 * JITTER[1]))
    told = " ".join(remarks(found, []))
    assert "**Not finished**: `out-0` has 58 of 60 runs" in told
    assert "**Missing**: DP-Steady, default rate" in told
    assert "repetition 3. Left out of the pairs" in told


def test_without_a_plan_the_others_repetitions_are_what_was_planned(field):
    rows = [r for r in final() if not at("dp-steady", 4.3, 1, DEFAULT)(r)]
    found = field(rows, tuned=preferring("dp-adam"), plan=False)
    cell = next(c for c in found.cells if c.noise_multiplier == 4.3)
    assert found.entries[cell][SHIPPED].missing == [1]


def test_runs_with_views_are_not_held_against_runs_without(field):
    """Ours on augmented images, the baselines on plain ones: two cells, in neither of which there is a comparison."""
    views = '{"crop": 4, "flip": true, "padding": "reflect", "views": 4}'
    with_views = [r | {"augment": views} for r in final() if r["method"] == "dp-steady"]
    without = [r for r in final() if r["method"] != "dp-steady"]
    found = field(with_views, without, tuned=preferring("dp-adam"), plan=False)
    assert len(found.cells) == 2 * len(SIGMAS)
    judged = bars(found)
    assert {judged[n].verdict for n in ("1a", "1b", "1c", "1d", "2b", "2c")} == {"not measured"}
    named = next(c for c in found.cells if c.setting.augment)
    assert "crop = 4" in named.label
    # Rates that were chosen without views were not chosen here.
    assert found.entries[named][TUNED].candidates == 0
