"""The bars on made-up tables: each is met exactly where its threshold says."""

from __future__ import annotations

import math

import pytest
from duels import DEFAULT, SIGMAS, final, plain, row
from experiments.strong_privacy.compare.bars import judge
from experiments.strong_privacy.compare.remarks import remarks
from experiments.strong_privacy.compare.rollup import rollup
from experiments.strong_privacy.compare.scopes import TITLES, scopes
from fields import SHIPPED, TUNED, bars, changed, preferring, published

from dpivon.errors import ArgumentError


def test_every_bar_of_a_good_recipe(field):
    """By half a point at every ε, all repetitions alike: everything is met, and shown."""
    rows = final()
    rows += [
        row("dp-steady", s, i, DEFAULT, plain("dp-steady", s, 3.5) | {"nll": 2.5}, options='{"trace": 0.0}')
        for s in SIGMAS
        for i in range(5)
    ]
    found = bars(field(rows, tuned=preferring("dp-adam")))
    assert [b.verdict for n, b in sorted(found.items())] == ["met", "met", "met", "counted", "met", "met", "met", "met"]
    assert found["1c"].numbers.split("; ")[1] == "+0.50 [+0.50, +0.50] points against DP-Adam"
    assert found["1d"].numbers == "3 won, 0 lost, 0 undecided; the mean is higher in 3 of 3"
    assert found["2a"].numbers.startswith("largest 0.0200 [0.0200, 0.0200] at ε = 7.5")
    assert "in 0 of 3" in found["2b"].numbers


def test_the_area_is_the_hand_made_one(field):
    def scores(method, sigma, lr):
        level = {11.5: 0.4, 4.3: 0.5, 2.05: 0.7}[sigma] if method == "dp-steady" else 0.5
        return {"accuracy": level, "nll": 1.5, "ece": 0.02}

    found = bars(field(final(scores, spread=0.0), tuned=preferring("dp-adam")))
    x = [math.log(SIGMAS[s][0]) for s in (11.5, 4.3, 2.05)]
    area = ((x[1] - x[0]) * 0.45 + (x[2] - x[1]) * 0.6) / (x[2] - x[0])
    assert found["1c"].numbers.startswith(f"{100 * (area - 0.5):+.2f} ")


@pytest.mark.parametrize(
    ("shift", "verdicts"),
    [
        (-0.004, {"1a": "met", "1b": "met", "1c": "not met"}),
        (-0.006, {"1a": "not met", "1b": "met", "1c": "not met"}),
        (-0.021, {"1a": "not met", "1b": "not met", "1c": "not met"}),
        (0.001, {"1a": "met", "1b": "met", "1c": "met"}),
    ],
)
def test_thresholds_of_accuracy(field, shift, verdicts):
    def scores(method, sigma, lr):
        return plain("dp-adam", sigma, lr) | {"accuracy": 0.5 + shift * (method == "dp-steady")}

    found = bars(field(final(scores, spread=0.0), tuned=preferring("dp-adam")))
    assert {n: found[n].verdict for n in verdicts} == verdicts
    counted = "not met" not in verdicts.values()
    assert found["2a"].verdict == ("met" if counted else "not counted (by itself met)")


def test_one_bad_cell_is_seen_though_the_mean_is_good(field):
    def scores(method, sigma, lr):
        shift = {11.5: -0.03, 4.3: 0.03, 2.05: 0.03}[sigma] * (method == "dp-steady")
        return plain("dp-adam", sigma, lr) | {"accuracy": 0.5 + shift}

    found = field(final(scores), tuned=preferring("dp-adam"))
    assert {n: bars(found)[n].verdict for n in ("1a", "1b")} == {"1a": "met", "1b": "not met"}
    assert "worst -3.00" in bars(found)["1b"].numbers
    assert "ε = 1," in bars(found)["1b"].numbers
    assert bars(found)["1d"].numbers.startswith("2 won, 1 lost, 0 undecided")


def test_thresholds_of_calibration(field):
    def judged(ece, gap):
        rows = changed(final(), lambda r: r["method"] == "dp-steady" and r["noise_multiplier"] == 4.3, tempered_ece=ece)
        rows = [r | {"tempered_nll": 1.5 + gap * (r["method"] == "dp-steady")} for r in rows]
        found = bars(field(rows, tuned=preferring("dp-adam")))
        return [found[n].verdict for n in ("2a", "2b", "2c")]

    assert judged(0.03, -0.001) == ["met", "met", "met"]
    assert judged(0.031, 0.0) == ["not met", "met", "not met"]
    assert judged(0.0, 0.001) == ["met", "not met", "not met"]


def test_averaging_is_credited_only_beyond_chance(field):
    def judged(gaps):
        bare = [
            row("dp-steady", s, i, DEFAULT, plain("dp-steady", s, 3.5), options='{"trace": 0.0}')
            for s in SIGMAS
            for i in range(5)
        ]
        bare = [r | {"tempered_nll": r["tempered_nll"] + gaps[r["seed"]]} for r in bare]
        return bars(field(final() + bare, tuned=preferring("dp-adam")))["2d"]

    assert judged([0.01, 0.011, 0.009, 0.01, 0.012]).verdict == "met"
    chance = judged([0.03, -0.02, 0.01, -0.005, 0.0])
    assert chance.verdict == "not met"
    assert "it buys nothing that is shown here" in chance.numbers
    assert bars(field(final(), tuned=preferring("dp-adam")))["2d"].verdict == "not measured"


def test_an_area_is_shown_only_if_it_is_above_each_baseline_beyond_chance(field):
    """DP-SGD's own jitter is as large as its distance here; DP-Adam's cancels."""

    def scores(method, sigma, lr):
        return plain("dp-adam", sigma, lr) | {"accuracy": 0.5 + 0.001 * (method == "dp-steady")}

    bar = bars(field(final(scores), tuned=preferring("dp-adam")))["1c"]
    assert bar.verdict == "met, within chance"
    assert bar.numbers.endswith("+0.10 [+0.10, +0.10] points against DP-Adam")


def test_one_repetition_proves_nothing(field):
    found = bars(field(final(seeds=1), tuned=preferring("dp-adam")))
    assert found["1a"].verdict == found["1d"].verdict == "not measured"
    assert found["1c"].verdict == "met, within chance"


def test_what_a_second_network_leaves_out_is_said(field):
    """One ε of another network, one seed, and worse: no area, fewer repetitions for the mean, and a small model too."""
    one = [r | {"network": "compact"} for r in final(seeds=1) if r["noise_multiplier"] == 4.3]
    worse = [r | {"accuracy": 0.3, "mc_accuracy": 0.3} if r["method"] == "dp-steady" else r for r in one]
    found = field(final(), worse, tuned=preferring("dp-adam"))
    judged = bars(found)
    assert judged["1a"].verdict == "not measured"
    assert judged["1a"].numbers == "over the 1 of 5 repetitions that every cell has"
    assert "1 of 4 cells lie on no curve" in judged["1c"].numbers
    small = [b for b in judge(found, scopes(found), SHIPPED) if b.number == "4a" and "ε = 3 in all" in b.scope]
    assert [b.numbers.rpartition("; ")[2] for b in small] == ["279,882 weights", "357,258 weights"]
    # With validation data for both there is a choice, and one of them is judged.
    tuned = preferring("dp-steady") + [r | {"network": "compact"} for r in preferring("dp-adam", margin=0.3)]
    both = judge(field(final(), worse, tuned=tuned), scopes(found), TUNED)
    assert [b.numbers.rpartition("; ")[2] for b in both if b.number == "4a"].count("357,258 weights") == 2


def test_what_is_not_met_in_a_part_says_so_too(field):
    rows = [r for r in final() if r["noise_multiplier"] != 11.5]
    short = [
        r | {"accuracy": r["accuracy"] - 0.1, "mc_accuracy": 0.3} if r["method"] == "dp-steady" else r for r in rows
    ]
    found = bars(field(short, tuned=preferring("dp-adam")))
    assert found["1a"].verdict == "not met"
    assert all(found[n].numbers.endswith("nothing at ε = 1") for n in ("1a", "1b", "1c", "1d"))


def test_a_part_of_a_scope_is_not_the_whole(field):
    rows = [r for r in final() if r["noise_multiplier"] != 11.5]
    found = field(rows, tuned=preferring("dp-adam"))
    bar = bars(found)["1a"]
    assert bar.verdict == "met where measured"
    assert bar.numbers.endswith("nothing at ε = 1")
    short = {(name, where): verdict for name, where, verdict in rollup(judge(found, scopes(found), SHIPPED))}
    assert short["1. accuracy", TITLES["epsilon"]] == "met where measured"
    assert short["5. other data: calibration", TITLES["fashion-mnist"]] == "not measured"
    assert short["3. the paper's own setting", TITLES["paper"]] == "not measured"


def test_the_papers_own_setting_from_two_folders(field):
    """The recipe in one folder without tuning, the others in another, without temperatures."""

    def rows(methods, without=()):
        out = []
        for b in (128, 256, 512):
            for c in (10.0, 20.0):
                for sigma, eps in ((0.1, 3000.0), (1.0, 5.0), (5.0, 0.7), (10.0, 0.3), (15.0, 0.2)):
                    for method, lr, level in methods:
                        accuracy = level - (0.3 if method == "dp-ivon-gradsq" and eps < 3 else 0.0)
                        scores = {"accuracy": accuracy, "nll": 1.5, "ece": 0.02}
                        for seed in range(3):
                            changes = {"epsilon": (eps, eps), **dict.fromkeys(without)}
                            made = row(method, sigma, seed, lr, scores, b=b, c=c, epochs=150, **changes)
                            made["accuracy"] += 0.001 * seed * (method == "dp-steady")
                            out.append(made | {"mc_accuracy": made["accuracy"]} if made["mc_accuracy"] else made)
        return out

    bare = ("temperature", "epsilon_tempered", "tempered_nll", "tempered_ece", "tempered_accuracy")
    others = [("dp-sgd", 0.01, 0.6), ("dp-adam", 1e-4, 0.59), ("dp-ivon-gradsq", 0.1, 0.61)]
    found = field(rows([("dp-steady", 3.5, 0.605)]), rows(others, bare))
    judged = bars(found, scope="paper")
    assert judged["3a"].verdict == "met"
    assert judged["3a"].numbers.startswith("+0.60 ")
    assert judged["3a"].numbers.endswith("(mean of 6 curves)")
    assert judged["3b"].verdict == "met"
    assert judged["3b"].numbers.startswith("+29.60 ")
    assert judged["3b"].numbers.endswith("over 18 cells")  # three σ of five have ε < 3
    assert judged["2a"].verdict == "met"
    assert judged["2b"].verdict == judged["2c"].verdict == "not measured"
    assert any("Without a private temperature" in t and "DP-SGD in 30 cells" in t for t in remarks(found, []))
    with pytest.raises(ArgumentError, match="stands in two folders"):
        field(rows(others), rows(others))

    def part(keep):
        ours = [r for r in rows([("dp-steady", 3.5, 0.605)]) if keep(r)]
        return bars(field(ours, rows(others, bare)), scope="paper")["3a"]

    whole_settings = part(lambda r: r["batch_size"] == 512)
    assert whole_settings.verdict == "met where measured"
    assert "(mean of 2 curves); 20 of 30 cells cannot be compared" in whole_settings.numbers
    # A curve with a gap has no area, and no other stands in for it.
    assert part(lambda r: r["batch_size"] == 512 or r["noise_multiplier"] == 1.0).verdict == "not measured"


def test_the_leaderboard_counts_only_what_is_within_epsilon_and_small(field):
    def scores(method, sigma, lr):
        return {"accuracy": 0.65, "nll": 1.31, "ece": 0.02}

    rows = final(scores, spread=0.0)
    found = field(rows, tuned=preferring("dp-adam"))
    assert (published(found, 3)["4a"].verdict, published(found, 3)["4b"].verdict) == ("met", "not met")
    assert "357,258 weights" in published(found, 3)["4a"].numbers
    assert published(found, 7.5)["4a"].verdict == "not met"
    above = [r | {"epsilon_tempered": 3.01} if r["noise_multiplier"] == 4.3 else r for r in rows]
    assert published(field(above, tuned=preferring("dp-adam")), 3)["4a"].verdict == "not measured"
    assert published(field(rows, tuned=preferring("dp-adam"), plan=False), 3)["4a"].verdict == "met"
